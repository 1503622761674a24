"""The shared memory that `Value`, `Array` and their locks live in: blocks of memfds.

    this process                                  a child
    Heap ── Arena (memfd, mapped) ◄─── block      forked: has the same mapping
              │  one descriptor for many blocks    spawned: gets the descriptor with the pickle, maps it once
              └─ dropped with its last block

Owner      a block belongs to the process that allocated it; the memory belongs to everybody who has it mapped.
Descriptor one per arena. It has no name: /dev/shm and its size are not involved, nothing is left after `kill -9`.
Reuse      only what no other process can have seen is given out a second time: what existed at a fork, or was pickled
           for a child, may still be in use there when it is gone here.
Death      anybody: the kernel unmaps; the memory goes with the last process that has it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from multiprocessing import heap, reduction
from typing import Any, cast

from torchcrew.memory import libc
from torchcrew.memory.arena import make_memfd

__all__ = ("Arena", "BufferWrapper", "Heap")

#: Blocks of at least this many bytes have an arena of their own: its pages are fresh, so they need no zeroing and take
#: no memory before they are written, and they go back to the system at once.
OWN_ARENA = 1 << 20
#: Arenas of small blocks double in size up to this many bytes: fewer descriptors for many values.
LARGEST_ARENA = 4 << 20
#: Of a block that was pickled for another process.
_PICKLED = -1

#: An arena and where in it: start, stop.
Block = tuple["Arena", int, int]

_forks = 0


def __getattr__(name: str) -> Any:
    """What the standard library's module has and this one has not."""
    return getattr(heap, name)


class Arena(heap.Arena):
    """A memfd, mapped. Pickles by descriptor while a process starts; its mapping outlives it as long as any view.

    Raises:
        OSError: no descriptor or address space is left, or ``size`` is above `ulimit -f`.
    """

    def __init__(self, size: int, fd: int = -1) -> None:
        self.size = size
        self.fd = make_memfd("torchcrew-values", size) if fd == -1 else fd
        weakref.finalize(self, os.close, self.fd).atexit = False
        # `mmap.mmap` would keep a second descriptor.
        self.address = libc.map_shared(self.fd, 0, size)
        self.buffer: Any = (ctypes.c_char * size).from_address(self.address)
        weakref.finalize(self.buffer, libc.unmap, self.address, size).atexit = False

    def __reduce__(self) -> Any:
        return _attach, (self.size, reduction.DupFd(self.fd))


def _attach(size: int, fd: Any) -> Arena:
    return Arena(size, fd.detach())


class Heap(heap.Heap):
    """Gives out zeroed blocks of arenas; the bookkeeping is the standard library's."""

    #: A cache line: neighbours do not slow each other down, and every type of numpy and torch is aligned.
    _alignment = 64

    def __init__(self, size: int = libc.PAGE) -> None:
        super().__init__(size)
        # How many forks there had been when a block was given out, or _PICKLED.
        self._born: dict[tuple[Arena, int], int] = {}
        # Blocks that were freed here and that others may still use: they wait for the end of their arena.
        self._retired: dict[Arena, list[Block]] = {}

    def malloc(self, size: int) -> Block:
        """A block of at least ``size`` bytes, all zero.

        Raises:
            ValueError: the size is negative.
            OverflowError: the size is larger than any memory.
            OSError: as for `Arena`.
        """
        block = cast("Block", super().malloc(size))
        arena, start, stop = block
        self._born[arena, start] = _forks
        if stop - start < OWN_ARENA:
            ctypes.memset(arena.address + start, 0, stop - start)
        return block

    def lend(self, block: Block) -> None:
        """Never give out this block again: another process is going to see it."""
        arena, start, _ = block
        if (arena, start) in self._born:  # else it is another process's that this one was given
            self._born[arena, start] = _PICKLED

    def _new_arena(self, size: int) -> Block:
        if size < OWN_ARENA:
            size = self._roundup(max(self._size, size), libc.PAGE)
            self._size = min(self._size * 2, LARGEST_ARENA)
        arena = Arena(size)
        self._arenas.append(arena)
        return arena, 0, size

    def _malloc(self, size: int) -> Block:
        if size >= OWN_ARENA:
            return self._new_arena(size)
        return cast("Block", cast("Any", super())._malloc(size))

    def _add_free_block(self, block: Block) -> None:
        arena, start, _ = block
        # The rest of a block that was cut is not among them, and nobody has seen it.
        if self._born.pop((arena, start), _forks) == _forks:
            cast("Any", super())._add_free_block(block)
        else:
            self._retired.setdefault(arena, []).append(block)

    def _discard_arena(self, arena: Arena) -> None:
        """Drop an arena without blocks in use. Stock keeps small ones; then a descriptor would stay for ever."""
        for block in self._retired.pop(arena, ()):
            cast("Any", super())._add_free_block(block)
        self._absorb((arena, 0, arena.size))  # by now it is one free block
        del self._allocated_blocks[arena]
        self._arenas.remove(arena)

    # Of the standard library's, whose type hints leave them out.
    _size: int
    _arenas: list[Arena]
    _allocated_blocks: dict[Arena, set[tuple[int, int]]]
    _roundup: Any
    _absorb: Any


class BufferWrapper(heap.BufferWrapper):
    """A zeroed block of shared memory, freed with this object. Can be inherited and pickled for a child.

    Raises:
        ValueError: the size is negative.
        OverflowError: the size is larger than any memory.
        OSError: as for `Arena`.
    """

    _heap = Heap()
    _state: tuple[Block, int]

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"Size {size:n} out of range")
        if sys.maxsize <= size:
            raise OverflowError(f"Size {size:n} too large")
        block = self._heap.malloc(size)
        self._state = (block, size)
        weakref.finalize(self, _free, self._heap, block, os.getpid()).atexit = False

    def __getstate__(self) -> Any:
        self._heap.lend(self._state[0])
        return self.__dict__

    def create_memoryview(self) -> memoryview:
        """The block as writable bytes; the memory is mapped as long as any view of it lives."""
        (arena, start, _), size = self._state
        return memoryview(arena.buffer).cast("B")[start : start + size]

    @property
    def address(self) -> int:
        """Where the block is in this process; valid as long as this object lives."""
        (arena, start, _), _ = self._state
        return arena.address + start


def _free(owner: Heap, block: Block, pid: int) -> None:
    # A forked child has a copy of its parent's bookkeeping, which is not its own.
    if os.getpid() == pid:
        owner.free(block)


def _count_fork() -> None:
    global _forks
    _forks += 1


# Twice, for the blocks that another thread allocates between this hook and the fork itself.
os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)
