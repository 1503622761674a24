"""Which processes are a program together: by who started whom, and by whom each says it works for."""

from __future__ import annotations

import contextlib
import os

from torchcrew.crew.stack_asking import numbers_in, owner_of, stat_of, user_of

__all__ = ("Processes", "members")


class Processes:
    """What there is of processes at one moment: those of the users whom the given ones belong to. Sends no signal."""

    def __init__(self, *pids: int) -> None:
        uids = {owner_of(pid) for pid in pids} - {None} or {os.geteuid()}
        self._parents: dict[int, int] = {}
        self._users: dict[int, int] = {}  # of those that offer their stacks
        for pid in numbers_in("/proc"):
            if owner_of(pid) not in uids:
                continue
            with contextlib.suppress(OSError, ValueError):
                self._parents[pid] = int(stat_of(pid)[1])
                user = user_of(pid)
                if user is not None:
                    self._users[pid] = user

    def of(self, *pids: int) -> list[int]:
        """These, their descendants, and those that work for one of them, also when who forked those is gone."""
        belong = set(pids)
        while more := {
            pid
            for pid, parent in self._parents.items()
            if pid not in belong and (parent in belong or self._users.get(pid) in belong)
        }:
            belong |= more
        return sorted(belong & self._parents.keys())

    def program_of(self, pid: int) -> int:
        """The process that started the program of a process that offers its stacks; of any other one itself."""
        seen = {pid}
        while (user := self._users.get(pid, 0)) in self._users and user not in seen:
            seen.add(user)
            pid = user
        return pid

    def programs(self, pid: int) -> list[int]:
        """The programs of a process and its descendants: processes for which others work, and that work for none.

        One that another of them has started is no further one.
        """
        belong = set(self.of(pid))
        users = {self._users.get(member, 0) for member in belong} & belong
        firsts = {user for user in users if self._users.get(user, 0) not in belong}
        return sorted(first for first in firsts if not any(first in self.of(other) for other in firsts - {first}))


def members(*pids: int) -> list[int]:
    """The processes of one program, or of several: `Processes.of` at this moment."""
    return Processes(*pids).of(*pids)
