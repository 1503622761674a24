"""Sends and receives of one rank, and which message goes into which tensor.

    send ──► queue for the receiver ──► ring ──► arrival ──► the tensor of the receive that it fits
                                                       nobody wants that tag yet: kept, till somebody does

Fitting    by sender and tag, in the order of the sends and of the receives. What is in a ring stays there, and holds up
           its sender, as long as nobody here waits for anything from it: else it is taken out, whatever its tag.
Owner      `Mail`, which lets one thread at a time in here. Nothing here waits.
Memory     of a message that is kept: as large as it is, until it is received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from datetime import timedelta

import torch

from torchcrew.collectives.mailbox import SLOTS, Inlet, Load, Outlet
from torchcrew.collectives.rows import as_bytes, lies_in_a_row
from torchcrew.collectives.work import GroupWork
from torchcrew.errors import CollectiveMismatch, PeerDied
from torchcrew.memory import libc
from torchcrew.torch_private import without_autograd

__all__ = ("ANYBODY", "Desk", "Letter")

#: The place of the sender, of a receive that takes what comes.
ANYBODY = -1


class Letter(GroupWork):
    """One send or receive: the `Work` that it returns.

    Args:
        tensor: that is sent, or written.
        place: of the other rank, or `ANYBODY`.
        tag: of the message.
        is_sent: or received.
        wait: waits until it has ended, for so many seconds, or as long as it may take: if they are None.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        place: int,
        tag: int,
        is_sent: bool,
        wait: Callable[[Letter, float | None], None],
    ) -> None:
        super().__init__([tensor])
        self.place, self.tag, self.is_sent = place, tag, is_sent
        self._wait = wait
        self._row: torch.Tensor | None = None  # the elements, where the tensor's own do not lie in a row
        if not lies_in_a_row(tensor):
            with without_autograd():
                self._row = as_bytes(tensor)
        self.load = Load(tag, tensor.nbytes, (tensor if self._row is None else self._row).data_ptr())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor is written, or has been sent.

        Raises:
            CollectiveTimeout: not within ``timeout``, and it goes on; or not within the group's, and it is over.
            PeerDied: the other rank is gone.
            CollectiveMismatch: the message is not as large as the tensor.
        """
        if not self.is_completed():
            self._wait(self, timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None)
        return super().wait()

    def look(self, seconds: float) -> None:
        """Wait a little, while another thread moves the messages."""
        self._ended.wait(seconds)

    def deliver(self, room: torch.Tensor | None) -> None:
        """Put what has come, maybe into other memory, into the tensor; autograd takes no notice."""
        if room is not None and self.load.size:
            libc.copy(self.load.address, room.data_ptr(), self.load.size)
        if self._row is not None:
            tensor: torch.Tensor = self._result[0]
            with without_autograd():
                tensor.data.copy_(self._row.view(tensor.dtype).view(tensor.shape))


class _Arrival:
    """A message that comes, or has come.

    Args:
        place: of the sender.
        number: in the order in which messages have begun to come to this rank.
        tag: the message's.
        size: in bytes.
        wanted: the receive that it is for, if there is one yet.
    """

    def __init__(self, place: int, number: int, tag: int, size: int, wanted: Letter | None) -> None:
        self.place, self.number, self.wanted = place, number, wanted
        self.room: torch.Tensor | None = None
        address = 0  # of what is too large or too small nothing is needed
        if wanted is None:
            self.room = torch.empty(size, dtype=torch.uint8)
            address = self.room.data_ptr()
        elif wanted.load.size == size:
            address = wanted.load.address
        self.load = Load(tag, size, address)


class Desk:
    """The letters of one rank.

    Args:
        outlets: its rings to each rank.
        inlets: its rings from each.
        names: what people call the ranks.
    """

    def __init__(self, outlets: list[Outlet], inlets: list[Inlet], names: list[str]) -> None:
        self._outlets, self._inlets, self._names = outlets, inlets, names
        self._outgoing: dict[int, deque[Letter]] = {}
        self._wanted: list[Letter] = []
        self._arriving: dict[int, _Arrival] = {}
        self._kept: list[_Arrival] = []
        self._arrivals = 0
        # Where a message was left in the middle, its ring is of no use: the other rank may still move the rest of it.
        self._cut_out: set[int] = set()
        self._cut_in: set[int] = set()
        self.ended: deque[tuple[Letter, BaseException | None, int]] = deque()
        """Letters that have to be told that they have ended; how; and who has sent them."""

    def send(self, letter: Letter) -> None:
        """Write a send down."""
        if letter.place in self._cut_out:
            error = PeerDied(f"{self._names[letter.place]} is gone: it has not taken all of an earlier message")
            self.ended.append((letter, error, -1))
            return
        self._outgoing.setdefault(letter.place, deque()).append(letter)

    def want(self, letter: Letter) -> None:
        """Give a receive the first message that fits, of those that have come and are kept; else write it down."""
        coming = [*self._kept, *(it for it in self._arriving.values() if it.wanted is None)]
        fitting = [it for it in coming if it.load.tag == letter.tag and letter.place in (ANYBODY, it.place)]
        if not fitting:
            self._wanted.append(letter)
            return
        arrival = min(fitting, key=lambda it: it.number)
        arrival.wanted = letter
        if arrival.load.has_ended:
            self._kept.remove(arrival)
            self._end(arrival, letter)

    def sent(self) -> list[Letter]:
        """Sends that have not ended."""
        return [letter for letters in self._outgoing.values() for letter in letters]

    def pending(self) -> set[int]:
        """Those with whom something has to be done, maybe `ANYBODY`."""
        return self._outgoing.keys() | self._awaited()

    def _awaited(self) -> set[int]:
        places = {place for place, arrival in self._arriving.items() if arrival.wanted is not None}
        places.update(letter.place for letter in self._wanted)
        return places

    # Moving -----------------------------------------------------------------------------------------------------------

    def move(self) -> bool:
        """Move what can move now, of all messages; whether anything has."""
        moved = False
        for place, letters in list(self._outgoing.items()):
            while letters:
                moved |= self._outlets[place].send(letters[0].load)
                if not letters[0].load.has_ended:
                    break
                self.ended.append((letters.popleft(), None, -1))
            if not letters:
                del self._outgoing[place]
        if self._wanted or self._arriving:
            awaited = self._awaited()
            for place in range(len(self._inlets)) if ANYBODY in awaited else awaited:
                moved |= self._take(place)
        return moved

    def _take(self, place: int) -> bool:
        """Take out of a ring what is there, as long as somebody wants something from it, but not for ever."""
        inlet, moved = self._inlets[place], False
        for _ in range(0 if place in self._cut_in else SLOTS):
            arrival = self._arriving.get(place)
            if arrival is None:
                is_wanted = any(letter.place in (place, ANYBODY) for letter in self._wanted)
                header = inlet.open() if is_wanted else None
                if header is None:
                    break
                arrival = self._arriving[place] = self._begin(place, *header)
            moved |= inlet.read(arrival.load)
            if not arrival.load.has_ended:
                break
            del self._arriving[place]
            if arrival.wanted is None:
                self._kept.append(arrival)
            else:
                self._end(arrival, arrival.wanted)
        return moved

    def _begin(self, place: int, tag: int, size: int) -> _Arrival:
        self._arrivals += 1
        fitting = (it for it in self._wanted if it.tag == tag and it.place in (place, ANYBODY))
        wanted = next(fitting, None)
        if wanted is not None:
            self._wanted.remove(wanted)
        return _Arrival(place, self._arrivals, tag, size, wanted)

    def _end(self, arrival: _Arrival, letter: Letter) -> None:
        error = None
        if letter.load.size == arrival.load.size:
            letter.deliver(arrival.room)
        else:
            error = CollectiveMismatch(
                f"{self._names[arrival.place]} has sent a message of {arrival.load.size} bytes with the tag "
                f"{letter.tag}, but the tensor to receive it has {letter.load.size} bytes"
            )
        self.ended.append((letter, error, arrival.place))

    # Failing ----------------------------------------------------------------------------------------------------------

    def withdraw(self, letter: Letter, error: BaseException) -> bool:
        """Have a letter ended by an error, if it has not ended; False if it was in the middle."""
        if letter in self._wanted:
            self._wanted.remove(letter)
        elif letter.is_sent and letter in self._outgoing.get(letter.place, ()):
            if letter.load.has_begun:
                self.fail({letter.place}, error)
                return False
            self._outgoing[letter.place].remove(letter)
        else:
            middle = [place for place, arrival in self._arriving.items() if arrival.wanted is letter]
            self.fail(set(middle), error)
            return not middle
        self.ended.append((letter, error, -1))
        return True

    def fail(self, places: Collection[int], error: BaseException) -> None:
        """Have all letters to and from these places ended by an error; `ANYBODY`: those from whoever sends."""
        failed = [letter for letter in self._wanted if letter.place in places]
        self._wanted = [letter for letter in self._wanted if letter.place not in places]
        for place in places:
            letters = self._outgoing.pop(place, deque())
            failed.extend(letters)
            if letters and letters[0].load.has_begun:
                self._cut_out.add(place)
            arrival = self._arriving.get(place)
            if arrival is not None and arrival.wanted is not None:
                failed.append(arrival.wanted)
                self._cut_in.add(self._arriving.pop(place).place)
        self.ended.extend((letter, error, -1) for letter in failed)

    def clear(self, error: BaseException) -> None:
        """Have all ended, and let go of the rings."""
        self.fail({ANYBODY, *range(len(self._names))}, error)
        self._outlets, self._inlets = [], []
        self._kept.clear()
        self._arriving.clear()
