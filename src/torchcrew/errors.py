"""The error tree: every error torchcrew raises by itself, each a subclass of what users already catch."""

__all__ = ("ArenaFull", "TorchcrewError")


class TorchcrewError(RuntimeError):
    """Base of torchcrew's own errors; catch it to catch them all."""


class ArenaFull(TorchcrewError, MemoryError):
    """A message needs more shared memory than the budget leaves; names the budget and the option that raises it."""
