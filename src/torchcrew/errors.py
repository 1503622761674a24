"""The error tree: every error torchcrew raises by itself, each a subclass of what users already catch."""

__all__ = ("ArenaFull", "PeerDied", "TorchcrewError", "WorkerDied")


class TorchcrewError(RuntimeError):
    """Base of torchcrew's own errors; catch it to catch them all."""


class ArenaFull(TorchcrewError, MemoryError):
    """A message needs more shared memory than the budget leaves; names the budget and the option that raises it."""


class PeerDied(TorchcrewError, ConnectionError):
    """The process at the other end of a channel is gone; says which one and how it ended."""


class WorkerDied(TorchcrewError):
    """A worker ended without being asked to; says which one and how."""
