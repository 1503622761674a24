"""The guardian's own program: waits for its user's process to end and kills that process's workers then.

It is executed as a file by an isolated interpreter (`python -I -S guardian_main.py CONTROL USER GRACE`) and imports a
few small modules of the standard library only, so that it is up in milliseconds and costs a few megabytes.
`guardian.py` has the picture and the other side.

A message is one packet: `b"W"` and a pid, with the worker's pidfd attached, or `b"F"` and a pid.
"""

import array
import contextlib
import os
import resource
import select
import signal
import socket
import struct
import sys
import time

__all__ = ("IGNORED", "MESSAGE", "is_dead", "main", "signal_group")

#: Kind (`b"W"` watch, `b"F"` forget) and pid.
MESSAGE = struct.Struct("<ci")

#: How often the user's process is looked at for Ctrl-Z, in milliseconds: below what a person notices, and five reads
#: of one line a second. Nothing is read while no worker is watched.
STOP_POLL_MS = 200

#: The guardian must outlive its user: whoever stops a job often signals every process of it (a service manager,
#: `docker stop`, a batch system), and the user's process may take its time over SIGTERM. It needs no signal to end
#: anyway, it ends when its user does. SIGKILL still works; the user then starts another with the next worker.
IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)

#: `PIDFD_SIGNAL_PROCESS_GROUP` (Linux 6.9): the group of exactly this process, even when its number was used again.
PIDFD_SIGNAL_PROCESS_GROUP = 4


class Guardian:
    """Watches one user's process and its workers."""

    def __init__(self, control: int, user: int, grace: float) -> None:
        """Take over the two inherited descriptors: the control socket and the pidfd of the user's process."""
        self.grace = grace
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=control)
        self.user = user
        self.workers: dict[int, int] = {}  # pid -> pidfd
        self.stopped = False
        self.stat = _open_stat(user)

    def run(self) -> None:
        """Serve until the user's process is dead, then kill what it left."""
        poller = select.poll()
        poller.register(self.user, select.POLLIN)
        poller.register(self.control, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll(STOP_POLL_MS if self.workers else None)}
            if self.control.fileno() in ready and not self.read_messages():
                # No sign of the user's death: it says nothing while a stray fork holds the other end, and the pidfd
                # says it better when none does.
                poller.unregister(self.control)
                self.control.close()
            if self.user in ready:
                self.read_messages()  # what it sent in its last moment
                time.sleep(self.grace)
                self.signal_all(signal.SIGKILL)
                return
            self.follow_stop()

    def read_messages(self) -> bool:
        """Take every message that is there; False when no more can come."""
        while self.control.fileno() >= 0:
            try:
                data, ancillary, _, _ = self.control.recvmsg(MESSAGE.size, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if len(data) != MESSAGE.size:
                return False
            kind, pid = MESSAGE.unpack(data)
            self.drop(pid)
            if kind == b"W":
                self.add(pid, ancillary)
        return False

    def add(self, pid: int, ancillary: list[tuple[int, int, bytes]]) -> None:
        """Watch a worker from now on."""
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        if fds:
            self.workers[pid] = fds[0]
            if self.stopped:
                signal_group(pid, fds[0], signal.SIGSTOP)

    def drop(self, pid: int) -> None:
        """Forget a worker, if it is known."""
        pidfd = self.workers.pop(pid, None)
        if pidfd is not None:
            os.close(pidfd)

    def follow_stop(self) -> None:
        """Stop the workers when the user's process was stopped (Ctrl-Z), let them go on when it does.

        Only changes are passed on, so that a worker somebody stopped on its own stays stopped.
        """
        if not self.workers or self.stat < 0:
            return
        try:
            state = os.pread(self.stat, 512, 0).rpartition(b")")[2].split()[0]
        except (OSError, IndexError):
            return
        stopped = state == b"T"  # "t", held by a debugger, is not Ctrl-Z
        if stopped != self.stopped:
            self.stopped = stopped
            self.signal_all(signal.SIGSTOP if stopped else signal.SIGCONT)

    def signal_all(self, signum: int) -> None:
        """Signal every worker and everything in its process group."""
        for pid, pidfd in self.workers.items():
            signal_group(pid, pidfd, signum)


def signal_group(pid: int, pidfd: int, signum: int) -> None:
    """Signal the group of one worker, and the worker itself in case it is not yet the leader of a group.

    It gets the signal once: a second Ctrl-C would interrupt what it does about the first. What is left of the group of
    a worker that is gone gets it, too, from Linux 6.9 on.
    """
    try:
        signal.pidfd_send_signal(pidfd, signum, None, PIDFD_SIGNAL_PROCESS_GROUP)
    except ProcessLookupError:
        pass
    except OSError:  # an older kernel
        # The number is the worker's as long as it lives, and the group's only then for certain.
        if not is_dead(pidfd):
            with contextlib.suppress(OSError):
                os.killpg(pid, signum)
    with contextlib.suppress(OSError):
        if is_dead(pidfd) or os.getpgid(pid) != pid:
            signal.pidfd_send_signal(pidfd, signum)


def is_dead(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended (it may not be reaped yet)."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _open_stat(user: int) -> int:
    """Open the user's line in /proc once: a descriptor of it cannot come to mean another process."""
    try:
        with open(f"/proc/self/fdinfo/{user}") as info:
            pid = next(int(line.split()[1]) for line in info if line.startswith("Pid:"))
        stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError, StopIteration):
        return -1  # no /proc, or the user is gone: nothing to follow
    if is_dead(user):
        os.close(stat)
        return -1
    return stat


def main(argv: list[str]) -> None:
    """Be the guardian; `argv` holds the two inherited descriptors, and the seconds that workers get after the end."""
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    try:
        with open("/proc/self/comm", "w") as comm:
            comm.write("torchcrew-guard")
    except OSError:
        pass
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one pidfd for each worker
    Guardian(int(argv[1]), int(argv[2]), float(argv[3])).run()


if __name__ == "__main__":
    main(sys.argv)
