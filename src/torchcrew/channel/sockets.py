"""Pairs of connected sockets that keep messages whole, and say nothing when they are forgotten."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

__all__ = ("LOOK_FOR", "QuietSocket", "look", "seqpacket_pair")

#: Seconds to look before sleeping. Putting a process to sleep and waking it costs tens of microseconds, more where the
#: core is virtual. Each look offers the core to others first, so one may last as long as they take.
LOOK_FOR = 80e-6
# As a plain number: the socket module's are enums, whose operators take microseconds.
_DONTWAIT = int(socket.MSG_DONTWAIT)


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


def look(receive: Callable[..., Any], *args: Any) -> Any:
    """Receive without sleeping, for as long as `LOOK_FOR`; None when nothing came.

    Args:
        receive: a socket's method, and its arguments; the last are flags.
    """
    *args, flags = args  # type: ignore[assignment]
    flags |= _DONTWAIT
    deadline = time.perf_counter() + LOOK_FOR
    while True:
        try:
            return receive(*args, flags)
        except BlockingIOError:
            pass  # and nothing more in here: a Ctrl-C would show this error, too
        if time.perf_counter() > deadline:
            return None
        os.sched_yield()  # whoever wants this core comes first: maybe the process that we wait for
