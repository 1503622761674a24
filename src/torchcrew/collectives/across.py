"""The process group of ranks on several hosts: torch's names for `HostCollectives`, and messages by gloo.

Owner      of this host's memory and of gloo's groups: the process group, until it is destroyed.
Death      while the ranks meet: the timeout, as for every backend; then as `hosts` says. A message to or from
           a rank that is gone fails with gloo's error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed

from torchcrew.collectives.hosts import HostCollectives, Layout
from torchcrew.collectives.link import Link
from torchcrew.collectives.meeting import Meeting, meet
from torchcrew.collectives.process_group import CrewProcessGroup

__all__ = ("HostsProcessGroup", "make_across")


class HostsProcessGroup(CrewProcessGroup):
    """One rank's end of a group across hosts.

    Args:
        meeting: the others of this host.
        layout: who is where.
        ranks: what people call the ranks.
        timeout: of a collective.
        leaders: gloo among the first rank of each host, in one of them.
        everybody: gloo among all.
    """

    def __init__(
        self,
        meeting: Meeting,
        layout: Layout,
        ranks: Sequence[int],
        timeout: timedelta,
        leaders: Link | None,
        everybody: Link,
    ) -> None:
        super().__init__(meeting, layout.rank, ranks, timeout)
        self._links = [everybody] if leaders is None else [everybody, leaders]
        self._collectives: Any = HostCollectives(self._collectives, layout, ranks, leaders, everybody)
        self._gloo = everybody.group

    def set_timeout(self, timeout: timedelta) -> None:
        """Of collectives and messages from now on."""
        super().set_timeout(timeout)
        self._gloo.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group."""
        super().shutdown()
        if self._pid != os.getpid():
            return
        for link in self._links:
            link.close()

    def abort(self) -> None:
        """As `shutdown`, without finishing what is pending."""
        self._collectives.give_up("its process group was aborted")
        super().abort()

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        """Send a tensor to a rank, by gloo."""
        self._collectives.usable()
        return self._gloo.send(tensors, rank, tag)

    def recv(self, tensors: Any, rank: int, tag: int) -> Any:
        """Receive one from a rank."""
        self._collectives.usable()
        return self._gloo.recv(tensors, rank, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        """Receive one from whoever sends."""
        self._collectives.usable()
        return self._gloo.recv_anysource(tensors, tag)


def make_across(
    store: Any, rank: int, found: Sequence[tuple[str, int]], ranks: Sequence[int], timeout: timedelta
) -> HostsProcessGroup:
    """Make this rank's end of a group that has ranks on several hosts.

    Args:
        store: where they meet; no other group uses the same keys.
        rank: of this process in the group.
        found: host and pid of every rank.
        ranks: what people call them.
        timeout: of collectives, and to meet.

    Raises:
        RuntimeError: this torch has no gloo, or not all come in time.
    """
    if not distributed.is_gloo_available():
        raise RuntimeError("the ranks of this group are on several hosts, and this build of torch has no gloo")
    dist: Any = distributed  # its type hints leave out the stores
    prefixed = dist.PrefixStore
    layout = Layout([host for host, _ in found], rank)
    here = layout.ranks[layout.here]
    pids, names = [found[other][1] for other in here], [ranks[other] for other in here]
    place = layout.place_of[rank]
    meeting = meet(prefixed(f"host {layout.here}", store), place, pids, names, timeout.total_seconds())
    leaders = None
    try:
        everybody = Link(prefixed("everybody", store), rank, layout.size, timeout)
        if place == 0:
            leaders = Link(prefixed("leaders", store), layout.here, len(layout.ranks), timeout)
    except BaseException as error:
        meeting.turns.give_up(f"{type(error).__name__}: {error}")
        meeting.close()
        raise
    group = HostsProcessGroup(meeting, layout, ranks, timeout, leaders, everybody)
    # A rank that is done at once closes connections that others are still making, and those fail.
    group.monitored_barrier()
    return group
