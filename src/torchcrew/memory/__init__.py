"""Shared memory: arenas of recycled blocks, leased to consumers.

The names here are what users may call; the layers above use the modules.
"""

from torchcrew.memory.limits import default_budget, memory_limit
from torchcrew.memory.pool import idle_bytes, trim

__all__ = ("default_budget", "idle_bytes", "memory_limit", "trim")
