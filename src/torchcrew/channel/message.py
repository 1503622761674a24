"""One object, one message: a pickle without its data, and the data side by side in one block.

    Encoder(writer).encode(obj)                              decode(header, body, lease)
      pickle 5, tensors and buffers out of band                leases the blocks
      merge what overlaps, copy what is not in the block       one view, one storage per tensor
      header = pickle(payload, records, loans)                 unpickles with the tensors as "buffers"

The trick: pickle protocol 5 hands out-of-band buffers back through an iterator and pushes *whatever the iterator
yields* on its stack. A tensor is pickled as a dummy `PickleBuffer`; when decoding, the iterator yields finished
tensors. So the C pickler does all the walking, memoises shared objects and keeps their identity.

A message is a snapshot. Tensors that overlap in memory keep overlapping (their common range is sent once); a view sends
only what it views; expanded tensors are not materialised; a view with gaps is sent without them. Tensors that are
shared already, and all that are not dense CPU tensors, go through torch's own reductions.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.multiprocessing import reductions
from torch.utils.hooks import warn_if_has_hooks

from torchcrew.channel.spans import EMPTY, INLINE, Place, Range, Record, Span, overlapping, rebuild, simple_ranges
from torchcrew.channel.writer import BlockWriter
from torchcrew.memory.arena import Loan

__all__ = ("INLINE_MAX", "PACKET_MAX", "Encoded", "Encoder", "decode")

#: Data of at most this many bytes travels in the packet itself: a block costs more than two small copies.
INLINE_MAX = 16 << 10
#: A header (with its inline data) above this goes into a block, too: a packet must fit in a socket's buffer.
PACKET_MAX = 48 << 10

#: Alignment of tensors that travel inline.
_INLINE_ALIGNMENT = 16
#: Upper bounds of what a record without its shape, and a number, take in a pickle.
_RECORD_BYTES, _NUMBER_BYTES, _LOAN_BYTES = 64, 11, 40

# Writable, or pickle would ask the decoder for a read-only view of the tensor.
_STAND_IN = pickle.PickleBuffer(bytearray(1))
_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_NOTHING: frozenset[int] = frozenset()


class Encoded(NamedTuple):
    """A message ready to be sent: ``header`` is a pickle, ``body`` its inline data.

    Without tensors and buffers there is no header, and ``body`` is the pickle of the object itself.
    """

    header: bytes
    body: bytes | bytearray


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
        self._pickler.dispatch_table = _Reducers(
            {
                torch.Tensor: self._tensor,
                torch.nn.Parameter: self._tensor,
                torch.UntypedStorage: self._storage,
                np.ndarray: self._array,
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
            spans = [Span(item) for item in found]
            body, places = self._copy(spans)
            return self._seal(payload, [span.record(place) for span, place in zip(spans, places, strict=True)], body)
        except BaseException:
            if self._writer is not None:
                self._writer.lend(_NOTHING)
            raise

    def _walk(self, obj: Any) -> tuple[bytes, list[Any]]:
        """One pass of the pickler: the payload, and the tensors and buffers found, in order."""
        # Before, too: what an exception at the wrong moment left behind must not become part of this message.
        found = self._reset()
        try:
            self._pickler.dump(obj)
            return self._file.getvalue(), found
        finally:
            self._reset()

    def _reset(self) -> list[torch.Tensor | pickle.PickleBuffer]:
        """Forget the last object; returns the list that will hold what is found in the next."""
        self._found = []
        self._pickler.clear_memo()
        self._file.seek(0)
        self._file.truncate()
        return self._found

    def _buffer(self, buffer: pickle.PickleBuffer) -> None:
        if buffer is not _STAND_IN:
            self._found.append(buffer)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad:
            if not tensor.is_leaf:
                return reductions.reduce_tensor(tensor)  # raises stock's error
            warn_if_has_hooks(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            # The parts of the first two are dense tensors and storages, which come back here.
            if tensor.is_cpu and (tensor.is_sparse or tensor.layout in _COMPRESSED):
                return _reduce_sparse(tensor)
            if tensor.is_cpu and tensor.is_quantized:
                return _rebuild_quietly, tensor.__reduce_ex__(5)
            return reductions.reduce_tensor(tensor)
        if not tensor.is_cpu or tensor.untyped_storage().is_shared():
            return reductions.reduce_tensor(tensor)
        self._found.append(tensor)
        # A new tuple each time: the pickler remembers tuples, and would take the second tensor for the first.
        return _itself, (_STAND_IN,)

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        if not array.dtype.isnative:
            return array.__reduce__()  # stock's way, which arrives in this machine's byte order
        flags = array.flags
        if flags.writeable or array.dtype.hasobject or not array.nbytes or not flags.forc:
            return array.__reduce_ex__(5)
        # numpy would ask for a read-only view; what arrives is a copy, and stock's copies are writable.
        order: Literal["C", "F"] = "C" if flags.c_contiguous else "F"
        self._found.append(pickle.PickleBuffer(array.reshape(-1, order=order).view(np.uint8)))  # type: ignore[arg-type]
        return _array_of, (_STAND_IN, array.dtype, array.shape, order)

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or storage.is_shared():
            return reductions.reduce_storage(storage)
        return _storage_of, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage),)

    def _copy(self, spans: list[Span]) -> tuple[bytes | bytearray, list[Place]]:
        """Put the data where it travels: inline, or in the writer's blocks; returns the inline data and the places."""
        if len(spans) == 1 and spans[0].stride is None and 0 < spans[0].nbytes <= INLINE_MAX:
            return ctypes.string_at(spans[0].start, spans[0].nbytes), [(INLINE, 0)]
        ranges = simple_ranges(spans)
        within: list[tuple[int, int]] | None = None
        if ranges is None:
            ranges, within = overlapping(spans)
        body: bytes | bytearray = b""
        if self._writer is None or sum(nbytes for _, nbytes in ranges) <= INLINE_MAX:
            body, places = _inline(ranges)
        else:
            places = self._writer.place(ranges)
        if within is None:
            return body, places
        return body, [(EMPTY, 0) if at < 0 else (places[at][0], places[at][1] + offset) for at, offset in within]

    def _seal(self, payload: bytes, records: list[Record], body: bytes | bytearray) -> Encoded:
        """Make the header; one that is too large for a packet goes into the block and leaves its address."""
        writer = self._writer
        if writer is None:
            return Encoded(pickle.dumps((payload, records, ()), 5), body)
        used = {record[0] for record in records if record[0] >= 0}
        if len(payload) + len(body) + _record_bytes(records) + _LOAN_BYTES * len(used) <= PACKET_MAX:
            return Encoded(pickle.dumps((payload, records, writer.lend(used)), 5), body)
        inner = ctypes.create_string_buffer(pickle.dumps((payload, records), 5))
        [(index, offset)] = writer.place([(ctypes.addressof(inner), len(inner))])
        header = pickle.dumps((None, (index, offset, len(inner)), writer.lend({*used, index})), 5)
        return Encoded(header, body)


def _record_bytes(records: list[Record]) -> int:
    """At most what records take in a pickle."""
    return sum(_RECORD_BYTES + 2 * _NUMBER_BYTES * len(record[5] or ()) for record in records)


def _inline(ranges: list[Range]) -> tuple[bytes | bytearray, list[Place]]:
    body = bytearray()
    places = []
    for start, nbytes in ranges:
        body += bytes(-len(body) % _INLINE_ALIGNMENT)
        places.append((INLINE, len(body)))
        body += ctypes.string_at(start, nbytes)
    return body, places


def _reduce_sparse(tensor: torch.Tensor) -> Any:
    """As stock does it, and not by `__reduce_ex__`: the tensors which that rebuilds, torch keeps in a list for ever."""
    if tensor.layout is torch.sparse_coo:
        parts = (_itself, (tensor._indices(),), _itself, (tensor._values(),))
        return reductions.rebuild_sparse_coo_tensor, (*parts, tensor.shape, tensor.is_coalesced())
    by_rows = tensor.layout in {torch.sparse_csr, torch.sparse_bsr}
    compressed = tensor.crow_indices() if by_rows else tensor.ccol_indices()
    plain = tensor.col_indices() if by_rows else tensor.row_indices()
    return reductions.rebuild_sparse_compressed_tensor, (
        *(_itself, (compressed,), _itself, (plain,), _itself, (tensor.values(),)),
        *(tensor.shape, tensor.layout),
    )


def _array_of(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: Literal["C", "F"]) -> Any:
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


def _rebuild_quietly(function: Callable[..., Any], arguments: Any) -> Any:
    """Call torch's function, which warns of its own use of typed storages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return function(*arguments)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


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
    return pickle.loads(payload, buffers=[rebuild(views, record) for record in records])
