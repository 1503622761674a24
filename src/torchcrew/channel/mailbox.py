"""A mailbox: one SOCK_SEQPACKET pair that any number of processes put packets into and take packets from.

    producers                                                                consumers
      put ─► record lock ─► number ─► send ─► [ both ends: every process ] ─► receive ─► get
                             └── control page (memfd): the number of the last packet

A packet is in the socket or it is not, and exactly one process receives it: no process can be killed in the middle of
that. The one lock is a record lock, which the kernel releases with the process that holds it. How many packets are
waiting is not counted but computed, from the number of the first one in the socket and of the last one sent.

Owner      every process owns its copies of the two ends and of the control page; they travel by inheritance.
Large      what a packet cannot hold goes into a memfd, more descriptors than it may carry into a socket; the
           descriptor of that is sent instead.
Death      of a producer: its packet was sent or not; a number that was not sent is passed over.
           of a consumer: at most the packet that it was receiving is lost.
           of every other holder, while this process waits: `Deserted` (see `channel.holders`).
Closing    `close` lets go of this process's ends. `end` closes for all: what was sent is delivered, then EOFError.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import context, reduction
from queue import Empty, Full
from typing import Any, NamedTuple

from torchcrew.channel.holders import Holders
from torchcrew.channel.message import PACKET_MAX
from torchcrew.channel.sharing import Passed
from torchcrew.channel.sockets import QuietSocket, look, seqpacket_pair
from torchcrew.errors import TooManyDescriptors
from torchcrew.memory import libc
from torchcrew.memory.arena import make_memfd

__all__ = ("CONTROL_FREE", "Deserted", "Mailbox", "Packet")

#: Number of the packet, bytes of the payload when it lies in a memfd (else 0), descriptors in a socket (else 0).
_HEAD = struct.Struct("<QQI")
#: The kernel's limit of descriptors in one packet.
_FDS_MAX = 253
_FDS_SPACE = socket.CMSG_SPACE(_FDS_MAX * 4)
#: Descriptors sent in one packet: those of the message and at most one for a payload that is too large.
_FDS_IN_PACKET = _FDS_MAX - 1
#: Bytes of the control page; what the mailbox does not use, from `CONTROL_FREE` on, its user may.
_CONTROL_BYTES = 4 << 10
CONTROL_FREE = 64
#: How long a put that waits for `maxsize` sleeps between two looks, in seconds: it begins short, and grows.
_FIRST_NAP, _LONGEST_NAP = 50e-6, 5e-3
#: A put that finds the lock taken looks again after this, in seconds: it is held for microseconds.
_LOCK_NAP = 20e-6
_FULL_ERRORS = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})


class Deserted(Exception):
    """Nobody is left who could put something into the mailbox that this process waits for."""


class Packet(NamedTuple):
    """A received packet."""

    number: int
    """Counts the packets of the mailbox, from 1; some are left out when a producer was killed."""
    payload: memoryview
    """Writable, and nobody else's."""
    fds: list[Passed]


class Mailbox:
    """See the module. Every method may be called by any thread; pickles only while a process is being started.

    Args:
        maxsize: packets that may wait; 0 or less for as many as the kernel holds (some hundreds).
    """

    def __init__(self, maxsize: int = 0) -> None:
        reader, writer = seqpacket_pair()
        self._take(reader, writer, make_memfd("torchcrew-mailbox", _CONTROL_BYTES), maxsize)

    def _take(self, reader: QuietSocket, writer: QuietSocket, control: int, maxsize: int) -> None:
        self.reader = reader
        self.writer = writer
        self.control = control
        self.maxsize = maxsize
        self.holders = Holders()
        #: Called in a wait when a holder has gone away and others are left.
        self.on_holder_gone: Callable[[], None] = _nothing
        address = libc.map_shared(control, 0, _CONTROL_BYTES)
        self.page = (ctypes.c_char * _CONTROL_BYTES).from_address(address)
        weakref.finalize(self.page, libc.unmap, address, _CONTROL_BYTES).atexit = False
        self._last = ctypes.c_uint64.from_buffer(self.page)
        self._putting = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, control)
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

    def put(self, payload: bytes, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Put a packet in; waits while the mailbox is full.

        Raises:
            Full: it was full for ``timeout`` seconds.
            BrokenPipeError: the mailbox was closed for all.
            TooManyDescriptors: ``fds`` are more than this process can pass.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._putting.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise Full
        try:
            with contextlib.ExitStack() as spare:
                head, payload, fds = _envelope(payload, fds, spare)
                nap = _FIRST_NAP
                while not self._try_put(head, payload, fds):
                    if deadline is not None and time.monotonic() >= deadline:
                        raise Full
                    self._wait_for_room(nap if deadline is None else min(nap, max(0.0, deadline - time.monotonic())))
                    nap = min(2 * nap, _LONGEST_NAP)
        finally:
            self._putting.release()

    def _try_put(self, head: tuple[int, int], payload: bytes, fds: Sequence[int]) -> bool:
        """Send one packet if there is room, as one step for all producers."""
        if not self._lock():
            time.sleep(_LOCK_NAP)
            return False
        try:
            last = self._last.value
            if self.maxsize > 0 and self._waiting(last) >= self.maxsize:
                return False
            self._last.value = last + 1
            parts = (_HEAD.pack(last + 1, *head), payload)
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self.writer.sendmsg(parts, passed, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError as error:
                self._last.value = last
                if isinstance(error, BlockingIOError) or error.errno in _FULL_ERRORS:
                    return False
                raise
            return True
        finally:
            fcntl.lockf(self.control, fcntl.LOCK_UN, 1)

    def _lock(self) -> bool:
        try:
            fcntl.lockf(self.control, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except BlockingIOError:
            return False
        return True

    def _wait_for_room(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self.writer, select.POLLOUT)
        if poller.poll(seconds * 1000) and self.maxsize > 0:
            time.sleep(seconds)  # the socket has room, the count has not

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
        received = self.receive() or self._wait(timeout, patient)
        return self.open(received)

    def receive(self, *, linger: bool = True) -> Any:
        """Receive raw, for `open`: at once, or after looking for some microseconds; None if there was nothing."""
        buffer = _buffers.take()
        try:
            received: Any = self.reader.recvmsg_into([buffer], _FDS_SPACE, _RECEIVE)
        except BlockingIOError:
            received = look(self.reader.recvmsg_into, [buffer], _FDS_SPACE, _RECEIVE) if linger else None
        if received is None:
            _buffers.put_back(buffer)
            return None
        return buffer, received

    def _wait(self, timeout: float | None, patient: bool) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise Empty
            watched = [] if patient else self.holders.watched()
            if not patient and self.holders.deserted() and threading.active_count() == 1:
                received = self.receive(linger=False)  # the last thing that it did may have been a put
                if received is not None:
                    return received
                if timeout is None:
                    raise Deserted
            poller = select.poll()
            poller.register(self.reader, select.POLLIN)
            for fd in watched:
                poller.register(fd, 0)
            ready = poller.poll(None if left is None else left * 1000)
            received = self.receive(linger=False)
            if received is not None:
                return received
            if any(fd in watched for fd, _ in ready):
                self.on_holder_gone()

    def open(self, received: Any) -> Packet:
        """Take apart what `receive` returned."""
        buffer, (nbytes, ancillary, flags, _) = received
        try:
            fds = [Passed(fd) for data in ancillary for fd in array.array("i", data[2])]
            if not nbytes:
                raise EOFError("the queue was closed")
            if flags & socket.MSG_CTRUNC:
                raise TooManyDescriptors()
            number, in_memfd, in_socket = _HEAD.unpack_from(buffer)
            payload = memoryview(bytearray(memoryview(buffer)[_HEAD.size : nbytes]))
        finally:
            _buffers.put_back(buffer)
        if in_memfd:
            payload = _read_memfd(fds.pop(), in_memfd)
        if in_socket:
            fds = _from_socket(fds.pop(), in_socket)
        return Packet(number, payload, fds)

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether there is a packet, or the end, to `get` within ``timeout`` seconds."""
        poller = select.poll()
        poller.register(self.reader, select.POLLIN)
        return bool(poller.poll(None if timeout is None else timeout * 1000))

    # ------------------------------------------------------------------------------------------------------------------

    def count(self) -> int:
        """How many packets wait."""
        return self._waiting(self._last.value)

    def first(self) -> int:
        """The number of the first packet that waits; the next one's if there is none."""
        head = bytearray(_HEAD.size)
        last = self._last.value  # before the look: what is sent in between was not received before this number
        try:
            self.reader.recv_into(head, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return int(last) + 1
        return int(_HEAD.unpack(head)[0]) or int(last) + 1

    def _waiting(self, last: int) -> int:
        return max(0, last + 1 - self.first())

    def end(self) -> None:
        """Close for all processes: nothing can be put any more, waiting ones wake, what was sent is still delivered."""
        with contextlib.suppress(OSError):
            self.writer.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let go of this process's ends; idempotent."""
        self.reader.close()
        self.writer.close()
        self._finalizer()


_RECEIVE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()


def _nothing() -> None:
    """Nobody wants to know."""


def _close(control: int) -> None:
    os.close(control)


def _attach(reader: QuietSocket, writer: QuietSocket, control: Any, maxsize: int, presence: Any) -> Mailbox:
    mailbox = Mailbox.__new__(Mailbox)
    mailbox._take(reader, writer, control.detach(), maxsize)
    mailbox.holders.received(presence)
    return mailbox


class _Buffers:
    """Buffers to receive in, one for each thread that receives at the same time. No lock: lists are atomic."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        try:
            return self._free.pop()
        except IndexError:
            return bytearray(2 * PACKET_MAX)

    def put_back(self, buffer: bytearray) -> None:
        self._free.append(buffer)


_buffers = _Buffers()


def _envelope(
    payload: bytes, fds: Sequence[int], spare: contextlib.ExitStack
) -> tuple[tuple[int, int], bytes, Sequence[int]]:
    """Make a packet fit: what is too large travels in a memfd or a socket; ``spare`` closes our copies of those."""
    in_memfd = in_socket = 0
    try:
        if len(fds) > _FDS_IN_PACKET:
            in_socket = len(fds)
            fds = [_to_socket(fds, spare)]
        if len(payload) > PACKET_MAX:
            in_memfd = len(payload)
            fds = [*fds, _to_memfd(payload, spare)]
            payload = b""
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS):
            raise TooManyDescriptors() from error
        raise
    return (in_memfd, in_socket), payload, fds


def _to_memfd(payload: bytes, spare: contextlib.ExitStack) -> int:
    fd = make_memfd("torchcrew-packet", len(payload))
    spare.callback(os.close, fd)
    view, done = memoryview(payload), 0
    while done < len(payload):
        done += os.pwrite(fd, view[done:], done)
    return fd


def _read_memfd(passed: Passed, nbytes: int) -> memoryview:
    """The payload, mapped: what is decoded from it copies it once."""
    fd = passed.detach()
    try:
        address = libc.map_shared(fd, 0, nbytes)
    finally:
        os.close(fd)
    view = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(view, libc.unmap, address, nbytes).atexit = False
    return memoryview(view).cast("B")


def _to_socket(fds: Sequence[int], spare: contextlib.ExitStack) -> int:
    """A socket that the descriptors wait in."""
    ours, theirs = seqpacket_pair()
    spare.callback(ours.close)
    spare.callback(theirs.close)
    for start in range(0, len(fds), _FDS_MAX):
        part = array.array("i", fds[start : start + _FDS_MAX])
        # Not waiting: nobody reads before all are in. At 900 bytes of buffer a part, some 200 parts fit.
        ours.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, part)], socket.MSG_DONTWAIT)
    return theirs.fileno()


def _from_socket(passed: Passed, count: int) -> list[Passed]:
    fds: list[Passed] = []
    with socket.socket(fileno=passed.detach()) as box:
        while len(fds) < count:
            _, ancillary, flags, _ = box.recvmsg(1, _FDS_SPACE, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
            received = [Passed(fd) for data in ancillary for fd in array.array("i", data[2])]
            if flags & socket.MSG_CTRUNC or not received:
                raise TooManyDescriptors()
            fds += received
    return fds


def _renew_locks() -> None:
    for mailbox in list(_mailboxes):
        mailbox._putting = threading.Lock()  # another thread of the parent may have held it
    _buffers._free.clear()


os.register_at_fork(after_in_child=_renew_locks)
