"""`torchcrew.Pipe`: two ends, snapshots from one to the other.

    end A ─ Lender ─► blocks ──────────────────────────► Borrower ─ end B      and, if duplex, the same from B to A
      └─────────────► [ SEQPACKET pair: one packet a message ] ─┘
                        claims: who has which block, and who is still there

Owner      every process owns its copy of an end's socket; `close` closes that copy only, as does the end's last
           reference.
Death      the other side is gone when every process that has its end closed it or ended: `recv` delivers what was sent,
           then raises EOFError, and `send` raises BrokenPipeError, at once. A copy that this very process still has
           of the other end keeps neither of them waiting once all other processes that got an end from it are gone,
           unless another thread of it runs, which might use that copy. What does keep them waiting, as with every
           pipe, is another living process with a copy that it never closes.
"""

from __future__ import annotations

import array
import fcntl
import functools
import select
import termios
from multiprocessing import context
from queue import Empty
from types import TracebackType
from typing import Any

from torchcrew.channel.borrower import Borrower
from torchcrew.channel.claims import Claims
from torchcrew.channel.coroutines import is_alone, ready
from torchcrew.channel.envelope import FULL_ERRORS, Envelope
from torchcrew.channel.holders import Deserted, Holders
from torchcrew.channel.lender import Lender
from torchcrew.channel.sockets import QuietSocket, seqpacket_pair
from torchcrew.memory.limits import default_budget, parse_bytes

__all__ = ("End", "Pipe")

#: While a coroutine waits, how often it looks whether anybody is left at the other side, in seconds.
_LOOK_UP = 0.25
_GONE = "nobody is left at the other side of this pipe"


def Pipe(duplex: bool = True, *, memory_budget: int | str | None = None) -> tuple[End, End]:
    """Two connected ends; processes get them as arguments, whatever the start method.

    Args:
        duplex: both may send and receive; else the first only receives, and the second only sends.
        memory_budget: bytes of shared memory for what is on its way or held by receivers; default as for the loader.
    """
    budget = default_budget() if memory_budget is None else parse_bytes(memory_budget)
    first, second = seqpacket_pair()
    claims, holders = Claims(), Holders()
    return End(first, claims, holders, budget, True, duplex), End(second, claims, holders, budget, duplex, True)


class End:
    """One end of a pipe. Every method may be called by any process that has it, and any thread."""

    def __init__(
        self, sock: QuietSocket, claims: Claims, holders: Holders, budget: int, readable: bool, writable: bool
    ) -> None:
        """Ends are made by `Pipe`."""
        self._sock = sock
        self._claims = claims
        self._holders = holders
        self.readable = readable
        self.writable = writable
        self._borrower = Borrower(claims, sock)
        # Nothing bound to `self`: see `channel.queue`.
        self._lender = Lender(
            claims, budget, functools.partial(_first, sock), functools.partial(_check_peer, sock, holders)
        )

    def __reduce__(self) -> Any:
        context.assert_spawning(self)
        self._check_open()
        holders = self._holders.send_along()
        return _attach, (self._sock, self._claims, holders, self._lender.budget, self.readable, self.writable)

    def send(self, obj: Any) -> None:
        """Send a snapshot of ``obj``; waits for room.

        Raises:
            BrokenPipeError: nobody is left at the other side.
            ArenaFull: there never will be room for it within the memory budget.
            OSError: this end is closed, or only receives.
            Exception: whatever pickling raises; nothing was sent.
        """
        self._check_open(writes=True)
        parcel = self._lender.encode(obj)
        sock = self._sock
        try:
            envelope = Envelope(parcel.payload, parcel.fds, parcel)
            if not _try_send(sock, envelope):
                attempt = functools.partial(_try_send, sock, envelope)
                self._holders.wait(lambda: attempt() or None, sock.fileno(), select.POLLOUT, None)
        except (Deserted, OSError) as error:
            self._lender.cancel(parcel)
            if isinstance(error, (Deserted, ConnectionError)):
                raise BrokenPipeError(_GONE) from None
            raise
        finally:
            self._lender.sent(parcel, 0)

    async def asend(self, obj: Any) -> None:
        """`send` for coroutines: others run while it waits for room in the socket. Cancelled, it has sent nothing.

        The snapshot itself is made in one go; that includes waiting for memory, where the budget is used up.
        """
        self._check_open(writes=True)
        parcel = self._lender.encode(obj)
        try:
            envelope = Envelope(parcel.payload, parcel.fds, parcel)
            while not _try_send(self._sock, envelope):
                if is_alone() and self._holders.deserted():
                    raise BrokenPipeError(_GONE)
                await ready(self._sock.fileno(), _LOOK_UP, writes=True)
        except BaseException as error:
            self._lender.cancel(parcel)
            if isinstance(error, ConnectionError):
                raise BrokenPipeError(_GONE) from None
            raise
        self._lender.sent(parcel, 0)

    def recv(self) -> Any:
        """Receive the next message; waits for it.

        Raises:
            EOFError: nobody is left at the other side, and all that was sent has been delivered.
            OSError: this end is closed, or only sends.
            TooManyDescriptors: this process has none left for the message's memory; the message is lost.
            Exception: whatever unpickling raises.
        """
        self._check_open(reads=True)
        received = self._borrower.take(linger=True)
        if received is None:
            try:
                received = self._borrower.wait(self._holders, None)
            except Deserted:
                raise EOFError(_GONE) from None
        return self._borrower.decode(received)

    async def arecv(self) -> Any:
        """`recv` for coroutines: others run while it waits. Cancelled, it has taken nothing."""
        self._check_open(reads=True)
        # Nothing is awaited between the moment a message is taken and the return.
        while (received := self._borrower.take()) is None:
            if is_alone() and self._holders.deserted():
                received = self._borrower.take()
                if received is None:
                    raise EOFError(_GONE)
                break
            nap = self._borrower.nap()
            await ready(self._sock.fileno(), _LOOK_UP if nap is None else min(nap, _LOOK_UP))
        return self._borrower.decode(received)

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether `recv` would find a message, or the end, within ``timeout`` seconds (None: as long as it takes)."""
        self._check_open(reads=True)
        attempt = functools.partial(_is_readable, self._sock)
        try:
            self._holders.wait(attempt, self._sock.fileno(), select.POLLIN, timeout)
        except Empty:
            return attempt() is not None or self._holders.deserted()
        except Deserted:
            pass
        return True

    def fileno(self) -> int:
        """The socket's descriptor, readable when a message is there."""
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        """Whether this process closed its copy of the end."""
        return self._sock.fileno() < 0

    def close(self) -> None:
        """Close this process's copy of the end; what was received stays valid. Idempotent."""
        self._sock.close()
        self._borrower.close()
        self._lender.close()

    def _check_open(self, reads: bool = False, writes: bool = False) -> None:
        if self.closed:
            raise OSError("this end of the pipe is closed")
        if reads and not self.readable:
            raise OSError("this end of the pipe only sends")
        if writes and not self.writable:
            raise OSError("this end of the pipe only receives")

    def __enter__(self) -> End:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _attach(sock: QuietSocket, claims: Claims, presence: Any, budget: int, readable: bool, writable: bool) -> End:
    holders = Holders()
    holders.received(presence)
    return End(sock, claims, holders, budget, readable, writable)


def _try_send(sock: QuietSocket, envelope: Envelope) -> bool:
    try:
        envelope.send(sock)
    except OSError as error:
        if error.errno in FULL_ERRORS:
            return False
        raise
    return True


def _is_readable(sock: QuietSocket) -> bool | None:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return True if poller.poll(0) else None


def _first(sock: QuietSocket) -> int:
    """1 when all that was sent from this end has been received, else 0: the messages of a pipe are all number 0."""
    unread = array.array("i", [0])
    fcntl.ioctl(sock, termios.TIOCOUTQ, unread)
    return int(not unread[0])


def _check_peer(sock: QuietSocket, holders: Holders, forever: bool) -> None:
    """Raise if there is no point in waiting for memory."""
    poller = select.poll()
    poller.register(sock, 0)  # a hang-up is always reported
    if poller.poll(0) or (forever and holders.deserted()):
        raise BrokenPipeError(_GONE)
