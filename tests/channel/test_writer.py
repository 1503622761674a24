"""The writer of a message: one block as a rule, all of it lent or all of it free again."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import default_collate

from tests.channel.link import Link, link
from torchcrew.channel.writer import ALIGNMENT, PLACE_MIN, BlockWriter
from torchcrew.errors import ArenaFull

KB, MB = 1 << 10, 1 << 20


@pytest.fixture
def wire() -> Iterator[Link]:
    with link() as made:
        yield made


@pytest.fixture
def redirected(wire: Link, monkeypatch: pytest.MonkeyPatch) -> Link:
    """A link whose writer serves ``UntypedStorage._new_shared``, as in a worker."""
    monkeypatch.setattr(
        torch.UntypedStorage, "_new_shared", staticmethod(lambda size, *, device="cpu": wire.writer.new_shared(size))
    )
    return wire


def new_tensor(writer: BlockWriter, elements: int, value: int) -> torch.Tensor:
    storage = writer.new_shared(elements * 8)
    return torch.empty(0, dtype=torch.int64).set_(storage, 0, (elements,)).fill_(value)


def test_small_storages_are_private(wire: Link) -> None:
    """Below a limit they take no place in a block."""
    storage = wire.writer.new_shared(PLACE_MIN - 1)
    assert storage.nbytes() == PLACE_MIN - 1
    assert wire.bytes_used == 0


def test_what_is_made_in_the_block_is_sent_without_a_copy(wire: Link) -> None:
    """The receiver sees the very memory that the collate function wrote."""
    sent = new_tensor(wire.writer, 10_000, 7)
    address = sent.data_ptr()
    got = wire.send({"batch": sent})["batch"]
    assert got.data_ptr() == address
    assert (got == 7).all()
    assert len(wire.loans) == 1


def test_all_parts_of_a_message_share_a_block(wire: Link) -> None:
    """From the second message on, which knows how much the first one needed."""
    for i in range(4):
        made = [new_tensor(wire.writer, 10_000 + n, n) for n in range(10)]
        got = wire.send([made, torch.arange(50_000)])
        assert all((tensor == n).all() for n, tensor in enumerate(got[0]))
        assert torch.equal(got[1], torch.arange(50_000))
        assert {tensor.data_ptr() % ALIGNMENT for tensor in got[0]} == {0}
        assert len(wire.loans) == 1 or i == 0
        del got, made


def test_a_part_that_is_not_sent_is_free_again(wire: Link) -> None:
    """A temporary of the collate function takes its place only until it is gone."""
    kept = new_tensor(wire.writer, 100_000, 1)
    got = wire.send([3])
    assert got == [3]
    assert wire.bytes_used > 0
    assert (kept == 1).all()
    del kept
    assert wire.bytes_used == 0


def test_a_batch_that_the_worker_keeps_is_not_recycled(wire: Link) -> None:
    """A dataset may cache what it has collated: its block is taken until consumer and dataset have dropped it."""
    cached = new_tensor(wire.writer, 100_000, 5)
    got = wire.send(cached)
    del got
    for _ in range(5):
        wire.send(torch.zeros(100_000))
        assert (cached == 5).all()
    again = wire.send(cached)
    assert torch.equal(again, cached)
    assert again.data_ptr() != cached.data_ptr()
    del again, cached
    assert wire.bytes_used == 0


def test_collating_in_another_thread_while_a_message_is_sent(wire: Link) -> None:
    """Whatever thread asks when: each tensor keeps its own memory and no message shows another's."""
    wrong: list[int] = []

    def collate(seed: int) -> None:
        for i in range(100):
            made = [new_tensor(wire.writer, 5_000, seed + i + n) for n in range(3)]
            wrong.extend(n for n, tensor in enumerate(made) if not (tensor == seed + i + n).all())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=collate, args=(1000 * t,)) for t in range(2)]
    for thread in threads:
        thread.start()
    for i in range(100):
        sent = [new_tensor(wire.writer, 4_000, -i), torch.full((6_000,), i)]
        got = wire.send(sent)
        if not ((got[0] == -i).all() and (got[1] == i).all()):
            wrong.append(i)
    for thread in threads:
        thread.join(10)
    sys.setswitchinterval(interval)
    assert wrong == []
    del sent, got
    wire.writer.lend(())
    gc.collect()
    assert wire.bytes_used == 0


def test_only_the_used_part_of_a_block_stays_on_loan(wire: Link) -> None:
    """A message smaller than the last one does not hold the space that the last one needed."""
    wire.send(torch.zeros(MB))
    got = wire.send(torch.zeros(8 * KB))
    assert wire.bytes_used <= 40 * KB
    del got


def test_the_writer_finds_only_what_lies_in_it_whole(wire: Link) -> None:
    """`find` answers for complete ranges of this message only."""
    storage = wire.writer.new_shared(64 * KB)
    address = storage.data_ptr()
    assert wire.writer.find(address, 64 * KB) == (0, 0)
    assert wire.writer.find(address + 64, 100) == (0, 64)
    assert wire.writer.find(address, 64 * KB + 1) is None
    assert wire.writer.find(address - 1, 10) is None
    wire.writer.lend(())
    assert wire.writer.find(address, 10) is None


def test_make_room_is_asked_until_there_is_some() -> None:
    """Waiting is the caller's: the writer tries again each time it returns."""
    allowed = [0]
    asked: list[int] = []
    with link(lambda nbytes: nbytes <= allowed[0]) as wire:

        def make_room(nbytes: int) -> None:
            asked.append(nbytes)
            if len(asked) == 3:
                allowed[0] = 10 * MB

        writer = BlockWriter(wire.owner, make_room)
        assert (new_tensor(writer, 100_000, 4) == 4).all()
        assert asked == [800_000] * 3
        writer.lend(())


def test_an_error_of_make_room_passes_through() -> None:
    """And leaves the writer usable."""
    with link(lambda nbytes: nbytes <= MB) as wire:
        first = new_tensor(wire.writer, 10_000, 1)
        with pytest.raises(ArenaFull):
            wire.writer.new_shared(2 * MB)
        assert torch.equal(wire.send(first), torch.full((10_000,), 1))


def test_a_surprisingly_large_expectation_does_not_exhaust_the_budget() -> None:
    """When what the last message needed is not to be had, what this one needs is tried."""
    allowed = [10 * MB]
    with link(lambda nbytes: nbytes <= allowed[0]) as wire:
        wire.send(torch.zeros(MB))
        allowed[0] = MB
        wire.writer._make_room = lambda nbytes: None
        got = wire.send(torch.zeros(10_000))
        assert got.sum() == 0


def test_default_collate_writes_into_the_block(redirected: Link) -> None:
    """torch's own collate, which asks `_new_shared` where it believes to be in a worker, needs no second copy."""
    batch = [torch.full((100, 100), float(i)) for i in range(8)]
    storage = batch[0]._typed_storage()._new_shared(8 * 10_000, device=batch[0].device)
    out = batch[0].new(storage).resize_(8, 100, 100)
    torch.stack(batch, 0, out=out)
    address = out.data_ptr()
    got = redirected.send(out)
    assert got.data_ptr() == address
    assert torch.equal(got, default_collate(batch))


def test_bytes_sent_are_counted(wire: Link) -> None:
    """What went through blocks, not what they were rounded to."""
    wire.send(torch.zeros(100_000, dtype=torch.uint8))
    assert 100_000 <= wire.writer.bytes_sent < 100_000 + ALIGNMENT


def test_place_copies_from_any_address(wire: Link) -> None:
    """Ranges outside the block are copied into it, those inside are named."""
    inside = wire.writer.new_shared(64 * KB).fill_(9)
    outside = ctypes.create_string_buffer(b"abcd" * 1000)
    places = wire.writer.place([(ctypes.addressof(outside), 4000), (inside.data_ptr(), 64 * KB)])
    assert places[1] == (0, 0)
    loans = wire.writer.lend({index for index, _ in places})
    block = loans[places[0][0]]
    assert block is not None
    view = memoryview(wire.arena.lease(block)).cast("B")
    assert bytes(view[places[0][1] : places[0][1] + 4000]) == b"abcd" * 1000
