"""Nobody waits for ever for a rank that has returned; and what else a rank's end, or a user's slip, must not hide."""

import logging
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchcrew
from torchcrew.errors import RankFailed, RanksStuck

pytestmark = pytest.mark.timeout(60)


def _returns_early() -> None:
    if torchcrew.rank() == 1:
        return
    dist.all_reduce(torch.ones(1))


def _leaves_early() -> None:
    if torchcrew.rank() == 1:
        sys.exit(0)
    dist.all_reduce(torch.ones(1))


def _one_batch_fewer() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    for _ in range(3 - torchcrew.rank()):
        model(torch.ones(2, 3)).sum().backward()


def _takes_its_time(seconds: float) -> int:
    """The first has long returned, and nobody needs it."""
    if torchcrew.rank() == 1:
        time.sleep(seconds)
    return torchcrew.rank()


def _comes_late(seconds: float) -> None:
    if torchcrew.rank() == 1:
        time.sleep(seconds)
    dist.barrier()
    if torchcrew.rank() == 1:
        time.sleep(seconds)


@pytest.mark.parametrize("fn", [_returns_early, _leaves_early])
def test_a_collective_that_cannot_be_whole(fn: Any) -> None:
    """The ledger shows it: the returned rank will not come."""
    with pytest.raises(RanksStuck, match=r"in vain for rank 1, which returned: rank 0 waits in all_reduce #1"):
        torchcrew.launch(fn, nprocs=2)


def test_the_same_in_a_crew() -> None:
    with torchcrew.Crew(2) as crew:
        with pytest.raises(RanksStuck, match="in vain for rank 1"):
            crew.run(_returns_early)
        assert crew.run(_takes_its_time, 0.0) == [0, 1]


def test_what_ranks_have_done_can_be_looked_at() -> None:
    """From the ledger, whatever they do."""
    with torchcrew.Crew(2) as crew:
        assert crew.stats() == ()
        crew.run(_comes_late, 0.0)
        for entry in crew.stats():
            assert (entry.phase.name, entry.calls, entry.steps, entry.call) == ("RETURNED", 1, 0, None)


@pytest.mark.parametrize(
    ("backend", "says"), [("crew", r"rank 1 \(pid \d+\) has ended in the middle of"), ("gloo", "closed by peer")]
)
def test_a_last_batch_that_only_some_have(backend: str, says: str) -> None:
    """The ledger does not show it; after a silence the returned rank's end does, or its connections."""
    with pytest.raises(RuntimeError, match=says) as caught:
        torchcrew.launch(_one_batch_fewer, nprocs=2, backend=backend)
    assert isinstance(caught.value.__cause__, RankFailed)
    assert "rank 1 had returned" in str(caught.value.__cause__)


def test_a_rank_that_nobody_waits_for_may_go() -> None:
    """Ranks that returned are let go after the silence; their values count, and so does the last one's."""
    assert torchcrew.launch(_takes_its_time, 4.0, nprocs=3) == [0, 1, 2]


def test_late_is_not_absent() -> None:
    assert torchcrew.launch(_comes_late, 1.5, nprocs=2) == [None, None]


# Processes that ranks start -------------------------------------------------------------------------------------------


def _loads() -> tuple[str | None, list[int]]:
    """With a collate function that only a forked worker can have."""
    loader = DataLoader(range(10), batch_size=5, num_workers=1, collate_fn=lambda batch: batch)  # type: ignore[arg-type]
    return multiprocessing.get_start_method(allow_none=True), [len(batch) for batch in loader]


def test_ranks_start_processes_as_the_users_process_does() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    default = multiprocessing.get_context().get_start_method()
    if default != "fork":
        pytest.skip(f"this Python starts processes by {default}")
    assert torchcrew.launch(_loads, nprocs=2) == [(before, [5, 5])] * 2


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.faults)])
def test_also_where_it_has_chosen(method: str) -> None:
    program = (
        "import multiprocessing, torchcrew\n"
        "if __name__ == '__main__':\n"
        f"    multiprocessing.set_start_method({method!r})\n"
        "    print(torchcrew.launch(multiprocessing.get_start_method, nprocs=2, backend=None))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=55, check=True)
    assert done.stdout == f"[{method!r}, {method!r}]\n"


# What a user gets wrong -----------------------------------------------------------------------------------------------


def _returns_a_graph() -> torch.Tensor:
    return torch.ones(1, requires_grad=True) * 2


def _fails_once(folder: Path) -> str:
    sys.stdout.write("tried\n")
    if not (folder / "tried").exists():
        (folder / "tried").touch()
        raise ValueError("the first time")
    return "well"


def _takes_one(value: int) -> int:
    return value


def test_what_cannot_be_returned_is_called_so() -> None:
    with pytest.raises(RuntimeError, match="non-leaf") as caught:
        torchcrew.launch(_returns_a_graph, nprocs=2)
    assert any("_returns_a_graph returned" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("args", [(), (1, 2)])
def test_a_call_that_the_function_cannot_take(args: tuple[int, ...]) -> None:
    """Nothing is started for it."""
    crew = torchcrew.Crew(2)
    with pytest.raises(TypeError, match=r"_takes_one\(value: int\).* cannot be called so: .*torchcrew\.rank\(\)"):
        crew.run(_takes_one, *args)
    assert crew.pids == ()


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend 'glue' is none of this torch's: gloo"):
        torchcrew.launch(_takes_one, 1, nprocs=2, backend="glue")


def test_a_log_keeps_what_was_before_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = tmp_path / "logs"
    with caplog.at_level(logging.WARNING, "torchcrew"):
        assert torchcrew.launch(_fails_once, tmp_path, nprocs=1, restarts=1, logs=logs) == ["well"]
    assert (logs / "rank0.log").read_text() == "tried\ntried\n"
    assert "rank 0: ValueError: the first time" in caplog.text


def test_a_forgotten_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("import torchcrew\n\ndef fn():\n    return 1\n\nprint(torchcrew.launch(fn, nprocs=2))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 1
    assert 'under `if __name__ == "__main__":`' in done.stderr
    assert "importing the script failed" in done.stderr.splitlines()[-1]


def test_a_cells_lines_are_in_the_ranks_traceback() -> None:
    """As a notebook has them: code of a file that is not there, whose lines `linecache` knows."""
    program = (
        "import linecache, torchcrew\n"
        "source = 'def cell():\\n    raise ValueError(1)  # of the cell\\n'\n"
        "linecache.cache['<cell 3>'] = len(source), None, source.splitlines(True), '<cell 3>'\n"
        "exec(compile(source, '<cell 3>', 'exec'))\n"
        "try:\n"
        "    torchcrew.launch(cell, nprocs=1)\n"
        "except ValueError as error:\n"
        "    print(error.__cause__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=55, check=True)
    assert "raise ValueError(1)  # of the cell" in done.stdout
