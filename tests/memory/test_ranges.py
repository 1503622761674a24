"""Free ranges: what is given can be taken, nothing twice, neighbours merge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchcrew.memory.ranges import Ranges


def test_nothing_free() -> None:
    """An empty interval has nothing to take."""
    for limit in (0, -5):
        assert len(Ranges(0, limit)) == 0
        assert Ranges(0, limit).take(1) is None


def test_an_exact_fit_is_preferred() -> None:
    """Then the smallest that holds it, then the lowest."""
    ranges = Ranges(0, 0)
    for start, nbytes in ((0, 10), (20, 4), (30, 6), (40, 4)):
        ranges.give(start, nbytes)
    assert ranges.take(6) == 30
    assert ranges.take(4) == 20
    assert ranges.take(3) == 40
    assert ranges.take(2) == 0


def test_too_large_a_request() -> None:
    """Is None and changes nothing, however much is free in pieces."""
    ranges = Ranges(0, 10)
    ranges.reserve(4, 1)
    assert ranges.take(6) is None
    assert list(ranges) == [(0, 4), (5, 10)]


def test_giving_merges_with_both_neighbours() -> None:
    """The gap closes."""
    ranges = Ranges(0, 30)
    ranges.reserve(10, 10)
    assert list(ranges) == [(0, 10), (20, 30)]
    ranges.give(10, 10)
    assert list(ranges) == [(0, 30)]


@pytest.mark.parametrize(("start", "nbytes"), [(5, 10), (12, 3), (19, 2), (0, 31), (-1, 2)])
def test_reserving_what_is_not_free(start: int, nbytes: int) -> None:
    """Is refused, also where a part of it is free."""
    ranges = Ranges(0, 30)
    ranges.reserve(10, 10)
    before = list(ranges)
    with pytest.raises(ValueError, match="not free"):
        ranges.reserve(start, nbytes)
    assert list(ranges) == before


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "reserve"]), st.integers(1, 20), st.integers(0, 100))))
def test_against_a_set_of_bytes(steps: list[tuple[str, int, int]]) -> None:
    """Any sequence of operations agrees with the plain model: a set of free bytes."""
    ranges, free = Ranges(0, 100), set(range(100))
    held: list[tuple[int, int]] = []
    for what, nbytes, number in steps:
        if what == "give" and held:
            start, size = held.pop(number % len(held))
            ranges.give(start, size)
            free |= set(range(start, start + size))
            continue
        if what == "reserve":
            wanted = set(range(number, number + nbytes))
            if wanted <= free:
                ranges.reserve(number, nbytes)
                held.append((number, nbytes))
                free -= wanted
            else:
                with pytest.raises(ValueError, match="not free"):
                    ranges.reserve(number, nbytes)
            continue
        taken = ranges.take(nbytes)
        if taken is None:
            assert not any(set(range(start, start + nbytes)) <= free for start in range(100))
        else:
            assert set(range(taken, taken + nbytes)) <= free
            held.append((taken, nbytes))
            free -= set(range(taken, taken + nbytes))
    assert {i for start, end in ranges for i in range(start, end)} == free
    bounds = [bound for pair in ranges for bound in pair]
    assert bounds == sorted(set(bounds)), "disjoint, sorted, not touching"
