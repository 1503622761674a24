"""Whoever holds a batch, a view of it, or a forked copy of it, sees the right values, for as long as it is held."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_sharer
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from tests.data.survival import ELEMENTS, MB, Rows, check, expected, row
from torchcrew import memory
from torchcrew.data import DataLoader
from torchcrew.memory import lease

pytestmark = pytest.mark.timeout(20)

SIZE = 4  # samples in a batch: 160 kB


def loader(length: int = 160, **options: Any) -> Any:
    return DataLoader(Rows(length), batch_size=SIZE, **{"num_workers": 2, **options})


def churn(batches: int = 40, **options: Any) -> None:
    """Load and drop, so that every block that can be recycled is."""
    for number, batch in enumerate(loader(batches * SIZE, **options)):
        check(batch, number, SIZE)
        del batch


def ended() -> bool:
    """Whether nothing is lent any more, forked children included (private: no block shows it by itself)."""
    gc.collect()
    lease.sweep()
    return not lease._open and not lease._deferred


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_batch_held_for_an_epoch(workers: int) -> None:
    """list(loader) is right; 160 blocks of 160 kB are on loan at its end."""
    for number, batch in enumerate(list(loader(640, num_workers=workers))):
        check(batch, number, SIZE)


@pytest.mark.parametrize("persistent", [False, True])
def test_every_second_batch_dropped(persistent: bool) -> None:
    """Blocks return between blocks that are held, over three epochs."""
    held: list[tuple[int, torch.Tensor]] = []
    batches = loader(persistent_workers=persistent)
    for _ in range(3):
        for number, batch in enumerate(batches):
            check(batch, number, SIZE)
            if number % 2:
                held.append((number, batch))
            del batch
    for number, batch in held:
        check(batch, number, SIZE)


@pytest.mark.parametrize("seed", range(3))
def test_batches_of_many_sizes_held_at_random(seed: int) -> None:
    """Blocks of different sizes are cut, merged and cut again; what is held never changes."""

    class Ragged(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> torch.Tensor:
            return row(index, random.Random(index).randrange(1, 200_000))

    draw = random.Random(seed)
    held: dict[int, torch.Tensor] = {}
    for index, sample in enumerate(DataLoader(Ragged(), batch_size=None, num_workers=2)):
        held[index] = sample
        del sample
        while len(held) > draw.randrange(1, 40):
            gone = draw.choice(list(held))
            assert torch.equal(held[gone], row(gone, random.Random(gone).randrange(1, 200_000)))
            del held[gone]


def _views(batch: torch.Tensor) -> dict[str, Any]:
    return {
        "row": batch[1],
        "row of a row": batch[1:][0][5:],
        "numpy": batch.numpy()[1],
        "memoryview": memoryview(batch.numpy())[1:],
        "dlpack": torch.from_dlpack(batch)[1],
        "storage": batch.untyped_storage(),
        "transposed": batch.t(),
        "saved for backward": (batch[1].double() * torch.ones(ELEMENTS, requires_grad=True)).sum(),
    }


def test_views_outlive_batch_iterator_loader_and_workers() -> None:
    """Views of views, arrays, DLPack, storages: each keeps its block alone."""
    batches = loader()
    iterator = iter(batches)
    kept = [_views(next(iterator)) for _ in range(3)]
    singles = [{name: kept[number].pop(name)} for number in range(3) for name in ("row", "numpy", "storage")[number:]]
    del kept[1]
    pids = [worker.pid for worker in iterator._workers]
    del iterator, batches
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    memory.trim()
    churn()
    memory.trim()
    gc.collect()
    churn()
    first = expected(0, SIZE)
    views = kept[0]
    assert torch.equal(views["row of a row"], first[1][5:])
    assert torch.equal(torch.from_numpy(np.asarray(views["memoryview"])), first[1:])
    assert torch.equal(views["dlpack"], first[1])
    assert torch.equal(views["transposed"], first.t())
    views["saved for backward"].backward()
    assert torch.equal(singles[0]["row"], first[1])
    assert (singles[1]["numpy"] == first[1].numpy()).all()
    assert torch.equal(torch.tensor([], dtype=torch.int32).set_(singles[2]["storage"]), first.reshape(-1))
    third = expected(2, SIZE)
    assert torch.equal(torch.tensor([], dtype=torch.int32).set_(singles[-1]["storage"]), third.reshape(-1))


def test_the_gradient_reads_a_batch_that_was_dropped() -> None:
    """Autograd's saved tensors hold the block too."""
    factor = torch.ones(ELEMENTS, dtype=torch.float64, requires_grad=True)
    iterator = iter(loader(collate_fn=_doubles))
    loss = (next(iterator)[1] * factor).sum()
    del iterator
    churn()
    loss.backward()
    assert torch.equal(factor.grad, row(1).double())  # type: ignore[arg-type]


def _doubles(samples: list[torch.Tensor]) -> torch.Tensor:
    return default_collate([sample.double() for sample in samples])


def test_when_the_last_view_is_gone_everything_returns() -> None:
    """Nothing stays on loan behind the user's back."""
    held = list(loader())
    views = [batch[1] for batch in held]
    del held
    assert not ended()
    views.clear()
    assert ended()


@pytest.mark.parametrize("custom", [False, True], ids=["default collate", "custom collate"])
def test_batches_are_written_to_in_place(custom: bool) -> None:
    """A delivered batch is the user's to change; no other batch, held or to come, sees it."""
    held = []
    for number, batch in enumerate(loader(collate_fn=torch.stack if custom else None)):
        check(batch, number, SIZE)
        batch.neg_().add_(number)
        held.append(batch)
        if len(held) > 8:
            old = number - 8
            assert torch.equal(held.pop(0), number - 8 - expected(old, SIZE))
        del batch


def test_a_batch_is_sent_on_through_a_stock_queue() -> None:
    """To a child of the user's, which sees the values after the user dropped them and the loader went on."""
    context = torch.multiprocessing.get_context("fork")
    there: Any = context.Queue()
    back: Any = context.Queue()
    child = context.Process(target=_answer, args=(there, back))
    child.start()
    iterator = iter(loader(320))
    for number in range(20):
        there.put((number, next(iterator)))
    for number, batch in enumerate(iterator, 20):
        check(batch, number, SIZE)
        del batch
    there.put(None)
    assert back.get(timeout=10) == 20
    child.join(5)
    for one in (there, back):
        one.close()
        one.join_thread()
    resource_sharer.stop()  # the standard library's thread, which hands out the queue's descriptors


def _answer(there: Any, back: Any) -> None:
    torch.set_num_threads(1)
    batches = []
    while (item := there.get(timeout=10)) is not None:
        batches.append(item)
    for number, batch in batches:
        check(batch, number, SIZE)
    back.put(len(batches))


@contextlib.contextmanager
def forked(body: Any) -> Iterator[Any]:
    """A child (plain ``os.fork``) that runs ``body(go)`` when it is told, and is ended in any case.

    Yields a function that tells it and returns its exit status.
    """
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.close(go)
            signal.alarm(15)
            os.read(ready, 1)
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
            body()
            status = 0
        os._exit(status)
    os.close(ready)
    status: list[int] = []

    def finish() -> int:
        os.write(go, b"!")
        status.append(os.waitpid(pid, 0)[1])
        return status[0]

    try:
        yield finish
    finally:
        os.close(go)
        if not status:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_fork_in_the_consumer_while_leases_are_open() -> None:
    """The child sees what it inherited after the parent dropped it and the loader went on; then the blocks return."""
    iterator = iter(loader(480))
    held = [next(iterator) for _ in range(5)]
    views = [next(iterator)[2]]

    def read() -> None:
        for number, batch in enumerate(held):
            check(batch, number, SIZE)
        assert torch.equal(views[0], row(5 * SIZE + 2))

    with forked(read) as finish:
        held.clear()
        views.clear()
        for number, batch in enumerate(iterator, 6):
            check(batch, number, SIZE)
            del batch
        churn()
        assert not ended()
        assert finish() == 0
    assert ended()


def test_a_fork_s_end_lets_a_full_budget_go_on() -> None:
    """Blocks that a forked child holds count; when it is killed, a loader that waits for room goes on."""
    batches = DataLoader(Rows(24, MB // 4), num_workers=1, memory_budget="6MiB", persistent_workers=True)
    iterator = iter(batches)
    held = [next(iterator) for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        time.sleep(0.5)
        os._exit(len(held) - 3)
    held.clear()
    rest = [int(batch[0, 0]) // 1_000_003 for batch in iterator]
    assert rest == list(range(3, 24))
    assert os.waitpid(pid, 0)[1] == 0


def test_a_grandchild_keeps_what_its_parent_inherited() -> None:
    """The block is held until the last process that inherited it is gone."""
    iterator = iter(loader(480))
    held = [next(iterator) for _ in range(3)]
    ready, told = os.pipe()
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        if os.fork():
            os._exit(0)
        os.close(go)
        signal.alarm(15)
        os.read(wait, 1)
        torch.set_num_threads(1)
        right = all(torch.equal(batch, expected(number, SIZE)) for number, batch in enumerate(held))
        os.write(told, b"right" if right else b"wrong")
        os._exit(0)
    os.close(told)
    os.waitpid(pid, 0)
    held.clear()
    for batch in iterator:
        del batch
    churn()
    os.write(go, b"!")
    assert os.read(ready, 5) == b"right"
    for fd in (ready, wait, go):
        os.close(fd)
    deadline = time.monotonic() + 2
    while not ended() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended()


class Caching(Dataset[Any]):
    """Collates its batches itself, once, keeps them, and returns the same objects again."""

    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            rows = [row(index * SIZE + k) for k in range(SIZE)]
            self.cache[index] = {"x": default_collate(rows), "again": default_collate([rows[0]])}
        return self.cache[index]


def test_a_dataset_that_caches_collated_batches_in_the_worker() -> None:
    """They lie in blocks that were sent and returned; the worker still looks at them, so nobody overwrites them."""
    batches = DataLoader(Caching(), batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in range(6):
        held = []
        for index, batch in enumerate(batches):
            check(batch["x"], index, SIZE)
            assert torch.equal(batch["again"][0], row(index * SIZE))
            if epoch % 2:
                held.append(batch)
            del batch
        for index, batch in enumerate(held):
            check(batch["x"], index, SIZE)


class CachingCollate:
    """Returns the first batch of its worker again, beside each new one."""

    first: torch.Tensor | None = None

    def __call__(self, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = default_collate(samples)
        if self.first is None:
            self.first = batch
        return {"new": batch, "first": self.first, "part": self.first[1]}


def test_a_collate_function_that_sends_its_first_batch_again_and_again() -> None:
    """An old block's tensors and a new block's in one message."""
    for number, batch in enumerate(loader(collate_fn=CachingCollate())):
        check(batch["new"], number, SIZE)
        check(batch["first"], number % 2, SIZE)
        assert torch.equal(batch["part"], row(number % 2 * SIZE + 1))
        del batch


class InThreads(Dataset[Any]):
    """Collates its batches in threads, ahead of the requests."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.pool: Any = None
        self.made: dict[int, Any] = {}

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if self.pool is None:
            self.pool = concurrent.futures.ThreadPoolExecutor(3)
        for k in range(index, index + 2 * self.ahead + 1):
            if k not in self.made:
                self.made[k] = self.pool.submit(_collated, k)
        return self.made.pop(index).result()


def _collated(number: int) -> dict[str, Any]:
    rows = [row(number * SIZE + k) for k in range(SIZE)]
    return {"x": default_collate(rows), "number": number, "rows": rows}


@pytest.mark.parametrize("ahead", [0, 4])
def test_default_collate_in_threads_of_the_worker(ahead: int) -> None:
    """Threads allocate in the block while messages are made of it and sent."""
    held: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for index, batch in enumerate(DataLoader(InThreads(ahead), batch_size=None, num_workers=2)):
        assert batch["number"] == index
        check(batch["x"], index, SIZE)
        held.put(batch)
        if index >= 8:
            old = held.get()
            check(old["x"], old["number"], SIZE)
            assert all(torch.equal(r, row(old["number"] * SIZE + k)) for k, r in enumerate(old["rows"]))
        del batch


def test_batches_dropped_in_other_threads() -> None:
    """Blocks return from any thread, while the loader's thread goes on."""
    handed: queue.Queue[Any] = queue.Queue(maxsize=6)
    wrong: list[BaseException] = []

    def drop() -> None:
        while (item := handed.get()) is not None:
            try:
                check(item[1], item[0], SIZE)
            except BaseException as error:
                wrong.append(error)
            del item

    threads = [threading.Thread(target=drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number, batch in enumerate(loader(400)):
        handed.put((number, batch))
        del batch
    for _ in threads:
        handed.put(None)
    for thread in threads:
        thread.join(10)
    assert not wrong


def test_batches_in_a_garbage_cycle_with_their_iterator() -> None:
    """The collector clears weak references before it finalizes; nothing of ours may be gone too early."""
    seen: list[bool] = []

    class Trainer:
        def __init__(self) -> None:
            self.me = self
            self.iterator = iter(loader(persistent_workers=True))
            self.batch = next(self.iterator)
            self.view = self.batch[1:]

        def __del__(self) -> None:
            seen.append(torch.equal(self.batch, expected(0, SIZE)) and torch.equal(self.view, expected(0, SIZE)[1:]))

    for _ in range(3):
        Trainer()
        gc.collect()
        churn(8)
    assert seen == [True] * 3
