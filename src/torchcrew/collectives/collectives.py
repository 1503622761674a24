"""What each collective means: which bytes of which rank go where. On tensors of any shape, in the caller's thread.

Ranks compare what they call in the first turn: the collective, its reduction, dtype, size, root and number in the
group. If two differ, every rank raises the same `CollectiveMismatch`, nothing is written, and the group goes on. Sizes
that may differ (all_gather, gather, all_to_all) only the receiver can check: if they are wrong, it raises and the group
is broken.
"""

from __future__ import annotations

import enum
import functools
import os
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from torchcrew.collectives import sparse
from torchcrew.collectives.arguments import (
    check_all_gathered,
    check_all_to_all,
    check_gathered,
    check_gathered_into,
    check_root,
    check_scattered,
    parts_of,
)
from torchcrew.collectives.places import NOWHERE, place_of
from torchcrew.collectives.reduction import Operation, operation
from torchcrew.collectives.rows import as_bytes, check_dense, check_writable, flat, in_a_row, write_back
from torchcrew.collectives.segment import HEAD
from torchcrew.collectives.streams import SAME, SMALL, Streams, cut
from torchcrew.collectives.turns import Turns
from torchcrew.errors import CollectiveMismatch
from torchcrew.torch_private import without_autograd, without_modes

__all__ = ("Call", "Collectives")

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Call(enum.IntEnum):
    """What a rank calls."""

    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    ALL_GATHER = 4
    GATHER = 5
    SCATTER = 6
    REDUCE_SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    ALL_REDUCE_SPARSE = 10


#: What has to be the same on all ranks: call, reduction, dtype, root (or -1), elements (or bytes), number of the call,
#: and, for reduce_scatter, a checksum of the parts.
_SAME = struct.Struct("<BBHiQQI")
#: Bytes that a rank shows, and, for all_to_all, where in them each rank's begin: written behind `SAME`.
_SHOWN = struct.Struct("<Q")
_NO_REDUCTION = 255
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


def _collective(method: _Function) -> _Function:
    """Autograd does not see what a collective does; what goes wrong in the middle of it breaks the group."""

    @functools.wraps(method)
    def run(self: Collectives, *args: Any, timeout: float) -> Any:
        self.usable()
        with without_autograd(), without_modes():
            self.deadline = time.monotonic() + timeout
            turns = self.turns.number
            try:
                return method(self, *args)
            except CollectiveMismatch:
                raise  # on all ranks
            except BaseException as error:
                if not isinstance(error, ValueError) or self.turns.number != turns:
                    self.turns.give_up(f"{type(error).__name__}: {error}")
                raise

    return run  # type: ignore[return-value]


class Collectives:
    """The collectives of one rank of a group.

    Args:
        streams: the group's pages.
        turns: its turns.
        ranks: what people call the ranks, by place.
    """

    def __init__(self, streams: Streams, turns: Turns, ranks: Sequence[int]) -> None:
        self.streams = streams
        self.turns = turns
        self.ranks = ranks
        self.size, self.me = streams.size, streams.me
        self.number = 0
        self.deadline = 0.0
        self._pid = os.getpid()

    def usable(self) -> None:
        """Refuse a group that is broken, or another process's.

        Raises:
            RuntimeError: says why.
        """
        if self.turns.broken:
            raise RuntimeError(f"this process group cannot be used any more: {self.turns.broken}")
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this process group belongs to process {self._pid}, from which this one was forked: "
                "call collectives there"
            )

    # Heads ------------------------------------------------------------------------------------------------------------

    def _put(self, call: Call, op: int, dtype: torch.dtype, root: int, count: int, more: bytes, parts: int = 0) -> None:
        self.number += 1
        self._same = _SAME.pack(call, op, _DTYPE_CODES[dtype], root, count, self.number, parts)
        self.streams.put(self._same.ljust(SAME, b"\0"), more)

    def _first(self) -> None:
        """Take the turn of the head, and compare."""
        self.turns.turn(self.deadline)
        same = self._same
        heads = self.streams.heads()
        for head in heads:
            if head[: _SAME.size] != same:
                raise CollectiveMismatch(self._differences(heads))

    def _differences(self, heads: Sequence[memoryview]) -> str:
        calls = [_describe(bytes(head[: _SAME.size])) for head in heads]
        told = "\n".join(f"  rank {self.ranks[place]}: {call}" for place, call in enumerate(calls))
        return f"ranks of one group call different collectives, or the same with different arguments:\n{told}"

    def _shown(self) -> list[int]:
        """How many bytes each rank shows."""
        return [_SHOWN.unpack_from(head, SAME)[0] for head in self.streams.heads()]

    # Reducing ---------------------------------------------------------------------------------------------------------

    @_collective
    def all_reduce(self, tensors: Sequence[torch.Tensor], op: Any) -> None:
        """Reduce each tensor, in place."""
        if any(tensor.layout is torch.sparse_coo for tensor in tensors):
            sparse.all_reduce(tensors, op, self.ranks, functools.partial(self._gather, Call.ALL_REDUCE_SPARSE, root=-1))
            return
        check_dense(tensors)
        operations = [operation(op, tensor.dtype) for tensor in tensors]
        for tensor in tensors:
            check_writable(tensor)
        for tensor, reduction in zip(tensors, operations, strict=True):
            row = flat(tensor)
            self._all_reduce(row, reduction)
            write_back(tensor, row)

    def _all_reduce(self, row: torch.Tensor, op: Operation) -> None:
        count = row.numel()
        nbytes = count * row.element_size()
        place = NOWHERE if nbytes <= SMALL else place_of(row)
        self._put(Call.ALL_REDUCE, op.code, row.dtype, -1, count, place)
        if nbytes <= SMALL:
            self.streams.reduce_small(row, row, op, self._first)
            op.after(row, self.size)
            return
        self._first()
        places = self.streams.shared()
        if places is not None:
            self.streams.reduce_in_place(row, places, op, self.deadline)
        else:
            self.streams.reduce(row, cut(count, self.size), op, self.deadline, gather=row)

    @_collective
    def reduce(self, tensor: torch.Tensor, root: int, reduce_op: Any) -> None:
        """Reduce a tensor into that of ``root``; the others' stay what they are."""
        check_dense([tensor])
        check_writable(tensor)
        check_root(root, self.size)
        op, row = operation(reduce_op, tensor.dtype), flat(tensor)
        nbytes = row.numel() * row.element_size()
        self._put(Call.REDUCE, op.code, row.dtype, root, row.numel(), b"")
        mine = row if self.me == root else None
        if nbytes <= SMALL:
            self.streams.reduce_small(row, mine, op, self._first)
            if mine is not None:
                op.after(mine, self.size)
        else:
            self._first()
            self.streams.reduce(row, cut(row.numel(), self.size), op, self.deadline, gather=mine)
        if mine is not None:
            write_back(tensor, row)

    @_collective
    def reduce_scatter(self, outs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], op: Any) -> None:
        """Reduce what all ranks have for a rank into its tensor; ``inputs``, for each of ``outs``: by rank, or all."""
        calls = [
            (out, given, parts_of(out, given, self.size, self.me), operation(op, out.dtype))
            for out, given in zip(outs, inputs, strict=True)
        ]
        for out, given, sizes, reduction in calls:
            row = flat(given[0]) if len(given) == 1 else torch.cat([flat(tensor) for tensor in given])
            if row.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
                row = row.clone()  # what is written to the output is still to be read
            with in_a_row([out]) as (result,):
                self._reduce_scatter(flat(result), row, sizes, reduction)

    def _reduce_scatter(self, out: torch.Tensor, row: torch.Tensor, sizes: Sequence[int], op: Operation) -> None:
        checksum = zlib.crc32(array("Q", sizes).tobytes()) | 1
        self._put(Call.REDUCE_SCATTER, op.code, row.dtype, -1, row.numel(), b"", checksum)
        self._first()
        ends = [sum(sizes[: rank + 1]) for rank in range(self.size)]
        parts = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.streams.reduce(row, parts, op, self.deadline, own=out, is_gathered=False)

    # Copying ----------------------------------------------------------------------------------------------------------

    def _copy(
        self,
        call: Call,
        shown: torch.Tensor | None,
        wanted: Callable[[], Sequence[tuple[int, int, torch.Tensor]]],
        root: int = -1,
        count: int = 0,
        more: bytes = b"",
    ) -> None:
        """Show ``shown`` to all; take what is ``wanted``. ``count``: what has to be the same on all ranks."""
        nbytes = 0 if shown is None else shown.numel()
        self._put(call, _NO_REDUCTION, torch.uint8, root, count, _SHOWN.pack(nbytes) + more)
        self.streams.copy(shown, lambda: max(self._shown()), wanted, self._first, self.deadline)

    @_collective
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the tensor of ``root`` into the others'."""
        check_dense([tensor])
        check_root(root, self.size)
        nbytes = tensor.numel() * tensor.element_size()
        if self.me == root:
            self._copy(Call.BROADCAST, as_bytes(tensor), lambda: (), root, nbytes)
            return
        with in_a_row([tensor]) as (row,):
            self._copy(Call.BROADCAST, None, lambda: [(root, 0, as_bytes(row))], root, nbytes)

    @_collective
    def all_gather(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy each rank's tensor into one of ``outs``; the ranks' sizes may differ."""
        check_all_gathered(outs, tensor, self.size)
        self._gather(Call.ALL_GATHER, outs, tensor, -1)

    @_collective
    def gather(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        """Copy each rank's tensor into one of the root's ``outs``."""
        check_gathered(outs, tensor, root, self.size, self.me)
        self._gather(Call.GATHER, outs, tensor, root)

    def _gather(self, call: Call, outs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        with in_a_row(outs) as rows:

            def wanted() -> list[tuple[int, int, torch.Tensor]]:
                for rank, (row, nbytes) in enumerate(zip(rows, self._shown(), strict=False)):
                    if row.numel() * row.element_size() != nbytes:
                        self._refuse(rank, nbytes, row)
                return [(rank, 0, as_bytes(row)) for rank, row in enumerate(rows)]

            self._copy(call, as_bytes(tensor), wanted, root)

    @_collective
    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy all ranks' tensors, which are of one size, behind each other into ``out``."""
        check_gathered_into(out, tensor, self.size)
        nbytes = tensor.numel() * tensor.element_size()
        with in_a_row([out]) as (row,):
            target = as_bytes(row)
            reads = [(rank, 0, target[rank * nbytes : (rank + 1) * nbytes]) for rank in range(self.size)]
            self._copy(Call.ALL_GATHER, as_bytes(tensor), lambda: reads, count=nbytes)

    @_collective
    def scatter(self, out: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        """Copy one of the root's ``inputs`` into each rank's tensor."""
        check_scattered(out, inputs, root, self.size, self.me)
        nbytes = out.numel() * out.element_size()
        shown = torch.cat([as_bytes(tensor) for tensor in inputs]) if inputs else None
        with in_a_row([out]) as (row,):
            self._copy(Call.SCATTER, shown, lambda: [(root, self.me * nbytes, as_bytes(row))], root, nbytes)

    @_collective
    def all_to_all(self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Copy the input that each rank has for this one into one of ``outs``; sizes may differ."""
        check_all_to_all(outs, inputs, self.size)
        rows = [as_bytes(tensor) for tensor in inputs]
        ends = [0]
        for row in rows:
            ends.append(ends[-1] + row.numel())
        begins = struct.Struct(f"<{self.size + 1}Q")
        if SAME + _SHOWN.size + begins.size > HEAD:
            raise ValueError(f"all_to_all is made for {(HEAD - SAME - _SHOWN.size) // 8 - 1} ranks at most")
        with in_a_row(outs) as targets:

            def wanted() -> list[tuple[int, int, torch.Tensor]]:
                reads = []
                for rank, (head, target) in enumerate(zip(self.streams.heads(), targets, strict=True)):
                    splits = begins.unpack_from(head, SAME + _SHOWN.size)
                    nbytes = splits[self.me + 1] - splits[self.me]
                    if target.numel() * target.element_size() != nbytes:
                        self._refuse(rank, nbytes, target)
                    reads.append((rank, splits[self.me], as_bytes(target)))
                return reads

            self._copy(Call.ALL_TO_ALL, torch.cat(rows), wanted, more=begins.pack(*ends))

    def _refuse(self, rank: int, nbytes: int, row: torch.Tensor) -> None:
        """A size that only this rank sees, behind the first turn: the others have gone on."""
        error = CollectiveMismatch(
            f"rank {self.ranks[rank]} sends {nbytes} bytes, but what rank {self.ranks[self.me]} has for them is a "
            f"tensor of {row.numel() * row.element_size()} bytes"
        )
        self.turns.give_up(str(error))
        raise error

    @_collective
    def barrier(self) -> None:
        """Wait for all."""
        self._put(Call.BARRIER, _NO_REDUCTION, torch.uint8, -1, 0, b"")
        self._first()


def _describe(same: bytes) -> str:
    """A call in words."""
    call, op, dtype, root, count, number, parts = _SAME.unpack(same)
    try:
        name = Call(call).name.lower()
    except ValueError:
        return "something else"
    what = f"{count} bytes" if op == _NO_REDUCTION else f"{count} elements of {_DTYPES[dtype]}"
    told = name if name == "barrier" or not (count or op != _NO_REDUCTION) else f"{name} of {what}"
    if op != _NO_REDUCTION:
        told += f", reduction {torch.distributed.ReduceOp.RedOpType(op).name}"
    if parts:
        told += f", parts {parts:08x}"
    if root >= 0:
        told += f", root {root}"
    return f"{told} (call {number} in this group)"
