"""The launcher that is killed, or whose zygote is: jobs whose ranks fail when they are told to.

python failure_program.py together|in-turn|many FOLDER METHOD PEER...

together   a job for each peer, each from a thread of its own. Note "ready": pids of the zygotes. Ends when all have
           ended, by itself or because it is killed.
in-turn    one job after the other from the main thread. Each ends by a Ctrl-C, which is caught, except for the last.
many       forks a launcher for each line of its input, which runs jobs until it is killed; prints its pid. At the end
           of the input, or of one that ended by itself, it ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torchcrew
import torchcrew.launcher.team  # the launchers that are forked have it
from tests.launcher import failure_cases as cases
from tests.launcher import failure_cells as cells
from torchcrew.crew import zygote

#: How long a launcher that is to be killed goes on at most.
LAUNCHER_SECONDS = 60


def launch(folder: Path, peer: str, method: str) -> None:
    """Run one job to its end."""
    torchcrew.launch(cases.take_part, str(folder), peer, None, nprocs=2, start_method=method)  # type: ignore[arg-type]


def launch_and_note(folder: Path, peer: str, method: str) -> None:
    """The same, and note how it ended."""
    outcome = cells.outcome_of(lambda: launch(folder, peer, method))
    cases.note(folder, "outcome", outcome.as_note())


def together(folders: dict[str, Path], method: str) -> None:
    """All jobs at once."""
    jobs = [(folder, peer, method) for peer, folder in folders.items()]
    threads = [threading.Thread(target=launch_and_note, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for folder in folders.values():
        cases.processes(folder)
    cases.note(next(iter(folders.values())).parent, "ready", zygote.pids())
    for thread in threads:
        thread.join()


def in_turn(folders: dict[str, Path], method: str) -> None:
    """One after the other."""
    *peers, last = folders
    for peer in peers:
        launch_and_note(folders[peer], peer, method)
    launch(folders[last], last, method)


def many(folders: dict[str, Path], method: str) -> None:
    """Launchers that are killed at random instants, forked so that each need not import torch."""
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            end = time.monotonic() + LAUNCHER_SECONDS  # nobody may be left who would kill it
            while time.monotonic() < end:
                torchcrew.launch(cases.add_up, nprocs=2, start_method=method)  # type: ignore[arg-type]
            os._exit(0)
        print(pid, flush=True)  # noqa: T201
        os.waitpid(pid, 0)


def main(mode: str, folder: str, method: str, *peers: str) -> None:
    """Be the launcher."""
    folders = {peer: Path(folder, peer) for peer in peers}
    {"together": together, "in-turn": in_turn, "many": many}[mode](folders, method)


if __name__ == "__main__":
    main(*sys.argv[1:])
