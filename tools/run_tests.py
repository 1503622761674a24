"""Run the tests in three processes at a time: most of them wait for processes more than they compute.

    python tools/run_tests.py [PYTEST ARGUMENTS ...]

Each part is a pytest of its own over some of the folders of ``tests``; its output is printed when it has ended, so
that parts do not mix. Exit code 1 if a part fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
#: Folders that make up a part; the long parts come first, the short ones fill what time is left. What is in none of
#: them goes with the one that is empty.
PARTS = (("multiprocessing",), ("data", "memory"), ("launcher",), ("cli", "examples"), (), ("channel", "collectives"))
#: Parts that run at the same time.
AT_A_TIME = 3
#: pytest's exit code where its arguments select nothing.
NO_TESTS = 5
#: Seconds after which a part is given up.
DEADLINE = 1500


def main() -> int:
    arguments = sys.argv[1:]
    turns = threading.Semaphore(AT_A_TIME)
    codes: dict[int, int] = {}
    running: list[subprocess.Popen[bytes]] = []
    printing = threading.Lock()

    def run(number: int, paths: list[str]) -> None:
        with turns, tempfile.TemporaryFile("w+") as output:
            began = time.monotonic()
            command = [sys.executable, "-m", "pytest", *arguments, *paths]
            # A session of its own: the leak check takes a session's orphans for those of the test that runs.
            pytest = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            running.append(pytest)
            try:
                codes[number] = pytest.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                codes[number] = 124
                _end(pytest)
            output.seek(0)
            with printing:
                print(f"----- {' '.join(paths)}: exit code {codes[number]} after {time.monotonic() - began:.0f} s")
                print(output.read(), flush=True)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in enumerate(_paths())]
    for thread in threads:
        thread.start()
        time.sleep(0.1)  # in this order
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        for pytest in running:
            _end(pytest)
        raise
    found = [code for code in codes.values() if code != NO_TESTS]
    return 1 if any(found) or not found else 0


def _end(pytest: subprocess.Popen[bytes]) -> None:
    """Ctrl-C does not reach it, being in another session."""
    if pytest.poll() is None:
        os.killpg(pytest.pid, signal.SIGTERM)


def _paths() -> list[list[str]]:
    taken = {folder for part in PARTS for folder in part}
    rest = sorted(
        path.name
        for path in TESTS.iterdir()
        if path.name not in taken and (path.is_dir() or path.name.startswith("test_")) and path.name[0] not in "._"
    )
    named = [list(part) or rest for part in PARTS]
    return [[str((TESTS / name).relative_to(ROOT)) for name in part if (TESTS / name).exists()] for part in named]


if __name__ == "__main__":
    sys.exit(main())
