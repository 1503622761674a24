"""Ranks on several hosts: they add up their numbers, and then ARGUMENTS (RANK HOW, or nothing) has one of them end."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

number = torch.tensor(float(os.environ["RANK"]))
dist.all_reduce(number)
sys.stdout.write(f"sum {number.item():.0f} of {os.environ['WORLD_SIZE']} pid {os.getpid()}\n")
sys.stdout.flush()
if len(sys.argv) > 1:
    who, how = sys.argv[1:]
    if os.environ["RANK"] == who:
        if how == "raises":
            raise ValueError("wrong data")
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        dist.all_reduce(number)
    time.sleep(60)
