"""Several hosts, played by several commands on this one: they meet by elastic, and end together."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchcrew.errors import HostFailed
from torchcrew.launcher import nodes
from torchcrew.launcher.nodes import Nodes
from torchcrew.testing.procfs import descendants, read_process

PROGRAMS = Path(__file__).parent / "programs"
COMMAND = [sys.executable, "-c", "from torchcrew.cli import main; main()", "launch"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER_"))}
C10D = "--rdzv-endpoint 127.0.0.1:{port} --rdzv-id job"
STATIC = "--master-addr 127.0.0.1 --master-port {port} --node-rank {host}"
PATIENCE = 100.0

#: Six processes that import torch, on whatever cores there are.
started = pytest.mark.timeout(120)


class Host:
    """One command that plays a host."""

    def __init__(self, number: int, port: int, meeting: str, *arguments: object, ranks: int, more: str) -> None:
        flags = f"--nnodes 2 -n {ranks} {meeting.format(port=port, host=number)} {more}"
        self.process = subprocess.Popen(
            [*COMMAND, *flags.split(), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=CLEAN,
        )

    def read(self, count: int) -> list[str]:
        """The next lines of its ranks."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().rstrip() for _ in range(count)]
        assert all(lines), self.process.stderr.read()
        return lines

    def end(self) -> tuple[int, str, str]:
        """Its exit status, and what it wrote."""
        stdout, stderr = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def hosts():
    """Starts two hosts; what is left of them is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made: list[Host] = []

    def start(meeting: str, *arguments: object, ranks: tuple[int, int] = (2, 2), more: str = "") -> list[Host]:
        made.extend(Host(number, port, meeting, *arguments, ranks=ranks[number], more=more) for number in range(2))
        return made

    yield start
    for host in made:
        host.process.kill()
        host.process.communicate(timeout=10)


def listening(pids) -> set[str]:
    """The addresses at which some processes listen, as /proc has them."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


def below(host: Host) -> list[int]:
    """The processes that its command has started."""
    return [process.pid for process in descendants(host.process.pid)]


def pids_of_four(both: list[Host]) -> list[list[int]]:
    """The ranks of both hosts have added up their numbers, and nothing listens but on the loopback interface."""
    lines = [host.read(2) for host in both]
    assert all(re.search(r"sum 6 of 4", line) for two in lines for line in two)
    for host in both:
        addresses = listening([host.process.pid, *below(host)])
        assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    return [[int(line.split()[-1]) for line in two] for two in lines]


@started
@pytest.mark.faults
@pytest.mark.parametrize("meeting", [C10D, STATIC], ids=["c10d", "static"])
def test_an_interruption_of_both_hosts(hosts, meeting):
    """Ctrl-C for each: they end without a word more."""
    both = hosts(meeting, PROGRAMS / "meets.py", "none", "sleeps")
    pids_of_four(both)
    for host in both:
        host.process.send_signal(signal.SIGINT)
    for host in both:
        status, _, stderr = host.end()
        assert status in (130, 1)  # the second may have heard of the first's end before its own
        assert "Traceback" not in stderr


@started
def test_a_failure_on_one_host_ends_both(hosts):
    """The failed rank's host says what it was, the other one where; ranks that wait in a collective are no matter."""
    ends = [host.end() for host in hosts(STATIC, PROGRAMS / "meets.py", 3, "raises")]
    assert [status for status, _, _ in ends] == [1, 1]
    assert [len(re.findall(r"sum 6 of 4", stdout)) for _, stdout, _ in ends] == [2, 2]  # they had met
    (_, _, here), (_, _, there) = ends
    assert re.search(r"^torchcrew launch: rank 3 \(pid \d+", there, re.MULTILINE)
    assert re.search(r"^torchcrew launch: node 1 \(\S+\) failed: rank 3 \(pid \d+", here, re.MULTILINE)
    for stderr in (here, there):
        assert stderr.count("ValueError: wrong data") == 1
        assert stderr.count("Traceback") == 1


@started
@pytest.mark.faults
def test_ranks_that_do_not_talk_are_ended_too(hosts):
    """A rank is killed while those of the other host sleep."""
    first, second = hosts(STATIC, PROGRAMS / "meets.py", 1, "dies")
    status, _, stderr = first.end()
    assert status == 137
    assert "SIGKILL" in stderr
    status, _, stderr = second.end()
    assert status == 1
    assert re.search(r"node 0 \(\S+\) failed: rank 1 .* SIGKILL", stderr)


@started
@pytest.mark.faults
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_command_takes_its_host_with_it(hosts, killed):
    """Four ranks meet. SIGKILL to one command: nothing of its host is left, and the other one ends with an error."""
    both = hosts(STATIC, PROGRAMS / "meets.py", "none", "sleeps")
    pids = pids_of_four(both)[killed] + below(both[killed])
    both[killed].process.kill()
    deadline = time.monotonic() + 10
    while any(read_process(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    status, _, stderr = both[1 - killed].end()
    assert status == 1
    assert "torchcrew launch: " in stderr
    assert f"node {killed}" in stderr or "gone" in stderr, stderr


@started
@pytest.mark.faults
def test_a_host_that_falls_silent(hosts):
    """All its processes are stopped, as if its network were gone: the other host gives up after a while."""
    first, second = hosts(STATIC, PROGRAMS / "meets.py", "none", "sleeps")
    first.read(2)
    second.read(2)
    stopped = below(second)
    try:
        for pid in (second.process.pid, *stopped):
            os.kill(pid, signal.SIGSTOP)
        status, _, stderr = first.end()
    finally:
        second.process.kill()
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert status == 1
    assert re.search(r"node 1 \(\S+\) has given no sign of life for 15 s", stderr), stderr


@started
@pytest.mark.faults
def test_hosts_with_different_numbers_of_ranks(hosts):
    """Each says so, with what each has."""
    for number, host in enumerate(hosts(STATIC, PROGRAMS / "meets.py", ranks=(2, 1))):
        status, _, stderr = host.end()
        assert status == 1
        assert re.search(r"node 0 \(\S+\) has 2, node 1 \(\S+\) has 1", stderr), (number, stderr)


@started
@pytest.mark.faults
def test_restarts_are_of_all(hosts, tmp_path):
    """After a failure on one host the ranks of both start anew; then both end well, without a word of elastic's."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, torch, torch.distributed as dist\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if (count, os.environ['RANK']) == ('0', '1'):\n"
        "    raise ValueError('at first')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "print('attempt', count)\n"
    )
    for host in hosts(C10D, program, ranks=(1, 1), more="--max-restarts 2"):
        status, stdout, stderr = host.end()
        assert (status, stderr) == (0, "")
        assert len(re.findall(r"attempt [12]", stdout)) == 1
        assert "attempt 0" not in stdout


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("node7", "node7", 29400),
        ("node7:80", "node7", 80),
        ("[::1]:80", "::1", 80),
        ("[::1]", "::1", 29400),
        ("10.0.0.1:0", "10.0.0.1", 0),
    ],
)
def test_endpoints(endpoint, host, port):
    """A name or a number, with a port or elastic's own."""
    made = Nodes(1, 2, endpoint)
    assert (made.host, made.port) == (host, port)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"least": 0, "most": 2}, "1 <= least"),
        ({"least": 3, "most": 2}, "1 <= least"),
        ({"least": 2, "most": 2, "backend": "static"}, "number of this machine"),
        ({"least": 1, "most": 2, "backend": "static", "rank": 0}, "fixed number"),
        ({"least": 2, "most": 2, "backend": "static", "rank": 2}, "none of 2"),
        ({"least": 2, "most": 2, "backend": "etcd"}, "c10d or static"),
        ({"least": 2, "most": 2, "endpoint": "host:port"}, "HOST:PORT"),
        ({"least": 2, "most": 2, "endpoint": ":80"}, "HOST:PORT"),
    ],
    ids=str,
)
def test_what_cannot_work(arguments, says):
    """Refused before anything is started."""
    with pytest.raises(ValueError, match=says):
        assert Nodes(**{"endpoint": "127.0.0.1", **arguments}).port


def test_what_elastic_takes_is_given_back(monkeypatch):
    """Handlers of signals and the environment are the caller's again, also after an error."""
    monkeypatch.setenv("KEPT", "before")

    def handler(*_: object) -> None:
        """The caller's."""

    def be_agent() -> None:
        with nodes._as_agent():
            os.environ.update(KEPT="after", TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM")
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN)
            raise HostFailed

    before = signal.signal(signal.SIGHUP, handler)
    try:
        with pytest.raises(HostFailed):
            be_agent()
        assert signal.getsignal(signal.SIGHUP) is handler
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL
        assert os.environ["KEPT"] == "before"
        assert "TORCHELASTIC_SIGNALS_TO_HANDLE" not in os.environ
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ
    finally:
        signal.signal(signal.SIGHUP, before)


def test_errors_travel_with_their_cause():
    """What node_main failed with arrives as what it was; where that cannot be, as its cause, or its text."""
    outcome = nodes._Outcome()
    try:
        assert outcome.error() is None
        error = ValueError("wrong")
        error.__cause__ = HostFailed("because")
        outcome.write(error)
        arrived = outcome.error()
        assert (type(arrived), str(arrived)) == (ValueError, "wrong")
        assert (type(arrived.__cause__), str(arrived.__cause__)) == (HostFailed, "because")

        class Local(Exception):
            def __reduce__(self):
                raise TypeError

        outcome.clear()
        outcome.write(Local("no way"))
        arrived = outcome.error()
        assert isinstance(arrived, Exception)
        assert "no way" in str(arrived)
    finally:
        outcome.close()
