"""What a pool shares with its workers, and what a worker does.

    pool's process                                                        worker
      task_writer   ────────► [ SEQPACKET pair ] ────────► task_reader      receive, announce, run
      result_reader ◄──────── [ SEQPACKET pair ] ◄──────── result_writer    send, then the next
      board         ◄──── one word for each worker ─────── store            number of its task, "I am taking one"

A packet is received by one worker or none, and sent whole or not at all; there is no lock. Before a worker looks at
what it received it stores the packet's number in its word of the board, a shared page: so the pool knows which task a
worker was in when it died, and that a task which nobody announced was never begun.

Owner      the pool's process keeps all four ends; each new worker gets them, and closes those it does not need.
Closing    the pool shuts the tasks' socket down: a worker that finds it empty then ends.
Death      of a worker: see `pool_tasks`. Of the pool: the workers end when no process has the task_writer any more.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import context, reduction
from multiprocessing import pool as _typed
from typing import Any

from torchcrew.channel.envelope import FULL_ERRORS, HEAD, Envelope, load_packet, open_packet, receive_packet
from torchcrew.channel.sharing import SharingEncoder
from torchcrew.channel.sockets import seqpacket_pair
from torchcrew.crew import stacks
from torchcrew.memory import libc
from torchcrew.memory.arena import make_memfd

__all__ = ("FAILED", "SLOTS", "STARTING", "TAKING", "Board", "Link", "work")

_stock: Any = _typed

#: Workers that one pool can have. A page of the board is only there when one of its words was used.
SLOTS = 4096
#: Bytes from one word to the next: a cache line, so that workers on different cores do not slow each other.
_STRIDE = 64

# A worker's word is 2 * (number of its task) + 1 while it is taking the next one, and without the 1 otherwise. One
# store of eight bytes: no reader sees the number without the flag that belongs to it.
TAKING = 1
STARTING = 2**64 - 2
"""The word of a worker whose initializer has not returned."""
FAILED = 2**64 - 4
"""The word of a worker whose initializer has raised."""

#: How long to wait when the kernel has no memory, or too many descriptors in flight, for one more packet, in seconds.
_FULL_NAP = 1e-3
#: As a shell has it for a program that Ctrl-C ended. The user sees one traceback, that of the main process.
_INTERRUPTED = 130


class Board:
    """The workers' words, in a memfd."""

    def __init__(self, fd: int) -> None:
        """Map ``fd``, which belongs to the board from now on."""
        self.fd = fd
        nbytes = SLOTS * _STRIDE
        self._page = libc.view_of(libc.map_shared(fd, 0, nbytes), nbytes)
        self._finalizer = weakref.finalize(self, os.close, fd)
        self._finalizer.atexit = False

    def word(self, slot: int) -> ctypes.c_uint64:
        """The word of a slot; lives as long as it is used."""
        return ctypes.c_uint64.from_buffer(self._page, slot * _STRIDE)

    def close(self) -> None:
        """Close the descriptor; words stay readable. Idempotent."""
        self._finalizer()


class Link:
    """The two sockets and the board. Pickles only while a process is being started, and then the worker's ends."""

    def __init__(self) -> None:
        self.task_reader, self.task_writer = seqpacket_pair()
        self.result_reader, self.result_writer = seqpacket_pair()
        self.board = Board(make_memfd("torchcrew-pool", SLOTS * _STRIDE))

    def __reduce__(self) -> Any:
        context.assert_spawning(self)
        return _attach, (self.task_reader, self.result_writer, reduction.DupFd(self.board.fd))

    def keep_workers_ends(self) -> None:
        """In a worker: close what is the pool's, or a task socket that is shut down would never be seen to be."""
        for name in ("task_writer", "result_reader"):
            if hasattr(self, name):
                getattr(self, name).close()

    def close(self) -> None:
        """Close everything; idempotent."""
        for end in (self.task_reader, self.task_writer, self.result_reader, self.result_writer):
            end.close()
        self.board.close()


def _attach(task_reader: Any, result_writer: Any, board: Any) -> Link:
    link = Link.__new__(Link)
    link.task_reader, link.result_writer = task_reader, result_writer
    link.board = Board(board.detach())
    return link


def work(
    link: Link,
    slot: int,
    initializer: Callable[..., object] | None,
    initargs: Iterable[Any],
    maxtasks: int | None,
    wrap_exception: bool,
) -> None:
    """Be a worker: the target of its process.

    Args:
        slot: of its word on the board.
        initializer: called with ``initargs`` first.
        maxtasks: the worker ends after so many.
        wrap_exception: whether errors of tasks get their traceback as a cause.
    """
    gc.freeze()  # a forked worker need not look through its parent's objects, nor copy their pages for it
    link.keep_workers_ends()
    stacks.offer(f"pool worker {slot}")
    worker = _Worker(link, slot, wrap_exception)
    try:
        worker.start(initializer, initargs)
        worker.run(maxtasks)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except (BrokenPipeError, ConnectionResetError):
        pass  # nobody is there any more to take the result
    del worker
    gc.collect()  # so that tensors in cycles let go of what they share


class _Worker:
    """One worker's loop."""

    def __init__(self, link: Link, slot: int, wrap_exception: bool) -> None:
        self._pid = os.getpid()
        self._at = 0
        self._reader, self._writer = link.task_reader, link.result_writer
        self._word = link.board.word(slot)
        self._wrap_exception = wrap_exception
        self._encoder = SharingEncoder()
        self._epoll = select.epoll()
        # Of all workers that sleep, one is woken for each packet.
        self._epoll.register(self._reader, select.EPOLLIN | select.EPOLLEXCLUSIVE)

    def start(self, initializer: Callable[..., object] | None, initargs: Iterable[Any]) -> None:
        """Run the initializer; an error of it is sent to the pool, and ends this process."""
        try:
            if initializer is not None:
                initializer(*initargs)
        except Exception as error:
            self._send(0, self._envelope(_with_traceback(error)))
            self._word.value = FAILED
            sys.exit(1)
        self._word.value = self._at

    def run(self, maxtasks: int | None) -> None:
        """Do tasks until there will be no more, or so many are done."""
        done = 0
        while maxtasks is None or done < maxtasks:
            task = self._take()
            if task is None:
                return
            self._answer(task[0], self._do(task[1]))
            done += 1

    def _take(self) -> tuple[int, Any] | None:
        """The next task: its number, which is announced already, and what was received; None when no more will come."""
        word = self._word
        while True:
            idle = self._at
            word.value = idle | TAKING
            received = receive_packet(self._reader, linger=True)
            if received is None:
                word.value = idle
                self._epoll.poll()
                continue
            buffer, (nbytes, *_) = received
            if not nbytes:
                word.value = idle
                return None
            number = HEAD.unpack_from(buffer)[0]
            word.value = self._at = number << 1
            if nbytes > HEAD.size or HEAD.unpack_from(buffer)[1]:
                return number, received
            open_packet(received)  # it was sent to wake us, and has nothing in it

    def _do(self, received: Any) -> tuple[bool, Any]:
        """Run a task: whether it succeeded, and its result or error."""
        try:
            func, args, kwds = load_packet(received)
        except Exception as error:
            return False, _with_traceback(error)
        try:
            return True, func(*args, **kwds)
        except Exception as error:
            return False, _with_traceback(error) if self._wrap_exception else error

    def _answer(self, number: int, result: tuple[bool, Any]) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # a child that the task has forked, and that came back here
        try:
            envelope = self._envelope(result)
        except Exception as error:
            envelope = self._envelope((False, _stock.MaybeEncodingError(error, result[1])))
        self._send(number, envelope)

    def _envelope(self, obj: Any) -> Envelope:
        return Envelope(*self._encoder.encode(obj))

    def _send(self, number: int, envelope: Envelope) -> None:
        while True:
            try:
                envelope.send(self._writer, number, 0)
                return
            except OSError as error:
                if error.errno not in FULL_ERRORS:
                    raise
            time.sleep(_FULL_NAP)


def _with_traceback(error: Exception) -> Any:
    """The error as it is sent: its traceback, as text, will be its cause."""
    return _stock.ExceptionWithTraceback(error, error.__traceback__)
