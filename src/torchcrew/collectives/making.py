"""From what torch says of a new group to the group."""

from __future__ import annotations

from typing import Any

from torchcrew.collectives.meeting import meet, seats
from torchcrew.collectives.process_group import CrewProcessGroup
from torchcrew.crew import stacks

__all__ = ("make",)


def make(options: Any) -> CrewProcessGroup:
    """Make this rank's end of a group.

    Args:
        options: torch's `_DistributedBackendOptions`.

    Raises:
        RuntimeError: the ranks do not meet in time.
    """
    if not stacks.descriptors():
        stacks.offer("a rank of a process group")  # peers that wait for it in vain say where it is
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group) or list(range(size))
    found = seats(options.store, rank, size)
    if len({host for host, _ in found}) > 1:
        from torchcrew.collectives.across import make_across  # few groups need it

        return make_across(options.store, rank, found, ranks, timeout)
    meeting = meet(options.store, rank, [pid for _, pid in found], ranks, timeout.total_seconds())
    return CrewProcessGroup(meeting, rank, ranks, timeout)
