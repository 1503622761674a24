"""Waiting for a descriptor in a coroutine; `asyncio` is imported by those who have it anyway, for it takes its time."""

from __future__ import annotations

import os

__all__ = ("is_alone", "ready")


async def ready(fd: int, seconds: float, *, writes: bool = False) -> None:
    """Wait until ``fd`` can be read (or written), or for ``seconds``. Cancelled, it leaves nothing behind.

    Any number of coroutines may wait for the same descriptor.

    Raises:
        OSError: no descriptor is left.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not done.done():
            done.set_result(None)

    own = os.dup(fd)  # a loop knows one reader and one writer for each descriptor
    timer = loop.call_later(seconds, wake)
    try:
        (loop.add_writer if writes else loop.add_reader)(own, wake)
        await done
    finally:
        (loop.remove_writer if writes else loop.remove_reader)(own)
        timer.cancel()
        os.close(own)


def is_alone() -> bool:
    """Whether no other task of this loop could do what the present one waits for."""
    import asyncio

    return len(asyncio.all_tasks()) == 1
