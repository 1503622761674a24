"""What a spawned process takes from its parent at the moment of its start, as a value that can travel and be applied.

The zygote was started at another moment, maybe in another directory and with another environment; a `Situation` makes
its children what `spawn` would have made them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ("Situation", "ThreadPools")

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
# Python itself ignores these at its start.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
_UNTOUCHABLE = {signal.SIGKILL, signal.SIGSTOP}


@dataclass(frozen=True)
class Situation:
    """Environment and kernel state that a new process inherits."""

    environ: dict[str, str]
    umask: int
    affinity: tuple[int, ...]
    nice: int
    limits: tuple[tuple[int, int], ...]
    """Soft and hard limit for each of the `RLIMIT_` numbers in ascending order."""
    blocked: tuple[int, ...]
    """Signals blocked in the calling thread."""
    ignored: tuple[int, ...]

    @classmethod
    def capture(cls) -> Situation:
        """Take this process's (and, for the signal mask, this thread's)."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signals = signal.valid_signals() - _IGNORED_BY_PYTHON
        return cls(
            environ=dict(os.environ),
            umask=_umask(),
            affinity=tuple(sorted(os.sched_getaffinity(0))),
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            limits=tuple(resource.getrlimit(number) for number in _LIMITS),
            blocked=tuple(sorted(int(number) for number in blocked)),
            ignored=tuple(sorted(int(number) for number in signals if signal.getsignal(number) == signal.SIG_IGN)),
        )

    def apply(self) -> None:
        """Make this process so; the signal mask comes last, when every handler is in place."""
        for number in signal.valid_signals() - _UNTOUCHABLE:
            wanted = self._disposition(number)
            if signal.getsignal(number) not in (wanted, None):
                with contextlib.suppress(OSError, ValueError):  # the threads library's own
                    signal.signal(number, wanted)
        if dict(os.environ) != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        os.umask(self.umask)
        # What may not be done (raising a limit, a core that is gone) a spawned child could not have either.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self.affinity)
        with contextlib.suppress(OSError):
            if os.getpriority(os.PRIO_PROCESS, 0) != self.nice:
                os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        for number, limits in zip(_LIMITS, self.limits, strict=True):
            with contextlib.suppress(OSError, ValueError):
                if resource.getrlimit(number) != limits:
                    resource.setrlimit(number, limits)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)

    def _disposition(self, number: int) -> signal.Handlers | Callable[..., object]:
        if number in self.ignored or number in _IGNORED_BY_PYTHON:
            return signal.SIG_IGN
        return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _umask() -> int:
    """Read the umask without changing it for an instant, in which another thread might create a file."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))


class ThreadPools:
    """The thread pools of the libraries loaded here, which read their sizes from the environment once, when loaded.

    The zygote loads them with sizes of 1, so that it has one thread and can fork; `apply` makes them in a child what a
    fresh process would have.
    """

    def __init__(self) -> None:
        """Find the libraries that are loaded now; `OMP_NUM_THREADS` shall have been 1 when they were."""
        libraries = [ctypes.CDLL(path) for path in _loaded(("libgomp", "libomp", "libiomp"))]
        self._openmp = [library for library in libraries if hasattr(library, "omp_set_num_threads")]
        self._blas = [functions for path in _loaded(("openblas",)) if (functions := _openblas(ctypes.CDLL(path)))]

    def apply_openmp(self) -> None:
        """Give OpenMP and torch the threads of the current environment and affinity. Starts no thread."""
        asked = _first_number("OMP_NUM_THREADS")
        for library in self._openmp:
            library.omp_set_num_threads(asked or library.omp_get_num_procs())
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.get_num_threads()  # the first question makes torch ask OpenMP and MKL, for this thread

    def apply_environment(self) -> None:
        """Give OpenMP and torch what ``OMP_NUM_THREADS`` says now, whatever they have. Starts no thread."""
        asked = _first_number("OMP_NUM_THREADS")
        torch = sys.modules.get("torch")
        if asked and torch is not None:
            torch.set_num_threads(asked)
        for library in self._openmp if asked else ():
            library.omp_set_num_threads(asked)

    def limit(self) -> None:
        """Give all pools of this process, OpenBLAS's too, what ``OMP_NUM_THREADS`` says, whatever they have."""
        self.apply_environment()
        asked = _first_number("OPENBLAS_NUM_THREADS") or _first_number("OMP_NUM_THREADS")
        for _, put in self._blas if asked else ():
            put(asked)

    def apply(self) -> None:
        """Give all threads of this process what this one was given or has set itself, and OpenBLAS its number.

        Starts threads, so it is the last thing done, in the child itself.
        """
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(torch.get_num_threads())
        asked = _first_number("OPENBLAS_NUM_THREADS") or _first_number("OMP_NUM_THREADS")
        for get, put in self._blas:
            if get() == 1:
                put(asked or len(os.sched_getaffinity(0)))


def _first_number(name: str) -> int:
    """The first number of an environment variable like ``4`` or ``4,2``; 0 when there is none."""
    with contextlib.suppress(ValueError):
        return max(0, int(os.environ.get(name, "").split(",")[0]))
    return 0


def _loaded(names: tuple[str, ...]) -> Iterator[str]:
    """Paths of the shared libraries in this process whose file name has one of these in it."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if ".so" in line}
    yield from sorted(path for path in paths if any(name in Path(path).name for name in names))


def _openblas(library: ctypes.CDLL) -> tuple[Callable[[], int], Callable[[int], object]] | None:
    for prefix in ("scipy_openblas", "openblas"):
        for suffix in ("64_", ""):
            if hasattr(library, f"{prefix}_set_num_threads{suffix}"):
                return (
                    getattr(library, f"{prefix}_get_num_threads{suffix}"),
                    getattr(library, f"{prefix}_set_num_threads{suffix}"),
                )
    return None
