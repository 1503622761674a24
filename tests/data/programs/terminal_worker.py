"""A worker that writes to the terminal, which stops writers in the background (`stty tostop`), and that reads it.

``terminal_worker.py FD``: the terminal, which becomes this session's own.
"""

import fcntl
import os
import sys
import termios

from tests.data.survival import Rows
from torchcrew.data import DataLoader


class Talks(Rows):
    terminal = -1

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        os.write(self.terminal, f"sample {index}\n".encode())
        if index == 3:
            os.read(self.terminal, 1)  # an error in the background, not a stop
        return index


def main(terminal: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    settings = termios.tcgetattr(terminal)
    settings[3] |= termios.TOSTOP
    termios.tcsetattr(terminal, termios.TCSANOW, settings)
    Talks.terminal = terminal
    iterator = iter(DataLoader(Talks(4), num_workers=1, batch_size=None, timeout=5))
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    try:
        next(iterator)
    except OSError as error:
        os.write(1, f"{type(error).__name__}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
