"""Where shared tensors lie: what a rank says of its own, and the memory of others, mapped once.

    rank 0   tensor in shared memory ── descriptor, inode, offset ──► head of its page
    rank 1   reads it, opens /proc/PID/fd/N, maps the whole of the memory ──► the same tensor, here

Owner      of the memory: who shared the tensor. A peer keeps its mapping while it is used (the last `_KEPT` of them),
           and with it the memory, also when its owner has let go of it.
Death      of the owner: the mapping stays valid. Of a peer: nobody notices.
A number of an inode is not used again while somebody has it mapped: what was mapped once is recognised by it.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from typing import Any

import torch

from torchcrew.collectives.peers import Peers
from torchcrew.memory import libc
from torchcrew.torch_private import shared_descriptor

__all__ = ("PLACE", "Places", "place_of")

#: Descriptor (0: not shared), device, inode, bytes of the memory, offset of the tensor in it.
PLACE = struct.Struct("<iQQQQ")
NOWHERE = PLACE.pack(0, 0, 0, 0, 0)
#: Mappings of others' memory that are kept.
_KEPT = 32


def place_of(tensor: torch.Tensor) -> bytes:
    """Where this CPU tensor lies, for others; `NOWHERE` if it is not in shared memory, or has no descriptor."""
    storage = tensor.untyped_storage()
    if not storage.is_shared():
        return NOWHERE
    try:
        fd, nbytes = shared_descriptor(storage)
        status = os.fstat(fd)
    except (RuntimeError, OSError):
        return NOWHERE
    offset = tensor.storage_offset() * tensor.element_size()
    return PLACE.pack(fd + 1, status.st_dev, status.st_ino, nbytes, offset)


class Places:
    """The memory of others that this rank has mapped."""

    def __init__(self, peers: Peers) -> None:
        self._pids = [peer.pid for peer in peers.everybody]
        self._mapped: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def tensor(self, owner: int, place: bytes, nbytes: int) -> torch.Tensor:
        """The bytes of a tensor that rank ``owner`` has said the place of.

        Raises:
            OSError: the memory cannot be opened or mapped: no address space is left, or its owner has let go of it.
        """
        number, device, inode, size, offset = PLACE.unpack(place)
        view = self._mapped.get((device, inode))
        if view is None:
            view = self._mapped[device, inode] = _map(self._pids[owner], number - 1, (device, inode), size)
            while len(self._mapped) > _KEPT:
                self._mapped.popitem(last=False)
        else:
            self._mapped.move_to_end((device, inode))
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
