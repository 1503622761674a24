"""The collectives of `torch.distributed`: what their arguments mean, and in what the ranks that call one must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchcrew.launcher.calls import Call, what_of

__all__ = ("COLLECTIVES", "Asked", "Collective", "Same", "described", "differ", "what")


class Same(Enum):
    """What of the tensor is the same in all ranks. Its shape never is: torch lets [10] meet [2, 5]."""

    NOTHING = 0
    DTYPE = 1
    SIZE = 2
    """Number of elements, and dtype."""


class Asked(NamedTuple):
    """What of a call's arguments is of interest."""

    group: Any
    tensor: Any = None
    op: Any = None
    root: str = ""
    """The name of the argument that says which rank is special."""
    rank: int | None = None
    """That rank, or None..."""
    group_rank: int | None = None
    """...where it was given by its place in the group."""
    more: str = ""
    alone: bool = False
    """Whether the call does not concern ranks outside it: it is not written."""


class Collective(NamedTuple):
    """A function of `torch.distributed`."""

    read: Callable[..., Asked]
    same: Same = Same.NOTHING
    counted: bool = True
    """Whether all ranks of the group call it; else it is between two of them."""


_SUM = "SUM"


# The parameters of each as torch has them. What a later release adds is not of interest.


def _all_reduce(tensor: Any, op: Any = _SUM, group: Any = None, *_: Any, **__: Any) -> Asked:
    return Asked(group, tensor, op)


def _all_reduce_coalesced(tensors: Any, op: Any = _SUM, group: Any = None, *_: Any, **__: Any) -> Asked:
    return Asked(group, tensors, op)


def _reduce(
    tensor: Any,
    dst: Any = None,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: Any = None,
    **_: Any,
) -> Asked:
    return Asked(group, tensor, op, "dst", dst, group_dst)


def _broadcast(
    tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None, **_: Any
) -> Asked:
    return Asked(group, tensor, None, "src", src, group_src)


def _all_gather(tensor_list: Any, tensor: Any, group: Any = None, *_: Any, **__: Any) -> Asked:
    return Asked(group, tensor)


def _all_gather_single(output_tensor: Any, input_tensor: Any, group: Any = None, *_: Any, **__: Any) -> Asked:
    return Asked(group, input_tensor)


def _all_gather_coalesced(
    output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, *_: Any, **__: Any
) -> Asked:
    return Asked(group, input_tensor_list)


def _gather(
    tensor: Any,
    gather_list: Any = None,
    dst: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: Any = None,
    **_: Any,
) -> Asked:
    return Asked(group, tensor, None, "dst", _or_first(dst, group_dst), group_dst)


def _scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_src: Any = None,
    **_: Any,
) -> Asked:
    return Asked(group, tensor, None, "src", _or_first(src, group_src), group_src)


def _reduce_scatter(output: Any, input_list: Any, op: Any = _SUM, group: Any = None, *_: Any, **__: Any) -> Asked:
    return Asked(group, output, op)


def _reduce_scatter_single(output: Any, input: Any, op: Any = _SUM, group: Any = None, *_: Any, **__: Any) -> Asked:
    return Asked(group, input, op)


def _all_to_all(output_tensor_list: Any, input_tensor_list: Any, group: Any = None, *_: Any, **__: Any) -> Asked:
    return Asked(group, input_tensor_list)


def _all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    *_: Any,
    **__: Any,
) -> Asked:
    return Asked(group, input)


def _barrier(group: Any = None, *_: Any, **__: Any) -> Asked:
    return Asked(group)


def _all_gather_object(object_list: Any, obj: Any, group: Any = None, *_: Any, **__: Any) -> Asked:
    return Asked(group)


def _gather_object(
    obj: Any, object_gather_list: Any = None, dst: Any = None, group: Any = None, group_dst: Any = None, **_: Any
) -> Asked:
    return Asked(group, None, None, "dst", _or_first(dst, group_dst), group_dst)


def _broadcast_object_list(
    object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None, **_: Any
) -> Asked:
    return Asked(group, None, None, "src", _or_first(src, group_src), group_src, f"objects={len(object_list)}")


def _scatter_object_list(
    scatter_object_output_list: Any,
    scatter_object_input_list: Any = None,
    src: Any = None,
    group: Any = None,
    group_src: Any = None,
    **_: Any,
) -> Asked:
    return Asked(group, None, None, "src", _or_first(src, group_src), group_src)


def _send(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None, **_: Any) -> Asked:
    return Asked(group, tensor, None, "dst", dst, group_dst)


def _recv(tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None, **_: Any) -> Asked:
    return Asked(group, tensor, None, "src", src, group_src)


def _send_object_list(
    object_list: Any, dst: Any = None, group: Any = None, device: Any = None, group_dst: Any = None, *_: Any, **__: Any
) -> Asked:
    return Asked(group, None, None, "dst", dst, group_dst)


def _recv_object_list(
    object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None, *_: Any, **__: Any
) -> Asked:
    return Asked(group, None, None, "src", src, group_src)


def _new_group(
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    *_: Any,
    **__: Any,
) -> Asked:
    members = range(dist.get_world_size()) if ranks is None else ranks
    return Asked(None, more=f"ranks={sorted(members)}", alone=bool(use_local_synchronization))


def _split_group(parent_pg: Any = None, *_: Any, **__: Any) -> Asked:
    return Asked(parent_pg)


def _or_first(rank: Any, group_rank: Any) -> Any:
    return 0 if rank is None and group_rank is None else rank


#: By name; a torch that lacks one of them, or calls it otherwise, is served without.
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(_all_reduce, Same.SIZE),
    "all_reduce_coalesced": Collective(_all_reduce_coalesced),
    "reduce": Collective(_reduce, Same.SIZE),
    "broadcast": Collective(_broadcast, Same.SIZE),
    "all_gather": Collective(_all_gather, Same.DTYPE),  # NCCL takes different sizes
    "all_gather_single": Collective(_all_gather_single, Same.SIZE),
    "all_gather_into_tensor": Collective(_all_gather_single, Same.SIZE),
    "_all_gather_base": Collective(_all_gather_single, Same.SIZE),
    "all_gather_coalesced": Collective(_all_gather_coalesced),
    "gather": Collective(_gather, Same.DTYPE),
    "scatter": Collective(_scatter, Same.DTYPE),
    "reduce_scatter": Collective(_reduce_scatter, Same.DTYPE),
    "reduce_scatter_single": Collective(_reduce_scatter_single, Same.SIZE),
    "reduce_scatter_tensor": Collective(_reduce_scatter_single, Same.SIZE),
    "_reduce_scatter_base": Collective(_reduce_scatter_single, Same.SIZE),
    "all_to_all": Collective(_all_to_all),
    "all_to_all_single": Collective(_all_to_all_single),
    "barrier": Collective(_barrier),
    "all_gather_object": Collective(_all_gather_object),
    "gather_object": Collective(_gather_object),
    "broadcast_object_list": Collective(_broadcast_object_list),
    "scatter_object_list": Collective(_scatter_object_list),
    "new_group": Collective(_new_group),
    "split_group": Collective(_split_group),
    "send": Collective(_send, counted=False),
    "recv": Collective(_recv, counted=False),
    "send_object_list": Collective(_send_object_list, counted=False),
    "recv_object_list": Collective(_recv_object_list, counted=False),
}

#: Names of one and the same function.
_ALIASES = {
    "all_gather_into_tensor": "all_gather_single",
    "_all_gather_base": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "_reduce_scatter_base": "reduce_scatter_single",
}


def what(name: str, asked: Asked, ranks: Sequence[int]) -> bytes:
    """That part of the ledger's record; ``ranks`` are those of the group."""
    _, tensor, op, root, rank, group_rank, more, _ = asked
    if rank is None and group_rank is not None:
        rank = ranks[group_rank]
    if tensor is None:
        return _what(name, None, None, op, root, rank, more)
    if isinstance(tensor, torch.Tensor):
        return _what(name, tensor.dtype, tensor.shape, op, root, rank, more)
    return _what(name, tensor[0].dtype if tensor else None, None, op, root, rank, more)


@lru_cache(maxsize=1024)
def _what(
    name: str, dtype: torch.dtype | None, shape: tuple[int, ...] | None, op: Any, root: str, rank: Any, more: str
) -> bytes:
    texts = [str(op).rpartition(".")[2]] if op is not None else []  # also of one with a factor: "PREMUL_SUM"
    if root:
        texts.append(f"{root}={'any' if rank is None else int(rank)}")
    if more:
        texts.append(more)
    return what_of(name, str(dtype).rpartition(".")[2] if dtype else None, shape, ", ".join(texts))


def differ(mine: Call, theirs: Call) -> bool:
    """Whether two calls under the same number of the same group cannot be the same collective."""
    name = _ALIASES.get(mine.name, mine.name)
    if name != _ALIASES.get(theirs.name, theirs.name):
        return True
    if mine.detail != theirs.detail:
        # A group of its own for each rank works, although the ranks that call `new_group` should agree on the members.
        return not (name == "new_group" and "," not in mine.detail + theirs.detail)
    same = COLLECTIVES[mine.name].same
    if same is not Same.NOTHING and mine.dtype != theirs.dtype:
        return True
    return same is Same.SIZE and _elements(mine) != _elements(theirs)


def described(call: Call) -> str:
    """The call as in "all_reduce(float32 [10], SUM) at train.py:40"."""
    shape = None if call.shape is None else "[" + ", ".join(map(str, call.shape)) + "]"
    tensor = " ".join(text for text in (call.dtype, shape) if text)
    site = f" at {call.site}" if call.site else ""
    return f"{call.name}({', '.join(text for text in (tensor, call.detail) if text)}){site}"


def _elements(call: Call) -> int | None:
    return None if call.shape is None else prod(call.shape)
