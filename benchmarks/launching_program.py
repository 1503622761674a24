"""The program that `benchmarks.launching` starts.

    python -m benchmarks.launching_program --child WORK ENGINE

Ranks import this module, so it imports no more than it needs.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Seconds after which rank 1 raises: rank 0 is in its all_reduce then.
MOMENT = 0.5


#: Rank, number of ranks, a file to write to.
Work = Callable[[int, int, str], None]


# What ranks do --------------------------------------------------------------------------------------------------------


def meet(rank: int, world_size: int, port: int) -> None:
    """Make the group as the tutorials do; `torchcrew.launch` has one ready."""
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(port))
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", rank=rank, world_size=world_size)


def start(rank: int, world_size: int, path: str) -> None:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == world_size


def error(rank: int, world_size: int, path: str) -> None:
    if rank == 1:
        time.sleep(MOMENT)
        Path(path).write_text(repr(time.monotonic()))
        raise ValueError("rank 1 has had enough")
    dist.all_reduce(torch.ones(1))


def as_rank(rank: int, work: Work, world_size: int, port: int, path: str) -> None:
    meet(rank, world_size, port)
    work(rank, world_size, path)
    dist.barrier()
    dist.destroy_process_group()  # without it a rank of mp.spawn may abort at its end


def as_elastic(*args: Any) -> None:
    as_rank(int(os.environ["RANK"]), *args)


def as_ours(work: Work, world_size: int, path: str) -> None:
    work(int(os.environ["RANK"]), world_size, path)


# Engines --------------------------------------------------------------------------------------------------------------


def with_stock(work: Work, ranks: int, path: str) -> None:
    import torch.multiprocessing as mp

    mp.spawn(as_rank, args=(work, ranks, free_port(), path), nprocs=ranks)


def with_elastic(work: Work, ranks: int, path: str) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
    )
    elastic_launch(config, as_elastic)(work, ranks, 0, path)


def with_torchcrew(work: Work, ranks: int, path: str) -> None:
    import torchcrew

    torchcrew.launch(as_ours, work, ranks, path, nprocs=ranks)


def with_torchrunx(work: Work, ranks: int, path: str) -> None:
    import torchrunx

    torchrunx.Launcher(hostnames=["localhost"], workers_per_host=ranks, backend="gloo").run(as_ours, work, ranks, path)


ENGINES: dict[str, Callable[[Work, int, str], None]] = {
    "stock": with_stock,
    "elastic": with_elastic,
    "torchcrew": with_torchcrew,
    "torchrunx": with_torchrunx,
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# ----------------------------------------------------------------------------------------------------------------------


def since_start() -> float:
    """Seconds since this process was started, to the hundredth."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    name, engine = sys.argv[2:]
    run = ENGINES[engine]
    ranks = 4 if name == "train" else 2
    work = {"start": start, "error": error}.get(name) or importlib.import_module("benchmarks.launching_training").train
    with tempfile.TemporaryDirectory(prefix="torchcrew-benchmark-") as folder:
        path = str(Path(folder) / "said")
        if name == "error":
            try:
                run(work, ranks, path)
            except Exception:
                print(json.dumps({"error_s": time.monotonic() - float(Path(path).read_text())}))
            return
        run(work, ranks, path)
        result = {"cold_s": since_start()}
        began = time.perf_counter()
        run(work, ranks, path)
        result["warm_s"] = time.perf_counter() - began
        if name == "train":
            result["loss"] = float(Path(path).read_text())
        print(json.dumps(result))


if __name__ == "__main__":
    main()
