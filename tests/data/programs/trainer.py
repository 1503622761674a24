"""A trainer that iterates for a minute. ``trainer.py NOTES [persistent]``; notes its workers' pids and its progress."""

import os
import sys
import time
from pathlib import Path

from tests.data.survival import Rows, check
from torchcrew.data import DataLoader


def note(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.rename(new, path)


def main(notes: Path, *options: str) -> None:
    loader = DataLoader(
        Rows(6000, seconds=0.01), batch_size=2, num_workers=2, persistent_workers="persistent" in options
    )
    iterator = iter(loader)
    next(iterator)
    note(notes / "pids", " ".join(str(worker.pid) for worker in iterator._workers))
    for number, batch in enumerate(iterator, 1):
        check(batch, number, 2)
        note(notes / "progress", str(number))
        time.sleep(0.005)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
