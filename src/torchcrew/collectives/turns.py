"""Turns: the one way in which the ranks of a group wait for each other.

    turn k    rank 0: writes its page k ── comes ──┐ reads all pages k, writes its page k+1 ── comes ──┐
              rank 1: writes its page k ─── comes ─┘ reads all pages k, writes its page k+1 ─── comes ─┘

The rule   What is written before turn k may be read between turn k and turn k+1, and at no other time. Each rank has
           two pages, for even turns and for odd ones: page k+2 is written behind turn k+1, and to that everybody came
           who had read page k. Turns are counted through all collectives of a group: parity that begins anew with
           each of them lets a fast rank write what a slow one still reads.
Coming     is one post to the semaphore of each other rank, even or odd as the turn; all posts of turn k are there
           before one of turn k+2 can be.
Waiting    short: look again and again, for as long as a wake-up costs, where every rank has a core; then sleep in the
           semaphore, and every SLICE see whether a peer has ended, left or failed, or the time is over.
Death      of a peer before it came: `PeerDied` here, within a slice. What it wrote is not read. The group is unusable,
           and says so to those that still wait.
"""

from __future__ import annotations

import math
import os
import time
from typing import NoReturn

from torchcrew.collectives.peers import Peer, Peers
from torchcrew.collectives.segment import Segment, State
from torchcrew.crew.cpus import usable_cores
from torchcrew.errors import CollectiveTimeout, PeerDied

__all__ = ("SLICE", "Turns")

#: Seconds for which a rank looks for its peers before it sleeps, where each has a core for itself; and where not.
SPIN, SPIN_CROWDED = 150e-6, 5e-6
#: Looks between two looks at the clock.
_LOOKS = 16
#: Seconds of one sleep; after each a rank sees whether its peers live: some 10 µs in 10 ms.
SLICE = 0.01
#: The same for those who have waited long, in seconds.
LONG_SLICE, _LONG = 0.02, 1.0


class Turns:
    """The turns of one rank.

    Args:
        segment: the group's memory.
        peers: the group's processes.
    """

    def __init__(self, segment: Segment, peers: Peers) -> None:
        self.segment = segment
        self.peers = peers
        self.number = 0
        self.broken = ""
        """Why the group cannot be used any more."""
        me = peers.me.place
        self._own = [segment.semaphore(me, parity).acquire for parity in (0, 1)]
        self._posts = [[segment.semaphore(peer.place, parity).release for peer in peers.others] for parity in (0, 1)]
        self.spin = SPIN if segment.size <= math.floor(usable_cores()) else SPIN_CROWDED
        """Seconds for which it pays to look before a sleep."""

    @property
    def parity(self) -> int:
        """Of the page to write now. The pages to read are the other ones."""
        return self.number & 1

    def turn(self, deadline: float) -> None:
        """Say that this rank's page is written, and wait until everybody's is.

        Args:
            deadline: on the clock of `time.monotonic`.

        Raises:
            PeerDied: another rank has ended, has left the group, or has failed in it.
            CollectiveTimeout: not all have come in time; says who is missing, and where they are.
        """
        parity = self.number & 1
        for post in self._posts[parity]:
            post()
        self.number += 1
        self.segment.set_turn(self.peers.me.place, self.number)
        missing = len(self.peers.others)
        acquire = self._own[parity]
        while missing and acquire(False):
            missing -= 1
        if missing:
            self._wait(missing, acquire, deadline)

    def _wait(self, missing: int, acquire, deadline: float) -> None:  # type: ignore[no-untyped-def]
        clock = time.perf_counter
        until = clock() + self.spin
        while clock() < until:
            for _ in range(_LOOKS):
                if acquire(False):
                    missing -= 1
                    if not missing:
                        return
            os.sched_yield()
        slice_, until = SLICE, clock() + _LONG
        while missing:
            if acquire(True, slice_):
                missing -= 1
                continue
            if clock() > until:
                slice_ = LONG_SLICE
            gone = self._gone()
            while missing and acquire(False):  # what has ended, had come
                missing -= 1
            if missing and gone:
                self.fail(PeerDied(gone))
            if missing and self.broken:  # another thread has aborted the group, or destroyed it
                raise RuntimeError(f"this process group cannot be used any more: {self.broken}")
            if missing and time.monotonic() > deadline:
                self._give_up()

    def see(self, place: int, seconds: float = 0.5) -> None:
        """Look whether a rank has ended that lacks something: its memory is gone moments before the process is.

        Raises:
            PeerDied: it has.
        """
        peer, until = self.peers.everybody[place], time.monotonic() + seconds
        while time.monotonic() < until:
            if peer in self.peers.dead():
                self.fail(PeerDied(f"{peer} has ended in the middle of a collective, or before it"))
            time.sleep(SLICE)

    def late(self) -> list[Peer]:
        """Those who have not come to the turn that this rank has come to."""
        return [peer for peer in self.peers.others if self.segment.turn(peer.place) < self.number]

    def _gone(self) -> str:
        """Why it is no use to wait for one of those who are late; "" if it may be."""
        late = self.late()
        if not late:
            return ""
        dead = self.peers.dead()
        said = {peer: self.said(peer) for peer in late}
        # Last, who is late: a rank may come to this turn, its last one, and end, while this one looks.
        for peer in self.late():
            if said.get(peer):
                return said[peer]
            if peer in dead:
                return f"{peer} has ended in the middle of a collective, or before it"
        return ""

    def said(self, peer: Peer) -> str:
        """Why another rank takes no part any more, as it says itself; "" if it says nothing."""
        state, reason = self.segment.state(peer.place)
        if state == State.FAILED:
            return f"{peer} failed in a collective of this group: {reason}"
        return f"{peer} has destroyed its process group" if state == State.LEFT else ""

    def _give_up(self) -> None:
        late = self.late()
        if not late:
            return  # they have come meanwhile
        names = ", ".join(map(str, late))
        stacks = self.peers.stacks(late)
        self.fail(
            CollectiveTimeout(f"{names} did not come to a collective before the timeout was over.\n{stacks}".rstrip())
        )

    def fail(self, error: Exception) -> NoReturn:
        """Raise, here and in all that wait for this rank."""
        self.give_up(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        raise error

    def give_up(self, reason: str) -> None:
        """Take part no more; tell the others why. A forked child, which has no part, says nothing."""
        if not self.broken and os.getpid() == self.peers.me.pid:
            self.broken = reason
            self.segment.set_state(self.peers.me.place, State.FAILED, reason)

    def leave(self) -> None:
        """Take part no more, for no bad reason."""
        if not self.broken and os.getpid() == self.peers.me.pid:
            self.broken = "this process has destroyed it"
            self.segment.set_state(self.peers.me.place, State.LEFT)

    def clear(self) -> None:
        """Let go of the segment: nobody is in a turn, or will take one."""
        self._own, self._posts = [], []
