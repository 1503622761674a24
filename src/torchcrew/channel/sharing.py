"""Tensors that become shared: their storages in memfds, the descriptors beside the pickle.

    producer                                                      consumer
      tensor ─► storage ─ moved, in place, into a memfd             storage over the same memfd, one per process
                  └─ fd ───── SCM_RIGHTS, in the message ─────────► fd ─► the storage it has of it, or a new one

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
import errno
import functools
import io
import os
import pickle
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection, reduction
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from torchcrew.errors import TooManyDescriptors
from torchcrew.memory import libc, spares
from torchcrew.torch_private import shared_descriptor, shared_storage, swap_storages

__all__ = (
    "STAND_IN",
    "Keep",
    "Passed",
    "Reducers",
    "SharingEncoder",
    "decode_shared",
    "descriptor_of",
    "encode_shared",
    "move_to_memfd",
    "pass_descriptor",
    "raise_descriptor_limit",
    "reduce_storage",
)

#: Is told a descriptor that goes with the pickle, and the object that owns it.
Keep = Callable[[int, Any], None]

#: In a pickle, what the decoder replaces by an object of its own (see `channel.message`). Writable, or pickle would
#: ask the decoder for a read-only view.
STAND_IN = pickle.PickleBuffer(bytearray(1))

_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE})
#: By their names: torch's own way of pickling one costs as much as all the rest of a tensor.
_NAMES = {value: name for name, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)}
#: Names of dimensions are not pickled; later releases have none.
_has_names: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, "has_names", lambda tensor: False)
_moving = threading.Lock()
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


def _storage_over(fd: int, nbytes: int) -> torch.UntypedStorage:
    """A storage that keeps a descriptor of its own."""
    try:
        return shared_storage(fd, nbytes)  # type: ignore[no-any-return]
    except RuntimeError as error:  # torch does not say that no descriptor was left
        try:
            os.close(os.dup(fd))
        except OSError as reason:
            if reason.errno in _NONE_LEFT:
                raise TooManyDescriptors() from error
        raise


def move_to_memfd(storage: torch.UntypedStorage) -> None:
    """Move a CPU storage, in place, with every tensor over it, into a memfd of its own, unless it is shared already.

    Nothing is done where torch cannot exchange storages: it then moves them itself, into /dev/shm. A numpy view taken
    before is left behind, as after `share_memory_()`.
    """
    if storage.is_shared() or swap_storages is None:
        return
    with _moving:  # two threads that send the same tensor
        if not storage.is_shared():
            _move(storage, swap_storages)


def _move(storage: torch.UntypedStorage, swap: Callable[[Any, Any], None]) -> None:
    nbytes = storage.nbytes()
    try:
        fd = spares.take("torchcrew-storage", nbytes)
    except OSError as error:
        if error.errno in _NONE_LEFT:
            raise TooManyDescriptors() from error
        raise
    try:
        # Written, not copied through a mapping: pages that are written whole need not be zeroed and faulted in first.
        libc.write_all(fd, (ctypes.c_char * nbytes).from_address(storage.data_ptr()))
        swap(storage, _storage_over(fd, nbytes))
    finally:
        os.close(fd)


def descriptor_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """The descriptor of a CPU storage, shared now if it was not, and its size; the storage keeps the descriptor.

    Raises:
        TooManyDescriptors: there is none for it.
    """
    raise_descriptor_limit()
    move_to_memfd(storage)
    fd, nbytes = shared_descriptor(storage)
    return fd, nbytes


class Passed:
    """A received descriptor that nobody has taken yet. Torch's and Python's rebuilding functions call `detach`."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        """The descriptor; closing it is the caller's business from now on."""
        fd, self._fd = self._fd, -1
        return fd

    def __del__(self) -> None:
        fd = getattr(self, "_fd", -1)  # a Ctrl-C may come while it is being made
        if fd >= 0:
            os.close(fd)


# What is pickled in our own way ---------------------------------------------------------------------------------------


def reduce_storage(storage: torch.UntypedStorage, keep: Keep) -> Any:
    """Pickle a storage as a descriptor."""
    if storage.device.type != "cpu" or torch.multiprocessing.get_sharing_strategy() == "file_system":
        return reductions.reduce_storage(storage)
    if storage.nbytes() == 0:
        return reductions.rebuild_storage_empty, (type(storage),)
    fd, nbytes = descriptor_of(storage)
    keep(fd, storage)
    reductions.shared_cache[reductions.fd_id(fd)] = reductions.StorageWeakRef(storage)
    return _rebuild_storage, (STAND_IN, nbytes)


def _rebuild_storage(passed: Passed, nbytes: int) -> torch.UntypedStorage:
    """The storage that this process has of that memory already, or one over it that keeps a descriptor of its own."""
    raise_descriptor_limit()
    fd = passed.detach()
    try:
        key = reductions.fd_id(fd)
        storage: torch.UntypedStorage | None = reductions.storage_from_cache(torch.UntypedStorage, key)
        if storage is None:
            storage = _storage_over(fd, nbytes)
            reductions.shared_cache[key] = reductions.StorageWeakRef(storage)
        return storage
    finally:
        os.close(fd)


def _reduce_tensor(tensor: torch.Tensor, keep: Keep) -> Any:
    """Pickle a dense CPU tensor as its storage and the place in it; all others, and errors, are torch's business."""
    grad = tensor.requires_grad
    if (
        tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or (grad and not tensor.is_leaf)
        or tensor.is_quantized
        or tensor.is_nested
        or tensor._backward_hooks
        or _has_names(tensor)
    ):
        return reductions.reduce_tensor(tensor)
    if tensor.is_neg():  # torch's own way would forget it
        tensor = tensor.detach().resolve_neg()
    rebuild: Callable[..., Any] = _rebuild_parameter if type(tensor) is torch.nn.Parameter else _rebuild_tensor
    if tensor.is_conj():  # the same
        rebuild = _rebuild_conjugate
    place = (tensor.storage_offset(), tuple(tensor.size()), tensor.stride())
    return rebuild, (tensor.untyped_storage(), _NAMES[tensor.dtype], *place, grad)


def _view(storage: torch.UntypedStorage, dtype: str, offset: int, size: Any, stride: Any) -> torch.Tensor:
    return torch.empty(0, dtype=getattr(torch, dtype)).set_(storage, offset, size, stride)


def _rebuild_tensor(storage: Any, dtype: str, offset: int, size: Any, stride: Any, grad: bool) -> torch.Tensor:
    tensor = _view(storage, dtype, offset, size, stride)
    return tensor.requires_grad_() if grad else tensor


def _rebuild_conjugate(*place: Any) -> torch.Tensor:
    return _view(*place[:-1]).conj().requires_grad_(place[-1])


def _rebuild_parameter(*place: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(_view(*place[:-1]), requires_grad=place[-1])


def _reduce_connection(conn: Any, keep: Keep) -> Any:
    keep(conn.fileno(), conn)
    return connection.rebuild_connection, (STAND_IN, conn.readable, conn.writable)  # type: ignore[attr-defined]


def _reduce_socket(sock: socket.socket, keep: Keep) -> Any:
    keep(sock.fileno(), sock)
    return reduction._rebuild_socket, (STAND_IN, sock.family, sock.type, sock.proto)  # type: ignore[attr-defined]


#: What was registered with the standard library's pickler, by torch and by users.
_registered: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
#: Type -> our way, and the ways of others that it stands for: not one that the user has registered.
_ours: dict[type, tuple[Callable[[Any, Keep], Any], Any]] = {
    torch.Tensor: (_reduce_tensor, reductions.reduce_tensor),
    torch.nn.Parameter: (_reduce_tensor, reductions.reduce_tensor),
    torch.UntypedStorage: (reduce_storage, reductions.reduce_storage),
    connection.Connection: (_reduce_connection, _registered.get(connection.Connection)),
    socket.socket: (_reduce_socket, _registered.get(socket.socket)),
}


def pass_descriptor(kind: type, reduce: Callable[[Any, Keep], Any]) -> None:
    """Have objects of exactly this type pickled with a descriptor; the decoder finds a `Passed` for each `STAND_IN`."""
    _ours[kind] = (reduce, _registered.get(kind))


class Reducers(dict[type, Callable[[Any], Any]]):
    """How types are pickled: as the user has registered it, else with descriptors, else in torch's and Python's ways.

    Args:
        keep: takes the descriptors; None: there are none.
    """

    def __init__(self, keep: Keep | None = None) -> None:
        super().__init__()
        self._keep = keep

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        found: Callable[[Any], Any] | None = _registered.get(kind)
        if self._keep is not None and kind in _ours:
            reduce, theirs = _ours[kind]
            if found in (None, theirs):
                return functools.partial(_call, reduce, self._keep)
        return found or copyreg.dispatch_table[kind]


def _call(reduce: Callable[[Any, Keep], Any], keep: Keep, obj: Any) -> Any:
    return reduce(obj, keep)


# ----------------------------------------------------------------------------------------------------------------------


class SharingEncoder:
    """Turns objects into pickles with descriptors beside them; tensors become shared. One thread at a time."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._owners: list[Any] = []
        self._file = io.BytesIO()
        self._pickler = pickle.Pickler(self._file, 5, buffer_callback=_in_band)
        self._pickler.dispatch_table = Reducers(self._keep)

    def encode(self, obj: Any) -> tuple[bytes, list[int], Any]:
        """Pickle ``obj``.

        Returns:
            The pickle, the descriptors that belong to it, and what must live until both are sent.

        Raises:
            Exception: whatever pickling raises.
        """
        try:
            self._pickler.dump(obj)
            return self._file.getvalue(), self._fds, (self._owners, obj)
        finally:
            self._fds, self._owners = [], []
            self._pickler.clear_memo()
            self._file.seek(0)
            self._file.truncate()

    def _keep(self, fd: int, owner: Any) -> None:
        self._fds.append(fd)
        self._owners.append(owner)


def _in_band(buffer: pickle.PickleBuffer) -> bool:
    return buffer is not STAND_IN


#: One for each thread that encodes at the same time, or in the middle of it. No lock: lists are atomic.
_encoders: list[SharingEncoder] = []


def encode_shared(obj: Any) -> tuple[bytes, list[int], Any]:
    """`SharingEncoder.encode` for any thread, and also from within a reduction."""
    try:
        encoder = _encoders.pop()
    except IndexError:
        encoder = SharingEncoder()
    encoded = encoder.encode(obj)  # one that an exception has come out of is not used again
    _encoders.append(encoder)
    return encoded


def decode_shared(payload: Any, fds: Sequence[Passed]) -> Any:
    """The object that `SharingEncoder.encode` pickled; descriptors that it does not take are closed with ``fds``."""
    return pickle.loads(payload, buffers=fds)


def _renew_lock() -> None:
    global _moving
    _moving = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_lock)
