"""`init_process_group` in the ranks of a spawn: without an address and a port, and stock's wherever one is given."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcrew.multiprocessing as mp
from tests.multiprocessing import rendezvous_cases as cases
from torchcrew.crew.rank import Rank
from torchcrew.crew.rendezvous import Rendezvous, _Presence

pytestmark = [
    pytest.mark.usefixtures("_zygote_ends"),
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:fork of a process with"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]

METHODS = ("spawn", "fork")


@pytest.fixture(autouse=True)
def _no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def answers(function: Any, *args: Any, count: int = 2) -> list[Any]:
    """What the ranks of a spawn put in a queue, their last argument but for dicts."""
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(function, tuple(queue if arg is None else arg for arg in args), nprocs=count)
    return [queue.get() for _ in range(count)]


def test_training_gives_one_process_s_weights() -> None:
    """DDP over four ranks; they listen on the loopback interface only."""
    torch.manual_seed(1)
    data = torch.randn(64, 4)
    target = data.sum(1, keepdim=True)
    found = answers(cases.train, 4, data, target, 20, None, count=4)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    parameters = list(model.parameters())  # no optimizer: its modules change the environment
    for _ in range(20):
        gradients = torch.autograd.grad((model(data) - target).square().mean(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
    assert sorted(rank for rank, _, _ in found) == [0, 1, 2, 3]
    for _, weight, addresses in found:
        assert torch.allclose(torch.tensor(weight), model.weight)
        assert set(addresses) == {"127.0.0.1"}


@pytest.mark.parametrize("method", METHODS)
def test_collectives_and_groups(method: str) -> None:
    """Barriers, objects, a part of the ranks; and the same twice again after `destroy_process_group`."""
    mp.start_processes(cases.collectives, (3,), nprocs=3, start_method=method)


@pytest.mark.parametrize("case", [cases.without_numbers, cases.other_numbers, cases.numbers_in_the_environment])
def test_whose_numbers_count(case: Any) -> None:
    """The program's, then the environment's, then the spawn's."""
    mp.spawn(case, (2,), nprocs=2)


def test_groups_of_some_ranks() -> None:
    """Ranks that were not in the former groups meet the others in the later ones."""
    mp.spawn(cases.part_then_all, nprocs=3)


def test_two_spawns_at_a_time() -> None:
    """Each has a meeting place of its own."""
    contexts = [mp.spawn(cases.collectives, (2,), nprocs=2, join=False) for _ in range(2)]
    for context in contexts:
        assert context is not None
        while not context.join(40):
            pass


def test_a_rank_that_forks() -> None:
    """Its child inherits the place and takes it from nobody."""
    mp.spawn(cases.forks_a_child, nprocs=2)


@pytest.mark.parametrize("where", ["parent", "child"])
def test_an_address_is_stocks_business(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets it: torch's own store, and no interface of ours."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if where == "parent":
        for name, value in address.items():
            monkeypatch.setenv(name, value)
    assert answers(cases.by_environment, None, address if where == "child" else {}) == [("TCPStore", None)] * 2


@pytest.mark.parametrize("how", ["init_method", "store"])
def test_a_given_store_is_stocks_business(how: str, tmp_path: Path) -> None:
    """Nothing of ours is asked."""
    assert answers(cases.by_argument, how, str(tmp_path / "store"), None) == [("FileStore", None)] * 2


def test_the_interface_goes_where_an_address_comes() -> None:
    """Ours must not keep a group of several hosts on this one."""
    assert answers(cases.ours_then_address, free_port(), None) == [("lo", None)] * 2


@pytest.mark.parametrize("given", [None, "lo,lo"])
def test_the_interface_of_the_user_stays(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set when a group is made without one, and not before."""
    if given is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    assert answers(cases.interface, None) == [(given, given or "lo")] * 2
    assert os.environ.get("GLOO_SOCKET_IFNAME") == given


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_half_an_address_is_stocks_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user meant to give one."""
    monkeypatch.setenv(name, "1")
    other = "MASTER_PORT" if name == "MASTER_ADDR" else "MASTER_ADDR"
    with pytest.raises(mp.ProcessRaisedException, match=f"environment variable {other} expected, but not set"):
        mp.spawn(cases.collectives, (2,), nprocs=2)


def test_more_ranks_than_were_started_is_stocks_error() -> None:
    """A group over several hosts needs an address; nobody waits for ranks that this spawn has not."""
    with pytest.raises(mp.ProcessRaisedException, match="environment variable MASTER_ADDR expected, but not set"):
        mp.spawn(cases.too_many, nprocs=2)


def test_two_processes_of_one_rank() -> None:
    """Said within seconds, as for any set of ranks that all wait; stock waits for its timeout."""
    with pytest.raises(
        mp.ProcessRaisedException, match="only 1 came and all others wait, too: is each rank given once"
    ):
        mp.spawn(cases.same_rank, nprocs=2)


@pytest.mark.parametrize("how", ["return", "exit 0", "_exit 0"])
def test_a_rank_that_ends_well_without_coming(how: str) -> None:
    """The others are told, where stock waits for half an hour."""
    begun = time.monotonic()
    with pytest.raises(mp.ProcessRaisedException, match="process 1 of this spawn ended without calling"):
        mp.spawn(cases.one_stays_away, (how,), nprocs=3)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("how", ["raise", "exit 3", "SIGKILL", "SIGSEGV"])
def test_a_rank_that_fails_without_coming(how: str) -> None:
    """It is the one to be blamed, not those that waited for it."""
    with pytest.raises((mp.ProcessRaisedException, mp.ProcessExitedException)) as caught:
        mp.spawn(cases.one_stays_away, (how,), nprocs=3)
    assert caught.value.error_index == 1


def test_the_timeout_of_the_group_holds() -> None:
    """A rank that is merely late is waited for as long as the program says."""
    with pytest.raises(mp.ProcessRaisedException, match=r"waits for a group of 2, but only 1 came in 0\.5 s"):
        mp.spawn(cases.one_is_late, nprocs=2)


@pytest.mark.parametrize("tidy", [False, True])
@pytest.mark.parametrize("how", ["raise", "exit 3", "SIGKILL"])
def test_a_rank_that_fails_in_a_collective(how: str, tidy: bool) -> None:
    """The others lose their connections; what is reported is the cause."""
    with pytest.raises((mp.ProcessRaisedException, mp.ProcessExitedException)) as caught:
        mp.spawn(cases.one_fails_in_training, (how, tidy), nprocs=3)
    assert caught.value.error_index == 2


def test_a_model_that_outlives_its_group() -> None:
    """It does not take the group with it: gloo's destructor would wait for a thread that waits for the interpreter."""
    for _ in range(3):
        mp.spawn(cases.the_model_is_the_last, (4,), nprocs=4)


def test_ranks_without_a_group_pay_nothing() -> None:
    """No variable, no modules."""
    assert answers(cases.modules, None)[0][0] is None


def test_presence() -> None:
    """A rank is gone when its lock is: not before it came, not while it lives."""
    rendezvous = Rendezvous()
    pid = os.fork()
    if pid == 0:
        _Presence(rendezvous.presence, Rank(1, 3))
        time.sleep(60)
        os._exit(0)
    try:
        own = _Presence(rendezvous.presence, Rank(0, 3))
        deadline = time.monotonic() + 10
        while os.pread(rendezvous.presence, 3, 0) != b"\1\1" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert own.gone() == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert own.gone() == [1]
    os.close(own.fd)
    rendezvous.close()
