"""Which rank of its crew this process is, where it is one, for what a program asks without saying its rank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Rank", "become", "current")


@dataclass(frozen=True)
class Rank:
    """The place of a process among those that were started together."""

    index: int
    """From 0 on."""
    count: int
    """How many were started."""


_current: Rank | None = None


def become(rank: Rank) -> None:
    """Make this process, and what it forks from now on, that rank."""
    global _current
    _current = rank


def current() -> Rank | None:
    """The rank that this process is; None outside of a crew."""
    return _current
