"""What a zygote and its user say to each other: messages with descriptors. Both sides use it.

    user's process                                      zygote
      ── M  situation and script, tracker ────────────►   import the script in a process of its own:
                                                            H pid, pidfd │ R ready │ X why not │ O a file changed
      ── S  payload, go, status, tracker, streams, … ─►   fork a child
      ◄─ S  pid, pidfd │ E errno │ O a file changed ──
      ── Q ───────────────────────────────────────────►   take no more, end with the last child

                                                        child
      ── go: one byte once the child is guarded ──────►   an end of file means: do not run
      ◄─ status: its exit code, which the zygote reaped ─

Every message is one SEQPACKET packet, or a few where it carries more descriptors than the kernel takes at a time.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from dataclasses import dataclass

__all__ = ("ENVIRON", "EXIT_CODE", "FDS_PER_PACKET", "HEADER", "StartRequest", "inherited_fds", "receive", "send")

#: Kind, number of the request, a value (pid, errno, flags of the request), number of descriptors in all.
HEADER = struct.Struct("<cQqI")
#: In the preparation data, variables of this one process's environment.
ENVIRON = "torchcrew_environ"
#: What the pipe of a child's exit code carries.
EXIT_CODE = struct.Struct("<q")
#: The kernel takes 253 descriptors at a time; more follow in further packets.
FDS_PER_PACKET = 250

#: The descriptors that `Popen.duplicate_for_child` passed to this process, in order; filled in a child only.
inherited_fds: list[int] = []


def send(sock: socket.socket, kind: bytes, number: int, value: int = 0, fds: tuple[int, ...] = ()) -> None:
    """Send one message with any number of descriptors."""
    head = HEADER.pack(kind, number, value, len(fds))
    for start in range(0, max(1, len(fds)), FDS_PER_PACKET):
        rights = array.array("i", fds[start : start + FDS_PER_PACKET])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        sock.sendmsg([head], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[bytes, int, int, list[int]] | None:
    """Receive one message; None at the end."""
    fds: list[int] = []
    while True:
        data, ancillary, _, _ = sock.recvmsg(HEADER.size, socket.CMSG_SPACE(4 * FDS_PER_PACKET))
        if len(data) < HEADER.size:
            return None
        kind, number, value, count = HEADER.unpack(data)
        for _, _, rights in ancillary:
            part = array.array("i")
            part.frombytes(rights)
            fds.extend(part)
        if len(fds) >= count or not ancillary:
            return kind, number, value, fds


@dataclass
class StartRequest:
    """The descriptors of a request to start a child."""

    payload: int
    """Holds the pickles of the `Situation` with the preparation data, and of the process object."""
    go: int
    status: int
    tracker: int
    """Of the resource tracker."""
    streams: dict[int, int]
    """Standard output (1) and error (2), where the user's process has them open."""
    inherited: list[int]
    """What `duplicate_for_child` was asked for."""
    group: int = 0
    """The process group to be in; 0 for one of its own."""

    def pack(self) -> tuple[int, tuple[int, ...]]:
        """Value and descriptors of the message."""
        fds = (self.payload, self.go, self.status, self.tracker, *self.streams.values(), *self.inherited)
        return self.group << 2 | sum(self.streams), fds

    @classmethod
    def unpack(cls, value: int, fds: list[int]) -> StartRequest:
        """Of the value and descriptors of a message."""
        payload, go, status, tracker, *rest = fds
        streams = {number: rest.pop(0) for number in (1, 2) if value & number}
        return cls(payload, go, status, tracker, streams, rest, value >> 2)

    def close(self) -> None:
        """Close all but the one for the exit code."""
        for fd in (self.payload, self.go, self.tracker, *self.streams.values(), *self.inherited):
            os.close(fd)
