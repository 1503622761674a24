"""Where shared tensors lie: what a rank says of its own, and the memory of others, mapped once.

    rank 0   tensor in shared memory ── descriptor, inode, offset ──► head of its page
    rank 1   reads it, opens /proc/PID/fd/N, maps the whole of the memory ──► the same tensor, here

Owner      of the memory: who shared the tensor. A peer keeps its mapping while reductions use it, and for `_KEPT` more,
           and with it the memory, also when its owner has let go of it.
Death      of the owner: the mapping stays valid. Of a peer: nobody notices.
What was mapped once is recognised by its inode, whose number is not given again while somebody has it mapped (but for
the wrapping of a 32-bit counter).
"""

from __future__ import annotations

import os
import struct
import weakref
from pathlib import Path
from typing import Any

import torch

from torchcrew.collectives.peers import Peers
from torchcrew.memory import libc
from torchcrew.torch_private import shared_descriptor

__all__ = ("PLACE", "Places", "place_of")

#: Descriptor (0: not shared), device, inode, bytes of the memory, offset of the tensor in it.
PLACE = struct.Struct("<iQQQQ")
NOWHERE = PLACE.pack(0, 0, 0, 0, 0)
#: Reductions in place for which a mapping is kept that they do not use, and bytes of all mappings that are kept.
_KEPT, _KEPT_BYTES = 64, 1 << 30

# What lies in a file that has no name any more has a descriptor. torch's function that tells it moves everything else
# into new memory: what `file_system` shares, or `torch.from_file`. Finding it out takes a millisecond: once for each.
_has_descriptor: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def place_of(tensor: torch.Tensor) -> bytes:
    """Where this CPU tensor lies, for others; `NOWHERE` if it is not in shared memory, or has no descriptor."""
    storage = tensor.untyped_storage()
    if not storage.is_shared():
        return NOWHERE
    known = _has_descriptor.get(storage)
    if known is None:
        known = _has_descriptor[storage] = _lies_in_unnamed_file(storage.data_ptr())
    if not known:
        return NOWHERE
    try:
        fd, nbytes = shared_descriptor(storage)
        status = os.fstat(fd)
    except (RuntimeError, OSError):
        return NOWHERE
    offset = tensor.storage_offset() * tensor.element_size()
    return PLACE.pack(fd + 1, status.st_dev, status.st_ino, nbytes, offset)


def _lies_in_unnamed_file(address: int) -> bool:
    """Whether what is mapped at an address is a file without a name: a memfd, or one that was removed."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        if line.endswith(" (deleted)"):
            begin, _, end = line.split(" ", 1)[0].partition("-")
            if int(begin, 16) <= address < int(end, 16):
                return True
    return False


class Places:
    """The memory of others that this rank has mapped."""

    def __init__(self, peers: Peers) -> None:
        self._pids = [peer.pid for peer in peers.everybody]
        self._mapped: dict[tuple[int, int], tuple[Any, int]] = {}
        self._count = 0

    def begin(self) -> None:
        """A reduction in place begins: let go of what was long not used, and of what is too much."""
        self._count += 1
        by_age = sorted(self._mapped.items(), key=lambda item: item[1][1])
        excess = sum(len(view) for view, _ in self._mapped.values()) - _KEPT_BYTES
        for inode, (view, used) in by_age:
            if used < self._count - _KEPT or excess > 0:
                del self._mapped[inode]
                excess -= len(view)

    def tensor(self, owner: int, place: bytes, nbytes: int) -> torch.Tensor:
        """The bytes of a tensor that rank ``owner`` has said the place of.

        Raises:
            OSError: the memory cannot be opened or mapped: no address space is left, or its owner has let go of it.
        """
        number, device, inode, size, offset = PLACE.unpack(place)
        view, _ = self._mapped.get((device, inode), (b"", 0))
        if len(view) < size:  # the same memory can be a larger one by now
            view = _map(self._pids[owner], number - 1, (device, inode), size)
        self._mapped[device, inode] = view, self._count
        return torch.frombuffer(view, dtype=torch.uint8, offset=offset, count=nbytes)

    def clear(self) -> None:
        """Let go of all."""
        self._mapped.clear()


def _map(pid: int, fd: int, inode: tuple[int, int], nbytes: int) -> Any:
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(opened)
        if (status.st_dev, status.st_ino) != inode:
            raise OSError(f"descriptor {fd} of process {pid} is another file by now: a shared tensor of it is gone")
        return libc.view_of(libc.map_shared(opened, 0, nbytes), nbytes)
    finally:
        os.close(opened)
