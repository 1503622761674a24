"""What a process is told that waits at a queue whose other holders die: an error when none is left, warnings before."""

from __future__ import annotations

import warnings
from queue import Empty

from torchcrew.channel import peers
from torchcrew.channel.holders import Deserted, Holders
from torchcrew.errors import PeerDied
from torchcrew.multiprocessing import children
from torchcrew.multiprocessing.forking import users_level

__all__ = ("nothing_came", "peer_died", "warn_of_failures")


def nothing_came(holders: Holders, error: Exception, block: bool) -> Exception:
    """What a `get` raises that had nothing to return."""
    if isinstance(error, Deserted) or (block and holders.deserted()):
        return peer_died(holders, "is empty, and nobody is left to put something in")
    return Empty()


def peer_died(holders: Holders, what: str) -> PeerDied:
    """The error that names everybody who held the queue and is gone; they count as looked at then."""
    ended = [peers.how_it_ended(pid) for pid in dict.fromkeys(holders.gone)]
    for one in ended:
        child = children.recent(one.pid)
        if child is not None:
            child.dismiss()
    who = ", ".join(map(str, ended))
    return PeerDied(f"the queue {what}: every other process that held it has ended: {who}")


def warn_of_failures(pids: list[int]) -> None:
    """Warn of those that failed, while others are left."""
    for pid in dict.fromkeys(pids):
        ended = peers.how_it_ended(pid)
        if ended.failed:
            warnings.warn(
                f"{ended} is gone; this process goes on waiting at a queue that it held, for those that are left",
                RuntimeWarning,
                stacklevel=users_level(),
            )


def _recent(pid: int) -> peers.Ended | None:
    child = children.recent(pid)
    return None if child is None else peers.Ended(child.name, pid, child.code)


peers.remember_with(_recent)
