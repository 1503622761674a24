"""Where every process of a program is: what `torchcrew stacks` prints of any program of this user.

PID ──► the program that it belongs to ──► all its processes ──► their stacks, asked at once
                                           └─ ledgers among their descriptors: what ranks do comes first
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping

from torchcrew.crew import stacks
from torchcrew.crew.stack_text import Stacks, printable
from torchcrew.launcher.hang import TIMEOUT, Member, ask, explained, gone, stack_lines
from torchcrew.launcher.ledger import Ledger

__all__ = ("answers", "report")

_NOTHING = "nothing of torchcrew is in process {}, nor in a process that it started"


def report(pid: int) -> str:
    """The stacks of a program; if it has ranks, what they do comes first.

    Args:
        pid: of the program's first process, or of any other one of it that offers its stacks.

    Raises:
        ProcessLookupError: there is no such process.
        PermissionError: it is another user's.
        ValueError: nothing of torchcrew is in it, or it has started several programs, which it lists. Nobody is asked
            then. Each says so in one sentence.
    """
    processes, pids = _program(pid)
    with contextlib.ExitStack() as opened:
        ledgers = _ledgers(pids)
        for ledger in ledgers:
            opened.callback(ledger.close)
        ranks = {other for ledger in ledgers for _, other in ledger.members()}
        found = ask(processes.of(*pids, *ranks))
        if not ledgers and not any(answer.label for answer in found.values()):
            raise ValueError(_NOTHING.format(pid))
        parts = []
        shown: set[int] = set()
        for ledger in ledgers:
            first = _first(ledger, found)
            members = [Member(first + index, other) for index, other in ledger.members()]
            theirs = {member.pid: found.get(member.pid, gone(member.pid)) for member in members}
            theirs |= {other: found[other] for other in processes.of(*theirs) if other in found}
            parts.append(explained(members, ledger, theirs, first))
            shown |= {other for other, answer in theirs.items() if answer.label or other in ranks}
    rest = [answer for answer in found.values() if answer.pid not in shown]
    parts += stack_lines(answer for answer in rest if answer.label)
    if silent := [answer.pid for answer in rest if not answer.label]:
        parts.append(f"without stacks: {', '.join(f'{_command(other)} ({other})' for other in silent)}")
    return "\n\n".join(parts)


def answers(pid: int) -> list[Stacks]:
    """The stacks of each process of a program; raises as `report` does."""
    found = stacks.ask(_program(pid)[1], TIMEOUT)
    if not any(answer.label for answer in found):
        raise ValueError(_NOTHING.format(pid))
    return found


def _program(pid: int) -> tuple[stacks.Processes, list[int]]:
    """The processes of the program to which a process belongs, or which it alone has started."""
    if not stacks.exists(pid):
        raise ProcessLookupError(f"there is no process {pid}")
    if os.geteuid() not in (0, os.stat(f"/proc/{pid}").st_uid):
        raise PermissionError(f"process {pid} belongs to another user")
    processes = stacks.Processes(pid)
    first = processes.program_of(pid)
    programs = processes.programs(first)
    if len(programs) > 1:
        lines = [f"  {one}  {_words(one)} ({len(processes.of(one))} processes)" for one in programs]
        raise ValueError("\n".join([f"process {pid} has started several programs, give the pid of one:", *lines]))
    return processes, processes.of(*programs or [first])


def _first(ledger: Ledger, found: Mapping[int, Stacks]) -> int:
    """The number that the first rank of a ledger has among those of all hosts, as the ranks tell."""
    for index, pid in ledger.members():
        match = re.fullmatch(r"rank (\d+)", found[pid].label) if pid in found else None
        if match is not None:
            return max(0, int(match[1]) - index)
    return 0


def _ledgers(pids: Iterable[int]) -> list[Ledger]:
    """The ledgers that these processes have, one for each crew."""
    found: dict[tuple[tuple[int, int], ...], Ledger] = {}
    for pid in pids:
        ledger = Ledger.of_process(pid)
        if ledger is None:
            continue
        key = tuple(ledger.members())
        if key in found or not key:
            ledger.close()
        else:
            found[key] = ledger
    return list(found.values())


def _command(pid: int) -> str:
    """What a process without stacks is."""
    words = _words(pid, longest=1 << 16)
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            name = file.read().strip()
    except OSError:
        return "ended"
    if re.search(r"guardian_main\.py( |$)", words):
        return "torchcrew's guardian"
    return "torchcrew's zygote" if name == "torchcrew-zygot" else printable(name)


def _words(pid: int, longest: int = 100) -> str:
    """The command line of a process."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "ended"
    return printable(words if len(words) <= longest else words[: longest - 3] + "...")
