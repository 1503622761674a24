"""`share`: what comes out behaves as what went in, and is one copy for all processes."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import fcntl
import gc
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.multiprocessing
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

import torchcrew
from tests.channel import share_programs
from tests.channel.share_programs import Names, Sample, check, graph, mappings
from torchcrew.channel import shared
from torchcrew.channel.shared import SHARE_MIN_ITEMS
from torchcrew.channel.shared_index import stable_hash
from torchcrew.crew import zygote
from torchcrew.data import DataLoader
from torchcrew.errors import ArenaFull

MANY = SHARE_MIN_ITEMS + 34
METHODS = ["fork", "spawn", "forkserver", "zygote"]


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


def share(obj: Any, **options: Any) -> Any:
    return torchcrew.share(obj, **options)


def share_all(obj: Any) -> Any:
    """`share`, with every container as if it were a big one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "SHARE_MIN_ITEMS", 0)
        return share(obj)


def context_of(method: str) -> Any:
    return zygote.get_context() if method == "zygote" else multiprocessing.get_context(method)


def text(obj: Any) -> str:
    """A graph with the types of everything in it; shared containers look like ordinary ones, sets are in order."""
    if isinstance(obj, (torchcrew.SharedDict, dict)):
        return "{" + ", ".join(f"{text(key)}: {text(value)}" for key, value in obj.items()) + "}"
    if isinstance(obj, torchcrew.SharedList):
        return f"{obj._kind.__name__}({', '.join(map(text, obj))})"
    if isinstance(obj, Sample):
        return f"Sample({text(obj.name)}, {text(obj.place)})"
    if isinstance(obj, set):
        return f"set({', '.join(sorted(map(text, obj)))})"
    if isinstance(obj, (list, tuple)):
        return f"{type(obj).__name__}({', '.join(map(text, obj))})"
    return f"{type(obj).__name__} {obj!r}"


def counted() -> Any:
    """A shared list of numbers. No fixture: its value would still be there when the leak check looks."""
    return share(list(range(MANY)))


# Lists ----------------------------------------------------------------------------------------------------------------


def test_a_big_list_becomes_a_shared_one() -> None:
    """Type, length, truth, repr; a small one stays a list."""
    numbers = counted()
    assert type(numbers) is torchcrew.SharedList
    assert len(numbers) == MANY
    assert numbers
    assert repr(numbers) == f"<SharedList of {MANY:,} items>"
    small = list(range(SHARE_MIN_ITEMS - 1))
    assert type(share(small)) is list
    assert type(share(list(range(SHARE_MIN_ITEMS)))) is torchcrew.SharedList


@pytest.mark.parametrize("index", [0, 5, -1, -MANY, MANY - 1, True, np.int64(7), np.uint8(3), torch.tensor(4)], ids=str)
def test_indices(index: Any) -> None:
    """Negative ones, and whatever has `__index__`."""
    numbers = counted()
    assert numbers[index] == list(range(MANY))[index]


def test_wrong_indices_are_lists_errors() -> None:
    """Out of range, and of a type that is no index."""
    numbers = counted()
    for index in (MANY, -MANY - 1, 10**30):
        with pytest.raises(IndexError):
            numbers[index]
    with pytest.raises(IndexError, match=r"^list index out of range$"):
        numbers[MANY]
    with pytest.raises(TypeError, match=r"^list indices must be integers or slices, not str$"):
        numbers["1"]
    with pytest.raises(TypeError):
        numbers[1.0]
    with pytest.raises(TypeError):
        numbers[0] = 1


SLICES = [slice(None), slice(3, 9), slice(-5, None), slice(None, None, -1), slice(900, 10, -7), slice(5, 5)]


@pytest.mark.parametrize("part", SLICES, ids=str)
def test_slices_are_handles(part: slice) -> None:
    """A slice is a SharedList over the same buffer; slices of slices too."""
    numbers = counted()
    wanted = list(range(MANY))[part]
    assert type(numbers[part]) is torchcrew.SharedList
    assert numbers[part] == wanted
    assert list(numbers[part][1::2]) == wanted[1::2]
    assert list(reversed(numbers[part])) == wanted[::-1]
    assert numbers[part]._records is numbers._records


def test_membership_index_count() -> None:
    """`in`, `index` with its bounds, `count`."""
    numbers = counted()
    assert 17 in numbers
    assert "17" not in numbers
    assert numbers.index(17) == 17
    assert numbers.index(17, -MANY, MANY) == 17
    with pytest.raises(ValueError):  # noqa: PT011 - as bare as list's
        numbers.index(17, 18)
    assert share([1, 2] * SHARE_MIN_ITEMS).count(2) == SHARE_MIN_ITEMS


def test_equality() -> None:
    """With lists, shared lists and slices; a tuple is equal to tuples only, as ever; unhashable."""
    items = [{"a": k, "b": [k]} for k in range(MANY)]
    one, other = share(items), share(items)
    assert one == items == one
    assert one == other == one
    assert one != items[:-1]
    assert one != [*items[:-1], None]
    assert one[2:] != one[1:-1]
    assert one[2:5] == items[2:5]
    assert one != tuple(items)
    assert share(tuple(items)) == tuple(items)
    assert share(tuple(items)) != one
    assert one != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_items_are_made_anew() -> None:
    """Changing an item changes nothing for the next who asks."""
    items = share([[k] for k in range(MANY)])
    items[3].append("mine")
    assert items[3] == [3]
    assert items[3] is not items[3]


def test_what_is_aliased_within_an_item_stays_so() -> None:
    """Identity inside an item, cycles included, also where the item is a dict."""
    inner = [1]
    looped: dict[str, Any] = {"a": inner, "b": inner}
    looped["self"] = looped
    nested: dict[str, Any] = {"parent": {"child": None}}
    nested["parent"]["child"] = nested
    items = share([looped, nested, *({"a": inner, "b": inner, "self": 125} for _ in range(MANY))])
    for item in (items[0], items[7]):
        assert item["a"] is item["b"]
    first, second = items[:2]
    assert first["self"] is first
    assert second["parent"]["child"] is second


class Point(NamedTuple):
    x: int
    y: Any


class Texts(str):
    __slots__ = ()


AWKWARD: list[Any] = [
    *(None, True, 0, -1, 2**70, 1.5, float("inf"), 3j, "", "}", "torch", "numpy", "\ud800", "\0", b"", b"}" * 300),
    *((), (1,), (1, 0), ((),), ({"a": 1}, 1), Point(1, {"}": 2}), [], [[]], {}, {1: 2}, {"a": {}}, {"a": 125}),
    *({"a": [125, {"b": 125}]}, {True: "true"}, {"a": 1}, {"b": 1, "a": 2}, {"a": 2, "b": 1}, set(), {1}),
    *(frozenset({"x"}), Sample("s", 1), uuid.UUID(int=5), Path("a/b"), Decimal("1.5"), Fraction(1, 3), range(4)),
    *(collections.OrderedDict(a=1), collections.Counter("aab"), "x" * 100_000, b"y" * 3_000_000, len, Point),
    *(np.int64(5), np.str_("np"), Texts("sub"), {"k": Point(1, 2)}, bytearray(b"ab"), Ellipsis),
]


def test_items_of_all_kinds() -> None:
    """Every item comes back with its type, whatever stands beside it."""
    items = AWKWARD * (MANY // len(AWKWARD) + 1)
    got = share(items)
    assert got == items
    for one, other in zip(got, items, strict=True):
        assert type(one) is type(other)
        assert repr(one) == repr(other)


def test_dicts_of_many_shapes() -> None:
    """More different sets of keys than are kept once."""
    items = [{f"key {k % 1500}": k, **({"more": None} if k % 2 else {})} for k in range(5000)]
    assert share(items) == items


def test_large_items_and_small_ones() -> None:
    """Batches adapt to sizes; an item may be larger than all of them."""
    items = ["x" * (1 << (k % 23)) if k % 400 == 22 else str(k) for k in range(MANY)]
    assert list(share(items)) == items


def test_an_empty_one() -> None:
    """Nothing is an edge, too."""
    empty = torchcrew.SharedList()
    assert (len(empty), list(empty), empty == [], bool(empty)) == (0, [], True, False)
    assert list(empty[1:]) == []
    assert (len(torchcrew.SharedDict()), torchcrew.SharedDict() == {}, "a" in torchcrew.SharedDict()) == (
        0,
        True,
        False,
    )


def test_made_by_hand() -> None:
    """The classes make one of whatever can be iterated."""
    assert torchcrew.SharedList(str(k) for k in range(3)) == ["0", "1", "2"]
    assert torchcrew.SharedDict({"a": 1}) == {"a": 1}
    assert torchcrew.SharedDict([("a", 1), (None, 2)]) == {"a": 1, None: 2}
    with pytest.raises(TypeError, match="keys are texts"):
        torchcrew.SharedDict({object(): 1})


# Dicts ----------------------------------------------------------------------------------------------------------------


def test_a_big_dict() -> None:
    """Everything a mapping does, in the order of insertion."""
    wanted = {f"key {k}": {"value": k} for k in reversed(range(MANY))}
    got = share(wanted)
    assert type(got) is torchcrew.SharedDict
    assert repr(got) == f"<SharedDict of {MANY:,} items>"
    assert got == wanted == got
    assert got["key 5"] == {"value": 5}
    assert got.get("key 5") == {"value": 5}
    assert got.get("nothing", 7) == 7
    assert "key 5" in got
    assert "nothing" not in got
    assert list(got) == list(wanted)
    assert list(got.keys()) == list(wanted.keys())
    assert list(got.values()) == list(wanted.values())
    assert list(got.items()) == list(wanted.items())
    assert list(reversed(got)) == list(reversed(wanted))
    assert list(reversed(got.items())) == list(reversed(wanted.items()))
    assert got.keys() & {"key 1", "x"} == {"key 1"}
    assert ("key 1", {"value": 1}) in got.items()
    assert {"value": 3} in got.values()
    assert {**got} == wanted
    assert dict(got) == wanted
    with pytest.raises(KeyError, match="'nothing'"):
        got["nothing"]
    with pytest.raises(TypeError, match="unhashable"):
        got[[]]
    with pytest.raises(TypeError):
        got["key 5"] = 1


def test_dicts_that_differ() -> None:
    """In length, in a key, in a value."""
    base = {k: k for k in range(MANY)}
    for other in ({**base, "x": 1}, {k + 1: k for k in base}, {**base, 5: None}, list(base)):
        assert share(base) != other
        assert other != share(base)
    assert share(base) == share(base)
    assert share(base) != share({**base, 5: None})


def test_keys_of_all_kinds() -> None:
    """Equal keys are found whatever their types, across processes' hash seeds (see the spawned ones below)."""
    keys = [
        None,
        "",
        "a",
        "\ud800",
        b"",
        b"a",
        0,
        -1,
        2**80,
        0.5,
        1j,
        (),
        ("a", 1),
        (1, ("b", None)),
        frozenset({1, "x"}),
    ]
    keys += [Path("a/b"), uuid.UUID(int=9), float("inf"), *range(10, MANY)]
    got = share({key: repr(key) for key in keys})
    assert type(got) is torchcrew.SharedDict
    for key in keys:
        assert got[key] == repr(key)
    same = [(0, False), (0, 0.0), (10, Decimal(10)), (10, np.int64(10)), (0.5, Fraction(1, 2)), ("a", Texts("a"))]
    for key, other in [
        *same,
        ("a", np.str_("a")),
        (("a", 1), ("a", True)),
        (frozenset({1, "x"}), frozenset({1.0, "x"})),
    ]:
        assert got[other] == repr(key)
    for missing in ("b", b"b", 0.25, -2, ("a",), object(), float("nan"), Point, (1, [])[:1]):
        assert missing not in got
    for unhashable in ([], {}, ("a", [])):
        with pytest.raises(TypeError, match="unhashable"):
            got.get(unhashable)


def test_keys_that_are_multiples_of_a_power_of_two() -> None:
    """No bucket gets many of them."""
    got = share({k << 40: k for k in range(MANY)})
    assert all(got[k << 40] == k for k in range(MANY))
    assert max(len(got._index.candidates(k << 40)) for k in range(MANY)) <= 3


def test_keys_with_one_hash() -> None:
    """Keys that collide are told apart by comparing them."""
    assert stable_hash("plumless") == stable_hash("buckeroo")  # crc32
    got = share({**dict.fromkeys(range(MANY)), "plumless": 1, "buckeroo": 2})
    assert (got["plumless"], got["buckeroo"]) == (1, 2)


def test_a_dict_with_other_keys_stays_one() -> None:
    """Keys without a hash for all processes: the dict is ordinary, what is in it is shared all the same."""
    keys = [Sample, *range(MANY)]
    got = share({key: torch.zeros(1) if key is Sample else key for key in keys})
    assert type(got) is dict
    assert list(got) == keys
    assert got[Sample].is_shared()


# Graphs ---------------------------------------------------------------------------------------------------------------

atoms = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
keys = (
    st.text(max_size=3)
    | st.integers(-3, 3)
    | st.booleans()
    | st.none()
    | st.tuples(st.integers(0, 2), st.text(max_size=1))
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=6),
        st.lists(inner, max_size=6).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", "}"]), inner, max_size=3),
        st.dictionaries(keys, inner, max_size=5),
        st.builds(Point, st.integers(), inner),
        st.builds(Sample, st.text(max_size=2), inner),
        st.sets(atoms, max_size=3),
    )


graphs = st.recursive(atoms, containers, max_leaves=25)


@given(graphs)
def test_shared_is_equal(wanted: Any) -> None:
    """Any graph, every container in it shared: the same values, types and order when made ordinary again."""
    got = share_all(wanted)
    assert text(got) == text(wanted)
    assert got == wanted
    assert wanted == got


@given(st.lists(graphs, max_size=8), st.data())
def test_a_shared_list_is_a_list(wanted: list[Any], data: Any) -> None:
    """Any index, slice and search gives what the list gives."""
    got = torchcrew.SharedList(wanted)
    numbers = st.none() | st.integers(-10, 10)
    part = slice(data.draw(numbers), data.draw(numbers), data.draw(numbers.filter(lambda step: step != 0)))
    assert text(list(got[part])) == text(wanted[part])
    for index in range(-10, 10):
        try:
            item = wanted[index]
        except IndexError:
            with pytest.raises(IndexError):
                got[index]
        else:
            assert text(got[index]) == text(item)
            assert item in got
            assert got.index(item) == wanted.index(item)
            assert got.count(item) == wanted.count(item)


@given(st.dictionaries(keys, graphs, max_size=12), st.lists(keys))
def test_a_shared_dict_is_a_dict(wanted: dict[Any, Any], others: list[Any]) -> None:
    """Any key that is there or not, whatever it is equal to."""
    got = torchcrew.SharedDict(wanted)
    assert text(list(got.items())) == text(list(wanted.items()))
    for key in [*wanted, *others]:
        assert (key in got) == (key in wanted)
        assert text(got.get(key)) == text(wanted.get(key))


def test_nested_containers() -> None:
    """Small containers stay and what is in them is shared, wherever it is."""

    @dataclasses.dataclass
    class Local:
        rows: Any
        other: Any

    column = [str(k) for k in range(MANY)]
    got = share(
        {"columns": {"a": column, "b": column, "c": np.arange(5)}, "more": [Local(column, 3)], "p": Point(1, column)}
    )
    assert type(got) is dict
    assert type(got["columns"]["a"]) is torchcrew.SharedList
    assert got["columns"]["a"] == column
    assert got["columns"]["b"] is got["columns"]["a"]
    assert type(got["more"][0]) is Local
    assert got["more"][0].rows is got["columns"]["a"]
    assert type(got["p"]) is Point
    assert got["p"].y is got["columns"]["a"]


def test_identity_and_cycles() -> None:
    """What is one object in the graph is one in the copy; the graph itself is not touched."""
    inner: list[Any] = [1]
    inner.append(inner)
    wanted = {"a": inner, "b": inner}
    got = share(wanted)
    assert got["a"] is got["b"]
    assert got["a"][1] is got["a"]
    assert got["a"] is not inner
    assert inner[1] is inner


def test_what_is_kept() -> None:
    """Code, what is shared already, and what cannot be copied stay the very objects; objects beside them are copied."""
    lock, queue = threading.Lock(), multiprocessing.get_context("fork").SimpleQueue()
    done = share(list(range(MANY)))
    tensor, sparse = torch.zeros(3).share_memory_(), torch.eye(3).to_sparse()
    kept = [lock, queue, done, tensor, sparse, test_what_is_kept, Sample, os, lambda: 1, share(np.arange(4))]
    got = share([*kept, Sample("x", 1)])
    for one, other in zip(got, kept, strict=False):
        assert one is other
    assert got[-1] == Sample("x", 1)
    queue.close()


def test_objects_whose_state_is_large() -> None:
    """A state that has to be a dict or a tuple is one, whatever its size; the containers in it are shared."""

    class Wide:
        pass

    wide = Wide()
    vars(wide).update({f"a{k}": k for k in range(MANY)}, rows=list(range(MANY)))
    got = share(wide)
    assert type(vars(got)) is dict
    assert got.a7 == 7
    assert type(got.rows) is torchcrew.SharedList
    many = dict.fromkeys(range(MANY), 1)
    assert share(collections.Counter(many)) == collections.Counter(many)
    assert share(collections.OrderedDict(many)) == collections.OrderedDict(many)
    assert share(set(many)) == set(many)
    assert share(collections.deque(many)) == collections.deque(many)


# Tensors and arrays ---------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of its elements, in order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool, torch.int8, torch.float64]


@pytest.mark.parametrize("where", ["walked", "item"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors(dtype: torch.dtype, where: str) -> None:
    """Dtypes, layouts, no elements and no dimensions: the same tensors, in memory that is shared."""
    base = (torch.arange(48) % 2).to(dtype)
    sent = [
        base,
        base.view(6, 8),
        base.view(6, 8).t(),
        base[3:30:3],
        base[5],
        base[:1].expand(7, 3),
        base[:0],
        base[9:9],
    ]
    sent += [base.view(2, 3, 8)[:, 1:2, ::2], torch.zeros(2, 0, dtype=dtype)]
    got = share(sent) if where == "walked" else share([sent] * MANY)[-1]
    for one, other in zip(got, sent, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert bits(one) == bits(other)
        assert type(one) is torch.Tensor
        assert one._base is None
        if where == "walked" and one.numel():
            assert one.is_shared()


def test_storages_stay_joined() -> None:
    """Tensors over one storage, and arrays over it, stay over one; the original is left alone."""
    base = torch.arange(1000.0)
    view = base.numpy()[100:200:2]
    got = share(
        {"base": base, "part": base[10:20], "bytes": base.view(torch.uint8)[:8], "array": view[::-1], "same": base}
    )
    assert got["same"] is got["base"]
    got["base"].fill_(7)
    assert got["part"].tolist() == [7.0] * 10
    assert got["array"].tolist() == [7.0] * 50
    assert bytes(got["bytes"].tolist()) == np.float32([7, 7]).tobytes()
    assert got["part"].untyped_storage().data_ptr() == got["base"].untyped_storage().data_ptr()
    assert torch.equal(base, torch.arange(1000.0))
    assert not base.is_shared()
    assert view[1] == 102


steps = st.sampled_from([1, 2, 3, -1, -3])
views = st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 24), steps), min_size=1, max_size=6)


@given(views, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 23)), max_size=6), st.booleans())
def test_writes_are_seen_as_before(chosen: list[Any], writes: list[tuple[int, int]], twice: bool) -> None:
    """Any tensors and arrays over one memory: after writes through some, all have what the originals then have."""
    base = torch.arange(64, dtype=torch.int16)
    made: list[Any] = []
    for is_array, start, length, step in chosen:
        part = base[start : start + length]
        made.append(part.numpy()[::step] if is_array else part[:: abs(step)])
    got = share({"a": made, "b": made[::-1]} if twice else {"a": made})["a"]
    for number, place in writes:
        if number < len(made) and place < len(made[number]):
            made[number][place] = got[number][place] = 1000 + place
    assert [part.tolist() for part in got] == [part.tolist() for part in made]


def test_only_what_is_covered_is_copied() -> None:
    """Ten elements of a large tensor do not bring the rest; two ends bring the middle."""
    base = torch.arange(100_000, dtype=torch.float64)
    ten = share(base[50_000:50_010])
    assert ten.untyped_storage().nbytes() <= 10 * 8 + 64
    assert ten.tolist() == list(range(50_000, 50_010))
    one, other = share((base[5:6], base[10:12]))
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert (one.item(), other.tolist()) == (5.0, [10.0, 11.0])


def test_arrays() -> None:
    """Layouts, negative strides, structured, read-only, byte order, strings, dates: equal, as writeable as before."""
    base = np.arange(60).reshape(5, 12)
    frozen = np.arange(3)
    frozen.flags.writeable = False
    record = np.zeros(4, [("a", "u1"), ("b", "f8")])
    sent = [base, base.T, base[::-1, ::-2], base[1:3, 4], base[:0], np.array(5), np.array(["a", "bc"]), frozen, record]
    sent += [
        np.array(["2020-01-01"], "M8[D]"),
        base.astype(">i4"),
        np.broadcast_to(base[0], (3, 12)),
        np.asfortranarray(base),
    ]
    for got in (share(sent), share([sent] * MANY)[5]):
        for one, other in zip(got, sent, strict=True):
            assert type(one) is np.ndarray
            assert (one.dtype, one.shape, one.flags.writeable) == (other.dtype, other.shape, other.flags.writeable)
            assert np.array_equal(one, other)
            if one.size > 1:
                assert one.strides == other.strides
            assert not np.shares_memory(one, other)
    one, other = share((base, base[2:]))
    one[3] = -1
    assert other[1].tolist() == [-1] * 12
    objects = np.array([{}, None], object)
    assert share([objects])[0][0] == {}


def test_tensors_in_items_are_views() -> None:
    """Writing into one is seen by the next who asks; rows of one tensor stay rows of one; saving one saves little."""
    base = torch.zeros(MANY, 4)
    rows = share([{"row": base[k], "all": base} for k in range(MANY)])
    rows[3]["row"][1] = 5
    assert rows[3]["row"][1] == 5
    assert rows[9]["all"][3, 1] == 5
    assert base.sum() == 0
    file = io.BytesIO()
    torch.save(rows[3]["row"], file)
    assert file.tell() < 4000


def test_parameters_modules_and_grad() -> None:
    """A module is copied with shared parameters, tied ones tied; what autograd recorded is refused, as by torch."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    got = share(model)
    assert got[2].weight is got[0].weight
    assert all(p.is_shared() and type(p) is torch.nn.Parameter and p.requires_grad for p in got.parameters())
    assert all(b.is_shared() for b in got.buffers())
    assert not any(p.is_shared() for p in model.parameters())
    assert torch.equal(got.eval()(torch.ones(2, 3)), model.eval()(torch.ones(2, 3)))
    leaf = torch.ones(2, requires_grad=True)
    for got_leaf in (share(leaf), share([leaf] * MANY)[0]):
        assert got_leaf.requires_grad
        assert got_leaf.is_leaf
    for bad in (leaf * 2, [leaf * 2] * MANY):
        with pytest.raises(RuntimeError, match="non-leaf"):
            share(bad)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_odd_tensors() -> None:
    """Conjugated, negated, sparse, quantized, subclasses, misaligned: right values, shared or kept."""
    conj, neg = torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag
    sparse = torch.eye(2).to_sparse()
    memory = bytearray(range(64))
    odd = [torch.frombuffer(memory, dtype=torch.int32, offset=5, count=3), np.frombuffer(memory, np.uint8)]
    for got in (share([conj, neg, sparse]), share([[conj, neg, sparse]] * MANY)[1]):
        assert [tensor.to_dense().tolist() for tensor in got] == [[1 - 2j], [-2.0], [[1.0, 0.0], [0.0, 1.0]]]
    for got in (share(odd), share([odd] * MANY)[1]):
        assert torch.equal(got[0], odd[0])
        assert np.array_equal(got[1], odd[1])


# Pickling and copying -------------------------------------------------------------------------------------------------


def test_pickled_elsewhere_it_is_a_list(tmp_path: Path) -> None:
    """In a file it is an ordinary list, tuple or dict: it must be readable when nobody has the memory any more."""
    for wanted in (list(range(MANY)), tuple(range(MANY)), {str(k): k for k in range(MANY)}):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            got = pickle.loads(pickle.dumps(share(wanted), protocol))
            assert type(got) is type(wanted)
            assert got == wanted
    torch.save({"x": share([1] * MANY)[:3]}, tmp_path / "file")
    assert torch.load(tmp_path / "file", weights_only=False) == {"x": [1, 1, 1]}
    array = share(np.arange(5))
    assert pickle.loads(pickle.dumps(array)).tolist() == [0, 1, 2, 3, 4]


def test_copies_are_the_handle() -> None:
    """It cannot change and its items are copies already."""
    numbers = counted()
    mapping = share({k: k for k in range(MANY)})
    for obj in (numbers, mapping):
        assert copy.copy(obj) is obj
        assert copy.deepcopy([obj])[0] is obj
        assert share(obj) is obj


def test_the_buffer_is_sealed() -> None:
    """Nobody can write to it, not even through its descriptor."""
    numbers = counted()
    buffer = numbers._records.buffer
    assert buffer.view.readonly
    assert fcntl.fcntl(buffer.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    with pytest.raises(PermissionError):
        os.pwrite(buffer.fd, b"x", 0)


def test_memory_goes_with_the_last_view() -> None:
    """Mapping and descriptor are there once, and go when the last list, slice or array is gone."""
    before = mappings()
    got = share({"list": [torch.zeros(2)] * MANY, "dict": {k: k for k in range(MANY)}, "array": np.arange(9)})
    row, part = got["list"][3], got["dict"].values()
    array = got["array"][2:]
    assert mappings() > before
    gone = weakref.ref(got["list"]._records.buffer)
    del got
    gc.collect()
    assert gone() is not None
    assert (row.sum(), next(iter(part)), array[0]) == (0, 0, 2)
    del part
    gc.collect()
    assert gone() is None
    assert row.sum() == 0
    del row, array
    gc.collect()
    assert mappings() == before


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", METHODS)
def test_a_process_gets_the_memory(method: str) -> None:
    """By every way of starting: equal values, one mapping a buffer, and writes seen on both sides."""
    context = context_of(method)
    got = share(graph(MANY))
    answers = context.SimpleQueue()
    process = context.Process(target=share_programs.use, args=(got, MANY, answers))
    process.start()
    process.join(50)
    assert process.exitcode == 0
    assert answers.get() <= mappings()
    answers.close()
    process.close()
    check({**got, "parts": share(graph(MANY))["parts"]}, MANY)
    assert got["tensor"][3] == -1.0
    assert got["array"][4] == -2
    assert got["parts"][6]["row"].tolist() == [-3.0, 6.0, 6.0]
    assert got["parts"][6]["place"].tolist() == [6, -4]


def inode(obj: Any) -> int:
    """Which memfd a list or dict is in."""
    return share_programs.inode(obj)


def descriptors(obj: Any) -> int:
    """How many descriptors this process has of that memfd."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            found += os.stat(f"/proc/self/fd/{fd}").st_ino == inode(obj)
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("stock", [True, False], ids=["stock", "torchcrew"])
@pytest.mark.parametrize("kind", ["list", "slice", "dict"])
def test_queues_carry_handles(kind: str, stock: bool) -> None:
    """Stock's queue and ours: what arrives is the shared thing, not a copy of it."""
    import torchcrew.multiprocessing

    context: Any = (torch.multiprocessing if stock else torchcrew.multiprocessing).get_context("fork")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=share_programs.receive, args=(queue, answers))
    process.start()
    obj = share({k: str(k) for k in range(-1, MANY)}) if kind == "dict" else share([str(k) for k in range(MANY)])
    if kind == "slice":
        obj = obj[100:200]
    queue.put(obj)
    assert answers.get(timeout=20) == (type(obj).__name__, len(obj), obj[-1], inode(obj))
    process.join(20)
    for each in (queue, answers):
        each.close()
        each.join_thread()
    process.close()


@pytest.mark.timeout(60)
def test_what_a_queue_of_ours_carries_survives_its_maker() -> None:
    """A process shares, puts and is gone before anybody looks."""
    import torchcrew.multiprocessing

    context: Any = torchcrew.multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=share_programs.make, args=(queue, MANY))
    process.start()
    process.join(20)
    assert process.exitcode == 0
    got = queue.get(timeout=20)
    check(got, MANY)
    assert got["tensor"].is_shared()
    queue.close()
    queue.join_thread()
    process.close()


def test_what_comes_back_is_what_we_have() -> None:
    """A handle that returns to a process which has the buffer maps nothing and keeps no descriptor."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    obj = share([str(k) for k in range(MANY)])
    before = mappings()
    ours.send((obj, obj[3:5]))
    got = theirs.recv()
    assert got[0]._records is got[1]._records
    assert got[0]._records.buffer is obj._records.buffer
    assert got[1] == ["3", "4"]
    deadline = time.monotonic() + 5
    while descriptors(obj) > 1 and time.monotonic() < deadline:
        time.sleep(0.005)  # the standard library's server of descriptors closes its copy when it comes round to it
    assert descriptors(obj) == 1
    assert mappings() == before
    ours.close()
    theirs.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("loader", "method"),
    [
        pytest.param(loader, method, id=f"{name}-{method}", marks=pytest.mark.faults if method == "forkserver" else ())
        for name, loader in (("torchcrew", DataLoader), ("stock", torch.utils.data.DataLoader))
        for method in METHODS
        if (name, method) != ("stock", "zygote")  # it takes no context of that name
    ],
)
def test_datasets(loader: Any, method: str) -> None:
    """A list in a dataset, in our loader and in stock's, however the workers start, for several epochs."""
    data = Names(MANY)
    options = {"num_workers": 2, "batch_size": 300, "multiprocessing_context": method, "persistent_workers": True}
    made = loader(data, **options, shuffle=True)
    for _ in range(2):
        found = [batch for batch in made]  # noqa: C416 - kept, as a user may
        numbers = torch.cat([batch["id"] for batch in found])
        assert sorted(numbers.tolist()) == list(range(MANY))
        for batch in found:
            assert batch["name"] == [f"item {i}" for i in batch["id"].tolist()]
            assert torch.equal(batch["x"], batch["id"].double())
            assert torch.equal(batch["offset"], batch["id"])
    del made, found, batch


@pytest.mark.timeout(60)
def test_nothing_is_left_by_processes_that_are_killed() -> None:
    """A reader killed in the middle takes nothing with it; the memory goes with the last who has it."""
    obj = share([str(k) for k in range(MANY)])
    for method in ("fork", "zygote"):
        context = context_of(method)
        ready = context.Queue()
        process = context.Process(target=share_programs.hold, args=(obj, ready))
        process.start()
        assert ready.get(timeout=30)
        process.join(20)
        assert process.exitcode == -signal.SIGKILL
        ready.close()
        ready.join_thread()
        process.close()
        assert obj[-1] == str(MANY - 1)


def run(program: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.timeout(60)
def test_a_maker_killed_while_sharing_leaves_nothing() -> None:
    """Killed at the n-th write: there is no name that anybody would have to remove (see the leak check)."""
    program = """
import os, signal, sys, torch, torchcrew
from torchcrew.channel import shared_buffer
left, write = [int(sys.argv[1])], os.write
def killing(fd, data):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(fd, data)
os.write = killing
torchcrew.share([{"a": torch.zeros(9), "b": "x" * 900} for k in range(5000)])
"""
    before = set(os.listdir("/dev/shm"))
    for count in (0, 2):
        assert run(program, str(count)).returncode == -signal.SIGKILL
    assert set(os.listdir("/dev/shm")) <= before


# Errors ---------------------------------------------------------------------------------------------------------------


def test_the_budget() -> None:
    """More than the budget is an error that names it, before the memory is taken; nothing is left."""
    before = mappings()
    for obj in (["x" * 1000] * MANY, torch.zeros(MANY * 250), np.zeros(MANY * 250), [torch.zeros(250)] * 5 * MANY):
        assert len(share(obj, memory_budget="4MB")) == len(obj)
    copies: list[Any] = [[f"{k}" * 300 for k in range(MANY)], torch.zeros(MANY * 250), np.zeros(MANY * 250)]
    copies.append([torch.zeros(250) for k in range(MANY)])
    for obj in copies:
        with pytest.raises(ArenaFull, match="memory_budget") as caught:
            share(obj, memory_budget=100_000)
        del caught
    gc.collect()
    assert mappings() == before
    with pytest.raises(ValueError, match="memory_budget should be"):
        share(1, memory_budget="lots")


def test_the_budget_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TORCHCREW_BUDGET` holds for the classes, too."""
    monkeypatch.setenv("TORCHCREW_BUDGET", "50kB")
    with pytest.raises(ArenaFull, match="TORCHCREW_BUDGET"):
        torchcrew.SharedList("x" * 1000 for _ in range(100))
    with pytest.raises(ArenaFull):
        torchcrew.SharedDict(dict.fromkeys(range(100), "x" * 1000))


def test_items_that_cannot_be_pickled() -> None:
    """The error is pickle's; nothing is left behind, and nothing happens to what was shared before."""
    for bad in (threading.Lock(), lambda: 1):
        items = [*range(MANY), bad]
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            share(items)
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            share({"a": list(range(MANY)), "b": dict(enumerate(items))})
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            torchcrew.SharedList(items)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("limit", "number"),
    [("RLIMIT_FSIZE", 100_000), ("RLIMIT_NOFILE", 0), ("RLIMIT_AS", 0)],
    ids=["fsize", "nofile", "as"],
)
def test_under_limits(limit: str, number: int) -> None:
    """`ulimit -f`, `-n`, `-v`: an error that is caught, and everything works when there is room again."""
    program = f"""
import gc, os, resource, torch, torchcrew
torchcrew.share(1)
obj = ["x" * 1000 for k in range(200_000)] if "{limit}" == "RLIMIT_AS" else ["x" * 100 for k in range(5000)]
old = resource.getrlimit(resource.{limit})
number = {number}
if "{limit}" == "RLIMIT_NOFILE":
    number = max(map(int, os.listdir("/proc/self/fd")))
    while len(os.listdir("/proc/self/fd")) <= number:
        os.dup(0)
elif "{limit}" == "RLIMIT_AS":
    number = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (60 << 20)
for what in (obj, {{"t": torch.zeros(300_000)}} if "{limit}" != "RLIMIT_AS" else obj):
    resource.setrlimit(resource.{limit}, (number, old[1]))
    try:
        torchcrew.share(what)
    except (torchcrew.errors.TorchcrewError, OSError) as error:
        print(type(error).__name__)
    resource.setrlimit(resource.{limit}, old)
before = len(os.listdir("/proc/self/fd"))
assert torchcrew.share(obj) == obj
gc.collect()
assert len(os.listdir("/proc/self/fd")) == before
"""
    done = run(program)
    assert (done.returncode, done.stderr) == (0, "")
    name = {"RLIMIT_FSIZE": "ArenaFull", "RLIMIT_NOFILE": "TooManyDescriptors", "RLIMIT_AS": "OSError"}[limit]
    assert done.stdout.split() == [name, name]
