"""Write the table of measured figures into the README and the guide, from the JSON of the benchmarks.

    python tools/readme_table.py            write it between the markers
    python tools/readme_table.py --check    change nothing; exit code 1 if a table is stale

    python tools/readme_table.py --results FOLDER   show the table of a trial run; never writes

A table stands between the lines ``<!-- bench:begin GROUP -->`` and ``<!-- bench:end -->``, where the group is one of
`benchmarks.GROUPS`; a file without them is left alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import GROUPS  # noqa: E402
from benchmarks.harness import COPY, IN_PROCESS, OURS, RESULTS, STOCK  # noqa: E402
from benchmarks.plots import load  # noqa: E402
from benchmarks.tables import figure, share, times  # noqa: E402

FILES = (ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guide").glob("*.md")))
BEGIN, END = "<!-- bench:begin {} -->", "<!-- bench:end -->"
#: What stands over the columns of stock and ours, and under the table.
ENGINES = {
    "data": ("torch.utils.data", "torchcrew.data"),
    "multiprocessing": ("torch.multiprocessing", "torchcrew"),
    "launching": ("mp.spawn", "torchcrew.launch"),
    "collectives": ("gloo", "crew"),
}
FOOTERS = {
    "data": (
        "2 workers and fork unless said; every batch was hashed and equal to stock's. Floor: a memory copy of the same "
        "bytes by all cores, the same work with `num_workers=0`, or, for the first batch, stock's fork."
    ),
    "multiprocessing": (
        "every received value was checked. Floor: a memory copy of the same bytes by all cores, or what is named."
    ),
    "launching": (
        "every engine trained to the same loss. Cold: with the start of the interpreter and all imports; warm: the "
        "second job of a program. torchrunx gives no error within 150 s."
    ),
    "collectives": (
        "2 ranks of one thread; both backends in the same two processes, the sums and weights hashed and equal. Floor: "
        "a copy of the same bytes by both ranks at once, or the same step without a peer."
    ),
}
#: How a floor is called in the table.
FLOORS = {
    COPY: "a memory copy",
    IN_PROCESS: "in-process",
    "stock, fork": "stock's fork",
    "no exchange": "without a peer",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a table is stale")
    parser.add_argument("--results", type=Path, default=RESULTS, help="show what this folder gives; writes nothing")
    options = parser.parse_args()
    results = load(options.results)
    if not results:
        print(f"no results in {options.results}: nothing to do")
        return 0
    tables = {group: render(group, found) for group, found in grouped(results).items()}
    if options.results.resolve() != RESULTS:
        print("\n\n".join(tables.values()))  # figures of a trial do not belong into the files
        return 0
    stale = []
    for path in FILES:
        text = path.read_text() if path.exists() else ""
        wanted = text
        for group, table in tables.items():
            wanted = insert(wanted, group, table)
        if wanted != text and options.check:
            stale.append(path)
            print(f"{path.relative_to(ROOT)}: stale; run python tools/readme_table.py", file=sys.stderr)
        elif wanted != text:
            path.write_text(wanted)
            print(f"{path.relative_to(ROOT)}: written")
    return 1 if stale else 0


def grouped(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The results there are, by the table they belong to."""
    groups = {group: {name: results[name] for name in names if name in results} for group, names in GROUPS.items()}
    return {group: found for group, found in groups.items() if found}


def insert(text: str, group: str, table: str) -> str:
    """``text`` with the table between its markers, if it has them."""
    before, begin, rest = text.partition(BEGIN.format(group))
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{table}\n{END}{after}" if begin and end else text


def render(group: str, results: dict[str, Any]) -> str:
    """A table in Markdown, with the machine under it."""
    stock, ours = ENGINES[group]
    lines = [f"| work | {stock} | {ours} | ratio | of the floor |", "|---|---:|---:|---:|---:|"]
    lines += [_line(row) for result in results.values() for row in result["rows"]]
    return "\n".join([*lines, "", _footer(group, results)])


def _line(row: dict[str, Any]) -> str:
    metric = row["metric"]
    stock, ours = (
        figure(row["figures"][engine][metric]["median"], metric) if engine in row["figures"] else "–"
        for engine in (STOCK, OURS)
    )
    floor = f"{share(row['floor_share'])} ({FLOORS.get(row['floor'], row['floor'])})" if row["floor"] else "–"
    per = "" if row["per"] in row["work"] or metric.endswith("_bytes") else f", a {row['per']}"
    return f"| {row['work']}{_peers(row)}{per} | {stock} | **{ours}** | **{times(row['ratio'])}** | {floor} |"


def _peers(row: dict[str, Any]) -> str:
    """The engines beside stock, ours and the floors, in brackets."""
    metric = row["metric"]
    others = [name for name in row["figures"] if name not in (STOCK, OURS, *FLOORS)]
    shown = [
        f"{name.removeprefix('stock, ')} {figure(row['figures'][name][metric]['median'], metric)}" for name in others
    ]
    return f" ({'; '.join(shown)})" if shown else ""


def _footer(group: str, results: dict[str, Any]) -> str:
    machine = next(iter(results.values()))["machine"]
    repeats = min(result["repeats"] for result in results.values())
    return (
        f"Medians of {repeats} alternating runs on {machine['cores']} cores ({machine['system']}), Python "
        f"{machine['python']}, torch {machine['torch']}, {machine['date'][:10]}; {FOOTERS[group]} "
        "`make bench` measures it again."
    )


if __name__ == "__main__":
    sys.exit(main())
