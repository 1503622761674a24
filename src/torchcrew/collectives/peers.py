"""The processes of a group: who they are, whether they live, and where their Python is."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from dataclasses import dataclass

from torchcrew.crew import stacks
from torchcrew.crew.stack_text import Stacks, printable

__all__ = ("Peer", "Peers")

#: Frames of a stack that are told, from the innermost on.
_FRAMES = 12


@dataclass(frozen=True)
class Peer:
    """One process of a group on this host."""

    place: int
    """Among the ranks of the group that are on this host: what its memory is counted by."""
    rank: int
    """Among all ranks of the job: what people call it."""
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"


class Peers:
    """All others of a group, watched by pidfds.

    Args:
        everybody: of this host, by place.
        place: this process's own.

    Raises:
        ProcessLookupError: one of them has ended already.
    """

    def __init__(self, everybody: list[Peer], place: int) -> None:
        self.everybody = everybody
        self.me = everybody[place]
        self.others = [peer for peer in everybody if peer.place != place]
        self._poll = select.poll()
        self._polling = threading.Lock()  # an object of poll refuses a second thread
        self._by_fd: dict[int, Peer] = {}
        try:
            for peer in self.others:
                fd = os.pidfd_open(peer.pid)
                self._by_fd[fd] = peer
                self._poll.register(fd, select.POLLIN)
        except BaseException:
            self.close()
            raise

    def dead(self) -> list[Peer]:
        """Those whose process has ended."""
        with self._polling:
            return [self._by_fd[fd] for fd, _ in self._poll.poll(0) if fd in self._by_fd]

    def stacks(self, missing: list[Peer]) -> str:
        """Where these are now, in Python, for an error; never raises."""
        with contextlib.suppress(Exception):
            return "\n".join(map(_told, missing, stacks.ask([peer.pid for peer in missing], timeout=1.0)))
        return ""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Watch nobody any more."""
        while self._by_fd:
            os.close(self._by_fd.popitem()[0])
        self._poll = select.poll()


def _told(peer: Peer, found: Stacks) -> str:
    """The stack of a process, most recent call first."""
    if not found.main:
        return f"{peer} {found.problem or 'runs no Python'}"
    frames = [f"  {printable(frame.file)}:{frame.line} in {printable(frame.function)}" for frame in found.main]
    more = [f"  ... and {len(frames) - _FRAMES} more"] if len(frames) > _FRAMES else []
    return "\n".join([f"{peer} {found.state}, most recent call first:", *frames[:_FRAMES], *more])
