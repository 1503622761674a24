"""Items in a shared buffer, each a pickle of its own, so that one can be had without the others.

    buffer:  item | item | item | ...   offsets of all    shapes
             └ decoded when it is asked for

Items are made smaller where it costs nothing: a pickle's first eleven bytes are the same for all and left out; of a
dict whose keys are texts only the values are pickled, and the keys are kept once for all dicts that have the same ones
(its *shape*). Both halve a typical list of dicts. Tensors and arrays in items lie elsewhere (`shared_leaves`).
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Iterable
from itertools import islice, repeat
from sys import intern
from typing import Any

import numpy as np
import torch

from torchcrew.channel.message import reduce_sparse
from torchcrew.channel.shared_buffer import Allowance, BufferWriter, SharedBuffer
from torchcrew.channel.shared_leaves import ItemLeaves, Leaves, is_plain_array, is_plain_tensor, reduce_for_item
from torchcrew.channel.sharing import STAND_IN

__all__ = ("Records", "RecordsWriter")

#: Bytes, about, that are pickled before they are written, and how many items that is at first and at most.
_BATCH_BYTES, _FIRST_BATCH, _LARGEST_BATCH = 1 << 20, 16, 1024
#: Different sets of keys that are kept once. More of them are hardly ever shared by many items.
_SHAPES = 1000
#: How deep containers are followed to see that an item cannot contain itself.
_DEPTH = 6
#: What a pickle of protocol 5 begins with: two bytes, then a frame of nine, which is only advice to read ahead.
_PREFIX, _FRAME = 11, 0x95
#: The opcode that makes a dict.
_EMPTY_DICT = ord("}")

_ATOMS = frozenset({str, int, float, bool, type(None), bytes, complex, torch.Tensor})
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class Records:
    """The items of one list, or the keys or values of one dict. Pickles by its buffers' descriptors.

    Args:
        buffer: where they are.
        position: as `RecordsWriter.write` returned it.
        leaves: what makes their tensors and arrays; None if there are none.
    """

    __slots__ = ("__weakref__", "_leaves", "_offsets", "_position", "_shapes", "_view", "buffer", "count")

    def __init__(self, buffer: SharedBuffer, position: int, leaves: ItemLeaves | None) -> None:
        self.buffer = buffer
        self._position = position
        self._leaves = leaves
        self._view = buffer.view
        self.count, table, code, shapes, has_leaves = pickle.loads(buffer.view[position:])
        end = table + (self.count + 1) * np.dtype(code).itemsize
        self._offsets: memoryview = buffer.view[table:end].cast(code)
        self._shapes: list[tuple[str, ...]] = [tuple(map(intern, keys)) for keys in shapes]
        if not has_leaves:
            self._leaves = None

    @property
    def nbytes(self) -> int:
        """What the items take in the buffer, without their tensors and arrays."""
        return int(self._offsets[self.count] - self._offsets[0])

    def load(self, number: int) -> Any:
        """Item ``number``, made anew each time."""
        offsets = self._offsets
        data = self._view[offsets[number] : offsets[number + 1]]
        leaves = self._leaves
        value = pickle.loads(data) if leaves is None else pickle.loads(data, buffers=repeat(leaves))
        if type(value) is tuple:  # what is stored as a tuple ends with the number of its shape
            code = value[-1]
            return dict(zip(self._shapes[code], value, strict=False)) if code else value[0]
        return value

    def __reduce__(self) -> Any:
        return Records, (self.buffer, self._position, self._leaves)


class RecordsWriter:
    """Writes items of any number of lists and dicts into one buffer. A context manager, as its `BufferWriter` is."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self.out = BufferWriter(allowance)
        self._leaves = Leaves()

    def write(self, items: Iterable[Any]) -> int:
        """Append items; returns what `Records` needs to find them.

        Raises:
            ArenaFull: over the budget.
            Exception: an item cannot be pickled.
        """
        pickler = _ItemPickler(self._leaves)
        start = self.out.position
        lengths: list[int] = []
        iterator, size = iter(items), _FIRST_BATCH
        while batch := list(islice(iterator, size)):
            payloads, data = pickler.dump(batch)
            lengths.extend(map(len, payloads))
            self.out.write(data)
            wanted = _BATCH_BYTES * len(batch) // max(len(data), 1)
            size = max(1, min(wanted, 4 * size, _LARGEST_BATCH))
        offsets = np.zeros(len(lengths) + 1, np.uint64)
        np.cumsum(lengths, dtype=np.uint64, out=offsets[1:])
        offsets += np.uint64(start)
        code = "I" if self.out.position < 1 << 32 else "Q"
        table = self.out.write_aligned(offsets.astype(code))
        meta = (len(lengths), table, code, pickler.shapes(), pickler.has_leaves)
        return self.out.write(pickle.dumps(meta, 5))

    def finish(self) -> tuple[SharedBuffer, ItemLeaves | None]:
        """End writing; returns the buffer and what `Records` needs besides.

        Raises:
            ArenaFull: over the budget.
        """
        data, position = None, None
        if self._leaves.objects:
            data, position = ItemLeaves.write(self._leaves, self.out, self._allowance)
        buffer = self.out.seal()
        return buffer, None if position is None else ItemLeaves(buffer, data, position)

    def __enter__(self) -> RecordsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what was not finished; idempotent."""
        self.out.close()


class _ItemPickler:
    """Pickles the items of one list."""

    def __init__(self, leaves: Leaves) -> None:
        # Number 0 says that the dict is stored as it is.
        self._shapes: dict[tuple[Any, ...], int] = {}
        self._keys: list[tuple[str, ...]] = [()]
        self._leaves = leaves
        self.has_leaves = False
        self._dump_one: Callable[[Any], bytes] = _dump_plain

    def shapes(self) -> list[tuple[str, ...]]:
        """The keys of each shape."""
        return self._keys

    def dump(self, batch: list[Any]) -> tuple[list[bytes], bytes]:
        """Pickle items; returns the pickles, and all of them in a row."""
        payloads = self._pickles(batch)
        data = b"".join(payloads)
        # Whatever pickles a tensor or an array names these modules. Nothing is lost where a text does.
        if not self.has_leaves and (b"torch" in data or b"numpy" in data):
            self.has_leaves = True
            self._dump_one = _LeafPickler(self._leaves).dump
            payloads = self._pickles(batch)
            data = b"".join(payloads)
        return payloads, data

    def _pickles(self, batch: list[Any]) -> list[bytes]:
        dump = self._dump_one
        records = self._records(batch)
        payloads = list(map(pickle.dumps, records, repeat(5))) if dump is _dump_plain else list(map(dump, records))
        if records is not batch:
            for k, payload in enumerate(payloads):
                # A dict that contains itself would be decoded with a copy of itself inside: it is pickled whole. It
                # cannot where no dict is made, which is quick to see.
                if _EMPTY_DICT in payload and type(batch[k]) is dict and not _is_flat(batch[k].values(), _DEPTH):
                    self._shapes[tuple(batch[k])] = 0  # the next one will hardly be simpler
                    payloads[k] = dump(batch[k])
        return [payload[_PREFIX:] if payload[2] == _FRAME else payload for payload in payloads]

    def _records(self, batch: list[Any]) -> list[Any]:
        """What is pickled in place of the items: of dicts and tuples, a tuple that ends with the shape's number."""
        kinds = set(map(type, batch))
        if not kinds & {dict, tuple}:
            return batch
        if kinds == {dict}:
            codes = list(map(self._shapes.get, map(tuple, batch)))
            if None in codes:
                codes = [self._shape(tuple(item)) for item in batch]
            if 0 not in codes:
                return [(*item.values(), code) for item, code in zip(batch, codes, strict=True)]
        return [self._record(item) for item in batch]

    def _record(self, item: Any) -> Any:
        if type(item) is tuple:
            return item, 0
        if type(item) is dict:
            code = self._shape(tuple(item))
            return (*item.values(), code) if code else item
        return item

    def _shape(self, keys: tuple[Any, ...]) -> int:
        code = self._shapes.get(keys)
        if code is None:
            code = 0
            if len(self._keys) < _SHAPES and keys and set(map(type, keys)) == {str}:
                code = len(self._keys)
                self._keys.append(keys)
                self._shapes[keys] = code
        return code


def _dump_plain(item: Any) -> bytes:
    return pickle.dumps(item, 5)


def _is_flat(parts: Iterable[Any], depth: int) -> bool:
    """Whether these are simple values, and lists and tuples of such: no dict can be among them."""
    for part in parts:
        kind = type(part)
        if kind in _ATOMS or is_plain_array(part):
            continue
        if not depth or kind not in (list, tuple, set, frozenset) or not _is_flat(part, depth - 1):
            return False
    return True


class _Reducers(dict[type, Callable[[Any], Any]]):
    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        return copyreg.dispatch_table[kind]


class _LeafPickler:
    """Pickles items whose tensors and arrays are leaves."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._file = io.BytesIO()
        self._pickler = pickle.Pickler(self._file, 5, buffer_callback=_in_band)
        self._pickler.dispatch_table = _Reducers(
            {torch.Tensor: self._tensor, torch.nn.Parameter: self._tensor, np.ndarray: self._array}
        )

    def dump(self, item: Any) -> bytes:
        self._pickler.clear_memo()
        self._file.seek(0)
        self._file.truncate()
        self._pickler.dump(item)
        return self._file.getvalue()

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if is_plain_tensor(tensor):
            return reduce_for_item(self._leaves, tensor, STAND_IN)
        if tensor.is_cpu and tensor.layout in _SPARSE:
            return reduce_sparse(tensor)  # its parts come back here
        return tensor.__reduce_ex__(5)

    def _array(self, array: Any) -> Any:
        if is_plain_array(array):
            return reduce_for_item(self._leaves, array, STAND_IN)
        return array.__reduce_ex__(5)


def _in_band(buffer: pickle.PickleBuffer) -> bool:
    return buffer is not STAND_IN
