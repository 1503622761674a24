"""The consumer's side of snapshots: what was received is claimed, then decoded into views of its producer's arena.

    begin_receiving ─► receive ─► claims[slot] = this participant, leases ─► end_receiving ─► decode
                                    └─ the arena, by its key: known already, or opened from the descriptor beside it

Owner      of an arena's descriptor: this module, for as long as messages from it keep coming (`KEEP_IDLE`); the views
           of it keep what they need: the mapping, and the presence by which producers know that the claim holds.
Death      between receiving and claiming: the producer sees a block that nobody claimed, and nobody receiving.
           later: the lock of the presence is gone, and with it the claims, when the forked children are gone, too.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
import weakref
from queue import Empty
from typing import Any, NamedTuple

from torchcrew.channel.claims import ClaimedArena, Claims
from torchcrew.channel.envelope import open_packet, receive_packet
from torchcrew.channel.holders import Deserted, Holders
from torchcrew.channel.message import decode
from torchcrew.channel.parcel import LOAN, TAIL
from torchcrew.channel.sharing import Passed
from torchcrew.memory.lease import FREE, SWEEP_EVERY, sweep_now_and_then

__all__ = ("KEEP_IDLE", "Borrower", "Received")

#: Arenas kept open at once; each costs a descriptor, and address space for the windows looked at.
_ARENAS = 64
#: Seconds for which an arena that no message comes from is kept open.
KEEP_IDLE = 1.0


class Received(NamedTuple):
    """A message whose blocks are claimed; to be decoded."""

    header: memoryview
    body: memoryview
    views: dict[int, Any]
    fds: list[Passed]


class Borrower:
    """What one process receives of one channel. Every method may be called by any thread.

    Args:
        claims: the channel's.
        sock: where the packets come from.
    """

    def __init__(self, claims: Claims, sock: socket.socket) -> None:
        self._claims = claims
        self._sock = sock
        self._lock = threading.RLock()
        #: Arenas by key, and when they were last used; the one used last comes last.
        self._arenas: dict[int, tuple[ClaimedArena, float]] = {}
        _all.add(self)

    def take(self, *, linger: bool = False) -> Received | None:
        """Receive one packet, if there is one, and claim what is in it.

        Args:
            linger: look for some microseconds.

        Raises:
            EOFError: nobody can send any more.
            TooManyDescriptors: the message is lost.
        """
        self._claims.begin_receiving()
        try:
            received = receive_packet(self._sock, linger=linger)
            return None if received is None else self._claim(*open_packet(received))
        finally:
            self._claims.end_receiving()

    def _claim(self, number: int, payload: memoryview, fds: list[Passed]) -> Received:
        key, length, count = TAIL.unpack_from(payload, len(payload) - TAIL.size)
        end = len(payload) - TAIL.size - LOAN.size * count
        header, body = payload[end - length : end], payload[: end - length]
        if not count:
            return Received(header, body, {}, fds)
        loans = list(LOAN.iter_unpack(payload[end : end + LOAN.size * count]))
        with self._lock:  # another thread may be about to close what is idle
            arena = self._open(key, fds.pop(0))
            return Received(header, body, self._lease(arena, loans), fds)

    def _lease(self, arena: ClaimedArena, loans: list[Any]) -> dict[int, Any]:
        mine = self._claims.register().number
        for slot, _, _ in loans:
            arena.claims[slot] = mine
        views: dict[int, Any] = {}
        try:
            for loan in loans:
                views[loan[0]] = arena.lease(loan)
        except BaseException:
            for slot, _, _ in loans[len(views) + 1 :]:  # the one that failed is free already
                arena.table[slot] = FREE
            raise
        return views

    def _open(self, key: int, passed: Passed) -> ClaimedArena:
        arena, _ = self._arenas.pop(key, (None, 0.0))
        if arena is None:
            arena = ClaimedArena(passed.detach(), self._claims.register())
        self._arenas[key] = arena, time.monotonic()
        while len(self._arenas) > _ARENAS:
            self._arenas.pop(next(iter(self._arenas)))[0].close()
        return arena

    def decode(self, received: Received) -> Any:
        """The object; its tensors and arrays are views that nobody else has.

        Raises:
            Exception: whatever unpickling raises; the blocks are given back.
        """
        header, body, views, fds = received
        return decode(header, body, lambda loan: views[loan[0]], fds)

    def wait(self, holders: Holders, deadline: float | None) -> Received:
        """Wait for a packet; see `take`.

        Args:
            holders: the other processes that may send one.
            deadline: of `time.monotonic`; None: as long as it takes.

        Raises:
            Empty: none came in time.
            Deserted: without a deadline only: nobody is left who could send one.
        """

        def attempt() -> Received | None:
            received = self.take()
            if received is None and deadline is None and holders.deserted():
                received = self.take()  # the last thing that they did may have been to send one
                if received is None:
                    raise Deserted
            return received

        self._claims.begin_waiting()
        try:
            while True:
                left = nap = self.nap()
                if deadline is not None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise Empty
                    left = left if nap is None else min(nap, left)
                with contextlib.suppress(Empty):  # after a nap; if it is more, the next turn says so
                    received: Received = holders.wait(attempt, self._sock.fileno(), select.POLLIN, left)
                    return received
        finally:
            self._claims.end_waiting()

    def nap(self) -> float | None:
        """To be called before sleeping until a message comes: for how many seconds at most."""
        nap = SWEEP_EVERY if sweep_now_and_then() else None
        if self._arenas:
            now = time.monotonic()
            with self._lock:
                for key, (arena, used) in list(self._arenas.items()):
                    if now - used >= KEEP_IDLE:
                        del self._arenas[key]
                        arena.close()
            if self._arenas:
                nap = nap or KEEP_IDLE
        return nap

    def close(self) -> None:
        """Let go of all arenas; views stay valid. Idempotent."""
        with self._lock:
            while self._arenas:
                self._arenas.popitem()[1][0].close()

    def __del__(self) -> None:
        if hasattr(self, "_arenas"):
            self.close()

    def after_fork_in_child(self) -> None:
        """What the child receives it claims as itself."""
        self._lock = threading.RLock()
        self.close()


_all: weakref.WeakSet[Borrower] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for borrower in list(_all):
        borrower.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
