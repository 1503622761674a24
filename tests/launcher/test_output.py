"""Lines of all ranks on the user's screen or in files: none torn, none lost, nobody waited for."""

import contextlib
import io
import multiprocessing
import os
import pty
import random
import re
import resource
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from torchcrew.launcher import draft, screen
from torchcrew.launcher.output import CHUNK, TAIL, TAIL_WIDTH, Output

OUT, ERR = 0, 1
WIDTH = 40


class Ranks:
    """An output and the write ends of its ranks, all in this process."""

    def __init__(self, count, logs=None):
        self.output = Output(count, logs)
        self.streams = [self.output.streams(rank) for rank in range(count)]

    def write(self, rank, text, stream=OUT):
        streams = self.streams[rank]
        data = text if isinstance(text, bytes) else text.encode()
        os.write(streams._out if stream == OUT else streams._err, data)
        look(self.output)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.output.close()


@pytest.fixture
def impatient(monkeypatch):
    """Unfinished lines are shown at once."""
    monkeypatch.setattr(screen, "PATIENCE", 0.0)


@pytest.fixture
def user(capsys):
    """What has come to the user's standard output and error, which are objects without descriptors."""

    class User(list):
        def __getitem__(self, stream):
            for number, text in enumerate(capsys.readouterr()):
                super().__setitem__(number, super().__getitem__(number) + text)
            return super().__getitem__(stream)

    return User(["", ""])


def look(output, timeout=0.0):
    """One round of a loop over an output."""
    poll = select.poll()
    for fd in output.descriptors():
        poll.register(fd, select.POLLIN)
    for fd, _ in poll.poll(timeout * 1000):
        output.read(fd)
    deadline = output.deadline()
    if deadline is None or deadline <= time.monotonic() or not output.descriptors():
        output.tick()


def start(output, rank, function, *args):
    """Fork a rank that runs a function; returns its pid."""
    streams = output.streams(rank)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            streams.take()
            function(*args)
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    output.started(rank)
    return pid


def finish(output, pids):
    """Look until all ranks are gone, then take the rest; the exit statuses."""
    statuses = {}
    while len(statuses) < len(pids):
        look(output, 0.01)
        for pid in set(pids) - set(statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = status
    output.drain()
    output.close()
    return [statuses[pid] for pid in pids]


def run(count, function, *args, logs=None):
    """Run a function in each rank, which is its first argument."""
    output = Output(count, logs)
    return finish(output, [start(output, rank, function, rank, *args) for rank in range(count)])


def plain_lines(rank):
    print(f"out of {rank}")  # noqa: T201
    print(f"err of {rank}", file=sys.stderr)  # noqa: T201


@pytest.mark.parametrize("count", [1, 3])
def test_lines_reach_the_stream_they_were_written_to(count, capsys):
    """Once each, as they are."""
    assert run(count, plain_lines) == [0] * count
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [f"out of {rank}" for rank in range(count)]
    assert sorted(err.splitlines()) == [f"err of {rank}" for rank in range(count)]


def test_prefixes_are_aligned_and_only_where_several_speak(user):
    """`[ 3] ` among eleven ranks; none for one; an empty line has one, too."""
    with Ranks(11, "prefix") as ranks:
        ranks.write(3, "a\n\nb\r\n")
        ranks.write(10, "c\n")
    with Ranks(1, "prefix") as ranks:
        ranks.write(0, "alone\n")
    assert user[OUT] == "[ 3] a\n[ 3] \n[ 3] b\r\n[10] c\nalone\n"


def many_lines(rank, count, seed, returns):
    """Random lines on both streams, in random pieces; each says who wrote it, its number and its length."""
    chance = random.Random(seed + rank)
    data = {1: b"", 2: b""}
    for number in range(count):
        body = chance.choice("äx") * chance.choice([0, 1, 30, 200, 3000])
        bar = f"\r{number}%\r{number + 1}%\r" + " " * 8 + "\r" if returns and number % 3 == 0 else ""
        fd = chance.choice((1, 2))
        data[fd] += f"{bar}<{rank} {number} {fd} {len(body)} {body}>\n".encode()
        if chance.random() < 0.3:
            cut = chance.randrange(len(data[fd]) + 1)
            write_all(fd, data[fd][:cut])
            data[fd] = data[fd][cut:]
    for fd, rest in data.items():
        write_all(fd, rest)


def write_all(fd, data):
    while data:
        data = data[os.write(fd, data) :]


def check_lines(text, ranks, count, fds=(1, 2)):
    """All lines of `many_lines` that went to these descriptors are whole in a text, in the order of each writer."""
    seen = {rank: {1: [], 2: []} for rank in range(ranks)}
    for line in text.splitlines():
        match = re.fullmatch(r"<(\d+) (\d+) ([12]) (\d+) (ä*|x*)>", line)
        assert match, line
        rank, number, fd, length = map(int, match.groups()[:4])
        assert len(match[5]) == length
        seen[rank][fd].append(number)
    for rank in seen:
        assert all(seen[rank][fd] == sorted(seen[rank][fd]) for fd in (1, 2))
        both = seen[rank][1] + seen[rank][2]
        assert len(set(both)) == len(both)
        assert fds != (1, 2) or len(both) == count
    return sum(len(numbers) for fds in seen.values() for numbers in fds.values())


@pytest.mark.parametrize("returns", [False, True])
def test_lines_of_eight_writers_are_neither_torn_nor_lost(returns, user):
    """Random sizes and pieces, with and without carriage returns, to two streams."""
    assert run(8, many_lines, 1000, 1, returns) == [0] * 8
    total = check_lines(user[OUT], 8, 1000, (1,)) + check_lines(user[ERR], 8, 1000, (2,))
    assert total == 8000


def test_lines_and_a_bar_in_one_file(tmp_path, monkeypatch):
    """As `>file 2>&1` makes it: a bar of rank 0 and the other ranks' lines have rows of their own."""
    path = tmp_path / "log"
    with path.open("a") as out, path.open("a") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        assert run(4, bar_and_lines) == [0] * 4
        monkeypatch.undo()
    rows = path.read_bytes().decode().split("\n")
    lines = [row for row in rows if "%" not in row and row]
    assert check_lines("\n".join(lines), 4, 300, ()) == 900
    assert all(re.fullmatch(r"(\r?bar +\d+%#*)*", row) for row in rows if "%" in row)
    assert any(row.endswith("bar 200%" + "#" * 20) for row in rows)


def bar_and_lines(rank):
    """Rank 0 draws a bar while the others write lines."""
    if rank:
        many_lines(rank, 300, 2, False)
        return
    for step in range(201):
        sys.stderr.write(f"\rbar {step:3}%{'#' * (step // 10)}")
        sys.stderr.flush()
        time.sleep(0.002)
    sys.stderr.write("\n")


# A terminal -----------------------------------------------------------------------------------------------------------


class Terminal:
    """What a terminal of endless height shows: rows of `WIDTH` columns, of which it knows which belong to one line."""

    def __init__(self):
        self.rows = [""]
        self.goes_on = set()  # rows that the one before them has overflowed into
        self.row = self.column = 0

    def feed(self, text):
        for match in re.finditer(r"\x1b\[([0-9]*)([A-Za-z])|(.)", text, re.DOTALL):
            if match[3] is None:
                self.escape(match[2], int(match[1] or "0"))
            else:
                assert match[3] != "\x1b", text[match.start() :][:20]
                self.character(match[3])

    def escape(self, kind, number):
        if kind == "K" or kind == "J":
            self.rows[self.row] = self.rows[self.row][: self.column]
            if kind == "J":
                del self.rows[self.row + 1 :]
        elif kind == "A":
            self.row = max(0, self.row - max(1, number))
        else:
            assert kind == "m"

    def character(self, character):
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.down()
        else:
            if self.column == WIDTH:
                self.down()
                self.goes_on.add(self.row)
                self.column = 0
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
            self.column += 1

    def down(self):
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")

    def lines(self):
        lines = []
        for index, row in enumerate(self.rows):
            if index in self.goes_on:
                lines[-1] += row
            else:
                lines.append(row)
        return lines


def on_terminal(function, *args):
    """Run a function in a process whose standard streams are a terminal; everything that it showed, as text."""
    pid, master = pty.fork()
    if pid == 0:
        code = 1
        try:
            termios.tcsetwinsize(1, (24, WIDTH)) if sys.version_info >= (3, 11) else None
            sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False, encoding="utf-8", buffering=1)  # noqa: SIM115
            function(*args)
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: nobody has the other side any more
        while data := os.read(master, 1 << 16):
            shown += data
    os.close(master)
    assert os.waitpid(pid, 0)[1] == 0, shown.decode()
    return shown.decode()


def screen_of(shown):
    terminal = Terminal()
    terminal.feed(shown)
    return terminal


@pytest.mark.skipif(sys.version_info < (3, 11), reason="termios.tcsetwinsize")
def test_a_bar_on_a_terminal_stays_below_whole_lines():
    """Erased and drawn again around each line of the others, which are all whole; in the end it has a row once."""
    terminal = screen_of(on_terminal(run, 8, bar_and_lines))
    lines = terminal.lines()
    bars = [line for line in lines if "%" in line]
    assert bars == ["bar 200%" + "#" * 20]
    assert check_lines("\n".join(line for line in lines if line and line not in bars), 8, 300, ()) == 7 * 300


def scripted(count, steps, logs=None):
    """Write (rank, stream, text) one after another, each shown at once."""
    screen.PATIENCE = 0.0
    with Ranks(count, logs) as ranks:
        for rank, stream, text in steps:
            ranks.write(rank, text, stream)
        ranks.output.drain()
    print("next")  # noqa: T201


@pytest.mark.skipif(sys.version_info < (3, 11), reason="termios.tcsetwinsize")
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(0, ERR, "\r10%"), (1, OUT, "line\n"), (0, ERR, "\r20%\n")], ["line", "20%"]),
        ([(0, ERR, "10%\r"), (1, OUT, "line\n"), (0, ERR, "20%\r")], ["line", "20%"]),
        ([(0, ERR, "\r10%"), (0, ERR, "\r   \r"), (1, OUT, "line\n")], ["line"]),
        ([(1, ERR, "\rb10%"), (0, ERR, "\ra10%"), (1, ERR, "\rb20%\n"), (0, ERR, "\ra20%")], ["b20%", "a20%"]),
        ([(0, OUT, "prompt? "), (1, OUT, "line\n")], ["line", "prompt? "]),
        ([(0, ERR, f"\r{'w' * 100}"), (1, OUT, "line\n"), (0, ERR, "!\n")], ["line", "w" * 100 + "!"]),
        ([(0, ERR, f"\r{'世' * 30}"), (1, OUT, "line\n"), (0, ERR, "\rend" + " " * 57)], ["line", "end"]),
        ([(0, ERR, "\r\x1b[31m10%\x1b["), (1, OUT, "line\n"), (0, ERR, "0m\n")], ["line", "10%"]),
        ([(0, ERR, "\rone\n\rtwo\x1b[A"), (0, ERR, "\rONE\n\rTWO\x1b[A"), (0, ERR, "\n\n")], ["ONE", "TWO"]),
        ([(0, ERR, "\rone\n\rtwo\x1b[A"), (1, OUT, "l\n"), (0, ERR, "\rONE\n\rTWO\x1b[A\n\n")], ["l", "ONE", "TWO"]),
    ],
)
def test_unfinished_lines_on_a_terminal(steps, expected):
    """Bars of several writers and kinds, and what the screen shows of them in the end."""
    lines = screen_of(on_terminal(scripted, 2, steps)).lines()
    assert [line.rstrip() for line in lines if line.strip()] == [line.rstrip() for line in [*expected, "next"]]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="termios.tcsetwinsize")
def test_bars_with_prefixes():
    """The prefix is part of the bar's row, drawn again with it."""
    steps = [(1, ERR, "\r10%"), (0, OUT, "line\n"), (1, ERR, "\r20%"), (1, ERR, "\r30%\n")]
    shown = on_terminal(scripted, 2, steps, "prefix")
    assert screen_of(shown).lines()[:2] == ["[0] line", "[1] 30%"]
    assert "[1] 20%" in shown


def interrupted():
    """A bar that is drawn, and a line after which nobody ticks."""
    screen.PATIENCE = 0.0
    with Ranks(2) as ranks:
        ranks.write(0, "\r10%", ERR)
        screen.PATIENCE = 1e9
        ranks.write(1, "line\n")
        sys.stdout.flush()
        os._exit(0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="termios.tcsetwinsize")
def test_a_bar_is_drawn_again_at_once():
    """It does not wait for its next turn."""
    assert screen_of(on_terminal(interrupted)).lines() == ["line", "10%"]


# No terminal ----------------------------------------------------------------------------------------------------------


def test_a_bar_is_passed_on_where_nothing_can_be_erased(user, impatient):
    """Its carriage returns as they are; a row of its own before a foreign line, after which it goes on whole."""
    with Ranks(2) as ranks:
        ranks.write(0, "\r10%|#", ERR)
        ranks.write(0, "\r20%|##", ERR)
        ranks.write(1, "line\n", ERR)
        ranks.write(0, "##\r", ERR)
        ranks.write(0, "done\n", ERR)
    assert user[ERR] == "10%|#\r20%|##\nline\n20%|####\rdone\n"


def test_a_bar_with_a_prefix_is_passed_on_with_it(user, impatient):
    """Wherever its row begins again, carriage returns before or after the text."""
    with Ranks(2, "prefix") as ranks:
        ranks.write(0, "\r10%", ERR)
        ranks.write(0, "\r20%\r", ERR)
        ranks.write(0, "30%\n", ERR)
    assert user[ERR] == "[0] 10%\r[0] 20%\r[0] 30%\n"


def test_an_unfinished_line_of_several_ranks_waits_for_its_end(user, impatient):
    """It would be torn where it cannot be erased; one rank alone shows it at once."""
    with Ranks(2) as ranks:
        ranks.write(0, "half ")
        assert user[OUT] == ""
        ranks.write(1, "line\n")
        ranks.write(0, "whole\n")
    with Ranks(1) as ranks:
        ranks.write(0, "..")
        assert user[OUT].endswith("\n..")
        ranks.write(0, ".\n")
    assert user[OUT] == "line\nhalf whole\n...\n"


def test_an_unfinished_line_waits_for_a_moment(user):
    """The loop is told when to look again, and shows nothing before."""
    with Ranks(1) as ranks:
        assert ranks.output.deadline() is None
        before = time.monotonic()
        ranks.write(0, "prompt? ")
        deadline = ranks.output.deadline()
        assert before < deadline <= time.monotonic() + screen.PATIENCE
        while time.monotonic() < deadline:
            time.sleep(0.01)
        ranks.output.tick()
        assert user[OUT] == "prompt? "
        assert ranks.output.deadline() is None


def test_the_lowest_ranks_bar_is_shown(user, impatient):
    """The other one appears when it is finished, in its last state."""
    with Ranks(2) as ranks:
        ranks.write(1, "\rb1", ERR)
        ranks.write(0, "\ra1", ERR)
        ranks.write(1, "\rb2\rb3", ERR)
        assert "b3" not in user[ERR]
        ranks.write(1, "\n", ERR)
    assert user[ERR] == "b1\na1\nb3\n"


def test_drain_finishes_lines(user):
    """What the user writes next begins a row; the rank's next text is a new line."""
    with Ranks(2) as ranks:
        ranks.write(0, "half")
        ranks.write(1, "\r5%", ERR)
        ranks.output.drain()
        ranks.output.drain()
        assert (user[OUT], user[ERR]) == ("half\n", "5%\n")
        ranks.write(0, "more\n")
    assert user[OUT] == "half\nmore\n"


def test_own_words_are_lines_between_the_ranks(user, impatient):
    """`say` ends a bar's row like anybody's line."""
    with Ranks(1) as ranks:
        ranks.write(0, "\r5%", ERR)
        ranks.output.say("rank 0 hangs")
    assert user[ERR] == "5%\nrank 0 hangs\n"


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_characters_and_escapes_are_never_split(user, impatient):
    """Byte by byte, with another rank's lines between all bytes."""
    with Ranks(2) as ranks:
        for byte in "\r\x1b[1;31mä世🎉\x1b]0;title\x07\x1b[0m\n".encode():
            ranks.write(0, bytes([byte]), ERR)
            ranks.write(1, "line\n", ERR)
    rows = [row for row in user[ERR].split("\n") if row and row != "line"]
    assert rows[-1] == "\x1b[1;31mä世🎉\x1b]0;title\x07\x1b[0m"
    assert "�" not in user[ERR]
    assert all(re.sub(r"\x1b\[[0-9;]*m|\x1b\]0;title\x07", "", row) in ("", "ä", "ä世", "ä世🎉") for row in rows)


@pytest.mark.parametrize("count", [1, 2])
def test_binary_garbage_is_shown_somehow(count, user, impatient):
    """Every byte value in any order; the lines after it are right."""
    chance = random.Random(3)
    with Ranks(count, "prefix") as ranks:
        for _ in range(50):
            ranks.write(0, chance.randbytes(chance.randrange(1, 3000)))
            ranks.write(count - 1, chance.randbytes(500), ERR)
        ranks.output.drain()
        ranks.write(0, "\nlast line\n")
        assert len(ranks.output.tail(count - 1)) <= TAIL
    assert user[OUT].endswith("last line\n")


def test_a_stream_that_cannot_encode_gets_escapes(monkeypatch):
    """A terminal of the C locale."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with Ranks(1) as ranks:
        ranks.write(0, "nä\n")
    assert raw.getvalue() == b"n\\xe4\n"


def test_a_long_line_comes_in_pieces(user):
    """Nothing of it is lost, nothing is added, and little is kept."""
    piece = "x" * CHUNK
    with Ranks(1) as ranks:
        for _ in range(40):
            ranks.write(0, piece)
            assert all(one.size <= draft_bound() for one in ranks.output._screen._drafts)
        ranks.write(0, "end\n")
    assert user[OUT] == piece * 40 + "end\n"


def draft_bound():
    return screen.LONGEST + CHUNK


def test_a_bar_that_never_ends_is_kept_in_its_last_state(user):
    """A held bar of a higher rank does not grow."""
    with Ranks(2) as ranks:
        for step in range(3000):
            ranks.write(1, f"\r{step} {'#' * 100}", ERR)
        assert all(one.size <= screen.KEPT + CHUNK for one in ranks.output._screen._drafts)
        ranks.write(1, "\n", ERR)
    assert user[ERR].endswith(f"2999 {'#' * 100}\n")


def flood(rank, size):
    block = (b"y" * 99 + b"\n") * 640
    for _ in range(size // len(block)):
        write_all(1, block)
        write_all(2, block)


def test_a_flood_does_not_make_the_users_process_grow(monkeypatch):
    """A hundred megabytes go through at the pace of the user's screen."""
    with open(os.devnull, "w") as null:
        monkeypatch.setattr(sys, "stdout", null)
        monkeypatch.setattr(sys, "stderr", null)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert run(1, flood, 50 << 20) == [0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10


# The user's side ------------------------------------------------------------------------------------------------------


class Broken:
    """A stream that fails in every way."""

    encoding = None

    def write(self, text):
        raise KeyError(text)

    def __getattr__(self, name):
        raise RuntimeError(name)


def closed_stream():
    stream = io.StringIO()
    stream.close()
    return stream


def closed_descriptor():
    read_end, write_end = os.pipe()
    os.close(read_end)
    return open(write_end, "w")


@pytest.mark.parametrize("make", [lambda: None, Broken, closed_stream, closed_descriptor])
def test_a_users_stream_that_takes_nothing_is_no_error(make, monkeypatch, impatient):
    """Text is dropped; the other stream still gets its own."""
    errors, stream = io.StringIO(), make()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", errors)
    with Ranks(2) as ranks:
        for text in ("line\n", "half", "\r5%", "x" * CHUNK):
            ranks.write(0, text)
            ranks.write(1, "fine\n", ERR)
        ranks.output.drain()
    with contextlib.suppress(Exception):
        stream.close()
    assert errors.getvalue() == "fine\n" * 4


def test_the_users_stream_may_change(monkeypatch, impatient):
    """Each cell of a notebook brings its own; the one at the time of reading gets the text."""
    cells = [io.StringIO(), io.StringIO()]
    with Ranks(1) as ranks:
        for cell in cells:
            monkeypatch.setattr(sys, "stdout", cell)
            ranks.write(0, "line\n")
            ranks.write(0, "half")
            ranks.output.drain()
    assert [cell.getvalue() for cell in cells] == ["line\nhalf\n"] * 2


def test_a_screen_that_takes_nothing_does_not_stop_the_loop(monkeypatch):
    """A pager that waits for its user: nothing more is read, no call waits, and it is no hang; all comes in the end."""
    read_end, write_end = os.pipe()
    text = "".join(f"line {number}\n" for number in range(20000))
    with open(write_end, "w") as stream, Ranks(1) as ranks:
        monkeypatch.setattr(sys, "stdout", stream)
        os.write(ranks.streams[0]._out, text.encode()[: 4 * CHUNK])
        while ranks.output.descriptors():
            look(ranks.output)
        before = ranks.output.activity
        ranks.output.tick()
        assert ranks.output.activity != before
        assert ranks.output.deadline() is not None
        ranks.output.drain(wait=False)
        got = b""
        while select.select([read_end], [], [], 0)[0]:
            got += os.read(read_end, CHUNK)
            ranks.output.tick()
        monkeypatch.undo()
    os.close(read_end)
    expected = text[: 4 * CHUNK]
    assert got.decode().splitlines() == expected.splitlines()


# Ranks ----------------------------------------------------------------------------------------------------------------


def die_in_a_line(rank):
    os.write(1, b"whole\nhalf \xc3")
    os.write(2, b"about to di")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_in_a_line(user):
    """What it wrote is shown, as a line; the tail has it."""
    output = Output(2)
    pid = start(output, 0, die_in_a_line, 0)
    os.waitpid(pid, 0)
    assert output.tail(0) == ["about to di"]
    finish(output, [])
    assert user[OUT] == "whole\nhalf �\n"
    assert user[ERR] == "about to di\n"


def leave_a_child(rank, gate):
    print("mine")  # noqa: T201
    if os.fork() == 0:
        os.read(gate, 1)  # the end of the test
        os._exit(0)


def test_a_child_of_a_rank_may_hold_the_write_ends(user):
    """`drain` takes what is there and waits for nobody."""
    gate, opened = os.pipe()
    output = Output(1)
    pid = start(output, 0, _close_then, opened, leave_a_child, 0, gate)
    os.waitpid(pid, 0)
    output.drain()
    assert user[OUT] == "mine\n"
    assert len(output.descriptors()) == 2
    output.close()
    output.close()
    assert output.descriptors() == []
    os.close(opened)
    os.close(gate)


def _close_then(fd, function, *args):
    os.close(fd)
    function(*args)


def write_for_ever(rank):
    while True:
        write_all(1, b"more\n" * 1000)


def test_drain_does_not_wait_for_who_writes_for_ever(monkeypatch):
    """As much as was there when it began."""
    with open(os.devnull, "w") as null:
        monkeypatch.setattr(sys, "stdout", null)
        output = Output(1)
        pid = start(output, 0, write_for_ever, 0)
        look(output, 5)
        output.drain()
        os.kill(pid, signal.SIGKILL)
        finish(output, [pid])


def own_descriptors(rank):
    listed = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            listed[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    print(sum(target.startswith("pipe:") for fd, target in listed.items() if fd > 2))  # noqa: T201


def test_a_forked_rank_keeps_nothing_but_its_streams(capsys):
    """No read end, and no write end of another rank, for either side would miss the other's end."""
    baseline = sum(os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:") for fd in open_descriptors() if fd > 2)
    output = Output(3)
    output.streams(2)
    pids = [start(output, rank, own_descriptors, rank) for rank in (0, 1)]
    output.started(2)
    assert finish(output, pids) == [0, 0]
    assert capsys.readouterr().out == f"{baseline}\n" * 2


def open_descriptors():
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return [fd for fd in numbers if os.path.lexists(f"/proc/self/fd/{fd}")]


def spawned(streams):
    streams.take()
    print("spawned", sys.stdout.line_buffering, sys.stdout is sys.__stdout__)  # noqa: T201
    os.system("echo child >&2")


@pytest.mark.parametrize("folder", [False, True])
def test_streams_travel_to_a_spawned_rank(folder, user, tmp_path):
    """By descriptor, one or two; `sys.stdout` stays the object it was."""
    output = Output(1, tmp_path if folder else None)
    process = multiprocessing.get_context("spawn").Process(target=spawned, args=(output.streams(0),))
    process.start()
    output.started(0)
    while process.is_alive():
        look(output, 0.01)
    process.join()
    process.close()
    finish(output, [])
    out, err = user[OUT], user[ERR]
    if folder:
        assert (out, err) == ("", "")
        assert (tmp_path / "rank0.log").read_text() == "spawned True True\nchild\n"
    else:
        assert (out, err) == ("spawned True True\n", "child\n")


class Tee:
    """What a program may put in place of `sys.stdout`."""

    def write(self, text):
        return sys.__stdout__.write(text.upper())

    def flush(self):
        sys.__stdout__.flush()


def replaced(rank, streams, kind):
    """Take streams that arrived, with `sys.stdout` as a program has left it."""
    sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stdout = {"tee": Tee(), "none": None, "closed": closed_stream()}[kind]
    streams._output = None
    streams.take()
    print("said")  # noqa: T201
    os._exit(0)


@pytest.mark.parametrize(("kind", "said"), [("tee", "SAID\n"), ("none", "said\n"), ("closed", "said\n")])
def test_a_rank_whose_stdout_is_no_file(kind, said, user):
    """The program's own object stays; where there is none, a new one is made."""
    output = Output(1)
    streams = output.streams(0)
    pid = os.fork()
    if pid == 0:
        try:
            replaced(0, streams, kind)
        finally:
            os._exit(1)
    output.started(0)
    assert finish(output, [pid]) == [0]
    assert user[OUT] == said


PROGRAM = """
import os, sys
for fd in (0, 1, 2):
    os.close(fd)
sys.stdout = sys.stderr = None
from torchcrew.launcher.output import Output
output = Output(1, sys.argv[1] if len(sys.argv) > 1 else None)
streams = output.streams(0)
taken = [streams._out, streams._err]
assert min(taken) > 2, taken
if os.fork() == 0:
    streams.take()
    print("said", flush=True)  # noqa: T201
    os._exit(0)
output.started(0)
os.wait()
output.drain()
assert output.descriptors() == [] or sys.argv[1:], output.descriptors()
output.close()
os._exit(7)
"""


@pytest.mark.parametrize("folder", [False, True])
def test_a_users_process_without_standard_streams(folder, tmp_path):
    """A daemon: the numbers 0 to 2 are free there, and the pipes do not take them."""
    arguments = [str(tmp_path / "logs")] if folder else []
    assert subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=False).returncode == 7
    assert not folder or (tmp_path / "logs/rank0.log").read_text() == "said\n"


# Folders, tails, counters ---------------------------------------------------------------------------------------------


def test_a_folder_has_a_file_for_each_rank(tmp_path, capfd):
    """Both streams in order, nothing on the terminal, emptied at the start and appended to by a rank's next process."""
    folder = tmp_path / "deep/logs"
    assert run(2, plain_lines, logs=folder) == [0, 0]
    output = Output(2, str(folder))
    assert (folder / "rank1.log").read_bytes() == b""
    before = output.activity
    for _ in range(2):
        os.waitpid(start(output, 1, plain_lines, 1), 0)
        assert output.activity != before
        before = output.activity
    assert output.descriptors() == []
    assert output.deadline() is None
    output.drain()
    output.close()
    assert (folder / "rank1.log").read_text() == "out of 1\nerr of 1\n" * 2
    assert output.tail(1) == ["out of 1", "err of 1"] * 2
    assert output.tail(0) == []
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path):
    """Nothing is open then."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Output(2, tmp_path / "file")


def test_a_folder_may_vanish(tmp_path):
    """No line of the tail, no error."""
    folder = tmp_path / "logs"
    with Ranks(1, folder) as ranks:
        (folder / "rank0.log").unlink()
        assert ranks.output.tail(0) == []
        assert ranks.output.activity == 0


@pytest.mark.parametrize("folder", [False, True])
def test_the_tail_is_the_last_lines_in_their_last_state(folder, user, tmp_path):
    """Twenty, without colours, cut, bars resolved, an unfinished one included."""
    with Ranks(1, tmp_path if folder else None) as ranks:
        ranks.write(0, "".join(f"line {number}\n" for number in range(50)), ERR)
        ranks.write(0, "\r10%\r20%\r\n\x1b[31mred\x1b[0m\r\n", ERR)
        ranks.write(0, "z" * 10000 + "\n", ERR)
        ranks.write(0, b"\xff\r50%\r51%", ERR)
        tail = ranks.output.tail(0)
    assert len(tail) == TAIL
    assert tail[:-4] == [f"line {number}" for number in range(34, 50)]
    assert tail[-4:-2] == ["20%", "red"]
    assert tail[-2].startswith("zzz")
    assert len(tail[-2]) == TAIL_WIDTH
    assert tail[-1] == "51%"


def test_the_tail_takes_what_is_still_in_the_pipe(user):
    """The last words of a rank that has just died."""
    with Ranks(2) as ranks:
        os.write(ranks.streams[1]._err, b"last words")
        assert ranks.output.tail(1) == ["last words"]
        assert ranks.output.tail(0) == []


def test_activity_changes_with_whatever_is_read(user):
    """Unfinished lines count, silence does not."""
    with Ranks(2) as ranks:
        seen = [ranks.output.activity]
        for text in ("line\n", "half", "\r"):
            ranks.write(1, text, ERR)
            seen.append(ranks.output.activity)
            look(ranks.output)
            assert ranks.output.activity == seen[-1]
    assert len(set(seen)) == 4


def test_reading_what_has_ended_is_nothing(user):
    """A descriptor of an earlier poll may be closed by now."""
    with Ranks(1) as ranks:
        ended = ranks.output.descriptors()
        ranks.output.started(0)
        for fd in ended * 2:
            ranks.output.read(fd)
        assert ranks.output.descriptors() == []


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("abc", "abc"),
        ("\r10%\r20%", "20%"),
        ("100%\r20%", "20%%"),
        ("10%\r", "10%"),
        ("\r10%\r   \r", "   "),
        ("10%\r\x1b[K", ""),
        ("\x1b[31m10%\r\x1b[32m5%", "\x1b[32m5%"),
        ("10%\r\x1b[0m", "10%\x1b[0m"),
    ],
)
def test_what_a_terminal_makes_of_carriage_returns(line, state):
    """The last state of a rewritten line."""
    assert draft.resolved(line) == state
