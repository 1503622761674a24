"""The memory of `Value` and `Array`: few descriptors, always zero, never two owners, nothing left."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import sys
import threading
import time
import weakref
from multiprocessing import heap as stock_heap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocessing.sharedctypes_cases import (
    PATIENCE,
    finish,
    outcome,
    shared_descriptors,
)
from torchcrew.memory import libc
from torchcrew.multiprocessing.heap import BufferWrapper
from torchcrew.multiprocessing.sharedctypes import Array, RawArray, Value


def test_many_values_need_few_descriptors():
    """One arena serves many; what is dropped is closed."""
    values = [Value("i", number) for number in range(5000)]
    assert shared_descriptors() <= 12
    assert [value.value for value in values] == list(range(5000))
    del values
    gc.collect()
    assert shared_descriptors() == 0


def test_no_shared_memory_file():
    """Nothing of /dev/shm is made or mapped, locks included."""

    def seen() -> list[str]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in maps if "/dev/shm" in line] + sorted(os.listdir("/dev/shm"))

    before = seen()
    values = [Value("i"), Array("d", 1 << 20)]
    assert seen() == before
    del values


def test_memory_is_zero_when_it_is_used_again():
    """Blocks of every size, recycled in any order."""
    chance = random.Random(3)
    kept: list[Any] = []
    for _ in range(400):
        size = chance.choice([1, 63, 64, 65, 4096, 100_000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
        array = RawArray("B", size)
        assert not np.frombuffer(array, dtype=np.uint8).any()
        ctypes.memset(array, 0xFF, size)
        kept.append(array)
        if len(kept) > 12:
            kept.pop(chance.randrange(12))
    kept.clear()
    del array
    gc.collect()
    assert shared_descriptors() == 0


def test_blocks_are_aligned_and_apart():
    """To a cache line, so that SIMD loads and neighbours are no trouble."""
    arrays = [RawArray("b", size) for size in (0, 1, 7, 64, 65, 5000, 2 << 20)]
    addresses = [ctypes.addressof(array) for array in arrays]
    assert [address % 64 for address in addresses] == [0] * len(arrays)
    assert len(set(addresses)) == len(arrays)


def test_a_huge_array_costs_what_is_written():
    """Memory that nobody touched is not there."""
    array = RawArray("d", (8 << 30) // 8)
    array[len(array) - 1] = 1.5
    (arena, _, _), _ = array._wrapper._state
    assert os.fstat(arena.fd).st_blocks * 512 <= 16 * libc.PAGE
    assert array[len(array) - 1] == 1.5


def test_wrong_sizes_are_stocks_errors():
    """Negative and impossible."""
    for size in (-1, 2**63 - 1, 2**70, "1", None):
        ours, theirs = (
            outcome(lambda size=size: BufferWrapper(size)),
            outcome(lambda size=size: stock_heap.BufferWrapper(size)),
        )
        assert ours == theirs
    assert bytes(BufferWrapper(0).create_memoryview()) == b""


def test_what_a_child_may_use_is_not_given_out_again(ctx):
    """A Value dropped here while a child has it: the next Value here is another one. Stock's would be the same."""
    value, done, go = Value("i", 1), Value("i"), Value("i")
    process = ctx.Process(target=add_later, args=(value, go, done))
    process.start()
    address = ctypes.addressof(value.get_obj())
    del value
    process._args = ()
    gc.collect()
    fresh = [Value("i") for _ in range(50)]
    assert address not in [ctypes.addressof(new.get_obj()) for new in fresh]
    go.value = 1
    finish(process)
    assert done.value == 2
    assert [new.value for new in fresh] == [0] * 50


def add_later(value: Any, go: Any, done: Any) -> None:
    """When told, add one and say what it is then."""
    deadline = time.monotonic() + PATIENCE
    while not go.value and time.monotonic() < deadline:
        time.sleep(0.001)
    done.value = value.update(lambda old: old + 1)


def test_what_no_child_saw_is_given_out_again():
    """Otherwise a long-lived Value would pin ever more memory."""
    keep = Value("i")
    addresses = {ctypes.addressof(Value("i").get_obj()) for _ in range(200)}
    assert len(addresses) < 5
    assert shared_descriptors() == 1
    del keep


def test_a_child_allocates_in_arenas_of_its_own(fork):
    """Parent and child never give out the same block."""
    values = [Value("i", 1) for _ in range(3)]
    process = fork.Process(target=allocate_and_overwrite, args=([Value("i", 2)],))
    process.start()
    finish(process)
    assert [value.value for value in values] == [1] * 3
    assert Value("i").value == 0


def allocate_and_overwrite(inherited: list[Any]) -> None:
    """Much; and drop what was inherited, which is not this process's to free."""
    errors: list[Any] = []
    sys.unraisablehook = lambda unraisable: errors.append(unraisable.exc_value)
    own = [Value("i", 9) for _ in range(300)]
    dropped = weakref.ref(inherited[0].get_obj()._wrapper)
    inherited.clear()
    gc.collect()
    own += [Value("i", 9) for _ in range(300)]
    assert all(value.value == 9 for value in own)
    assert dropped() is None
    assert not errors


def test_the_heap_in_many_threads():
    """Allocated and freed at once, also by the garbage collector: no block twice, nothing left."""
    failures: list[int] = []

    def churn(seed: int) -> None:
        chance = random.Random(seed)
        kept: list[Any] = []
        for _ in range(300):
            array = RawArray("q", chance.randrange(1, 3000))
            array[0] = array[len(array) - 1] = seed
            cycle = [array]
            cycle.append(cycle)
            kept.append(cycle)
            if len(kept) > 8:
                old = kept.pop(chance.randrange(8))[0]
                if old[0] != seed or old[len(old) - 1] != seed:
                    failures.append(seed)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    gc.collect()
    assert not failures
    assert shared_descriptors() == 0
    assert not BufferWrapper._heap._arenas


def test_no_memory_is_an_error_and_leaves_nothing():
    """As under `ulimit -f`: an OSError, and no descriptor of it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            RawArray("b", 8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert shared_descriptors() == 0
