"""Arenas: one memfd per producer, blocks in it on loan to a consumer.

    offset 0        1 MiB                                                      size (sparse)
    ┌──────────────┬──────────────────────────────────────────────────────────┐
    │ lease table  │ block │ block │ free, warm │ block │ free, never touched   │
    └──────────────┴──────────────────────────────────────────────────────────┘
     1 byte a slot

Owner      exactly one process allocates (`ArenaOwner`); it alone writes ON_LOAN and UNUSED. The consumer writes FREE.
Descriptor one, however many blocks. The memfd has no name: /dev/shm is not involved, and after `kill -9` of everybody
           the kernel frees it.
Death      owner dies: every view stays valid; the next owner of the arena is told which blocks are still seen
           (`open_leases`) and takes all others as free. A kill between two instructions of the owner can leave a slot
           ON_LOAN that nobody received: the next owner does not find it among the open leases and frees it.
           consumer dies: nobody reads the table any more; the owner is ended by its guardian.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import os
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import reduction
from typing import Any

from torchcrew.memory import libc
from torchcrew.memory.lease import FREE, ON_LOAN, UNUSED, Lease, sweep_now_and_then
from torchcrew.memory.limits import file_size_limit
from torchcrew.memory.mapping import Mapping, round_block
from torchcrew.memory.ranges import Ranges

__all__ = ("SLOTS", "Arena", "ArenaOwner", "Block", "Loan", "make_memfd")

#: Blocks that can be on loan at once; a byte each, and only touched pages exist.
SLOTS = 1 << 20
#: Address space of one arena. Sparse: it costs nothing, and no process maps more than it uses.
_ARENA_BYTES = 1 << 40
#: Warm free bytes an owner always keeps: below it, giving pages back costs more than it saves.
_HOT_MIN = 32 << 20
#: Allocations after which an owner looks whether it keeps more warm than it needed lately.
_REVIEW_EVERY = 64
#: What `round_block` adds to a block is at most this part of what is in it.
_ROUNDING = 7
_MFD_NOEXEC_SEAL = 8  # Linux 6.3

#: A block as it is named in a message: slot, offset, bytes.
Loan = tuple[int, int, int]


def make_memfd(name: str, nbytes: int) -> int:
    """A sparse memfd of ``nbytes``, closed on exec, sealed against being executed where the kernel can."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Arena:
    """A memfd with its lease table, as owner and consumer both see it. Pickles by descriptor while a process starts."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self.mapping = Mapping(fd)
        self.table = memoryview(self.mapping.view(0, SLOTS)).cast("B")

    @classmethod
    def create(cls) -> Arena:
        """A new, empty arena; as large as `ulimit -f` lets a file be, at most 1 TiB."""
        size = min(_ARENA_BYTES, file_size_limit())
        return cls(make_memfd("torchcrew-arena", size), size)

    def lease(self, loan: Loan) -> Any:
        """The view of a received block; the block returns to its owner when the view, and all made of it, are gone."""
        slot, offset, nbytes = loan
        try:
            view = self.mapping.view(offset, nbytes)
        except BaseException:  # no address space left, say: the message is lost, the block is not
            self.table[slot] = FREE
            raise
        Lease(view, self, self.table, slot, offset, nbytes)
        return view

    def resident_bytes(self) -> int:
        """Memory the arena takes now."""
        return os.fstat(self.mapping.fd).st_blocks * 512

    def pages(self) -> Iterator[tuple[int, int]]:
        """The ranges past the lease table that have pages, as ``(start, end)``."""
        end = SLOTS
        while True:
            try:
                start = os.lseek(self.mapping.fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # no more
                    return
                raise
            end = os.lseek(self.mapping.fd, start, os.SEEK_HOLE)
            yield start, end

    def close(self) -> None:
        """Let go of the descriptor; views stay valid, memory goes with the last of them."""
        self.mapping.close()

    def __reduce__(self) -> Any:
        return _attach, (reduction.DupFd(self.mapping.fd), self.size)


def _attach(fd: Any, size: int) -> Arena:
    return Arena(fd.detach(), size)


class Block:
    """A range of the arena that its owner writes (``view`` is set) or has lent (``view`` is None)."""

    __slots__ = ("_seen", "address", "nbytes", "offset", "sent", "slot", "view", "warm")

    def __init__(self, slot: int, offset: int, nbytes: int, warm: bool, view: Any, address: int) -> None:
        self.slot = slot
        self.offset = offset
        self.nbytes = nbytes
        self.warm = warm
        self.view = view
        self.address = address
        #: For the owner's caller: what it notes about the message that the block goes with.
        self.sent: Any = None
        # The owner is a consumer of its own, with a lease table of one byte: forked children count, too.
        self._seen = bytearray((FREE,))
        if view is not None:
            self._seen[0] = ON_LOAN
            Lease(view, None, self._seen, 0, offset, nbytes)

    def seen_here(self) -> bool:
        """Whether this process, or a child of it, still looks at it, say through a batch that the dataset caches."""
        return self._seen[0] != FREE


class ArenaOwner:
    """Allocates and recycles the blocks of one arena. Not thread-safe: its caller serialises.

    Args:
        arena: an arena that nobody else allocates in.
        taken: blocks lent by an earlier owner that are still seen.
        budget: told how many bytes this arena would take, answers whether it may.
    """

    def __init__(self, arena: Arena, taken: Iterable[Loan] = (), budget: Callable[[int], bool] | None = None) -> None:
        self.arena = arena
        self._may_take = budget or (lambda nbytes: True)
        self._hot = Ranges(0, 0)
        self._cold = Ranges(SLOTS, arena.size // libc.PAGE * libc.PAGE)
        self._loans: dict[int, Block] = {}
        self._unsent: list[Block] = []
        self._slots: list[int] = []
        self._high = 0
        self.used = 0
        self.warm = 0
        self._peaks = (0, 0)
        self._since_review = 0
        self._adopt(list(taken))
        if self.warm and not self._may_take(self.committed):
            self.shrink(0)

    def _adopt(self, taken: list[Loan]) -> None:
        """Count the blocks of an earlier owner; everything else it had is free, and warm where there are pages."""
        for slot, offset, nbytes in taken:
            self._cold.reserve(offset, nbytes)
            self._loans[slot] = Block(slot, offset, nbytes, True, None, 0)
            self.used += nbytes
        self._high = max((slot for slot, _, _ in taken), default=-1) + 1
        for slot in range(self._high):
            if slot not in self._loans:
                self.arena.table[slot] = UNUSED
                self._slots.append(slot)
        for start, end in self.arena.pages():
            # With the end of its block, which was rounded up and not touched: whole blocks can be used again.
            reach = end + -(-(end - start) // (_ROUNDING * libc.PAGE)) * libc.PAGE
            for free, stop in list(self._cold):
                if free < reach and start < stop:
                    low, high = max(free, start), min(stop, reach)
                    self._cold.reserve(low, high - low)
                    self._give_warm(low, high - low)

    @property
    def committed(self) -> int:
        """Bytes of blocks and of warm free pages."""
        return self.used + self.warm

    def allocate(self, nbytes: int) -> Block | None:
        """A block of at least ``nbytes``, writable through ``block.view``; None when budget or slots are used up.

        Recycles first what consumers returned, warm pages before cold ones.
        """
        size = round_block(nbytes)
        if not self._slots and self._high == SLOTS:
            self.recycle()
            if not self._slots:
                return None
        self._since_review += 1
        if self._since_review >= _REVIEW_EVERY:
            self._review()
        self.recycle()
        offset, warm = self._hot.take(size), True
        if offset is None:
            if not self._may_take(self.committed + size):
                self.shrink(0)
                if not self._may_take(self.committed + size):
                    return None
            offset, warm = self._cold.take(size), False
        if offset is None and self.warm:  # free space there is, but in pieces: merge warm and cold
            self.shrink(0)
            offset = self._cold.take(size)
        if offset is None:
            return None
        try:
            view = self.arena.mapping.view(offset, size)
        except BaseException:
            (self._hot if warm else self._cold).give(offset, size)
            raise
        if warm:
            self.warm -= size
        self.used += size
        self._peaks = (self._peaks[0], max(self._peaks[1], self.used))
        block = Block(self._new_slot(), offset, size, warm, view, ctypes.addressof(view))
        self._unsent.append(block)
        return block

    def fits(self, nbytes: int) -> bool:
        """Whether the file has a free range for ``nbytes``, budget aside (`ulimit -f` can make it small)."""
        size = round_block(nbytes)
        return any(end - start >= size for start, end in (*self._hot, *self._cold))

    def _new_slot(self) -> int:
        if self._slots:
            return heapq.heappop(self._slots)
        self._high += 1
        self.arena.table[self._high - 1] = UNUSED
        return self._high - 1

    def lend(self, block: Block, used: int) -> Loan:
        """Mark a written block as on loan, before its name is sent; the part past ``used`` bytes is free again."""
        self._trim(block, round_block(used))
        self._unsent.remove(block)
        self._loans[block.slot] = block
        self.arena.table[block.slot] = ON_LOAN
        block.view = None
        return block.slot, block.offset, block.nbytes

    def take_again(self, block: Block) -> bool | None:
        """Put a block that has come back on loan again, for another message of its size, past all that `allocate` does.

        False if it has not come back; None if it was recycled since, and is no block any more.
        """
        if self._loans.get(block.slot) is not block:
            return None
        table = self.arena.table
        if table[block.slot] != FREE or block.seen_here():
            return False
        table[block.slot] = ON_LOAN
        return True

    def on_loan(self) -> list[Block]:
        """The blocks that consumers have, may have, or have returned since the last `recycle`."""
        return list(self._loans.values())

    def discard(self, block: Block) -> None:
        """Drop a block that is not sent; it is reused when this process itself no longer looks at it."""
        block.view = None

    def _trim(self, block: Block, size: int) -> None:
        surplus = block.nbytes - size
        if surplus <= 0:
            return
        block.nbytes = size
        self.used -= surplus
        if block.warm:
            self._give_warm(block.offset + size, surplus)
        else:
            self._cold.give(block.offset + size, surplus)

    def recycle(self) -> None:
        """Take back what consumers returned (and what was written but never sent)."""
        sweep_now_and_then()
        table = bytes(self.arena.table[: self._high])
        slot = table.find(FREE)
        while slot >= 0:
            block = self._loans[slot]
            if not block.seen_here():
                del self._loans[slot]
                self._free(block)
            slot = table.find(FREE, slot + 1)
        for block in [b for b in self._unsent if b.view is None and not b.seen_here()]:
            self._unsent.remove(block)
            self._free(block)

    def _free(self, block: Block) -> None:
        self.arena.table[block.slot] = UNUSED
        heapq.heappush(self._slots, block.slot)
        self.used -= block.nbytes
        self._give_warm(block.offset, block.nbytes)

    def _give_warm(self, start: int, nbytes: int) -> None:
        self._hot.give(start, nbytes)
        self.warm += nbytes

    def _review(self) -> None:
        """Keep no more warm than the busiest of the last two reviews needed."""
        self._since_review = 0
        self.shrink(max(_HOT_MIN, max(self._peaks) - self.used))
        self._peaks = (self._peaks[1], self.used)

    def shrink(self, keep: int) -> None:
        """Give free pages back to the system, the highest first, until at most ``keep`` bytes of them are left warm."""
        for start, end in reversed(list(self._hot)):
            surplus = self.warm - keep
            if surplus <= 0:
                return
            part = min(end - start, -(-surplus // libc.PAGE) * libc.PAGE)
            libc.punch(self.arena.mapping.fd, end - part, part)
            self._hot.reserve(end - part, part)
            self._cold.give(end - part, part)
            self.warm -= part
