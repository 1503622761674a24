"""Property tests: whatever a batch is made of arrives as it was; whatever a user holds stays as it was."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchcrew.data import DataLoader

from .observe import describe

# A shrink of a failing example starts a loader each time, and each takes about 30 ms: no deadline, few examples.
FEW = int(os.environ.get("TORCHCREW_EXAMPLES", "12"))
MANY = 10 * FEW
QUICK = settings(max_examples=FEW, deadline=None, suppress_health_check=list(HealthCheck), database=None)
LONG = settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck), database=None)

DTYPES = (
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint16, torch.uint64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn),
)
# Above this many bytes a message does not travel inline, and a block is leased.
BLOCK_BYTES = 1 << 16
# Bytes of a canary batch: beyond the inline bound, and small beside the budget.
CANARY_SHAPE = (3, 24_000)


class Two(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any


class Given(torch.utils.data.Dataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


# ------------------------------------------------------------------------------------------ what a batch is made of


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A contiguous tensor with its own bit patterns, in any dtype."""
    count = int(np.prod(shape, dtype=int)) * torch.empty((), dtype=dtype).element_size()
    raw = (torch.arange(count, dtype=torch.int64) * 7 + seed) % (2 if dtype is torch.bool else 113)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1) if tensor.dim() else tensor


def sliced(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[1:] if tensor.dim() and tensor.shape[0] else tensor


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0).expand(3, *tensor.shape)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


LAYOUTS = (as_it_is, transposed, sliced, expanded, torch.squeeze)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple) | st.sampled_from([(20_000,), (3, 9_000), (0, 7)])
tensors = st.builds(
    lambda shape, dtype, seed, layout: layout(filled(shape, dtype, seed)),
    shapes,
    st.sampled_from(DTYPES),
    st.integers(0, 100),
    st.sampled_from(LAYOUTS),
)
arrays = st.builds(
    lambda shape, code, seed: (np.arange(int(np.prod(shape, dtype=int))) % 90 + seed).astype(code).reshape(shape),
    shapes,
    st.sampled_from("?bBhiqfdD"),
    st.integers(0, 9),
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=99)
leaves = tensors | tensors | arrays | plain
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Two, inner, inner)
        | st.builds(Record, inner, inner)
    ),
    max_leaves=12,
)


def ways_to_alias(tensor: torch.Tensor) -> Any:
    """The same memory several times in one batch."""
    flat = tensor.reshape(-1)
    half = flat.numel() // 2
    return {"it": tensor, "again": tensor, "tail": flat[half:], "all": flat, "most": flat[: half + 1], "as": [tensor]}


aliased = st.builds(lambda shape, dtype, seed: ways_to_alias(filled(shape, dtype, seed)), shapes,
                    st.sampled_from(DTYPES), st.integers(0, 100))  # fmt: skip
batches = nested | nested | aliased


def compacted(obj: Any) -> Any:
    """``obj`` with the one freedom that ours has (see the deviations): strides are not compared."""
    if isinstance(obj, dict):
        return {key: compacted(value) for key, value in obj.items() if key not in ("stride", "strides")}
    if isinstance(obj, (list, tuple)):
        return [compacted(value) for value in obj]
    return obj


def arrives_as_it_was(made: list[Any]) -> None:
    options: dict[str, Any] = {"batch_size": None, "num_workers": 1}
    ours = list(DataLoader(Given(made), **options))
    stock = list(torch.utils.data.DataLoader(Given(made), **options))
    for one, other, original in zip(ours, stock, made, strict=True):
        converted = torch.utils.data.default_convert(original)
        assert compacted(describe(one)) == compacted(describe(other))
        assert compacted(describe(one)) == compacted(describe(converted))


@pytest.mark.timeout(120)
@given(made=st.lists(batches, min_size=1, max_size=4))
@QUICK
def test_a_batch_arrives_as_it_was(made: list[Any]) -> None:
    """Values, dtypes, shapes, containers and aliasing equal the original's and stock's."""
    arrives_as_it_was(made)


@pytest.mark.faults
@pytest.mark.timeout(1200)
@given(made=st.lists(batches, min_size=1, max_size=6))
@LONG
def test_many_batches_arrive_as_they_were(made: list[Any]) -> None:
    """The same, with ten times the examples."""
    arrives_as_it_was(made)


# ------------------------------------------------------------------------------------------- what a user holds


class Canaries(torch.utils.data.Dataset[Any]):
    """Batch ``i`` of epoch base ``salt`` holds bytes that only it holds."""

    def __init__(self, salt: int, count: int) -> None:
        self.salt, self.count = salt, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return {"big": canary(self.salt, index), "small": torch.full((5,), index + self.salt), "index": index}


def canary(salt: int, index: int) -> torch.Tensor:
    start = (salt * 1_000_003 + index * 7_919) % 2**30
    return (torch.arange(CANARY_SHAPE[0] * CANARY_SHAPE[1], dtype=torch.int32) + start).reshape(CANARY_SHAPE)


class Held:
    """Something of a batch that a user keeps: a tensor, and what it must hold."""

    def __init__(self, view: torch.Tensor | np.ndarray[Any, Any], expected: torch.Tensor) -> None:
        self.view, self.expected = view, expected

    def check(self) -> None:
        seen = torch.from_numpy(self.view) if isinstance(self.view, np.ndarray) else self.view
        assert torch.equal(seen, self.expected)

    def write(self, value: int) -> None:
        self.view[...] = value
        self.expected = torch.full_like(self.expected, value)


def keep(batch: Any, salt: int, how: int) -> Held:
    """The whole batch, a row, a strided view, an array, a view through a storage, or its small tensor."""
    big, expected = batch["big"], canary(salt, batch["index"])
    if how == 0:
        return Held(big, expected)
    if how == 1:
        return Held(big[1], expected[1].clone())
    if how == 2:
        return Held(big[:, 5::7], expected[:, 5::7].clone())
    if how == 3:
        return Held(big.numpy()[2], expected[2].clone())
    if how == 4:
        return Held(torch.empty(0, dtype=torch.int32).set_(big.untyped_storage(), big.storage_offset(), (9,), (1,)),
                    expected.reshape(-1)[:9].clone())  # fmt: skip
    return Held(batch["small"], torch.full((5,), batch["index"] + salt))


class Holder:
    """Loaders, live iterators and held things, driven by a list of random actions."""

    def __init__(self, workers: int, persistent: bool) -> None:
        self.loaders = [
            DataLoader(Canaries(salt, 7), batch_size=None, num_workers=workers, persistent_workers=persistent)
            for salt in (1, 2)
        ]
        self.salts = (1, 2)
        self.live: dict[int, tuple[int, Iterator[Any]]] = {}
        self.held: list[Held] = []
        self.numbers = itertools.count()

    def start(self, which: int) -> None:
        """Start an epoch; of a persistent loader, the live one is the same iterator and starts again."""
        loader = self.loaders[which % 2]
        if loader.persistent_workers:
            self.live = {key: value for key, value in self.live.items() if value[0] != which % 2}
        self.live[next(self.numbers)] = (which % 2, iter(loader))

    def take(self, which: int, how: int) -> None:
        if not self.live:
            self.start(which)
        key = sorted(self.live)[which % len(self.live)]
        number, iterator = self.live[key]
        batch = next(iterator, None)
        if batch is None:
            del self.live[key]
            return
        assert torch.equal(batch["big"], canary(self.salts[number], batch["index"]))
        self.held.append(keep(batch, self.salts[number], how % 6))

    def act(self, action: str, which: int, how: int) -> None:
        if action == "take":
            self.take(which, how)
        elif action == "start" and len(self.live) < 3:
            self.start(which)
        elif action == "leave" and self.live:
            del self.live[sorted(self.live)[which % len(self.live)]]
        elif action == "collect":
            gc.collect()
        elif self.held and action == "drop":
            self.held.pop(which % len(self.held))
        elif self.held and action == "write":
            self.held[which % len(self.held)].write(how)
        for held in self.held:
            held.check()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "take", "take", "drop", "drop", "write", "start", "leave", "collect"]),
        st.integers(0, 50),
        st.integers(0, 50),
    ),
    min_size=10,
    max_size=60,
)


def holds(actions: list[tuple[str, int, int]], workers: int, persistent: bool) -> None:
    holder = Holder(workers, persistent)
    for action in actions:
        holder.act(*action)
    kept = holder.held
    del holder
    for held in kept:
        held.check()


@pytest.mark.timeout(120)
@given(actions=ACTIONS, workers=st.integers(1, 2), persistent=st.booleans())
@QUICK
def test_no_byte_of_a_held_batch_changes(actions: list[tuple[str, int, int]], workers: int, persistent: bool) -> None:
    """However batches are held, dropped, written to and re-read, over epochs and live iterators, no byte is wrong."""
    holds(actions, workers, persistent)


@pytest.mark.faults
@pytest.mark.timeout(1800)
@given(actions=ACTIONS, workers=st.integers(1, 3), persistent=st.booleans())
@LONG
def test_no_byte_changes_in_long_runs(actions: list[tuple[str, int, int]], workers: int, persistent: bool) -> None:
    """The same, with ten times the examples."""
    holds(actions, workers, persistent)
