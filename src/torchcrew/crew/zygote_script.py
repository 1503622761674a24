"""Importing the user's script once for all its processes, and telling whether it left a process that can be forked.

What a fresh process would have is the measure: a script that started threads, opened files or wrote something would
have done so in every spawned process, and a fork of the one that imported it is not that.

Random generators are the subtle case. A script (or what it imports) that *draws* from one changes its state, which
harms nobody: spawned processes start from fresh entropy, and so do the forked ones, by `renew_generators`. A script
that *seeds* gives each spawned process those very draws. The two are told apart by the states alone, without wrapping
functions that the script may keep: a Mersenne twister that was only drawn from is on the path that begins at its state
before. torch keeps its seed, which drawing leaves alone; a seed that the script gave it is inherited by a fork.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from dataclasses import dataclass, field
from multiprocessing import process, spawn
from multiprocessing import util as _typed_util
from typing import Any

__all__ = ("Words", "import_script", "renew_generators", "torch_seed", "was_only_drawn_from")

util: Any = _typed_util  # its type hints leave out what `multiprocessing` itself uses of it

#: The 624 words of a Mersenne twister, without its place in them.
Words = tuple[int, ...]

#: How far to follow a generator, in steps of 624 draws: 20 ms' worth. Who draws more is taken for one who seeds.
STEPS = 1000


def import_script(preparation: dict[str, Any], output: int) -> str:
    """Import the script as a spawned child does.

    Args:
        preparation: of `multiprocessing.spawn`; what is done already is taken out of it.
        output: the file that standard output and error go to.

    Returns:
        Why this process must not be forked for the script's processes; "" when it may.
    """
    process.current_process()._inheriting = True  # type: ignore[attr-defined]
    try:
        mains = {key: preparation.pop(key) for key in tuple(preparation) if key.startswith("init_main")}
        spawn.prepare(preparation)
        before = _Before()
        # OpenBLAS starts threads when it is loaded; only C code sees this, and the child gives it the right number.
        os.putenv("OPENBLAS_NUM_THREADS", "1")
        spawn.prepare(mains)
    except BaseException as error:
        # The children will meet it themselves, and say so where the user can read it.
        return f"importing it raised {type(error).__name__}"
    finally:
        del process.current_process()._inheriting  # type: ignore[attr-defined]
        _restore_variable("OPENBLAS_NUM_THREADS")
    return before.reason_against_forking(output)


@dataclass
class _Before:
    """What importing a script must leave as it was, or the importing process cannot stand for a fresh one."""

    fds: set[str] = field(default_factory=lambda: set(os.listdir("/proc/self/fd")))
    finalizers: int = field(default_factory=lambda: len(util._finalizer_registry))
    twisters: tuple[Words | None, Words | None] = field(default_factory=lambda: (_python_words(), _numpy_words()))

    def reason_against_forking(self, output: int) -> str:
        """Why this process, which has imported the script since, must not be forked; "" when it may be."""
        torch: Any = sys.modules.get("torch")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):
                stream.flush()
        if len(os.listdir("/proc/self/task")) != 1:
            return "it started threads"
        if torch is not None and torch.cuda.is_initialized():
            return "it initialised CUDA"
        if set(os.listdir("/proc/self/fd")) != self.fds:
            return "it opened or closed files"
        if len(util._finalizer_registry) != self.finalizers or process.active_children() or _has_children():
            return "it made multiprocessing objects or started processes"
        after = (_python_words(), _numpy_words())
        if not all(was_only_drawn_from(old, new) for old, new in zip(self.twisters, after, strict=True)):
            return "it seeded random generators"
        if os.lseek(output, 0, os.SEEK_END):
            return "it wrote to its output"
        return ""


def was_only_drawn_from(before: Words | None, after: Words | None) -> bool:
    """Whether a Mersenne twister comes from one state to the other by drawing numbers, not by seeding."""
    if before == after:
        return True
    if not before or not after:
        return False
    twister = random.Random()
    twister.setstate((3, (*before, len(before)), None))
    for _ in range(STEPS):
        twister.getrandbits(32 * len(before))  # makes the next words out of all of these
        if twister.getstate()[1][:-1] == after:
            return True
    return False


def _python_words() -> Words:
    words: Words = random.getstate()[1]
    return words[:-1]


def _numpy_words() -> Words | None:
    """Those of numpy's global generator; None when numpy is not loaded, none when it was given one of another kind."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    state: dict[str, Any] = numpy_random.get_state(legacy=False)
    return tuple(state["state"]["key"].tolist()) if state["bit_generator"] == "MT19937" else ()


def torch_seed() -> int:
    """The seed of torch's default generator; 0 when torch is not loaded."""
    torch: Any = sys.modules.get("torch")
    return int(torch.default_generator.initial_seed()) if torch is not None else 0


def renew_generators(zygotes_torch_seed: int) -> None:
    """In a child: start the global generators anew, but for torch's where the script has seeded it."""
    # Python's own is seeded anew by the fork itself.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch_seed() == zygotes_torch_seed:
        torch.default_generator.seed()


def _has_children() -> bool:
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        return bool(children.read().strip())


def _restore_variable(name: str) -> None:
    """Have C code see a variable again as Python does."""
    if name in os.environ:
        os.putenv(name, os.environ[name])
    else:
        os.unsetenv(name)
