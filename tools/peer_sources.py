"""The test suites of other projects that we are held to: where each comes from and how it is pointed at our module.

    suite                   file of the other project                        what is replaced
    torchdata-dataloader    pytorch/data, test_dataloader.py                 its `torchdata`, by a stand-in package
    torch-multiprocessing   pytorch/pytorch, test_multiprocessing.py         its `torch.multiprocessing` ┐ as if the
    torch-spawn             pytorch/pytorch, test_multiprocessing_spawn.py   its `torch.multiprocessing` ├ import line
    cpython-METHOD          the running Python's _test_multiprocessing       its `multiprocessing`       ┘ were edited
    torch-distributed       the installed torch's own distributed_test.py    its backend `gloo`, in groups of 3, 4, 8

None of these files belongs to this repository: they are read from a checkout, an archive or the installed Python and
written to a temporary folder.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import importlib.util
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ("SUITES", "Suite", "SuiteMissing")

ROOT = Path(__file__).resolve().parent.parent
SWAP = ROOT / "tools" / "swap"
EXPECTATIONS = ROOT / "tests" / "peers"

STAND_IN = '''\
"""Stand-in for torchdata: its StatefulDataLoader is whatever class PEER_CLASS names."""
import importlib
import os

_module, _name = os.environ["PEER_CLASS"].split(":")
StatefulDataLoader = getattr(importlib.import_module(_module), _name)
'''

# What CPython's own test_multiprocessing_fork.py and its siblings consist of; some distributions leave those out.
CPYTHON = """\
from test._test_multiprocessing import install_tests_in_module_dict

install_tests_in_module_dict(globals(), {method!r})
"""


# What the suite that torch comes with says of tests for gloo alone, and of all_to_all of CPU tensors: only for MPI.
GATES = (
    ('BACKEND != "{}"', "gloo"),
    ('BACKEND == "{}"', "gloo"),
    ('require_backend_is_available({{"{}"}})', "gloo"),
    ('BACKEND != "{}"', "mpi"),
)


class SuiteMissing(ValueError):
    """Raised where a suite is not to be had; the message says what to give."""


@dataclass(frozen=True)
class Suite:
    """One suite of another project."""

    name: str
    ours: str
    """What is tested: a module, or MODULE:CLASS."""
    stock: str
    """What it stands for."""
    file: str
    """Where the other project keeps it; for CPython's, the start method."""
    project: str = ""
    """What must be given to find it; empty where the running Python has it."""
    select: str = ""
    """The part of the suite that concerns us, as pytest's ``-k`` takes it."""
    version: str = ""
    """Whose suite it is, where each version has its own."""
    seconds: float = 150.0
    """Deadline of one test: a multiple of what the slowest takes on two idle cores."""
    deviations: Mapping[str, str] = field(default_factory=dict)
    """Tests that we do not mean to pass, as patterns, with the reason."""

    @property
    def expectations(self) -> Path:
        """The file that says what stock scores."""
        return EXPECTATIONS / f"{self.name.replace('-', '_')}{self.version}.json"

    def deviation(self, test: str) -> str | None:
        """Why our result of ``test`` may differ from stock's, if it may."""
        matching = (reason for pattern, reason in self.deviations.items() if fnmatch.fnmatchcase(test, pattern))
        return next(matching, None)

    def write(self, folder: Path, source: Path | None, under_test: str) -> Path:
        """Write the suite, for ``under_test``, and what it needs below ``folder``; returns the file to collect.

        Raises:
            SuiteMissing: it is not where it should be.
        """
        path = folder / "suite" / (Path(self.file).name if self.project else f"test_{self.file}_start.py")
        _write(path, self._text(source))
        if self.name == "torchdata-dataloader":
            _write(folder / "suite" / "torchdata" / "__init__.py", "")
            _write(folder / "suite" / "torchdata" / "stateful_dataloader" / "__init__.py", STAND_IN)
        return path

    def environment(self, under_test: str) -> dict[str, str]:
        """The variables that make the suite's processes use ``under_test``."""
        if self.name == "torchdata-dataloader":
            return {"PEER_CLASS": under_test}
        consumer = Path(self.file).stem if self.project else "test._test_multiprocessing"
        return {"PEER_SWAP": "" if under_test == self.stock else f"{consumer}:{self.stock}={under_test}"}

    def _text(self, source: Path | None) -> str:
        if not self.project:
            if importlib.util.find_spec("test._test_multiprocessing") is None:
                raise SuiteMissing("this Python comes without its test suite (Debian: libpython3-testsuite)")
            return CPYTHON.format(method=self.file)
        if source is None:
            raise SuiteMissing(f"{self.name} needs a checkout (or bare repository, or .tar) of {self.project}")
        text = _read(source, self.file)
        if text is None:
            raise SuiteMissing(f"{source} holds no {self.file}: give a checkout or archive of {self.project}")
        return text


@dataclass(frozen=True)
class GroupSuite(Suite):
    """The suite of process groups that the installed torch has: what is tested is a backend."""

    ranks: int = 3
    """In each group; torch's own number for gloo is 3."""

    def write(self, folder: Path, source: Path | None, under_test: str) -> Path:
        """Write torch's file, with its gates open, and the one that makes its classes tests."""
        installed = importlib.util.find_spec("torch")
        file = Path(installed.origin).parent / self.file if installed and installed.origin else None
        if file is None or not file.is_file():
            raise SuiteMissing(f"the installed torch has no {self.file}")
        text = file.read_text()
        for gate, name in GATES:
            text = text.replace(gate.format(name), gate.format(under_test))
        _write(folder / "suite" / file.name, text)
        path = folder / "suite" / "test_distributed.py"
        _write(path, (ROOT / "tools" / "peer_distributed.py").read_text())
        return path

    def environment(self, under_test: str) -> dict[str, str]:
        """What torch's run_test.py sets; a test that hangs is ended so early that it says where."""
        return {
            "BACKEND": under_test,
            "WORLD_SIZE": str(self.ranks),
            "TEMP_DIR": tempfile.gettempdir(),  # each test makes a folder of its own
            "INIT_METHOD": "file://",
            "CUDA_VISIBLE_DEVICES": "",  # the backend is one for the CPU
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",
        }


def _read(source: Path, file: str) -> str | None:
    """The text of ``file`` in a work tree, an archive, or a repository without a work tree; None if it is not there."""
    if (source / file).is_file():
        return (source / file).read_text()
    if source.is_file():
        try:
            with tarfile.open(source) as archive:
                # Archives have one folder above everything. Reading on to the end of a big one takes a while.
                member = next((one for one in archive if one.name.partition("/")[2] == file), None)
                content = archive.extractfile(member) if member else None
                return content.read().decode() if content else None
        except tarfile.TarError:
            return None
    command = ["git", "-C", str(source), "show", f"HEAD:{file}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if shown.returncode else shown.stdout


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _torch(name: str, file: str, select: str = "", deviations: Mapping[str, str] | None = None) -> Suite:
    return Suite(
        name=name,
        ours="torchcrew.multiprocessing",
        stock="torch.multiprocessing",
        file=f"test/{file}",
        project="github.com/pytorch/pytorch, or Debian's source archive of it",
        select=select,
        deviations=deviations or {},
    )


def _cpython(method: str, select: str) -> Suite:
    return Suite(
        name=f"cpython-{method}",
        ours="torchcrew.multiprocessing",
        stock="multiprocessing",
        file=method,
        select=select,
        deviations={
            "TestStartMethod::test_get_all": "expects exactly stock's three; ours has 'zygote' beside them",
            "TestStartMethod::test_mixed_startmethod": "expects spawn to refuse a fork context's queue; ours works",
        },
        version=f"_{sys.version_info[0]}{sys.version_info[1]}",
    )


def _groups(name: str, ranks: int, select: str = "") -> GroupSuite:
    return GroupSuite(
        name=name,
        ours="crew",
        stock="gloo",
        file="testing/_internal/distributed/distributed_test.py",
        select=select,
        deviations={
            "*::test_monitored_barrier_*": "torch refuses the function for all but gloo; the texts expected are gloo's",
        },
        version="_" + "".join(importlib.metadata.version("torch").split(".")[:2]),
        ranks=ranks,
    )


_ALL = (
    Suite(
        name="torchdata-dataloader",
        ours="torchcrew.data:DataLoader",
        stock="torch.utils.data:DataLoader",
        file="test/stateful_dataloader/test_dataloader.py",
        project="github.com/pytorch/data",
    ),
    _torch("torch-multiprocessing", "test_multiprocessing.py"),
    # Its performance tests compare two of stock's own start methods, in minutes.
    _torch("torch-spawn", "test_multiprocessing_spawn.py", select="not perf"),
    # Threads are no processes, and shared_memory is not ours; the managers' server is the same for all start methods.
    _cpython("fork", select="not WithThreads and not SharedMemory"),
    _cpython("spawn", select="not WithThreads and not SharedMemory and not Manager"),
    _cpython("forkserver", select="not WithThreads and not SharedMemory and not Manager"),
    _groups("torch-distributed", 3),
    # Most tests of a subgroup want 8 ranks, some exactly 4.
    _groups("torch-distributed-4", 4, "gather_object or with_group_param"),
    _groups("torch-distributed-8", 8, "group or all_to_all"),
)

SUITES: Mapping[str, Suite] = {suite.name: suite for suite in _ALL}
