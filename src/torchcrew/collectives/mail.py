"""Messages between two ranks of a group: who moves them, and what happens if the other rank does not.

    isend, irecv ──► desk: letters ──► step: moves what can move, never waits
                                        ▲ the call itself, once
                                        ▲ whoever waits for a letter, for all of them
                                        ▲ the thread, while there are letters and nobody waits for one

Waiting    in the rank's bell, which rings when something may have moved; every SLICE, also when it rings all the time,
           with a look at the peers. One waits in the bell, others wait for it.
Thread     at most one; what has been begun goes on while the program computes, or waits for something else. It ends
           when it has had nothing to do for a second, and with `close`.
Death      of a peer: `PeerDied` for what should go there, and for what it has not sent whole. What has been sent whole
           is received. A receive from anybody fails when nobody is left who could send.
Late       `CollectiveTimeout`. A message that has not begun is withdrawn; the middle of one breaks the group.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from typing import Any

from torchcrew.collectives.letters import ANYBODY, Desk, Letter
from torchcrew.collectives.mailbox import Inlet, Outlet, bell
from torchcrew.collectives.rows import check_dense
from torchcrew.collectives.turns import SLICE, Turns
from torchcrew.errors import CollectiveTimeout, PeerDied

__all__ = ("Mail",)

#: Seconds without anything to do after which the thread ends; and for which it leaves the work to who may soon wait.
_IDLE, _GRACE = 1.0, 0.001
#: Seconds of a wait after which its slices are twice as long: less than a hundredth of a core shall go into it.
_LONG = 1.0
#: Seconds after which it sees again whether somebody still waits in the bell. Who leaves letters behind wakes it.
_AGAIN = 0.1
#: Seconds for which the thread is waited for at the end: it wakes up within a slice.
_ENDING = 1.0


class Mail:
    """The messages of one rank.

    Args:
        turns: of the group: its memory, its processes, and whether it can be used.
        name: of the thread.
    """

    def __init__(self, turns: Turns, name: str) -> None:
        size, me = turns.segment.size, turns.peers.me.place
        memory, address = turns.segment.mail()
        outlets = [Outlet(memory, address, size, (me, place), me) for place in range(size)]
        inlets = [Inlet(memory, address, size, (place, me), me) for place in range(size)]
        self._size, self._turns, self._peers, self._name = size, turns, turns.peers, name
        self._memory: memoryview | None = memory
        self._bell: Any = bell(address, me)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of the desk, and of what is below
        self._desk = Desk(outlets, inlets, [str(peer) for peer in self._peers.everybody])
        self._thread: threading.Thread | None = None
        self._awake = threading.Event()
        self._left = threading.Event()
        self._closed = False
        self._driving = threading.Lock()  # held by who waits in the bell
        self._driver = 0

    def send(self, tensors: Any, place: int, tag: int, timeout: float) -> Letter:
        """Send a tensor to the rank at a place; what does not go at once goes on by itself.

        Args:
            tensors: it, in a list, as torch has it.
            place: of the receiver.
            tag: any number that a receive asks for.
            timeout: in seconds, of a wait without one.
        """
        self._check(place)
        return self._post(tensors, place, tag, True, timeout)

    def receive(self, tensors: Any, place: int, tag: int, timeout: float) -> Letter:
        """Write the next message of the rank at a place into a tensor, when it comes."""
        self._check(place)
        return self._post(tensors, place, tag, False, timeout)

    def receive_any(self, tensors: Any, tag: int, timeout: float) -> Letter:
        """Write the next message of whoever sends into a tensor; the letter says who it was."""
        return self._post(tensors, ANYBODY, tag, False, timeout)

    def _check(self, place: int) -> None:
        if not 0 <= place < self._size:
            raise ValueError(f"this group has the ranks 0 to {self._size - 1}, but no rank {place}")

    def _post(self, tensors: Any, place: int, tag: int, is_sent: bool, timeout: float) -> Letter:
        if len(tensors) != 1:
            raise ValueError(f"a message is one tensor, but got {len(tensors)}")
        check_dense(tensors)
        letter = Letter(tensors[0], place, tag, is_sent, functools.partial(self._wait, timeout))
        memory = self._memory  # stays mapped until this call has done with it, whoever closes the group
        with self._lock:
            if self._closed:
                raise RuntimeError("this process has destroyed this process group")
            if is_sent:
                self._desk.send(letter)
            else:
                self._desk.want(letter)
        moved = self._step()
        if not letter.is_completed():
            self._leave_to_thread()
        if moved and self._driver:  # this thread may have taken back the ring that was to wake the other one
            self._bell.release()
        del memory
        return letter

    # Moving -----------------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Move what can move now; whether anything has."""
        try:
            with self._lock:
                if self._closed:
                    self._desk.clear(RuntimeError("this process has destroyed this process group"))
                    return False
                try:
                    return self._desk.move()
                except BaseException as error:  # in the middle of a slot: nobody can go on from there
                    reason = f"{type(error).__name__}: {error}"
                    self._closed = True
                    self._turns.give_up(reason)
                    self._desk.clear(RuntimeError(f"this process group cannot be used any more: {reason}"))
                    raise
        finally:
            self._tell()

    def _tell(self) -> None:
        """Tell letters that they have ended. Without the lock: what they call may send.

        One by one: what one calls may wait for the next one, which has ended in the same step.
        """
        while self._desk.ended:
            with self._lock:
                if not self._desk.ended:
                    return  # another thread has taken the last one
                letter, error, source = self._desk.ended.popleft()
            letter.end(error, source)

    def _is_busy(self) -> bool:
        with self._lock:
            return not self._closed and bool(self._desk.pending())

    def _leave_to_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._awake.set()

    def _run(self) -> None:
        """What the thread does. An error of a step has been told to all letters."""
        with contextlib.suppress(Exception):
            while not self._closed:
                if not self._awake.wait(_IDLE):
                    with self._lock:
                        if not self._awake.is_set():
                            self._thread = None
                            return
                time.sleep(_GRACE)
                self._help()
                with self._lock:
                    if not self._desk.pending():
                        self._awake.clear()
        self._step()
        self._thread = None

    def _help(self) -> None:
        """Move what nobody waits for."""
        while self._is_busy():
            self._left.clear()
            if not self._drive(None, math.inf):
                self._left.wait(_AGAIN)

    # Waiting ----------------------------------------------------------------------------------------------------------

    def _wait(self, timeout: float, letter: Letter, seconds: float | None) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"this message is one of process {self._pid}, from which this one was forked")
        deadline = time.monotonic() + (timeout if seconds is None else seconds)
        self._until(letter, deadline)
        if not letter.is_completed():
            self._be_late(letter, is_over=seconds is None)

    def _until(self, letter: Letter, deadline: float) -> None:
        while not letter.is_completed() and time.monotonic() < deadline:
            if self._driver == threading.get_ident():  # in a callback, in the middle of this thread's own moving
                self._go_on(letter, deadline)
            elif not self._drive(letter, deadline):
                letter.look(min(_AGAIN, deadline - time.monotonic()))

    def _drive(self, letter: Letter | None, deadline: float) -> bool:
        """Move all messages until a letter has ended, or, without one, all have; False if another thread does so."""
        if not self._driving.acquire(False):
            return False
        self._driver = threading.get_ident()
        try:
            self._go_on(letter, deadline)
        finally:
            self._driver = 0
            self._driving.release()
            if self._is_busy():
                self._left.set()
        return True

    def _go_on(self, letter: Letter | None, deadline: float) -> None:
        memory = self._memory  # stays mapped while this thread sleeps in it, whoever closes the group
        spin = self._turns.spin if letter is not None else 0.0
        looked = begun = now = time.monotonic()
        until = now + spin
        while now <= deadline and (self._is_busy() if letter is None else not letter.is_completed()):
            moved = self._step()
            now = time.monotonic()
            if moved:
                until = now + spin
            elif now < until or memory is None:
                os.sched_yield()
            else:
                self._bell.acquire(True, SLICE if now - begun < _LONG else 2 * SLICE)
                now = time.monotonic()
            if now - looked >= SLICE:
                looked = now
                self._look()
        del memory

    # Failing ----------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """See whether those live with whom something has to be done, and whether the group is of use."""
        if self._turns.broken:
            error = RuntimeError(f"this process group cannot be used any more: {self._turns.broken}")
            with self._lock:
                self._desk.fail({ANYBODY, *range(self._size)}, error)
            self._tell()
            return
        dead = self._peers.dead()
        said = {peer: self._turns.said(peer) for peer in self._peers.others}
        gone = {peer.place: said[peer] or f"{peer} has ended" for peer in said if said[peer] or peer in dead}
        if not gone:
            return
        self._step()  # what they have sent is there, and is no more than a ring
        with self._lock:
            pending = self._desk.pending()
            for place in pending & gone.keys():
                self._desk.fail({place}, PeerDied(f"{gone[place]}: a message to or from it has not gone through"))
            if ANYBODY in pending and len(gone) == len(said):
                told = "; ".join(gone.values())
                self._desk.fail({ANYBODY}, PeerDied(f"nobody is left who could send a message: {told}"))
        self._tell()

    def _be_late(self, letter: Letter, is_over: bool) -> None:
        peers = [peer for peer in self._peers.others if letter.place in (ANYBODY, peer.place)]
        names = ", ".join(map(str, peers)) or "this rank itself"
        what = f"a message of {letter.load.size} bytes with the tag {letter.tag}"
        verb = "take" if letter.is_sent else "send"
        error = CollectiveTimeout(f"{names} did not {verb} {what} in time.\n{self._peers.stacks(peers)}".rstrip())
        if not is_over:
            raise error
        with self._lock:
            is_whole = self._desk.withdraw(letter, error)
        if not is_whole:
            self._turns.give_up(f"CollectiveTimeout: in the middle of {what}")
        self._tell()

    def close(self, timeout: float) -> bool:
        """End the thread, and what is pending: sends are given ``timeout`` seconds to go.

        Returns:
            Whether nobody uses the memory of the group any more.
        """
        if not self._lock.acquire(timeout=SLICE):
            self._closed = True  # the garbage collector has called this while this thread has the lock
            return False
        sent = [] if self._turns.broken else self._desk.sent()
        self._lock.release()
        deadline = time.monotonic() + timeout
        for letter in sent if self._driver != threading.get_ident() else ():
            self._until(letter, deadline)
        self._closed = True
        self._step()
        self._awake.set()
        self._bell.release()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_ENDING)
        self._memory = None
        if self._driver == threading.get_ident() or not self._driving.acquire(timeout=_ENDING):
            return False
        self._driving.release()
        return True
