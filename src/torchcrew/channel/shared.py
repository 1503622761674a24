"""`share`: a graph of objects, copied once into memory that all processes see.

    share(obj)
      walk ──── the graph is pickled; what holds its data is taken out on the way:
        big lists, tuples, dicts ─► one sealed buffer   ─► SharedList, SharedDict
        tensors                   ─► a storage each     ─► tensors that torch knows as shared
        arrays                    ─► one common buffer  ─► views of it
        what cannot be pickled    ─► stays what it is
      rebuild ─ the pickle is loaded, with these in the places of what was taken out

Nothing is started, and nothing has a name: memory goes with the last process that holds something of it.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import types
from collections.abc import Callable
from functools import partial
from itertools import repeat
from operator import getitem
from typing import Any

import numpy as np
import torch

from torchcrew.channel.shared_buffer import Allowance
from torchcrew.channel.shared_leaves import Leaves, is_plain_array, is_plain_tensor, is_shared_array, share_leaves
from torchcrew.channel.shared_records import Records, RecordsWriter
from torchcrew.channel.shared_sequences import DictPlace, SharedDict, SharedList, dict_at, list_at, write_dict
from torchcrew.channel.sharing import STAND_IN, raise_descriptor_limit
from torchcrew.memory.limits import parse_bytes

__all__ = ("SHARE_MIN_ITEMS", "share")

#: Lists, tuples and dicts with fewer items stay what they are: a copy of them costs little, and whoever changes them or
#: asks for their type finds what he expects.
SHARE_MIN_ITEMS = 1000

_ATOMS = frozenset({str, int, float, bool, type(None), bytes, complex})
_CONTAINERS = frozenset({list, tuple, dict})
#: What is never copied: code, and what is shared or lies in a file already.
_KEPT = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    SharedList,
    SharedDict,
    np.memmap,
    torch.Tensor,
    torch.UntypedStorage,
    torch.TypedStorage,
)


def share(obj: Any, *, memory_budget: int | float | str | None = None) -> Any:
    """Copy an object, and put its data where every process sees one copy of it.

    The result has the structure of ``obj``, to be used in its place: as the attribute of a dataset, the argument of a
    process, a message in a queue. Whoever gets it, by fork, spawn, forkserver, zygote or queue, gets no copy. The
    memory is freed when nobody has it any more, whoever died when.

    * **Tensors** (dense, CPU) become shared tensors: all processes read *and write* them, without locks. Tensors over
      one storage stay over one storage. Parameters stay parameters.
    * **numpy arrays** become views of shared memory, likewise. While a process starts they travel as handles; in a
      queue, as always, as a copy.
    * **Lists, tuples and dicts** of at least `SHARE_MIN_ITEMS` items become `SharedList` and `SharedDict`: read-only,
      an item is decoded, all of it, when it is asked for. Tensors and arrays in an item are views of shared memory.
      An object that many items refer to is one in each of them. Items have to be picklable. Subclasses (`OrderedDict`)
      and dicts with keys other than texts, bytes, numbers, None, paths, UUIDs, tuples and frozen sets of these stay.
    * **Everything else** is copied as pickle would copy it, and what is in it is shared: smaller containers, named
      tuples, dataclasses, datasets, modules, objects of any class. Sets stay sets.
    * **Kept as they are**: functions, classes, `SharedList`, `SharedDict`, shared tensors, those of a GPU, sparse and
      quantized ones and tensor subclasses, memory-mapped files, and what cannot be pickled (locks, files, queues).

    ``obj`` itself is not changed; none of its memory is in the result. Give it up to have its memory back.

    Args:
        obj: the graph.
        memory_budget: bytes (or "2GB") that the copy may take; None for `TORCHCREW_BUDGET`, and half of the memory
            limit if that is not set.

    Raises:
        ArenaFull: the copy would be larger than the budget, or the system is out of memory.
        TooManyDescriptors: each tensor's storage keeps a descriptor, and none is left.
        OSError: no address space is left to map it (``ulimit -v``).
        RuntimeError: a tensor is the result of a computation that autograd records; detach it.
        Exception: an item of a big list or dict cannot be pickled.
    """
    allowance = Allowance(None if memory_budget is None else parse_bytes(memory_budget))
    raise_descriptor_limit()
    walk = _Walk(allowance)
    try:
        return walk.share(obj)
    finally:
        walk.close()


class _Walk:
    """One call of `share`. What is taken out of the pickle has a number, and something that makes what comes in."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._writer: RecordsWriter | None = None
        self._leaves = Leaves()
        self._leaf_numbers: list[int] = []
        # By id; None for what is not taken out. Whatever has its id in here is held.
        self._numbers: dict[int, int | None] = {}
        self._held: list[Any] = []
        self._makers: list[Callable[[Callable[[int], Records]], Any]] = []
        self.unpicklable: list[Any] = []

    def share(self, obj: Any) -> Any:
        """Walk ``obj`` and return its counterpart."""
        file = io.BytesIO()
        _Pickler(file, self).dump(obj)
        buffer, leaves = self._writer.finish() if self._writer is not None else (None, None)

        def records(position: int) -> Records:
            assert buffer is not None
            return Records(buffer, position, leaves)

        made = [make(records) for make in self._makers]
        for number, leaf in zip(self._leaf_numbers, share_leaves(self._leaves, self._allowance), strict=True):
            made[number] = leaf
        file.seek(0)
        return _Unpickler(file, made, self.unpicklable).load()

    def close(self) -> None:
        """Let go of what was written and did not become a buffer."""
        if self._writer is not None:
            self._writer.close()

    def take_out(self, obj: Any) -> int | None:
        """The number of an object that is not pickled; None if it is."""
        kind = type(obj)
        if kind in _ATOMS or (kind in _CONTAINERS and len(obj) < SHARE_MIN_ITEMS):
            return None
        if id(obj) in self._numbers:
            return self._numbers[id(obj)]
        if kind in _CONTAINERS:
            make = self._container(obj)
        elif self._is_leaf(obj):
            self._leaves.add(obj)
            self._leaf_numbers.append(len(self._makers))
            make = _nothing_yet
        elif isinstance(obj, _KEPT) or kind is np.ndarray:
            make = partial(_kept, obj)
        else:
            return None
        self._held.append(obj)
        self._numbers[id(obj)] = None if make is None else len(self._makers)
        if make is not None:
            self._makers.append(make)
        return self._numbers[id(obj)]

    def leave_in(self, obj: Any) -> None:
        """Have a container pickled whatever its size: what makes an object of its parts asks for the very type."""
        self._held.append(obj)
        self._numbers[id(obj)] = None

    def _is_leaf(self, obj: Any) -> bool:
        if isinstance(obj, torch.Tensor):
            return is_plain_tensor(obj) and not obj.is_shared()
        return is_plain_array(obj) and not is_shared_array(obj)

    def _container(self, obj: Any) -> Callable[[Callable[[int], Records]], Any] | None:
        """Write a big container; None if it is a dict whose keys cannot be shared."""
        if self._writer is None:
            self._writer = RecordsWriter(self._allowance)
        if type(obj) is dict:
            place = write_dict(self._writer, obj)
            return None if place is None else partial(_make_dict, place)
        return partial(_make_list, self._writer.write(obj), type(obj))


def _make_list(position: int, kind: type, records: Callable[[int], Records]) -> Any:
    return list_at(records(position), None, kind)


def _make_dict(place: DictPlace, records: Callable[[int], Records]) -> Any:
    return dict_at(records(place[0]), records(place[1]), place)


def _kept(obj: Any, records: Any) -> Any:
    return obj


def _nothing_yet(records: Any) -> Any:
    return None


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, walk: _Walk) -> None:
        super().__init__(file, 5, buffer_callback=_in_band)
        self._walk = walk
        self.persistent_id = walk.take_out  # type: ignore[method-assign]

    def reducer_override(self, obj: Any) -> Any:
        """How an object of no built-in type is taken apart."""
        if type(obj) in copyreg.dispatch_table:
            return NotImplemented
        try:
            reduced = obj.__reduce_ex__(5)
        except Exception:  # a lock, a file, a queue: whoever sends it to a process is told by it why it cannot be sent
            self._walk.unpicklable.append(obj)
            reduced = getitem, (STAND_IN, len(self._walk.unpicklable) - 1)
        return _with_own_containers(reduced, self._walk.leave_in) if isinstance(reduced, tuple) else reduced


def _with_own_containers(reduced: tuple[Any, ...], leave_in: Callable[[Any], None]) -> tuple[Any, ...]:
    """Keep arguments and state, which have to be tuples and dicts, from being shared; what is in them is."""
    function, arguments, *rest = reduced
    name = getattr(function, "__name__", "")
    if name == "__newobj__":  # the pickler would make a new tuple of its arguments
        function = _new
    elif name == "__newobj_ex__":
        function, arguments = _new_ex, tuple(arguments)
        leave_in(arguments[1])
        leave_in(arguments[2])
    for part in (arguments, *rest[:1]):
        if type(part) in (tuple, dict):
            leave_in(part)
        if type(part) is tuple and part is not arguments:
            for slots in part:
                if type(slots) is dict:
                    leave_in(slots)
    return (function, arguments, *rest)


def _new(cls: Any, *arguments: Any) -> Any:
    return cls.__new__(cls, *arguments)


def _new_ex(cls: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return cls.__new__(cls, *arguments, **options)


def _in_band(buffer: pickle.PickleBuffer) -> bool:
    return buffer is not STAND_IN


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, made: list[Any], unpicklable: list[Any]) -> None:
        super().__init__(file, buffers=repeat(unpicklable))
        self._made = made

    def persistent_load(self, number: int) -> Any:
        """What comes in the place of what was taken out."""
        return self._made[number]
