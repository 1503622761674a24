"""Functions that ranks run, and what the tests of them look at."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import init_process_group as init_imported_by_name
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import torchcrew

#: What `remember` leaves between two runs.
remembered: list[Any] = []


class Squares(Dataset[int]):
    """A dataset that can be imported."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index >= self.count:
            raise IndexError(index)
        return index * index


class Scale:
    """Something callable, with a method."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, value: int) -> int:
        return self.factor * value

    def method(self, value: int) -> int:
        return self.factor * value + torchcrew.rank()

    @staticmethod
    def static(value: int) -> int:
        return value + torchcrew.rank()

    @classmethod
    def made(cls, value: int) -> Scale:
        return cls(value)


# Values and arguments -------------------------------------------------------------------------------------------------


def who() -> tuple[int, int, int]:
    return torchcrew.rank(), torchcrew.local_rank(), torchcrew.world_size()


def pid() -> int:
    return os.getpid()


def nothing(*_: Any, **__: Any) -> None:
    pass


def echo(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def the_same(value: Any) -> Any:
    return value


def generator() -> Any:
    return (number for number in range(3))


def fill_with_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Write into an argument, once every rank has it."""
    dist.barrier()
    tensor.fill_(torchcrew.rank() + 1)
    dist.barrier()
    return tensor


def add_rank(tensor: torch.Tensor) -> None:
    tensor[torchcrew.rank()] += torchcrew.rank() + 1


def a_large_one(count: int) -> torch.Tensor:
    return torch.full((count,), float(torchcrew.rank()))


def sum_of_view(value: list[torch.Tensor]) -> float:
    """Of the first, when the second, a view of it, was filled with 7."""
    whole, part = value
    part.fill_(7.0)
    return float(whole.sum())


def put_rank(queue: Any) -> None:
    queue.put((torchcrew.rank(), torch.full((3,), torchcrew.rank())))


def with_synchronisation(value: Any, lock: Any, event: Any, connection: Any) -> bool:
    for _ in range(100):
        with lock:
            value.value += 1
    if torchcrew.rank() == 0:
        connection.send("from rank 0")
    return bool(event.wait(10))


def sum_of_loader(loader: DataLoader[Any]) -> int:
    return sum(int(batch.sum()) for batch in loader)


def shared_list(items: Any) -> tuple[int, Any]:
    return len(items), items[torchcrew.rank()]


def read_environ(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


# Torch ----------------------------------------------------------------------------------------------------------------


def collectives() -> tuple[float, list[Any], list[int], str]:
    """Some of each kind."""
    own = torch.full((4,), float(dist.get_rank() + 1))
    dist.all_reduce(own)
    objects: list[Any] = [{"from": dist.get_rank()} if dist.get_rank() == 1 else None]
    dist.broadcast_object_list(objects, src=1)
    pair = dist.new_group([0, 1])
    gathered: list[Any] = [None] * 2
    if dist.get_rank() < 2:
        dist.all_gather_object(gathered, dist.get_rank(), group=pair)
    return float(own[0]), objects, gathered, dist.get_backend()


def sampled(count: int) -> list[int]:
    sampler: DistributedSampler[int] = DistributedSampler(Squares(count), shuffle=True, seed=3)
    return list(sampler)


def all_reduce_sum(value: float = 1.0) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return float(tensor)


def torchrun_style(init: str, destroy: bool = True) -> tuple[int, int, float]:
    """What a program written for torchrun does."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if init == "by name":
        init_imported_by_name("gloo")
    elif init == "nothing":
        dist.init_process_group()
    elif init == "env":
        dist.init_process_group("gloo", init_method="env://")
    elif init == "numbers":
        dist.init_process_group(backend="gloo", rank=rank, world_size=size)
    elif init == "tcp":
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    elif init == "twice":
        dist.init_process_group("gloo")
        dist.init_process_group("gloo")
    else:
        raise AssertionError(init)
    total = all_reduce_sum()
    if destroy:
        dist.destroy_process_group()
    return rank, size, total


def init_otherwise() -> None:
    """A second one that is not the first."""
    dist.init_process_group("gloo")
    dist.init_process_group("gloo", rank=dist.get_rank(), world_size=dist.get_world_size() + 1)


def destroy(*who_does: int) -> bool:
    if not who_does or dist.get_rank() in who_does:
        dist.destroy_process_group()
    return dist.is_initialized()


def own_store() -> str:
    """A store of the ranks' own, at the job's address."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=torchcrew.rank() == 0,
    )
    store.set(f"word {torchcrew.rank()}", f"from {torchcrew.rank()}")
    word = store.get(f"word {(torchcrew.rank() + 1) % torchcrew.world_size()}").decode()
    dist.barrier()  # the server ends with its store
    return word


def pending_work() -> None:
    """Leave a collective on its way."""
    dist.all_reduce(torch.ones(1000), async_op=True)


def pending_forever() -> None:
    """Leave one that no peer takes part in."""
    if torchcrew.rank() == 0:
        global pending
        pending = dist.irecv(torch.ones(1), src=1)


pending: Any = None


# The machine ----------------------------------------------------------------------------------------------------------


def threads() -> dict[str, Any]:
    """How many threads each pool would have, after the count of those that run."""
    running = len(os.listdir("/proc/self/task"))
    import threadpoolctl

    pools = threadpoolctl.threadpool_info()
    return {
        "running": running,
        "torch": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "blas": sorted({pool["num_threads"] for pool in pools if pool["internal_api"] == "openblas"}),
        "openmp": sorted({pool["num_threads"] for pool in pools if pool["internal_api"] == "openmp"}),
    }


def listening(processes: list[int]) -> list[tuple[str, str]]:
    """Addresses at which these processes listen: (IPv4 or 6, address in hexadecimal)."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    link = os.readlink(f"/proc/{process}/fd/{fd}")
                    if link.startswith("socket:["):
                        inodes.add(link[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append((table, fields[1].partition(":")[0]))
    return found


def tree(process: int) -> list[int]:
    """A process and all below it."""
    found = [process]
    for one in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                found += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
    return found


def all_listening(launcher: int) -> list[tuple[str, str]]:
    """Where anything of this job listens, after a collective."""
    all_reduce_sum()
    found = listening(tree(launcher))
    dist.barrier()
    return found


# Crews ----------------------------------------------------------------------------------------------------------------


def remember(value: Any) -> list[Any]:
    """What earlier runs left in a global variable, and this value."""
    remembered.append(value)
    return remembered


def count_in_local(crew: Any) -> int:
    crew.local.count = getattr(crew.local, "count", 0) + 1
    return int(crew.local.count)


def keep_shared(crew: Any) -> torch.Tensor:
    crew.local.shared = torch.zeros(4).share_memory_()
    return crew.local.shared  # type: ignore[no-any-return]


def read_shared(crew: Any) -> list[float]:
    return crew.local.shared.tolist()  # type: ignore[no-any-return]


def fail(rank: int, error: Exception) -> int:
    if torchcrew.rank() == rank:
        raise error
    return torchcrew.rank()


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def wait_for(path: str, pids: Any = None) -> str:
    """Until there is such a file."""
    if pids is not None:
        pids.put(os.getpid())
    while not os.path.exists(path):
        time.sleep(0.01)
    return "seen"


def leave_thread() -> None:
    """A thread that only serves, and does not end."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Progress and none ----------------------------------------------------------------------------------------------------


def rank_1_is_away(seconds: float) -> None:
    """The others wait for it in a collective."""
    if torchcrew.rank() == 1:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(1))


def slow_but_busy(kind: str, rounds: int, pause: float) -> str:
    """Make some progress again and again."""
    model = torch.nn.Linear(1, 1)
    parallel = torch.nn.parallel.DistributedDataParallel(model) if kind == "steps" else model
    for number in range(rounds):
        time.sleep(pause)
        if kind == "output" and torchcrew.rank() == 0:
            print("round", number, flush=True)  # noqa: T201
        elif kind == "collectives":
            dist.barrier()
        elif kind == "steps":
            parallel(torch.ones(1, 1))
    return kind


# Nested ---------------------------------------------------------------------------------------------------------------


def nested() -> list[Any]:
    return torchcrew.launch(the_same, torchcrew.rank() * 10)


def launch_in_worker() -> str:
    """Of a loader, which has no processes of its own."""
    try:
        return str(next(iter(DataLoader(Launching(), num_workers=1))))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Launching(Dataset[Any]):
    """Items are what a launch returns."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return torchcrew.launch(who, nprocs=1)


def launch_in_child(method: str) -> Any:
    """What a child of this rank gets that launches a rank."""
    context = torch.multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=put_one, args=(queue,))
    process.start()
    value = queue.get()
    process.join()
    return value


def put_one(queue: Any) -> None:
    queue.put(torchcrew.launch(who, nprocs=1))


def put_launched(queue: Any) -> None:
    queue.put(torchcrew.launch(who, nprocs=2))


def numbers() -> Iterator[int]:
    yield from range(3)
