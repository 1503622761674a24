"""Free address ranges of one file: best fit, merged with their neighbours, no operating system involved.

A free range costs nothing by itself (its pages may or may not exist), so the only aims are few ranges and low offsets:
low offsets are the ones that were used before and whose pages are warm.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ("Ranges",)


class Ranges:
    """The free parts of ``[start, limit)``, as disjoint ranges that do not touch."""

    def __init__(self, start: int, limit: int) -> None:
        self._free: list[tuple[int, int]] = [(start, limit)] if limit > start else []

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._free)

    def take(self, nbytes: int) -> int | None:
        """Take ``nbytes`` from the smallest range that holds them, the lowest of equals; None when none does."""
        best: tuple[int, int] | None = None
        best_size = 0
        for start, end in self._free:
            size = end - start
            if size == nbytes:
                best = (start, end)
                break
            if size > nbytes and (best is None or size < best_size):
                best, best_size = (start, end), size
        if best is None:
            return None
        self._cut(best, best[0], best[0] + nbytes)
        return best[0]

    def reserve(self, start: int, nbytes: int) -> None:
        """Take exactly ``[start, start + nbytes)``.

        Raises:
            ValueError: a part of it is not free.
        """
        end = start + nbytes
        for candidate in self._free:
            if candidate[0] <= start and end <= candidate[1]:
                self._cut(candidate, start, end)
                return
        raise ValueError(f"range {start}..{end} is not free")

    def give(self, start: int, nbytes: int) -> None:
        """Return a range; it merges with free neighbours."""
        end = start + nbytes
        at = bisect_left(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free.pop(at)[0]
        insort(self._free, (start, end))

    def _cut(self, whole: tuple[int, int], start: int, end: int) -> None:
        at = bisect_left(self._free, whole)
        parts = [(a, b) for a, b in ((whole[0], start), (end, whole[1])) if b > a]
        self._free[at : at + 1] = parts
