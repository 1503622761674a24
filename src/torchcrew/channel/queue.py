"""`torchcrew.Queue`: messages as snapshots, for any number of processes that put and any number that get.

    producer A ─ Lender ─► arena A (blocks) ────────────────────────────┐
        └────────────────► [ Mailbox: one packet a message ] ──────► Borrower ─ consumer C
    producer B ─ Lender ─► arena B (blocks) ────────────────────────────┘
                             claims: who has which block, and who is still there

A message is copied once, into a recycled block that the consumer maps; up to 16 KiB of data travel in the packet. What
arrives is the consumer's own: valid and writable as long as anything of it is held, whatever became of the producer
and of the queue. Shared tensors stay shared.

Owner      every process owns its copies of sockets and control memory: they go with the queue object.
Full       `put` waits while the socket or ``maxsize`` is used up, or the memory budget: consumers that hold what they
           received hold producers back.
Closing    `close` is for all processes: nothing can be put any more, what was put is still delivered.
Death      of anybody at any instant: the others go on. A message that a killed consumer had taken is lost, the blocks
           that it held return; what a killed producer had put stays.
           of every other process that holds the queue, while this one waits without a timeout and no other thread
           runs: `PeerDied`, which says who and how.
"""

from __future__ import annotations

import functools
import operator
import select
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing import context
from queue import Full
from types import TracebackType
from typing import Any, NoReturn

from torchcrew.channel import peers
from torchcrew.channel.borrower import Borrower
from torchcrew.channel.claims import Claims
from torchcrew.channel.coroutines import is_alone, ready
from torchcrew.channel.envelope import Envelope
from torchcrew.channel.lender import Lender
from torchcrew.channel.mailbox import Deserted, Mailbox, Result
from torchcrew.channel.parcel import Parcel
from torchcrew.errors import PeerDied, QueueClosed
from torchcrew.memory.limits import default_budget, parse_bytes

__all__ = ("Queue",)

#: While a coroutine waits for a message, how often it looks whether anybody is left who could send one, in seconds.
_LOOK_UP = 0.25
#: The naps of a coroutine that waits for room, in seconds: they grow from the first to the last.
_FIRST_NAP, _LONGEST_NAP = 50e-6, 5e-3


class Queue:
    """A queue of snapshots. Every method may be called by any process that holds it, and any thread.

    Processes get it as an argument, whatever the start method; every one of them may put and get.

    Args:
        maxsize: messages that may wait; 0 or less for as many as the kernel holds (some hundreds or thousands).
        memory_budget: bytes of shared memory for what is on its way or held by consumers, such as ``"2GB"``, for all
            producers together (each may always take its equal share); default as for the data loader.
    """

    def __init__(self, maxsize: int = 0, *, memory_budget: int | str | None = None) -> None:
        budget = default_budget() if memory_budget is None else parse_bytes(memory_budget)
        self._take(Mailbox(operator.index(maxsize)), Claims(), budget)

    def _take(self, box: Mailbox, claims: Claims, budget: int) -> None:
        self._box = box
        self._claims = claims
        self._borrower = Borrower(claims, box.reader)
        # Nothing bound to `self`: the descriptors go with the last reference, not when the cyclic collector comes by.
        self._lender = Lender(claims, budget, box.first, functools.partial(_check, box))

    def __reduce__(self) -> Any:
        context.assert_spawning(self)
        return _attach, (self._box, self._claims, self._lender.budget)

    # Putting ----------------------------------------------------------------------------------------------------------

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put a snapshot of ``obj`` in: when this returns, ``obj`` may be changed.

        Args:
            obj: anything that can be pickled.
            block: wait for room.
            timeout: seconds to wait at most.

        Raises:
            Full: no room (in time).
            ArenaFull: there never will be room for it within the memory budget.
            QueueClosed: the queue was closed.
            PeerDied: there is no room, and nobody is left who could make some.
            Exception: whatever pickling raises; nothing was put.
        """
        deadline = _deadline(block, timeout)
        if deadline is not None and self.full() and time.monotonic() >= deadline:
            raise Full  # before anything is copied
        parcel = self._lender.encode(obj, deadline)
        box = self._box
        try:
            envelope = Envelope(parcel.payload, parcel.fds, parcel)
            if not _try_put(box, envelope):
                left = None if deadline is None else deadline - time.monotonic()
                box.wait_to_put(functools.partial(_try_put, box, envelope), left, patient=False)
        except (Full, Deserted, OSError) as error:
            self._lender.cancel(parcel)
            _raise(box, error)
        except BaseException:  # a Ctrl-C, maybe after it was sent
            self._lender.sent(parcel, box.last())
            raise
        self._lender.sent(parcel, box.last() if parcel.blocks else 0)

    def put_nowait(self, obj: Any) -> None:
        """`put` without waiting."""
        self.put(obj, block=False)

    async def aput(self, obj: Any) -> None:
        """`put` for coroutines: others run while it waits for room. Cancelled, it has put nothing.

        The snapshot itself is made in one go, during which the event loop stands still.
        """
        import asyncio  # by those who have it anyway: it takes longer to import than the rest of this package

        nap = _FIRST_NAP
        parcel: Parcel | None = None
        while not (parcel := parcel or self._try_encode(obj)) or not self._try_send(parcel):
            try:
                await asyncio.sleep(nap)
                if nap == _LONGEST_NAP and is_alone() and self._box.holders.deserted():
                    _raise(self._box, Deserted())
            except BaseException:
                if parcel is not None:
                    self._lender.cancel(parcel)
                raise
            nap = min(2 * nap, _LONGEST_NAP)

    def _try_encode(self, obj: Any) -> Parcel | None:
        try:
            return self._lender.encode(obj, 0.0)
        except Full:
            return None

    def _try_send(self, parcel: Parcel) -> bool:
        try:
            sent = _try_put(self._box, Envelope(parcel.payload, parcel.fds, parcel))
        except OSError as error:
            self._lender.cancel(parcel)
            _raise(self._box, error)
        except BaseException:
            self._lender.sent(parcel, self._box.last())
            raise
        if sent:
            self._lender.sent(parcel, self._box.last())
        return sent

    # Getting ----------------------------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the first message out.

        Args:
            block: wait for one.
            timeout: seconds to wait at most.

        Returns:
            A copy of what was put, this process's own: tensors and arrays may be written and kept.

        Raises:
            Empty: there was none (in time).
            QueueClosed: the queue was closed, and all that was put has been delivered.
            PeerDied: there is none, and nobody is left who could put one.
            TooManyDescriptors: this process has none left for the message's memory; the message is lost.
            Exception: whatever unpickling raises.
        """
        deadline = _deadline(block, timeout)
        try:
            received = self._borrower.take(linger=deadline is None or deadline > time.monotonic())
            if received is None:
                received = self._borrower.wait(self._box.holders, deadline)
        except (EOFError, Deserted) as error:
            _raise(self._box, error)
        return self._borrower.decode(received)

    def get_nowait(self) -> Any:
        """`get` without waiting."""
        return self.get(block=False)

    async def aget(self) -> Any:
        """`get` for coroutines: others run while it waits. Cancelled, it has taken nothing."""
        try:
            # Nothing is awaited between the moment a message is taken and the return.
            while (received := self._borrower.take()) is None:
                if is_alone() and self._box.holders.deserted():
                    received = self._borrower.take()
                    if received is None:
                        raise Deserted
                    break
                nap = self._borrower.nap()
                await ready(self._box.reader.fileno(), _LOOK_UP if nap is None else min(nap, _LOOK_UP))
        except (EOFError, Deserted) as error:
            _raise(self._box, error)
        return self._borrower.decode(received)

    def __iter__(self) -> Iterator[Any]:
        """The messages, until the queue is closed."""
        while True:
            try:
                obj = self.get()
            except QueueClosed:
                return
            yield obj
            del obj  # or its memory would be held while the next is waited for

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The messages, until the queue is closed."""
        while True:
            try:
                obj = await self.aget()
            except QueueClosed:
                return
            yield obj
            del obj

    # ------------------------------------------------------------------------------------------------------------------

    def qsize(self) -> int:
        """How many messages wait; too many by one for each producer that was killed in the middle of `put`."""
        return self._box.count()

    def empty(self) -> bool:
        """Whether no message waits."""
        return self._box.count() == 0

    def full(self) -> bool:
        """Whether ``maxsize`` messages wait."""
        return 0 < self._box.maxsize <= self._box.count()

    @property
    def closed(self) -> bool:
        """Whether somebody closed the queue."""
        return _is_closed(self._box)

    def close(self) -> None:
        """Close for all processes, and wake those that wait; what was put is still delivered. Idempotent."""
        self._box.end()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _attach(box: Mailbox, claims: Claims, budget: int) -> Queue:
    queue = Queue.__new__(Queue)
    queue._take(box, claims, budget)
    return queue


def _deadline(block: bool, timeout: float | None) -> float | None:
    """As `time.monotonic` gives it; 0 for at once, None for never."""
    if not block:
        return 0.0
    if timeout is None:
        return None
    if timeout < 0:
        raise ValueError("'timeout' must be a non-negative number")
    return time.monotonic() + timeout


def _try_put(box: Mailbox, envelope: Envelope) -> bool:
    result = box.offer(envelope, box.maxsize)
    if result is Result.FULL and _is_closed(box):  # by their number; a socket without room says it itself
        raise BrokenPipeError
    return result is Result.SENT


def _is_closed(box: Mailbox) -> bool:
    poller = select.poll()
    poller.register(box.reader, select.POLLRDHUP)
    return bool(poller.poll(0))


def _check(box: Mailbox, forever: bool) -> None:
    """Raise if there is no point in waiting for memory."""
    if _is_closed(box):
        _raise(box, EOFError())
    if forever and box.holders.deserted():
        _raise(box, Deserted())


def _raise(box: Mailbox, error: BaseException) -> NoReturn:
    """Raise the queue's own error for one of what it is made of."""
    if isinstance(error, Deserted):
        who = peers.describe(box.holders.gone)
        raise PeerDied(f"nobody is left at the other side of this queue: {who}") from None
    if isinstance(error, (EOFError, BrokenPipeError)):
        raise QueueClosed("the queue was closed") from None
    raise error
