"""Scenarios about what a batch holds: every kind of sample, collated, single and in a list."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate as collate_with_map
from torch.utils.data._utils.collate import default_collate_fn_map

from .observe import describe, register, scenario, steps

__all__ = ("Made", "Pair", "Point", "as_list")


class Made(torch.utils.data.Dataset[Any]):
    """A dataset over what a function makes, made anew in each worker."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self.make = make
        self.samples: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.make())

    def __getitem__(self, index: int) -> Any:
        if self.samples is None:
            self.samples = self.make()
        return self.samples[index]


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Point:
    x: Any
    y: Any


class Plain:
    """An object with attributes, as a user's own batch class."""

    def __init__(self, x: Any, y: Any = None) -> None:
        self.x, self.y = x, y


class Pinnable(Plain):
    def pin_memory(self) -> Pinnable:
        return Pinnable(self.x, "pinned")


class Tagged(torch.Tensor):
    """A tensor subclass without anything of its own."""


class MyList(list[Any]):
    pass


class MyDict(dict[str, Any]):
    pass


class MyTuple(tuple[Any, ...]):
    __slots__ = ()


def as_list(samples: list[Any]) -> list[Any]:
    """The collate function of ragged data."""
    return list(samples)


def as_tuple_and_default(samples: list[Any]) -> Any:
    """The usual collate function of users: some work, then torch's."""
    return {"size": len(samples), "data": default_collate(samples), "in_worker": get_worker_info() is not None}


def look(make: Callable[[], list[Any]], loader_class: Any) -> Any:
    """Load the samples of ``make`` in all four usual ways."""
    ways: dict[str, dict[str, Any]] = {
        "collated": {"batch_size": 2},
        "single": {"batch_size": None},
        "list": {"batch_size": 3, "collate_fn": as_list},
        "own": {"batch_size": 2, "collate_fn": as_tuple_and_default, "pin_memory": True},
    }
    return {
        name: steps(loader_class(Made(make), num_workers=1, **options), with_rng=False, errors=1)
        for name, options in ways.items()
    }


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(np.prod(shape)) if shape else 1
    return torch.arange(count).reshape(shape).to(dtype)


def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Distinct bit patterns in any dtype, also those without arithmetic."""
    count = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    raw = (torch.arange(count) % 2 if dtype is torch.bool else torch.arange(count) * 3 % 119).to(torch.uint8)
    return raw.view(dtype).reshape(shape)


DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
NUMPY_DTYPES = "?bBhHiIlLefdgFDSUO"


def of_dtype(dtype: torch.dtype) -> list[Any]:
    return [filled(2, 3, dtype=dtype) for _ in range(3)]


def of_numpy_dtype(code: str) -> list[Any]:
    if code == "O":
        return [np.array([None, {"a": i}], dtype=object) for i in range(3)]
    return [np.arange(6).reshape(2, 3).astype(code) + (i if code not in "?SU" else np.zeros((), code)[()]) * 1
            if code not in "SU" else np.array([["a", f"b{i}"]]).astype(code) for i in range(3)]  # fmt: skip


def numpy_scalar(code: str) -> list[Any]:
    return [np.dtype(code).type(i) for i in range(3)]


def quantized() -> list[Any]:
    return [torch.quantize_per_tensor(ramp(2, 3) + i, 0.5, 2, torch.qint8) for i in range(3)]


def same_tensor_twice() -> list[Any]:
    return [(one := ramp(4) + i, one) for i in range(3)]


def same_list_twice() -> list[Any]:
    return [[one := [ramp(2) + i, i], one] for i in range(3)]


def overlapping_views() -> list[Any]:
    return [((base := ramp(12) + i)[:8], base[4:]) for i in range(3)]


def base_and_view() -> list[Any]:
    return [((base := ramp(12) + i), base[4:6], base.view(3, 4), base.view(3, 4).t()) for i in range(3)]


def views_of_two_dtypes() -> list[Any]:
    return [((base := ramp(4) + i), base.view(torch.int32), base.view(torch.uint8)) for i in range(3)]


def huge_storage() -> list[Any]:
    return [(torch.zeros(1_000_000) + i)[17:21] for i in range(3)]


def channels_last() -> list[Any]:
    return [ramp(2, 3, 4, 5).contiguous(memory_format=torch.channels_last) + i for i in range(3)]


def subclass_with_attribute() -> list[Any]:
    made = []
    for i in range(3):
        tensor = (ramp(3) + i).as_subclass(Tagged)
        tensor.tag = f"tag {i}"  # type: ignore[attr-defined]
        made.append(tensor)
    return made


def tensor_with_attribute() -> list[Any]:
    made = []
    for i in range(3):
        tensor = ramp(3) + i
        tensor.tag = f"tag {i}"  # type: ignore[attr-defined]
        made.append(tensor)
    return made


def with_extra(kind: type[Any]) -> list[Any]:
    made = []
    for i in range(3):
        one = kind({"a": i, "b": ramp(2)}) if issubclass(kind, dict) else kind([i, ramp(2)])
        if hasattr(one, "__dict__"):
            one.extra = f"extra {i}"
        made.append(one)
    return made


def default_dicts() -> list[Any]:
    return [collections.defaultdict(list, {"a": [ramp(2) + i]}) for i in range(3)]


def read_only_arrays() -> list[Any]:
    made = [np.arange(6) + i for i in range(3)]
    for one in made:
        one.setflags(write=False)
    return made


def structured() -> list[Any]:
    return [np.array([(i, 2.0)], dtype=[("a", "i4"), ("b", "f8")]) for i in range(3)]


def masked() -> list[Any]:
    return [np.ma.masked_array([1, 2, i], mask=[False, True, False]) for i in range(3)]


def sparse_in_dict() -> list[Any]:
    return [{"s": ramp(3, 3).add(i).to_sparse(), "c": ramp(3, 3).add(i).to_sparse_csr()} for i in range(3)]


def nested_tensors() -> list[Any]:
    return [torch.nested.nested_tensor([ramp(2), ramp(3) + i]) for i in range(3)]


def deep() -> list[Any]:
    return [{"a": [(ramp(2) + i, {"b": Pair(i, [f"s{i}", ramp(1)])})], "n": float(i)} for i in range(3)]


def objects_with_tensors() -> list[Any]:
    return [Plain(ramp(20_000) + i, [Plain(ramp(3)), "text"]) for i in range(3)]


def shared_samples() -> list[Any]:
    return [(ramp(4) + i).share_memory_() for i in range(3)]


SAMPLES: dict[str, Callable[[], list[Any]]] = {
    "ints": lambda: [3, -1, 2**40],
    "huge_ints": lambda: [2**63 - 1, 2**70, 1],
    "floats": lambda: [0.5, float("nan"), -0.0],
    "bools": lambda: [True, False, True],
    "mixed_numbers": lambda: [1, 2.5, True],
    "complex_numbers": lambda: [1j, 2 + 1j, 3.0 + 0j],
    "strings": lambda: ["a", "", "ü" * 5],
    "bytes": lambda: [b"a", b"", b"\xff" * 5],
    "bytearrays": lambda: [bytearray(b"a"), bytearray(b"b"), bytearray(b"c")],
    "none": lambda: [None, None, None],
    "sets": lambda: [{1}, {2}, {3}],
    "ranges": lambda: [range(3), range(3), range(3)],
    "lists": lambda: [[1, 2.0, "x"], [3, 4.0, "y"], [5, 6.0, "z"]],
    "uneven_lists": lambda: [[1, 2], [3], [4, 5]],
    "empty_lists": lambda: [[], [], []],
    "tuples": lambda: [(1, ramp(2)), (3, ramp(2)), (5, ramp(2))],
    "dicts": lambda: [{"a": i, "b": ramp(2, 2) + i, 3: "x"} for i in range(3)],
    "empty_dicts": lambda: [{}, {}, {}],
    "dicts_with_other_keys": lambda: [{"a": 1}, {"b": 1}, {"a": 2, "b": 3}],
    "ordered_dicts": lambda: [collections.OrderedDict([("z", i), ("a", ramp(2))]) for i in range(3)],
    "default_dicts": default_dicts,
    "user_dicts": lambda: [collections.UserDict({"a": i, "b": ramp(2)}) for i in range(3)],
    "user_lists": lambda: [collections.UserList([i, ramp(2)]) for i in range(3)],
    "deques": lambda: [collections.deque([i, 2]) for i in range(3)],
    "namedtuples": lambda: [Pair(i, {"t": ramp(2) + i}) for i in range(3)],
    "dataclasses": lambda: [Point(i, ramp(2) + i) for i in range(3)],
    "plain_objects": objects_with_tensors,
    "pinnable_objects": lambda: [Pinnable(ramp(2) + i) for i in range(3)],
    "list_subclass": functools.partial(with_extra, MyList),
    "dict_subclass": functools.partial(with_extra, MyDict),
    "tuple_subclass": functools.partial(with_extra, MyTuple),
    "deep": deep,
    "empty_tensors": lambda: [torch.empty(0), torch.empty(0), torch.empty(0)],
    "empty_tensors_with_shape": lambda: [torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 3)],
    "scalars": lambda: [torch.tensor(1.5), torch.tensor(2.5), torch.tensor(3.5)],
    "unequal_tensors": lambda: [ramp(2), ramp(3), ramp(4)],
    "unequal_dtypes": lambda: [ramp(2), ramp(2).int(), ramp(2).double()],
    "tensor_and_int": lambda: [torch.tensor(1), 2, 3],
    "large_tensors": lambda: [ramp(3, 10_000) + i for i in range(3)],
    "transposed": lambda: [(ramp(3, 4) + i).t() for i in range(3)],
    "channels_last": channels_last,
    "expanded": lambda: [(ramp(1, 3) + i).expand(4, 3) for i in range(3)],
    "huge_storage": huge_storage,
    "tensor_subclass": lambda: [(ramp(3) + i).as_subclass(Tagged) for i in range(3)],
    "subclass_with_attribute": subclass_with_attribute,
    "tensor_with_attribute": tensor_with_attribute,
    "requires_grad_leaves": lambda: [(ramp(2) + i).requires_grad_() for i in range(3)],
    "shared_samples": shared_samples,
    "sparse_coo": lambda: [(ramp(3, 3) + i).to_sparse() for i in range(3)],
    "sparse_csr": lambda: [(ramp(3, 3) + i).to_sparse_csr() for i in range(3)],
    "sparse_in_dict": sparse_in_dict,
    "nested_tensors": nested_tensors,
    "quantized": quantized,
    "meta_tensors": lambda: [torch.empty(2, device="meta") for _ in range(3)],
    "same_tensor_twice": same_tensor_twice,
    "same_list_twice": same_list_twice,
    "overlapping_views": overlapping_views,
    "base_and_view": base_and_view,
    "views_of_two_dtypes": views_of_two_dtypes,
    "read_only_arrays": read_only_arrays,
    "transposed_arrays": lambda: [np.arange(6).reshape(2, 3).T + i for i in range(3)],
    "negative_strides": lambda: [(np.arange(5) + i)[::-1] for i in range(3)],
    "broadcast_arrays": lambda: [np.broadcast_to(np.arange(3) + i, (4, 3)) for i in range(3)],
    "large_arrays": lambda: [np.arange(30_000) + i for i in range(3)],
    "big_endian_arrays": lambda: [np.arange(3, dtype=">i4") + i for i in range(3)],
    "scalar_arrays": lambda: [np.array(i) for i in range(3)],
    "empty_arrays": lambda: [np.empty((0, 2)) for _ in range(3)],
    "structured_arrays": structured,
    "record_arrays": lambda: [one.view(np.recarray) for one in structured()],
    "masked_arrays": masked,
    "datetimes": lambda: [np.datetime64("2020-01-01") + i for i in range(3)],
    "memoryviews_as_bytes": lambda: [bytes(70_000), bytes(3), b"x" * 100_000],
    "functions": lambda: [len, as_list, dict],
    "dtypes_and_devices": lambda: [torch.float32, torch.device("cpu"), torch.Size([1, 2])],
    "slices": lambda: [slice(1, 2), slice(None), slice(3)],
    "parameters": lambda: [torch.nn.Parameter(ramp(2) + i) for i in range(3)],
    "buffers": lambda: [torch.nn.Parameter(ramp(2) + i, requires_grad=False) for i in range(3)],
    "exceptions_as_data": lambda: [ValueError("a", 1), KeyError("b"), OSError(2, "no")],
}

for _name, _make in SAMPLES.items():
    register(f"samples_{_name}", functools.partial(look, _make))
for _dtype in DTYPES:
    register(
        f"dtype_{str(_dtype).removeprefix('torch.')}", functools.partial(look, functools.partial(of_dtype, _dtype))
    )
for _code in NUMPY_DTYPES:
    _label = np.dtype(_code).name
    register(f"numpy_{_code}_{_label}", functools.partial(look, functools.partial(of_numpy_dtype, _code)))
for _code in "?bBhHiIlLefdFD":
    register(f"numpy_scalar_{_code}", functools.partial(look, functools.partial(numpy_scalar, _code)))


# ------------------------------------------------------------------------------------------- single scenarios


def collate_points(points: list[Point], *, collate_fn_map: Any = None) -> Point:
    return Point(*(collate_with_map([getattr(p, n) for p in points], collate_fn_map=collate_fn_map) for n in "xy"))


@scenario
def registered_type(loader_class: Any) -> Any:
    """A type that is registered with default_collate_fn_map lands as its own function says."""
    default_collate_fn_map[Point] = collate_points
    return steps(loader_class(Made(SAMPLES["dataclasses"]), batch_size=3, num_workers=1))


@scenario
def registered_subclass(loader_class: Any) -> Any:
    """Registering a base class catches subclasses; a function that stacks with its own dtype is kept."""
    default_collate_fn_map[Tagged] = lambda batch, *, collate_fn_map=None: torch.stack(batch).double()
    return steps(loader_class(Made(SAMPLES["tensor_subclass"]), batch_size=3, num_workers=1))


def two_collations(samples: list[Any]) -> Any:
    """Collates twice, cuts the one and keeps parts of both: blocks are used partly."""
    one, other = default_collate(samples), default_collate([sample * 2 for sample in samples])
    return [one[:1], other[1:], one + other, default_collate(samples[:1])]


@scenario
def strided_arrays(loader_class: Any) -> Any:
    """An array with gaps is compact after pickling on both sides (as a tensor it is a deviation)."""
    samples = [(np.arange(12) + i)[::2] for i in range(3)]
    return [steps(loader_class(samples, num_workers=1, batch_size=3, collate_fn=f)) for f in (as_list, None)]


@scenario
def collate_twice(loader_class: Any) -> Any:
    return steps(loader_class(Made(SAMPLES["large_tensors"]), batch_size=3, num_workers=1, collate_fn=two_collations))


def keeps_batches(samples: list[Any], kept: list[Any] = []) -> Any:  # noqa: B006 - the worker's own cache
    kept.append(default_collate(samples))
    return kept[0], kept[-1]


@scenario
def worker_keeps_its_batches(loader_class: Any) -> Any:
    """A worker that sends its first batch again and again still sends the first batch."""
    samples = [ramp(3, 10_000) + i for i in range(6)]
    return steps(loader_class(samples, batch_size=1, num_workers=1, collate_fn=keeps_batches))


def writes_after(samples: list[Any], buffer: list[Any] = []) -> Any:  # noqa: B006 - the worker's own buffer
    if not buffer:
        buffer.append(torch.zeros(20_000))
    buffer[0].fill_(float(samples[0]))
    return buffer[0].numpy()


@scenario
def worker_reuses_its_array(loader_class: Any) -> Any:
    """numpy data is a snapshot of the moment at which the batch is pickled."""
    loader = loader_class([1, 2], batch_size=1, num_workers=2, collate_fn=writes_after)
    return steps(loader)


@scenario
def batches_are_writable_and_stay(loader_class: Any) -> Any:
    """Every batch of an epoch is kept, written to, and read again at the end."""
    loader = loader_class([ramp(20_000) + i for i in range(8)], batch_size=2, num_workers=2)
    kept = list(loader)
    for i, batch in enumerate(kept):
        batch[0].mul_(2)
        batch.numpy()[1, :3] = i
    view = kept[2][1, 5:9]
    del loader
    told = describe(kept)
    del kept
    return told, describe(view)


@scenario
def storage_of_a_batch(loader_class: Any) -> Any:
    """A collated batch has a storage of exactly its own bytes, from its start."""
    dicts = [{"a": ramp(3) + i, "b": ramp(5, dtype=torch.uint8)} for i in range(4)]
    batch = next(iter(loader_class(dicts, batch_size=2, num_workers=1)))
    return {k: (v.untyped_storage().nbytes(), v.storage_offset(), v.data_ptr() % 64 >= 0) for k, v in batch.items()}


@scenario
def huge_storage_sends_its_view(loader_class: Any) -> Any:
    """In a list, the view has its values; what it is a view of is not compared (see the deviations)."""
    loader = loader_class(Made(huge_storage), batch_size=3, num_workers=1, collate_fn=as_list)
    return [describe([one.clone() for one in batch]) for batch in loader]


@scenario
def autograd_on_a_batch(loader_class: Any) -> Any:
    """A batch works in a graph, also after the loader is gone."""
    batch = next(iter(loader_class([ramp(3) + i for i in range(4)], batch_size=4, num_workers=1)))
    weight = torch.ones(3, requires_grad=True)
    loss = (batch * weight).pow(2).sum()
    del batch
    loss.backward()
    batch = next(iter(loader_class([ramp(3) + i for i in range(4)], batch_size=4, num_workers=1)))
    batch.requires_grad_()
    batch.sum().backward()
    return describe([weight.grad, batch.grad])


@scenario
def out_of_a_queue(loader_class: Any) -> Any:
    """A batch is sent on through a stock queue, into the same process and a child."""
    queue = torch.multiprocessing.get_context("fork").Queue()
    batch = next(iter(loader_class([ramp(20_000) + i for i in range(4)], batch_size=4, num_workers=1)))
    queue.put(batch)
    there = queue.get(timeout=10)
    there[0, 0] = 99
    told = describe(there), describe(batch.clone()), tuple(batch.shape)
    queue.close()
    queue.join_thread()
    return told


@scenario
def saved_batch(loader_class: Any) -> Any:
    """torch.save of a batch writes what stock's writes; of one of its tensors, only that one."""
    import io

    batch = next(iter(loader_class([{"a": ramp(1000), "b": ramp(10)} for _ in range(4)], batch_size=4, num_workers=1)))
    sizes = []
    for one in (batch, batch["b"]):
        file = io.BytesIO()
        torch.save(one, file)
        sizes.append(file.tell())
        file.seek(0)
        sizes.append(describe(torch.load(file)))
    return sizes


@scenario
def deep_copies(loader_class: Any) -> Any:
    """copy, deepcopy, pickle, clone and a new shape of a batch."""
    import copy
    import pickle

    batch = next(iter(loader_class([{"a": ramp(4) + i} for i in range(4)], batch_size=2, num_workers=1)))
    made = [copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), batch["a"].clone()]
    return [describe(made), describe(batch["a"].resize_(2, 2)), describe(batch["a"].set_())]


@scenario
def growing_a_batch(loader_class: Any) -> Any:
    """Neither a collated batch nor a tensor of a list can grow in place; both can shrink."""
    told: list[Any] = []
    for options in ({}, {"collate_fn": as_list}):
        batch = next(iter(loader_class([ramp(20_000)], num_workers=1, **options)))
        tensor = batch[0] if isinstance(batch, list) else batch
        try:
            tensor.resize_(80_000)
        except RuntimeError as error:
            told.append(str(error))
        told.append((describe(tensor.resize_(3)), tensor.untyped_storage().resizable()))
    return told
