"""Where a key of a shared mapping is: a hash index in the buffer, one for all processes.

    hash (32 bits) ─ its upper bits ─► starts[bucket] .. starts[bucket + 1] ─► hashes[j], places[j]

Python's own hashes of texts differ from process to process, so keys have hashes of ours, for the types that keys
usually have (`stable_hash`). Keys that are equal have equal hashes whatever their types: 1, 1.0 and True.
"""

from __future__ import annotations

import numbers
import uuid
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any
from zlib import crc32

import numpy as np

from torchcrew.channel.shared_buffer import BufferWriter, SharedBuffer

__all__ = ("KeyIndex", "stable_hash", "stable_hashes", "write_index")

_MASK = 0xFFFFFFFF
#: 2**64 divided by the golden ratio: spreads numbers that are multiples of anything over all buckets.
_SPREAD = 0x9E3779B97F4A7C15


def _number(key: Any) -> int:
    # A number's hash is the same in all processes and for equal numbers of all types; that of NaN is its address.
    return (hash(key) * _SPREAD >> 32) & _MASK if key == key else 0


def stable_hash(key: Any) -> int | None:
    """32 bits that are the same in every process, and the same for equal keys.

    Returns:
        None for keys of types that have no such hash: all but texts, bytes, numbers, None, paths, UUIDs, and tuples and
        frozen sets of these.

    Raises:
        TypeError: an unhashable key, as with a dict.
    """
    if isinstance(key, str):
        return crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, numbers.Number):
        return _number(key)
    if isinstance(key, bytes):
        return crc32(key, 1)
    if key is None:
        return 2
    if isinstance(key, tuple):
        return _of_parts(map(stable_hash, key), 3)
    if isinstance(key, frozenset):
        parts = list(map(stable_hash, key))
        return None if None in parts else _of_parts(sorted(parts), 4)  # type: ignore[type-var]
    if isinstance(key, PurePath):
        return crc32(str(key).encode("utf-8", "surrogateescape"), 5)
    if isinstance(key, uuid.UUID):
        return _number(key.int)
    hash(key)
    return None


def _of_parts(parts: Iterable[int | None], seed: int) -> int | None:
    for part in parts:
        if part is None:
            return None
        seed = crc32(part.to_bytes(4, "little"), seed)
    return seed


def stable_hashes(keys: Iterable[Any]) -> list[int] | None:
    """The hashes of all keys; None if one has none."""
    keys = list(keys)
    if set(map(type, keys)) == {str}:
        try:
            return [crc32(key.encode()) for key in keys]
        except UnicodeEncodeError:
            pass  # lone surrogates
    found = [stable_hash(key) for key in keys]
    return None if None in found else found  # type: ignore[return-value]


def write_index(writer: BufferWriter, hashes: list[int]) -> tuple[int, int, str]:
    """Write the index of keys with these hashes; returns what `KeyIndex` needs: position, bits, type of the numbers."""
    count = len(hashes)
    code = "I" if count <= _MASK else "Q"
    bits = min(32, max(1, count.bit_length()))
    table = np.array(hashes, np.uint32)
    order = np.argsort(table, kind="stable")
    table = table[order]
    starts = np.searchsorted(table >> np.uint32(32 - bits), np.arange((1 << bits) + 1))
    number = np.uint32 if code == "I" else np.uint64
    position = writer.write_aligned(starts.astype(number))
    writer.write_aligned(table)
    writer.write_aligned(order.astype(number))
    return position, bits, code


class KeyIndex:
    """Finds the numbers of the keys that have a hash.

    Args:
        buffer: where the index is.
        count: of the keys.
        position: and the rest as `write_index` returned it.
    """

    __slots__ = ("_hashes", "_places", "_shift", "_starts")

    def __init__(self, buffer: SharedBuffer, count: int, position: int, bits: int, code: str) -> None:
        def table(kind: str, length: int) -> memoryview:
            nonlocal position
            position += -position % 8
            nbytes = length * np.dtype(kind).itemsize
            found = buffer.view[position : position + nbytes].cast(kind)  # type: ignore[call-overload]
            position += nbytes
            return found  # type: ignore[no-any-return]

        self._starts = table(code, (1 << bits) + 1)
        self._hashes = table("I", count)
        self._places = table(code, count)
        self._shift = 32 - bits

    def candidates(self, key: Any) -> list[int]:
        """The numbers of the keys that may be equal to ``key``: rarely more than one.

        Raises:
            TypeError: an unhashable key.
        """
        wanted = stable_hash(key)
        if wanted is None:
            return []
        bucket, hashes = wanted >> self._shift, self._hashes
        return [self._places[j] for j in range(self._starts[bucket], self._starts[bucket + 1]) if hashes[j] == wanted]
