"""Packets: whole or not at all; a death or a hang-up wakes whoever waits, after everything sent was delivered."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty
from typing import Any

import numpy as np
import pytest
import torch

from tests.channel.link import Link, link
from torchcrew.channel.packets import IndexReceiver, IndexSender, Receiver, Sender
from torchcrew.channel.sockets import seqpacket_pair
from torchcrew.memory.arena import Loan
from torchcrew.memory.lease import ON_LOAN

DEADLINE = 10.0


@pytest.fixture
def wire() -> Iterator[Link]:
    with link() as made:
        yield made


class Ends:
    """A sender and a receiver in this process."""

    def __init__(self, wire: Link, on_death: Callable[[int], bool] = lambda number: True) -> None:
        self.received, self.sent = seqpacket_pair()
        self.died: list[int] = []
        self.pidfds: list[int] = []

        def lease(number: int, loan: Loan) -> Any:
            return wire.arena.lease(loan)

        def died(number: int) -> bool:
            self.died.append(number)
            return on_death(number)

        self.receiver = Receiver(self.received, lease, died)
        self.sender = Sender(self.sent, 7, wire.writer)

    def watch(self, number: int, pid: int) -> None:
        """Watch a child as worker ``number``; its pidfd is closed after the receiver."""
        self.pidfds.append(os.pidfd_open(pid))
        self.receiver.watch(number, self.pidfds[-1])

    def close(self) -> None:
        self.receiver.close()
        self.sent.close()
        for pidfd in self.pidfds:
            os.close(pidfd)
        self.__dict__.clear()


@pytest.fixture
def ends(wire: Link) -> Iterator[Ends]:
    made = Ends(wire)
    yield made
    made.close()


@pytest.fixture
def index() -> Iterator[tuple[IndexSender, IndexReceiver]]:
    ours, theirs = seqpacket_pair()
    yield IndexSender(ours), IndexReceiver(theirs)
    ours.close()
    theirs.close()


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child that then exits with 0; with 1 where it raises."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(30)  # nothing waits for ever
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def end_of(pid: int, within: float = DEADLINE) -> int:
    """Wait status of a child; killed if it does not end in time."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"process {pid} did not end within {within} s")


# Results -----------------------------------------------------------------------------------------------------------


def test_messages_arrive_in_order(ends: Ends) -> None:
    """Small and large ones, each whole."""
    for i in range(20):
        ends.sender.send((i, torch.full((i * 1000,), i), "x" * i * 5000))
        number, tensor, text = ends.receiver.get(DEADLINE)
        assert (number, text) == (i, "x" * i * 5000)
        assert torch.equal(tensor, torch.full((i * 1000,), i))


def test_an_empty_channel_is_empty_after_the_timeout(ends: Ends) -> None:
    """`Empty` comes neither early nor much too late."""
    start = time.monotonic()
    with pytest.raises(Empty):
        ends.receiver.get(0.1)
    assert 0.09 < time.monotonic() - start < 1.0
    with pytest.raises(Empty):
        ends.receiver.get(0)


def test_a_waiting_receiver_reports_when_it_waits(ends: Ends) -> None:
    """`on_wait` is called around waiting, and not where something is there."""
    calls: list[bool] = []
    ends.receiver.on_wait = calls.append
    ends.sender.send(1)
    assert ends.receiver.get(DEADLINE) == 1
    assert calls == []
    with pytest.raises(Empty):
        ends.receiver.get(0.01)
    assert calls == [True, False]


def test_all_that_a_killed_sender_sent_is_delivered_first(wire: Link, ends: Ends) -> None:
    """Then, once, its death is told."""

    def work() -> None:
        for i in range(50):
            ends.sender.send((i, torch.full((20_000 if i % 2 else 3,), i)))
        os.kill(os.getpid(), signal.SIGKILL)

    pid = in_child(work)
    ends.watch(3, pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, not reaped
    for i in range(50):
        number, tensor = ends.receiver.get(DEADLINE)
        assert number == i
        assert (tensor == i).all()
    assert ends.died == []
    with pytest.raises(Empty):
        ends.receiver.get(DEADLINE)
    assert ends.died == [3]
    assert os.waitstatus_to_exitcode(end_of(pid)) == -signal.SIGKILL
    with pytest.raises(Empty):
        ends.receiver.get(0.01)
    assert ends.died == [3]


def test_a_death_wakes_the_receiver_at_once(ends: Ends) -> None:
    """No polling: within milliseconds, however long the timeout."""
    pid = in_child(lambda: time.sleep(0.2))
    ends.watch(1, pid)
    start = time.monotonic()
    with pytest.raises(Empty):
        ends.receiver.get(None)
    assert time.monotonic() - start < 2.0
    end_of(pid)


def test_an_expected_death_does_not_disturb(wire: Link) -> None:
    """A worker that was asked to end may end: the others' messages are waited for."""
    made = Ends(wire, on_death=lambda number: False)
    pid = in_child(lambda: None)
    made.watch(1, pid)
    with pytest.raises(Empty):
        made.receiver.get(0.3)
    assert made.died == [1]
    end_of(pid)
    made.close()


def flood(sender: Sender) -> Callable[[], None]:
    def work() -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(1_000_000):
                sender.send("x" * 10_000)

    return work


def wait_until_full(sock: socket.socket) -> None:
    """Until nobody can write, that is until the flooding child sleeps in `send`."""
    end = time.monotonic() + DEADLINE
    quiet = 0
    while quiet < 20:
        assert time.monotonic() < end
        quiet = 0 if select.select([], [sock], [], 0)[1] else quiet + 1
        time.sleep(0.005)


@pytest.mark.parametrize("stray", [False, True], ids=["alone", "with a stray fork"])
def test_hanging_up_wakes_a_blocked_sender(ends: Ends, stray: bool) -> None:
    """Also where a forked child, which nobody knows, holds every end of the socket open."""
    strays = [in_child(lambda: time.sleep(20))] if stray else []
    pid = in_child(flood(ends.sender))
    wait_until_full(ends.sent)
    ends.receiver.hang_up()
    start = time.monotonic()
    assert end_of(pid) == 0
    assert time.monotonic() - start < 2.0
    for other in strays:
        os.kill(other, signal.SIGKILL)
        end_of(other)


def test_the_receivers_end_wakes_a_blocked_sender(wire: Link) -> None:
    """A receiver that is killed leaves nobody waiting who does not share its socket."""
    made = Ends(wire)

    def receive_nothing() -> None:
        made.sent.close()
        time.sleep(20)

    receiver = in_child(receive_nothing)
    made.received.close()

    pid = in_child(flood(made.sender))
    wait_until_full(made.sent)
    os.kill(receiver, signal.SIGKILL)
    end_of(receiver)
    assert end_of(pid) == 0
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        made.sender.send(1)
    assert made.sender.hung_up(0)
    made.receiver._epoll.close()
    made.close()


def test_a_sender_can_ask_whether_the_receiver_is_there(ends: Ends) -> None:
    """At once or after waiting; unread messages are no hang-up."""
    ends.sender.send(1)
    assert not ends.sender.hung_up(0.0)
    ends.receiver.hang_up()
    assert ends.sender.hung_up(0.0)


def test_sending_to_a_receiver_that_hung_up(ends: Ends) -> None:
    """An error, also where the program set SIGPIPE to what kills."""
    ends.receiver.hang_up()

    def work() -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with pytest.raises(BrokenPipeError):
            ends.sender.send(1)

    assert end_of(in_child(work)) == 0


def test_a_receiver_that_hung_up_is_empty(ends: Ends) -> None:
    """Its own later waits end at once."""
    ends.receiver.hang_up()
    start = time.monotonic()
    with pytest.raises(Empty):
        ends.receiver.get(DEADLINE)
    assert time.monotonic() - start < 1.0


def test_hanging_up_in_another_thread_wakes_the_receiver(ends: Ends) -> None:
    """As torch's pinning thread is ended."""
    timer = threading.Timer(0.1, ends.receiver.hang_up)
    timer.start()
    start = time.monotonic()
    with pytest.raises(Empty):
        ends.receiver.get(DEADLINE)
    assert time.monotonic() - start < 2.0
    timer.join()


def test_what_cannot_be_pickled_is_not_sent(wire: Link, ends: Ends) -> None:
    """The receiver sees nothing of it, and no block is on loan."""
    with pytest.raises((AttributeError, pickle.PicklingError)):
        ends.sender.send([torch.zeros(100_000), lambda: None])
    assert wire.on_loan == 0
    with pytest.raises(Empty):
        ends.receiver.get(0)


def test_closing_twice(wire: Link) -> None:
    """Is closing once; a worker's pidfd is left to whoever opened it."""
    made = Ends(wire)
    pid = in_child(lambda: None)
    made.watch(1, pid)
    made.receiver.close()
    made.receiver.close()
    assert os.fstat(made.pidfds[0])
    end_of(pid)
    made.close()


def test_blocks_that_wait_for_a_child_come_back_while_the_receiver_waits(wire: Link, ends: Ends) -> None:
    """A worker may be waiting for just these, so the receiver, who waits for the worker, must look."""
    ends.sender.send(torch.zeros(100_000))
    got = ends.receiver.get(DEADLINE)
    pid = in_child(lambda: time.sleep(0.2))
    del got
    assert wire.on_loan == 1
    end = time.monotonic() + DEADLINE
    while wire.on_loan and time.monotonic() < end:
        with contextlib.suppress(Empty):
            ends.receiver.get(1.0)
        break
    assert wire.on_loan == 0
    end_of(pid)


def test_a_message_that_comes_while_waiting(wire: Link) -> None:
    """Whether the receiver looks first or sleeps at once."""
    made = Ends(wire)

    def work() -> None:
        for i in range(20):
            time.sleep(0.002)
            made.sender.send(i)

    pid = in_child(work)
    assert [made.receiver.get(DEADLINE) for _ in range(20)] == list(range(20))
    assert end_of(pid) == 0
    made.close()


# Indices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 32_000, 33_000, 65_536, 100_000, 3_000_000])
def test_indices_of_any_size(index: tuple[IndexSender, IndexReceiver], size: int) -> None:
    """They travel in fragments, in order, and are put together again."""
    sender, receiver = index
    for i in range(3):
        sender.put((i, list(range(size // 4)), "x" * size))
    thread = threading.Thread(target=keep_flushing, args=(sender,))
    thread.start()
    got = [receiver.get(DEADLINE) for _ in range(3)]
    thread.join(DEADLINE)
    assert [(i, len(a), len(b)) for i, a, b in got] == [(i, size // 4, size) for i in range(3)]


def keep_flushing(sender: IndexSender) -> None:
    end = time.monotonic() + 5
    while not sender.flush() and time.monotonic() < end:
        time.sleep(0.001)


def test_indices_may_be_tensors_and_arrays(index: tuple[IndexSender, IndexReceiver]) -> None:
    """A batch sampler may give anything."""
    sender, receiver = index
    sender.put((0, torch.arange(3), np.arange(4), {"a": torch.arange(10)[::2]}))
    number, tensor, array, more = receiver.get(DEADLINE)
    assert number == 0
    assert torch.equal(tensor, torch.arange(3))
    assert np.array_equal(array, np.arange(4))
    assert torch.equal(more["a"], torch.arange(10)[::2])


def test_large_tensor_indices(index: tuple[IndexSender, IndexReceiver]) -> None:
    """They need no arena."""
    sender, receiver = index
    sender.put(torch.arange(10_000))
    assert torch.equal(receiver.get(DEADLINE), torch.arange(10_000))


def test_a_worker_that_does_not_read_does_not_block_its_user(index: tuple[IndexSender, IndexReceiver]) -> None:
    """What the socket does not take waits in a backlog, and is delivered in order when it does."""
    sender, receiver = index
    start = time.monotonic()
    for i in range(20_000):
        sender.put((i, [i]))
    assert time.monotonic() - start < 10.0
    assert not sender.flush()
    got = []
    while len(got) < 20_000:
        sender.flush()
        got.append(receiver.get(DEADLINE)[0])
    assert got == list(range(20_000))
    assert sender.flush()


def test_a_waiting_receiver_flushes_the_backlog(
    wire: Link, ends: Ends, index: tuple[IndexSender, IndexReceiver]
) -> None:
    """The user waits for a result that needs indices which wait for room: the wait sends them."""
    sender, receiver = index
    ends.receiver.index_senders = (sender,)
    for i in range(3):
        sender.put("x" * 1_000_000 + str(i))

    def work() -> None:
        for _ in range(3):
            ends.sender.send(receiver.get(DEADLINE)[1_000_000:])

    pid = in_child(work)
    assert [ends.receiver.get(DEADLINE) for _ in range(3)] == ["0", "1", "2"]
    assert end_of(pid) == 0


def test_no_indices_is_empty_after_the_timeout(index: tuple[IndexSender, IndexReceiver]) -> None:
    """Timeouts of any length, zero included, end in time."""
    for timeout in (0.05, 0.0, 1.2, 1e-9):
        start = time.monotonic()
        with pytest.raises(Empty):
            index[1].get(timeout)
        assert timeout - 0.02 < time.monotonic() - start < timeout + 1.0


def test_the_end_of_the_sender_is_eof(index: tuple[IndexSender, IndexReceiver]) -> None:
    """After everything that was sent."""
    sender, receiver = index
    sender.put(1)
    sender.close()
    assert receiver.get(DEADLINE) == 1
    with pytest.raises(EOFError):
        receiver.get(DEADLINE)


def test_the_end_of_the_sender_between_two_fragments_is_eof(index: tuple[IndexSender, IndexReceiver]) -> None:
    """Half an index is none."""
    sender, receiver = index
    sender.put("x" * 5_000_000)
    assert not sender.flush()
    sender.close()
    with pytest.raises(EOFError):
        receiver.get(DEADLINE)


def test_putting_to_a_worker_that_is_gone(index: tuple[IndexSender, IndexReceiver]) -> None:
    """Is no error: whoever waits for its answer learns it."""
    sender, receiver = index
    for i in range(5_000):
        sender.put((i, [i]))
    receiver._sock.close()
    sender.put(1)
    assert sender.flush()
    sender.close()
    sender.put(2)
    assert sender.flush()


def test_none_marks_the_end(index: tuple[IndexSender, IndexReceiver]) -> None:
    """`ended` tells an expected death from another."""
    sender, receiver = index
    sender.put(1)
    assert not sender.ended
    sender.put(None)
    assert sender.ended
    assert [receiver.get(DEADLINE), receiver.get(DEADLINE)] == [1, None]


def test_on_loan_is_what_the_table_says(wire: Link, ends: Ends) -> None:
    """A message that nobody received yet is on loan; received and dropped it is not."""
    ends.sender.send(torch.zeros(100_000))
    assert bytes(wire.arena.table[:1]) == bytes([ON_LOAN])
    ends.receiver.get(DEADLINE)
    assert wire.on_loan == 0
