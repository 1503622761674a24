"""Messages on SOCK_SEQPACKET sockets: whole or not at all, also when a process is killed in the middle.

    user's process                                        worker k
      Receiver ◄───── results: one socket for all ────────  Sender         blocks when the socket is full
      IndexSender k ─ index socket k, in fragments ───────► IndexReceiver  never blocks: keeps a backlog

Owner      the user's process makes the socket pairs; each side closes the end of the other.
Death      a worker dies: its pidfd wakes the Receiver, which first delivers every complete message.
           the user dies, or hangs up (`Receiver.hang_up`): send raises BrokenPipeError, get raises EOFError.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any

from torchcrew.channel.message import PACKET_MAX, Encoder, decode
from torchcrew.channel.sockets import look
from torchcrew.channel.writer import BlockWriter
from torchcrew.memory.arena import Loan
from torchcrew.memory.lease import SWEEP_EVERY, sweep_now_and_then

__all__ = ("IndexReceiver", "IndexSender", "Receiver", "Sender")

_HEAD = struct.Struct("II")  # sender's number, bytes of the header
_TIMEVAL = struct.Struct("ll")
_LAST, _MORE = b"\0", b"\1"
_FRAGMENT = 32 << 10
#: While an index socket is full, how often to try again, in seconds. Rare: it takes thousands of unread indices.
_RETRY = 0.01


class Sender:
    """A worker's end of the result socket."""

    def __init__(self, sock: socket.socket, number: int, writer: BlockWriter) -> None:
        self._sock = sock
        self._number = number
        self._encode = Encoder(writer).encode

    def send(self, obj: Any) -> None:
        """Send ``obj`` as one message; waits while the socket is full.

        Raises:
            BrokenPipeError: the receiver hung up or died.
            Exception: ``obj`` cannot be pickled; nothing was sent.
        """
        header, body = self._encode(obj)
        packet = b"".join((_HEAD.pack(self._number, len(header)), header, body))
        self._sock.send(packet, socket.MSG_NOSIGNAL)  # user code may have set SIGPIPE to its default, which kills

    def hung_up(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the receiver to hang up or die."""
        poll = select.poll()
        poll.register(self._sock, 0)
        return bool(poll.poll(seconds * 1000))


class Receiver:
    """The user's end of the result socket; watches the workers' deaths while it waits. One thread at a time.

    Args:
        sock: the socket.
        lease: opens a loan of sender ``number``.
        on_death: called with the number of a worker that died, once; returns whether that was unexpected.
    """

    def __init__(
        self,
        sock: socket.socket,
        lease: Callable[[int, Loan], Any],
        on_death: Callable[[int], bool],
    ) -> None:
        self._sock = sock
        self._lease = lease
        self._on_death = on_death
        self._epoll = select.epoll()
        self._epoll.register(sock, select.EPOLLIN)
        self._pidfds: dict[int, int] = {}
        self.on_wait: Callable[[bool], None] = lambda begins: None
        self._buffer = bytearray(PACKET_MAX + INLINE_SLACK)
        self._view = memoryview(self._buffer)
        self.index_senders: Sequence[IndexSender] = ()

    def watch(self, number: int, pidfd: int) -> None:
        """Notice the death of worker ``number``. The pidfd stays the caller's, who closes it after this receiver."""
        self._pidfds[pidfd] = number
        self._epoll.register(pidfd, select.EPOLLIN)

    def get(self, timeout: float | None = None) -> Any:
        """The next message.

        Raises:
            Empty: none came within ``timeout`` seconds, or a worker died and everything it had sent is delivered, or
                the receiver was hung up.
        """
        try:
            nbytes = self._sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            nbytes = None
        if nbytes is None:
            self.on_wait(True)
            try:
                nbytes = look(self._sock.recv_into, self._buffer, 0, 0)
                if nbytes is None:
                    nbytes = self._wait(timeout)
            finally:
                self.on_wait(False)
        if not nbytes:
            raise Empty
        number, length = _HEAD.unpack_from(self._buffer)
        start = _HEAD.size + length
        body = bytearray(self._view[start:nbytes])
        if not length:
            return decode(b"", body)
        return decode(self._view[_HEAD.size : start], body, functools.partial(self._lease, number))

    def _wait(self, timeout: float | None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = -1 if deadline is None else deadline - time.monotonic()
            if deadline is not None and left <= 0:
                raise Empty
            if [sender for sender in self.index_senders if sender.backlog and not sender.flush()]:
                left = _RETRY if left < 0 else min(left, _RETRY)
            if sweep_now_and_then():  # the worker may wait for just these blocks
                left = SWEEP_EVERY if left < 0 else min(left, SWEEP_EVERY)
            events = self._epoll.poll(left)
            if len(events) > 1:
                events.sort(key=lambda event: event[0] in self._pidfds)
            for fd, _ in events:
                if fd not in self._pidfds:
                    with contextlib.suppress(BlockingIOError):
                        return self._sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
                elif self._on_death(self._forget(fd)):
                    raise Empty

    def _forget(self, pidfd: int) -> int:
        self._epoll.unregister(pidfd)
        return self._pidfds.pop(pidfd)

    def hang_up(self) -> None:
        """No more messages: senders that wait are woken with an error, also where a stray fork holds the socket."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close what is its own: the socket, and the epoll before its workers' pidfds end; idempotent."""
        self._pidfds.clear()
        self._epoll.close()
        self._sock.close()


#: Room in the receiver's buffer beyond a packet's limit, for the pickle of records and loans around it.
INLINE_SLACK = 64 << 10


class IndexSender:
    """The user's end of a worker's index socket. `put` never waits: a blocked worker must not block its user."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._encode = Encoder().encode
        self.backlog: collections.deque[bytes] = collections.deque()
        self.ended = False

    def put(self, obj: Any) -> None:
        """Send ``obj``; None says that nothing more will come.

        Raises:
            Exception: ``obj`` cannot be pickled.
        """
        self.ended = self.ended or obj is None
        header, body = self._encode(obj)
        data = b"".join((_LAST, _HEAD.pack(0, len(header)), header, body))
        if len(data) <= _FRAGMENT:
            self.backlog.append(data)
            self.flush()
            return
        data = data[1:]
        for start in range(0, len(data), _FRAGMENT):
            more = start + _FRAGMENT < len(data)
            self.backlog.append((_MORE if more else _LAST) + data[start : start + _FRAGMENT])
        self.flush()

    def flush(self) -> bool:
        """Send what waits, as far as the socket takes it; whether that was everything."""
        try:
            while self.backlog:
                self._sock.send(self.backlog[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self.backlog.popleft()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.ENOBUFS, errno.ENOMEM):
                return False
            self.backlog.clear()  # the worker is gone, or we closed: who waits for its answer is told by its pidfd
        return True

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._sock.close()


class IndexReceiver:
    """A worker's end of its index socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._timeout = -1.0
        self._parts = bytearray()

    def get(self, timeout: float) -> Any:
        """The next message.

        Raises:
            Empty: none came within ``timeout`` seconds.
            EOFError: the sender is gone.
        """
        if timeout != self._timeout:
            seconds = max(timeout, 1e-6)  # to the kernel 0 means for ever
            self._sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
            )
            self._timeout = timeout
        while True:
            data = look(self._sock.recv, _FRAGMENT + 1, 0)
            try:
                data = data or self._sock.recv(_FRAGMENT + 1)
            except BlockingIOError:
                raise Empty from None
            if not data:
                raise EOFError("the process that owns this worker is gone")
            if data[0] or self._parts:
                self._parts += memoryview(data)[1:]
                if data[0]:
                    continue
                data, self._parts = b"\0" + self._parts, bytearray()
            start = 1 + _HEAD.size + _HEAD.unpack_from(data, 1)[1]
            return decode(memoryview(data)[1 + _HEAD.size : start], bytearray(data[start:]))
