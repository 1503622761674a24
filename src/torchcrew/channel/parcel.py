"""A message of the snapshot channels as bytes and descriptors, and what builds it.

    Kit.encode(obj)   Encoder + BlockWriter: the data in blocks that are lent
    Parcel            payload = inline data, header, loans, tail; descriptors = the arena's, those of shared tensors

The loans stand outside the pickle: who receives the message claims its blocks before anything of the user's is run.
"""

from __future__ import annotations

import functools
import struct
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol, cast

from torchcrew.channel.claims import ClaimedArena
from torchcrew.channel.message import Descriptor, Encoded, Encoder
from torchcrew.channel.writer import BlockWriter, Part
from torchcrew.memory import libc
from torchcrew.memory.arena import ArenaOwner, Block, Loan

__all__ = ("LOAN", "TAIL", "Blocks", "Kit", "Parcel")

#: At the end of every payload: key of the arena (0: no block), bytes of the header, number of blocks.
TAIL = struct.Struct("<QII")
#: Before it for each block, the loan.
LOAN = struct.Struct("<QQQ")


class Blocks(Protocol):
    """Where the blocks of a message come from."""

    def lend(self, block: Block, used: int) -> Loan:
        """See `ArenaOwner`."""

    def discard(self, block: Block) -> None:
        """See `ArenaOwner`."""

    def make_room(self, nbytes: int, deadline: float | None) -> None:
        """Wait until there may be room, or raise."""


class Parcel:
    """An encoded message, and what must be given back if it is not sent.

    Args:
        encoded: the message.
        passed: its descriptors.
        blocks: what it lent, of ``arena``.
        key: names the arena.
    """

    __slots__ = ("_owners", "blocks", "fds", "payload", "tickets")

    def __init__(
        self,
        encoded: Encoded,
        passed: Sequence[Descriptor],
        blocks: Sequence[Block],
        arena: ClaimedArena | None,
        key: int,
    ) -> None:
        header, body = encoded
        self.fds = [descriptor.fd for descriptor in passed]
        self.blocks = tuple(blocks)  # the list goes on to the next message
        # Not the blocks: a consumer may have returned them, and another message taken them again, before this one's
        # producer comes to note that it was sent.
        self.tickets: list[list[int]] = [block.sent for block in blocks]
        self._owners = passed, arena
        if arena is None or not blocks:
            self.payload = b"".join((body, header, TAIL.pack(0, len(header), 0)))
            return
        self.fds.insert(0, arena.mapping.fd)
        loans = [LOAN.pack(block.slot, block.offset, block.nbytes) for block in blocks]
        self.payload = b"".join((body, header, *loans, TAIL.pack(key, len(header), len(blocks))))


class Kit:
    """What builds one message at a time."""

    def __init__(self, blocks: Blocks) -> None:
        #: What the message has lent.
        self.lent: list[Block] = []
        #: Until when it may wait for room.
        self.deadline: float | None = None
        # No cycle, for the descriptor of the arena goes with its queue.
        self._encoder = Encoder(_Writer(weakref.proxy(blocks), self), passes_fds=True)

    def encode(self, obj: Any) -> tuple[Encoded, Sequence[Descriptor]]:
        """The message and its descriptors; the blocks are in `lent`."""
        encoded = self._encoder.encode(obj)
        passed, self._encoder.passed = self._encoder.passed, []
        return encoded, passed


class _Writer(BlockWriter):
    """A writer that remembers what it lent, and waits for room no longer than its kit says."""

    def __init__(self, blocks: Blocks, kit: Kit) -> None:
        super().__init__(cast(ArenaOwner, blocks), functools.partial(_make_room, blocks, weakref.ref(kit)))
        self._blocks = blocks
        self._kit = weakref.ref(kit)

    def place(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """As the writer's; what most messages are, one range of which nothing is there yet, in the shortest way."""
        if self._open or len(ranges) != 1:
            return super().place(ranges)
        start, nbytes = ranges[0]
        part = Part(self._allocate(nbytes))
        self._open.append(part)
        libc.copy(part.block.address, start, nbytes)
        part.end = nbytes
        return [(0, 0)]

    def lend(self, used: Collection[int]) -> list[Loan | None]:
        """As the writer's, and note the blocks."""
        if not self._open:
            return []
        lent = cast(Kit, self._kit()).lent
        loans: list[Loan | None] = []
        for index, part in enumerate(self._open):
            if index in used:
                loans.append(self._blocks.lend(part.block, part.end))
                lent.append(part.block)
            else:
                loans.append(None)
                self._blocks.discard(part.block)
        self._open.clear()
        return loans


def _make_room(blocks: Blocks, kit: weakref.ref[Kit], nbytes: int) -> None:
    blocks.make_room(nbytes, cast(Kit, kit()).deadline)
