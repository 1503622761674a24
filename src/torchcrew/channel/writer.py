"""Where the owner puts the bytes of a message that is being built.

A message normally fills one block. Its size is not known before it is complete (collate functions ask for one tensor
after another), so the writer takes a block of the size that the last message needed and continues in a second one when
that was too small; what is left over at the end is free again, and untouched pages cost nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from torchcrew.memory import libc
from torchcrew.memory.arena import ArenaOwner, Block, Loan

__all__ = ("ALIGNMENT", "PLACE_MIN", "BlockWriter", "Part")

#: Every tensor begins at a multiple of this, as torch's own allocator has it (vector loads, cache lines).
ALIGNMENT = 64
#: Smaller requests of `new_shared` get private memory: copying them later costs less than a place in the block.
PLACE_MIN = 16 << 10


class Part:
    """A block of the message being built, and how much of it is taken."""

    __slots__ = ("block", "end")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.end = 0


class BlockWriter:
    """Blocks of the message being built. Thread-safe: user threads may collate while another message is sent.

    Args:
        owner: the arena's owner.
        make_room: called with the missing bytes when the owner has none; returns to try again, or raises.
    """

    def __init__(self, owner: ArenaOwner, make_room: Callable[[int], None]) -> None:
        self._owner = owner
        self._make_room = make_room
        self._open: list[Part] = []
        self._lock = threading.Lock()
        self._expected = 0
        self.bytes_sent = 0

    def reserve(self, nbytes: int) -> tuple[int, int, Any]:
        """Take ``nbytes``; returns the index of the block in this message, the offset in it, and the block's view.

        Raises:
            ArenaFull: see ``make_room``.
        """
        with self._lock:
            if self._open:
                last = self._open[-1]
                start = -(-last.end // ALIGNMENT) * ALIGNMENT
                if start + nbytes <= last.block.nbytes:
                    last.end = start + nbytes
                    return len(self._open) - 1, start, last.block.view
            self._open.append(Part(self._allocate(nbytes)))
            self._open[-1].end = nbytes
            # The view is taken here: another thread may end the message at once; who holds the view keeps the block.
            return len(self._open) - 1, 0, self._open[-1].block.view

    def _allocate(self, nbytes: int) -> Block:
        # At least doubled: a message of thousands of tensors whose size is not known yet takes a few blocks only.
        taken = sum(part.block.nbytes for part in self._open)
        block = self._owner.allocate(max(nbytes, self._expected, taken))
        while block is None:
            self._expected = 0
            self._make_room(nbytes)
            block = self._owner.allocate(nbytes)
        return block

    def place(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Bring the bytes at each ``(address, nbytes)`` into the message, if they are not there yet.

        Returns:
            For each the index of the block in this message and the offset in it.
        """
        places = [self.find(*range_) for range_ in ranges] if self._open else [None] * len(ranges)
        missing = [
            -(-nbytes // ALIGNMENT) * ALIGNMENT
            for (_, nbytes), found in zip(ranges, places, strict=True)
            if found is None
        ]
        if not missing:
            return places  # type: ignore[return-value]
        index, offset, _ = self.reserve(sum(missing))
        address = self._open[index].block.address
        copied: list[tuple[int, int]] = []
        for (start, nbytes), found in zip(ranges, places, strict=True):
            if found is None:
                found = index, offset
                libc.copy(address + offset, start, nbytes)
                offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
            copied.append(found)
        return copied

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Where in this message the bytes at ``address`` are, if they are in it."""
        for index, part in enumerate(self._open):
            offset = address - part.block.address
            if offset >= 0 and offset + nbytes <= part.end:
                return index, offset
        return None

    def new_shared(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of ``nbytes`` in the message being built (for `torch_private.allocate_batches_with`)."""
        if nbytes < PLACE_MIN:
            return torch.UntypedStorage(nbytes)
        _, offset, view = self.reserve(nbytes)
        return torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()

    def give_up(self) -> None:
        """Give free pages back to the system."""
        with self._lock:
            self._owner.recycle()
            self._owner.shrink(0)

    def lend(self, used: Collection[int]) -> list[Loan | None]:
        """End the message: its blocks go on loan, those that are not in ``used`` (None in the result) are dropped."""
        if not self._open:
            return []
        with self._lock:
            loans: list[Loan | None] = []
            for index, part in enumerate(self._open):
                if index in used:
                    loans.append(self._owner.lend(part.block, part.end))
                    self.bytes_sent += part.end
                else:
                    loans.append(None)
                    self._owner.discard(part.block)
            if used:
                self._expected = sum(part.end + ALIGNMENT for part in self._open)
            self._open.clear()
            return loans
