"""Tensors that become shared: their storages in memfds, the descriptors beside the pickle.

    producer                                                      consumer
      tensor ─► storage ─ moved, in place, into a memfd             storage over the same memfd, one for each process
                  └─ fd ───── SCM_RIGHTS, in the message ────────► fd ─► the storage this process has of it, or new

Semantics are those of `torch.multiprocessing`: the sender's tensor *is* shared from then on, with all its aliases, and
both sides see each other's writes. The way differs: no server in the producer, no connection for each tensor, no name
in /dev/shm; a descriptor in a message is kept by the kernel, also when its sender is gone.

Owner      a storage keeps the one descriptor it was made with, as torch has it; a message borrows it until it is sent.
           A received descriptor is a `Passed`, which closes itself unless it was taken.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import io
import os
import pickle
import resource
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from torchcrew.memory.arena import make_memfd
from torchcrew.torch_private import shared_descriptor, shared_storage, swap_storages

__all__ = (
    "STAND_IN",
    "Passed",
    "Reducers",
    "SharingEncoder",
    "decode_shared",
    "descriptor_of",
    "move_to_memfd",
    "raise_descriptor_limit",
    "reduce_storage",
)

#: In a pickle, what the decoder replaces by an object of its own (see `channel.message`). Writable, or pickle would
#: ask the decoder for a read-only view.
STAND_IN = pickle.PickleBuffer(bytearray(1))

_raised = False


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as it may: each shared storage keeps one."""
    global _raised
    if not _raised:
        _raised = True
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def move_to_memfd(storage: torch.UntypedStorage) -> None:
    """Move a CPU storage, in place, with every tensor over it, into a memfd of its own; nothing if it is shared.

    Nothing either where torch cannot exchange storages: it then moves them itself, into /dev/shm.
    A numpy view taken before is left behind, as after `share_memory_()`.
    """
    if storage.is_shared() or swap_storages is None:
        return
    nbytes = storage.nbytes()
    fd = make_memfd("torchcrew-storage", nbytes)
    try:
        # Written, not copied through a mapping: pages that are written whole need not be zeroed and faulted in first.
        source = (ctypes.c_char * nbytes).from_address(storage.data_ptr())
        done = 0
        while done < nbytes:
            done += os.pwrite(fd, memoryview(source)[done:], done)
        swap_storages(storage, shared_storage(fd, nbytes))
    finally:
        os.close(fd)


def descriptor_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """The descriptor of a CPU storage, shared now if it was not, and its size; the storage keeps the descriptor."""
    move_to_memfd(storage)
    fd, nbytes = shared_descriptor(storage)
    return fd, nbytes


class Passed:
    """A received descriptor that nobody has taken yet; torch's and Python's rebuilding functions `detach` it."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        """The descriptor; closing it is the caller's business from now on."""
        fd, self._fd = self._fd, -1
        return fd

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def reduce_storage(storage: torch.UntypedStorage, keep: Callable[[int, Any], None]) -> Any:
    """Pickle a storage as a descriptor.

    Args:
        keep: is told the descriptor and the object that owns it.
    """
    if storage.device.type != "cpu" or reductions_strategy() == "file_system":
        return reductions.reduce_storage(storage)
    if storage.size() == 0:
        return reductions.rebuild_storage_empty, (type(storage),)
    raise_descriptor_limit()
    fd, nbytes = descriptor_of(storage)
    keep(fd, storage)
    reductions.shared_cache[reductions.fd_id(fd)] = reductions.StorageWeakRef(storage)
    return reductions.rebuild_storage_fd, (type(storage), STAND_IN, nbytes)


def reductions_strategy() -> str:
    """`torch.multiprocessing.get_sharing_strategy()`."""
    strategy: str = torch.multiprocessing.get_sharing_strategy()
    return strategy


class Reducers(dict[type, Callable[[Any], Any]]):
    """Types we pickle ourselves; for all others torch's and the standard library's registrations, whenever made."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        found = ForkingPickler._extra_reducers.get(kind)  # type: ignore[attr-defined]
        return found or copyreg.dispatch_table[kind]


class SharingEncoder:
    """Turns objects into pickles with descriptors beside them; tensors become shared. One thread at a time."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._owners: list[Any] = []
        self._file = io.BytesIO()
        self._pickler = pickle.Pickler(self._file, 5, buffer_callback=_in_band)
        self._pickler.dispatch_table = Reducers(
            {torch.UntypedStorage: self._storage, connection.Connection: self._connection}
        )

    def encode(self, obj: Any) -> tuple[bytes, list[int], Any]:
        """Pickle ``obj``.

        Returns:
            The pickle, the descriptors that belong to it, and what must live until both are sent.

        Raises:
            Exception: whatever pickling raises.
        """
        self._reset()
        try:
            self._pickler.dump(obj)
            return self._file.getvalue(), self._fds, (self._owners, obj)
        finally:
            self._reset()

    def _reset(self) -> None:
        self._fds, self._owners = [], []
        self._pickler.clear_memo()
        self._file.seek(0)
        self._file.truncate()

    def _keep(self, fd: int, owner: Any) -> None:
        self._fds.append(fd)
        self._owners.append(owner)

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        return reduce_storage(storage, self._keep)

    def _connection(self, conn: Any) -> Any:
        self._keep(conn.fileno(), conn)
        return connection.rebuild_connection, (STAND_IN, conn.readable, conn.writable)  # type: ignore[attr-defined]


def _in_band(buffer: pickle.PickleBuffer) -> bool:
    return buffer is not STAND_IN


def decode_shared(payload: Any, fds: Sequence[Passed]) -> Any:
    """The object that `SharingEncoder.encode` pickled; descriptors that it does not take are closed with ``fds``."""
    return pickle.loads(payload, buffers=fds)
