"""One object, one message: a pickle without its data, and the data side by side in one block.

    Encoder(writer).encode(obj)                              decode(header, body, lease)
      pickle 5, tensors and buffers out of band                leases the blocks
      merge what overlaps, copy what is not in the block       one view, one storage per tensor
      header = pickle(payload, records, loans)                 unpickles with the tensors as "buffers"

The trick: pickle protocol 5 hands out-of-band buffers back through an iterator and pushes *whatever the iterator
yields* on its stack. A tensor is pickled as a dummy `PickleBuffer`; when decoding, the iterator yields finished tensors.
So the C pickler does all the walking, memoises shared objects and keeps their identity.

A message is a snapshot. Tensors that overlap in memory keep overlapping (their common range is sent once); a view sends
only what it views; expanded tensors are not materialised; a view with gaps is sent without them. Tensors that are
shared already, and all that are not dense CPU tensors, go through torch's own reductions.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing import reductions
from torch.utils.hooks import warn_if_has_hooks

from torchcrew.channel.writer import ALIGNMENT, BlockWriter
from torchcrew.memory.arena import Loan

__all__ = ("INLINE_MAX", "PACKET_MAX", "Encoded", "Encoder", "decode")

#: Data of at most this many bytes travels in the packet itself: a block costs more than two small copies.
INLINE_MAX = 16 << 10
#: A header (with its inline data) above this goes into a block, too: a packet must fit in a socket's buffer.
PACKET_MAX = 48 << 10

_INLINE, _EMPTY = -1, -2
_GRAD, _PARAMETER, _RAW = 1, 2, 4
#: Alignment of tensors that travel inline.
_INLINE_ALIGNMENT = 16
#: Pickled size of one record, about: decides whether a header is too large.
_RECORD_BYTES = 48

_DTYPES: list[torch.dtype] = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

# Writable, or pickle would ask the decoder for a read-only view of the tensor.
_STAND_IN = pickle.PickleBuffer(bytearray(1))
_NOTHING: frozenset[int] = frozenset()


class Encoded(NamedTuple):
    """A message ready to be sent: ``header`` is a pickle, ``body`` its inline data.

    Without tensors and buffers there is no header, and ``body`` is the pickle of the object itself.
    """

    header: bytes
    body: bytes | bytearray


#: Where the data of one tensor or buffer is and what it looks like: index of the block (or one of the above), offset,
#: elements (bytes for raw buffers) from there on, dtype, flags, shape (None: one dimension), stride (None: contiguous).
_Record = tuple[int, int, int, int, int, "tuple[int, ...] | None", "tuple[int, ...] | None"]


def _itself(obj: Any) -> Any:
    return obj


class _Reducers(dict[type, Callable[[Any], Any]]):
    """The types we pickle ourselves, then torch's and the standard library's registrations, whenever they were made."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        found = ForkingPickler._extra_reducers.get(kind)  # type: ignore[attr-defined]
        return found or copyreg.dispatch_table[kind]


class Encoder:
    """Turns objects into messages; keeps its pickler, whose creation would cost more than a small message. One thread.

    Args:
        writer: the blocks of the messages. None: everything travels inline, whatever its size.
    """

    def __init__(self, writer: BlockWriter | None = None) -> None:
        self._writer = writer
        self._found: list[torch.Tensor | pickle.PickleBuffer] = []
        self._file = io.BytesIO()
        self._pickler = pickle.Pickler(self._file, 5, buffer_callback=self._buffer)
        self._pickler.dispatch_table = _Reducers(  # type: ignore[assignment]
            {
                torch.Tensor: self._tensor,
                torch.nn.Parameter: self._tensor,
                torch.UntypedStorage: self._storage,
            }
        )

    def encode(self, obj: Any) -> Encoded:
        """Turn ``obj`` into a message; tensors that the writer already holds are not copied, all others once.

        Raises:
            Exception: whatever pickling raises; nothing is on loan then.
            ArenaFull: the writer found no room.
        """
        try:
            payload, found = self._walk(obj)
            if not found and (self._writer is None or len(payload) <= PACKET_MAX):
                if self._writer is not None:
                    self._writer.lend(_NOTHING)
                return Encoded(b"", payload)
            spans = [_Span(item) for item in found]
            groups = _overlapping(spans)
            body: bytes | bytearray = b""
            if self._writer is None or sum(end - start for start, end, _ in groups) <= INLINE_MAX:
                body, starts = _copy_inline(groups)
            else:
                starts = _copy_to_blocks(groups, self._writer)
            return _seal(payload, _records(spans, groups, starts), body, self._writer)
        except BaseException:
            if self._writer is not None:
                self._writer.lend(_NOTHING)
            raise

    def _walk(self, obj: Any) -> tuple[bytes, list[Any]]:
        """One pass of the pickler: the payload, and the tensors and buffers found, in order."""
        try:
            self._pickler.dump(obj)
            return self._file.getvalue(), self._found
        finally:
            self._found = []
            self._pickler.clear_memo()
            self._file.seek(0)
            self._file.truncate()

    def _buffer(self, buffer: pickle.PickleBuffer) -> None:
        if buffer is not _STAND_IN:
            self._found.append(buffer)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad:
            if not tensor.is_leaf:
                return reductions.reduce_tensor(tensor)  # raises stock's error
            warn_if_has_hooks(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            if tensor.is_cpu and not tensor.is_nested:
                # Its parts are dense tensors and storages, which come back here.
                return tensor.__reduce_ex__(5)
            return reductions.reduce_tensor(tensor)
        if not tensor.is_cpu or tensor.untyped_storage().is_shared():
            return reductions.reduce_tensor(tensor)
        self._found.append(tensor)
        # A new tuple each time: the pickler remembers tuples, and would take the second tensor for the first.
        return _itself, (_STAND_IN,)

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or storage.is_shared():
            return reductions.reduce_storage(storage)
        return _storage_of, (torch.empty(0, dtype=torch.uint8).set_(storage),)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


class _Span:
    """A range of memory and what of it the object contains."""

    __slots__ = ("count", "end", "flags", "item", "shape", "start", "stride", "dtype")

    def __init__(self, item: Any) -> None:
        self.item = item
        if isinstance(item, pickle.PickleBuffer):
            raw = item.raw()
            self.count = raw.nbytes
            self.dtype = 0
            self.flags = _RAW
            self.shape = self.stride = None
            self.start = np.frombuffer(raw, np.uint8).__array_interface__["data"][0] if raw.nbytes else 0
            self.end = self.start + raw.nbytes
            self.item = raw
            return
        if item.is_conj() or item.is_neg():
            self.item = item = item.resolve_conj().resolve_neg()
        self.dtype = _DTYPE_CODES[item.dtype]
        self.flags = (_GRAD if item.requires_grad else 0) | (_PARAMETER if type(item) is torch.nn.Parameter else 0)
        self._lay_out(item)

    def _lay_out(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.start = tensor.data_ptr()
        self.count = tensor.numel()
        if tensor.is_contiguous():
            self.stride = None
        else:
            self.stride = tensor.stride()
            if self.count:
                self.count = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        self.end = self.start + self.count * tensor.element_size()

    def compact(self) -> None:
        """Leave out the gaps of a view, if it has any; its strides become those of a dense tensor."""
        if self.stride is not None and self.count > self.item.numel():
            with torch.no_grad():
                self.item = self.item.detach().clone(memory_format=torch.preserve_format)
            self._lay_out(self.item)

    def record(self, place: int, offset: int) -> _Record:
        shape = self.shape
        if self.stride is None and shape is not None and len(shape) == 1 and place != _EMPTY:
            shape = None
        return place, offset, self.count, self.dtype, self.flags, shape, self.stride


#: Spans that overlap: first and last address, and their positions in the list of all spans.
_Group = tuple[int, int, list[int]]


def _overlapping(spans: list[_Span]) -> list[_Group]:
    """Group spans whose ranges overlap; a view with gaps that overlaps nothing is compacted."""
    if len(spans) == 1 and spans[0].stride is None:
        return [(spans[0].start, spans[0].end, [0])] if spans[0].count else []
    groups: list[_Group] = []
    for start, end, i in sorted((span.start, span.end, i) for i, span in enumerate(spans) if span.count):
        if groups and start < groups[-1][1]:
            first, last, members = groups[-1]
            groups[-1] = (first, max(last, end), [*members, i])
        else:
            groups.append((start, end, [i]))
    for at, (_, _, members) in enumerate(groups):
        span = spans[members[0]]
        if len(members) == 1 and span.stride is not None:
            span.compact()
            groups[at] = (span.start, span.end, members)
    return groups


def _copy_inline(groups: list[_Group]) -> tuple[bytes | bytearray, list[tuple[int, int]]]:
    if len(groups) == 1:
        start, end, _ = groups[0]
        return ctypes.string_at(start, end - start), [(_INLINE, 0)]
    body = bytearray()
    starts = []
    for start, end, _ in groups:
        body += bytes(-len(body) % _INLINE_ALIGNMENT)
        starts.append((_INLINE, len(body)))
        body += ctypes.string_at(start, end - start)
    return body, starts


def _copy_to_blocks(groups: list[_Group], writer: BlockWriter) -> list[tuple[int, int]]:
    starts = [writer.find(start, end - start) for start, end, _ in groups]
    missing = [end - start for (start, end, _), found in zip(groups, starts, strict=True) if found is None]
    if missing:
        writer.expect(sum(missing) + ALIGNMENT * len(missing))
    return [found or writer.fill(start, end - start) for (start, end, _), found in zip(groups, starts, strict=True)]


def _records(spans: list[_Span], groups: list[_Group], starts: list[tuple[int, int]]) -> list[_Record]:
    places = [(_EMPTY, 0)] * len(spans)
    for (start, _, members), (place, offset) in zip(groups, starts, strict=True):
        for i in members:
            places[i] = (place, offset + spans[i].start - start)
    return [span.record(*place) for span, place in zip(spans, places, strict=True)]


def _seal(payload: bytes, records: list[_Record], body: bytes | bytearray, writer: BlockWriter | None) -> Encoded:
    """Make the header; one that is too large for a packet goes into the block and leaves its address."""
    if writer is None:
        return Encoded(pickle.dumps((payload, records, ()), 5), body)
    used = {record[0] for record in records if record[0] >= 0}
    if len(payload) + len(body) + _RECORD_BYTES * len(records) <= PACKET_MAX:
        return Encoded(pickle.dumps((payload, records, writer.lend(used)), 5), body)
    inner = pickle.dumps((payload, records), 5)
    place, offset = writer.fill(ctypes.cast(inner, ctypes.c_void_p).value or 0, len(inner))
    used.add(place)
    return Encoded(pickle.dumps((None, (place, offset, len(inner)), writer.lend(used)), 5), body)


def decode(header: Any, body: Any, lease: Callable[[Loan], Any] | None = None) -> Any:
    """Rebuild the object: its tensors and arrays are writable views of the block (or of ``body``).

    Args:
        header: `Encoded.header` (a buffer).
        body: `Encoded.body` in a writable buffer that nobody else uses.
        lease: opens a loan: returns the view whose life is the lease.
    """
    if not header:
        return pickle.loads(body)
    payload, records, loans = pickle.loads(header)
    views = [None if loan is None else lease(loan) for loan in loans] if lease is not None else []
    if payload is None:
        place, offset, nbytes = records
        payload, records = pickle.loads(memoryview(views[place]).cast("B")[offset : offset + nbytes])
    if not records:
        return pickle.loads(payload)
    views.append(body)  # records of inline data say place -1, and the last is what -1 means
    return pickle.loads(payload, buffers=[_rebuild(views, record) for record in records])


def _rebuild(views: Sequence[Any], record: _Record) -> Any:
    place, offset, count, code, flags, shape, stride = record
    if flags & _RAW:
        # Through an array, which hides the view from the cyclic collector (see `memory.lease`).
        return np.frombuffer(views[place], np.uint8, count, offset).data if count else bytearray()
    dtype = _DTYPES[code]
    if place == _EMPTY:
        assert shape is not None
        tensor = torch.empty(shape, dtype=dtype)
        if stride is not None:
            tensor = torch.empty_strided(shape, stride, dtype=dtype)
    else:
        tensor = torch.frombuffer(views[place], dtype=dtype, count=count, offset=offset)
        # In place: `view` would make a view with a base, which autograd and users can tell from a tensor of its own.
        if stride is not None:
            tensor.as_strided_(shape, stride)
        elif shape is not None:
            tensor.resize_(shape)
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & _GRAD))
    return tensor.requires_grad_() if flags & _GRAD else tensor
