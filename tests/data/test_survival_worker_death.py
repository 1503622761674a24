"""A worker that dies or raises: stock's error, type and text, at once, and nothing left behind (see the leak check)."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

from tests.data.survival import (
    AT_ONCE,
    PROGRAMS,
    Acted,
    Acting,
    Outcome,
    Rows,
    Stream,
    check,
    environment,
    outcome,
    worker_pids,
)
from torchcrew.data import DataLoader
from torchcrew.testing.crash import CRASH_TEXT, die, run_program

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("_no_stack_dumps")]

Stock = torch.utils.data.DataLoader

#: How to die: what `die` takes, and what stock says ("exited" where the signal handler has nothing to say).
DEATHS = {
    "sigkill": "DataLoader worker (pid N) is killed by signal: Killed. ",
    "sigsegv": "DataLoader worker (pid N) is killed by signal: Segmentation fault. ",
    "exit": "DataLoader worker (pid N) exited unexpectedly with exit code 3.",
    "abort": "DataLoader worker (pid N) is killed by signal: Aborted. ",
    "sigterm": "DataLoader worker (pid N) is killed by signal: Terminated. ",
    "exit 0": "DataLoader worker (pid N) exited unexpectedly",
    "SystemExit": "DataLoader worker (pid N) exited unexpectedly",
}
#: The two texts of stock for one death; which of them comes is a race between its signal handler and its own poll.
POLLED = "DataLoader worker (pid N) exited unexpectedly"


def perish(how: str) -> None:
    if how == "exit 0":
        os._exit(0)
    if how == "SystemExit":
        sys.exit()
    if how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    die(how)


def quietly(how: str) -> Callable[[], None]:
    """For `sigsegv`: without the stack that faulthandler prints in a forked copy of pytest."""
    return functools.partial(perish, how)


def both(make: Callable[[Any], Any]) -> tuple[Outcome, Outcome]:
    return outcome(lambda: make(Stock)), outcome(lambda: make(DataLoader))


@pytest.fixture
def _a_second_death_may_be_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stock's error about a worker pass where Python can only print it: in the iterator's ``__del__``.

    Where both workers die, the second death may come while the iterator is already being dropped for the first one.
    Stock's SIGCHLD handler raises its RuntimeError wherever the interpreter is at that moment, in stock's loader as in
    ours. Anything else that cannot be raised goes on to pytest, and fails the test.
    """
    others = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        where = getattr(unraisable.object, "__qualname__", "")
        told = isinstance(unraisable.exc_value, RuntimeError) and re.match(
            r"DataLoader worker \(pid \d+\) (is killed by signal|exited unexpectedly)", str(unraisable.exc_value)
        )
        if not told or where != "_MultiProcessingDataLoaderIter.__del__":
            others(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", hook)


@pytest.mark.usefixtures("_a_second_death_may_be_told_at_the_end")
@pytest.mark.parametrize("how", DEATHS)
@pytest.mark.parametrize("place", ["dataset", "collate", "worker_init_fn", "__iter__"])
def test_a_worker_dies(how: str, place: str) -> None:
    """By signal, by exit, anywhere in the user's code: a RuntimeError with stock's text, at once."""
    act = quietly(how)
    if place == "dataset":
        make = functools.partial(_load, dataset=Acting(32, 13, act))
    elif place == "collate":
        make = functools.partial(_load, dataset=Rows(32), collate_fn=Acted(act, at=2))
    elif place == "worker_init_fn":
        make = functools.partial(_load, dataset=Rows(32), worker_init_fn=_Init(act))
    else:
        make = functools.partial(_load, dataset=Stream(act))
    ours = outcome(lambda: make(DataLoader))
    assert ours.kind == "RuntimeError"
    assert ours.text.startswith(DEATHS[how]) or ours.text == POLLED
    assert ours.seconds < AT_ONCE
    assert worker_pids() == []


def _load(loader_class: Any, dataset: Any, **options: Any) -> Any:
    return loader_class(dataset, batch_size=2, num_workers=2, **options)


class _Init:
    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __call__(self, worker: int) -> None:
        if worker == 1:
            self.act()


@pytest.mark.parametrize("how", ["sigkill", "exit", "sigsegv"])
def test_stock_says_the_same(how: str) -> None:
    """What the table above expects is what stock raises."""
    # Nothing but numbers in its queue: a worker that dies while stock receives a tensor's descriptor from it can also
    # show as a ConnectionResetError.
    stock = outcome(lambda: _load(Stock, Acting(32, 13, quietly(how)), collate_fn=len))
    assert stock.kind == "RuntimeError"
    assert stock.text.startswith(DEATHS[how]) or stock.text == POLLED


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_is_killed_between_two_batches(killed: int, persistent: bool) -> None:
    """Batches that are complete are right; the next wait reports the death."""
    iterator = iter(DataLoader(Rows(200, seconds=0.005), batch_size=2, num_workers=2, persistent_workers=persistent))
    pid = iterator._workers[killed].pid
    number = 0
    start = None
    with pytest.raises(RuntimeError, match=rf"worker \(pid(\(s\))? {pid}\)"):  # noqa: PT012
        for number, batch in enumerate(iterator):
            check(batch, number, 2)
            if number == 7:
                start = time.monotonic()
                os.kill(pid, signal.SIGKILL)
    assert start is not None
    assert time.monotonic() - start < AT_ONCE


def test_a_killed_worker_of_another_loader_disturbs_nobody_but_its_own() -> None:
    """As in stock the signal handler raises in whichever loader waits; after that the other one goes on."""
    one = iter(DataLoader(Rows(80), batch_size=2, num_workers=1))
    other = iter(DataLoader(Rows(80), batch_size=2, num_workers=1))
    check(next(one), 0, 2)
    check(next(other), 0, 2)
    os.kill(one._workers[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        for _ in one:
            pass
    for number, batch in enumerate(other, 1):
        check(batch, number, 2)
    assert number == 39


def test_the_loader_can_be_used_again_after_a_death() -> None:
    """A new iterator has new workers, on the same arenas; views of the dead worker's batches stay right."""
    batches = DataLoader(Rows(64), batch_size=2, num_workers=2)
    iterator = iter(batches)
    held = [next(iterator) for _ in range(4)]
    os.kill(iterator._workers[1].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        held.extend(iterator)
    del iterator
    for number, batch in enumerate(list(batches)):
        check(batch, number, 2)
    for number, batch in enumerate(held):
        check(batch, number, 2)


# --------------------------------------------------------------------------------------------------------- exceptions


class Unpicklable(Exception):
    """Holds a lambda; and its class is made anew by `raise_local`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.function = lambda: None


def raise_plain() -> None:
    raise ValueError("plain")


def raise_key_error() -> None:
    raise KeyError("key\nof two lines")


def raise_unpicklable() -> None:
    raise Unpicklable("with a lambda")


def raise_local() -> None:
    class Local(OSError):
        pass

    raise Local(5, "a class that nobody can import")


def raise_two_arguments() -> None:
    raise UnicodeDecodeError("ascii", b"\xff", 0, 1, "five arguments")


RAISING = (raise_plain, raise_key_error, raise_unpicklable, raise_two_arguments, functools.partial(die, "exception"))


@pytest.mark.parametrize("act", RAISING, ids=lambda act: getattr(act, "__name__", CRASH_TEXT))
@pytest.mark.parametrize("place", ["dataset", "collate", "worker_init_fn", "__iter__"])
def test_an_exception_in_the_user_s_code(act: Callable[[], None], place: str) -> None:
    """Type and text, remote traceback included, are stock's."""
    options: dict[str, Any] = {"dataset": Rows(16)}
    if place == "dataset":
        options["dataset"] = Acting(16, 5, act)
    elif place == "collate":
        options["collate_fn"] = Acted(act, at=1)
    elif place == "worker_init_fn":
        options["worker_init_fn"] = _Init(act)
    else:
        options["dataset"] = Stream(act)
    stock, ours = both(lambda loader_class: _load(loader_class, **options))
    assert ours == stock
    assert ours.seconds < AT_ONCE


def test_an_exception_whose_class_cannot_be_pickled() -> None:
    """Stock hangs (its feeder thread drops the message): seen by a timeout. Ours: the nearest base, all its text."""
    dataset = Acting(16, 5, raise_local)
    stock = outcome(lambda: _load(Stock, dataset, timeout=1))
    assert stock.text == "DataLoader timed out after 1 seconds"
    ours = outcome(lambda: _load(DataLoader, dataset))
    assert ours.kind == "OSError"
    assert "a class that nobody can import" in ours.text
    assert "in raise_local" in ours.text
    assert ours.seconds < AT_ONCE


class Closures(Rows):
    """Sample 5 cannot be pickled."""

    def __getitem__(self, index: int) -> Any:
        return (lambda: index) if index == 5 else index


def test_a_batch_that_cannot_be_pickled() -> None:
    """Stock hangs as above. Ours says why, and iteration goes on after it."""
    stock = outcome(lambda: _load(Stock, Closures(16), collate_fn=list, timeout=1))
    assert stock.text == "DataLoader timed out after 1 seconds"
    iterator = iter(_load(DataLoader, Closures(16), collate_fn=list))
    assert next(iterator) == [0, 1]
    assert next(iterator) == [2, 3]
    start = time.monotonic()
    with pytest.raises(Exception, match=r"[Cc]an't pickle") as caught:
        next(iterator)
    assert type(caught.value).__name__ in ("AttributeError", "PicklingError")
    assert "in DataLoader worker process 0" in str(caught.value)
    assert time.monotonic() - start < AT_ONCE
    assert list(iterator) == [[k, k + 1] for k in range(6, 16, 2)]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_dataset_that_cannot_be_pickled(method: str) -> None:
    """Raised where the worker is started; stock's advice about start methods included."""

    class Local(Rows):
        pass

    seen = []
    for loader_class in (Stock, DataLoader):
        with pytest.warns(UserWarning, match="Got pickle error when attempting to start a worker"):
            seen.append(outcome(functools.partial(_load, loader_class, Local(8), multiprocessing_context=method)))
    stock, ours = seen
    assert stock.kind in ("AttributeError", "PicklingError")
    assert ours == stock
    assert ours.seconds < AT_ONCE


class SecondStartFails(ForkProcess):
    """As when the system has no more processes to give."""

    started = 0

    def start(self) -> None:
        type(self).started += 1
        if self.started == 2:
            raise BlockingIOError(11, "no more processes")
        super().start()


class FewProcesses(ForkContext):
    Process = SecondStartFails


def test_a_worker_that_cannot_be_started() -> None:
    """The error is the one of the start; the workers that had started end."""
    SecondStartFails.started = 0
    ours = outcome(lambda: _load(DataLoader, Rows(16), multiprocessing_context=FewProcesses()))
    assert (ours.kind, ours.text) == ("BlockingIOError", "[Errno 11] no more processes")
    assert ours.seconds < AT_ONCE
    gc.collect()
    assert worker_pids() == []


def test_a_dataset_whose_unpickling_raises() -> None:
    """A spawned worker that cannot read what it is given dies at once; so does the wait for it."""
    ours = outcome(lambda: DataLoader(Poisoned(8), num_workers=1, multiprocessing_context="spawn"))
    assert ours.kind == "RuntimeError"
    assert ours.text.startswith("DataLoader worker (pid N) exited unexpectedly")


class Poisoned(Rows):
    def __reduce__(self) -> Any:
        return _poison, ()


def _poison() -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the traceback of the spawned process
    raise ValueError("cannot be unpickled")


def test_iteration_goes_on_after_exceptions() -> None:
    """One exception a batch, the others right, in order."""

    class Odd(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index // 2 % 3 == 1:
                raise ValueError(f"sample {index}")
            return super().__getitem__(index)

    iterator = iter(DataLoader(Odd(36), batch_size=2, num_workers=2))
    for number in range(18):
        if number % 3 == 1:
            with pytest.raises(ValueError, match=f"sample {2 * number}"):
                next(iterator)
        else:
            check(next(iterator), number, 2)
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_worker_dies_while_a_thread_of_the_user_waits() -> None:
    """Without stock's signal handler's help (it raises in the main thread only) the pidfd tells the waiting thread."""
    found: list[Outcome] = []

    def load() -> None:
        found.append(outcome(lambda: _load(DataLoader, Acting(32, 13, functools.partial(os._exit, 0)))))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join(10)
    assert found[0].text == POLLED
    assert found[0].seconds < AT_ONCE


def test_closing_with_a_worker_that_holds_the_gil_in_native_code() -> None:
    """It cannot do what it is asked; after stock's grace of 5 s it is made to."""
    iterator = iter(DataLoader(Acting(8, 2, _hold_the_gil), num_workers=1))
    next(iterator)
    time.sleep(0.2)
    start = time.monotonic()
    del iterator
    assert time.monotonic() - start < 7.0
    assert worker_pids() == []


def _hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(60)


# ----------------------------------------------------------------------------------------------------- random kills


def kill_at_random(kills: int, seed: int, timeout: float, tmp_path: Path) -> None:
    result = run_program(
        PROGRAMS / "random_kills.py", str(kills), str(seed), timeout=timeout, env=environment(), cwd=tmp_path
    ).check()
    told = json.loads(result.stdout)
    assert told["kills"] >= kills
    assert told["errors"] + told["complete"] == told["runs"]
    # Both sides of the race are met: kills in the middle, and kills that came too late to matter.
    assert told["errors"] > 0
    assert told["complete"] > 0
    assert told["slowest"] < 4.0


@pytest.mark.timeout(60)
def test_20_random_kills(tmp_path: Path) -> None:
    """Random instants, random workers: a stock error or a complete right epoch, never a hang, never a wrong batch."""
    kill_at_random(20, 1, 50, tmp_path)


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [2, 3])
def test_200_random_kills(tmp_path: Path, seed: int) -> None:
    """The same at length."""
    kill_at_random(200, seed, 390, tmp_path)
