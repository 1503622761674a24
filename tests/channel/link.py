"""Owner and consumer of one arena in this process: what is encoded here is decoded here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torchcrew.channel.message import Encoded, Encoder, decode
from torchcrew.channel.writer import BlockWriter
from torchcrew.errors import ArenaFull
from torchcrew.memory.arena import Arena, ArenaOwner, Loan
from torchcrew.memory.lease import ON_LOAN, open_leases

__all__ = ("Link", "link")


class Link:
    """Both ends of an arena, and how many blocks and bytes of it are in use."""

    def __init__(self, budget: Callable[[int], bool] | None = None) -> None:
        self.arena = Arena.create()
        self.owner = ArenaOwner(self.arena, (), budget)
        self.writer = BlockWriter(self.owner, self._make_room)
        self.encoder = Encoder(self.writer)
        self.loans: list[Loan] = []

    def _make_room(self, nbytes: int) -> None:
        raise ArenaFull(f"no room for {nbytes} bytes")

    def encode(self, obj: Any) -> Encoded:
        """The message, as it travels."""
        return self.encoder.encode(obj)

    def decode(self, message: Encoded) -> Any:
        """What arrives."""
        return decode(message.header, bytearray(message.body), self._lease)

    def _lease(self, loan: Loan) -> Any:
        self.loans.append(loan)
        return self.arena.lease(loan)

    def send(self, obj: Any) -> Any:
        """Encode and decode."""
        self.loans = []
        return self.decode(self.encode(obj))

    @property
    def on_loan(self) -> int:
        """Blocks marked as on loan."""
        return bytes(self.arena.table[:4096]).count(ON_LOAN)

    @property
    def bytes_used(self) -> int:
        """Bytes of blocks that are neither free nor returned."""
        self.owner.recycle()
        return self.owner.used

    @property
    def leases(self) -> int:
        """Blocks that somebody here sees."""
        return len(open_leases(self.arena))


@contextlib.contextmanager
def link(budget: Callable[[int], bool] | None = None) -> Iterator[Link]:
    """A `Link` that is closed at the end."""
    made = Link(budget)
    try:
        yield made
    finally:
        made.arena.close()
        made.encoder.__dict__.clear()  # a cycle through its pickler
        made.__dict__.clear()  # pytest keeps the value of a fixture, and that would keep the mapping
