"""Wrong options: stock's texts for stock's, the name and what is allowed for ours; loaders in unusual places."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import threading
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset

from tests.data.survival import Rows, Stream, check, outcome, worker_pids
from torchcrew.data import DataLoader
from torchcrew.memory import lease

pytestmark = pytest.mark.timeout(20)

Stock = torch.utils.data.DataLoader


def nothing() -> None: ...


WRONG: tuple[dict[str, Any], ...] = (
    {"num_workers": -1},
    {"num_workers": 1, "timeout": -1},
    {"prefetch_factor": 2},
    {"num_workers": 1, "prefetch_factor": -1},
    {"persistent_workers": True},
    {"num_workers": 1, "multiprocessing_context": "bad"},
    {"num_workers": 1, "multiprocessing_context": object()},
    {"num_workers": 0, "multiprocessing_context": "fork"},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 2, "batch_sampler": [[0]]},
    {"shuffle": True, "sampler": [0]},
    {"batch_size": -1},
    {"batch_size": "2"},
    {"drop_last": 3},
    {"dataset": Stream(nothing), "shuffle": True},
    {"dataset": Stream(nothing), "sampler": [0]},
    {"dataset": Stream(nothing), "batch_sampler": [[0]]},
    {"no_such_option": 1},
    {"num_workers": "2"},
    {"num_workers": 1.5},
)


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_wrong_options_of_stock_s(options: dict[str, Any]) -> None:
    """Type and text as stock's."""
    both = [outcome(functools.partial(cls, **{"dataset": Rows(4), **options})) for cls in (Stock, DataLoader)]
    assert both[0].kind
    assert both[1] == both[0]


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_attributes_that_cannot_be_set(name: str) -> None:
    """Stock's guard against changes after construction."""
    both = []
    for cls in (Stock, DataLoader):
        with pytest.raises(ValueError, match=name) as caught:
            setattr(cls(Rows(4), num_workers=1), name, None)
        both.append(str(caught.value))
    assert both[0] == both[1]


@pytest.mark.parametrize(
    "budget", [0, -1, "", "lots", "2 parsecs", "-5MB", "1.2.3GB", ".", "GB", True, [], float("nan"), float("inf"), 0.5]
)
def test_a_wrong_memory_budget(budget: Any) -> None:
    """A ValueError at construction that names the option and what it allows."""
    with pytest.raises(ValueError, match="memory_budget should be a positive number of bytes or a size such as '2GB'"):
        DataLoader(Rows(4), num_workers=1, memory_budget=budget)


@pytest.mark.parametrize("budget", ["2GB", "1.5GiB", "512 MiB", "300mb", "1000000000", 10**9, 1e9])
def test_a_right_memory_budget(budget: Any) -> None:
    """It is kept under its own name, as frameworks that make a loader anew expect."""
    loader = DataLoader(Rows(4), num_workers=1, memory_budget=budget)
    assert loader.memory_budget == budget
    assert len(list(loader)) == 4


@pytest.mark.parametrize("value", ["lots", "0", "-1MB"])
def test_a_wrong_variable(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is named, not the option that was not given."""
    monkeypatch.setenv("TORCHCREW_BUDGET", value)
    with pytest.raises(ValueError, match="TORCHCREW_BUDGET should be a positive number of bytes"):
        list(DataLoader(Rows(4), num_workers=1))


def test_a_sampler_that_raises() -> None:
    """In the user's process, as stock; the workers end."""

    def indices() -> Any:
        yield from range(5)
        raise LookupError("no more indices")

    class Sampler:
        def __iter__(self) -> Any:
            return indices()

    both = [outcome(functools.partial(cls, Rows(10), sampler=Sampler(), num_workers=2)) for cls in (Stock, DataLoader)]
    assert both[0].kind == "LookupError"
    assert both[1] == both[0]


def test_an_index_out_of_range() -> None:
    """A list's IndexError from a worker."""
    both = [outcome(functools.partial(cls, [1, 2, 3], sampler=[0, 1, 7], num_workers=1)) for cls in (Stock, DataLoader)]
    assert both[0].kind == "IndexError"
    assert both[1] == both[0]


def test_an_index_that_cannot_be_pickled() -> None:
    """Stock's feeder thread drops it, and the loader hangs; ours raises in the user's process."""
    ours = outcome(lambda: DataLoader(Rows(4), sampler=[0, lambda: 1], num_workers=1, batch_size=None))
    assert ours.kind in ("AttributeError", "PicklingError", "TypeError")
    assert "pickle" in ours.text
    assert worker_pids() == []


# --------------------------------------------------------------------------------------------------- unusual places


def whole_epoch(length: int = 40, **options: Any) -> int:
    number = -1
    for number, batch in enumerate(DataLoader(Rows(length), batch_size=2, num_workers=2, **options)):
        check(batch, number, 2)
    return number + 1


def test_in_a_thread() -> None:
    """The iterator is made, used and closed by a thread."""
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(whole_epoch()))
    thread.start()
    thread.join(10)
    assert counts == [20]


def test_in_several_threads_at_once() -> None:
    """Each with a loader of its own; forks of one are made while the others hold batches."""
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.extend([whole_epoch(), whole_epoch()])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert counts == [20] * 6


def test_an_iterator_of_a_thread_that_ended() -> None:
    """Workers live on when the thread that started them is gone (the kernel's death signal would end them)."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(iter(DataLoader(Rows(80), batch_size=2, num_workers=2))))
    thread.start()
    thread.join(10)
    for number, batch in enumerate(made.pop()):
        check(batch, number, 2)
    assert number == 39


def _in_child(connection: Any) -> None:
    torch.set_num_threads(1)
    connection.send(whole_epoch())
    connection.close()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.faults)])
def test_in_a_child_that_is_no_daemon(method: str) -> None:
    """It has a guardian of its own and leaves nothing."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(theirs,))
    child.start()
    theirs.close()
    assert ours.poll(15)
    assert ours.recv() == 20
    child.join(5)
    assert child.exitcode == 0
    ours.close()
    child.close()


class Nested(Rows):
    """Wants a loader with workers of its own inside a worker."""

    def __init__(self, cls: Any) -> None:
        super().__init__(4)
        self.cls = cls

    def __getitem__(self, index: int) -> torch.Tensor:
        return next(iter(self.cls(Rows(4), num_workers=1)))


def test_a_loader_inside_a_worker_is_refused() -> None:
    """Workers are daemons, which have no children; without workers of its own an inner loader works."""
    both = [outcome(functools.partial(cls, Nested(cls), num_workers=1)) for cls in (Stock, DataLoader)]
    assert both[0].kind == "AssertionError"
    for one in both:
        assert "daemonic processes are not allowed to have children" in one.text
    assert both[1].kind == both[0].kind

    class Inner(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return list(DataLoader(Rows(4), batch_size=2))

    for batches in DataLoader(Inner(), batch_size=None, num_workers=1):
        for number, batch in enumerate(batches):
            check(batch, number, 2)


def test_several_iterators_of_one_loader() -> None:
    """Independent of each other, interleaved."""
    loader = DataLoader(Rows(40), batch_size=2, num_workers=2)
    for number, batches in enumerate(zip(loader, loader, loader, strict=True)):
        for batch in batches:
            check(batch, number, 2)
    assert number == 19


def test_loops_within_loops() -> None:
    """An inner epoch per outer batch, with the outer batch held (each inner crew is forked meanwhile)."""
    inner = DataLoader(Rows(8), batch_size=4, num_workers=1)
    for number, batch in enumerate(DataLoader(Rows(16), batch_size=2, num_workers=2)):
        assert len(list(inner)) == 2
        check(batch, number, 2)
    assert number == 7


def test_breaking_off_early_again_and_again() -> None:
    """Each time the workers end with the loop."""
    loader = DataLoader(Rows(400), batch_size=2, num_workers=2)
    for _ in range(10):
        for number, batch in enumerate(loader):
            check(batch, number, 2)
            if number == 2:
                break
        assert worker_pids() == []


@pytest.mark.parametrize("persistent", [False, True])
def test_a_fork_of_the_user_drops_its_copy_of_an_iterator(persistent: bool) -> None:
    """The parent's workers are not the child's to end: neither by dropping, by exit, nor by closing."""
    iterator = iter(DataLoader(Rows(400), batch_size=2, num_workers=2, persistent_workers=persistent))
    check(next(iterator), 0, 2)
    for number in range(1, 4):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                if number == 2:
                    iterator._shutdown_workers()
                del iterator
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        check(next(iterator), number, 2)
    for number, batch in enumerate(iterator, 4):
        check(batch, number, 2)
    assert number == 199


def test_the_child_that_dropped_a_copy_loads_on_its_own() -> None:
    """A fork in the middle of an epoch, then a loader in the child while the parent's goes on."""
    iterator = iter(DataLoader(Rows(200), batch_size=2, num_workers=2))
    held = next(iterator)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(theirs,))
    child.start()
    theirs.close()
    for number, batch in enumerate(iterator, 1):
        check(batch, number, 2)
    assert ours.poll(10)
    assert ours.recv() == 20
    child.join(5)
    assert child.exitcode == 0
    check(held, 0, 2)
    del held
    lease.sweep()  # otherwise the next loader notices that the child, which inherited the batch, is gone
    ours.close()
    child.close()


def test_an_iterator_that_was_shut_down_by_hand() -> None:
    """Frameworks call `_shutdown_workers`; what follows is an exception or an end, not a crash and not a wait."""
    iterator = iter(DataLoader(Rows(400), batch_size=2, num_workers=2))
    check(next(iterator), 0, 2)
    iterator._shutdown_workers()
    iterator._shutdown_workers()
    assert worker_pids() == []
    del iterator


def test_the_end_of_an_exhausted_iterator_lasts() -> None:
    """next() again after the end says so again."""
    iterator = iter(DataLoader(Rows(8), batch_size=2, num_workers=2))
    assert len(list(iterator)) == 4
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
