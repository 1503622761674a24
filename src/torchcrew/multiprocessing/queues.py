"""`Queue`, `JoinableQueue` and `SimpleQueue`: the standard library's, over packets instead of a locked pipe.

    put ─ encode (tensors become shared) ─ offer ─► [ mailbox: one SEQPACKET pair ] ─► get
                                             │ no room                ▲
                                             └► backlog ─ feeder ─────┘   a thread, started only then

No lock that a killed process could keep, no feeder in the usual case, no connection for a tensor's memory, which also
survives its producer. `put` encodes at once: what is changed afterwards does not change the message, except in memory
that is shared. It waits for nothing but ``maxsize``, as stock's. ``maxsize`` counts what is on its way and this
process's own backlog.

Owner      every process that holds a queue has both ends of it. The feeder ends with the queue, or with the process,
           which waits for it as stock's does (`cancel_join_thread`).
Death      of anybody, anywhere in `put` or `get`: nobody else is kept waiting, no message is half. A message that a
           killed consumer had taken is lost, and so is what a killed producer had only in its backlog.
           of every other process that holds the queue, while `get` (or `put`, at a full queue) waits without a
           timeout and no other thread runs: `PeerDied`, which says who and how. With a timeout the error is the usual
           one, of this type. While others live, one that failed is named in a warning, once.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import select
import sys
import threading
import time
import weakref
from multiprocessing import context, util
from multiprocessing import queues as _typed
from multiprocessing.synchronize import SEM_VALUE_MAX  # type: ignore[attr-defined]
from queue import Empty, Full
from typing import Any

from torchcrew.channel.envelope import FULL_ERRORS, Envelope, open_packet, receive_packet
from torchcrew.channel.holders import Deserted, Holders
from torchcrew.channel.mailbox import Mailbox, Result
from torchcrew.channel.sharing import decode_shared, encode_shared
from torchcrew.errors import TooManyDescriptors
from torchcrew.multiprocessing.connection import PacketConnection, Pipe
from torchcrew.multiprocessing.deaths import nothing_came, peer_died, warn_of_failures
from torchcrew.multiprocessing.tally import TaskTally

__all__ = ("JoinableQueue", "Queue", "SimpleQueue")

_stock: Any = _typed  # its type hints leave out most of what it has

#: Longest sleep of a feeder between two looks for room, in seconds.
_FEEDER_NAP = 0.5


def __getattr__(name: str) -> Any:
    """What the standard library's module has and this one has not."""
    return getattr(_stock, name)


class _WriteEnd(PacketConnection):
    """The sending end of a mailbox, as others than its queue see it."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox.writer, readable=False)
        self._mailbox = mailbox

    def _send_packet(self, sealed: Envelope) -> None:
        self._mailbox.wait_to_put(lambda: self._mailbox.offer(sealed) is Result.SENT, None)


class Queue(_stock.Queue):  # type: ignore[misc]
    """A queue of objects between processes; see `multiprocessing.Queue`.

    Args:
        maxsize: how many objects may wait; 0 or less for any number.
        ctx: a context.

    Raises (methods):
        PeerDied: see the module.
        TooManyDescriptors: this process has no descriptor left for a message's memory; the queue stays usable.
    """

    def __init__(self, maxsize: int = 0, *, ctx: Any) -> None:
        self._maxsize = SEM_VALUE_MAX if maxsize <= 0 else maxsize
        self._opid = os.getpid()
        self._ignore_epipe = False
        self._use(Mailbox())

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        return self._ignore_epipe, self._maxsize, self._mailbox, self._opid

    def __setstate__(self, state: Any) -> None:
        self._ignore_epipe, self._maxsize, mailbox, self._opid = state
        self._use(mailbox)

    def _use(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._reader: Any = PacketConnection(mailbox.reader, writable=False)
        self._writer: Any = _WriteEnd(mailbox)
        self._poll = self._reader.poll
        mailbox.holders.on_gone = warn_of_failures
        self._reset()
        _queues.add(self)

    def _reset(self, after_fork: bool = False) -> None:
        self._notempty = threading.Condition(threading.RLock())  # the collector may end the feeder from in there
        self._buffer: collections.deque[Any] = collections.deque()
        self._mailbox.holders.has_backlog = self._buffer.__len__
        self._thread: threading.Thread | None = None
        self._jointhread: Any = None
        self._joincancelled = False
        self._closed = False
        self._close: Any = None

    def _after_fork(self) -> None:
        self._reset(after_fork=True)

    # Putting ----------------------------------------------------------------------------------------------------------

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put an object in; tensors in it are shared from now on."""
        if self._closed:
            raise ValueError(f"Queue {self!r} is closed")
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._is_bounded():  # before anything is encoded that would not be sent
            self._wait_for_room(lambda: not self.full(), block, deadline)
        sealed = self._encode(obj)
        if sealed is not None and not self._put(sealed):
            self._wait_for_room(lambda: self._put(sealed), block, deadline)

    def _is_bounded(self) -> bool:
        return bool(self._maxsize < SEM_VALUE_MAX)

    def _encode(self, obj: Any) -> Envelope | None:
        try:
            return Envelope(*encode_shared(obj))
        except TooManyDescriptors:
            raise
        except Exception as error:
            self._on_queue_feeder_error(error, obj)
            return None

    def _put(self, sealed: Envelope) -> bool:
        """Send it, or leave it to the feeder; False where the queue is full."""
        with self._notempty:
            if self._buffer or not self._offer(sealed, self._maxsize if self._is_bounded() else 0):
                if self.full():
                    return False
                self._leave_to_feeder(sealed)
            elif self._close is None:
                self._close = _CloseNow(self._mailbox)
            return True

    def _offer(self, sealed: Envelope, maxsize: int = 0) -> bool:
        return self._mailbox.offer(sealed, maxsize) is Result.SENT

    def _leave_to_feeder(self, sealed: Envelope) -> None:
        if self._thread is None:
            self._start_thread()
        self._buffer.append(sealed)
        self._notempty.notify()

    def _wait_for_room(self, attempt: Any, block: bool, deadline: float | None) -> None:
        if not block:
            if not attempt():
                raise Full
            return
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            self._mailbox.wait_to_put(attempt, timeout, patient=False)
        except Deserted:
            raise peer_died(self._mailbox.holders, "is full, and nobody is left to take something out") from None

    # Taking -----------------------------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the first object out."""
        if self._closed:
            raise ValueError(f"Queue {self!r} is closed")
        self._reader._check_closed()
        try:
            packet = self._mailbox.get(timeout if block else 0.0)
        except (Deserted, Empty) as error:
            raise nothing_came(self._mailbox.holders, error, block) from None
        return decode_shared(packet.payload, packet.fds)

    def qsize(self) -> int:
        """How many objects wait, as far as this process knows: others may have a backlog, too."""
        self._reader._check_closed()
        return self._mailbox.count() + len(self._buffer)

    def full(self) -> bool:
        """Whether ``maxsize`` objects wait."""
        return self._is_bounded() and self.qsize() >= self._maxsize

    # The feeder -------------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=_feed, args=(self._buffer, self._notempty, self._mailbox), name="QueueFeederThread", daemon=True
        )
        thread.start()
        self._thread = thread
        if not self._joincancelled:
            self._jointhread = util.Finalize(thread, _join, [weakref.ref(thread)], exitpriority=-5)
        self._close = util.Finalize(self, _end_feeder, [self._buffer, self._notempty], exitpriority=10)


class _CloseNow:
    """What `close` calls where there is no feeder."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def __call__(self) -> None:
        self._mailbox.close()


_SENTINEL = object()


def _feed(buffer: collections.deque[Any], notempty: threading.Condition, mailbox: Mailbox) -> None:
    """The feeder: send the backlog, then close the mailbox."""
    while True:
        with notempty:
            while not buffer:
                notempty.wait()
            if buffer[0] is _SENTINEL:
                mailbox.close()
                return
            try:
                sent = mailbox.offer(buffer[0]) is Result.SENT
            except OSError:  # closed for all, or under our hands
                if not util.is_exiting():
                    sys.excepthook(*sys.exc_info())
                sent = True
            if sent:
                buffer.popleft()
        if not sent:
            with contextlib.suppress(OSError, ValueError):
                mailbox.wait_for_room(_FEEDER_NAP)


def _end_feeder(buffer: collections.deque[Any], notempty: threading.Condition) -> None:
    with notempty:
        buffer.append(_SENTINEL)
        notempty.notify()


def _join(reference: weakref.ref[threading.Thread]) -> None:
    thread = reference()
    if thread is not None:
        thread.join()


class JoinableQueue(Queue, _stock.JoinableQueue):  # type: ignore[misc]
    """A queue that counts its tasks; see `multiprocessing.JoinableQueue`."""

    def _use(self, mailbox: Mailbox) -> None:
        super()._use(mailbox)
        self._tally = TaskTally(mailbox)

    def _offer(self, sealed: Envelope, maxsize: int = 0) -> bool:
        return self._mailbox.offer(sealed, maxsize, self._tally) is Result.SENT

    def _leave_to_feeder(self, sealed: Envelope) -> None:
        self._tally.add()
        super()._leave_to_feeder(sealed)

    def task_done(self) -> None:
        """Say that an object that was taken out is done with.

        Raises:
            ValueError: more were done than were put in.
        """
        self._tally.task_done()

    def join(self) -> None:
        """Wait until every object that was put in is done with.

        Raises:
            PeerDied: nobody is left who could be at it.
        """
        try:
            self._tally.wait()
        except Deserted:
            raise peer_died(self._mailbox.holders, "has tasks that nobody is left to do") from None


class SimpleQueue(_stock.SimpleQueue):  # type: ignore[misc]
    """A queue without a backlog: `put` waits while the socket is full; see `multiprocessing.SimpleQueue`."""

    def __init__(self, *, ctx: Any) -> None:
        self._use(*Pipe(duplex=False), Holders())

    def _use(self, reader: Any, writer: Any, holders: Holders) -> None:
        self._reader, self._writer, self._holders = reader, writer, holders
        self._poll = reader.poll
        self._rlock, self._wlock = _DrainLock(reader), _NoLock()
        holders.on_gone = warn_of_failures

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        return self._reader, self._writer, self._holders.send_along()

    def __setstate__(self, state: Any) -> None:
        reader, writer, presence = state
        self._use(reader, writer, Holders())
        self._holders.received(presence)

    def put(self, obj: Any) -> None:
        """Put an object in; tensors in it are shared from now on."""
        self._writer._check_closed()
        sealed = Envelope(*encode_shared(obj))
        if not self._offer(sealed):
            try:
                self._holders.wait(lambda: self._offer(sealed) or None, self._writer.fileno(), select.POLLOUT, None)
            except Deserted:
                raise peer_died(self._holders, "is full, and nobody is left to take something out") from None

    def _offer(self, sealed: Envelope) -> bool:
        try:
            sealed.send(self._writer._socket)
        except ConnectionResetError:  # nobody receives any more
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from None
        except OSError as error:
            if error.errno in FULL_ERRORS:
                return False
            raise
        return True

    def get(self) -> Any:
        """Take the first object out; waits for one."""
        self._reader._check_closed()
        sock = self._reader._socket
        received = receive_packet(sock, linger=True)
        if received is None:
            try:
                received = self._holders.wait(lambda: receive_packet(sock), sock.fileno(), select.POLLIN, None)
            except Deserted as error:
                raise nothing_came(self._holders, error, True) from None
        packet = open_packet(received)
        return decode_shared(packet.payload, packet.fds)


class _NoLock:
    """Where stock has a lock: a packet needs none."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Nothing to wait for."""
        return True

    def release(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _DrainLock(_NoLock):
    """Where stock has the readers' lock. Stock's pool, when it ends, takes it to be the only reader, and drains.

    Without a lock others read on, so a drain may find that nothing is left: it then gets None instead of waiting.
    """

    def __init__(self, reader: PacketConnection) -> None:
        self._reader = weakref.proxy(reader)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Have the reader not wait any more."""
        self._reader.recv = self._recv_if_any
        return True

    def release(self) -> None:
        """Have it wait again."""
        vars(self._reader).pop("recv", None)

    def _recv_if_any(self) -> Any:
        received = receive_packet(self._reader._socket)
        if received is None:
            return None
        packet = open_packet(received)
        return decode_shared(packet.payload, packet.fds)


_queues: weakref.WeakSet[Queue] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for queue in list(_queues):
        queue._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
