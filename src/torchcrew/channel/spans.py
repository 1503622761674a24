"""The data of a message: which ranges of memory its tensors and buffers are, and how the other side sees them.

Two tensors that overlap in memory must overlap on the other side, too, so their common range travels once
(`overlapping`). Arrays arrive as copies that overlap nothing, as with stock. A view with gaps that overlaps nothing
else is sent without the gaps.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ("EMPTY", "INLINE", "Place", "Range", "Record", "Span", "overlapping", "rebuild", "simple_ranges")

#: Index of the block and offset in it, or one of the two below in place of the index.
Place = tuple[int, int]
INLINE, EMPTY = -1, -2
#: First address, bytes.
Range = tuple[int, int]
#: What the other side needs: index, offset, elements from there on (bytes for raw buffers), dtype, flags, shape (None:
#: one dimension), stride (None: contiguous).
Record = tuple[int, int, int, int, int, "tuple[int, ...] | None", "tuple[int, ...] | None"]

_GRAD, _PARAMETER, _RAW = 1, 2, 4

_DTYPES: list[torch.dtype] = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Span:
    """One tensor or buffer, as a range of memory and its description."""

    __slots__ = ("count", "dtype", "flags", "item", "nbytes", "shape", "start", "stride")

    item: Any  # keeps the memory
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None

    def __init__(self, item: Any) -> None:
        if type(item) is pickle.PickleBuffer:
            self.lay_out_buffer(item.raw())
            return
        self.dtype = _DTYPE_CODES[item.dtype]
        self.flags = _GRAD if item.requires_grad else 0
        if type(item) is torch.nn.Parameter:
            self.flags |= _PARAMETER
        if item.is_conj() or item.is_neg():
            item = item.detach().resolve_conj().resolve_neg()
        self._lay_out(item)

    def lay_out_buffer(self, raw: memoryview) -> None:
        """Be the bytes of ``raw``."""
        self.item = raw
        self.dtype = 0
        self.flags = _RAW
        self.shape = self.stride = None
        self.count = self.nbytes = raw.nbytes
        self.start = np.frombuffer(raw, np.uint8).__array_interface__["data"][0] if raw.nbytes else 0

    def _lay_out(self, tensor: Any) -> None:
        self.item = tensor
        self.shape = shape = tuple(tensor.shape)
        self.start = tensor.data_ptr()
        self.count = tensor.numel()
        if self.count and tensor.is_contiguous():
            self.stride = None
            self.nbytes = tensor.nbytes
            if len(shape) == 1:
                self.shape = None
            return
        self.stride = stride = tensor.stride()
        if self.count:
            self.count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        self.nbytes = self.count * tensor.element_size()

    def compact(self) -> None:
        """Leave out the gaps of a view, if it has any; its strides become those of a dense tensor."""
        if self.stride is not None and self.count > self.item.numel():
            with torch.no_grad():
                self._lay_out(self.item.detach().clone(memory_format=torch.preserve_format))

    def record(self, place: Place) -> Record:
        """The description of this span, with its data at ``place``."""
        return *place, self.count, self.dtype, self.flags, self.shape, self.stride


def overlapping(spans: Sequence[Span]) -> tuple[list[Range], list[tuple[int, int]]]:
    """Merge spans that overlap into the ranges to send; compact those that have gaps and overlap nothing.

    Returns:
        The ranges, and for each span the index of its range and the offset in it (-1 for a span without data).
    """
    for span in spans:
        if span.flags & _RAW and span.nbytes:  # stock's arrays are copies, each on its own
            span.lay_out_buffer(memoryview(bytearray(span.item)))
    order = sorted((span.start, i) for i, span in enumerate(spans) if span.nbytes)
    ranges: list[Range] = []
    members: list[list[int]] = []
    for start, i in order:
        if ranges and start < sum(ranges[-1]):
            first, nbytes = ranges[-1]
            ranges[-1] = (first, max(nbytes, start + spans[i].nbytes - first))
            members[-1].append(i)
        else:
            ranges.append((start, spans[i].nbytes))
            members.append([i])
    within = [(-1, 0)] * len(spans)
    for at, together in enumerate(members):
        if len(together) == 1:
            span = spans[together[0]]
            if span.stride is not None:
                span.compact()
                ranges[at] = (span.start, span.nbytes)
        for i in together:
            within[i] = (at, spans[i].start - ranges[at][0])
    return ranges, within


def simple_ranges(spans: Iterable[Span]) -> list[Range] | None:
    """The ranges of spans that are contiguous, have data and do not overlap; None for all others."""
    ranges = []
    for span in spans:
        if span.stride is not None or not span.nbytes:
            return None
        ranges.append((span.start, span.nbytes))
    end = 0
    for start, nbytes in sorted(ranges):
        if start < end:
            return None
        end = start + nbytes
    return ranges


def rebuild(views: Sequence[Any], record: Record) -> Any:
    """The tensor (or, of raw buffers, a memoryview) that ``record`` describes, over the views of its message.

    ``views[index]`` is the view of a block; the last view is the inline data.
    """
    index, offset, count, code, flags, shape, stride = record
    if flags & _RAW:
        # Through an array, which hides the view from the cyclic collector (see `memory.lease`).
        return np.frombuffer(views[index], np.uint8, count, offset).data if count else bytearray()
    dtype = _DTYPES[code]
    if index == EMPTY:
        assert shape is not None
        # The device is said because the user's process may have another default.
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        if stride is not None:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    else:
        tensor = torch.frombuffer(views[index], dtype=dtype, count=count, offset=offset)
        # In place: `view` would make a view with a base, which autograd and users can tell from a tensor of its own.
        if stride is not None:
            assert shape is not None
            tensor.as_strided_(shape, stride)
        elif shape is not None:
            tensor.resize_(*shape) if shape else tensor.resize_(())  # taking the sizes one by one is 4 times faster
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & _GRAD))
    return tensor.requires_grad_() if flags & _GRAD else tensor
