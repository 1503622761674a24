"""How tensors go through the pages of a group, and are reduced on their way.

Every function is called by all ranks, works on flat tensors, and takes as many turns as on every other rank.

The caller has taken the first turn, in which the heads are compared, unless a function takes it by calling ``first``.

    small        turn 0: each rank's tensor, whole. Then each reduces all of them by itself, in the order of the ranks.
    reduce       part j of the tensor is reduced by rank j, in chunks. In the page of rank i, slot j: of i's tensor,
                 what j reduces; slot i: what i has reduced. In one step a rank publishes chunk s, reduces chunk s-1 and
                 gathers chunk s-2, all from the pages of the turn before: one turn a chunk.
    in place     all tensors lie in memory that all ranks see: rank j reduces part j where it lies, into all of them.
    copy         each rank's bytes, a page at a time; each reads what it wants of each.

Memory     of the reduction of n bytes by N ranks, for each: n (N-1)/N copied into the page, n/N reduced, n (N-1)/N
           copied out of pages; in place: n/N read of each rank's, and written to each rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchcrew.collectives.places import NOWHERE, PLACE, Places
from torchcrew.collectives.reduction import Operation
from torchcrew.collectives.segment import HEAD, Segment
from torchcrew.collectives.turns import Turns

__all__ = ("SMALL", "Streams", "cut")

#: Bytes up to which each rank reduces everything by itself: one turn, not two.
SMALL = 32 << 10
#: Bytes that are reduced in place at a time: what is read stays in the cache until it is written to all.
_BLOCK = 256 << 10
#: Bytes at the begin of a head that have to be the same on all ranks, and where the place of a tensor is in it.
SAME = 64
_PLACE = SAME
#: Plans for small reductions that are kept: views of pages, by dtype and size.
_PLANS = 64
#: Parts of a tensor begin at multiples of so many elements: kernels then treat each element as in the whole.
_ALIGN = 64


def cut(count: int, size: int) -> list[tuple[int, int]]:
    """The parts of ``count`` elements, one for each of ``size`` ranks; the last ones may be shorter, or empty."""
    each = -(-count // size)
    each = -(-each // _ALIGN) * _ALIGN
    return [(min(rank * each, count), min((rank + 1) * each, count)) for rank in range(size)]


class Streams:
    """The streams of one rank.

    Args:
        segment: the group's memory.
        turns: its turns.
        places: where shared tensors of others lie.
    """

    def __init__(self, segment: Segment, turns: Turns, places: Places) -> None:
        self.turns = turns
        self.places = places
        self.size = segment.size
        self.me = turns.peers.me.place
        self.capacity = segment.capacity
        self._heads = [[segment.head(rank, parity) for rank in range(self.size)] for parity in (0, 1)]
        self._rooms = [[segment.room(rank, parity) for rank in range(self.size)] for parity in (0, 1)]
        self._typed: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._plans: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}

    def clear(self) -> None:
        """Let go of the segment."""
        for views in (self._heads, self._rooms, self._typed, self._plans):
            views.clear()

    # Pages ------------------------------------------------------------------------------------------------------------

    def put(self, same: bytes, more: bytes = b"") -> None:
        """Write the head of this rank's page: what has to be the same on all ranks, and what need not."""
        head = self._heads[self.turns.parity][self.me]
        head[: len(same) + len(more)] = same + more

    def heads(self) -> list[memoryview]:
        """The heads of all pages, behind a turn."""
        return self._heads[self.turns.parity ^ 1]

    def _pages(self, dtype: torch.dtype, parity: int) -> list[torch.Tensor]:
        """The rooms of all ranks' pages as elements."""
        found = self._typed.get((parity, dtype))
        if found is None:
            found = self._typed[parity, dtype] = [room.view(dtype) for room in self._rooms[parity]]
        return found

    # Reducing ---------------------------------------------------------------------------------------------------------

    def reduce_small(
        self, flat: torch.Tensor, out: torch.Tensor | None, op: Operation, first: Callable[[], Any]
    ) -> None:
        """Reduce at most `SMALL` bytes, and no more than a page has room for; into nothing where ``out`` is None.

        Args:
            first: ends the first turn: takes it and compares the heads.
        """
        key = self.turns.parity, flat.dtype, flat.numel()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            plan = self._plans[key] = [page[: key[2]] for page in self._pages(flat.dtype, key[0])]
        plan[self.me].copy_(flat)
        first()
        if out is not None:
            op(out, plan)

    def reduce(
        self,
        flat: torch.Tensor,
        parts: Sequence[tuple[int, int]],
        op: Operation,
        deadline: float,
        own: torch.Tensor | None = None,
        gather: torch.Tensor | None = None,
        is_gathered: bool = True,
    ) -> None:
        """Reduce a tensor of any size.

        Args:
            flat: what this rank contributes; not written, unless it is ``gather``, too.
            parts: the elements that each rank reduces.
            own: where this rank's part shall be, reduced; None: nowhere but in the page.
            gather: where everything shall be, reduced; None: this rank does not want it.
            is_gathered: whether some rank gathers; all ranks say the same.
        """
        chunk = self.capacity // self.size // flat.element_size()
        chunks = max(-(-(stop - start) // chunk) for start, stop in parts)
        steps = chunks + 2 if is_gathered else chunks + 1
        if gather is not None:
            own = gather[slice(*parts[self.me])]
        mine = flat[slice(*parts[self.me])]
        for step in range(steps):
            if step < chunks:
                self._publish(flat, parts, chunk, step)
            if 1 <= step <= chunks:
                self._reduce_chunk(mine, own, op, chunk, step - 1, is_gathered)
            if step >= 2 and gather is not None:
                self._gather(gather, parts, chunk, step - 2)
            if step < steps - 1:
                self.turns.turn(deadline)

    def _publish(self, flat: torch.Tensor, parts: Sequence[tuple[int, int]], chunk: int, number: int) -> None:
        page = self._pages(flat.dtype, self.turns.parity)[self.me]
        for rank, (start, stop) in enumerate(parts):
            begin = start + number * chunk
            count = min(chunk, stop - begin)
            if rank != self.me and count > 0:
                page[rank * chunk : rank * chunk + count].copy_(flat[begin : begin + count])

    def _reduce_chunk(
        self, mine: torch.Tensor, own: torch.Tensor | None, op: Operation, chunk: int, number: int, is_gathered: bool
    ) -> None:
        part = mine[number * chunk : (number + 1) * chunk]
        count = part.numel()
        if not count:
            return
        slot = slice(self.me * chunk, self.me * chunk + count)
        parts = [page[slot] for page in self._pages(mine.dtype, self.turns.parity ^ 1)]
        parts[self.me] = part
        target = None if own is None else own[number * chunk : number * chunk + count]
        if is_gathered:
            result = self._pages(mine.dtype, self.turns.parity)[self.me][slot]
            op(result, parts)
            op.after(result, self.size)
            if target is not None:
                target.copy_(result)
        elif target is not None:
            op(target, parts)
            op.after(target, self.size)

    def _gather(self, gather: torch.Tensor, parts: Sequence[tuple[int, int]], chunk: int, number: int) -> None:
        pages = self._pages(gather.dtype, self.turns.parity ^ 1)
        for rank, (start, stop) in enumerate(parts):
            begin = start + number * chunk
            count = min(chunk, stop - begin)
            if rank != self.me and count > 0:
                gather[begin : begin + count].copy_(pages[rank][rank * chunk : rank * chunk + count])

    def shared(self) -> list[bytes] | None:
        """Behind the turn in which all have said it: where their tensors lie; None unless all are shared."""
        places = [bytes(head[_PLACE : _PLACE + PLACE.size]) for head in self.heads()]
        return places if NOWHERE not in places else None

    def reduce_in_place(self, flat: torch.Tensor, places: Sequence[bytes], op: Operation, deadline: float) -> None:
        """Reduce tensors that all ranks see, into all of them."""
        self.places.begin()
        start, stop = cut(flat.numel(), self.size)[self.me]
        width = flat.element_size()
        tensors = [flat if rank == self.me else self._tensor(rank, place, flat) for rank, place in enumerate(places)]
        block = _BLOCK // width
        scratch = torch.empty(min(block, max(stop - start, 0)), dtype=flat.dtype)
        for begin in range(start, stop, block):
            end = min(begin + block, stop)
            parts = [tensor[begin:end] for tensor in tensors]
            result = scratch[: end - begin]
            op(result, parts)
            op.after(result, self.size)
            for part in parts:
                part.copy_(result)
        self.turns.turn(deadline)

    def _tensor(self, rank: int, place: bytes, like: torch.Tensor) -> torch.Tensor:
        """The shared tensor of another rank."""
        try:
            return self.places.tensor(rank, place, like.numel() * like.element_size()).view(like.dtype)
        except OSError:
            self.turns.see(rank)
            raise

    # Copying ----------------------------------------------------------------------------------------------------------

    def copy(
        self,
        mine: torch.Tensor | None,
        longest: Callable[[], int],
        wanted: Callable[[], Sequence[tuple[int, int, torch.Tensor]]],
        first: Callable[[], Any],
        deadline: float,
    ) -> None:
        """Show each rank's bytes to all.

        Args:
            mine: what this rank shows, as bytes; None: nothing.
            longest: asked behind the first turn: the bytes of the rank that shows most.
            wanted: asked then, too: from which rank, from which byte on, into what (as bytes).
        """
        nbytes = 0 if mine is None else mine.numel()
        room = self.capacity
        steps, number = 1, 0
        reads: Sequence[tuple[int, int, torch.Tensor]] = ()
        while number < steps:
            begin = number * room
            if mine is not None and begin < nbytes:
                count = min(room, nbytes - begin)
                self._rooms[self.turns.parity][self.me][:count].copy_(mine[begin : begin + count])
            if number == 0:
                first()
                steps = max(1, -(-longest() // room))
                reads = wanted()
            else:
                self.turns.turn(deadline)
            pages = self._rooms[self.turns.parity ^ 1]
            for rank, start, into in reads:
                low, high = max(start, begin), min(start + into.numel(), begin + room)
                if low < high:
                    into[low - start : high - start].copy_(pages[rank][low - begin : high - begin])
            number += 1


assert PLACE.size + _PLACE <= HEAD
