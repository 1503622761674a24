"""`torchcrew run`: a program sees what it would see under python, and its loaders run on our engine everywhere."""

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from torchcrew.cli import main; main()", "run"]
PROBE = """
import json, os, sys
seen = {name: str(value) for name, value in globals().items() if name.startswith("__") and name != "__builtins__"}
print(json.dumps(seen, sort_keys=True))
print(sys.argv, sys.path[0], sys.flags.interactive, __builtins__, sys.modules["__main__"].__dict__ is globals())
"""
ENGINE = """
import torch.utils.data.dataloader as dataloader

def engine():
    return dataloader._MultiProcessingDataLoaderIter.__module__.split(".")[0]
"""


def run(*arguments: str, cwd: Path, command: list[str] = COMMAND, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments], cwd=cwd, capture_output=True, text=True, timeout=options.pop("timeout", 60), **options
    )


def write(folder: Path, name: str, source: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.fixture
def programs(tmp_path):
    """The same probe as a script, a module, a package, a folder, an archive."""
    write(tmp_path, "probe.py", PROBE)
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/module.py", PROBE)
    write(tmp_path, "package/inner/__init__.py", "")
    write(tmp_path, "package/inner/__main__.py", PROBE)
    write(tmp_path, "folder/__main__.py", PROBE)
    subprocess.run([sys.executable, "-m", "zipfile", "-c", "a.zip", "folder/__main__.py"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["probe.py"],
        ["./probe.py", "--no-report", "-m", "--", "--help"],
        ["-m", "package.module", "--epochs", "2"],
        ["-m", "package.inner"],
        ["folder", "x"],
        ["a.zip", "x"],
    ],
    ids=" ".join,
)
def test_main_is_what_python_makes_it(programs, arguments):
    """argv, sys.path[0] and every attribute of `__main__` are the same as under python."""
    ours = run("--no-report", *arguments, cwd=programs)
    pythons = run(*arguments, cwd=programs, command=[sys.executable])
    assert without_addresses(ours.stdout) == without_addresses(pythons.stdout)
    assert ours.stderr == pythons.stderr == ""
    assert ours.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["nothing.py"], 2),
        (["-m", "nothing"], 1),
        (["-m", "package"], 1),
        (["-m", "package.nothing"], 1),
    ],
    ids=str,
)
def test_a_program_that_is_not_there(programs, arguments, status):
    """Python's message and exit status."""
    ours = run("--no-report", *arguments, cwd=programs)
    pythons = run(*arguments, cwd=programs, command=[sys.executable])
    assert ours.returncode == pythons.returncode == status
    assert ours.stderr.split(": ", 1)[1] == pythons.stderr.split(": ", 1)[1]


@pytest.mark.parametrize(
    "arguments",
    [["nosuch.py"], ["-m", "nosuch"], ["-m", "package.nosuch"], ["wrong.py"], ["-m", "broken.module"]],
    ids=str,
)
def test_no_report_where_no_program_ran(programs, arguments):
    """Not found, not compiled, or its package cannot be imported: there is nothing to tell."""
    write(programs, "wrong.py", "def f(:")
    write(programs, "broken/__init__.py", "import nothing_of_that_name")
    done = run(*arguments, cwd=programs)
    assert done.returncode != 0
    assert done.stderr
    assert "in all" not in done.stderr


def test_help_shows_one_ellipsis(tmp_path):
    """The usage line says what is typed: a script, then its arguments."""
    done = run("--help", cwd=tmp_path)
    assert "Usage: torchcrew run [OPTIONS] [SCRIPT] [ARGS]..." in done.stdout
    assert done.stdout.count("...") == 1


@pytest.mark.parametrize(("arguments", "message"), [([], "say which script"), (["-"], "standard input")])
def test_what_cannot_be_run(tmp_path, arguments, message):
    """No program, or one on standard input: status 2 and what to do."""
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit",
        "raise SystemExit(7)",
        "raise SystemExit('a message')",
        "def f():\n  raise ValueError('wrong')\ntry:\n  f()\nexcept ValueError as e:\n  raise KeyError('k') from e",
        "def f(:",
        "import nothing_of_that_name",
        "raise EOFError('end')",
        "import atexit\natexit.register(print, 'bye')\nprint('said')\n1 / 0",
        "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, a[2].tb_frame.f_code.co_name)\n1 / 0",
        "import os\nos._exit(3)",
    ],
)
def test_the_end_is_pythons(tmp_path, body):
    """Output, traceback (no frame of ours) and exit status are the same as under python."""
    write(tmp_path, "program.py", body)
    ours = run("--no-report", "program.py", cwd=tmp_path)
    pythons = run("program.py", cwd=tmp_path, command=[sys.executable])
    assert (ours.returncode, ours.stdout, ours.stderr) == (pythons.returncode, pythons.stdout, pythons.stderr)


def test_an_error_of_the_parent_package_is_shown(tmp_path):
    """What a package's __init__ raises begins, in the traceback, with the package."""
    write(tmp_path, "broken/__init__.py", "import nothing_of_that_name")
    write(tmp_path, "broken/module.py", "")
    done = run("--no-report", "-m", "broken.module", cwd=tmp_path)
    assert done.returncode == 1
    assert "No module named 'nothing_of_that_name'" in done.stderr
    assert done.stderr.splitlines()[1].strip().startswith(f'File "{tmp_path}/broken/__init__.py"')


def test_control_c_ends_the_process_by_sigint(tmp_path):
    """KeyboardInterrupt: one traceback, exit functions run, and the parent sees SIGINT."""
    write(
        tmp_path,
        "program.py",
        """
        import atexit, time
        atexit.register(print, "exit function", flush=True)
        print("ready", flush=True)
        time.sleep(30)
        """,
    )
    process = subprocess.Popen(
        [*COMMAND, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert stdout == "exit function\n"
    assert stderr.count("Traceback") == 1
    assert "KeyboardInterrupt" in stderr
    assert "cli/run" not in stderr
    assert "torchcrew" in stderr.splitlines()[-1], "the report comes last"


def test_standard_input_is_the_programs(tmp_path):
    """The program reads what is piped in."""
    write(tmp_path, "program.py", "print(input()[::-1])")
    assert run("program.py", cwd=tmp_path, input="abc\n").stdout == "cba\n"


def test_breakpoint_works(tmp_path):
    """pdb has the terminal, and shows the program's line."""
    write(tmp_path, "program.py", "x = 41\nbreakpoint()\nprint('answer', x + 1)\n")
    leader, follower = pty.openpty()
    process = subprocess.Popen([*COMMAND, "program.py"], cwd=tmp_path, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    try:
        assert "program.py(3)" in read_until(leader, "(Pdb)")
        os.write(leader, b"p x\nc\n")
        shown = read_until(leader, "in all")
        assert "41" in shown
        assert "answer 42" in shown
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait(timeout=5)
        os.close(leader)


def read_until(fd: int, text: str, seconds: float = 30) -> str:
    deadline, shown = time.monotonic() + seconds, ""
    while text not in shown and time.monotonic() < deadline:
        try:
            shown += os.read(fd, 4096).decode(errors="replace")
        except OSError:  # the other end is closed
            break
    return shown


def test_torch_is_not_imported_for_a_program_without_it(tmp_path):
    """Neither torch nor the engine is loaded; the report says so."""
    write(
        tmp_path, "program.py", "import sys\nprint([m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')])"
    )
    done = run("program.py", cwd=tmp_path)
    assert done.stdout == "[]\n"
    assert "torch was not imported" in done.stderr


def test_a_stock_loader_runs_on_our_engine_and_is_reported(tmp_path):
    """An unmodified program: its batches are right, and the report names its dataset."""
    write(
        tmp_path,
        "program.py",
        """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, i):
                return torch.full((100, 100), float(i * i))

        if __name__ == "__main__":
            loader = DataLoader(Squares(), batch_size=8, num_workers=2)
            assert [int(b[0, 0, 0]) for _ in range(2) for b in loader] == [(8 * k) ** 2 for k in range(8)] * 2
            iterator = iter(loader)
            assert len(list(iterator)) == 8
            print(type(iterator).__module__.split(".")[0])
        """,
    )
    done = run("program.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "torchcrew\n"), done.stderr
    assert re.search(r"Squares +×2 +24 ", done.stderr), done.stderr
    assert "→" in done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "method", ["spawn", *(pytest.param(method, marks=pytest.mark.faults) for method in ("fork", "forkserver"))]
)
def test_children_run_on_our_engine(tmp_path, method):
    """A child of any start method finds the engine installed, and its own `__main__` by the program's path."""
    write(
        tmp_path,
        "program.py",
        f"""
        import multiprocessing, os, sys
        {textwrap.indent(ENGINE, " " * 8).strip()}

        class Answer:
            pass

        def child(connection):
            connection.send((engine(), Answer, [p for p in sys.path if "run_site" in p]))

        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(theirs,))
            process.start()
            assert ours.poll(60)
            name, kind, paths = ours.recv()
            process.join(30)
            print(engine(), name, kind is Answer, paths)
        """,
    )
    done = run("--no-report", "program.py", cwd=tmp_path, timeout=100)
    assert done.stdout == "torchcrew torchcrew True []\n", done.stderr
    assert done.stderr == ""


@pytest.mark.timeout(60)
def test_a_python_subprocess_runs_on_our_engine(tmp_path):
    """``subprocess`` calls of Python are reached through the environment."""
    write(tmp_path, "inner.py", f"{ENGINE}\nprint(engine())")
    write(tmp_path, "program.py", "import subprocess, sys\nsubprocess.run([sys.executable, 'inner.py'], check=True)")
    done = run("--no-report", "program.py", cwd=tmp_path)
    assert done.stdout == "torchcrew\n", done.stderr


def test_a_childs_own_sitecustomize_still_runs(tmp_path):
    """Ours steps aside: the environment's sitecustomize is imported, under its name, and no trace of ours is left."""
    write(tmp_path, "site/sitecustomize.py", "value = 'the real one'")
    write(
        tmp_path,
        "program.py",
        """
        import subprocess, sys
        code = "import sys, sitecustomize as s; print(s.value, [p for p in sys.path if 'run_site' in p])"
        subprocess.run([sys.executable, "-c", code], check=True)
        """,
    )
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    done = run("--no-report", "program.py", cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.stdout == "the real one []\n", done.stderr


def test_a_child_without_torchcrew_starts_as_ever(tmp_path):
    """An isolated child, or one of an environment without torchcrew, is not disturbed."""
    absent = "import os, sys; sys.modules['torchcrew'] = None; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'"
    code = f"{absent}; import torch.utils.data; print('fine')"
    write(
        tmp_path,
        "program.py",
        f"""
        import subprocess, sys
        subprocess.run([sys.executable, "-c", {code!r}], check=True)
        subprocess.run([sys.executable, "-I", "-c", "print('isolated')"], check=True)
        """,
    )
    done = run("--no-report", "program.py", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("fine\nisolated\n", "")


def test_a_forked_child_that_exits_like_a_program_prints_no_report(tmp_path):
    """One program, one report."""
    write(tmp_path, "program.py", "import os, sys\nif os.fork() == 0:\n    sys.exit()\nos.wait()")
    done = run("program.py", cwd=tmp_path)
    assert done.stderr.count("in all") == 1


OURS = """
import torch.multiprocessing as mp

def whose():
    return mp.get_context("spawn").Process.__module__.split(".")[0]
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "method", ["zygote", *(pytest.param(name, marks=pytest.mark.faults) for name in ("fork", "spawn", "forkserver"))]
)
def test_processes_are_ours(tmp_path, method):
    """`torch.multiprocessing` of an unmodified program and of its children; who starts them shows in the parent."""
    write(
        tmp_path,
        "program.py",
        f"""
        {textwrap.indent(OURS, " " * 8).strip()}

        def child(name):
            print(whose(), mp.get_start_method(), mp.current_process().name, flush=True)

        if __name__ == "__main__":
            mp.set_start_method({method!r})
            process = mp.Process(target=child, args=(1,), name="a child")
            process.start()
            process.join(60)
            print(whose(), process.exitcode, type(process._popen).__module__)
        """,
    )
    done = run("--no-report", "program.py", cwd=tmp_path, timeout=100)
    assert done.stdout == f"torchcrew {method} a child\ntorchcrew 0 torchcrew.multiprocessing.popen\n", done.stderr
    assert done.stderr == ""


@pytest.mark.faults
@pytest.mark.timeout(60)
def test_processes_of_a_python_subprocess_are_ours(tmp_path):
    """The environment carries it there."""
    write(tmp_path, "inner.py", f"{OURS}\nprint(whose())")
    write(tmp_path, "program.py", "import subprocess, sys\nsubprocess.run([sys.executable, 'inner.py'], check=True)")
    assert run("--no-report", "program.py", cwd=tmp_path).stdout == "torchcrew\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.faults)])
def test_a_stock_loaders_workers_come_from_the_zygote(tmp_path, method):
    """Also where the program asks for spawn; what they see is spawn's."""
    write(
        tmp_path,
        "program.py",
        f"""
        import multiprocessing
        from torch.utils.data import DataLoader, get_worker_info

        class Methods:
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return multiprocessing.get_start_method()

        if __name__ == "__main__":
            iterator = iter(DataLoader(Methods(), num_workers=2, multiprocessing_context={method!r}))
            kinds = {{type(worker._popen).__name__.removesuffix("ForkServer") for worker in iterator._workers}}
            print(kinds, set(sum(map(tuple, iterator), ())))
        """,
    )
    done = run("--no-report", "program.py", cwd=tmp_path)
    name = "ServedSpawn" if method == "spawn" else "Served"
    assert done.stdout == f"{{{name!r}}} {{{method!r}}}\n", done.stderr
    assert done.stderr == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.faults), "zygote"])
def test_the_start_method_of_a_program_that_sets_none(tmp_path, method):
    """In it, in its children, in a Python that it starts, and for the standard library."""
    write(
        tmp_path,
        "inner.py",
        "import multiprocessing, torch.multiprocessing as mp\nprint(multiprocessing.get_start_method())\n"
        "print(mp.get_start_method())",
    )
    write(
        tmp_path,
        "program.py",
        """
        import multiprocessing, subprocess, sys
        import torch.multiprocessing as mp

        def child():
            print(mp.get_start_method(), flush=True)

        if __name__ == "__main__":
            print(mp.get_start_method(allow_none=True), multiprocessing.get_start_method(allow_none=True), flush=True)
            process = mp.Process(target=child)
            process.start()
            process.join(40)
            print(mp.get_start_method(), multiprocessing.get_start_method(), process.exitcode, flush=True)
            subprocess.run([sys.executable, "inner.py"], check=True)
        """,
    )
    done = run("--no-report", "--start-method", method, "program.py", cwd=tmp_path)
    assert done.stdout.splitlines() == ["None None", method, f"{method} {method} 0", method, method], done.stderr
    assert done.stderr == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "call",
    ["set_start_method('spawn')", pytest.param("set_start_method('spawn', force=True)", marks=pytest.mark.faults)],
)
def test_the_program_sets_its_start_method_as_ever(tmp_path, call):
    """As if --start-method had not been given; a second time is refused as ever."""
    write(
        tmp_path,
        "program.py",
        f"""
        import torch.multiprocessing as mp
        mp.{call}
        print(mp.get_start_method())
        try:
            mp.set_start_method("fork")
        except RuntimeError as error:
            print(error)
        """,
    )
    done = run("--no-report", "--start-method", "zygote", "program.py", cwd=tmp_path)
    assert done.stdout == "spawn\ncontext has already been set\n", done.stderr


def test_a_start_method_that_does_not_exist(tmp_path):
    """Status 2, and which there are."""
    write(tmp_path, "program.py", "print('ran')")
    done = run("--start-method", "thread", "program.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'thread', but should be fork, spawn, forkserver or zygote" in done.stderr
    assert "in all" not in done.stderr


def test_torch_is_not_imported_for_a_start_method(tmp_path):
    """Nor is anything started."""
    write(tmp_path, "program.py", "import sys\nprint('torch' in sys.modules)")
    done = run("--no-report", "--start-method", "zygote", "program.py", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.timeout(60)
def test_a_failed_child_is_named_before_the_report(tmp_path):
    """The program ends with status 0 although its children died: one line says so."""
    write(
        tmp_path,
        "program.py",
        """
        import torch.multiprocessing as mp

        def train(rank):
            raise SystemExit(rank)

        if __name__ == "__main__":
            processes = [mp.Process(target=train, args=(rank,)) for rank in range(3)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        """,
    )
    done = run("--start-method", "spawn", "program.py", cwd=tmp_path)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    (notice,) = [n for n, line in enumerate(lines) if "nothing looked at the exit code" in line]
    assert re.search(r"2 child processes failed.*Process-2 \(pid \d+, exit code 1\), \w*-3 \(pid", lines[notice])
    assert any("in all" in line for line in lines[notice:])
