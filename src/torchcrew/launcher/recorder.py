"""Writes what a rank's program calls into the ledger, and finds the first call in which two ranks differ.

    rank 0                                     Ledger                        rank 1
    dist.all_reduce(x)                       ┌────────┐                      dist.broadcast(y, src=0)
      begin: "", 5, all_reduce … ──────────► │ rank 0 │ ◄──── compare ────────  begin: "", 5, broadcast …
      compare: nobody else there             ├────────┤                           differs: CollectiveMismatch
      torch's function waits                 │ rank 1 │ ◄──────────────────────── its own came first
      end                                    └────────┘

Every rank writes first and reads then, so whoever comes second sees the difference, before any data is exchanged.
Only ranks of this host are compared, and only calls of the Python functions of `torch.distributed`: of each thread the
outermost one (`all_gather_object` calls `all_gather`). What torch's C++ code does by itself is not seen. Nor are
functions that are not decorated for logging: `isend`, `irecv` and what is made of them, `monitored_barrier` (whose own
error names the rank that is missing). A call with ``async_op=True`` has ended, for the ledger, when it returns: the
time that passes in `Work.wait` is not seen.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from torchcrew import torch_private
from torchcrew.errors import CollectiveMismatch
from torchcrew.launcher import signatures
from torchcrew.launcher.calls import Call, place_of, texts_of
from torchcrew.launcher.ledger import Begun, Ledger

__all__ = ("install", "uninstall")

#: Frames of these files are no places of the user's: torch, ourselves, and what decorates functions of torch.
_OWN_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_OWN_FILES = ("typing_extensions.py", sysconfig.get_path("stdlib") + "/warnings.py")
#: Places that are remembered; a program has fewer.
_SITES = 4096

_installed: _Recorder | None = None


def install(ledger: Ledger, index: int, first: int) -> None:
    """Record this process's collectives and training steps from now on.

    A collective that differs from what a peer has called under the same number of the same group raises
    `CollectiveMismatch` then, in the rank that comes second. All ranks install before any of them makes a group, or all
    of them after: they count the default groups, so as not to compare what they call in different ones.

    Args:
        index: this rank's place in the ledger.
        first: the global rank of place 0; the ranks of this host follow each other.
    """
    global _installed
    uninstall()
    ledger.clear(index)
    _installed = _Recorder(ledger, index, first)


def uninstall() -> None:
    """Undo `install`. Idempotent."""
    global _installed
    recorder, _installed = _installed, None
    if recorder is not None:
        recorder.remove()


@dataclass
class _Group:
    """What is known of one process group."""

    alive: Callable[[], Any]
    name: str
    generation: int
    ranks: list[int]
    peers: tuple[int, ...] = ()
    """Places in the ledger of those to compare with."""
    place: int = 0

    def __post_init__(self) -> None:
        self.place = place_of(self.generation, self.name)


#: A call that a thread is in: the dict that the hook of the thread's outermost call was given, by which its end is
#: known; what is in the ledger; the group's name, and the call's number (0: it has none, or keeps it).
_Open = tuple[dict[str, Any], Begun | None, str, int]


class _Recorder:
    def __init__(self, ledger: Ledger, index: int, first: int) -> None:
        self.ledger = ledger
        self.index = index
        self.first = first
        self.lock = threading.RLock()
        self.generation = 0
        self.world: _Group | None = None
        self.groups: dict[int, _Group] = {}
        # Calls begun by group name; a group that is made anew under an old name goes on counting, in all its ranks.
        self.counts: dict[str, int] = {}
        self.open: dict[int, _Open] = {}  # by thread
        self.undo: list[Callable[[], None]] = []
        if dist.is_available():
            self.generation = int(dist.is_initialized())
            self.hook()

    def hook(self) -> None:
        """Be called by torch from now on."""
        hooks = [
            torch_private.hook_model_steps(self.step),
            torch_private.watch_default_group(self.world_changed),
            *(
                torch_private.hook_collective(name, partial(self.begin, name, collective), self.refused, self.end)
                for name, collective in signatures.COLLECTIVES.items()
            ),
        ]
        self.undo = [undo for undo in hooks if undo is not None]
        for function in (_Recorder.begin, _Recorder.end, _Recorder.refused, _Recorder.step):
            torch_private.leave_uncompiled(function, recursive=True)

    def remove(self) -> None:
        """Be called no more."""
        for undo in reversed(self.undo):
            undo()
        self.undo.clear()

    def step(self) -> None:
        """A model is about to compute."""
        self.ledger.step(self.index)

    def world_changed(self, group: Any) -> None:
        """The default group was made, or destroyed (None)."""
        with self.lock:
            self.world = None
            self.groups.clear()
            self.counts.clear()
            if group is not None:
                self.generation += 1

    def begin(
        self, name: str, collective: signatures.Collective, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Write the call, unless the thread is in one, and compare it.

        Raises:
            CollectiveMismatch: a peer has called something else.
        """
        thread = get_ident()
        outer = self.open.get(thread)
        if outer is not None:
            # The outer one has reached its peers by now: what it may raise yet does not take its number back.
            self.open[thread] = (*outer[:3], 0)
            return
        self.open[thread] = (kwargs, None, "", 0)
        try:
            asked = collective.read(*args, **kwargs)
            group = self.group_of(asked.group)
            if group is None or asked.alone:
                return
            what = signatures.what(name, asked, group.ranks)
        except Exception:  # whatever is wrong with its arguments, torch says better
            return
        texts = texts_of(group.name, _site())
        with self.lock:
            number = 0
            if collective.counted:
                number = self.counts[group.name] = self.counts.get(group.name, 0) + 1
            begun = self.ledger.begin_packed(self.index, group.place, group.generation, number, what, texts)
            self.open[thread] = (kwargs, begun, group.name, number)
        # The lock's release keeps the processor from reading what follows before others can see what was written.
        if number and group.peers:
            for peer, mine, theirs in self.ledger.unlike(begun, group.peers):
                if signatures.differ(mine, theirs):
                    raise CollectiveMismatch(self.explain(group, peer, mine, theirs))

    def end(self, kwargs: dict[str, Any]) -> None:
        """The thread's call, if it was written, has ended; another thread may still be in one."""
        thread = get_ident()
        call = self.open.get(thread)
        if call is None or call[0] is not kwargs:
            return
        with self.lock:
            del self.open[thread]
            if call[1] is not None:
                # Copied at once: another thread may be about to begin.
                others = [begun for _, begun, *_ in list(self.open.values()) if begun] if self.open else None
                self.ledger.end(self.index, others[-1] if others else None)

    def refused(self, kwargs: dict[str, Any]) -> None:
        """The call has reached nobody: its number is the next one's. All ranks that made the same mistake do so."""
        call = self.open.get(get_ident())
        if call is None:
            return
        outermost, begun, group, number = call
        if outermost is not kwargs or begun is None:
            return
        with self.lock:
            if number and self.counts.get(group) == number:
                self.counts[group] = number - 1
                self.ledger.withdraw(self.index, begun)

    def group_of(self, group: Any) -> _Group | None:
        """What is known of the group; None when this rank is not in it, or there is none."""
        if group is None:
            if self.world is not None:
                return self.world
            group = dist.group.WORLD
        found = self.groups.get(id(group))
        if found is not None and found.alive() is group:
            return found
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        with self.lock:
            return self.learn(group)

    def learn(self, group: Any) -> _Group:
        """Find out about a group that is new."""
        ranks = dist.get_process_group_ranks(group)
        is_world = group is dist.group.WORLD
        # A program may count its ranks in its own way: then we do not know where its peers are.
        known_ranks = dist.get_rank() == self.first + self.index and dist.get_backend(group) != "fake"
        known = _Group(
            weakref.ref(group),
            "" if is_world else group.group_name,
            self.generation if known_ranks else 0,
            ranks,
            self.peers_among(ranks) if known_ranks else (),
        )
        self.groups[id(group)] = known
        if is_world:
            self.world = known
        return known

    def peers_among(self, ranks: list[int]) -> tuple[int, ...]:
        """Those of the group on this host to compare with: all of up to eight, else some at doubling distances.

        Any two neighbours are compared, so wherever ranks of a large group differ, one of them sees it.
        """
        here = [rank - self.first for rank in ranks if 0 <= rank - self.first < self.ledger.count]
        mine = here.index(self.index)
        if len(here) <= 8:
            return tuple(here[:mine] + here[mine + 1 :])
        steps = [1 << power for power in range((len(here) // 2).bit_length())]
        return tuple({here[(mine + sign * step) % len(here)]: None for step in steps for sign in (-1, 1)})

    def explain(self, group: _Group, peer: int, mine: Call, theirs: Call) -> str:
        where = f"group {group.name} (ranks {group.ranks})" if group.name else "the default group"
        return (
            f"rank {self.first + self.index} calls {signatures.described(mine)} as operation {mine.sequence} of "
            f"{where}, where rank {self.first + peer} calls {signatures.described(theirs)}"
        )


os.register_at_fork(after_in_child=uninstall)  # the children of a rank are none

_is_own: dict[str, bool] = {}
_sites: dict[tuple[int, int], tuple[str, CodeType]] = {}


def _site() -> str:
    """File and line of the innermost frame that is the user's."""
    frame: Any = sys._getframe(4)  # past our hook, into the wrapper that is torch's
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        own = _is_own.get(file)
        if own is None:
            own = _is_own[file] = file.startswith(_OWN_FOLDERS) or file.endswith(_OWN_FILES)
        if not own:
            break
        frame = frame.f_back
    else:
        return ""
    key = (id(code), frame.f_lasti)
    known = _sites.get(key)
    if known is None:
        if len(_sites) >= _SITES:
            _sites.clear()
        known = _sites[key] = (f"{os.path.basename(file)}:{frame.f_lineno}", code)  # the code, lest its id be reused
    return known[0]
