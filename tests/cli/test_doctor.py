"""The command `torchcrew`, and what `doctor` says about machines that are made up."""

import dataclasses
import json
import subprocess
import sys
import types

import pytest
import typer
from typer.testing import CliRunner

from torchcrew.cli import COMMANDS, app, doctor
from torchcrew.cli.doctor import GIB, MIB, Facts, Finding, diagnose, read_facts

GOOD = Facts(
    python="3.11.7",
    system="Linux x86_64",
    kernel="6.1.0-18-amd64",
    online_cores=8,
    affinity_cores=8,
    usable_cores=8,
    physical_memory=32 * GIB,
    memory_limit=32 * GIB,
    shm_total=16 * GIB,
    shm_free=16 * GIB,
    shm_writable=True,
    descriptors=(65536, 65536),
    address_space=None,
    file_size=None,
    core_size=0,
    core_pattern="core",
    start_methods=("fork", "spawn", "forkserver"),
    torch="2.13.0+cpu",
    torch_error=None,
    torch_cuda=None,
    torch_threads=8,
    cuda_devices=0,
    omp_num_threads=None,
    has_memfd=True,
    has_pidfd=True,
    container=None,
    gpus=(),
)


@pytest.fixture
def invoke(monkeypatch):
    """Call the command on made-up facts."""

    def call(*args, facts=GOOD):
        monkeypatch.setattr(doctor, "read_facts", lambda: facts)
        return CliRunner().invoke(app, list(args))

    return call


def test_a_good_machine_needs_nothing():
    """Every verdict is ok, and every fact has its line."""
    findings = diagnose(GOOD)
    assert {finding.verdict for finding in findings} == {"ok"}
    assert [finding.name for finding in findings] == [
        *("python", "kernel", "system calls", "container", "cores", "memory", "/dev/shm", "descriptors"),
        *("address space (ulimit -v)", "file size (ulimit -f)", "core files (ulimit -c)", "start methods"),
        *("torch", "torch's threads", "OMP_NUM_THREADS", "GPUs"),
    ]


@pytest.mark.parametrize(
    ("changes", "name", "verdict", "part"),
    [
        ({"system": "Darwin arm64"}, "python", "warn", "Only on Linux"),
        ({"kernel": "5.3.0"}, "kernel", "bad", "5.4"),
        ({"kernel": "4.19.128-microsoft-standard"}, "kernel", "bad", "pidfd"),
        ({"has_pidfd": False}, "system calls", "bad", "seccomp"),
        ({"has_memfd": False}, "system calls", "bad", "seccomp"),
        ({"container": "/.dockerenv"}, "container", "ok", ""),
        ({"usable_cores": 1}, "cores", "warn", "one core"),
        ({"usable_cores": 2, "affinity_cores": 8}, "cores", "ok", "Count on 2"),
        ({"memory_limit": 4 * GIB}, "memory", "ok", "cgroup"),
        ({"memory_limit": GIB}, "memory", "warn", "kernel kills"),
        ({"shm_total": None, "shm_free": None}, "/dev/shm", "bad", "mount a tmpfs"),
        ({"shm_writable": False}, "/dev/shm", "bad", "chmod"),
        ({"shm_total": 64 * MIB, "shm_free": 64 * MIB}, "/dev/shm", "warn", "remount"),
        ({"shm_free": 0, "container": "/.dockerenv"}, "/dev/shm", "warn", "--shm-size"),
        ({"descriptors": (1024, 4096)}, "descriptors", "warn", "ulimit -n 4096"),
        ({"descriptors": (1024, None)}, "descriptors", "warn", "ulimit -n 65536"),
        ({"descriptors": (32, 1024)}, "descriptors", "bad", "ulimit -n 1024"),
        ({"address_space": 2 * GIB}, "address space (ulimit -v)", "warn", "ulimit -v unlimited"),
        ({"file_size": 10 * MIB}, "file size (ulimit -f)", "warn", "ulimit -f unlimited"),
        ({"core_size": None}, "core files (ulimit -c)", "ok", "ulimit -c 0"),
        ({"core_size": None, "core_pattern": "|/usr/bin/apport %p"}, "core files (ulimit -c)", "ok", ""),
        ({}, "start methods", "ok", 'torchcrew.data.DataLoader(..., multiprocessing_context="zygote")'),
        ({"torch": None, "torch_threads": None}, "torch", "bad", "Install torch"),
        ({"torch": None, "torch_error": "cannot be imported", "address_space": 64 * GIB}, "torch", "bad", "ulimit -v"),
        ({"torch": "2.5.1"}, "torch", "bad", "2.6"),
        ({"usable_cores": 1.5}, "torch's threads", "warn", "torch.set_num_threads(2)"),
        ({"usable_cores": 0.5, "torch_threads": 1}, "torch's threads", "ok", ""),
        ({"omp_num_threads": "1"}, "OMP_NUM_THREADS", "warn", "unset it"),
        ({"omp_num_threads": "64"}, "OMP_NUM_THREADS", "warn", "set 8"),
        ({"omp_num_threads": "8,2"}, "OMP_NUM_THREADS", "ok", ""),
        ({"omp_num_threads": "many"}, "OMP_NUM_THREADS", "warn", "positive number"),
        ({"gpus": ("NVIDIA H200",)}, "GPUs", "warn", "without CUDA"),
        ({"gpus": ("NVIDIA H200",), "torch_cuda": "12.8"}, "GPUs", "warn", "CUDA_VISIBLE_DEVICES"),
        ({"gpus": ("NVIDIA H200",), "torch_cuda": "12.8", "cuda_devices": 1}, "GPUs", "ok", ""),
    ],
)
def test_each_trouble_has_its_verdict_and_cure(changes, name, verdict, part):
    """One fact is changed: its line, and its line only for a bad one, says so and what to do."""
    findings = diagnose(dataclasses.replace(GOOD, **changes))
    (found,) = [finding for finding in findings if finding.name == name]
    assert found.verdict == verdict
    assert part in found.advice
    assert (found.advice == "") == (part == "")
    assert [finding.name for finding in findings if finding.verdict == "bad"] == [name] * (verdict == "bad")


def test_this_machine_can_be_read():
    """Real facts are plausible, and judged without an error."""
    facts = read_facts()
    assert 1 <= facts.usable_cores <= facts.online_cores
    assert 0 < facts.memory_limit <= facts.physical_memory
    assert facts.has_memfd
    assert facts.has_pidfd
    assert facts.torch_threads >= 1
    assert "bad" not in {finding.verdict for finding in diagnose(facts)}


@pytest.mark.parametrize(
    ("file", "text", "mark"),
    [
        (".dockerenv", "", "/.dockerenv"),
        ("run/.containerenv", "", "/run/.containerenv"),
        ("proc/1/cgroup", "0::/kubepods/burstable/pod1", "kubepods in /proc/1/cgroup"),
        ("proc/1/cgroup", "0::/init.scope", None),
    ],
)
def test_containers_are_told_by_their_marks(tmp_path, monkeypatch, file, text, mark):
    """Docker, podman and Kubernetes leave different traces."""
    monkeypatch.delenv("container", raising=False)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert read_facts(tmp_path).container == mark


def test_a_root_without_anything_is_read_as_absent(tmp_path):
    """No /dev/shm and no driver are facts, not errors; a driver's GPU is named."""
    facts = read_facts(tmp_path)
    assert (facts.shm_total, facts.shm_free, facts.gpus, facts.core_pattern) == (None, None, (), "")
    information = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert read_facts(tmp_path).gpus == ("NVIDIA H200",)


def test_the_table_shows_every_finding(invoke):
    """Names and verdicts are in the table, and status 0 says that nothing is bad."""
    result = invoke("doctor", facts=dataclasses.replace(GOOD, shm_free=0))
    assert result.exit_code == 0
    assert "warn" in result.output
    for finding in diagnose(GOOD):
        assert finding.name in result.output


def test_json_is_for_machines(invoke):
    """The findings come back as they are; something bad gives status 1."""
    facts = dataclasses.replace(GOOD, torch=None)
    result = invoke("doctor", "--json", facts=facts)
    assert result.exit_code == 1
    assert [Finding(**finding) for finding in json.loads(result.output)] == diagnose(facts)


def test_options_that_do_not_exist_are_refused(invoke):
    """Status 2 and the subcommand's own usage, as for any command."""
    result = invoke("doctor", "--yaml")
    assert result.exit_code == 2
    assert "torchcrew doctor" in result.output


@pytest.mark.parametrize("name", ["run", "demo"])
def test_arguments_reach_the_subcommand_untouched(invoke, monkeypatch, name):
    """Options behind a script are the script's, a `--` is kept there, and the status comes back."""
    seen = []

    def command(words: list[str] = typer.Argument(...)) -> None:  # noqa: B008
        seen.extend(words)
        raise typer.Exit(7)

    fake = types.SimpleNamespace(
        CONTEXT_SETTINGS={"allow_interspersed_args": False, "ignore_unknown_options": True},
        **{f"{name}_command": command},
    )
    monkeypatch.setitem(sys.modules, f"torchcrew.cli.{name}", fake)
    result = invoke(name, "train.py", "--lr", "1", "--help", "--", "-x")
    assert result.exit_code == 7
    assert seen == ["train.py", "--lr", "1", "--help", "--", "-x"]


HELP = """
import sys
from torchcrew.cli import main
sys.argv = ["torchcrew", *sys.argv[1:]]
try:
    main()
finally:
    heavy = {"torch", "numpy", "torchcrew.data", "torchcrew.cli.doctor", "torchcrew.cli.run"}
    print("loaded:", *heavy.intersection(sys.modules))
"""


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_loads_nothing_heavy(option):
    """`torchcrew --help` names every subcommand without importing one of them, or torch."""
    command = [sys.executable, "-c", HELP, option]
    output = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True).stdout
    assert output.rstrip().endswith("loaded:")
    assert option == "--version" or all(name in output for name in COMMANDS)
