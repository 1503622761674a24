"""`launch` and `Crew` with the backend crew: what "auto" means, who gets another, and what is said of failures."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchcrew
from tests.launcher import crew_group_cases as cases
from torchcrew.errors import CollectiveMismatch, CollectiveTimeout, RankDied, RanksStuck
from torchcrew.launcher.options import Host, Options
from torchcrew.launcher.starting import Starting

#: Seconds until an error arrives; milliseconds are usual, minutes the timeouts of groups.
SOON = 3.0

# Who gets which -------------------------------------------------------------------------------------------------------


def test_auto_is_crew() -> None:
    """For one call and for many; nothing has to be imported or registered for it."""
    crews = ("crew", "CrewProcessGroup", 3.0)
    assert torchcrew.launch(cases.group_in_place, nprocs=2) == [crews] * 2
    assert torchcrew.launch(cases.group_in_place, nprocs=1) == [("crew", "CrewProcessGroup", 1.0)]
    with torchcrew.Crew(2, backend="crew") as crew:
        assert crew.run(cases.group_in_place) == [crews] * 2
        assert crew.run(dist.destroy_process_group) == [None] * 2
        assert crew.run(cases.group_in_place) == [crews] * 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_start_methods(method: Any) -> None:
    """Their ranks know the backend, too."""
    found = torchcrew.launch(cases.group_in_place, nprocs=2, start_method=method, backend="crew")
    assert found == [("crew", "CrewProcessGroup", 3.0)] * 2


def test_gloo_where_it_is_asked_for() -> None:
    """By the launching program."""
    assert torchcrew.launch(cases.group_in_place, nprocs=2, backend="gloo") == [("gloo", "ProcessGroup", 3.0)] * 2


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([None, "crew", "cpu:gloo,cuda:nccl", "cpu:crew", {}], [("crew", True)] * 5),
        (["gloo", None, "cpu:gloo", "cpu:gloo,cuda:nccl"], [("gloo", False), *[("gloo", True)] * 2]),
        (["cpu:gloo", None], [("cpu:gloo", False), ("cpu:gloo", True)]),
        ([None, "destroy", "crew", "destroy", "gloo"], [("crew", True), ("crew", False), ("gloo", False)]),
    ],
)
def test_a_rank_asks(calls: list[Any], found: list[tuple[str, bool]]) -> None:
    """Who says gloo gets gloo; who says nothing, or torch's choice for each device, gets what is ready."""
    for answers in torchcrew.launch(cases.asks, *calls, nprocs=2):
        assert answers[: len(found)] == [(*answer, 3.0) for answer in found]


def test_a_later_call_that_differs_is_told_so() -> None:
    """As for every backend."""
    for _, text in torchcrew.launch(cases.asks, None, "gloo", nprocs=2):
        assert "was ready before this function began" in text
        assert "It has backend crew; this call asks for backend gloo." in text


def test_gloo_by_the_jobs_own_address() -> None:
    """It meets as all groups of the job do: nothing listens but on the loopback interface."""
    for backend, total, where in torchcrew.launch(cases.asks_by_tcp, nprocs=2):
        assert (backend, total) == ("gloo", 3.0)
        assert where <= {"0100007F", "0" * 24 + "01000000"}


def test_several_machines_have_gloo() -> None:
    """Unless the user says otherwise."""
    assert Options().backend_for(2, nodes=2) == "gloo"
    assert Options(backend="crew").backend_for(2, nodes=2) == "crew"
    host = Host(node_rank=0, nodes=2, address="localhost", port=1, first=0, world_size=4)
    assert Starting(Options(), 2, host, 0).plan(0).backend == "gloo"


def test_a_torch_without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group where nobody asks for one; else an error before any rank starts."""
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"without torch\.distributed, which the backend 'crew' belongs to"):
        torchcrew.launch(cases.group_in_place, nprocs=2, backend="crew")
    assert torchcrew.launch(dist.is_initialized, nprocs=2) == [False] * 2


# What it does ---------------------------------------------------------------------------------------------------------


def test_no_socket() -> None:
    """A rank has none of the internet's, listening or not; with gloo it has."""
    assert torchcrew.launch(cases.sockets_while_working, nprocs=2) == [(0, 2.0)] * 2
    assert torchcrew.launch(cases.sockets_while_working, nprocs=2, backend="gloo")[0][0] > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_is_gloos_bit_for_bit(ranks: int) -> None:
    """The weights of `DistributedDataParallel`, in every rank."""
    ours, gloos = (torchcrew.launch(cases.trained, 5, nprocs=ranks, backend=name) for name in ("crew", "gloo"))
    for ours_of_rank, gloos_of_rank in zip(ours, gloos, strict=True):
        for one, other, first in zip(ours_of_rank, gloos_of_rank, ours[0], strict=True):
            assert torch.equal(one, first)
            assert torch.equal(one, other) or ranks > 2  # of three, gloo adds up in another order
            assert torch.allclose(one, other)


def test_the_timeout_of_a_script() -> None:
    """That of its `init_process_group`; the error has who does not come, and where that rank is."""
    begun = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"rank 1 \(pid \d+\) did not come") as caught:
        torchcrew.launch(cases.times_out, 0.5, nprocs=3)
    assert time.monotonic() - begun < 0.5 + 2 * SOON
    assert "in sleeps_on_purpose" in str(caught.value)


# Failures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["crew", "gloo"])
@pytest.mark.parametrize("case", [cases.fails_in_training, cases.fails_asynchronously, cases.fails_unrecorded])
@pytest.mark.parametrize("how", ["SIGKILL", "raises"])
def test_the_first_cause_is_raised(case: Any, how: str, backend: str) -> None:
    """Not the errors of peers, who learn of a death at once."""
    begun = time.monotonic()
    with pytest.raises(RankDied if how == "SIGKILL" else KeyError) as caught:
        torchcrew.launch(case, how, nprocs=3, backend=backend)
    assert time.monotonic() - begun < SOON
    failed: Any = caught.value if how == "SIGKILL" else caught.value.__cause__
    assert failed.rank == 1
    assert "PeerDied" not in str(failed)


def test_a_death_that_a_peer_has_wrapped() -> None:
    """Its own error came from that."""
    with pytest.raises(RankDied, match=r"rank 1 .* was killed by SIGKILL"):
        torchcrew.launch(cases.catches_the_death, nprocs=2)


@pytest.mark.parametrize("backend", ["crew", "gloo"])
def test_a_rank_that_returns_early(backend: str) -> None:
    """Others wait for it: who, and where."""
    with pytest.raises(
        RanksStuck, match="others wait in vain for rank 1, which returned: ranks 0, 2 wait in all_red"
    ) as e:
        torchcrew.launch(cases.returns_early, nprocs=3, backend=backend)
    assert "missing from all_reduce #1: rank 1 (was in none yet)" in str(e.value)
    assert "torchcrew/collectives" not in str(e.value)


@pytest.mark.parametrize("backend", ["crew", "gloo"])
def test_calls_that_differ(backend: str) -> None:
    """Both are named, with their places in the program."""
    with pytest.raises(CollectiveMismatch) as caught:
        torchcrew.launch(cases.differs, "seen", nprocs=2, backend=backend)
    text = str(caught.value)
    for rank, call in ((0, "all_reduce(float32 [10], SUM)"), (1, "broadcast(float32 [10], src=0)")):
        assert f"rank {rank} calls {call} at crew_group_cases.py:" in text


def test_calls_that_differ_where_only_the_group_sees_it() -> None:
    """Functional collectives are not recorded; the group itself compares all that it does."""
    with pytest.raises(CollectiveMismatch, match="call different collectives") as caught:
        torchcrew.launch(cases.differs, "unseen", nprocs=2)
    assert "rank 0: all_reduce of 10 elements of torch.float32" in str(caught.value)
    assert "rank 1: all_reduce of 3 elements of torch.float32" in str(caught.value)
