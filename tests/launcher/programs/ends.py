"""A rank that ends as its arguments say, WHO HOW, while the others wait in a collective where they must not end."""

import os
import signal
import sys

import torch
import torch.distributed as dist


def end(how: str) -> None:
    if how == "raises":
        raise ValueError("wrong data")
    if how.startswith("exit"):
        sys.exit(int(how[4:]))
    if how == "says":
        sys.exit("no such model")
    if how.startswith("leaves"):
        os._exit(int(how[6:]))
    os.kill(os.getpid(), getattr(signal, how))


rank = int(os.environ["RANK"])
if sys.argv[1] in ("all", str(rank)):
    sys.stderr.write("about to end\n")
    end(sys.argv[2])
else:
    dist.all_reduce(torch.ones(1))
