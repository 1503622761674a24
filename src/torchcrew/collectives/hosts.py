"""Groups whose ranks are on several hosts: shared memory on each of them, gloo between them.

    host A   rank 0, its leader ── shared memory ── ranks 1, 2
                  │ gloo among leaders: headers of what is called, sums, bytes
    host B   rank 3, its leader ── shared memory ── rank 4

    all_reduce, reduce, reduce_scatter   each host's ranks ─► its leader ─► all leaders reduce ─► each host's ranks
    broadcast                            root ─► its host, with the leader ─► leaders ─► their hosts
    all_gather                           as all_reduce, of bytes
    gather, scatter, all_to_all          gloo among all ranks, from each to each; send and recv, too

What is called   is compared twice before data moves: on each host, in its shared memory; then among the leaders, in a
           header of fixed size. Without it gloo ends the process where the sizes of two hosts differ.
Bits       are the same on all ranks: hosts reduce in the order of their ranks, leaders all by the same rule (large sums
           by gloo's all_reduce, what is small, or unknown to gloo, each by itself in the order of hosts).
Memory     what gloo cannot reduce costs the leader a tensor of each host; all_gather costs each rank all of it.
Owner      of the shared memory: each host's ranks; of gloo's two groups: see `link`.
Death      on this host: `PeerDied` at once, as in any group. On another: its leader sees it, and says so instead of its
           next header; a leader's own death the others see by gloo's connection; a host that is cut off, by the
           timeout. A leader that fails gives its host's group up, so its ranks raise at once, and nobody waits longer
           than the timeout.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp

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
from torchcrew.collectives.collectives import Collectives
from torchcrew.collectives.link import HEADER, Link, header, text_of
from torchcrew.collectives.reduction import Operation, operation
from torchcrew.collectives.rows import as_bytes, check_dense, check_writable, flat, in_a_row, write_back
from torchcrew.collectives.streams import SMALL
from torchcrew.errors import CollectiveMismatch, PeerDied
from torchcrew.torch_private import without_autograd

__all__ = ("HostCollectives", "Layout")

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: How a header begins that says why its host calls nothing more.
_FAILED = "! "
_SUMS = frozenset({ReduceOp.SUM, ReduceOp.AVG})
#: What gloo can add. It has no average, and no arithmetic of other dtypes.
_GLOO_ADDS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64})


class Layout:
    """Which ranks of a group are on which host.

    Args:
        hosts: of each rank, what its host is recognised by.
        rank: of this process in the group.
    """

    def __init__(self, hosts: Sequence[str], rank: int) -> None:
        names = list(dict.fromkeys(hosts))
        self.rank = rank
        self.size = len(hosts)
        self.host_of = [names.index(host) for host in hosts]
        self.ranks = [[other for other, host in enumerate(hosts) if host == name] for name in names]
        """Of each host, in the order of hosts' first ranks."""
        self.here = self.host_of[rank]
        self.place_of = [self.ranks[host].index(other) for other, host in enumerate(self.host_of)]
        """Of each rank, among those of its host."""


def _collective(method: _Function) -> _Function:
    """As in `Collectives`; what goes wrong once it has begun, on this host, is said to the others."""

    @functools.wraps(method)
    def run(self: HostCollectives, *args: Any, timeout: float) -> Any:
        self.usable()
        self.deadline = time.monotonic() + timeout
        self.has_begun = False
        with without_autograd():
            try:
                return method(self, *args)
            except BaseException as error:
                if self.has_begun or not isinstance(error, ValueError):
                    self.give_up(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                raise

    return run  # type: ignore[return-value]


class HostCollectives:
    """The collectives of one rank of a group across hosts: what `Collectives` are to one host.

    Args:
        local: of this host's ranks.
        layout: who is where.
        ranks: what people call the group's ranks.
        leaders: gloo among the first rank of each host; None: this is not one of them.
        everybody: gloo among all.
    """

    def __init__(
        self, local: Collectives, layout: Layout, ranks: Sequence[int], leaders: Link | None, everybody: Link
    ) -> None:
        self.local: Any = local
        self.layout = layout
        self.ranks = ranks
        self.leaders = leaders
        self.everybody = everybody
        self.number = 0
        self.deadline = 0.0
        self.has_begun = False
        self._has_told = False
        self._is_between = True

    def usable(self) -> None:
        """Refuse a group that is broken, or another process's.

        Raises:
            RuntimeError: says why.
        """
        self.local.usable()

    def give_up(self, reason: str) -> None:
        """Take part no more; tell the ranks of this host, and other hosts' leaders, why."""
        self.local.turns.give_up(reason)
        leaders = self.leaders
        # In the middle of an exchange the others expect no header: they wait for the connection to end, or in vain.
        if leaders is None or leaders.failed or self._has_told or not self._is_between:
            return
        self._has_told = True
        leaders.leave_word(_FAILED + reason)

    @property
    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    # Agreeing ---------------------------------------------------------------------------------------------------------

    def _begin(self, what: str) -> None:
        """Compare, in this host, what is called."""
        self.number += 1
        self.has_begun = True
        self._header = header(f"{what} (call {self.number} in this group)")
        rows = torch.empty(self.local.size * HEADER, dtype=torch.uint8)
        self.local.all_gather_into(rows, self._header, timeout=self._left)
        self._compare(list(rows.split(HEADER)), self.layout.ranks[self.layout.here])

    def _among_leaders(self, exchange: Callable[[Link], None] | None = None) -> None:
        """In the leader: compare what the hosts call, then do what is to be done among leaders."""
        if self.leaders is None:
            return
        rows = [torch.empty_like(self._header) for _ in range(self.leaders.count)]
        self.leaders.all_gather(rows, self._header, self.deadline)
        self._is_between = False
        self._compare(rows, [ranks[0] for ranks in self.layout.ranks])
        if exchange is not None:
            exchange(self.leaders)
        self._is_between = True

    def _compare(self, rows: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
        if all(torch.equal(row, self._header) for row in rows):
            return
        calls = {self.ranks[rank]: text_of(row) for rank, row in zip(ranks, rows, strict=True)}
        for rank, call in calls.items():
            if call.startswith(_FAILED):
                reason = call.removeprefix(_FAILED)
                raise PeerDied(f"rank {rank}, on another host, failed in a collective of this group: {reason}")
        told = "\n".join(f"  rank {rank}: {call}" for rank, call in calls.items())
        raise CollectiveMismatch(
            f"ranks of one group call different collectives, or the same with different arguments:\n{told}"
        )

    @_collective
    def barrier(self) -> None:
        """Wait for all."""
        self._begin("barrier")
        self._meet()

    def _meet(self) -> None:
        self._among_leaders()
        self.local.barrier(timeout=self._left)

    # Reducing ---------------------------------------------------------------------------------------------------------

    @_collective
    def all_reduce(self, tensors: Sequence[torch.Tensor], op: Any) -> None:
        """Reduce each tensor, in place."""
        if any(tensor.layout is torch.sparse_coo for tensor in tensors):
            sparse.all_reduce(tensors, op, self.ranks, self._gather_tensors)
            return
        check_dense(tensors)
        operations = [operation(op, tensor.dtype) for tensor in tensors]
        for tensor in tensors:
            check_writable(tensor)
        for tensor, how in zip(tensors, operations, strict=True):
            row = flat(tensor)
            self._begin(f"all_reduce of {_described(row, how)}")
            self._reduce(row, how)
            self.local.broadcast(row, 0, timeout=self._left)
            write_back(tensor, row)

    def _reduce(self, row: torch.Tensor, how: Operation) -> None:
        """Reduce the tensors of all ranks into those of the leaders."""
        op = ReduceOp.SUM if how.kind == ReduceOp.AVG else how.kind
        self.local.reduce(row, 0, op, timeout=self._left)
        self._among_leaders(lambda leaders: self._reduce_hosts(leaders, row, how))

    def _reduce_hosts(self, leaders: Link, row: torch.Tensor, how: Operation) -> None:
        if how.kind in _SUMS and row.dtype in _GLOO_ADDS and row.numel() * row.element_size() > SMALL:
            leaders.add(row, self.deadline)
        elif row.numel():
            rows = [torch.empty_like(row) for _ in range(leaders.count)]
            leaders.all_gather([as_bytes(other) for other in rows], as_bytes(row), self.deadline)
            how(row, rows)
        how.after(row, self.layout.size)

    @_collective
    def reduce(self, tensor: torch.Tensor, root: int, reduce_op: Any) -> None:
        """Reduce a tensor into that of ``root``; the others' stay what they are."""
        check_dense([tensor])
        check_writable(tensor)
        check_root(root, self.layout.size)
        how, layout = operation(reduce_op, tensor.dtype), self.layout
        row = flat(tensor)
        if self.leaders is not None and layout.rank != root:
            row = row.clone()
        self._begin(f"reduce of {_described(row, how)}, root {self.ranks[root]}")
        self._reduce(row, how)
        if layout.here != layout.host_of[root]:
            return
        nothing = row[:0]
        if layout.place_of[root] != 0:  # the leader has it, and is another
            outs = [row] + [nothing] * (self.local.size - 1) if layout.rank == root else []
            mine = row if self.leaders is not None else nothing
            self.local.gather(outs, mine, layout.place_of[root], timeout=self._left)
        if layout.rank == root:
            write_back(tensor, row)

    @_collective
    def reduce_scatter(self, outs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], op: Any) -> None:
        """Reduce what all ranks have for a rank into its tensor; ``inputs``, for each of ``outs``: by rank, or all."""
        size, rank = self.layout.size, self.layout.rank
        calls = [
            (out, given, parts_of(out, given, size, rank), operation(op, out.dtype))
            for out, given in zip(outs, inputs, strict=True)
        ]
        for out, given, sizes, how in calls:
            row = torch.cat([flat(tensor) for tensor in given])  # never a tensor of the caller: the leader writes it
            self._begin(f"reduce_scatter of {_described(row, how)}")
            self._reduce(row, how)
            self._deal(out, row, sizes)

    def _deal(self, out: torch.Tensor, row: torch.Tensor, sizes: Sequence[int]) -> None:
        """Give each rank of this host its part of the leader's ``row``."""
        parts = row.split(list(sizes))
        if len(set(sizes)) == 1:
            mine = [parts[rank] for rank in self.layout.ranks[self.layout.here]]
            self.local.scatter(out, mine if self.leaders is not None else [], 0, timeout=self._left)
            return
        self.local.broadcast(row, 0, timeout=self._left)
        out.data.copy_(parts[self.layout.rank].view(out.shape))

    # Copying ----------------------------------------------------------------------------------------------------------

    @_collective
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the tensor of ``root`` into the others'."""
        check_dense([tensor])
        layout = self.layout
        check_root(root, layout.size)
        if layout.rank != root:
            check_writable(tensor)
        row = as_bytes(tensor)
        host = layout.host_of[root]
        self._begin(f"broadcast of {row.numel()} bytes, root {self.ranks[root]}")
        if layout.here == host:
            self.local.broadcast(row, layout.place_of[root], timeout=self._left)
        self._among_leaders(lambda leaders: leaders.broadcast(row, host, self.deadline))
        if layout.here != host:
            self.local.broadcast(row, 0, timeout=self._left)
        if layout.rank != root:
            write_back(tensor, row)

    @_collective
    def all_gather(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy each rank's tensor into one of ``outs``; the ranks' sizes may differ."""
        check_all_gathered(outs, tensor, self.layout.size)
        self._gather_tensors(outs, tensor)

    def _gather_tensors(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        with in_a_row(outs) as rows:
            self._all_gather([as_bytes(row) for row in rows], as_bytes(tensor))

    @_collective
    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy all ranks' tensors, which are of one size, behind each other into ``out``."""
        size = self.layout.size
        check_gathered_into(out, tensor, size)
        with in_a_row([out]) as (row,):
            mine = as_bytes(tensor)
            outs = as_bytes(row).split(mine.numel()) if mine.numel() else [mine] * size
            self._all_gather(list(outs), mine)

    def _all_gather(self, outs: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Of bytes: each host's, in the order of its ranks, one host behind the other, as long as the longest."""
        layout, leaders = self.layout, self.leaders
        sizes = [out.numel() for out in outs]
        longest = max(sum(sizes[rank] for rank in ranks) for ranks in layout.ranks)
        # Sizes in the header are those that this rank expects of all.
        self._begin(f"all_gather of {sum(sizes)} bytes, {longest} of a host")
        blocks = torch.empty((len(layout.ranks), longest), dtype=torch.uint8)
        here = [outs[rank] for rank in layout.ranks[layout.here]]
        self.local.gather(here if leaders is not None else [], mine, 0, timeout=self._left)
        block = torch.cat([*here, torch.empty(longest - sum(out.numel() for out in here), dtype=torch.uint8)])
        self._among_leaders(lambda leaders: leaders.all_gather(list(blocks), block, self.deadline))
        self.local.broadcast(blocks, 0, timeout=self._left)
        for row, ranks in zip(blocks, layout.ranks, strict=True):
            begin = 0
            for rank in ranks:
                outs[rank].copy_(row[begin : begin + sizes[rank]])
                begin += sizes[rank]

    @_collective
    def gather(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        """Copy each rank's tensor into one of the root's ``outs``."""
        size, rank = self.layout.size, self.layout.rank
        check_gathered(outs, tensor, root, size, rank)
        inputs = [tensor if other == root else tensor.flatten()[:0] for other in range(size)]
        self._exchange(f"gather, root {self.ranks[root]}", outs or [tensor.flatten()[:0]] * size, inputs)

    @_collective
    def scatter(self, out: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        """Copy one of the root's ``inputs`` into each rank's tensor."""
        size, rank = self.layout.size, self.layout.rank
        check_scattered(out, inputs, root, size, rank)
        outs = [out if other == root else out.flatten()[:0] for other in range(size)]
        what = f"scatter of {out.numel() * out.element_size()} bytes, root {self.ranks[root]}"
        self._exchange(what, outs, inputs or [out.flatten()[:0]] * size)

    @_collective
    def all_to_all(self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Copy the input that each rank has for this one into one of ``outs``; sizes may differ."""
        check_all_to_all(outs, inputs, self.layout.size)
        self._exchange("all_to_all", outs, inputs)

    def _exchange(self, what: str, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """From each rank to each, by gloo; first how much, because gloo does not forgive another size."""
        self._begin(what)
        self._meet()
        rows = [as_bytes(tensor) for tensor in inputs]
        sizes = [row.numel() for row in rows]
        theirs = torch.empty(len(sizes), dtype=torch.int64)
        eights = [8] * len(sizes)
        self.everybody.all_to_all(as_bytes(theirs), eights, as_bytes(torch.tensor(sizes)), eights, self.deadline)
        with in_a_row(outs) as targets:
            wanted = [as_bytes(target) for target in targets]
            found = torch.empty(int(theirs.sum()), dtype=torch.uint8)
            self.everybody.all_to_all(found, theirs.tolist(), torch.cat(rows), sizes, self.deadline)
            # Compared behind it, and not before: the others would wait for this rank.
            for rank, (row, part) in enumerate(zip(wanted, found.split(theirs.tolist()), strict=True)):
                if row.numel() != part.numel():
                    raise CollectiveMismatch(
                        f"rank {self.ranks[rank]} sends {part.numel()} bytes, but its output has {row.numel()}"
                    )
                row.copy_(part)


def _described(row: torch.Tensor, how: Operation) -> str:
    return f"{row.numel()} elements of {row.dtype}, reduction {how.kind.name}"
