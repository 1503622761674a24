"""One object, one message: a pickle without its data, and the data side by side in one block.

    Encoder(writer).encode(obj)                              decode(header, body, lease, fds)
      pickle 5, tensors and buffers out of band                leases the blocks
      merge what overlaps, copy what is not in the block       one view, one storage per tensor
      header = pickle(payload, records, loans)                 unpickles with the tensors as "buffers"

The trick: pickle protocol 5 hands out-of-band buffers back through an iterator and pushes *whatever the iterator
yields* on its stack. A tensor is pickled as a dummy `PickleBuffer`; when decoding, the iterator yields finished
tensors. So the C pickler does all the walking, memoises shared objects and keeps their identity.

A message is a snapshot. Tensors that overlap in memory keep overlapping (their common range is sent once); a view sends
only what it views; expanded tensors are not materialised; a view with gaps is sent without them. Tensors that are
shared already stay shared: as descriptors beside the message where its transport passes such, else by torch's own
reductions, as do all that are not dense CPU tensors.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import torch
from torch.multiprocessing import reductions
from torch.utils.hooks import warn_if_has_hooks

from torchcrew.channel.sharing import STAND_IN, Passed, Reducers
from torchcrew.channel.spans import EMPTY, INLINE, Place, Range, Record, Span, overlapping, rebuild, simple_ranges
from torchcrew.channel.writer import BlockWriter
from torchcrew.memory.arena import Loan

__all__ = ("INLINE_MAX", "PACKET_MAX", "Descriptor", "Encoded", "Encoder", "decode", "reduce_sparse")

#: Data of at most this many bytes travels in the packet itself: a block costs more than two small copies.
INLINE_MAX = 16 << 10
#: A header (with its inline data) above this goes into a block, too: a packet must fit in a socket's buffer.
PACKET_MAX = 48 << 10

#: Alignment of tensors that travel inline.
_INLINE_ALIGNMENT = 16
#: Upper bounds of what a record without its shape, and a number, take in a pickle.
_RECORD_BYTES, _NUMBER_BYTES, _LOAN_BYTES = 64, 11, 40

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


class Descriptor:
    """A descriptor to pass along with a message; ``owner`` keeps it open."""

    __slots__ = ("fd", "owner")

    def __init__(self, fd: int, owner: Any) -> None:
        self.fd = fd
        self.owner = owner


class Encoder:
    """Turns objects into messages; keeps its pickler, whose creation would cost more than a small message. One thread.

    Args:
        writer: the blocks of the messages. None: everything travels inline, whatever its size.
        passes_fds: the transport passes descriptors: shared tensors and connections travel as such.
        pickler: makes the pickler of a file, a buffer callback and a table of reducers; `pickle`'s if None.
    """

    def __init__(
        self,
        writer: BlockWriter | None = None,
        *,
        passes_fds: bool = False,
        pickler: Callable[[IO[bytes], Callable[[pickle.PickleBuffer], Any], Any], pickle.Pickler] | None = None,
    ) -> None:
        self._writer = writer
        #: The descriptors that belong to the last message.
        self.passed: list[Descriptor] = []
        self._found: list[torch.Tensor | pickle.PickleBuffer | Descriptor] = []
        self._file = io.BytesIO()
        self._others_ways = Reducers(self._pass if passes_fds else None)
        own = Reducers(self._pass if passes_fds else None)
        own |= {
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            torch.UntypedStorage: self._storage,
            np.ndarray: self._array,
        }
        self._pickler = (pickler or _plain_pickler)(self._file, self._buffer, own)

    def encode(self, obj: Any) -> Encoded:
        """Turn ``obj`` into a message; tensors that the writer already holds are not copied, all others once.

        Raises:
            Exception: whatever pickling raises; nothing is on loan then.
            ArenaFull: the writer found no room.
        """
        self.passed = []
        try:
            payload, found = self._walk(obj)
            if not found and (self._writer is None or len(payload) <= PACKET_MAX):
                if self._writer is not None:
                    self._writer.lend(_NOTHING)
                return Encoded(b"", payload)
            if self.passed:
                return self._encode_with_descriptors(payload, found)
            spans = [Span(item) for item in found]
            body, places = self._copy(spans)
            return self._seal(payload, [span.record(place) for span, place in zip(spans, places, strict=True)], body)
        except BaseException:
            if self._writer is not None:
                self._writer.lend(_NOTHING)
            raise

    def _encode_with_descriptors(self, payload: bytes, found: list[Any]) -> Encoded:
        """A descriptor's record is a negative number: that of its place among the descriptors, from -1 down."""
        spans = [Span(item) for item in found if type(item) is not Descriptor]
        body, places = self._copy(spans)
        described = (span.record(place) for span, place in zip(spans, places, strict=True))
        numbers = iter(range(-1, -1 - len(self.passed), -1))
        records = [next(numbers) if type(item) is Descriptor else next(described) for item in found]
        return self._seal(payload, records, body)

    def _walk(self, obj: Any) -> tuple[bytes, list[Any]]:
        """One pass of the pickler: the payload, and the tensors and buffers found, in order."""
        # Before, too: what an exception at the wrong moment left behind must not become part of this message.
        found = self._reset()
        try:
            self._pickler.dump(obj)
            return self._file.getvalue(), found
        finally:
            self._reset()

    def _reset(self) -> list[Any]:
        """Forget the last object; returns the list that will hold what is found in the next."""
        self._found = []
        self._pickler.clear_memo()
        self._file.seek(0)
        self._file.truncate()
        return self._found

    def _buffer(self, buffer: pickle.PickleBuffer) -> None:
        if buffer is not STAND_IN:
            self._found.append(buffer)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad:
            if not tensor.is_leaf:
                return reductions.reduce_tensor(tensor)  # raises stock's error
            warn_if_has_hooks(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            # The parts of the first two are dense tensors and storages, which come back here.
            if tensor.is_cpu and (tensor.is_sparse or tensor.layout in _COMPRESSED):
                return reduce_sparse(tensor)
            if tensor.is_cpu and tensor.is_quantized:
                return _rebuild_quietly, tensor.__reduce_ex__(5)
            return reductions.reduce_tensor(tensor)
        if not tensor.is_cpu or tensor.untyped_storage().is_shared():
            return self._others_ways[type(tensor)](tensor)
        self._found.append(tensor)
        # A new tuple each time: the pickler remembers tuples, and would take the second tensor for the first.
        return _itself, (STAND_IN,)

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        if not array.dtype.isnative:
            return array.__reduce__()  # stock's way, which arrives in this machine's byte order
        flags = array.flags
        if flags.writeable or array.dtype.hasobject or not array.nbytes or not flags.forc:
            return array.__reduce_ex__(5)
        # numpy would ask for a read-only view; what arrives is a copy, and stock's copies are writable.
        order: Literal["C", "F"] = "C" if flags.c_contiguous else "F"
        self._found.append(pickle.PickleBuffer(array.reshape(-1, order=order).view(np.uint8)))  # type: ignore[arg-type]
        return _array_of, (STAND_IN, array.dtype, array.shape, order)

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or storage.is_shared():
            return self._others_ways[type(storage)](storage)
        return _storage_of, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage),)

    def _pass(self, fd: int, owner: Any) -> None:
        self.passed.append(Descriptor(fd, owner))
        self._found.append(self.passed[-1])

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

    def _seal(self, payload: bytes, records: Sequence[Record | int], body: bytes | bytearray) -> Encoded:
        """Make the header; one that is too large for a packet goes into the block and leaves its address."""
        writer = self._writer
        if writer is None:
            return Encoded(pickle.dumps((payload, records, ()), 5), body)
        used = {record[0] for record in records if type(record) is tuple and record[0] >= 0}
        if len(payload) + len(body) + _record_bytes(records) + _LOAN_BYTES * len(used) <= PACKET_MAX:
            return Encoded(pickle.dumps((payload, records, writer.lend(used)), 5), body)
        inner = ctypes.create_string_buffer(pickle.dumps((payload, records), 5))
        [(index, offset)] = writer.place([(ctypes.addressof(inner), len(inner))])
        header = pickle.dumps((None, (index, offset, len(inner)), writer.lend({*used, index})), 5)
        return Encoded(header, body)


def _plain_pickler(file: IO[bytes], callback: Callable[[pickle.PickleBuffer], Any], table: Any) -> pickle.Pickler:
    pickler = pickle.Pickler(file, 5, buffer_callback=callback)
    pickler.dispatch_table = table
    return pickler


def _record_bytes(records: Sequence[Record | int]) -> int:
    """At most what records take in a pickle."""
    return sum(_RECORD_BYTES + 2 * _NUMBER_BYTES * len((type(r) is tuple and r[5]) or ()) for r in records)


def _inline(ranges: list[Range]) -> tuple[bytes | bytearray, list[Place]]:
    body = bytearray()
    places = []
    for start, nbytes in ranges:
        body += bytes(-len(body) % _INLINE_ALIGNMENT)
        places.append((INLINE, len(body)))
        body += ctypes.string_at(start, nbytes)
    return body, places


def reduce_sparse(tensor: torch.Tensor) -> Any:
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


def decode(header: Any, body: Any, lease: Callable[[Loan], Any] | None = None, fds: Sequence[Passed] = ()) -> Any:
    """Rebuild the object: its tensors and arrays are writable views of the block (or of ``body``).

    Args:
        header: `Encoded.header` (a buffer).
        body: `Encoded.body` in a writable buffer that nobody else uses.
        lease: opens a loan: returns the view whose life is the lease.
        fds: the descriptors that came along.
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
    if fds:
        return pickle.loads(payload, buffers=[fds[-1 - r] if type(r) is int else rebuild(views, r) for r in records])
    return pickle.loads(payload, buffers=[rebuild(views, record) for record in records])
