"""Lists and dicts of which all processes see one copy: read-only, each item decoded when it is asked for.

    SharedList ──┐                          SharedDict: keys ── Records
    its slice  ──┴─ Records ─ SharedBuffer              values ── Records
                                                        index (in the same buffer)

Both are handles: a process that starts, or receives one through a queue, gets a descriptor and maps the buffer, once.
An item is made anew each time it is asked for, so changing one changes nothing for anybody else, oneself included.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from multiprocessing import context, reduction
from typing import Any, TypeVar, overload

from torchcrew.channel.shared_buffer import Allowance
from torchcrew.channel.shared_index import KeyIndex, stable_hashes, write_index
from torchcrew.channel.shared_records import Records, RecordsWriter

__all__ = ("DictPlace", "SharedDict", "SharedList", "dict_at", "list_at", "write_dict")

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
#: Where a dict is in its buffer: keys, values, and what `KeyIndex` takes.
DictPlace = tuple[int, int, tuple[int, int, str]]


class SharedList(Sequence[T]):
    """A read-only list (or tuple) in memory that all processes share.

    Behaves as the list it was made of, but for changing it, and: ``x[i] is x[i]`` is false, since an item is made anew
    each time. Slices are handles as well and copy nothing. Equal to lists with equal items (one made of a tuple: to
    tuples); ``list(x)`` is an ordinary list. Where it is pickled for other than a process of this machine, as in a
    file, it becomes one.

    Args:
        items: what to put in it, each picklable on its own. `torchcrew.share` makes one of every big list.

    Raises:
        ArenaFull: larger than the budget.
        Exception: an item cannot be pickled.
    """

    __slots__ = ("__weakref__", "_kind", "_load", "_range", "_records")

    _records: Records
    _range: range
    _kind: type

    def __init__(self, items: Iterable[T] = ()) -> None:
        with RecordsWriter(Allowance()) as writer:
            position = writer.write(items)
            buffer, leaves = writer.finish()
        self._set(Records(buffer, position, leaves), None, list)

    def _set(self, records: Records, numbers: range | None, kind: type) -> None:
        self._records = records
        self._load = records.load
        self._range = range(records.count) if numbers is None else numbers
        self._kind = kind

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> SharedList[T]: ...
    def __getitem__(self, index: Any) -> Any:
        try:
            number = self._range[index]
        except IndexError:
            raise IndexError(f"{self._kind.__name__} index out of range") from None
        except TypeError as error:
            raise TypeError(str(error).replace("range indices", f"{self._kind.__name__} indices")) from None
        if type(number) is range:
            return list_at(self._records, number, self._kind)
        return self._load(number)

    def __len__(self) -> int:
        return len(self._range)

    def __iter__(self) -> Iterator[T]:
        return map(self._load, self._range)

    def __reversed__(self) -> Iterator[T]:
        return map(self._load, reversed(self._range))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SharedList):
            if self._kind is not other._kind or len(self) != len(other):
                return False
            if self._records is other._records and self._range == other._range:
                return True
        elif not isinstance(other, self._kind):
            return NotImplemented
        elif len(self) != len(other):  # type: ignore[arg-type]
            return False
        return all(map(_same, self, other))  # type: ignore[call-overload]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<SharedList of {len(self):,} items>"

    def __copy__(self) -> SharedList[T]:
        return self

    def __deepcopy__(self, memo: Any) -> SharedList[T]:
        return self

    def __reduce__(self) -> Any:
        if context.get_spawning_popen() is None:
            return self._kind, (list(self),)
        return _list_handle(self)


def list_at(records: Records, numbers: range | None = None, kind: type = list) -> SharedList[Any]:
    """The list of these records, or of some of them, as one made of a ``kind``."""
    made: SharedList[Any] = SharedList.__new__(SharedList)
    made._set(records, numbers, kind)
    return made


def _list_handle(shared: SharedList[Any]) -> Any:
    return list_at, (shared._records, shared._range, shared._kind)


def _same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


class SharedDict(Mapping[K, V]):
    """A read-only dict in memory that all processes share; keys are found by an index that is shared, too.

    Behaves as the dict it was made of, order included, but for changing it; see `SharedList` for what is the same here:
    items are made anew, equality, pickling.

    Args:
        items: a mapping. Keys are texts, bytes, numbers, None, paths, UUIDs, and tuples and frozen sets of these.

    Raises:
        TypeError: a key of another type.
        ArenaFull: larger than the budget.
        Exception: an item cannot be pickled.
    """

    __slots__ = ("__weakref__", "_index", "_keys", "_place", "_values")

    _keys: Records
    _values: Records
    _index: KeyIndex
    _place: DictPlace

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        with RecordsWriter(Allowance()) as writer:
            place = write_dict(writer, dict(items))
            if place is None:
                raise TypeError(
                    "a SharedDict's keys are texts, bytes, numbers, None, paths, UUIDs, and tuples and frozen sets of "
                    "these; others have no hash that is the same in every process"
                )
            buffer, leaves = writer.finish()
        self._set(Records(buffer, place[0], leaves), Records(buffer, place[1], leaves), place)

    def _set(self, keys: Records, values: Records, place: DictPlace) -> None:
        self._keys = keys
        self._values = values
        self._place = place
        self._index = KeyIndex(keys.buffer, keys.count, *place[2])

    def _find(self, key: Any) -> int:
        for number in self._index.candidates(key):
            if _same(self._keys.load(number), key):
                return number
        return -1

    def __getitem__(self, key: K) -> V:
        number = self._find(key)
        if number < 0:
            raise KeyError(key)
        return self._values.load(number)  # type: ignore[no-any-return]

    def __contains__(self, key: object) -> bool:
        return self._find(key) >= 0

    def __len__(self) -> int:
        return int(self._keys.count)

    def __iter__(self) -> Iterator[K]:
        return map(self._keys.load, range(self._keys.count))

    def __reversed__(self) -> Iterator[K]:
        return map(self._keys.load, reversed(range(self._keys.count)))

    def values(self) -> ValuesView[V]:
        """A view of the values, decoded one by one."""
        return _Values(self)

    def items(self) -> ItemsView[K, V]:
        """A view of the pairs, decoded one by one."""
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (dict, SharedDict)):
            return NotImplemented
        if len(self) != len(other):
            return False
        if isinstance(other, SharedDict) and self._keys is other._keys:
            return True
        missing = object()
        return all(_same(value, other.get(key, missing)) for key, value in self.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<SharedDict of {len(self):,} items>"

    def __copy__(self) -> SharedDict[K, V]:
        return self

    def __deepcopy__(self, memo: Any) -> SharedDict[K, V]:
        return self

    def __reduce__(self) -> Any:
        if context.get_spawning_popen() is None:
            return dict, (list(self.items()),)
        return _dict_handle(self)


class _Values(ValuesView[V]):
    """The mix-in's would look every key up."""

    _mapping: SharedDict[Any, V]

    def __iter__(self) -> Iterator[V]:
        records = self._mapping._values
        return map(records.load, range(records.count))

    def __reversed__(self) -> Iterator[V]:
        records = self._mapping._values
        return map(records.load, reversed(range(records.count)))


class _Items(ItemsView[K, V]):
    _mapping: SharedDict[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return zip(self._mapping, self._mapping.values(), strict=True)

    def __reversed__(self) -> Iterator[tuple[K, V]]:
        return zip(reversed(self._mapping), reversed(self._mapping.values()), strict=True)  # type: ignore[call-overload]


def write_dict(writer: RecordsWriter, items: dict[Any, Any]) -> DictPlace | None:
    """Write a dict; returns where it is, or None (nothing is written) if a key has no hash that all processes agree on.

    Raises:
        ArenaFull: over the budget.
        Exception: an item cannot be pickled.
    """
    hashes = stable_hashes(items)
    if hashes is None:
        return None
    return writer.write(items), writer.write(items.values()), write_index(writer.out, hashes)


def dict_at(keys: Records, values: Records, place: DictPlace) -> SharedDict[Any, Any]:
    """The dict of these records."""
    made: SharedDict[Any, Any] = SharedDict.__new__(SharedDict)
    made._set(keys, values, place)
    return made


def _dict_handle(shared: SharedDict[Any, Any]) -> Any:
    return dict_at, (shared._keys, shared._values, shared._place)


# To another process of this machine they go as handles, whatever sends them: queues and pipes of multiprocessing, of
# torch, and ours.
reduction.register(SharedList, _list_handle)
reduction.register(SharedDict, _dict_handle)
