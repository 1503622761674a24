"""`torchcrew launch`: torchrun's programs and flags, exit statuses, and one report of what went wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import torchcrew.cli.launch as command_module
from torchcrew.cli import app
from torchcrew.testing.procfs import read_process

PROGRAMS = Path(__file__).parent.parent / "launcher" / "programs"
COMMAND = [sys.executable, "-c", "from torchcrew.cli import main; main()", "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
#: Of torch's own launchers, whose ranks would be taken for ours.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER_"))}
pytestmark = pytest.mark.timeout(60)


def launch(*arguments: object, command: list[str] = COMMAND, **options) -> subprocess.CompletedProcess[str]:
    options.setdefault("env", CLEAN)
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=50, **options)


#: What a rank of stock's says when it meets a race in the teardown of stock's gloo: a thread of it is left when the
#: process ends, and C++ aborts.
GLOOS_RACE = "terminate called without an active exception"


def torchrun(*arguments: object, tries: int = 3) -> subprocess.CompletedProcess[str]:
    """The same by torchrun; once more where that race, and nothing of ours, has ended it."""
    while True:
        done = launch("--standalone", *arguments, command=TORCHRUN)
        tries -= 1
        if not done.returncode or not tries or GLOOS_RACE not in done.stderr or "exitcode: -6" not in done.stderr:
            return done


def without_prefix(text: str) -> list[str]:
    return [re.sub(r"^\[[^\]]*\]:? ?", "", line) for line in text.splitlines()]


@pytest.mark.timeout(200)  # torchrun has three tries
def test_a_program_of_torchruns_gives_the_same(tmp_path):
    """DDP over two ranks by its flags: the weights are torchrun's to the last printed digit."""
    arguments = ["--nproc_per_node=2", PROGRAMS / "ddp_step.py", "--steps", "2"]
    ours = launch(*arguments)
    torchruns = torchrun(*arguments)
    assert ours.returncode == torchruns.returncode == 0, ours.stderr + torchruns.stderr
    assert ours.stderr == ""
    assert without_prefix(ours.stdout) == torchruns.stdout.splitlines()
    assert ours.stdout.startswith("[") == (not torchruns.stdout.startswith("["))


def test_a_module_and_the_programs_own_flags(tmp_path):
    """-m; torchrun's flags for one host, in either spelling; what stands after the program is the program's."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "program.py").write_text((PROGRAMS / "probe.py").read_text())
    flags = "--nnodes=1:1 --node_rank=0 --rdzv_backend=c10d --rdzv-endpoint=localhost:0 --rdzv_id=7 --max_restarts=0"
    more = "--master_addr=127.0.0.1 --master-port=29511 --standalone -t 3 --start-method=zygote --role=trainer"
    ours = f"{flags} {more} --monitor_interval 5 --nproc-per-node 1 --module package.program".split()
    done = launch(*ours, "--nproc_per_node", "7", "-m", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(done.stdout)  # of one rank, without a prefix
    assert seen["argv"] == [str(tmp_path / "package/program.py"), "--nproc_per_node", "7", "-m", "--help"]
    assert seen["path"] == str(tmp_path)
    assert seen["names"]["__package__"] == "package"


def test_no_prefixes(tmp_path):
    """For several ranks where they are not wanted. Ranks may leave by `sys.exit(0)`."""
    program = tmp_path / "program.py"
    program.write_text("import sys; print('here'); sys.exit(0)")
    done = launch("-n", 2, "--logs", "none", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "here\nhere\n", "")


@pytest.mark.parametrize(
    ("flags", "name"), [([], "crew"), (["--backend", "crew"], "crew"), (["--backend", "gloo"], "gloo")]
)
def test_the_backend(tmp_path, flags, name):
    """Of a script that leaves it to the command."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "value = torch.ones(1)\n"
        "dist.all_reduce(value)\n"
        "print(dist.get_backend(), int(value))\n"
        "dist.destroy_process_group()\n"
    )
    done = launch("-n", 2, "--logs", "none", *flags, program)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name} 2\n" * 2, "")


def test_output_in_files(tmp_path):
    """--log-dir; also of a rank that fails, whose status is the command's."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, sys, torch, torch.distributed as dist
            print("rank", os.environ["RANK"])
            dist.all_reduce(torch.ones(1))
            sys.exit(3 if os.environ["RANK"] == "1" else 0)
            """
        )
    )
    done = launch("-n", 2, "--log-dir", tmp_path / "logs", "--tee=3", program)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert "--tee has no effect" in done.stderr
    assert "sys.exit(3)" in done.stderr
    assert [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in range(2)] == ["rank 0\n", "rank 1\n"]


@pytest.mark.parametrize(
    ("given", "several", "expected"),
    [
        ((None, None, "0", "0"), False, None),
        ((None, None, "0", "3"), True, "prefix"),
        (("prefix", None, "0", "0"), False, "prefix"),
        (("none", None, "0", "0"), True, None),
        ((None, "folder", "0", "0"), True, "folder"),
        ((None, "folder", "3", "0"), False, "folder"),
        ((None, None, "0:0,1:0", "0"), True, "prefix"),
    ],
)
def test_where_output_goes(given, several, expected):
    """Lines with ranks where there are several, unless it is said otherwise."""
    assert command_module._logs(*given, several) == expected


def test_redirects_make_a_folder(tmp_path, monkeypatch, capsys):
    """As torchrun's, where none is named; it is told which."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = command_module._logs(None, None, "0:3", "0", True)
    assert Path(folder).parent == tmp_path
    assert f"files in {folder}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        pytest.param("exit3", 3, "sys.exit(3)", marks=pytest.mark.faults),
        ("SIGKILL", 137, "SIGKILL"),
        pytest.param("says", 1, "no such model", marks=pytest.mark.faults),
        pytest.param("leaves5", 5, "exit code 5", marks=pytest.mark.faults),
        pytest.param("SIGTERM", 143, "SIGTERM", marks=pytest.mark.faults),
    ],
)
def test_the_exit_status_is_the_failed_ranks(how, status, says):
    """Its own, or that of its signal; the others wait in a collective, and are ended."""
    done = launch("-n", 2, PROGRAMS / "ends.py", 1, how)
    assert done.returncode == status, done.stderr
    report = done.stderr[done.stderr.index("torchcrew launch:") :]
    assert says in report
    assert re.search(r"rank 1 \(pid \d+ on ", report)
    assert "rank 0" not in report
    assert "about to end" in report
    assert "Traceback" not in report


def test_an_exception_is_reported_once_and_without_our_frames():
    """The traceback begins in the script; who it was; nothing of the peer whose collective broke."""
    done = launch("-n", 2, PROGRAMS / "ends.py", 1, "raises")
    assert done.returncode == 1
    assert re.search(r"^torchcrew launch: rank 1 \(pid \d+ on \S+\) raised", done.stderr, re.MULTILINE)
    assert done.stderr.count("ValueError: wrong data") == 1
    assert done.stderr.count("Traceback") == 1
    lines = done.stderr.splitlines()
    first = lines[next(i for i, line in enumerate(lines) if line.startswith("Traceback")) + 1]
    assert f'File "{PROGRAMS}/ends.py"' in first, done.stderr
    assert "torchcrew/" not in done.stderr.replace(str(PROGRAMS), "")


@pytest.mark.parametrize(
    ("name", "source", "status", "says"),
    [
        ("nosuch.py", None, 2, "can't open file"),
        ("program.py", "def f(:", 1, "SyntaxError"),
    ],
)
def test_a_program_that_cannot_be_run_starts_no_rank(tmp_path, name, source, status, says):
    """Told once, with python's status."""
    if source is not None:
        (tmp_path / name).write_text(source)
    done = launch("-n", 2, name, cwd=tmp_path)
    assert done.returncode == status
    assert done.stderr.count(says) == 1
    assert "rank" not in done.stderr
    assert "cli/launch" not in done.stderr


@pytest.mark.faults
def test_a_module_that_is_not_there(tmp_path):
    """Found out by the ranks, as importing its package is theirs; python's status."""
    done = launch("-n", 2, "-m", "no_such_module", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("No module named no_such_module") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "say which script"),
        (["-"], "standard input"),
        (["--nosuch", "a.py"], "No such option"),
        (["-n", "many", "a.py"], "auto, gpu or cpu"),
        (["-n", "0", "a.py"], "--nproc-per-node should be at least 1"),
        (["--threads_per_rank", "0", "a.py"], "--threads-per-rank should be at least 1"),
        (["--nproc-per-node", "gpu", "a.py"], "no GPU"),
        (["--nnodes", "0", "a.py"], "MIN:MAX"),
        (["--nnodes", "3:2", "a.py"], "MIN:MAX"),
        (["--nnodes", "2", "a.py"], "--rdzv-endpoint"),
        (["--nnodes", "2", "--standalone", "a.py"], "--standalone"),
        (["--nnodes", "2", "--rdzv_endpoint", "host:port", "a.py"], "HOST:PORT"),
        (["--nnodes", "2", "--master-addr", "127.0.0.1", "--node-rank", "2", "a.py"], "none of 2"),
        (["--rdzv-conf", "timeout", "--nnodes", "2", "--rdzv-endpoint", "h", "a.py"], "KEY=VALUE"),
        (["--tee", "4", "a.py"], "--tee"),
        (["--redirects", "0:", "a.py"], "--redirects"),
        (["--start-method", "thread", "a.py"], "--start-method should be one of"),
        (["--max-restarts", "-1", "a.py"], "--max-restarts"),
        (["--no-python", "a.py"], "not supported"),
        (["--run_path", "a.py"], "not supported"),
        (["--logs", "folder", "ends.py"], "--log-dir"),
        (["--timeout", "0", "a.py"], "--timeout should be a number of seconds above 0, but is 0.0"),
    ],
    ids=str,
)
def test_what_cannot_be_meant(monkeypatch, arguments, says):
    """A usage error: status 2, before anything is started."""
    monkeypatch.chdir(PROGRAMS)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the command's own business

    def go_on() -> None:
        if "gpu" in arguments:
            pytest.skip("there is a GPU here")
        pytest.fail("it would start ranks")

    monkeypatch.setattr(command_module, "_be_nobodys_main", go_on)
    done = CliRunner().invoke(app, ["launch", *arguments], prog_name="torchcrew")
    assert done.exit_code == 2, done.output
    assert says in re.sub(r"[│\s]+", " ", done.output)


@pytest.mark.faults
def test_loaders_with_spawned_workers_find_the_script():
    """The script is a lasting `__main__` that a worker imports again by its path."""
    done = launch("-n", 1, PROGRAMS / "spawn_workers.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 1, 4, 9, 16, 25, 36, 49]\n"


@pytest.mark.faults
def test_restarts(tmp_path):
    """All ranks start anew, and are told for the how-many-th time."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, torch, torch.distributed as dist
            count = os.environ["TORCHELASTIC_RESTART_COUNT"]
            if count == "0" and os.environ["RANK"] == "1":
                raise ValueError("at first")
            dist.all_reduce(torch.ones(1))
            print("attempt", count)
            """
        )
    )
    done = launch("-n", 2, "--max-restarts", 1, program)
    assert done.returncode == 0, done.stderr
    assert without_prefix(done.stdout) == ["attempt 1"] * 2


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.faults)],
)
def test_a_signal_to_the_command_ends_all(tmp_path, signum, status):
    """Ctrl-C: 130 and no traceback of ours. No rank is left."""
    program = tmp_path / "program.py"
    program.write_text("import os, time; print('pid', os.getpid(), flush=True); time.sleep(50)")
    with subprocess.Popen(
        [*COMMAND, "-n", "2", str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=CLEAN
    ) as process:
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == status
    assert "cli/launch" not in stderr
    assert "launcher/" not in stderr
    assert all_end(pids)


def all_end(pids, seconds=10.0):
    """Whether all these processes end soon."""
    deadline = time.monotonic() + seconds
    while any(read_process(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
