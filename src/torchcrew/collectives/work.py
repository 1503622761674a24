"""What an asynchronous collective, or message, returns: torch's `Work`, which raises what went wrong as it was raised.

The `Work` that torch makes of a future cannot wait with a timeout and turns every exception into a `RuntimeError`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.futures import Future

from torchcrew.errors import CollectiveTimeout

__all__ = ("GroupWork",)

_Work: Any = distributed.Work


class GroupWork(_Work):  # type: ignore[misc]
    """One call, in the thread of its group.

    Args:
        result: the tensors that are written.
    """

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._result = result
        self._error: BaseException | None = None
        self._source = -1
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._future: tuple[Future[Any], Future[Any]] | None = None

    def end(
        self,
        error: BaseException | None = None,
        source: int = -1,
        tell: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """It is done, or has failed.

        Args:
            source: who sent a message that was wanted from anybody.
            tell: runs the callbacks of its future; None: they run here.
        """
        with self._lock:
            self._error, self._source = error, source
            self._ended.set()
            future = self._future  # one that is asked for from now on, is ended by who asks
        if future is not None:
            if tell is None:
                future[0].set_result(None)
            else:
                tell(lambda: future[0].set_result(None))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensors are written.

        Raises:
            CollectiveTimeout: not within ``timeout``; it goes on.
            BaseException: what the call has raised.
        """
        seconds = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        if not self._ended.wait(seconds):
            raise CollectiveTimeout(f"this collective has not ended within the {seconds} s that wait() was given")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[Any]:
        """A future of the tensors, for C++ and for callbacks; an error is a `RuntimeError` there."""
        with self._lock:
            if self._future is None:
                begun: Future[Any] = Future()
                self._future = begun, begun.then(lambda _: self._outcome())
                if self._ended.is_set():
                    begun.set_result(None)
            return self._future[1]

    def _outcome(self) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What it has raised."""
        return self._error

    def result(self) -> list[Any]:
        """The tensors that are written, when they are."""
        self.wait()
        return self._result

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def source_rank(self) -> int:
        """Who sent the message, in the group; -1 for what is no message."""
        return self._source

    _source_rank = source_rank
