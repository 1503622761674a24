"""Pairs of connected sockets that keep messages whole, and say nothing when they are forgotten."""

from __future__ import annotations

import socket
from multiprocessing import reduction
from typing import Any

__all__ = ("QuietSocket", "seqpacket_pair")


class QuietSocket(socket.socket):
    """A socket that is closed when it is forgotten, and not with a warning. Pickles while a process starts.

    A forked child inherits its parent's sockets and forgets them whenever its collector comes by, and at interpreter
    exit some are alive on purpose.
    """

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return _attach, (reduction.DupFd(self.fileno()),)


def _attach(fd: Any) -> QuietSocket:
    return QuietSocket(fileno=fd.detach())


def seqpacket_pair() -> tuple[QuietSocket, QuietSocket]:
    """Two connected SOCK_SEQPACKET sockets."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return QuietSocket(fileno=one.detach()), QuietSocket(fileno=other.detach())
