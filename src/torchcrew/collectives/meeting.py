"""How the ranks of a new group find each other: through the store that torch gives them, and /proc.

    rank i      store: "seat i" = host, pid ──► reads all seats: who is on this host
    first one   makes the segment ──► store: "segment" = descriptor, inode
    the others  /proc/PID/fd/N ──► the same segment, if it is that inode ──► store: "joined i", or why not
    all         a first turn: everybody has it ──► the descriptor is closed; nothing of the group has a name

Death      of a rank before it has said its seat: the store's timeout, as for every backend; later: a turn's.
A host is a boot of a kernel and a namespace of pids: what is the same there can open each other's /proc.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed

from torchcrew.collectives.peers import Peer, Peers
from torchcrew.collectives.segment import Segment
from torchcrew.collectives.turns import Turns
from torchcrew.errors import PeerDied

__all__ = ("Meeting", "host_key", "meet", "seats")

#: Seconds for which a rank looks often whether another one has come, and between two looks.
_QUICKLY, _PAUSE = 0.25, 0.0005


def host_key() -> str:
    """What two processes have in common that can share memory."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.geteuid()} {os.environ.get('TORCHCREW_HOST', '')}"


def seats(store: Any, rank: int, size: int) -> list[tuple[str, int]]:
    """Host and pid of every rank of the group.

    Raises:
        RuntimeError: the store's error, where a rank does not come.
    """
    store.set(f"seat {rank}", json.dumps([host_key(), os.getpid()]))
    found = [json.loads(_get(store, f"seat {other}")) for other in range(size)]
    return [(host, pid) for host, pid in found]


def _get(store: Any, key: str) -> bytes:
    """What somebody has written there, or will.

    A `FileStore` looks every 10 ms, which is longer than all the rest takes.
    """
    dist: Any = torch.distributed
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if isinstance(base, dist.FileStore):
        until = time.monotonic() + _QUICKLY
        while time.monotonic() < until and not store.check([key]):
            time.sleep(_PAUSE)
    found: bytes = store.get(key)
    return found


class Meeting:
    """What a rank has when all have met."""

    def __init__(self, segment: Segment, peers: Peers, turns: Turns) -> None:
        self.segment = segment
        self.peers = peers
        self.turns = turns

    def close(self) -> None:
        """Let go of everything; nobody is in a collective, or will call one."""
        self.turns.clear()
        self.peers.close()
        self.segment.close()


def meet(store: Any, place: int, pids: Sequence[int], ranks: Sequence[int], timeout: float) -> Meeting:
    """Join the ranks of one host into a group.

    Args:
        store: where they meet; no other group uses the same keys.
        place: this process's among them.
        pids: of their processes.
        ranks: what people call them.
        timeout: for all of it, in seconds.

    Raises:
        PeerDied, CollectiveTimeout: one of them did not come.
        OSError: this process may not look into another one's /proc, or has no memory to map.
    """
    deadline = time.monotonic() + timeout
    size = len(pids)
    everybody = [Peer(number, rank, pid) for number, (rank, pid) in enumerate(zip(ranks, pids, strict=True))]
    try:
        peers = Peers(everybody, place)
    except ProcessLookupError as error:
        raise PeerDied("a rank has ended before its process group was made") from error
    with ExitStack() as undo:
        undo.callback(peers.close)
        if place == 0:
            fd, segment = Segment.create(size)
            undo.callback(os.close, fd)
            store.set("segment", json.dumps([fd, os.fstat(fd).st_ino]))
        else:
            try:
                fd, inode = json.loads(_get(store, "segment"))
                segment = _join(pids[0], fd, inode, size)
            except OSError as error:
                store.set(f"joined {place}", f"{type(error).__name__}: {error}")
                raise
            store.set(f"joined {place}", "")
        turns = Turns(segment, peers)
        if place == 0:
            _see_that_all_have_joined(store, turns)
        turns.turn(deadline)
        undo.pop_all()
    if place == 0:
        os.close(fd)
    return Meeting(segment, peers, turns)


def _join(pid: int, fd: int, inode: int, size: int) -> Segment:
    """The segment that another process has made."""
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_ino != inode:
            raise OSError(f"descriptor {fd} of process {pid} is not the memory of this process group")
        return Segment(opened, size)
    finally:
        os.close(opened)


def _see_that_all_have_joined(store: Any, turns: Turns) -> None:
    """Of those who cannot join, only the store tells; who has joined, learns it from the first rank's status."""
    for peer in turns.peers.others:
        reason = _get(store, f"joined {peer.place}").decode()
        if reason:
            turns.fail(PeerDied(f"{peer} cannot join the process group: {reason}"))
