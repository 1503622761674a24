"""What is in one packet: a number, a payload and descriptors, whatever their size.

    payload of at most PACKET_MAX bytes ─► in the packet        at most 252 descriptors ─► beside the packet
    a larger one ─────────────────────────► a memfd, beside it  more ────────────────────► in a socket, beside it

A SOCK_SEQPACKET packet is in the socket or it is not, and exactly one process receives it: no process can be killed in
the middle of that. What lies in a memfd or a socket is written before the packet is sent.

Owner      an `Envelope` keeps what it refers to until it is forgotten; what was received closes itself.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchcrew.channel.message import PACKET_MAX
from torchcrew.channel.sharing import Passed, decode_shared
from torchcrew.channel.sockets import look, seqpacket_pair
from torchcrew.errors import TooManyDescriptors
from torchcrew.memory import libc
from torchcrew.memory.arena import make_memfd

__all__ = (
    "FULL_ERRORS",
    "HEAD",
    "Envelope",
    "Packet",
    "envelope",
    "load_packet",
    "open_packet",
    "peek_number",
    "receive_packet",
)

#: Number of the packet, bytes of the payload when it lies in a memfd (else 0), descriptors in a socket (else 0).
HEAD = struct.Struct("<QQI")
#: The kernel's limit of descriptors in one packet.
_FDS_MAX = 253
_FDS_SPACE = socket.CMSG_SPACE(_FDS_MAX * 4)
#: Descriptors sent in one packet: those of the message and at most one for a payload that is too large.
_FDS_IN_PACKET = _FDS_MAX - 1
# As plain numbers: the socket module's are enums, whose operators take microseconds.
_DONTWAIT, _NOSIGNAL, _CTRUNC = int(socket.MSG_DONTWAIT), int(socket.MSG_NOSIGNAL), int(socket.MSG_CTRUNC)
_RECEIVE = _DONTWAIT | int(socket.MSG_CMSG_CLOEXEC)
_PEEK = _DONTWAIT | int(socket.MSG_PEEK)
#: What a send that must not wait ends with when there is no room: in the socket, in the kernel's memory, or for more
#: descriptors in flight than this user may have.
FULL_ERRORS = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS})


class Packet(NamedTuple):
    """A received packet."""

    number: int
    """Counts the packets of the mailbox, from 1; some are left out when a producer was killed."""
    payload: memoryview
    """Writable, and nobody else's where the envelope was sent once."""
    fds: list[Passed]


class Envelope:
    """A message that fits in one packet; keeps what it refers to until it is forgotten.

    It is to be sent once, or else taken as `private` by `open_packet`.

    Args:
        payload: bytes.
        fds: descriptors, which stay the caller's.
        keep: what must live until the message is sent.

    Raises:
        TooManyDescriptors: this process has none left for what is too large.
    """

    __slots__ = ("_ancillary", "_head", "_keep", "_payload", "_spare")

    def __init__(self, payload: Any, fds: Sequence[int] = (), keep: Any = None) -> None:
        self._keep = keep
        self._spare = contextlib.ExitStack() if len(fds) > _FDS_IN_PACKET or len(payload) > PACKET_MAX else None
        if self._spare is None:
            self._head, self._payload = (0, 0), payload
        else:
            self._head, self._payload, fds = envelope(payload, fds, self._spare)
        self._ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []

    def send(self, sock: socket.socket, number: int = 0, flags: int = _DONTWAIT) -> None:
        """Send it as one packet.

        Raises:
            OSError: it was not sent; with one of `FULL_ERRORS`, because there was no room.
        """
        # The user's code may have set SIGPIPE to its default, which kills.
        sock.sendmsg((HEAD.pack(number, *self._head), self._payload), self._ancillary, flags | _NOSIGNAL)

    def __del__(self) -> None:
        spare = getattr(self, "_spare", None)
        if spare is not None:
            spare.close()


def envelope(
    payload: Any, fds: Sequence[int], spare: contextlib.ExitStack
) -> tuple[tuple[int, int], Any, Sequence[int]]:
    """Make a message fit: what is too large travels in a memfd or a socket, which ``spare`` closes.

    Returns:
        The two last fields of the `HEAD`, the payload and the descriptors of the packet.

    Raises:
        TooManyDescriptors: this process has none left for what is too large.
    """
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
        if error.errno in _NONE_LEFT:
            raise TooManyDescriptors() from error
        raise
    return (in_memfd, in_socket), payload, fds


def _to_memfd(payload: Any, spare: contextlib.ExitStack) -> int:
    fd = make_memfd("torchcrew-packet", len(payload))
    spare.callback(os.close, fd)
    libc.write_all(fd, payload)
    return fd


def _to_socket(fds: Sequence[int], spare: contextlib.ExitStack) -> int:
    """A socket that the descriptors wait in."""
    ours, theirs = seqpacket_pair()
    spare.callback(theirs.close)
    with ours:
        for start in range(0, len(fds), _FDS_MAX):
            part = array.array("i", fds[start : start + _FDS_MAX])
            # Not waiting: nobody reads before all are in. At 900 bytes of buffer a part, some 200 parts fit.
            ours.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, part)], socket.MSG_DONTWAIT)
    return theirs.fileno()


class _Buffers:
    """Buffers to receive in, one for each thread that receives at the same time. No lock: lists are atomic."""

    def __init__(self) -> None:
        self.free: list[bytearray] = []

    def take(self) -> bytearray:
        try:
            return self.free.pop()
        except IndexError:
            return bytearray(PACKET_MAX + HEAD.size)


_buffers = _Buffers()


def receive_packet(sock: socket.socket, *, linger: bool = False) -> Any:
    """Receive raw, for `open_packet`: at once, or after looking for some microseconds; None if there was nothing.

    Raises:
        OSError: the socket is closed here.
    """
    buffer = _buffers.take()
    received: Any = None
    try:
        received = sock.recvmsg_into([buffer], _FDS_SPACE, _RECEIVE)
    except BlockingIOError:
        if linger:
            received = look(sock.recvmsg_into, [buffer], _FDS_SPACE, _RECEIVE)
    except ConnectionResetError:
        # The peer is gone and had not read everything: said once, before what it had sent, which comes now.
        return receive_packet(sock)
    finally:
        if received is None:
            _buffers.free.append(buffer)
    return None if received is None else (buffer, received)


def open_packet(received: Any, *, private: bool = False) -> Packet:
    """Take apart what `receive_packet` returned.

    Args:
        received: what it returned.
        private: the same envelope was sent to others, who shall not see what is written into this payload.

    Raises:
        EOFError: nobody can send any more.
        TooManyDescriptors: the descriptors could not be taken over; the message is lost.
    """
    buffer, (nbytes, ancillary, flags, _) = received
    try:
        fds = _passed(ancillary)
        if not nbytes:
            raise EOFError
        if flags & _CTRUNC:
            raise TooManyDescriptors()
        number, in_memfd, in_socket = HEAD.unpack_from(buffer)
        payload = memoryview(bytearray(memoryview(buffer)[HEAD.size : nbytes]))
    finally:
        _buffers.free.append(buffer)
    if in_memfd:
        payload = _read_memfd(fds.pop(), in_memfd, private)
    if in_socket:
        fds = _from_socket(fds.pop(), in_socket)
    return Packet(number, payload, fds)


def load_packet(received: Any) -> Any:
    """The object whose pickle `receive_packet` returned; not copied before if nothing travels beside it.

    Raises:
        Exception: whatever unpickling raises, and as `open_packet`.
    """
    buffer, (nbytes, ancillary, flags, _) = received
    if ancillary or flags & socket.MSG_CTRUNC or not nbytes:
        packet = open_packet(received)
        return decode_shared(packet.payload, packet.fds)
    try:
        return pickle.loads(memoryview(buffer)[HEAD.size : nbytes])
    finally:
        _buffers.free.append(buffer)


def peek_number(sock: socket.socket) -> int | None:
    """The number of the first packet that waits; None if there is none, or the end."""
    head = bytearray(HEAD.size)
    try:
        if not sock.recv_into(head, 0, _PEEK):
            return None
    except BlockingIOError:
        return None
    number: int = HEAD.unpack(head)[0]
    return number


def _passed(ancillary: Any) -> list[Passed]:
    return [Passed(fd) for _, kind, data in ancillary if kind == socket.SCM_RIGHTS for fd in _numbers(data)]


def _numbers(data: bytes) -> array.array[int]:
    return array.array("i", data[: len(data) - len(data) % 4])


def _read_memfd(passed: Passed, nbytes: int, private: bool) -> memoryview:
    """The payload, mapped: what is decoded from it copies it once."""
    fd = passed.detach()
    try:
        address = libc.map_private(fd, nbytes) if private else libc.map_shared(fd, 0, nbytes)
    finally:
        os.close(fd)
    return memoryview(libc.view_of(address, nbytes)).cast("B")


def _from_socket(passed: Passed, count: int) -> list[Passed]:
    fds: list[Passed] = []
    with socket.socket(fileno=passed.detach()) as box:
        while len(fds) < count:
            _, ancillary, flags, _ = box.recvmsg(1, _FDS_SPACE, _RECEIVE)
            received = _passed(ancillary)
            if flags & socket.MSG_CTRUNC or not received:
                raise TooManyDescriptors()
            fds += received
    return fds
