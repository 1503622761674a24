"""A mailbox: one SOCK_SEQPACKET pair that any number of processes put packets into and take packets from.

    producers                                                                consumers
      put ─► record lock ─► number ─► send ─► [ both ends: every process ] ─► receive ─► get
                             └── control page (memfd): the number of the last packet

A packet is in the socket or it is not, and exactly one process receives it: no process can be killed in the middle of
that. The one lock is a record lock, which the kernel releases with the process that holds it. How many packets are
waiting is not counted but computed, from the number of the first one in the socket and of the last one sent.

Owner      every process owns its copies of the two ends and of the control page; they travel by inheritance.
Death      of a producer: its packet was sent or not; a number that was not sent is passed over.
           of a consumer: at most the packet that it was receiving is lost.
           of every other holder, while this process waits: `Deserted` (see `channel.holders`).
Closing    `close` lets go of this process's ends. `end` closes for all: what was sent is delivered, then EOFError.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import context, reduction
from queue import Full
from typing import Any, Protocol

from torchcrew.channel.envelope import (
    FULL_ERRORS,
    HEAD,
    Envelope,
    Packet,
    envelope,
    open_packet,
    peek_number,
    receive_packet,
)
from torchcrew.channel.holders import Deserted, Holders
from torchcrew.channel.sockets import QuietSocket, seqpacket_pair
from torchcrew.memory import libc
from torchcrew.memory.arena import make_memfd

__all__ = (
    "CONTROL_FREE",
    "HEAD",
    "Deserted",
    "Mailbox",
    "Packet",
    "RecordLock",
    "Result",
    "Tally",
    "envelope",
    "open_packet",
    "receive_packet",
)

#: Bytes of the control page; what the mailbox does not use, from `CONTROL_FREE` on, its user may.
_CONTROL_BYTES = 4 << 10
CONTROL_FREE = 64
#: The socket's buffer, in bytes, as far as the system lets a process have it (net.core.wmem_max): what is on its way.
_BUFFER_BYTES = 1 << 20
#: How long a put that waits for room sleeps between two looks, in seconds: it begins short, and grows.
_FIRST_NAP, _LONGEST_NAP = 50e-6, 5e-3
#: A put that finds the record lock taken looks again after this, in seconds: it is held for microseconds.
_LOCK_NAP = 20e-6
#: After so many seconds its holder is taken for one that was stopped in the middle; who puts does something else then.
_PATIENCE = 0.05
_LOCK, _UNLOCK = int(fcntl.LOCK_EX | fcntl.LOCK_NB), int(fcntl.LOCK_UN)


class Result(enum.Enum):
    """What became of an offered packet."""

    SENT = enum.auto()
    FULL = enum.auto()
    """As many packets wait as may."""
    CROWDED = enum.auto()
    """The socket has no room, or a producer was stopped (SIGSTOP) in the middle of putting something."""


class Tally(Protocol):
    """Keeps account of what is sent, in memory that all producers share; called by one of them at a time."""

    def begin(self) -> None:
        """A packet is about to be sent. If `done` or `undo` do not follow, its producer was killed."""

    def done(self) -> None:
        """It was sent."""

    def undo(self) -> None:
        """It was not."""


class RecordLock:
    """A record lock on a file's first byte: one process holds it, until it lets go or dies.

    A class, because entering and leaving a generator's context costs as much as the locking.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def acquire(self, patience: float | None = None) -> bool:
        """Take it; False if another process kept it for so many seconds."""
        nap = _LOCK_NAP
        deadline = 0.0
        while not self._try():
            if patience is not None:
                deadline = deadline or time.monotonic() + patience
                if time.monotonic() > deadline:
                    return False
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        return True

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._fd, _LOCK, 1)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Let go; nothing where it is not held."""
        fcntl.lockf(self._fd, _UNLOCK, 1)

    def __enter__(self) -> None:
        try:  # around the locking, too: a Ctrl-C may come as soon as that is done
            self.acquire()
        except BaseException:
            self.release()
            raise

    def __exit__(self, *_: object) -> None:
        self.release()


class Mailbox:
    """See the module. Every method may be called by any thread; pickles only while a process is being started.

    Args:
        maxsize: packets that may wait; 0 or less for as many as the kernel holds (some thousands).
    """

    def __init__(self, maxsize: int = 0) -> None:
        reader, writer = seqpacket_pair()
        writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._take(reader, writer, make_memfd("torchcrew-mailbox", _CONTROL_BYTES), maxsize)

    def _take(self, reader: QuietSocket, writer: QuietSocket, control: int, maxsize: int) -> None:
        for sock in (reader, writer):
            sock.setblocking(True)  # whatever `socket.setdefaulttimeout` says
        self.reader = reader
        self.writer = writer
        self.control = control
        self.maxsize = maxsize
        self.holders = Holders()
        self.page = libc.view_of(libc.map_shared(control, 0, _CONTROL_BYTES), _CONTROL_BYTES)
        self._last = ctypes.c_uint64.from_buffer(self.page)
        #: To be held together, in this order, by who is the only producer of all threads and processes.
        self.putting = threading.Lock()
        self.record = RecordLock(control)
        self._finalizer = weakref.finalize(self, os.close, control)
        self._finalizer.atexit = False
        _mailboxes.add(self)

    def __reduce__(self) -> Any:
        context.assert_spawning(self)
        return _attach, (
            self.reader,
            self.writer,
            reduction.DupFd(self.control),
            self.maxsize,
            self.holders.send_along(),
        )

    # Putting ----------------------------------------------------------------------------------------------------------

    def put(
        self, payload: bytes, fds: Sequence[int] = (), timeout: float | None = None, *, patient: bool = True
    ) -> None:
        """Put a packet in; waits while the mailbox is full.

        Args:
            fds: descriptors, which stay the caller's.
            timeout: seconds; None: as long as it takes.
            patient: wait also when nobody is left who could make room.

        Raises:
            Full: it was full for ``timeout`` seconds.
            BrokenPipeError: the mailbox was closed for all.
            Deserted: nobody else holds it any more, and no other thread of this process runs.
            TooManyDescriptors: ``fds`` are more than this process can pass.
        """
        sealed = Envelope(payload, fds)
        self.wait_to_put(lambda: self.offer(sealed, self.maxsize) is Result.SENT, timeout, patient=patient)

    def wait_to_put(self, attempt: Callable[[], bool], timeout: float | None, *, patient: bool = True) -> None:
        """Try to put something until that is done; for the rest as `put`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        nap = _FIRST_NAP
        while not attempt():
            left = nap if deadline is None else min(nap, deadline - time.monotonic())
            if left <= 0:
                raise Full
            if nap == _LONGEST_NAP and not patient:
                if not self.holders.deserted():
                    self.holders.tell()
                elif timeout is None:
                    raise Deserted
            self.wait_for_room(left)
            nap = min(2 * nap, _LONGEST_NAP)

    def wait_for_room(self, seconds: float | None) -> None:
        """Sleep until the socket has room; for some milliseconds if it has, for then something else is full.

        Args:
            seconds: the longest wait; None: as long as it takes.
        """
        started = time.monotonic()
        poller = select.poll()
        poller.register(self.writer, select.POLLOUT)
        if poller.poll(None if seconds is None else seconds * 1000) and time.monotonic() - started < _FIRST_NAP:
            time.sleep(_LONGEST_NAP if seconds is None else min(seconds, _LONGEST_NAP))

    def offer(self, sealed: Envelope, maxsize: int = 0, tally: Tally | None = None) -> Result:
        """Send a packet if there is room; as one step for all producers.

        Args:
            maxsize: how many may wait; 0 or less for any number.

        Raises:
            BrokenPipeError: the mailbox was closed for all.
        """
        with self.putting:
            try:
                if not self.record.acquire(_PATIENCE):
                    return Result.CROWDED
                return self._offer(sealed, maxsize, tally)
            finally:
                self.record.release()

    def _offer(self, sealed: Envelope, maxsize: int, tally: Tally | None) -> Result:
        last = int(self._last.value)
        if maxsize > 0 and self._waiting(last) >= maxsize:
            return Result.FULL
        if tally is not None:
            tally.begin()
        # Stored first: a number that is not sent is passed over, one that is sent twice would be counted once.
        self._last.value = last + 1
        try:
            sealed.send(self.writer, last + 1)
        except OSError as error:
            self._last.value = last
            if tally is not None:
                tally.undo()
            if error.errno in FULL_ERRORS:
                return Result.CROWDED
            raise
        if tally is not None:
            tally.done()
        return Result.SENT

    # Taking -----------------------------------------------------------------------------------------------------------

    def get(self, timeout: float | None = None, *, patient: bool = False) -> Packet:
        """Take the first packet out; waits for one.

        Args:
            timeout: seconds; None: as long as it takes.
            patient: wait also when nobody is left who could put something.

        Raises:
            Empty: none came in time.
            EOFError: the mailbox was closed for all, and is empty.
            Deserted: nobody else holds it any more, and no other thread of this process runs.
            TooManyDescriptors: the packet's descriptors could not be taken over; it is lost.
        """
        received = self.receive(linger=timeout is None or timeout > 0)
        if received is None:
            received = self.holders.wait(
                lambda: self.receive(linger=False), self.reader.fileno(), select.POLLIN, timeout, patient=patient
            )
        return self.open(received)

    def receive(self, *, linger: bool = True) -> Any:
        """Receive raw, for `open`: at once, or after looking for some microseconds; None if there was nothing."""
        return receive_packet(self.reader, linger=linger)

    def open(self, received: Any) -> Packet:
        """Take apart what `receive` returned."""
        return open_packet(received)

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether there is a packet, or the end, to `get` within ``timeout`` seconds."""
        poller = select.poll()
        poller.register(self.reader, select.POLLIN)
        return bool(poller.poll(None if timeout is None else max(0.0, timeout) * 1000))

    # ------------------------------------------------------------------------------------------------------------------

    def count(self) -> int:
        """How many packets wait."""
        return self._waiting(int(self._last.value))

    def last(self) -> int:
        """The number of the packet that was sent last; or, of one that is being sent."""
        return int(self._last.value)

    def first(self) -> int:
        """The number of the first packet that waits; the next one's if there is none."""
        last = int(self._last.value)  # before the look: what is sent in between was not received before this number
        return peek_number(self.reader) or last + 1

    def _waiting(self, last: int) -> int:
        number = peek_number(self.reader)
        return 0 if number is None else max(0, last + 1 - number)

    def end(self) -> None:
        """Close for all processes: nothing can be put any more, waiting ones wake, what was sent is still delivered."""
        with contextlib.suppress(OSError):
            self.writer.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let go of this process's ends; idempotent."""
        self.reader.close()
        self.writer.close()
        self._finalizer()


_mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()


def _attach(reader: QuietSocket, writer: QuietSocket, control: Any, maxsize: int, presence: Any) -> Mailbox:
    mailbox = Mailbox.__new__(Mailbox)
    mailbox._take(reader, writer, control.detach(), maxsize)
    mailbox.holders.received(presence)
    return mailbox


def _renew_locks() -> None:
    for mailbox in list(_mailboxes):
        mailbox.putting = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_locks)
