"""The process group that is ready in a rank, and what becomes of the program's own `init_process_group`."""

from __future__ import annotations

import os
import re
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchcrew.multiprocessing as mp
from tests.launcher import group_cases as cases
from torchcrew.collectives import register
from torchcrew.crew import zygote
from torchcrew.crew.rendezvous import Rendezvous
from torchcrew.launcher import group

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:fork of a process with"),
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
]

VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "GLOO_SOCKET_IFNAME",
    group.AGENT,
    group.MEMBER,
)


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Any:
    yield
    zygote.stop()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def address() -> Any:
    """One that nobody else gets: bound, and not listening."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()


def answers(
    case: Any, address: Any, count: int = 2, backend: str | None = "gloo", at_address: bool = False
) -> list[Any]:
    """What the ranks say, by rank."""
    queue = mp.get_context("spawn").SimpleQueue()
    place = None if at_address else Rendezvous()
    try:
        args = (place, {"backend": backend, "address": address}, count, case, queue)
        mp.start_processes(cases.be_rank, args, count, start_method="zygote")
    finally:
        if place is not None:
            place.close()
    return [answer for _, answer in sorted((queue.get() for _ in range(count)), key=lambda pair: pair[0])]


def test_a_group_is_ready(address: Any) -> None:
    """Without a port: gloo's sockets listen on the loopback interface, and nothing else does."""
    host, port = address
    for rank, found in enumerate(answers(cases.is_ready, address)):
        environment = ["lo", host, str(port), str(rank), "2", str(rank)]
        assert found == ((rank, 2, "gloo", 2.0), "FileStore", {"127.0.0.1"}, environment)


def test_asking_for_the_group_that_is_there(address: Any) -> None:
    """However it is said, it returns at once and makes nothing."""
    answers(cases.ways_of_asking_for_it, address)
    answers(cases.its_timeout, address)


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        (cases.other_backend, "backend cpu:gloo,cuda:mine; this call asks for backend nccl"),
        (cases.other_rank, "backend gloo; this call asks for backend nccl"),
        (cases.other_store, "backend gloo; this call asks for backend nccl"),
        (cases.other_file, "backend gloo; this call asks for backend nccl"),
    ],
)
def test_the_first_may_ask_for_another(address: Any, case: Any, difference: str) -> None:
    """It gets it, and has it: later ones have to ask for the same."""
    for text in answers(case, address):
        assert "twice!\nThe group in place was made by an earlier call" in text
        assert f"It has {difference}." in text


def test_the_first_may_ask_for_another_size(address: Any) -> None:
    """As a group of each rank alone: the job's group is gone then."""
    for text, has_group in answers(cases.other_size, address):
        assert "It has backend gloo; this" in text
        assert not has_group


def test_a_later_one_is_explained(address: Any) -> None:
    """Stock's error, with what there is and what was asked for."""
    pairs = [
        ("backend gloo", "backend nccl"),
        ("world_size 2", "world_size 3"),
        (f"address {address[0]}:{address[1]}", "address tcp://10.0.0.1:29500"),
        ("store None", "store <torch.*HashStore"),
        ("group_name None", "group_name mine"),
        ("backend gloo", "backend no such"),
        (f"address {address[0]}:{address[1]}", f"address {address[0]}:1"),
    ]
    for texts in answers(cases.later_other, address):
        assert len(texts) == len(pairs)
        for text, (there, asked) in zip(texts, pairs, strict=True):
            lines = text.splitlines()
            assert lines[0] == "trying to initialize the default process group twice!"
            assert lines[1].startswith("The group in place was ready before this function began")
            assert re.search(f"It has .*{there}.*; this call asks for .*{asked}", lines[1]), lines[1]
            assert "destroy_process_group() before it" in lines[2]


@pytest.mark.parametrize("case", [cases.calls_that_are_none, cases.after_destroying, cases.forgotten, cases.travels])
def test_stock_rules(address: Any, case: Any) -> None:
    """For calls that cannot be, after `destroy_process_group`, and for what may be pickled."""
    answers(case, address)


def test_the_address_of_the_user(address: Any) -> None:
    """Stock's store at it, if it is not the one that we set."""
    assert answers(cases.another_address, address) == [("TCPStore", None)] * 2


def test_no_group_is_wanted(address: Any) -> None:
    """The program's own needs no port either."""
    for kind, total, text in answers(cases.no_backend, address, backend=None):
        assert (kind, total) == ("FileStore", 2)
        assert "was made by an earlier call" in text


def test_more_ranks_than_there_are(address: Any) -> None:
    """Said at once: nobody else will come to our address."""
    with pytest.raises(mp.ProcessRaisedException, match="of a group of 3: only 2 ranks were started"):
        answers(cases.too_many, address)


def test_runs_of_a_crew(address: Any) -> None:
    """The group is made anew where some ranks or all have lost it, also while others still have it."""
    for *runs, total in answers(cases.runs_of_a_crew, address):
        assert [found for found, _ in runs] == [2.0] * 4
        assert total == 2.0
    assert answers(cases.depth_of_prefixes, address) == [1, 1]


def test_at_an_address(address: Any) -> None:
    """As on several hosts: the second group does not find the first one's keys; on loopback nothing else listens."""
    for found in answers(cases.at_an_address, address, at_address=True):
        assert found == [("TCPStore", 2.0, {"127.0.0.1"})] * 4


def test_ranks_that_are_done_at_once() -> None:
    """They do not take their connections away while others still make theirs."""
    place = Rendezvous()
    try:
        for _ in range(3):
            mp.start_processes(cases.quickly_over, (place, 1), 1, start_method="zygote")
            place.close()
            place = Rendezvous()
            mp.start_processes(cases.quickly_over, (place, 4), 4, start_method="zygote")
            place.close()
            place = Rendezvous()
    finally:
        place.close()


@pytest.mark.parametrize("how", ["return", "raise", "exit 3", "SIGKILL", "SIGSEGV"])
def test_a_rank_that_ends_before_it_came(how: str) -> None:
    """The others are told at once; who failed is named, not those that waited."""
    place = Rendezvous()
    try:
        with pytest.raises((mp.ProcessRaisedException, mp.ProcessExitedException)) as caught:
            mp.start_processes(cases.one_ends, (place, how), 3, start_method="zygote")
    finally:
        place.close()
    if how == "return":
        assert "process 1 of this spawn ended without calling" in str(caught.value)
    else:
        assert caught.value.error_index == 1


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that torchrun sets; more, or other, by the plan; and no agent's mark or store."""
    import inspect

    from torch.distributed.elastic.agent.server import local_elastic_agent

    env = {"TORCHELASTIC_RESTART_COUNT": "2", "MINE": "1"}
    plan = group.Plan(5, 8, 1, 4, 4, None, ("host", 29500), None, env)
    monkeypatch.setenv(group.AGENT, "1")
    for name in group.environment(plan):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv(group.MEMBER, "0")  # so that it is put back
    group.set_environment(plan)
    found = {name: os.environ.pop(name) for name in group.environment(plan)}
    assert group.AGENT not in os.environ
    assert found == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "MINE": "1",
    }
    source = inspect.getsource(local_elastic_agent.LocalElasticAgent._start_workers)
    assert set(re.findall(r'"([A-Z_]+)": ', source)) <= set(found)


@pytest.mark.parametrize(
    ("there", "asked", "same"),
    [
        ("gloo", "GLOO", True),
        ("gloo", "cpu:gloo", True),
        ("gloo", "cpu:gloo,cuda:gloo", True),
        ("cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", True),
        ("cpu:gloo,cuda:nccl", "nccl", True),
        ("cpu:gloo,cuda:nccl", "gloo", False),
        ("gloo", "nccl", False),
        ("nccl", "gloo", False),
        ("cpu:gloo", "nccl", False),
        ("gloo", "cpu:gloo,cuda:nccl", False),
        ("gloo", "mpi", False),
        ("gloo", "no such", False),
        ("gloo", "cpu:gloo:x", False),
        ("no such", "no such", True),
        ("no such", "gloo", False),
    ],
)
def test_which_backends_are_the_same(there: str, asked: str, same: bool) -> None:
    """By what each device gets."""
    assert group._serves(there, asked) is same


@pytest.mark.parametrize(
    ("asked", "same"),
    [
        ("CREW", True),
        ("cpu:crew", True),
        ("cpu:gloo,cuda:nccl", True),
        ("cuda:nccl,cpu:gloo,xpu:xccl", True),
        ("cpu:gloo,cuda:gloo", False),
        ("gloo", False),
        ("cpu:gloo", False),
        ("nccl", False),
        ("cuda:nccl", False),
    ],
)
def test_what_our_backend_serves(asked: str, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU: what it is called, and torch's choice for each device, but nobody who says gloo."""
    register()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert group._serves("crew", asked) is same


@pytest.mark.parametrize(("cuda", "expected"), [(True, ["cuda:1", "nccl"]), (False, ["nccl"])])
def test_a_rank_with_a_gpu(monkeypatch: pytest.MonkeyPatch, cuda: bool, expected: list[str]) -> None:
    """It uses its own from before the group is made."""
    done: list[str] = []
    monkeypatch.setattr(os, "environ", os.environ | {"LOCAL_RANK": "3"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(str(device)))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: done.append(backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    try:
        group.make_ready(group.Plan(3, 4, 3, 4, 0, "nccl", ("127.0.0.1", 1), None))
    finally:
        group.forget()
    assert done == expected
