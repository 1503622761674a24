"""Tensors that lie in each other, in shared memory of every kind, or nowhere; and callers in unusual places."""

from __future__ import annotations

import pytest

from tests.collectives import alias_cases
from tests.collectives.ranks import results_of, run


@pytest.mark.parametrize("size", [2, 3])
def test_in_place(size: int) -> None:
    """An output that is a part of the input, as FSDP has it: each rank gets what it would get of a copy."""
    run(alias_cases.in_place, size)


def test_parts_that_differ() -> None:
    """reduce_scatter with other parts on each rank: all say so, and the group goes on."""
    for told in results_of(alias_cases.parts_that_differ, 2):
        assert "reduce_scatter of 8 elements" in told


def test_shared_memory() -> None:
    """No tensor is moved, whichever way it is shared; mappings of others' do not pile up."""
    run(alias_cases.shared_memory, 2)


def test_refused() -> None:
    """Expanded, fake and distributed tensors, and those of no device: an error at once."""
    for told in results_of(alias_cases.refused, 2):
        assert len(told) == 5
        assert "give it a clone()" in told[0]
        assert "FakeTensor" in told[2]
        assert "to_local()" in told[3]
        assert "meta tensor" in told[4]


def test_callbacks() -> None:
    """They may call collectives and wait for them."""
    run(alias_cases.callbacks, 2)


def test_a_forked_child_has_no_part() -> None:
    """It can neither abort nor leave its parent's group."""
    assert run(alias_cases.child_aborts, 2) == [0, 1]
