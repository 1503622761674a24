"""Ask a running program where its processes are; from a shell: torchcrew stacks PID."""

import os
import subprocess
import sys
import time

import torchcrew.multiprocessing as mp


def read_shard(name: str) -> None:
    """Stands for something that hangs."""
    time.sleep(60)


if __name__ == "__main__":
    workers = [mp.get_context("zygote").Process(target=read_shard, args=(f"shard-{n}",)) for n in range(2)]
    for worker in workers:
        worker.start()
    time.sleep(0.5)
    subprocess.run([sys.executable, "-m", "torchcrew", "stacks", str(os.getpid())], check=True)
    for worker in workers:
        worker.kill()
        worker.join()
        print(worker.name, "ended by signal", -worker.exitcode)
