"""Run every benchmark, each in a process of its own, then draw the pictures.

python -m benchmarks [--repeats N] [--out FOLDER] [NAME ...]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks import NAMES, plots
from benchmarks.harness import REPEATS, RESULTS, ROOT, console

#: Seconds after which a benchmark is given up, more than ten times what the slowest takes.
DEADLINE = 1800


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for the JSON; pictures only for the usual one"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    failed = []
    for name in options.names or NAMES:
        console.rule(name)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--repeats", str(options.repeats)]
        command += ["--out", str(options.out.resolve())]
        code = subprocess.run(command, cwd=ROOT, timeout=DEADLINE, check=False).returncode
        if code:
            failed.append(f"{name} ({signal.Signals(-code).name if code < 0 else code})")
    pictures = plots.ASSETS if options.out.resolve() == RESULTS else options.out
    plots.draw_all(options.out, pictures)
    if failed:
        console.print(f"[bold red]failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
