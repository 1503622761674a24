"""A program that ends without closing its crew."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torchcrew
from tests.launcher import launch_cases as cases

if __name__ == "__main__":
    how = sys.argv[1]
    crew = torchcrew.Crew(2)
    print(*crew.run(cases.pid), flush=True)
    if how == "error":
        raise ZeroDivisionError
    if how == "exit":
        sys.exit(3)
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if how == "thread":
        threading.Thread(target=crew.run, args=(cases.sleep, 60), daemon=True).start()
        while not crew._lock.locked():
            pass
    if how == "forgotten in a cycle":
        crew.myself = crew  # type: ignore[attr-defined]
        del crew
