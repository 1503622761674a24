"""`Pipe`: two connections whose messages are packets, whole or not at all, with descriptors beside them.

    one process                                                     another
      PacketConnection ◄───────── one SEQPACKET pair ─────────►  PacketConnection
         send: pickle, descriptors of shared tensors ─ one packet ─►  recv: the pickle, the same memory

Tensors become shared, as with `torch.multiprocessing`; no server, socket or file takes part. What is too large for a
packet lies in a memfd, so a message of any size takes one step: a process that is killed in `send` has sent it or not.

Owner      each connection owns its descriptor. Connections travel to processes that are being started, and in messages.
Death      of the other side: what it had sent arrives, then EOFError; `send` raises BrokenPipeError.

`Connection` is the standard library's class: what `Pipe` returns is one, and what `Client` and `Listener` return, too.
"""

from __future__ import annotations

import errno
import io
import multiprocessing.connection as _stock
import os
import select
import socket
import time
from multiprocessing import reduction
from typing import Any

from torchcrew.channel.envelope import FULL_ERRORS, Envelope, Packet, open_packet, receive_packet
from torchcrew.channel.sharing import STAND_IN, Keep, decode_shared, encode_shared, pass_descriptor
from torchcrew.channel.sockets import QuietSocket, seqpacket_pair

__all__ = ("PacketConnection", "Pipe")

#: How long a send sleeps that finds room in the socket, but none for its descriptors, in seconds.
_NAP = 1e-3


def __getattr__(name: str) -> Any:
    """What the standard library's module has and this one has not."""
    return getattr(_stock, name)


class PacketConnection(_stock.Connection):
    """One end of a pipe. See `multiprocessing.connection.Connection` for what the methods do.

    Args:
        sock: a SOCK_SEQPACKET socket, or the descriptor of one; it belongs to the connection from now on.
    """

    def __init__(self, sock: Any, readable: bool = True, writable: bool = True) -> None:
        if not readable and not writable:
            raise ValueError("at least one of `readable` and `writable` must be True")
        if not isinstance(sock, socket.socket):
            if sock.__index__() < 0:
                raise ValueError("invalid handle")
            sock = QuietSocket(fileno=sock)
        sock.setblocking(True)  # whatever `socket.setdefaulttimeout` says
        self._socket = sock
        self._readable, self._writable = readable, writable

    @property
    def _handle(self) -> int | None:
        sock = self.__dict__.get("_socket")
        return None if sock is None or sock.fileno() < 0 else sock.fileno()

    def _close(self, *_: Any) -> None:
        self._socket.close()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._close()

    def send(self, obj: Any) -> None:
        """Send an object; the memory of its tensors is shared from now on."""
        self._check_closed()  # type: ignore[attr-defined]
        self._check_writable()  # type: ignore[attr-defined]
        self._send_packet(Envelope(*encode_shared(obj)))

    def recv(self) -> Any:
        """Receive an object; waits for one.

        Raises:
            EOFError: the other side is gone, and everything that it sent has been received.
            TooManyDescriptors: this process has none left for the object's memory; the object is lost.
        """
        self._check_closed()  # type: ignore[attr-defined]
        self._check_readable()  # type: ignore[attr-defined]
        packet = self._recv_packet()
        return decode_shared(packet.payload, packet.fds)

    def _send_bytes(self, buf: Any) -> None:
        self._send_packet(Envelope(bytes(buf)))

    def _recv_bytes(self, maxsize: int | None = None) -> io.BytesIO | None:
        payload = self._recv_packet().payload
        if maxsize is not None and len(payload) > maxsize:
            return None
        received = io.BytesIO()
        received.write(payload)  # its position tells the size
        return received

    def _send_packet(self, sealed: Envelope) -> None:
        while True:
            try:
                sealed.send(self._socket)
                return
            except ConnectionResetError:  # the other side is gone, and had not read everything
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from None
            except OSError as error:
                if error.errno not in FULL_ERRORS:
                    raise
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        if poller.poll(0):
            time.sleep(_NAP)  # there is room: it is descriptors that are too many on their way
        else:
            poller.poll()

    def _recv_packet(self) -> Packet:
        while True:
            received = receive_packet(self._socket, linger=True)
            if received is not None:
                return open_packet(received)
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            poller.poll()

    def _poll(self, timeout: float | None) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(None if timeout is None else max(0.0, timeout) * 1000))


def Pipe(duplex: bool = True) -> tuple[PacketConnection, PacketConnection]:
    """Return two connections.

    Args:
        duplex: both send and receive; otherwise the first receives only, and the second sends only.
    """
    one, other = seqpacket_pair()
    if duplex:
        return PacketConnection(one), PacketConnection(other)
    return PacketConnection(one, writable=False), PacketConnection(other, readable=False)


def _rebuild(fd: Any, readable: bool, writable: bool) -> PacketConnection:
    return PacketConnection(fd.detach(), readable, writable)


def _reduce(conn: PacketConnection) -> Any:
    """While a process starts, and through the standard library's own queues."""
    return _rebuild, (reduction.DupFd(conn.fileno()), conn.readable, conn.writable)


def _pass(conn: PacketConnection, keep: Keep) -> Any:
    keep(conn.fileno(), conn)
    return _rebuild, (STAND_IN, conn.readable, conn.writable)


reduction.register(PacketConnection, _reduce)
pass_descriptor(PacketConnection, _pass)
