"""A mailbox: packets of all sizes, counted, in order; full, ended, closed; whoever holds it."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
from queue import Empty, Full
from typing import Any

import pytest

from torchcrew.channel.envelope import Envelope
from torchcrew.channel.mailbox import CONTROL_FREE, Deserted, Mailbox, Result
from torchcrew.channel.sharing import Passed


def pipes(number: int) -> tuple[list[int], list[int]]:
    """So many pipes: their read ends, their write ends."""
    pairs = [os.pipe() for _ in range(number)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 48 << 10, (48 << 10) + 1, 5_000_000])
@pytest.mark.parametrize("number", [0, 1, 252, 253, 600])
def test_sizes(nbytes: int, number: int) -> None:
    """Payloads and descriptors in any number; what is received is the receiver's."""
    box = Mailbox()
    payload = bytes(os.urandom(min(nbytes, 1000)) * (nbytes // 1000 + 1))[:nbytes]
    readers, writers = pipes(number)
    box.put(payload, writers)
    for fd in writers:
        os.close(fd)
    packet = box.get()
    assert packet.payload == payload
    assert not packet.payload.readonly
    assert len(packet.fds) == number
    for index in {0, number // 2, number - 1} if number else ():
        fd = packet.fds[index].detach()
        os.write(fd, b"x")
        assert os.read(readers[index], 1) == b"x"
        os.close(fd)
    for fd in readers:
        os.close(fd)


def test_order_numbers_and_counts() -> None:
    """Numbers count from 1; `first` and `count` follow."""
    box = Mailbox()
    assert (box.first(), box.count(), box.poll()) == (1, 0, False)
    for number in range(1, 4):
        box.put(b"%d" % number)
        assert (box.first(), box.count(), box.poll()) == (1, number, True)
    for number in range(1, 4):
        packet = box.get()
        assert (packet.number, bytes(packet.payload)) == (number, b"%d" % number)
        assert box.count() == 3 - number
    assert box.first() == 4


def test_empty() -> None:
    """At once, and at the timeout."""
    box = Mailbox()
    for timeout in (0, -1, 0.05):
        with pytest.raises(Empty):
            box.get(timeout)
    assert box.receive() is None
    assert box.receive(linger=False) is None


def test_full() -> None:
    """`maxsize` is exact; a put waits for room."""
    box = Mailbox(2)
    box.put(b"1")
    box.put(b"2")
    for timeout in (0, 0.05):
        with pytest.raises(Full):
            box.put(b"3", timeout=timeout)
    threading.Timer(0.05, box.get).start()
    box.put(b"3")
    assert [bytes(box.get().payload) for _ in range(2)] == [b"2", b"3"]
    box.close()


def test_a_crowded_socket() -> None:
    """It is told from `maxsize`; nothing is lost or counted that was not sent."""
    box = Mailbox()
    sent = 0
    while (result := box.offer(Envelope(b"x" * 1000))) is Result.SENT:
        sent += 1
    assert result is Result.CROWDED
    assert box.count() == sent > 300
    with pytest.raises(Full):
        box.put(b"", timeout=0.01)
    for number in range(1, sent + 1):
        assert box.get().number == number
    box.put(b"")
    assert box.get().number == sent + 1
    assert box.offer(Envelope(b""), 1) is Result.SENT
    assert box.offer(Envelope(b""), 1) is Result.FULL


def test_end() -> None:
    """For all: what was sent is delivered, then EOFError; puts break; who waits wakes."""
    box = Mailbox()
    box.put(b"last")
    box.end()
    assert bytes(box.get().payload) == b"last"
    for _ in range(2):
        with pytest.raises(EOFError):
            box.get()
    with pytest.raises(BrokenPipeError):
        box.put(b"")
    box.close()
    box = Mailbox()
    threading.Timer(0.05, box.end).start()
    with pytest.raises(EOFError):
        box.get()
    box.close()


def test_close() -> None:
    """Idempotent; nothing works afterwards."""
    box = Mailbox()
    box.close()
    box.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        box.put(b"")
    with pytest.raises(OSError, match="Bad file descriptor"):
        box.get()


def test_the_page_is_shared() -> None:
    """What is behind `CONTROL_FREE` is the user's."""
    box = Mailbox()
    pid = os.fork()
    if pid == 0:
        box.page[CONTROL_FREE] = b"\7"
        os._exit(0)
    os.waitpid(pid, 0)
    assert box.page[CONTROL_FREE] == b"\7"


def test_pickles_only_while_a_process_starts() -> None:
    """As what holds descriptors does."""
    box = Mailbox()
    with pytest.raises(RuntimeError, match="should only be shared"):
        pickle.dumps(box)


def test_a_dead_producer_does_not_keep_the_lock() -> None:
    """The kernel takes it from a process that is killed while it holds it, in the middle of a put."""
    box = Mailbox()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with box.putting, box.record:
                box._last.value += 1  # a number that is never sent
                os.write(write, b"x")
                time.sleep(30)
        finally:
            os._exit(1)
    os.read(read, 1)
    outcome: list[Any] = []
    putter = threading.Thread(target=lambda: outcome.append(box.put(b"mine")))
    putter.start()
    putter.join(0.1)
    assert not outcome
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    putter.join(10)
    assert outcome == [None]
    assert box.count() == 1
    packet = box.get()
    assert (packet.number, bytes(packet.payload)) == (2, b"mine")
    os.close(read)
    os.close(write)


def test_a_stopped_producer_keeps_no_deadline() -> None:
    """A process that is stopped in the middle of a put is alive, and may stay so for ever: who cannot wait need not."""
    box = Mailbox()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with box.putting, box.record:
            os.write(write, b"x")
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.read(read, 1)
    os.waitpid(pid, os.WUNTRACED)
    with pytest.raises(Full):
        box.put(b"mine", timeout=0)
    with pytest.raises(Full):
        box.put(b"mine", timeout=0.1)
    os.kill(pid, signal.SIGCONT)
    box.put(b"mine", timeout=10)
    os.waitpid(pid, 0)
    assert bytes(box.get().payload) == b"mine"
    os.close(read)
    os.close(write)


def test_a_fork_in_the_middle_of_a_put() -> None:
    """A child can put although another thread of its parent was about to, at the moment of the fork."""
    box = Mailbox()
    with box.putting, box.record:
        pid = os.fork()
        if pid == 0:
            box.put(b"child")
            os._exit(0)
        time.sleep(0.05)
        assert box.count() == 0  # the record lock is not the child's
    os.waitpid(pid, 0)
    assert bytes(box.get().payload) == b"child"


def test_tally() -> None:
    """It is told of each packet that is sent, and of none that is not."""
    box = Mailbox()
    calls: list[str] = []

    class Tally:
        def begin(self) -> None:
            calls.append("begin")

        def done(self) -> None:
            calls.append("done")

        def undo(self) -> None:
            calls.append("undo")

    box.offer(Envelope(b""), 1, Tally())
    box.offer(Envelope(b""), 1, Tally())
    assert calls == ["begin", "done"]
    box.end()
    with pytest.raises(BrokenPipeError):
        box.offer(Envelope(b""), 0, Tally())
    assert calls[2:] == ["begin", "undo"]


def test_threads() -> None:
    """Any thread may put and get."""
    box = Mailbox()
    received: list[bytes] = []

    def get() -> None:
        while (payload := bytes(box.get().payload)) != b"end":
            received.append(payload)

    getters = [threading.Thread(target=get) for _ in range(3)]
    putters = [threading.Thread(target=lambda: [box.put(b"x") for _ in range(300)]) for _ in range(3)]
    for thread in (*getters, *putters):
        thread.start()
    for thread in putters:
        thread.join()
    for _ in getters:
        box.put(b"end")
    for thread in getters:
        thread.join()
    assert len(received) == 900
    assert box.count() == 0


def test_deserted() -> None:
    """After the last of the others; the last packet comes first; a patient one waits."""
    box = Mailbox()
    pid = os.fork()
    if pid == 0:
        box.put(b"last")
        os._exit(0)
    assert bytes(box.get().payload) == b"last"
    os.waitpid(pid, 0)
    with pytest.raises(Deserted):
        box.get()
    with pytest.raises(Empty):
        box.get(0.05)
    with pytest.raises(Empty):
        box.get(0.05, patient=True)


def test_sockets_default_timeout() -> None:
    """The user's setting is for the user's sockets."""
    socket.setdefaulttimeout(0.01)
    try:
        box = Mailbox()
    finally:
        socket.setdefaulttimeout(None)
    threading.Timer(0.1, box.put, [b"x"]).start()
    assert bytes(box.get().payload) == b"x"
    box.close()


def test_descriptors_that_nobody_takes() -> None:
    """They are closed when the packet is forgotten, or never received."""
    box = Mailbox()
    before = len(os.listdir("/proc/self/fd"))
    readers, writers = pipes(300)
    box.put(b"received", writers)
    box.put(b"not received", writers)
    for fd in (*readers, *writers):
        os.close(fd)
    packet = box.get()
    assert all(isinstance(fd, Passed) for fd in packet.fds)
    del packet
    box.close()
    assert len(os.listdir("/proc/self/fd")) == before - 3
