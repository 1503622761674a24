"""Tensors and arrays of a shared graph: which memory they cover, and views of its copy in every process.

    found in the graph:   a ─────┐        b = a[2:] ──┐   c (numpy, over a's memory) ─┐        d ───────┐
    regions (`Leaves`):   ├───────── one: what these cover of the memory they share ──┤        ├─ one ──┤
    copies:               a storage in a memfd of its own; or a range of one memfd for all

Two tensors over one storage stay over one storage; what no tensor of the graph covers at its ends is not copied. The
user's memory is only read: a numpy view of it taken before stays valid.

Found while walking the graph  a tensor gets a storage that torch knows as shared, so that it travels as any shared
                               tensor does. An array becomes a view, which travels as a handle while a process starts.
In an item of a list or dict   is decoded as a view over one memfd for all. Sent elsewhere, it is copied: it is a small
                               part of something that everybody has.
"""

from __future__ import annotations

import os
import pickle
import weakref
from multiprocessing import context, reduction
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing import reductions

from torchcrew.channel.shared_buffer import (
    Allowance,
    BufferWriter,
    SharedBuffer,
    new_data_buffer,
    new_memfd,
    write_range,
)
from torchcrew.torch_private import shared_storage

__all__ = (
    "ItemLeaves",
    "Leaves",
    "Region",
    "is_plain_array",
    "is_plain_tensor",
    "is_shared_array",
    "place_in_buffer",
    "reduce_for_item",
    "share_leaves",
)

#: Alignment of regions: that of torch's own allocations.
_ALIGNMENT = 64

Array = np.ndarray[Any, Any]
#: What a leaf is but for its shape: "tensor", "parameter" or "array"; dtype; whether it requires grad, or is writeable.
Kind = tuple[str, Any, bool]


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a dense one of the CPU and of torch's own class."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def is_plain_array(array: Any) -> bool:
    """Whether the array is numpy's own class and holds no Python objects."""
    return type(array) is np.ndarray and not array.dtype.hasobject


class Region(NamedTuple):
    """Memory that is copied as one."""

    start: int
    nbytes: int
    members: list[int]
    """Numbers of the leaves in it."""


class Leaves:
    """The tensors and arrays found in a graph, and the memory they cover. Holds them, so that no address is reused."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.kinds: dict[Kind, int] = {}
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []
        self._extents: list[tuple[int, int, int, int]] = []
        self.pointers: list[int] = []

    def add(self, leaf: Any) -> int:
        """Take a tensor or array; returns its number, the same for the same object.

        Raises:
            RuntimeError: a tensor that requires grad and is no leaf of its graph; torch's own error.
        """
        number = self._numbers.get(id(leaf))
        if number is None:
            number = self._numbers[id(leaf)] = len(self.objects)
            self._held.append(leaf)
            found = _settled(leaf) if isinstance(leaf, torch.Tensor) else leaf
            pointer, extent = _extent(found)
            self.objects.append(found)
            self.pointers.append(pointer)
            self._extents.append(extent)
        return number

    def regions(self) -> list[Region]:
        """The memory to copy: what leaves cover of memory that they share is one region."""
        if not self.objects:
            return []
        owner, owner_end, low, high = np.array(self._extents, np.uint64).T
        members = np.flatnonzero(low < high)
        members = members[np.argsort(owner[members], kind="stable")]
        if not len(members):
            return []
        owner, owner_end, low, high = owner[members], owner_end[members], low[members], high[members]
        reach = np.maximum.accumulate(owner_end)
        first = np.flatnonzero(np.concatenate(([True], owner[1:] >= reach[:-1])))
        low, high = np.minimum.reduceat(low, first), np.maximum.reduceat(high, first)
        start = low - (low - owner[first]) % np.uint64(_ALIGNMENT)
        groups = np.split(members, first[1:])
        return [
            Region(int(at), int(end - at), group.tolist()) for at, end, group in zip(start, high, groups, strict=True)
        ]

    def describe(self, number: int) -> tuple[int, tuple[int, ...], tuple[int, ...] | None]:
        """Number of the kind, shape, and strides (None: contiguous)."""
        leaf = self.objects[number]
        if isinstance(leaf, torch.Tensor):
            name = "parameter" if type(leaf) is torch.nn.Parameter else "tensor"
            kind: Kind = (name, leaf.dtype, leaf.requires_grad)
            strides = None if leaf.is_contiguous() else leaf.stride()
        else:
            kind = ("array", leaf.dtype, leaf.flags.writeable)
            strides = None if leaf.flags.c_contiguous else leaf.strides
        return self.kinds.setdefault(kind, len(self.kinds)), tuple(leaf.shape), strides


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; or, of one whose memory is yet to be conjugated or negated, the one it stands for."""
    if tensor.requires_grad and not tensor.is_leaf:
        reductions.reduce_tensor(tensor)  # raises torch's error
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().requires_grad_(tensor.requires_grad)


def _extent(leaf: Any) -> tuple[int, tuple[int, int, int, int]]:
    """Where the first element is; begin and end of the memory it is part of, and of what it covers."""
    if isinstance(leaf, torch.Tensor):
        pointer, size = leaf.data_ptr(), leaf.element_size()
        reach = 0
        if leaf.numel():
            reach = (1 + sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))) * size
        storage = leaf.untyped_storage()
        return pointer, (storage.data_ptr(), storage.data_ptr() + storage.nbytes(), pointer, pointer + reach)
    pointer, low, high = _bounds(leaf)
    root = _root(leaf)
    owner: Any = root.base
    if isinstance(owner, torch.Tensor):
        storage = owner.untyped_storage()
        return pointer, (storage.data_ptr(), storage.data_ptr() + storage.nbytes(), low, high)
    return pointer, (*_bounds(root)[1:], low, high)


def _bounds(array: Array) -> tuple[int, int, int]:
    """Address of the first element, and of begin and end: strides may be negative."""
    pointer: int = array.__array_interface__["data"][0]
    if not array.size:
        return pointer, pointer, pointer
    steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    low = pointer + sum(step for step in steps if step < 0)
    return pointer, low, pointer + sum(step for step in steps if step > 0) + array.itemsize


def _root(array: Array) -> Array:
    """The array whose memory this is a view of; itself if it has its own."""
    while type(array.base) is np.ndarray:
        array = array.base
    return array


# Found while walking the graph ----------------------------------------------------------------------------------------


def share_leaves(leaves: Leaves, allowance: Allowance) -> list[Any]:
    """Copy the leaves into shared memory; returns their counterparts, in order.

    Regions with a tensor become storages of torch's, each with its memfd; all others lie in one memfd.

    Raises:
        ArenaFull: over the budget.
    """
    shared: list[Any] = [None] * len(leaves.objects)
    rest: list[Region] = []
    for region in leaves.regions():
        if any(isinstance(leaves.objects[k], torch.Tensor) for k in region.members):
            allowance.take(region.nbytes)
            everything = _storage_of(region)
            root = everything.numpy()
            _sources[id(root)] = _Source(root, everything)
            for k in region.members:
                shared[k] = _like(leaves, k, leaves.pointers[k] - region.start, root, everything)
        else:
            rest.append(region)
    if rest:
        buffer, offsets = place_in_buffer(rest, allowance)
        root = _root_of(buffer)
        for region, offset in zip(rest, offsets, strict=True):
            for k in region.members:
                shared[k] = _like(leaves, k, leaves.pointers[k] - region.start + offset, root, None)
    for k, found in enumerate(shared):
        if found is None:  # without elements
            shared[k] = _like(leaves, k, 0, np.empty(0, np.uint8), torch.empty(0, dtype=torch.uint8, device="cpu"))
    return shared


def _storage_of(region: Region) -> torch.Tensor:
    """The bytes of a region in a storage that torch knows as shared."""
    fd = new_memfd(region.nbytes)
    try:
        write_range(fd, 0, region.start, region.nbytes)
        storage = shared_storage(fd, region.nbytes)
    finally:
        os.close(fd)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _like(leaves: Leaves, number: int, offset: int, root: Array, everything: torch.Tensor | None) -> Any:
    """The counterpart of a leaf over its region: over ``root``, or the storage of ``everything``."""
    leaf = leaves.objects[number]
    if not isinstance(leaf, torch.Tensor):
        array: Array = np.ndarray(leaf.shape, leaf.dtype, root, offset, leaf.strides)
        array.flags.writeable = leaf.flags.writeable
        return array
    assert everything is not None
    elements, odd = divmod(offset, leaf.element_size())
    if odd:  # over a buffer of bytes that is in the graph, too; torch counts offsets in elements
        low, high = _extent(leaf)[1][2:]
        everything, elements = _storage_of(Region(low, high - low, [])), 0
    tensor = torch.empty(0, dtype=leaf.dtype, device="cpu")
    tensor.set_(everything.untyped_storage(), elements, leaf.shape, leaf.stride())
    return _finish(tensor, type(leaf) is torch.nn.Parameter, leaf.requires_grad)


def _finish(tensor: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


# Arrays that travel as handles ----------------------------------------------------------------------------------------


class _Source:
    """What an array of bytes is a view of, for as long as the array lives: a buffer, or a tensor of bytes."""

    def __init__(self, root: Array, source: SharedBuffer | torch.Tensor) -> None:
        key = id(root)
        self.source = source
        self._root = weakref.ref(root, lambda _: _sources.pop(key, None))


# By the id of the array, which has no hash.
_sources: dict[int, _Source] = {}


def is_shared_array(array: Array) -> bool:
    """Whether the array is a view of memory that `share` made."""
    return id(_root(array)) in _sources


def _root_of(source: SharedBuffer | torch.Tensor) -> Array:
    """A new array over all bytes of ``source``; it, and so every view of it, is known as shared."""
    root = np.frombuffer(source.view, np.uint8) if isinstance(source, SharedBuffer) else source.numpy()
    _sources[id(root)] = _Source(root, source)
    return root


def _reduce_array(array: Array) -> Any:
    """As stock, by value; but a view of shared memory goes as a handle to a process that starts.

    In queues arrays are snapshots, as they are in stock's: tensors are what shares there.
    """
    if context.get_spawning_popen() is None:
        return _by_value(array)
    root = _root(array)
    found = _sources.get(id(root))
    if found is None or array.dtype.hasobject or not array.size:
        return _by_value(array)
    offset = _bounds(array)[0] - _bounds(root)[0]
    return _rebuild_array, (found.source, offset, array.dtype, array.shape, array.strides, array.flags.writeable)


def _rebuild_array(
    source: Any, offset: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], writeable: bool
) -> Array:
    array: Array = np.ndarray(shape, dtype, _root_of(source), offset, strides)
    array.flags.writeable = writeable
    return array


_by_value = reduction.ForkingPickler._extra_reducers.get(np.ndarray, np.ndarray.__reduce__)  # type: ignore[attr-defined]
reduction.register(np.ndarray, _reduce_array)


# In items of lists and dicts ------------------------------------------------------------------------------------------


def place_in_buffer(regions: list[Region], allowance: Allowance) -> tuple[SharedBuffer, list[int]]:
    """Copy regions into one writable buffer; returns it and where each begins.

    Raises:
        ArenaFull: over the budget.
    """
    offsets, end = [], 0
    for region in regions:
        offsets.append(end)
        end += -(-region.nbytes // _ALIGNMENT) * _ALIGNMENT
    allowance.take(end)
    fd = new_memfd(end)
    try:
        for region, offset in zip(regions, offsets, strict=True):
            write_range(fd, offset, region.start, region.nbytes)
    except BaseException:
        os.close(fd)
        raise
    return new_data_buffer(fd, end), offsets


class ItemLeaves:
    """Makes the tensors and arrays of items while these are decoded; one for each call of `share`.

    Args:
        buffer: has the table of offsets, and the kinds.
        data: has the data; None when no leaf has elements.
        position: of the table, as `write` returned it.
    """

    __slots__ = ("_buffer", "_data", "_kinds", "_offsets", "_position")

    def __init__(self, buffer: SharedBuffer, data: SharedBuffer | None, position: tuple[int, int, int]) -> None:
        self._buffer = buffer
        self._data = data
        self._position = position
        table, count, kinds = position
        self._offsets = buffer.view[table : table + 8 * count].cast("Q")
        self._kinds: list[Kind] = pickle.loads(buffer.view[kinds:])

    @staticmethod
    def write(leaves: Leaves, writer: BufferWriter, allowance: Allowance) -> tuple[Any, tuple[int, int, int]]:
        """Copy the data, write table and kinds; returns what this class takes besides the buffer."""
        regions = leaves.regions()
        data, offsets = place_in_buffer(regions, allowance) if regions else (None, [])
        table = np.zeros(len(leaves.objects), np.uint64)
        for region, offset in zip(regions, offsets, strict=True):
            for k in region.members:
                table[k] = offset + leaves.pointers[k] - region.start
        return data, (writer.write_aligned(table), len(table), writer.write(pickle.dumps(list(leaves.kinds), 5)))

    def __getitem__(self, leaf: tuple[int, int, tuple[int, ...], tuple[int, ...] | None]) -> Any:
        number, code, shape, strides = leaf
        kind, dtype, flag = self._kinds[code]
        if 0 in shape:
            if kind == "array":
                return np.empty(shape, dtype)
            return _finish(torch.empty(shape, dtype=dtype, device="cpu"), kind == "parameter", flag)
        assert self._data is not None
        if kind == "array":
            array: Array = np.ndarray(shape, dtype, self._data.view, self._offsets[number], strides)
            array.flags.writeable = flag
            return array
        reach = [n if strides is None else (n - 1) * s for n, s in zip(shape, strides or shape, strict=True)]
        count = 1 + sum(reach) if strides is not None else int(np.prod(reach, dtype=np.int64))
        tensor = torch.frombuffer(self._data.view, dtype=dtype, count=count, offset=self._offsets[number])
        # In place: `view` would make a view with a base, which autograd and users can tell from a tensor of its own.
        if strides is not None:
            tensor.as_strided_(shape, strides)
        elif len(shape) != 1:
            tensor.resize_(shape)
        return _finish(tensor, kind == "parameter", flag)

    def __reduce__(self) -> Any:
        return ItemLeaves, (self._buffer, self._data, self._position)


def reduce_for_item(leaves: Leaves, leaf: Any, stand_in: Any) -> Any:
    """How a leaf is pickled in an item: as a question to the `ItemLeaves` that come in place of ``stand_in``."""
    number = leaves.add(leaf)
    return getitem, (stand_in, (number, *leaves.describe(number)))
