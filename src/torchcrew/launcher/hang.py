"""The explanation of a hang, in words: where each rank is, who is missing from a collective, and all stacks.

    who asks ──► ledger (memfd): phase, collective, steps of each rank          readable whatever its writer does
             ──► stacks of the ranks and of the processes that work for them    none of one that is stopped

Nothing here waits longer than `TIMEOUT`, and no process is harmed by being asked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchcrew.crew import stacks
from torchcrew.crew.stack_text import Frame, Stacks, printable
from torchcrew.launcher.frames import lines_of, place, site, users_frame, wait_for_ranks
from torchcrew.launcher.ledger import CALLS_KEPT, Call, Entry, Ledger, Phase

__all__ = ("TIMEOUT", "Member", "ask", "explain", "explained", "gone", "stack_lines")

#: How long processes may take to answer, in seconds: milliseconds are usual.
TIMEOUT = 1.0
#: So many ranks in a row are written as "4-7".
_RUN = 4

#: Functions of torch's loader that wait for its workers.
_LOADER_WAITS = frozenset({"_get_data", "_try_get_data"})
_PLURALS = {"waits": "wait", "is": "are", "has": "have", "runs": "run", "belongs": "belong", "does": "do"}
_PLURALS |= {"blocks": "block", "was": "were", "sleeps": "sleep"}


@dataclass(frozen=True)
class Member:
    """A rank, and its process."""

    rank: int
    pid: int
    ended: str = ""
    """How its process ended, if somebody knows: "killed by SIGKILL"."""


@dataclass(frozen=True)
class _Rank:
    """What is known of a rank."""

    member: Member
    index: int
    entry: Entry
    stacks: Stacks

    @property
    def number(self) -> int:
        return self.member.rank

    def waits_for_loader(self) -> bool:
        """Whether it waits for the workers of a DataLoader."""
        return any(
            frame.function in _LOADER_WAITS and frame.file.endswith("torch/utils/data/dataloader.py")
            for frame in _inside(self.stacks.main)
        )


def explain(members: Sequence[Member], ledger: Ledger) -> str:
    """Say in one sentence where every rank is, then who is missing, then show the stacks.

    Args:
        members: ranks of this host.
        ledger: theirs.
    """
    pids = [member.pid for member in members]
    return explained(members, ledger, ask({*pids, *stacks.members(*pids)}))


def ask(pids: Iterable[int]) -> dict[int, Stacks]:
    """The answers of processes by their pids."""
    return {answer.pid: answer for answer in stacks.ask(pids, TIMEOUT)}


def gone(pid: int) -> Stacks:
    """What a process that is gone would answer."""
    return Stacks(pid, problem="has ended")


# The explanation -----------------------------------------------------------------------------------------------------


def explained(members: Sequence[Member], ledger: Ledger, found: Mapping[int, Stacks], first: int | None = None) -> str:
    """`explain`, given the answers of ranks and of what works for them.

    Args:
        members: ranks of this host.
        ledger: theirs.
        found: the answers by pid.
        first: the number of the ledger's first rank, where it is known.
    """
    # On every host but the first the ledger's numbers are not the ranks'.
    if first is None:
        first = 0 if all(member.rank < ledger.count for member in members) else min(member.rank for member in members)
    ranks = [
        _Rank(member, member.rank - first, ledger.entry(member.rank - first), found[member.pid])
        for member in sorted(members, key=lambda member: member.rank)
    ]
    pids = {member.pid for member in members}
    children = [answer for answer in found.values() if answer.pid not in pids and answer.label]
    ahead = _ahead(ranks, ledger)
    sentence = "; ".join([*_positions(ranks, ahead), *_workers(ranks, children)])
    missing = _missing(ranks, ledger)
    missing += [text for text in _behind(ranks, ledger, ahead) if text.replace("behind", "missing from") not in missing]
    own = [_as_rank(rank) for rank in ranks if rank.entry.phase is not Phase.RETURNED]
    return "\n\n".join(["\n".join(map(printable, [sentence, *missing])), *stack_lines(own), *stack_lines(children)])


def _as_rank(rank: _Rank) -> Stacks:
    answer = rank.stacks
    return Stacks(answer.pid, f"rank {rank.number}", answer.state, answer.threads, answer.problem, answer.user)


def _positions(ranks: Sequence[_Rank], ahead: Mapping[int, Call]) -> list[str]:
    """Where the ranks are, those in the same place together; first those in collectives, most ranks first."""
    groups: dict[str, list[_Rank]] = {}
    for rank in ranks:
        after = f" after {_title(ahead[rank.number])}" if rank.number in ahead else ""
        groups.setdefault(_position(rank) + after, []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (not item[0].startswith("waits in "), -len(item[1])))
    return [f"{_named('rank', [rank.number for rank in those])} {_for(text, those)}" for text, those in ordered]


def _for(text: str, those: Collection[object]) -> str:
    """A phrase that begins with a verb in the singular, for so many."""
    if len(those) == 1:
        return text
    verb, space, rest = text.partition(" ")
    return _PLURALS.get(verb, verb) + space + rest.replace("for its loader's", "for their loaders'")


def _position(rank: _Rank) -> str:
    """What a rank does, in words that begin with a verb."""
    answer, phase = rank.stacks, rank.entry.phase
    gone = answer.problem == "has ended"
    if rank.member.ended or (gone and phase not in (Phase.RETURNED, Phase.FAILED)):
        return f"has ended: {rank.member.ended}" if rank.member.ended else "has ended"
    if phase is Phase.RETURNED:
        return "has returned"
    if phase is Phase.FAILED:
        return "has failed"
    doing, where = _doing(rank)
    if not answer.problem:
        return f"{doing} {where}"
    return f"{answer.problem} {where}" if where.startswith("in ") else answer.problem


def _doing(rank: _Rank) -> tuple[str, str]:
    """A verb and a place, the place alone with a preposition: "waits", "in all_reduce #118 (train.py:40)"."""
    entry, frames = rank.entry, rank.stacks.main
    mine = users_frame(frames)
    if entry.phase is Phase.IDLE:
        return "waits", "for something to run"
    if entry.phase is Phase.STARTING:
        return "is", "starting" if mine is None else f"starting, in {place(mine)}"
    if entry.call is not None:
        return "waits", f"in {_call(entry.call, mine)}"
    if mine is not None and entry.steps and _is_in_backward(frames):
        return "is", f"in backward of step {entry.steps} of DistributedDataParallel ({site(mine)})"
    if mine is not None and rank.waits_for_loader():
        return "waits", f"for its loader's workers in {place(mine)}"
    if mine is not None:
        return "is", f"in {place(mine)}"
    return "is", f"in {place(frames[0])}" if frames else "running"


def _call(call: Call, mine: Frame | None) -> str:
    where = call.site or (site(mine) if mine is not None else "")
    # What is not counted, as `recv`, is told by whom it concerns.
    details = [call.detail] * (bool(call.detail) and not call.sequence) + [where] * bool(where)
    return _title(call) + (f" ({', '.join(details)})" if details else "")


def _title(call: Call) -> str:
    number = f" #{call.sequence}" if call.sequence else ""
    group = f" of group {call.group}" if call.group else ""
    return f"{call.name}{number}{group}"


def _inside(frames: Sequence[Frame]) -> Iterator[Frame]:
    """The frames that the innermost of the user's has called."""
    mine = users_frame(frames)
    for frame in frames:
        if frame is mine:
            return
        yield frame


def _is_in_backward(frames: Sequence[Frame]) -> bool:
    return any("torch/autograd/" in frame.file and "backward" in frame.function for frame in _inside(frames))


def _workers(ranks: Sequence[_Rank], children: Sequence[Stacks]) -> list[str]:
    """Where the loader workers are for which a rank waits."""
    found = []
    for rank in ranks:
        if not rank.waits_for_loader():
            continue
        groups: dict[str, list[int]] = {}
        for child in children:
            number = re.fullmatch(r"loader worker (\d+)", child.label)
            if number is None or child.user != rank.member.pid:
                continue
            mine = users_frame(child.main)
            text = child.problem or (f"is in {place(mine)}" if mine is not None else "")
            if text:
                groups.setdefault(text, []).append(int(number[1]))
        for text, numbers in groups.items():
            found.append(f"rank {rank.number}'s {_named('loader worker', numbers)} {_for(text, numbers)}")
    return found


def _missing(ranks: Sequence[_Rank], ledger: Ledger) -> list[str]:
    """A sentence for each collective that somebody waits in: who has not come to it, and who is past it."""
    sentences: dict[str, None] = {}
    for waiting in ranks:
        call = waiting.entry.call
        if call is None or not call.sequence or not call.generation or waiting.stacks.problem == "has ended":
            continue
        late: dict[tuple[int, str], list[int]] = {}
        ahead: dict[int, list[int]] = {}
        for rank in ranks:
            last = ledger.latest(rank.index, call.group, call.generation)
            # Of a group that is not the default one only those are known to be members who have called something.
            if last < call.sequence and (last or not call.group):
                late.setdefault((last, _last(last, rank.entry.calls)), []).append(rank.number)
            elif last > call.sequence:
                ahead.setdefault(last, []).append(rank.number)
        if late:
            who = "; ".join(f"{_named('rank', numbers)} ({last})" for (_, last), numbers in sorted(late.items()))
            sentences[f"missing from {_title(call)}: {who}"] = None
        if ahead:
            who = "; ".join(f"{_named('rank', numbers)} (at #{last})" for last, numbers in sorted(ahead.items()))
            sentences[f"ahead of {_title(call)}: {who}"] = None
    return list(sentences)


def _ahead(ranks: Sequence[_Rank], ledger: Ledger) -> dict[int, Call]:
    """The last collectives in the default group of ranks that are in none now, and that others have not come to.

    One that was begun with ``async_op`` has ended for the ledger, while the rank waits for what it exchanges.
    """
    found = {}
    for rank in ranks:
        if rank.entry.phase is not Phase.RUNNING or rank.entry.call is not None or rank.stacks.problem:
            continue
        call = ledger.find(rank.index, "", ledger.latest(rank.index, ""))
        if call is None or not call.generation or rank.member.ended:
            continue
        if any(ledger.latest(other.index, "", call.generation) < call.sequence for other in ranks):
            found[rank.number] = call
    return found


def _behind(ranks: Sequence[_Rank], ledger: Ledger, ahead: Mapping[int, Call]) -> list[str]:
    """A sentence for each of these collectives: who has not come to it."""
    sentences: dict[str, None] = {}
    for call in ahead.values():
        late: dict[str, list[int]] = {}
        for rank in ranks:
            last = ledger.latest(rank.index, "", call.generation)
            if last < call.sequence:
                late.setdefault(_last(last, rank.entry.calls), []).append(rank.number)
        who = "; ".join(f"{_named('rank', numbers)} ({last})" for last, numbers in late.items())
        sentences[f"behind {_title(call)}: {who}"] = None
    return list(sentences)


def _last(sequence: int, calls: int) -> str:
    """The last number that a rank has called in a group, of so many calls in all groups; 0 for none that is known."""
    if sequence:
        return f"last was in #{sequence}"
    return "was in none yet" if calls <= CALLS_KEPT else "was in none of late"


# Names and stacks ----------------------------------------------------------------------------------------------------


def _named(what: str, numbers: Sequence[int]) -> str:
    """Things with numbers: "rank 2", "ranks 0, 1, 4-7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) >= _RUN else ", ".join(map(str, run)) for run in runs]
    return f"{what}{'s' * (len(numbers) > 1)} {', '.join(texts)}"


def _all_named(labels: Sequence[str]) -> str:
    """Labels, those together that differ by their number: "rank 2, loader workers 0, 1"."""
    numbered: dict[str, list[int]] = {}
    for label in labels:
        match = re.fullmatch(r"(.*) (\d+)", label)
        what, number = (label, None) if match is None else (match[1], int(match[2]))
        numbered.setdefault(what, []).extend([] if number is None else [number])
    return ", ".join(_named(what, numbers) if numbers else what for what, numbers in numbered.items())


def stack_lines(answers: Iterable[Stacks]) -> list[str]:
    """A paragraph for each stack, with all who have it; those first that many have."""
    groups: dict[tuple[str, ...], list[Stacks]] = {}
    paragraphs = []
    for answer in answers:
        if waits := wait_for_ranks(answer.main):
            paragraphs.append(printable(f"{answer.label} (pid {answer.pid}) {waits}"))
            continue
        lines = tuple(lines_of(answer.threads)) if not answer.problem else (f"    ({answer.problem})",)
        groups.setdefault(lines, []).append(answer)
    for lines, those in sorted(groups.items(), key=lambda item: -len(item[1])):
        pids = f"pid{'s' * (len(those) > 1)} {', '.join(str(answer.pid) for answer in those)}"
        states = sorted({answer.state for answer in those if answer.state and not answer.problem})
        does = f", {' or '.join(states)}" if states else ""
        head = f"{_all_named([answer.label for answer in those])} ({pids}{does}):"
        paragraphs.append("\n".join(map(printable, [head, *lines])))
    return paragraphs
