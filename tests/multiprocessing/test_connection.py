"""Pipes: stock's class, methods and errors; whole messages, with descriptors beside them."""

from __future__ import annotations

import array
import errno
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import socket
import threading
from collections.abc import Iterator
from multiprocessing import connection as stock
from multiprocessing import reduction
from typing import Any

import numpy as np
import pytest
import torch

import torchcrew.multiprocessing as mp
from tests.multiprocessing import queue_cases as cases
from torchcrew.multiprocessing import connection
from torchcrew.multiprocessing.connection import PacketConnection, Pipe

METHODS = ("fork", "spawn", "forkserver", "zygote")
FORK: Any = mp.get_context("fork")

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("_zygote_ends")]


@pytest.fixture
def ends() -> Iterator[tuple[PacketConnection, PacketConnection]]:
    one, other = Pipe()
    with one, other:
        yield one, other


def test_pipes_are_of_stocks_class() -> None:
    """isinstance checks of others hold; the module has stock's names; what a context returns is ours."""
    assert issubclass(PacketConnection, stock.Connection)
    assert connection.Connection is stock.Connection
    assert connection.wait is stock.wait
    assert inspect.signature(Pipe).parameters.keys() == inspect.signature(stock.Pipe).parameters.keys()
    one, other = mp.Pipe()
    assert type(one) is type(other) is PacketConnection
    one.close()
    other.close()


@pytest.mark.parametrize("method", METHODS)
def test_there_and_back(method: str) -> None:
    """Objects of all sizes come back as they were; a tensor as itself; the end is one."""
    context = mp.get_context(method)
    ours, theirs = Pipe()
    process = context.Process(target=cases.echo_connection, args=(theirs,))
    process.start()
    theirs.close()
    for item in (1, b"x" * 60_000, "y" * 3_000_000, None, [1, {2: (3,)}], np.arange(30_000)):
        ours.send(item)
        got = ours.recv()
        assert np.array_equal(got, item) if isinstance(item, np.ndarray) else got == item
    tensor = torch.ones(3)
    ours.send(tensor)
    assert ours.recv().data_ptr() == tensor.data_ptr()
    ours.send("end")
    process.join(20)
    assert process.exitcode == 0
    process.close()
    with pytest.raises(EOFError):
        ours.recv()
    ours.close()


def test_one_way() -> None:
    """Without duplex the first receives and the second sends."""
    reader, writer = Pipe(duplex=False)
    with reader, writer:
        assert (reader.readable, reader.writable, writer.readable, writer.writable) == (True, False, False, True)
        writer.send(1)
        assert reader.recv() == 1
        for attempt in (lambda: reader.send(1), lambda: reader.send_bytes(b"")):
            with pytest.raises(OSError, match="connection is read-only"):
                attempt()
        for attempt in (writer.recv, writer.poll, writer.recv_bytes, lambda: writer.recv_bytes_into(bytearray(3))):
            with pytest.raises(OSError, match="connection is write-only"):
                attempt()


def test_bytes(ends: Any) -> None:
    """Parts of buffers, limits, and the errors of wrong ones."""
    one, other = ends
    one.send_bytes(b"abcdef", 1, 3)
    one.send_bytes(array.array("i", [1, 2]))
    one.send_bytes(b"")
    one.send_bytes(b"z" * 1_000_000, 10)
    assert other.recv_bytes() == b"bcd"
    assert other.recv_bytes() == array.array("i", [1, 2]).tobytes()
    assert other.recv_bytes() == b""
    assert other.recv_bytes(999_990) == b"z" * 999_990
    for arguments in ((-1,), (7,), (0, -1), (3, 4)):
        with pytest.raises(ValueError, match=r"negative|buffer length"):
            one.send_bytes(b"abcdef", *arguments)
    with pytest.raises(TypeError):
        one.send_bytes("text")
    with pytest.raises(ValueError, match="negative maxlength"):
        other.recv_bytes(-1)
    assert not other.poll()


def test_bytes_into(ends: Any) -> None:
    """The number of bytes is returned; what is too long is in the error."""
    one, other = ends
    buffer = bytearray(10)
    one.send_bytes(b"abc")
    assert other.recv_bytes_into(buffer, 2) == 3
    assert buffer == b"\0\0abc\0\0\0\0\0"
    numbers = array.array("i", [0] * 4)
    one.send_bytes(array.array("i", [5, 6]))
    assert other.recv_bytes_into(numbers, 4) == 8
    assert list(numbers) == [0, 5, 6, 0]
    one.send_bytes(b"much too long")
    with pytest.raises(mp.BufferTooShort) as caught:
        other.recv_bytes_into(buffer)
    assert caught.value.args == (b"much too long",)
    one.send_bytes(b"1")
    for offset in (-1, 11):
        with pytest.raises(ValueError, match="offset"):
            other.recv_bytes_into(buffer, offset)


def test_a_message_longer_than_its_reader_allows() -> None:
    """As stock: a reader is closed, of a duplex end only the reading."""
    for duplex in (True, False):
        reader, writer = Pipe(duplex)
        with reader, writer:
            writer.send_bytes(b"12345")
            with pytest.raises(OSError, match="bad message length"):
                reader.recv_bytes(4)
            assert reader.closed is not duplex
            assert not reader.readable or not duplex


def test_pickles_and_bytes_are_one(ends: Any) -> None:
    """A pickle sent as bytes is received as an object, and the other way round."""
    one, other = ends
    one.send_bytes(pickle.dumps([1]))
    assert other.recv() == [1]
    one.send((2,))
    assert pickle.loads(other.recv_bytes()) == (2,)
    one.send(torch.ones(3))
    assert other.recv_bytes()  # the memory is not wanted: it is let go
    with pytest.raises(AttributeError, match="pickle"):
        one.send(lambda: None)
    assert not other.poll()


def test_poll(ends: Any) -> None:
    """At once, with a timeout, for ever; and `wait`."""
    one, other = ends
    assert other.poll() is False
    assert other.poll(0.01) is False
    assert other.poll(-1) is False
    assert stock.wait([one, other], 0) == []
    timer = threading.Timer(0.05, one.send, [1])
    timer.start()
    assert other.poll(None) is True
    assert stock.wait([one, other], 5) == [other]
    timer.join()


def test_closed(ends: Any) -> None:
    """Stock's error; closing again does nothing."""
    one, _ = ends
    descriptor = one.fileno()
    one.close()
    one.close()
    assert one.closed
    for attempt in (
        one.recv,
        one.poll,
        one.fileno,
        one.recv_bytes,
        lambda: one.send(1),
        lambda: one.send_bytes(b""),
        lambda: one.recv_bytes_into(bytearray(3)),
    ):
        with pytest.raises(OSError, match="handle is closed"):
            attempt()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("duplex", [False, True])
def test_the_other_end_is_gone(duplex: bool, unread: bool) -> None:
    """What was sent arrives, then the end; a send is a broken pipe. Also if something of ours was never read."""
    reader, writer = Pipe(duplex)
    writer.send(1)
    if unread and duplex:
        reader.send("never read")
    writer.close()
    assert reader.poll()
    assert reader.recv() == 1
    for attempt in (reader.recv, reader.recv_bytes):
        with pytest.raises(EOFError):
            attempt()
    assert reader.poll()
    reader.close()
    reader, writer = Pipe(duplex)
    if unread:
        writer.send("never read")
    reader.close()
    for _ in range(2):
        with pytest.raises(BrokenPipeError) as caught:
            writer.send(2)
        assert caught.value.errno == errno.EPIPE
    writer.close()


def test_sigpipe_does_not_kill() -> None:
    """Whatever the user has made of that signal."""
    reader, writer = Pipe()
    reader.close()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with pytest.raises(BrokenPipeError):
            writer.send(1)
    finally:
        signal.signal(signal.SIGPIPE, before)
    writer.close()


def test_a_default_timeout_of_sockets_is_none_of_ours() -> None:
    """`socket.setdefaulttimeout` is for the user's sockets."""
    socket.setdefaulttimeout(0.01)
    try:
        one, other = Pipe()
    finally:
        socket.setdefaulttimeout(None)
    timer = threading.Timer(0.1, one.send, [1])
    timer.start()
    assert other.recv() == 1
    timer.join()
    one.close()
    other.close()


def test_send_waits_for_room(ends: Any) -> None:
    """A full pipe makes the sender wait, and nothing is lost."""
    one, other = ends
    sender = threading.Thread(target=lambda: [one.send(number) for number in range(3000)])
    sender.start()
    assert [other.recv() for _ in range(3000)] == list(range(3000))
    sender.join()


def test_constructor() -> None:
    """Stock's checks."""
    with pytest.raises(ValueError, match="at least one of"):
        PacketConnection(0, False, False)
    with pytest.raises(ValueError, match="invalid handle"):
        PacketConnection(-1)
    with pytest.raises(AttributeError):
        PacketConnection("1")


# Passing connections --------------------------------------------------------------------------------------------------


def test_a_pipe_through_a_pipe(ends: Any) -> None:
    """Ours, stock's and sockets travel as descriptors, with what they may do."""
    one, other = ends
    reader, writer = Pipe(duplex=False)
    theirs_reader, theirs_writer = multiprocessing.Pipe(duplex=False)
    left, right = socket.socketpair()
    one.send((writer, theirs_writer, right))
    copies = other.recv()
    for copy, original in zip(copies[:2], (writer, theirs_writer), strict=True):
        assert type(copy) is type(original)
        assert copy.fileno() != original.fileno()
        assert (copy.readable, copy.writable) == (False, True)
    copies[0].send("ours")
    copies[1].send("theirs")
    copies[2].send(b"socket")
    assert reader.recv() == "ours"
    assert theirs_reader.recv() == "theirs"
    assert left.recv(10) == b"socket"
    for opened in (reader, writer, theirs_reader, theirs_writer, left, right, *copies):
        opened.close()


def test_a_pipe_through_queues() -> None:
    """Put, closed here, taken out by another process, used there."""
    queue = FORK.Queue()
    reader, writer = Pipe(duplex=False)
    process = FORK.Process(target=send_through, args=(queue, "hello"))
    process.start()
    queue.put(writer)
    writer.close()
    assert reader.recv() == "hello"
    with pytest.raises(EOFError):
        reader.recv()
    process.join()
    reader.close()


def send_through(queue: Any, item: Any) -> None:
    """Take a connection out and send something through it."""
    queue.get().send(item)


def test_stocks_pickler_knows_them(ends: Any) -> None:
    """The standard library's own queues pass them on, by its server."""
    one, other = ends
    copy = pickle.loads(reduction.ForkingPickler.dumps(other))
    one.send("through a copy")
    assert type(copy) is PacketConnection
    assert copy.recv() == "through a copy"
    copy.close()
    from multiprocessing import resource_sharer

    resource_sharer.stop(5)  # type: ignore[attr-defined]


# Deaths ---------------------------------------------------------------------------------------------------------------


def send_for_ever(connection: Any) -> None:
    """Send messages of several kinds until killed."""
    number = 0
    while True:
        connection.send((number, content(number)))
        number += 1


def content(number: int) -> Any:
    """A small tensor, a large text, or a tensor as large as one thread fills it: others hang in a forked child."""
    return (torch.full((5,), number), f"{number} " * 30_000, torch.full((20_000,), number))[number % 3]


@pytest.mark.parametrize("seed", range(3))
def test_killed_while_sending(seed: int) -> None:
    """What arrives is whole and in order, then the end comes."""
    draw = random.Random(seed)
    reader, writer = Pipe(duplex=draw.random() < 0.5)
    process = FORK.Process(target=send_for_ever, args=(writer,))
    process.start()
    writer.close()
    last = draw.randrange(20)
    number = -1
    try:
        while True:
            got, item = reader.recv()
            number += 1
            assert got == number
            wanted = content(number)
            assert torch.equal(item, wanted) if isinstance(item, torch.Tensor) else item == wanted
            if number == last:
                process.kill()
    except EOFError:
        assert number >= last
    process.join()
    reader.close()


def test_killed_while_receiving() -> None:
    """The sender's next send, or the one after, is a broken pipe."""
    reader, writer = Pipe(duplex=False)
    process = FORK.Process(target=receive_and_die, args=(reader,))
    process.start()
    reader.close()
    with pytest.raises(BrokenPipeError):
        send_for_ever(writer)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    writer.close()


def receive_and_die(connection: Any) -> None:
    """Receive a few."""
    for _ in range(5):
        connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)
