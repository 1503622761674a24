"""`torchcrew.Queue`: what is put arrives, once, whole, as the consumer's own; errors, waiting and closing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import resource
import threading
import time
from collections.abc import Callable
from queue import Empty, Full
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchcrew
from tests.channel.queue_cases import (
    collect,
    context_of,
    echo,
    hold_and_sleep,
    make_process,
    message,
    nested,
    number_of,
    put_all,
    put_and_die,
    wait_for_message,
)
from torchcrew.channel import lender as lender_module
from torchcrew.channel.borrower import Received
from torchcrew.channel.envelope import open_packet, receive_packet
from torchcrew.errors import ArenaFull, PeerDied, QueueClosed, TooManyDescriptors

METHODS = ["fork", "spawn", "forkserver", "zygote"]
#: Elements of int64: inline, and in a block.
SMALL, LARGE = 5, 10_000


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait for something that happens in another process or thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to pass"
        time.sleep(0.002)


def fill(queue: torchcrew.Queue) -> list[Any]:
    """Put and get until there is no memory left; returns what was got."""
    held: list[Any] = []
    with contextlib.suppress(Full):
        while len(held) < 100:
            queue.put(torch.ones(50_000), timeout=0.05)
            held.append(queue.get())
    return held


def put_many(queue: torchcrew.Queue, times: int) -> None:
    """Put tensors of 200 KB."""
    for _ in range(times):
        queue.put(torch.ones(50_000))


def used(queue: torchcrew.Queue) -> int:
    """Bytes of this process's blocks that are not free."""
    queue._lender._reclaimed = 0.0
    with queue._lender._lock:
        for _ in range(2):
            queue._lender._reclaim()
        owner = queue._lender._owner
        if owner is None:
            return 0
        owner.recycle()
        return owner.used


# What arrives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "obj",
    [
        None,
        5,
        "x" * 100_000,
        [1, "a", None],
        b"y" * 3_000_000,
        torch.arange(3),
        torch.arange(300_000.0),
        torch.empty(0),
        torch.tensor(3.5),
        torch.rand(100, 200).t(),
        np.arange(20_000),
        {"a": [torch.ones(70_000), {"b": np.zeros(3)}], "c": (torch.arange(2), "text")},
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_what_is_put_arrives(obj: Any) -> None:
    """Any size and nesting; equal in value, type, shape and stride."""
    with torchcrew.Queue() as queue:
        queue.put(obj)
        got = queue.get()
    assert repr(got) == repr(obj)
    if isinstance(obj, torch.Tensor):
        assert torch.equal(got, obj)
        assert got.dtype == obj.dtype


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_message_is_a_snapshot(elements: int) -> None:
    """What the producer writes afterwards is not seen, nor what the consumer writes."""
    queue = torchcrew.Queue()
    tensor = torch.zeros(elements)
    queue.put(tensor)
    tensor.fill_(1)
    got = queue.get()
    assert not got.any()
    got.fill_(2)
    assert tensor.eq(1).all()


def test_tensors_that_overlap_still_do() -> None:
    """Views of one tensor in one message are views of one tensor again."""
    queue = torchcrew.Queue()
    base = torch.zeros(20_000)
    queue.put([base, base[5:10]])
    whole, part = queue.get()
    part.fill_(3)
    assert whole[5:10].eq(3).all()


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_shared_tensor_stays_shared(elements: int) -> None:
    """Its memory is not copied: it travels as a descriptor, beside tensors that are copied; more than once, too."""
    queue = torchcrew.Queue()
    shared = torch.zeros(elements).share_memory_()
    plain = torch.arange(elements)
    queue.put({"plain": plain, "shared": shared, "again": shared[1:], "array": np.arange(elements)})
    got = queue.get()
    shared[2] = 5
    assert got["shared"][2] == 5
    assert got["again"][1] == 5
    got["shared"][0] = 7
    assert shared[0] == 7
    assert torch.equal(got["plain"], plain)
    assert (got["array"] == np.arange(elements)).all()


def test_shared_tensors_reach_another_process() -> None:
    """Both sides see writes."""
    inbox, outbox = torchcrew.Queue(), torchcrew.Queue()
    child = make_process("fork", echo, inbox, outbox)
    child.start()
    shared = torch.zeros(10).share_memory_()
    inbox.put([shared, torch.ones(30_000)])
    got, plain = outbox.get()
    got[3] = 4
    assert shared[3] == 4
    assert plain.eq(1).all()
    inbox.close()
    child.join()


def test_a_model_travels() -> None:
    """Parameters stay parameters."""
    queue = torchcrew.Queue()
    model = torch.nn.Linear(300, 300)
    queue.put(model)
    got = queue.get()
    assert all(torch.equal(a, b) for a, b in zip(got.parameters(), model.parameters(), strict=True))
    assert isinstance(got.weight, torch.nn.Parameter)


def test_what_arrived_outlives_queue_and_producer() -> None:
    """The producer is killed, the queue closed and forgotten: views stay, and can be written."""
    queue = torchcrew.Queue()
    child = make_process("fork", put_and_die, queue, range(6), LARGE)
    child.start()
    child.join()
    held = [queue.get() for _ in range(6)]
    queue.close()
    del queue
    gc.collect()
    torch.zeros(1 << 20).fill_(9)
    assert [number_of(got) for got in held] == list(range(6))
    part = held[3]["data"][5:10]
    del held
    part += 1
    assert part.eq(4).all()


def test_a_producers_own_queue_object_may_go_while_messages_wait() -> None:
    """Blocks in flight live on in the socket."""
    queue = torchcrew.Queue()
    child = make_process("fork", put_all, queue, range(5), LARGE)
    child.start()
    child.join()
    assert [number_of(queue.get()) for _ in range(5)] == list(range(5))


# Memory ---------------------------------------------------------------------------------------------------------------


def test_blocks_return_and_are_used_again() -> None:
    """A thousand messages of 80 KB take the memory of a few."""
    queue = torchcrew.Queue()
    for number in range(1000):
        queue.put(message(number, LARGE))
        assert number_of(queue.get()) == number
    assert used(queue) == 0
    arena = queue._lender._arena
    assert arena is not None
    assert arena.resident_bytes() < 2 << 20


def test_a_held_message_is_not_written_over() -> None:
    """However many follow."""
    queue = torchcrew.Queue()
    queue.put(message(1, LARGE))
    held = queue.get()["data"][10:20]
    for number in range(2, 200):
        queue.put(message(number, LARGE))
        queue.get()
    assert held.eq(1).all()


def test_small_messages_need_no_arena() -> None:
    """Up to 16 KiB travel in the packet."""
    queue = torchcrew.Queue()
    queue.put([torch.ones(1000), "x" * 10_000])
    assert queue._lender._arena is None
    queue.get()


def test_a_message_beyond_the_budget() -> None:
    """It can never be sent; the error says how to raise the budget, and the queue goes on."""
    queue = torchcrew.Queue(memory_budget="1MB")
    with pytest.raises(ArenaFull, match="memory_budget"):
        queue.put(torch.ones(1 << 20))
    queue.put(torch.ones(20_000))
    assert queue.get().eq(1).all()


def test_put_waits_for_memory() -> None:
    """Held messages hold the producer back, as long as its patience lasts, and dropping one lets it go on."""
    queue = torchcrew.Queue(memory_budget="1MB")
    held = fill(queue)
    assert 2 <= len(held) <= 5
    with pytest.raises(Full):
        queue.put_nowait(torch.ones(50_000))
    dropping = threading.Timer(0.05, held.pop)
    dropping.start()
    queue.put(torch.full((50_000,), 2.0), timeout=10)
    dropping.join()
    assert queue.get().eq(2).all()


def test_memory_that_can_never_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer that holds everything waits for the next message: an error, after a time, instead of for ever."""
    monkeypatch.setattr(lender_module, "STARVED", 0.2)
    queue = torchcrew.Queue(memory_budget="1MB")
    held = fill(queue)
    with pytest.raises(ArenaFull, match="wait for the next"):
        queue.put(torch.ones(50_000))
    held.pop()
    queue.put(torch.ones(50_000))


def test_a_waiting_child_that_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same across processes."""
    monkeypatch.setattr(lender_module, "STARVED", 0.2)
    queue, done = torchcrew.Queue(memory_budget="1MB"), torchcrew.Queue()
    child = make_process("fork", hold_all, queue, done)
    child.start()
    with pytest.raises(ArenaFull):
        put_many(queue, 10)
    queue.close()
    assert done.get(timeout=10) >= 2
    child.join()


def hold_all(queue: Any, done: Any) -> None:
    held = list(queue)
    done.put(len(held))


def test_the_blocks_of_a_killed_consumer_return() -> None:
    """Those that it held, and those that it had in its hands; its forked children count as long as they live."""
    queue, ready = torchcrew.Queue(), torchcrew.Queue()
    child = make_process("fork", hold_and_sleep, queue, ready, 5)
    child.start()
    put_all(queue, range(5), LARGE)
    assert ready.get(timeout=10) == 5
    assert used(queue) > 5 * LARGE * 8
    child.kill()
    child.join()
    wait_until(lambda: used(queue) == 0)


def hold_without_queue(box: list[Any], ready: Any, go: Any) -> None:
    """Receive, and forget the queue; only the views are left."""
    held = [box[0].get() for _ in range(3)]
    box.clear()
    gc.collect()
    ready.put(len(held))
    go.get(timeout=10)
    ready.put([number_of(got) for got in held])


def test_a_consumer_that_forgot_the_queue_keeps_its_views() -> None:
    """What it holds counts as held as long as it holds it."""
    queue, ready, go = torchcrew.Queue(), torchcrew.Queue(), torchcrew.Queue()
    child = make_process("zygote", hold_without_queue, [queue], ready, go)
    child.start()
    put_all(queue, range(3), LARGE)
    assert ready.get(timeout=15) == 3
    assert used(queue) >= 3 * LARGE * 8
    put_all(queue, range(10, 20), LARGE)
    for number in range(10, 20):
        assert number_of(queue.get()) == number
    go.put(None)
    assert ready.get(timeout=10) == [0, 1, 2]
    child.join()
    assert child.exitcode == 0
    assert used(queue) == 0


def receive_only(queue: Any, ready: Any, go: Any) -> None:
    """Take a packet out of the socket, and do not come to claim what is in it."""
    queue._claims.begin_receiving()
    received = receive_packet(queue._box.reader)
    assert received is not None
    ready.put(True)
    if go is None:
        os.kill(os.getpid(), 9)
    go.get(timeout=10)
    header, body, views, fds = queue._borrower._claim(*open_packet(received))
    queue._claims.end_receiving()
    got = queue._borrower.decode(Received(header, body, views, fds))
    ready.put(number_of(got))


def test_a_block_whose_consumer_died_before_it_claimed_it() -> None:
    """It comes back; and not while another consumer is just receiving."""
    queue, dying, slow, go = (torchcrew.Queue() for _ in range(4))
    put_all(queue, range(2), LARGE)
    children = [
        make_process("fork", receive_only, queue, dying, None),
        make_process("fork", receive_only, queue, slow, go),
    ]
    children[0].start()
    assert dying.get(timeout=10)
    children[0].join()
    assert children[0].exitcode == -9
    children[1].start()
    assert slow.get(timeout=10)
    taken = used(queue)
    assert taken >= 2 * LARGE * 8  # one is lost, the other is not: from here they look the same
    put_all(queue, range(10, 20), LARGE)
    for number in range(10, 20):
        assert number_of(queue.get()) == number
    go.put(None)
    children[1].join()
    assert children[1].exitcode == 0
    assert slow.get(timeout=10) == 1
    assert used(queue) == 0


def test_the_child_of_a_killed_consumer_keeps_its_views() -> None:
    """A process that was forked with the views in its memory."""
    queue, ready, go = torchcrew.Queue(), torchcrew.Queue(), torchcrew.Queue()
    child = make_process("fork", hold_in_grandchild, queue, ready, go)
    child.start()
    put_all(queue, range(3), LARGE)
    child.join()
    assert child.exitcode == -9
    before = used(queue)
    assert before >= 3 * LARGE * 8
    put_all(queue, range(10, 20), LARGE)  # would write over blocks that are taken back
    for _ in range(10):
        queue.get()
    go.put(None)
    assert ready.get(timeout=10) == [0, 1, 2]
    wait_until(lambda: used(queue) == 0)


def hold_in_grandchild(queue: Any, ready: Any, go: Any) -> None:
    held = [queue.get() for _ in range(3)]
    if os.fork() == 0:
        try:
            go.get(timeout=10)
            ready.put([number_of(got) for got in held])
        finally:
            os._exit(0)
    os.kill(os.getpid(), 9)


def test_a_consumers_arenas_are_let_go() -> None:
    """One descriptor for each producer that messages come from, and none a second after the last."""
    queue = torchcrew.Queue()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        child = make_process("fork", put_all, queue, range(2), LARGE)
        child.start()
        child.join()
        assert [number_of(queue.get()) for _ in range(2)] == [0, 1]
        child.close()
    assert len(queue._borrower._arenas) == 3
    with pytest.raises(Empty):
        queue.get(timeout=1.2)
    assert not queue._borrower._arenas
    assert len(os.listdir("/proc/self/fd")) <= before + 1 + 3  # this consumer's presence; witnesses of children


def test_without_a_descriptor_to_receive_with() -> None:
    """The message is lost, with an error that says why; its memory comes back, and the queue goes on."""
    queue = torchcrew.Queue()
    put_all(queue, range(2), LARGE)
    assert number_of(queue.get()) == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open("/dev/null", os.O_RDONLY)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))  # the lowest that is free, and so none
    try:
        with pytest.raises(TooManyDescriptors):
            queue.get()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert used(queue) == 0
    queue.put(torch.ones(LARGE))
    assert queue.get().eq(1).all()


def test_a_block_that_is_taken_again_before_its_last_message_is_noted() -> None:
    """A producer that is slow to say that its message is gone does not spoil the next one in the same block."""
    queue = torchcrew.Queue()
    lender = queue._lender
    noted: list[Any] = []
    late = lender.sent
    lender.sent = lambda *args: noted.append(args)  # type: ignore[method-assign]
    queue.put(message(1, LARGE))
    queue.get()
    queue.put(message(2, LARGE))
    late(*noted[0])
    waiting = used(queue)
    assert waiting >= LARGE * 8
    queue.put(message(3, LARGE))
    assert [number_of(queue.get()) for _ in range(2)] == [2, 3]
    assert used(queue) == 0


def test_a_message_that_is_given_up_takes_nothing_from_another() -> None:
    """Two that the same kit has built."""
    queue = torchcrew.Queue()
    small = queue._lender.encode(1)
    large = queue._lender.encode(torch.ones(LARGE))
    queue._lender.cancel(small)
    assert used(queue) >= LARGE * 4
    queue._lender.cancel(large)
    assert used(queue) == 0


def test_messages_of_many_sizes_share_the_memory() -> None:
    """Blocks that came back serve other sizes, too."""
    queue = torchcrew.Queue()
    for number in range(600):
        queue.put(message(number, 3_000 + 40 * number))
        assert number_of(queue.get()) == number
    arena = queue._lender._arena
    assert arena is not None
    assert arena.resident_bytes() < 8 << 20


# Waiting --------------------------------------------------------------------------------------------------------------


def test_an_empty_queue() -> None:
    """At once, and after the time given."""
    queue = torchcrew.Queue()
    for call in (queue.get_nowait, lambda: queue.get(timeout=0.02), lambda: queue.get(block=False, timeout=9)):
        with pytest.raises(Empty):
            call()
    with pytest.raises(ValueError, match="non-negative"):
        queue.get(timeout=-1)
    assert queue.empty()


def test_maxsize_is_a_number() -> None:
    """What is none is refused where it is given, as by the standard library's queues."""
    with pytest.raises(TypeError, match="integer"):
        torchcrew.Queue("3")  # type: ignore[arg-type]


def test_a_full_queue() -> None:
    """`maxsize` counts what waits."""
    queue = torchcrew.Queue(2)
    queue.put(1)
    assert not queue.full()
    queue.put(torch.ones(LARGE))
    assert (queue.qsize(), queue.full(), queue.empty()) == (2, True, False)
    for call in (queue.put_nowait, lambda obj: queue.put(obj, timeout=0.02)):
        with pytest.raises(Full):
            call(torch.ones(LARGE))
    assert queue.get() == 1
    queue.put(3)
    queue.get()
    assert queue.get() == 3
    assert used(queue) == 0


def test_the_socket_may_fill() -> None:
    """Without `maxsize` a queue holds what the kernel holds; then `put` waits."""
    queue = torchcrew.Queue()
    count = 0
    with contextlib.suppress(Full):
        while count < 100_000:
            queue.put_nowait(torch.arange(1000))
            count += 1
    assert 10 <= count < 100_000
    got = [queue.get() for _ in range(count)]
    assert len(got) == count
    with pytest.raises(Empty):
        queue.get_nowait()


def test_a_message_that_cannot_be_pickled() -> None:
    """The error is `put`'s, nothing is sent, and no memory stays taken."""
    queue = torchcrew.Queue()
    queue.put(torch.ones(LARGE))
    queue.get()
    for bad in (lambda: 0, [torch.ones(LARGE), lambda: 0], {"a": threading.Lock()}):
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
            queue.put(bad)
    assert queue.empty()
    assert used(queue) == 0
    queue.put(1)
    assert queue.get() == 1


class _Broken:
    def __init__(self) -> None:
        self.data = torch.ones(LARGE)

    def __setstate__(self, state: Any) -> None:
        raise EOFError("cannot be unpickled")


def test_a_message_that_cannot_be_unpickled() -> None:
    """The error is `get`'s, as it was raised; its memory returns, and the next message comes."""
    queue = torchcrew.Queue()
    queue.put(_Broken())
    queue.put(2)
    with pytest.raises(EOFError, match="cannot be unpickled"):
        queue.get()
    assert queue.get() == 2
    assert used(queue) == 0


class _Puts:
    """Puts something else while it is pickled."""

    def __init__(self, queue: torchcrew.Queue) -> None:
        self.queue = queue

    def __reduce__(self) -> Any:
        self.queue.put(torch.full((LARGE,), 1))
        return torch.full, ((LARGE,), 2)


def test_a_put_within_a_put() -> None:
    """Pickling may use the same queue."""
    queue = torchcrew.Queue()
    queue.put([torch.full((LARGE,), 3), _Puts(queue)])
    assert queue.get().eq(1).all()
    first, second = queue.get()
    assert first.eq(3).all()
    assert second.eq(2).all()


def test_threads() -> None:
    """Four producers and four consumers in one process: everything comes once."""
    queue = torchcrew.Queue(50)
    got: list[int] = []

    def consume() -> None:
        got.extend(number_of(obj) for obj in queue)

    producers = [threading.Thread(target=put_all, args=(queue, range(k, 200, 4), 3000)) for k in range(4)]
    consumers = [threading.Thread(target=consume) for _ in range(4)]
    for thread in (*producers, *consumers):
        thread.start()
    for thread in producers:
        thread.join()
    queue.close()
    for thread in consumers:
        thread.join()
    assert sorted(got) == list(range(200))
    assert used(queue) == 0


# Closing and dying ----------------------------------------------------------------------------------------------------


def test_closing_delivers_what_was_put() -> None:
    """Then every call says that the queue is closed; closing twice is no error."""
    with torchcrew.Queue() as queue:
        put_all(queue, range(3), LARGE)
    queue.close()
    assert queue.closed
    assert [number_of(got) for got in queue] == [0, 1, 2]
    for call in (queue.get, queue.get_nowait, lambda: queue.get(timeout=1), lambda: queue.put(1)):
        with pytest.raises(QueueClosed):
            call()
    with pytest.raises(QueueClosed):
        queue.put(torch.ones(LARGE))
    assert used(queue) == 0


def test_closing_wakes_those_who_wait() -> None:
    """In `get`, in `put` at a full queue, and in `put` without memory; in other processes, too."""
    full, poor, empty = torchcrew.Queue(1), torchcrew.Queue(memory_budget="1MB"), torchcrew.Queue()
    full.put(1)
    poor.put(torch.ones(100_000))
    poor.put(torch.ones(100_000))
    raised: list[type] = []

    def wait_in(call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except QueueClosed as error:
            raised.append(type(error))

    calls = [(full.put, 2), (poor.put, torch.ones(100_000)), (empty.get,)]
    threads = [threading.Thread(target=wait_in, args=call) for call in calls]
    child = make_process("fork", echo, empty, torchcrew.Queue())
    child.start()
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    for queue in (full, poor, empty):
        queue.close()
    for thread in threads:
        thread.join(5)
    child.join(5)
    assert raised == [QueueClosed] * 3
    assert child.exitcode == 0


def test_a_child_closes_for_its_parent() -> None:
    """`close` is for all, whoever calls it."""
    inbox, outbox = torchcrew.Queue(), torchcrew.Queue()
    child = make_process("fork", echo, inbox, outbox)
    child.start()
    inbox.put(1)
    inbox.close()
    assert list(outbox) == [1]
    child.join()


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_the_last_other_process_dies(method: str) -> None:
    """A `get` without a timeout raises, after all that was sent, and says who died and how."""
    queue = torchcrew.Queue()
    child = make_process(method, put_and_die, queue, range(2), LARGE)
    child.start()
    assert [number_of(queue.get()) for _ in range(2)] == [0, 1]
    with pytest.raises(PeerDied, match=rf"pid {child.pid}, killed by SIGKILL"):
        queue.get()
    with pytest.raises(Empty):
        queue.get(timeout=0.01)
    child.join()


def test_the_last_other_process_dies_while_put_waits() -> None:
    """For room in the queue, and for memory."""
    full, poor = torchcrew.Queue(1), torchcrew.Queue(memory_budget="1MB")
    child = make_process("fork", time.sleep, 0.3)
    child.start()
    full.put(1)
    with pytest.raises(PeerDied):
        full.put(2)
    with pytest.raises(PeerDied):
        put_many(poor, 10)
    child.join()


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", METHODS)
def test_start_methods(method: str) -> None:
    """There and back, through a child of every kind."""
    inbox, outbox = torchcrew.Queue(), torchcrew.Queue()
    child = make_process(method, echo, inbox, outbox)
    child.start()
    for number, elements in enumerate((SMALL, LARGE, 1_000_000)):
        inbox.put(message(number, elements))
        assert number_of(outbox.get()) == number
    inbox.close()
    assert list(outbox) == []
    child.join()
    assert child.exitcode == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.faults), "zygote"])
def test_grandchildren(method: str) -> None:
    """A queue is passed on by who got it."""
    queue = torchcrew.Queue()
    child = make_process(method, nested, queue, method, 1)
    child.start()
    assert number_of(queue.get(timeout=40)) == 7
    child.join()


def test_many_producers_and_consumers() -> None:
    """Every message comes to exactly one of them."""
    queue, out = torchcrew.Queue(20), torchcrew.Queue()
    consumers = [make_process("fork", collect, queue, out, 3) for _ in range(3)]
    producers = [make_process("fork", put_all, queue, range(k, 150, 3), 4000) for k in range(3)]
    for process in (*consumers, *producers):
        process.start()
    for process in producers:
        process.join()
    queue.close()
    numbers = [number for _ in consumers for number in out.get(timeout=10)]
    assert sorted(numbers) == list(range(150))
    for process in consumers:
        process.join()


def test_it_pickles_only_for_a_process() -> None:
    """As the standard library's."""
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(torchcrew.Queue())


def test_a_waiting_consumer_is_idle() -> None:
    """It sleeps; it does not look around."""
    queue = torchcrew.Queue()
    child = make_process("fork", wait_for_message, queue)
    child.start()
    time.sleep(0.2)
    before = _cpu_ticks(child.pid)
    time.sleep(1.0)
    assert _cpu_ticks(child.pid) - before <= 1
    queue.close()
    child.join()
    assert child.exitcode == 1  # QueueClosed


def _cpu_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


# Coroutines -----------------------------------------------------------------------------------------------------------


def test_coroutines() -> None:
    """Producer and consumer in one loop; the queue is full and empty by turns."""

    async def main() -> list[int]:
        queue = torchcrew.Queue(2)

        async def produce() -> None:
            for number in range(30):
                await queue.aput(message(number, LARGE if number % 2 else SMALL))
            queue.close()

        producing = asyncio.create_task(produce())
        numbers = [number_of(got) async for got in queue]
        await producing
        with pytest.raises(QueueClosed):
            await queue.aput(1)
        return numbers

    assert asyncio.run(main()) == list(range(30))


def test_a_cancelled_get_loses_nothing() -> None:
    """Many waiters, cancelled at any moment; what is put is got by another."""

    async def main() -> None:
        queue = torchcrew.Queue()
        got: list[int] = []

        async def consume() -> None:
            while True:
                got.append(await queue.aget())
                await asyncio.sleep(0)

        async def cancel_often() -> None:
            for k in range(100):
                task = asyncio.create_task(consume())
                await asyncio.sleep(0.001 if k % 3 else 0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        async def produce() -> None:
            for number in range(300):
                await queue.aput(number)
                if number % 10 == 0:
                    await asyncio.sleep(0.001)

        await asyncio.gather(cancel_often(), produce())
        while not queue.empty():
            got.append(await queue.aget())
        assert sorted(got) == list(range(300))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(queue.aget(), 0.02)

    asyncio.run(main())


def test_a_cancelled_put_puts_nothing() -> None:
    """And its memory is free again."""

    async def main() -> torchcrew.Queue:
        queue = torchcrew.Queue(1)
        queue.put(0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(queue.aput(torch.ones(LARGE)), 0.02)
        assert queue.get() == 0
        assert queue.empty()
        return queue

    assert used(asyncio.run(main())) == 0


@pytest.mark.parametrize("elements", [SMALL, 100_000], ids=["no room", "no memory"])
def test_closing_wakes_a_coroutine_that_puts(elements: int) -> None:
    """Whatever it waits for."""

    async def main() -> None:
        queue = torchcrew.Queue(1 if elements == SMALL else 0, memory_budget="1MB")
        putting = asyncio.create_task(put_often(queue))
        await asyncio.sleep(0.05)
        assert not putting.done()
        queue.close()
        with pytest.raises(QueueClosed):
            await putting

    async def put_often(queue: torchcrew.Queue) -> None:
        for _ in range(10):
            await queue.aput(torch.ones(elements))

    asyncio.run(main())


def test_a_coroutine_that_puts_learns_of_deaths() -> None:
    """Nobody is left who could make room."""
    queue = torchcrew.Queue(1)
    queue.put(0)
    child = make_process("fork", time.sleep, 0)
    child.start()
    child.join()
    with pytest.raises(PeerDied):
        asyncio.run(queue.aput(1))


def test_a_coroutine_learns_of_deaths() -> None:
    """`aget` raises when nobody is left."""
    queue = torchcrew.Queue()
    child = make_process("fork", put_and_die, queue, range(1), LARGE)
    child.start()

    async def main() -> None:
        assert number_of(await queue.aget()) == 0
        with pytest.raises(PeerDied):
            await queue.aget()

    asyncio.run(main())
    child.join()


# Against a model ------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    maxsize=st.integers(0, 3),
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "get", "drop", "check", "close"]), st.integers(0, 3)), max_size=40
    ),
)
def test_random_use(maxsize: int, steps: list[tuple[str, int]]) -> None:
    """Any order of put, get, hold, drop and close: what a list would give, and every view right until it is dropped."""
    queue = torchcrew.Queue(maxsize, memory_budget="2MB")
    waiting: list[int] = []
    held: list[dict[str, Any]] = []
    is_closed = False
    for number, (what, size) in enumerate(steps):
        if what == "put":
            try:
                queue.put_nowait(message(number, (SMALL, 3000, LARGE, 40_000)[size]))
            except QueueClosed:
                assert is_closed
            except Full:
                assert (0 < maxsize <= len(waiting)) or size == 3 or held or waiting
            else:
                assert not is_closed
                assert not 0 < maxsize <= len(waiting)
                waiting.append(number)
        elif what == "get":
            try:
                held.append(queue.get_nowait())
            except QueueClosed:
                assert is_closed
                assert not waiting
            except Empty:
                assert not waiting
                assert not is_closed
            else:
                assert number_of(held[-1]) == waiting.pop(0)
        elif what == "drop" and held:
            held.pop(size % len(held))
        elif what == "close" and size == 0:
            queue.close()
            is_closed = True
        assert queue.qsize() == len(waiting)
        assert all(number_of(old) < len(steps) for old in held)
    held.clear()
    while waiting:
        assert number_of(queue.get()) == waiting.pop(0)
    assert used(queue) == 0


def test_context_of_all_methods() -> None:
    """The cases above use the contexts that users do."""
    assert [context_of(method).get_start_method() for method in METHODS] == METHODS
