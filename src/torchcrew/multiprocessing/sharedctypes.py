"""`Value` and `Array`: C data that several processes read and write, with a lock each.

    Synchronized ── RLock ───► a block of the heap        robust_lock.py: a dead holder does not keep it
       └── ctypes object ────► a block of the heap        heap.py: memfds, no /dev/shm

Everything is as in the standard library, whose classes these extend, and which has the C side of it. What is new:

    counter = Value("i")
    counter.update(lambda old: old + 1)             # += 1, and no other process's += 1 is lost
    scores = Array("d", 8)
    scores.update(3, lambda old: old * 2)
    scores.update(slice(0, 4), lambda old: [2 * number for number in old])
    scores[counter]                                 # an integer Value is an index

``counter.value += 1`` and ``scores[3] *= 2`` read under the lock, let it go and write under it: two processes that do
it at the same time may count once.

Death      of a process in `update`, or wherever it holds the lock: the others go on at once. A single number is the old
           or the new one; a slice or a structure may be written in part.
"""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Callable
from multiprocessing import sharedctypes as _typed_stock
from multiprocessing.context import assert_spawning
from typing import Any

from torchcrew.multiprocessing.heap import BufferWrapper
from torchcrew.multiprocessing.robust_lock import RLock

__all__ = (
    "Array",
    "RawArray",
    "RawValue",
    "Synchronized",
    "SynchronizedArray",
    "SynchronizedBase",
    "SynchronizedString",
    "SynchronizedStructure",
    "Value",
    "copy",
    "rebuild_ctype",
    "reduce_ctype",
    "synchronized",
    "typecode_to_type",
)

stock: Any = _typed_stock  # its type hints leave out, or narrow, what is used here
typecode_to_type: dict[str, Any] = stock.typecode_to_type
reduce_ctype, rebuild_ctype = stock.reduce_ctype, stock.rebuild_ctype


def __getattr__(name: str) -> Any:
    """What the standard library's module has and this one has not."""
    return getattr(stock, name)


_structure_classes: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()


def RawValue(typecode_or_type: Any, *args: Any) -> Any:
    """A ctypes object in shared memory, without a lock.

    Args:
        typecode_or_type: a letter as for `array.array`, ``"c"``, or a ctypes type.
        args: what the type is initialised with; without, everything is zero.
    """
    obj = _new(typecode_to_type.get(typecode_or_type, typecode_or_type))
    obj.__init__(*args)
    return obj


def RawArray(typecode_or_type: Any, size_or_initializer: Any) -> Any:
    """A ctypes array in shared memory, without a lock.

    Args:
        typecode_or_type: of the elements, as for `RawValue`.
        size_or_initializer: how many zeros, or a sequence of the elements.
    """
    type_ = typecode_to_type.get(typecode_or_type, typecode_or_type)
    if isinstance(size_or_initializer, int):
        return _new(type_ * size_or_initializer)
    obj = _new(type_ * len(size_or_initializer))
    obj.__init__(*size_or_initializer)
    return obj


def Value(typecode_or_type: Any, *args: Any, lock: Any = True, ctx: Any = None) -> Any:
    """A ctypes object in shared memory, with a lock; ``value`` reads and writes it.

    Args:
        typecode_or_type: as for `RawValue`.
        args: the same.
        lock: True or None for a lock of its own, an existing lock, or False for none: then as `RawValue`.
        ctx: not needed: the lock works with every start method.

    Raises:
        AttributeError: ``lock`` is no lock.
    """
    return _with_lock(RawValue(typecode_or_type, *args), lock, ctx)


def Array(typecode_or_type: Any, size_or_initializer: Any, *, lock: Any = True, ctx: Any = None) -> Any:
    """A ctypes array in shared memory, with a lock; indices and slices read and write it.

    Args:
        typecode_or_type: as for `RawArray`.
        size_or_initializer: the same.
        lock: as for `Value`.
        ctx: the same.

    Raises:
        AttributeError: ``lock`` is no lock.
    """
    return _with_lock(RawArray(typecode_or_type, size_or_initializer), lock, ctx)


def copy(obj: Any) -> Any:
    """A copy of a ctypes object, in shared memory and without a lock."""
    new = _new(type(obj))
    ctypes.pointer(new)[0] = obj
    return new


def synchronized(obj: Any, lock: Any = None, ctx: Any = None) -> Any:
    """Give a ctypes object a lock.

    Args:
        obj: of shared memory, as `RawValue`, `RawArray` and `copy` return it.
        lock: an existing lock, None for a new one.
        ctx: not needed: the lock works with every start method.

    Returns:
        A wrapper with ``get_obj()`` and ``get_lock()``, which is a context manager, too.
    """
    assert not isinstance(obj, stock.SynchronizedBase), "object already synchronized"
    if isinstance(obj, ctypes._SimpleCData):
        return Synchronized(obj, lock, ctx)
    if not isinstance(obj, ctypes.Array):
        return _structure_class(type(obj))(obj, lock, ctx)
    if obj._type_ is ctypes.c_char:
        return SynchronizedString(obj, lock, ctx)
    return SynchronizedArray(obj, lock, ctx)


def _new(type_: Any) -> Any:
    return rebuild_ctype(type_, BufferWrapper(ctypes.sizeof(type_)), None)


def _with_lock(obj: Any, lock: Any, ctx: Any) -> Any:
    if lock is False:
        return obj
    if lock in (True, None):
        lock = None
    elif not hasattr(lock, "acquire"):
        raise AttributeError(f"{lock!r} has no method 'acquire'")
    return synchronized(obj, lock, ctx)


def _structure_class(type_: Any) -> Any:
    """The wrapper's class for a structure or union: with a property for each field."""
    found = _structure_classes.get(type_)
    if found is None:
        fields = {field[0]: stock.make_property(field[0]) for field in type_._fields_}
        found = _structure_classes[type_] = type(f"Synchronized{type_.__name__}", (SynchronizedStructure,), fields)
    return found


class SynchronizedBase(stock.SynchronizedBase):  # type: ignore[misc]
    """A ctypes object with its lock; ``with`` takes the lock."""

    _obj: Any
    _lock: Any

    def __init__(self, obj: Any, lock: Any = None, ctx: Any = None) -> None:
        super().__init__(obj, lock or RLock(), ctx)

    def __reduce__(self) -> Any:
        assert_spawning(self)
        return synchronized, (self._obj, self._lock)


class Synchronized(SynchronizedBase, stock.Synchronized):  # type: ignore[misc]
    """One number or character with its lock. One of whole numbers can be an index."""

    value: Any = stock.make_property("value")

    def update(self, function: Callable[[Any], Any]) -> Any:
        """Replace the value by ``function(value)`` under the lock, so that no update of another process is lost.

        If the function raises, nothing has changed. If this process dies in it, the others go on with the old value.
        The others wait for the lock meanwhile, so the function should be quick and start no process.

        Returns:
            The new value, as it is stored.

        Raises:
            TypeError: ``function`` is none, or what it returned is not of this type.
        """
        _check(function, "value.update(lambda old: old + 1)")
        with self._lock:
            new = function(self._obj.value)
            try:
                self._obj.value = new
            except TypeError as error:
                raise _misfit(new, self._obj, error) from error
            return self._obj.value

    def __index__(self) -> int:
        return operator.index(self.value)

    def __int__(self) -> int:
        return int(_number(self.value))

    def __float__(self) -> float:
        return float(_number(self.value))


class SynchronizedArray(SynchronizedBase, stock.SynchronizedArray):  # type: ignore[misc]
    """An array with its lock. An integer `Value` is an index, too."""

    def __getitem__(self, i: Any) -> Any:
        i = _plain(i)
        with self:
            return self._obj[i]

    def __setitem__(self, i: Any, value: Any) -> None:
        i = _plain(i)
        with self:
            self._obj[i] = value

    def update(self, index: Any, function: Callable[[Any], Any]) -> Any:
        """Replace elements by ``function(elements)`` under the lock, so that no update of another process is lost.

        If the function raises, or returns what does not fit, nothing has changed. If this process dies, the others
        go on; of a slice, some elements may be new and some old. The function should be quick and start no process.

        Args:
            index: of one element, or a slice; ``slice(None)`` is the whole array.
            function: of one element, or of what the slice is: a list, or bytes or str for characters. It returns one
                element, or as many as it was given.

        Returns:
            The new element or elements, as they are stored.

        Raises:
            IndexError: the index is out of range.
            TypeError: ``function`` is none, or what it returned is not of the array's type.
            ValueError: it returned more or fewer elements.
        """
        _check(function, "array.update(3, lambda old: old * 2)")
        index = _plain(index)
        with self._lock:
            new = function(self._obj[index])
            try:
                if isinstance(index, slice):
                    self._replace(range(*index.indices(len(self._obj))), new)
                else:
                    self._obj[index] = new
            except TypeError as error:
                raise _misfit(new, self._obj, error) from error
            return self._obj[index]

    def _replace(self, indices: range, new: Any) -> None:
        if len(new) != len(indices):
            raise ValueError(f"update's function returned {len(new)} elements for {len(indices)}")
        for i, element in zip(indices, (self._obj._type_ * len(new))(*new), strict=True):
            self._obj[i] = element


class SynchronizedString(SynchronizedArray, stock.SynchronizedString):  # type: ignore[misc]
    """Bytes with their lock: ``value`` up to the first zero, ``raw`` all."""

    value: Any = stock.make_property("value")
    raw: Any = stock.make_property("raw")


class SynchronizedStructure(SynchronizedBase):
    """A structure or union with its lock; its fields are attributes."""

    def update(self, field: str, function: Callable[[Any], Any]) -> Any:
        """Replace a field by ``function(field)`` under the lock, so that no update of another process is lost.

        If the function raises, nothing has changed. If this process dies in it, the others go on with the old value.

        Returns:
            The new value, as it is stored.

        Raises:
            AttributeError: there is no such field.
            TypeError: ``function`` is none, or what it returned is not of the field's type.
        """
        _check(function, "structure.update('x', lambda old: old + 1)")
        with self._lock:
            new = function(getattr(self._obj, field))
            try:
                setattr(self._obj, field, new)
            except TypeError as error:
                raise _misfit(new, self._obj, error) from error
            return getattr(self._obj, field)


def _misfit(new: Any, obj: Any, error: TypeError) -> TypeError:
    return TypeError(
        f"update's function has to return the new value, but it returned {new!r}, "
        f"which {type(obj).__name__} cannot hold: {error}"
    )


def _check(function: Any, example: str) -> None:
    if not callable(function):
        raise TypeError(
            f"update needs a function that is given the old value and returns the new one, as in "
            f"{example}, but got {function!r}"
        )


def _plain(index: Any) -> Any:
    # Before the array's lock is taken: who holds two locks must care for their order.
    return operator.index(index) if isinstance(index, stock.Synchronized) else index


def _number(value: Any) -> Any:
    if isinstance(value, (bytes, str)):
        raise TypeError(f"a Value of characters is no number: {value!r}")
    return value
