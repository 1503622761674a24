"""What the ranks of `test_group.py` run: importable by name in every process."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import init_process_group  # before there is a gate

from tests.multiprocessing.rendezvous_cases import listening, store_kind
from tests.multiprocessing.spawn_cases import end
from torchcrew import torch_private
from torchcrew.crew.rank import Rank
from torchcrew.crew.rendezvous import Rendezvous
from torchcrew.launcher import group


def be_rank(index: int, place: Rendezvous | None, plan: dict[str, Any], count: int, case: Any, queue: Any) -> None:
    """What the launcher's ranks do: be one, and run a function."""
    mine = group.Plan(index, count, index, count, 0, rendezvous=place, **plan)
    group.set_environment(mine)
    group.make_ready(mine)
    queue.put((index, case(mine)))


def register() -> None:
    """Have torch know of a backend "mine"."""
    gloo: Any = dist.ProcessGroupGloo
    dist.Backend.register_backend("mine", lambda *args: gloo(*args[:3], timeout=args[3]), devices=["cuda"])


def total() -> float:
    """A sum of ones over the default group."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


def timeout() -> float:
    """Of the default group, in seconds."""
    world: Any = dist.group.WORLD
    seconds: float = world._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """The block puts another group in the place of the one before it."""
    before = dist.group.WORLD
    yield
    assert dist.group.WORLD is not before
    assert dist.get_world_size() == total()


@contextlib.contextmanager
def the_same() -> Iterator[None]:
    """The block leaves the group in its place."""
    before = dist.group.WORLD
    yield
    assert dist.group.WORLD is before


def is_ready(plan: group.Plan) -> Any:
    """All that a function finds."""
    names = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = dist.get_rank(), dist.get_world_size(), dist.get_backend(), total()
    return found, store_kind(), set(listening()), [os.environ[name] for name in names]


def ways_of_asking_for_it(plan: group.Plan) -> None:
    """All of these get what is there, now and later."""
    address = "{}:{}".format(*plan.address)
    rank, size = plan.rank, plan.world_size
    host, port = plan.address
    for _ in range(2):
        with the_same():
            init_process_group()
            init_process_group("gloo")
            init_process_group("GLOO", "env://")
            init_process_group(dist.Backend.GLOO, rank=rank, world_size=size)
            init_process_group("cpu:gloo")
            init_process_group("cpu:gloo,cuda:gloo", world_size=size)
            init_process_group("undefined")
            init_process_group(init_method=f"tcp://{address}", rank=rank, world_size=size)
            init_process_group(init_method=f"tcp://localhost:{port}?rank={rank}&world_size={size}")
            init_process_group(rank=-1, world_size=-1, store=None, pg_options=None, device_id=None, group_name="")
            os.environ["MASTER_ADDR"] = "localhost"
            init_process_group()
            os.environ["MASTER_ADDR"] = host
            del os.environ["RANK"], os.environ["MASTER_PORT"], os.environ["MASTER_ADDR"]
            init_process_group()
            group.set_environment(plan)
    assert timeout() == 1800


def its_timeout(plan: group.Plan) -> None:
    """It is applied to the group, also a second time; what is none is stock's error."""
    with the_same():
        init_process_group("gloo", timeout=timedelta(seconds=9))
        assert timeout() == 9
        init_process_group("gloo")
        assert timeout() == 9
        init_process_group("gloo", None, timedelta(seconds=8))
        assert timeout() == 8
        with pytest.raises(TypeError, match=r"type datetime\.timedelta, got 3"):
            init_process_group("gloo", timeout=3)  # type: ignore[arg-type]
    assert timeout() == 8


def other_arguments(plan: group.Plan, how: str) -> dict[str, Any]:
    """A call for another group than the one in place."""
    rank, size = plan.rank, plan.world_size
    ways: dict[str, dict[str, Any]] = {
        "backend": {"backend": "cpu:gloo,cuda:mine"},
        "rank": {"rank": size - 1 - rank, "world_size": size},
        "store": {"store": dist.FileStore(f"/proc/self/fd/{plan.rendezvous.store}", -1)} if plan.rendezvous else {},
        "file": {"init_method": f"file:///proc/self/fd/{plan.rendezvous.store}"} if plan.rendezvous else {},
        "size": {"rank": 0, "world_size": 1},
    }
    ways["store"] |= {"rank": rank, "world_size": size}
    ways["file"] |= {"rank": rank, "world_size": size}
    return {"backend": "gloo", **ways[how]}


def first_other(plan: group.Plan, how: str) -> Any:
    """The first to ask gets another group; later ones have to ask for the same."""
    arguments = other_arguments(plan, how)
    with replaced():
        init_process_group(**arguments)
    with the_same():
        init_process_group(**arguments)
        init_process_group(**arguments, timeout=timedelta(seconds=9))
        assert timeout() == 9
        try:
            init_process_group("nccl")
        except ValueError as error:
            return str(error)
    return None


def other_backend(plan: group.Plan) -> Any:
    register()
    return first_other(plan, "backend")


def other_rank(plan: group.Plan) -> Any:
    return first_other(plan, "rank")


def other_store(plan: group.Plan) -> Any:
    return first_other(plan, "store")


def other_file(plan: group.Plan) -> Any:
    return first_other(plan, "file")


def other_size(plan: group.Plan) -> Any:
    return first_other(plan, "size"), group.has_group()


def later_other(plan: group.Plan) -> list[str]:
    """Who has asked for the group has it: errors say what differs, and change nothing."""
    init_process_group("gloo")
    found = []
    calls: list[dict[str, Any]] = [
        {"backend": "nccl"},
        {"world_size": 3, "rank": 0},
        {"init_method": "tcp://10.0.0.1:29500", "rank": plan.rank, "world_size": 2},
        {"store": dist.HashStore(), "rank": plan.rank, "world_size": 2},
        {"group_name": "mine"},
        {"backend": "no such"},
    ]
    with the_same():
        for call in calls:
            try:
                init_process_group(**call)
            except ValueError as error:
                found.append(str(error))
        os.environ["MASTER_PORT"] = "1"
        try:
            init_process_group()
        except ValueError as error:
            found.append(str(error))
    assert total() == 2
    return found


def calls_that_are_none(plan: group.Plan) -> None:
    """Stock's error, and the group stays."""
    with the_same():
        for args, options in (((), {"no_such": 1}), ((None,) * 20, {})):
            with pytest.raises(TypeError, match=r"init_process_group\(\) "):
                init_process_group(*args, **options)  # type: ignore[arg-type]
    assert total() == 2


def after_destroying(plan: group.Plan) -> None:
    """Stock's rules, through our rendezvous."""
    assert group.has_group()
    dist.destroy_process_group()
    assert not group.has_group()
    for _ in range(2):
        init_process_group("gloo")
        assert (total(), store_kind(), group.has_group()) == (2, "FileStore", True)
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.all_reduce(torch.ones(1))


def another_address(plan: group.Plan) -> Any:
    """A user who sets MASTER_PORT gets stock's store there, and no interface of ours."""
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    os.environ["MASTER_PORT"] = str(plan.address[1] + 1)
    with replaced():
        init_process_group("gloo")
    return store_kind(), os.environ.get("GLOO_SOCKET_IFNAME")


def no_backend(plan: group.Plan) -> Any:
    """No group, nothing listens; the user's own comes by our rendezvous, and stays after the run."""
    assert not dist.is_initialized()
    assert not group.has_group()
    assert listening() == []
    group.renew(plan)
    assert not dist.is_initialized()
    init_process_group("gloo")
    try:
        init_process_group("nccl")
    except ValueError as error:
        return store_kind(), total(), str(error)
    return None


def too_many(plan: group.Plan) -> None:
    init_process_group("gloo", world_size=3, rank=plan.rank)


def runs_of_a_crew(plan: group.Plan) -> list[Any]:
    """What was destroyed is made anew; each function is the first to ask; prefixes do not pile up."""
    register()
    found = []
    for run in range(4):
        hook = sys.excepthook
        if run == 1 or plan.rank == 1:  # in some ranks only, or in all
            dist.destroy_process_group()
        group.renew(plan)
        group.begin_run()
        found.append((total(), sys.excepthook is hook))
    init_process_group("gloo")
    group.begin_run()
    with replaced():
        init_process_group("cpu:gloo,cuda:mine")
    assert group.has_group()
    group.begin_run()
    with the_same():
        init_process_group("cpu:gloo,cuda:mine")
    group.begin_run()
    with replaced():
        init_process_group("gloo")
    group.renew(plan)
    return [*found, total()]


def depth_of_prefixes(plan: group.Plan) -> int:
    """How many functions of torch stand before the interpreter's own hook, after groups that we destroyed."""
    register()
    for _ in range(3):
        group.renew(plan)
    with replaced():
        init_process_group("cpu:gloo,cuda:mine")
    depth, hook = 0, sys.excepthook
    while hook is not sys.__excepthook__:
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        hook = cells["old_hook"].cell_contents
        depth += 1
    return depth


def forgotten(plan: group.Plan) -> Any:
    """Everything is as it was before."""
    dist.barrier()
    ours = torch_private.rendezvous_handlers()["env"]
    for _ in range(2):
        group.forget()
        assert not dist.is_initialized()
    assert torch_private.rendezvous_handlers()["env"] is ours.stock
    os.environ.pop("MASTER_ADDR")
    init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with pytest.raises(ValueError, match=r"twice!$"):
        init_process_group("gloo")


def at_an_address(plan: group.Plan) -> Any:
    """Without an inherited meeting place: group after group by stock's store at the address of all ranks."""
    register()
    found = [(store_kind(), total(), set(listening()))]
    for _ in range(3):
        dist.destroy_process_group()
        init_process_group("gloo")
        found.append((store_kind(), total(), set(listening())))
        with the_same():
            init_process_group()
    group.renew(plan)
    with replaced():
        init_process_group("cpu:gloo,cuda:mine")
    return found


def quickly_over(index: int, place: Rendezvous, count: int) -> None:
    """A rank that is done at once."""
    plan = group.Plan(index, count, index, count, 0, "gloo", ("127.0.0.1", 1), place)
    group.set_environment(plan)
    group.make_ready(plan)
    dist.destroy_process_group()


def one_ends(index: int, place: Rendezvous, how: str) -> None:
    """Rank 1 ends before the group is made."""
    plan = group.Plan(index, 3, index, 3, 0, "gloo", ("127.0.0.1", 1), place)
    group.set_environment(plan)
    if index == 1:
        place.attend(Rank(1, 3))
        time.sleep(0.2)
        end(how)
        return
    group.make_ready(plan)


def travels(plan: group.Plan) -> bool:
    """A plan without descriptors can be pickled at any time."""
    copy = group.Plan(0, 1, 0, 1, 0, None, ("h", 1), None, {"A": "b"})
    return bool(pickle.loads(pickle.dumps(copy)) == copy)
