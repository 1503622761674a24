"""The error tree: every error torchcrew raises by itself, each a subclass of what users already catch."""

import errno
from concurrent.futures.process import BrokenProcessPool
from queue import Empty

__all__ = (
    "ArenaFull",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "HostFailed",
    "PeerDied",
    "PoolBroken",
    "QueueClosed",
    "RankDied",
    "RankFailed",
    "RanksStuck",
    "TooManyDescriptors",
    "TorchcrewError",
    "WorkerDied",
)


class TorchcrewError(RuntimeError):
    """Base of torchcrew's own errors; catch it to catch them all."""


class ArenaFull(TorchcrewError, MemoryError):
    """A message needs more shared memory than the budget leaves; names the budget and the option that raises it."""


class HostFailed(TorchcrewError):
    """Another machine of a job failed, or is gone; says which one, and why where it has said so."""


class CollectiveMismatch(TorchcrewError):
    """Two ranks call different collectives where they must call the same one; names both, and where they are called."""


class CollectiveTimeout(TorchcrewError, TimeoutError):
    """Some ranks did not come to a collective within the timeout of its group; names them, and where they are."""


class PeerDied(TorchcrewError, Empty, EOFError):
    """Nothing will come any more: every other process that could send it is gone; says which ones, and how they ended.

    A `queue.Empty`, too: who asked with a timeout and looks after his processes when nothing came, need not change.
    """


class PoolBroken(TorchcrewError, BrokenProcessPool):
    """A pool has no workers and gets none: their initializer fails, or they cannot be started; says why."""


class QueueClosed(TorchcrewError, EOFError, ValueError):
    """The queue was closed for all processes (`EOFError`), or in this one (`ValueError`, as the standard library's)."""


class TooManyDescriptors(TorchcrewError, OSError):
    """A message's shared memory cannot be received or sent: this process has no descriptor left for it."""

    def __init__(self) -> None:
        super().__init__(
            errno.EMFILE,
            "no file descriptor is left: every shared tensor keeps one. Send fewer, larger tensors, let go of those "
            "you no longer need, send snapshots through torchcrew.Queue, or raise the limit (ulimit -n)",
        )

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class RankFailed(TorchcrewError):
    """A rank failed: the cause of the exception that `launch` raises, or itself where that cannot be rebuilt here."""

    rank: int | None = None
    """Among the ranks of its job."""
    pid: int | None = None
    host: str | None = None
    exitcode: int | None = None
    """As `multiprocessing.Process.exitcode`; None for one that raised an exception."""
    signal: str | None = None
    """The name of the signal that ended it, like "SIGKILL"."""
    stderr: tuple[str, ...] = ()
    """The last lines that it wrote there."""


class RankDied(RankFailed):
    """A rank ended without having been asked to; says which one, how, and the last lines it wrote."""


class RanksStuck(TorchcrewError, TimeoutError):
    """No rank has made any progress for as long as ``timeout`` says; says where each of them is."""


class WorkerDied(TorchcrewError, BrokenProcessPool):
    """A worker process ended in the middle of a task; says which one, how it ended, and what it was doing.

    That task is lost. The others are not, although `BrokenProcessPool` of `concurrent.futures` would mean so.
    """

    pid: int | None = None
    """The process that ended."""
    exitcode: int | None = None
    """As `multiprocessing.Process.exitcode`; None where somebody else has taken it."""
