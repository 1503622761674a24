"""A shell with job control, as small as can be: one job on a terminal of its own, driven through two pipes.

    test ── commands (stdin): fg ──► this shell ── tcsetpgrp, SIGCONT ──► the job, a process group of its own
      └──── the terminal's other side: Ctrl-Z, Ctrl-C ──────────────────► (the kernel signals the group)

``job_control.py PROGRAM ARGS``, with the terminal as descriptor 3; prints ``stopped N``, ``ended N``.
"""

import fcntl
import os
import signal
import sys
import termios


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main(argv: list[str]) -> None:
    fcntl.ioctl(3, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a shell may always take the terminal back
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(3, os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        os.dup2(3, 0)
        os.execv(sys.executable, [sys.executable, *argv])
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        os.tcsetpgrp(3, os.getpgrp())
        if not os.WIFSTOPPED(status):
            say(f"ended {os.waitstatus_to_exitcode(status)}")
            return
        say(f"stopped {os.WSTOPSIG(status)}")
        if sys.stdin.readline() != "fg\n":
            os.killpg(pid, signal.SIGKILL)
            continue
        os.tcsetpgrp(3, pid)
        os.killpg(pid, signal.SIGCONT)


if __name__ == "__main__":
    main(sys.argv[1:])
