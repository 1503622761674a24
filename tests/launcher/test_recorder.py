"""The recorder: equal programs are never disturbed; where two ranks differ, the second one says how, and where."""

from __future__ import annotations

import inspect
import os
import pickle
import random
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchcrew.multiprocessing as mp
from tests.launcher import recorder_cases as cases
from torchcrew.crew import zygote
from torchcrew.errors import CollectiveMismatch, TorchcrewError
from torchcrew.launcher import recorder, signatures
from torchcrew.launcher.ledger import Call, Ledger, Phase

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


def run(size: int, case: str, *args: Any) -> Ledger:
    """Run a case with so many ranks; the ledger that they leave."""
    ledger = Ledger.create(size)
    try:
        mp.start_processes(cases.be_rank, (size, ledger, case, *args), size, start_method="zygote")
    except BaseException:
        ledger.close()
        raise
    return ledger


def finish(ledger: Ledger, size: int) -> int:
    """All ranks have returned from as many steps of the default group; how many."""
    entries = [ledger.entry(rank) for rank in range(size)]
    assert {entry.phase for entry in entries} == {Phase.RETURNED}
    assert {entry.call for entry in entries} == {None}
    (latest,) = {ledger.latest(rank, "") for rank in range(size)}
    ledger.close()
    return latest


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (3, "gloo"), (2, "crew"), (3, "crew")])
def test_a_random_sequence_of_all_collectives(size: int, backend: str) -> None:
    """The same calls in the same order, by ranks that are early and late: nothing is raised."""
    ledger = run(size, f"{backend}:random_sequence", size, 150)
    assert min(ledger.entry(rank).calls for rank in range(size)) > 60
    assert finish(ledger, size) > 20


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_long_random_sequences() -> None:
    """The same, many thousand calls."""
    for seed in range(5):
        finish(run(4, "random_sequence", f"long {seed} {os.getpid()}", 1500), 4)


@pytest.mark.parametrize("backend", ["gloo", "crew"])
def test_threads(backend: str) -> None:
    """Four threads of each rank call collectives in four groups at once."""
    ledger = run(2, f"{backend}:threads", 40)
    assert ledger.entry(0).calls == 3 + 3 * 80 + 40 + 1
    assert finish(ledger, 2) == 44


def test_training() -> None:
    """Steps are counted, also of ranks that have more of them."""
    ledger = run(2, "training", 4)
    assert [ledger.entry(rank).steps for rank in range(2)] == [9, 10]
    ledger.close()


def test_sharded_training() -> None:
    """Meshes, distributed tensors and sharded models."""
    finish(run(4, "sharded"), 4)


def test_groups_made_anew() -> None:
    """What was called in a default group that is gone is not compared with what is called in the next one."""
    finish(run(3, "anew", 3), 3)


def test_unusual_groups() -> None:
    """Ranks that are not in a group do not count; groups that only their members make are not numbered."""
    ledger = run(3, "own_groups")
    finish(ledger, 3)


def test_a_program_with_ranks_of_its_own(tmp_path: Path) -> None:
    """It is not told that ranks differ which are not the ones it means."""
    run(4, "other_numbers", str(tmp_path)).close()


def test_what_is_written() -> None:
    """The collective a rank waits in, only the outermost one, and where."""
    run(2, "a_program_under_way").close()


EXPECTED = {
    "operation": ("all_reduce(float32 [10], SUM)", 4, "broadcast(float32 [10], src=0)"),
    "object": ("all_gather(float32 [1])", 4, "all_gather_object()"),
    "shape": ("all_reduce(float32 [2, 6], SUM)", 4, "all_reduce(float32 [10], SUM)"),
    "dtype": ("all_reduce(bfloat16 [10], SUM)", 4, "all_reduce(float32 [10], SUM)"),
    "reduce op": ("all_reduce(float32 [10], MAX)", 4, "all_reduce(float32 [10], SUM)"),
    "root": ("broadcast(float32 [10], src=1)", 4, "broadcast(float32 [10], src=0)"),
    "target": ("reduce(float32 [10], SUM, dst=1)", 4, "reduce(float32 [10], SUM, dst=0)"),
    "gathered dtype": ("all_gather(int32 [1])", 4, "all_gather(float32 [1])"),
    "order": ("barrier()", 4, "all_reduce(float32 [3], SUM)"),
    "one more": ("barrier()", 4, "all_reduce(float32 [3], SUM)"),
    "members": ("new_group(ranks=[1])", 4, "new_group(ranks=[0, 1])"),
    "async": ("all_reduce(float32 [4], SUM)", 4, "all_reduce(float32 [3], SUM)"),
}


@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, "gloo") for kind in cases.DIFFERENCES), *((kind, "crew") for kind in ("operation", "shape", "async"))],
)
def test_a_difference_names_both_sides(kind: str, backend: str) -> None:
    """By the rank that comes second, before torch has exchanged anything."""
    with pytest.raises(mp.ProcessRaisedException) as caught:
        run(2, f"{backend}:differ", kind)
    mine, number, theirs = EXPECTED[kind]
    (line,) = [line for line in str(caught.value).splitlines() if "CollectiveMismatch" in line and ": rank" in line]
    text = line.partition("CollectiveMismatch: ")[2]
    places = [part.split()[0].rstrip(",") for part in text.split(" at ")[1:]]
    assert all(place.startswith("recorder_cases.py:") for place in places)
    assert text == (
        f"rank 1 calls {mine} at {places[0]} as operation {number} of the default group, "
        f"where rank 0 calls {theirs} at {places[1]}"
    )
    assert caught.value.error_index == 1


def test_a_difference_in_a_subgroup() -> None:
    """The group, its members, and the ranks by their global numbers."""
    with pytest.raises(mp.ProcessRaisedException) as caught:
        run(3, "differ_in_a_group")
    assert "CollectiveMismatch: rank 2 calls all_reduce(float32 [6], SUM) at recorder_cases.py:" in str(caught.value)
    assert " as operation 1 of group 1 (ranks [0, 2]), where rank 0 calls all_reduce(float32 [5]" in str(caught.value)


@pytest.fixture
def alone() -> Iterator[Ledger]:
    """This process is the only rank of a group, and place 0 of a ledger of three."""
    ledger = Ledger.create(3)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        recorder.install(ledger, 0, 0)
        yield ledger
        recorder.uninstall()
        dist.destroy_process_group()
    ledger.close()


def test_install_and_uninstall(alone: Ledger) -> None:
    """What torch has is exchanged and put back; a second install takes the place of the first."""
    other = Ledger.create(3)
    hidden = dist.all_reduce.__closure__[0].cell_contents
    assert inspect.signature(dist.all_reduce) == inspect.signature(inspect.unwrap(dist.all_reduce))
    assert hidden.__wrapped__ is dist.all_reduce.__wrapped__
    recorder.install(other, 1, -1)
    dist.barrier()
    assert (alone.entry(0).calls, other.entry(1).calls) == (0, 1)
    recorder.uninstall()
    recorder.uninstall()
    dist.barrier()
    assert (alone.entry(0).calls, other.entry(1).calls) == (0, 1)
    for name in signatures.COLLECTIVES:
        function = getattr(dist.distributed_c10d, name, None)
        for cell in getattr(function, "__closure__", None) or ():
            code = getattr(cell.cell_contents, "__code__", None)
            assert code is None or code.co_name != "hooked"
    assert "__wrapped__" not in vars(torch.nn.parallel.DistributedDataParallel.forward)
    other.close()


def test_a_child_is_no_rank(alone: Ledger) -> None:
    """A process that the rank forks writes nothing."""
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            dist.all_reduce.__closure__[0].cell_contents.__wrapped__  # noqa: B018
        except AttributeError:
            os._exit(0 if recorder._installed is None else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert alone.entry(0).calls == 1


def test_errors_are_torch_s(alone: Ledger) -> None:
    """Wrong arguments are refused in torch's words, and leave no number behind."""
    for wrong, error in (((), TypeError), (("x",), TypeError), ((torch.ones(1), "x"), TypeError)):
        with pytest.raises(error) as caught:
            dist.all_reduce(*wrong)
        assert "_all_reduce" not in str(caught.value)
    with pytest.raises(ValueError, match="gather_list"):
        dist.gather(torch.ones(1))
    assert alone.latest(0, "") == 0
    assert alone.entry(0).call is None
    dist.barrier()
    assert alone.latest(0, "") == 1


def test_warnings_are_torch_s(alone: Ledger) -> None:
    """Who ignores what torch deprecates, by the module's name, goes on doing so."""
    if not hasattr(dist, "all_gather_single"):
        pytest.skip("this torch deprecates nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        dist.all_gather_into_tensor(torch.ones(2), torch.ones(2))
    found = alone.find(0, "", 1)
    assert found is not None
    assert found.name == "all_gather_into_tensor"
    assert found.site.startswith(Path(__file__).name)


def test_calls_before_there_is_a_group() -> None:
    """Torch says that there is none; the first group that is made is the first generation."""
    ledger = Ledger.create(1)
    recorder.install(ledger, 0, 0)
    with pytest.raises(ValueError, match="efault process group"):
        dist.barrier()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        dist.barrier()
        dist.destroy_process_group()
    recorder.uninstall()
    assert ledger.find(0, "", 1, 1) is not None
    assert ledger.entry(0).calls == 1
    ledger.close()


def test_compiled_functions() -> None:
    """`torch.compile` runs the recorder as it is: each call gets its own number, however often it runs."""
    run(2, "compiled").close()


@pytest.mark.parametrize("size", [1, 2, 8, 9, 30, 300])
def test_neighbours_are_compared(alone: Ledger, size: int) -> None:
    """All of a few peers, some of many, and never itself; ranks of other hosts are left out."""
    ledger = Ledger.create(size)
    for index in {0, size // 2, size - 1}:
        watcher = object.__new__(recorder._Recorder)
        watcher.ledger, watcher.index, watcher.first = ledger, index, 1000
        peers = watcher.peers_among([*range(990, 1000), *range(1000, 1000 + size), 1000 + size])
        assert index not in peers
        assert set(peers) <= set(range(size))
        assert len(set(peers)) == len(peers)
        assert len(peers) == size - 1 if size <= 8 else 6 <= len(peers) <= 20
        assert {(index + 1) % size, (index - 1) % size} - {index} <= set(peers)
    ledger.close()


@pytest.mark.parametrize("name", signatures.COLLECTIVES)
def test_parameters_are_torch_s(name: str) -> None:
    """Each reader takes what torch's function takes, under the same names, at the same places."""
    function = getattr(dist.distributed_c10d, name, None)
    if function is None:
        pytest.skip("this torch has no such function")
    parameters = list(inspect.signature(function).parameters.values())
    reader = signatures.COLLECTIVES[name].read
    theirs = inspect.signature(reader)
    given = {parameter.name: None for parameter in parameters}
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    theirs.bind(**dict.fromkeys(required))
    theirs.bind(**given)
    named = [p.name for p in theirs.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert named == [parameter.name for parameter in parameters][: len(named)]


def test_the_error_is_ours_and_travels() -> None:
    """It can be caught with all of torchcrew's errors, and pickled."""
    error = pickle.loads(pickle.dumps(CollectiveMismatch("text")))
    assert isinstance(error, TorchcrewError)
    assert str(error) == "text"


@pytest.mark.parametrize(
    ("mine", "theirs", "differ"),
    [
        (Call("all_reduce", shape=(10,), dtype="float32"), Call("all_reduce", shape=(2, 5), dtype="float32"), False),
        (Call("all_reduce", shape=(), dtype="float32"), Call("all_reduce", shape=(1,), dtype="float32"), False),
        (Call("all_reduce", shape=(0,), dtype="float32"), Call("all_reduce", shape=(1,), dtype="float32"), True),
        (Call("all_to_all", dtype="float32"), Call("all_to_all", dtype="uint8"), False),
        (Call("all_gather_into_tensor", shape=(1,)), Call("all_gather_single", shape=(1,)), False),
        (Call("gather", shape=(1,), dtype="int8"), Call("gather", shape=(2,), dtype="int8"), False),
        (Call("new_group", detail="ranks=[0]"), Call("new_group", detail="ranks=[1]"), False),
        (Call("new_group", detail="ranks=[0]"), Call("new_group", detail="ranks=[0, 1]"), True),
        (Call("barrier"), Call("one of a later torch"), True),
    ],
)
def test_what_differs(mine: Call, theirs: Call, differ: bool) -> None:
    """What torch lets pass is let pass, in both directions."""
    assert signatures.differ(mine, theirs) is differ
    assert theirs.name not in signatures.COLLECTIVES or signatures.differ(theirs, mine) is differ


def test_equal_programs_differ_in_nothing_by_chance() -> None:
    """Keys of many groups and numbers are not equal to each other."""
    from torchcrew.launcher.calls import key_of, place_of

    chance = random.Random(0)
    groups = ["", *(str(number) for number in range(100)), *(f"{chance.getrandbits(160):040x}" for _ in range(100))]
    places = {place_of(generation, group) for generation in range(1, 20) for group in groups}
    assert len(places) == 19 * len(groups)
    assert key_of(0, 1, 5) != key_of(0, 0, 1)
    assert 0 < key_of(0, 0, 1) < key_of(2**32 - 1, 2**32 - 1, 1) < 2**64
