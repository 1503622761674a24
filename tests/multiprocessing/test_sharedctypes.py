"""`Value` and `Array`: what stock's do, and updates that are never lost."""

from __future__ import annotations

import ctypes
import gc
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import sharedctypes as stock
from multiprocessing import synchronize
from typing import Any

import numpy as np
import pytest
import torch

from tests.multiprocessing.sharedctypes_cases import PATIENCE, add_one, finish, kill_me, outcome, run
from torchcrew.crew import zygote
from torchcrew.multiprocessing import sharedctypes
from torchcrew.multiprocessing.robust_lock import RLock
from torchcrew.multiprocessing.sharedctypes import Array, RawArray, RawValue, Value


class Point(ctypes.Structure):
    """A structure as users have them."""

    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_double))


class Colour(ctypes.Structure):
    """A structure with a field that has the name of a method."""

    _fields_ = (("update", ctypes.c_int),)


# ---- as stock ----


def described(obj: Any) -> Any:
    """A ctypes object, or anything else, as something that can be compared."""
    if isinstance(obj, ctypes.Array):
        return type(obj).__name__, [described(element) for element in obj]
    if isinstance(obj, ctypes.Structure):
        return type(obj).__name__, [getattr(obj, name) for name, _ in type(obj)._fields_]
    if isinstance(obj, ctypes._SimpleCData):
        return type(obj).__name__, obj.value
    return obj


NAMES = sorted(stock.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_stocks(name):
    """Names, kinds and defaults of the parameters."""
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (sharedctypes, stock))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_every_name_of_stock_is_there():
    """What a program may import from stock's module, it may from ours."""
    own = {
        name
        for name, thing in vars(stock).items()
        if not name.startswith("_") and getattr(thing, "__module__", "") == stock.__name__
    }
    assert own - {"make_property"} <= set(sharedctypes.__all__)


LETTERS = sorted(sharedctypes.typecode_to_type)
VALUES = [
    *[(letter,) for letter in LETTERS],
    ("i", 7),
    ("i", -(2**40)),
    ("B", 300),
    ("i", 1.5),
    ("i", "7"),
    ("i", 1, 2),
    ("d", 2),
    ("f", 0.1),
    ("c", b"x"),
    ("c", b"xy"),
    ("u", "é"),
    ("?", 1),
    ("no such letter",),
    (ctypes.c_bool, 5),
    (ctypes.c_longdouble, 1.5),
    (Point,),
    (Point, 1, 2.5),
    (Point, 1, 2, 3),
    (int,),
    (None,),
]


@pytest.mark.parametrize("args", VALUES, ids=repr)
def test_values_are_stocks(args):
    """Types, initial values and errors, raw and with a lock."""
    assert described(outcome(lambda: RawValue(*args))) == described(outcome(lambda: stock.RawValue(*args)))

    def seen(module: Any) -> Any:
        value = module.Value(*args)
        fields = [name for name in ("value", "x", "y") if hasattr(value, name)]
        return type(value).__name__, [getattr(value, name) for name in fields], repr(value).split(" object at")[0]

    assert outcome(lambda: seen(sharedctypes)) == outcome(lambda: seen(stock))


ARRAYS = [
    *[(letter, 3) for letter in LETTERS],
    ("i", 0),
    ("i", -1),
    ("i", True),
    ("i", 2.0),
    ("i", [1, 2, 3]),
    ("i", range(5)),
    ("i", [1, "two"]),
    ("i", iter([1])),
    ("i", []),
    ("d", np.arange(3.0)),
    ("i", np.int64(3)),
    ("c", b"hello"),
    ("u", "hello"),
    ("i", 2**62),
    (Point, [(1, 2.0), (3, 4.0)]),
    (Point, 2),
    (ctypes.c_int * 2, 2),
    (int, 2),
]


@pytest.mark.parametrize("args", ARRAYS, ids=repr)
def test_arrays_are_stocks(args):
    """Types, initial values and errors, raw and with a lock."""
    again = [(args[0], [1]) if hasattr(args[1], "__next__") else args for _ in range(2)]
    assert described(outcome(lambda: RawArray(*again[0]))) == described(outcome(lambda: stock.RawArray(*again[1])))

    def seen(module: Any) -> Any:
        array = module.Array(*args)
        whole = [described(element) for element in array[:]]
        return type(array).__name__, len(array), whole, repr(array).split(" object at")[0]

    assert outcome(lambda: seen(sharedctypes)) == outcome(lambda: seen(stock))


def assign(array: Any, index: Any, value: Any) -> list[Any]:
    """The array after an assignment."""
    array[index] = value
    return list(array[:])


INDICES = [0, 2, -1, 3, -4, slice(None), slice(0, 2), slice(None, None, 2), slice(None, None, -1), "0", None, 1.0]


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("value", [9, [7, 8], [4, 5, 6], "text", None], ids=repr)
def test_indices_and_slices_are_stocks(index, value):
    """Reading and writing elements, with what they return and raise."""
    arrays = [module.Array("i", [1, 2, 3]) for module in (sharedctypes, stock)]
    for action in (lambda array: array[index], lambda array: assign(array, index, value)):
        ours, theirs = (outcome(lambda array=array, action=action: action(array)) for array in arrays)
        assert ours == theirs
    assert arrays[0][:] == arrays[1][:]


def test_strings_are_stocks():
    """`value` ends at the first zero, `raw` does not; too long is an error."""
    for module in (sharedctypes, stock):
        text = module.Array("c", 5)
        text.value = b"abc"
        assert (text.value, text.raw, text[:], text[0], len(text)) == (b"abc", b"abc\0\0", b"abc\0\0", b"a", 5)
        text.raw = b"hello"
        assert text.value == b"hello"
        with pytest.raises(ValueError, match="too long"):
            text.value = b"too long"


def test_structures_have_their_fields():
    """A property for each field, and one class for a structure."""
    point = Value(Point, 3, 0.5)
    point.x += 1
    assert (point.x, point.y, type(point).__name__) == (4, 0.5, "SynchronizedPoint")
    assert type(Value(Point)) is type(point)
    points = Array(Point, [(1, 2.0), (3, 4.0)])
    points[1].x = 9
    assert [(p.x, p.y) for p in points] == [(1, 2.0), (9, 4.0)]


def test_a_field_called_update_stays_a_field():
    """The user's names come before ours, as before stock's."""
    assert Value(Colour, 3).update == 3


def test_instances_are_stocks_too():
    """isinstance with stock's classes holds, the lock's included."""
    assert isinstance(Value("i"), stock.Synchronized)
    assert isinstance(Array("i", 1), stock.SynchronizedArray)
    assert isinstance(Array("c", 1), stock.SynchronizedString)
    assert isinstance(Array("c", 1), stock.SynchronizedArray)
    assert isinstance(Value(Point), stock.SynchronizedBase)
    assert isinstance(Value("i").get_lock(), synchronize.RLock)
    assert isinstance(RawValue("i"), ctypes.c_int)
    assert isinstance(RawArray("i", 2), ctypes.c_int * 2)


@pytest.mark.parametrize("lock", [True, None, 1], ids=repr)
@pytest.mark.parametrize(
    "make", [lambda m, lock: m.Value("i", 5, lock=lock), lambda m, lock: m.Array("i", 5, lock=lock)]
)
def test_locks_of_their_own(make, lock):
    """True and None give a lock; get_lock, acquire, release and `with` are of that lock."""
    thing = make(sharedctypes, lock)
    assert type(thing.get_lock()) is RLock
    assert thing.acquire() is True
    thing.release()
    with thing as entered, thing.get_lock():
        assert entered is True
    with pytest.raises(AssertionError, match="attempt to release recursive lock not owned by thread"):
        thing.release()


def test_given_locks():
    """Any lock of any kind may be shared by several values; False gives none, anything else is an error."""
    for lock in (multiprocessing.Lock(), threading.Lock(), RLock(), multiprocessing.get_context("fork").RLock()):
        value, array = Value("i", 5, lock=lock), Array("i", 5, lock=lock)
        assert value.get_lock() is lock
        assert array.get_lock() is lock
        assert value.value == 5
        assert value.update(lambda old: old + 1) == 6
    assert not hasattr(Value("i", lock=False), "get_lock")
    assert not hasattr(Array("i", 1, lock=False), "get_lock")
    for module in (sharedctypes, stock):
        for make in (lambda m: m.Value("i", lock="notalock"), lambda m: m.Array("i", 2, lock="notalock")):
            with pytest.raises(AttributeError, match="'notalock' has no method 'acquire'"):
                make(module)


def test_copy_and_synchronized_are_stocks():
    """copy is independent and without a lock; what has a lock does not get another."""
    point = RawValue(Point, 1, 2.0)
    other = sharedctypes.copy(point)
    point.x = 5
    assert (other.x, other.y) == (1, 2.0)
    lock = RLock()
    assert sharedctypes.synchronized(other, lock).get_lock() is lock
    assert type(sharedctypes.synchronized(other).get_lock()) is RLock
    for wrapped in (Value("i"), stock.Value("i")):
        with pytest.raises(AssertionError, match="object already synchronized"):
            sharedctypes.synchronized(wrapped)


@pytest.mark.parametrize("make", [lambda m: m.RawValue("i"), lambda m: m.RawArray("i", 2), lambda m: m.Value("i")])
def test_pickling_is_for_starting_processes_only(make):
    """Elsewhere it says so, as stock's do."""
    ours, theirs = (
        outcome(lambda module=module: multiprocessing.reduction.ForkingPickler.dumps(make(module)))
        for module in (sharedctypes, stock)
    )
    assert ours[0] is theirs[0] is RuntimeError
    assert "should only be shared between processes through inheritance" in ours[1]


def test_numpy_and_torch_see_the_memory():
    """Views without a copy, as on stock's, and they keep the memory when the array is gone."""
    array = Array("d", 4)
    tensor = torch.frombuffer(array.get_obj(), dtype=torch.float64)
    view = np.frombuffer(array.get_obj())
    array[2] = 5.0
    assert tensor.tolist() == view.tolist() == [0, 0, 5, 0]
    tensor[0] = 1.0
    assert array[0] == view[0] == 1.0
    del array
    gc.collect()
    other = Array("d", [9.0] * 4)
    assert tensor.tolist() == view.tolist() == [1, 0, 5, 0]
    del other, tensor, view


# ---- numbers ----


def test_an_integer_value_is_an_index():
    """`arr[val] *= 2`, as tutorials have it."""
    array, value = Array("d", [1.0, 2.0, 3.0]), Value("i", 1)
    array[value] *= 2
    assert array[:] == [1, 4, 3]
    assert array.update(value, lambda old: old + 1) == 5
    assert [10, 20, 30][value] == 20
    assert (int(value), float(value), list(range(value))) == (1, 1.0, [0])
    assert int(Value("d", 2.7)) == 2
    assert float(Value("d", 2.5)) == 2.5


def test_what_is_no_whole_number_is_no_index():
    """Nor are characters numbers."""
    for value in (Value("d", 1.0), Value("c", b"1"), Value("u", "1"), stock.Value("i", 1)):
        with pytest.raises(TypeError):
            Array("i", 3)[value]
    for value in (Value("c", b"1"), Value("u", "1")):
        with pytest.raises(TypeError, match="characters is no number"):
            int(value)
        with pytest.raises(TypeError, match="characters is no number"):
            float(value)


def test_the_index_is_read_before_the_arrays_lock_is_taken():
    """Two locks at once could be taken in the other order elsewhere."""
    array = Array("i", [10, 20])
    held = []

    class Watching(sharedctypes.Synchronized):
        def __index__(self) -> int:
            held.append(array.get_lock()._semlock._is_mine())
            return 1

    index = Watching(RawValue("i", 1))
    assert array[index] == 20
    array[index] = 5
    array.update(index, lambda old: old + 1)
    assert held == [False] * 3


# ---- update ----


def test_update_returns_what_is_stored():
    """Rounded, wrapped or cut as the type does it."""
    assert Value("i", 3).update(lambda old: old + 1) == 4
    assert Value("B", 255).update(lambda old: old + 1) == 0
    assert Value("f", 0).update(lambda old: 0.1) == np.float32(0.1)
    assert Value("c", b"a").update(lambda old: b"b") == b"b"
    assert Value(ctypes.c_bool).update(lambda old: not old) is True
    assert Value(Point, 1, 2.0).update("y", lambda old: old * 2) == 4.0


def test_update_of_arrays():
    """An index, a slice of any step, characters, structures."""
    array = Array("i", [1, 2, 3, 4])
    assert array.update(-1, lambda old: old * 10) == 40
    assert array.update(slice(0, 2), lambda old: [number + 1 for number in old]) == [2, 3]
    assert array.update(slice(None, None, -2), lambda old: (7, 8)) == [7, 8]
    assert array[:] == [2, 8, 3, 7]
    assert array.update(slice(None), sorted) == [2, 3, 7, 8]
    assert array.update(slice(0, 0), lambda old: old) == []
    assert array.update(slice(1, 3), lambda old: np.array(old) * 2) == [6, 14]
    assert Array("c", b"abc").update(slice(None), bytes.upper) == b"ABC"
    assert Array("c", b"abc").update(0, bytes.upper) == b"A"
    assert Array("u", "abc").update(slice(1, 3), str.upper) == "BC"
    points = Array(Point, 2)
    points.update(1, lambda old: Point(old.x + 1, 5))
    points.update(0, lambda old: (4, 2))
    assert [(p.x, p.y) for p in points] == [(4, 2), (1, 5)]


@pytest.mark.parametrize("wrong", [None, "text", [1, 2], [1, "2", 3], 5], ids=repr)
def test_a_wrong_result_changes_nothing(wrong):
    """It names what was returned, the lock is free and the elements are as before."""
    array, value = Array("i", [1, 2, 3]), Value("i", 4)
    with pytest.raises((TypeError, ValueError), match="update's function"):
        array.update(slice(None), lambda old: wrong)
    if wrong != 5:
        with pytest.raises(TypeError, match="update's function has to return the new value, but it returned"):
            value.update(lambda old: wrong)
        with pytest.raises(TypeError, match="update's function"):
            array.update(1, lambda old: wrong)
    assert array[:] == [1, 2, 3]
    assert (array.get_lock()._semlock._get_value(), value.get_lock()._semlock._get_value()) == (1, 1)


def test_what_the_function_raises_passes_through():
    """Nothing has changed, and the lock is free."""
    value, array = Value("i", 4), Array("i", [1])
    for update in (lambda f: value.update(f), lambda f: array.update(0, f)):
        with pytest.raises(ZeroDivisionError):
            update(lambda old: old // 0)
        with pytest.raises(TypeError, match="unsupported operand"):
            update(lambda old: old + None)
    with pytest.raises(IndexError):
        array.update(1, lambda old: old)
    with pytest.raises(AttributeError):
        Value(Point).update("z", lambda old: old)
    assert (value.value, array[:]) == (4, [1])
    assert value.get_lock()._semlock._get_value() == 1


def test_wrong_use_says_what_to_do():
    """A value for the function, or none for the index."""
    with pytest.raises(TypeError, match=r"as in value.update\(lambda old: old \+ 1\), but got 5"):
        Value("i").update(5)
    with pytest.raises(TypeError, match=r"as in array.update\(3, lambda old: old \* 2\), but got 5"):
        Array("i", 1).update(0, 5)
    with pytest.raises(TypeError, match=r"as in structure.update\('x'"):
        Value(Point).update("x", 5)


def test_update_within_update():
    """The lock is recursive; the inner update's result is replaced by the outer's."""
    value = Value("i", 1)
    assert value.update(lambda old: value.update(lambda inner: inner * 10) + 1) == 11


def double_by_update(array: Any, index: Any) -> None:
    """Double one element."""
    array.update(index, lambda old: old * 2)


def test_four_processes_double_one_element(ctx):
    """The tutorial's program, with `update`: 2 * 2^4 and never less."""
    for _ in range(3):
        array, index = Array("d", [1.0, 2.0, 3.0]), Value("i", 1)
        processes = [ctx.Process(target=double_by_update, args=(array, index)) for _ in range(4)]
        for process in processes:
            process.start()
        finish(*processes)
        assert array[:] == [1, 32, 3]


def count(value: Any, array: Any, point: Any, times: int) -> None:
    """Add one to everything, often."""
    for _ in range(times):
        value.update(lambda old: old + 1)
        array.update(slice(0, 2), lambda old: [number + 1 for number in old])
        with point.get_lock():
            point.x += 1


def test_no_update_is_lost(ctx):
    """Numbers, slices, and `with get_lock()`, by several processes at once."""
    value, array, point = Value("q"), Array("i", 3), Value(Point)
    processes = [ctx.Process(target=count, args=(value, array, point, 2000)) for _ in range(3)]
    for process in processes:
        process.start()
    finish(*processes)
    assert (value.value, array[:], point.x) == (6000, [6000, 6000, 0], 6000)


def test_no_update_of_threads_is_lost():
    """Threads of one process exclude each other, too."""
    value, array, point = Value("q"), Array("i", 3), Value(Point)
    threads = [threading.Thread(target=count, args=(value, array, point, 500)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert (value.value, array[:], point.x) == (2000, [2000, 2000, 0], 2000)


# ---- going to other processes ----


def change_all(value: Any, array: Any, text: Any, point: Any, raw: Any, raw_array: Any) -> None:
    """Write everything that was sent."""
    value.value += 1
    array[0], array[-1] = 10, 30
    text.value = b"bye"
    point.y = 2.5
    raw.value = 7
    raw_array[1] = 8
    assert value.get_lock() is array.get_lock()
    assert type(point.get_lock()) is RLock


def test_children_share_everything(ctx):
    """All kinds, a shared lock stays one lock."""
    value = Value("i", 1)
    array = Array("i", [1, 2, 3], lock=value.get_lock())
    text, point, raw, raw_array = Array("c", 5), Value(Point), RawValue("i"), RawArray("d", 3)
    run(ctx, change_all, value, array, text, point, raw, raw_array)
    assert (value.value, array[:], text.value, point.y) == (2, [10, 2, 30], b"bye", 2.5)
    assert (raw.value, raw_array[:]) == (7, [0, 8, 0])


def start_a_grandchild(value: Any) -> None:
    """Hand it on."""
    run(multiprocessing.get_context("fork"), add_one, value)
    run(zygote.get_context(), add_one, value)
    zygote.stop()


def test_grandchildren_share_it_too(ctx):
    """What was received can be handed on."""
    value = Value("i")
    run(ctx, start_a_grandchild, value)
    assert value.value == 2


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.faults)])
def test_stocks_other_contexts(method):
    """Whatever context is the default: the lock goes to processes of all, where stock's refuses."""
    value = Value("i", ctx=multiprocessing.get_context("fork"))
    run(multiprocessing.get_context(method), add_one, value)
    assert value.value == 1


def test_contexts_make_stocks_with_our_lock(fork):
    """A stock Value takes our lock, ours takes stock's."""
    lock = RLock()
    theirs, ours = fork.Value("i", lock=lock), Value("i", lock=fork.RLock())
    run(fork, add_to_both, theirs, ours)
    assert (theirs.value, ours.value) == (1, 1)


def add_to_both(theirs: Any, ours: Any) -> None:
    """Under each other's locks."""
    with theirs.get_lock():
        theirs.value += 1
    ours.update(lambda old: old + 1)


def test_a_large_array_goes_by_descriptor(ctx):
    """The child's start does not copy it."""
    array = Array("d", 2 << 20)
    run(ctx, write_ends, array)
    assert (array[0], array[-1]) == (1.0, 2.0)


def write_ends(array: Any) -> None:
    """First and last."""
    array[0], array[len(array) - 1] = 1.0, 2.0


# ---- death ----


def die_in_update(value: Any, how: Callable[[], None]) -> None:
    """Have the lock when dying."""
    value.update(lambda old: how())


def crash_me() -> None:
    """A fault in native code."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def exit_me() -> None:
    """An exit of C."""
    os._exit(9)


@pytest.mark.parametrize(
    ("how", "exitcode"),
    [(kill_me, -signal.SIGKILL), (crash_me, -signal.SIGSEGV), (exit_me, 9)],
    ids=lambda x: str(x)[:16],
)
def test_the_lock_survives_its_holder(ctx, how, exitcode):
    """However the holder dies: the value is the old one, and the next one has the lock."""
    value = Value("i", 5)
    run(ctx, die_in_update, value, how, exitcode=exitcode)
    assert value.value == 5
    assert value.update(lambda old: old + 1) == 6
    run(ctx, add_one, value)
    assert value.value == 7


@pytest.mark.parametrize("times", [30, pytest.param(200, marks=pytest.mark.faults)])
def test_many_die_holding_it(fork, times):
    """Each in `update`, one after the other."""
    value = Value("i")
    for _ in range(times):
        process = fork.Process(target=die_in_update, args=(value, kill_me))
        process.start()
        finish(process, exitcode=-signal.SIGKILL)
        value.update(lambda old: old + 1)
    assert value.value == times


def count_for_ever(value: Any, array: Any, done: Any) -> None:
    """Until killed."""
    while not done.value:
        value.update(lambda old: old + 1)
        array.update(slice(None), lambda old: [number + 1 for number in old])


@pytest.mark.parametrize("times", [40, pytest.param(100, marks=pytest.mark.faults)])
def test_the_others_go_on_while_counters_are_killed_anywhere(fork, times):
    """Random instants, waiting or holding, while another process and this one use the lock."""
    value, array, done = Value("q"), Array("i", 4), RawValue("i")
    survivor = fork.Process(target=count_for_ever, args=(value, array, done))
    survivor.start()
    chance = random.Random(7)
    for _ in range(times):
        victim = fork.Process(target=count_for_ever, args=(value, array, done))
        victim.start()
        time.sleep(chance.random() * 0.006)
        before = value.update(lambda old: old + 1)
        victim.kill()
        finish(victim, exitcode=-signal.SIGKILL)
        assert value.acquire(timeout=PATIENCE)
        value.release()
        assert value.value >= before
    done.value = 1
    finish(survivor)


def test_a_pickle_of_the_memory_alone_needs_a_starting_process():
    """Values do not travel by accident: not by pickle, not in a queue."""
    with pytest.raises((RuntimeError, TypeError, pickle.PicklingError)):
        pickle.dumps(Value("i"))
