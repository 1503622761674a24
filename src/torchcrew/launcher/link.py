"""What the user's process and a rank say to each other.

    user's process                                        rank
      ── Guarded() ─────────────────────────────────────►   of a start method that does not wait for it by itself
      ── Run(number, renew, fn, args, kwargs) ──────────►
      ◄─ Returned(number, value, has_group) ─────────────   or Failed(): the report says how
      ── Close() ───────────────────────────────────────►

Each message is one packet, whole or not at all. At most three are ever on their way in one direction, so sending never
waits for the other side.

Owner      each process owns its own end; a rank gets it while it starts.
Death      the pidfd of the other process says it. What a rank had sent before is still received.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import context as _typed_context
from typing import Any

from torchcrew.channel.envelope import Envelope, open_packet, receive_packet
from torchcrew.channel.message import Encoder, decode
from torchcrew.channel.sharing import STAND_IN, Keep, Passed, pass_descriptor
from torchcrew.channel.sockets import QuietSocket, seqpacket_pair
from torchcrew.crew.functions import Pickler

context: Any = _typed_context  # its type hints leave out what reductions use of it

__all__ = ("Close", "Failed", "Guarded", "Link", "Message", "Returned", "Run")


@dataclass
class Run:
    """Call a function."""

    number: int
    renew: bool
    """Some rank has lost its process group: make a new one before."""
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Guarded:
    """The guardian knows the rank: from now on it cannot outlive the user's process."""


@dataclass
class Close:
    """There will be no more runs."""


@dataclass
class Returned:
    """A function has returned."""

    number: int
    value: Any
    has_group: bool
    alone: bool = True
    """No other thread of the rank goes on."""


@dataclass
class Failed:
    """The rank has written a report, and waits for its end."""


class _Transport:
    """Stands for the process being started: queues, locks and the like may be sent to one, and so to a rank."""

    @staticmethod
    def duplicate_for_child(fd: int) -> int:
        """Asked for each descriptor."""
        return fd

    class DupFd:
        """A descriptor on its way; arrives as one that can be taken by `detach`."""

        def __init__(self, fd: int) -> None:
            self.fd = fd


def _reduce_descriptor(descriptor: _Transport.DupFd, keep: Keep) -> Any:
    keep(descriptor.fd, descriptor)
    return _itself, (STAND_IN,)


def _itself(passed: Passed) -> Passed:
    return passed


pass_descriptor(_Transport.DupFd, _reduce_descriptor)

Message = Guarded | Run | Close | Returned | Failed


class Link:
    """One end. Objects travel as snapshots; functions and classes by value where the other side cannot import them."""

    def __init__(self, sock: QuietSocket) -> None:
        """Take over one end of a SOCK_SEQPACKET pair."""
        self._sock = sock

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Two ends."""
        ours, theirs = seqpacket_pair()
        return cls(ours), cls(theirs)

    def __reduce__(self) -> Any:
        return Link, (self._sock,)

    def fileno(self) -> int:
        """The socket, readable when there is a message or nobody is left who could send one; -1 once closed."""
        return self._sock.fileno()

    @staticmethod
    def pack(message: Message) -> Envelope:
        """Encode a message, once for any number of ranks.

        Raises:
            Exception: whatever pickling raises.
        """
        made: list[Pickler] = []

        def pickler(*args: Any) -> Pickler:
            made.append(Pickler(*args))
            return made[0]

        encoder = Encoder(passes_fds=True, pickler=pickler)
        before = context.get_spawning_popen()
        context.set_spawning_popen(_Transport())
        try:
            header, body = encoder.encode(message)
        except Exception as error:
            made[0].explain(error)
            raise
        finally:
            context.set_spawning_popen(before)
        payload = b"".join((body, header, len(header).to_bytes(8, "little")))
        return Envelope(payload, [descriptor.fd for descriptor in encoder.passed], (encoder.passed, message))

    def send(self, packed: Envelope) -> None:
        """Send what `pack` made.

        Raises:
            OSError: the other side is gone, or this end is closed.
        """
        packed.send(self._sock, flags=0)

    def receive(self) -> Message | None:
        """Receive the next message, or None if there is none now.

        Raises:
            EOFError: nobody is left at the other side.
            Exception: whatever unpickling raises.
        """
        received = receive_packet(self._sock)
        if received is None:
            return None
        _, payload, fds = open_packet(received, private=True)  # every rank gets the same payload
        end = len(payload) - 8
        start = end - int.from_bytes(payload[end:], "little")
        message: Message = decode(payload[start:end], payload[:start], None, fds)
        return message

    def wait(self, *others: int) -> bool:
        """Sleep until there is something to receive, or one of these descriptors is readable; whether the former."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        for fd in others:
            poller.register(fd, select.POLLIN)
        return any(fd == self._sock.fileno() for fd, _ in poller.poll())

    def close(self) -> None:
        """Close this process's end; idempotent."""
        self._sock.close()
