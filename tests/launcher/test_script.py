"""What a rank runs for `torchcrew launch`: python's `__main__`, and what its ends mean."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchcrew.crew.foresight import TRAINING, imports_of_program
from torchcrew.launcher.script import Script, ScriptFailed

PROGRAMS = Path(__file__).parent / "programs"
CALL = "import sys; from torchcrew.launcher.script import Script; Script(sys.argv[1], ('a', '--b'), {module})()"


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=15)


@pytest.fixture
def folder(tmp_path):
    """The probe as a script, as a module, and as a package."""
    text = (PROGRAMS / "probe.py").read_text()
    for name in ("probe.py", "package/__init__.py", "package/module.py", "package/__main__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if name.endswith("__init__.py") else text)
    return tmp_path


@pytest.mark.parametrize("name", ["probe.py", "package.module", "package", "./package"])
def test_the_program_sees_what_it_would_under_python(folder, name):
    """Names of `__main__`, arguments, the first folder of the path, pickling of its classes."""
    module = "/" not in name and not name.endswith(".py")
    ours = python("-c", CALL.format(module=module), name, cwd=folder)
    pythons = python(*["-m"][: int(module)], name, "a", "--b", cwd=folder)
    assert (ours.returncode, ours.stderr) == (pythons.returncode, pythons.stderr) == (0, "")
    seen, expected = json.loads(ours.stdout), json.loads(pythons.stdout)
    for each in (seen, expected):
        each["names"]["__loader__"] = each["names"]["__loader__"].split(" object at")[0]
        each["names"]["__spec__"] = each["names"]["__spec__"].split("loader=")[0]
    assert seen == expected
    assert seen["main"]
    assert seen["pickles"]


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("3", 3, "sys.exit(3)"),
        ("-1", 255, "sys.exit(-1)"),
        ("257", 1, "sys.exit(257)"),
        ("'no such model'", 1, "no such model"),
        ("[1]", 1, "[1]"),
    ],
)
def test_an_exit_that_is_no_success(tmp_path, monkeypatch, code, status, message):
    """`sys.exit` as the interpreter takes it: its status, or its message and 1."""
    failed = error_of(f"import sys; sys.exit({code})", tmp_path, monkeypatch)
    assert failed.status == status
    assert message in str(failed)


@pytest.mark.parametrize("code", ["", "0", "None", "256", "False"])
def test_an_exit_that_is_success(tmp_path, monkeypatch, code):
    """It returns as if the script had ended at its last line."""
    assert error_of(f"import sys; sys.exit({code})", tmp_path, monkeypatch) is None


def test_a_script_that_is_not_there(tmp_path, monkeypatch):
    """Python's words and status."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(ScriptFailed, match="can't open file") as caught:
        Script(str(tmp_path / "nosuch.py"))()
    assert caught.value.status == 2
    with pytest.raises(ScriptFailed, match="No module named no_such_module") as caught:
        Script("no_such_module", module=True)()
    assert caught.value.status == 1


def test_what_it_raises_comes_out_and_its_main_stays(tmp_path, monkeypatch):
    """Also a BaseException; the module in which it happened is still there for the processes it has started."""
    error = error_of("class Own(BaseException): pass\nraise Own('x')", tmp_path, monkeypatch, keep=True)
    assert type(error) is sys.modules["__main__"].Own
    assert sys.modules["__main__"].__file__ == str(tmp_path / "program.py")


def test_its_threads_are_waited_for(tmp_path, monkeypatch):
    """A thread that writes the last checkpoint is given the time; a daemon is not."""
    source = f"""
        import threading, time
        def save():
            time.sleep(0.2)
            open({str(tmp_path / "saved")!r}, "w").close()
        stop = threading.Event()
        threading.Thread(target=save).start()
        threading.Thread(target=stop.wait, args=(5,), daemon=True).start()
    """
    assert error_of(source, tmp_path, monkeypatch, keep=True) is None
    assert (tmp_path / "saved").exists()
    main = sys.modules["__main__"]
    main.stop.set()


def error_of(source, tmp_path, monkeypatch, keep=False):
    """What running a program in this process raises."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(source))
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    try:
        Script(str(path))()
    except BaseException as error:
        return error
    return None


def test_the_text_of_a_program_tells_what_its_ranks_will_import(tmp_path, monkeypatch):
    """A script, a folder, a module, a package; nothing is imported to find out."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "trains").mkdir()
    for name in ("trains/__init__.py", "trains/__main__.py", "trains/step.py", "plain.py"):
        text = "raise SystemExit" if name in ("trains/__init__.py", "plain.py") else "from torch import optim"
        (tmp_path / name).write_text(text)
    expected = (TRAINING,)
    assert imports_of_program(str(tmp_path / "trains")) == expected
    assert imports_of_program(str(tmp_path / "trains/step.py")) == expected
    assert imports_of_program("trains", module=True) == imports_of_program("trains.step", module=True) == expected
    assert imports_of_program(str(tmp_path / "plain.py")) == imports_of_program("plain", module=True) == ()
    assert imports_of_program("nosuch.py") == imports_of_program("no.such", module=True) == ()
