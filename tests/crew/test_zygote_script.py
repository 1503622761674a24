"""Programs that use the start method "zygote": their script is imported once, and acts as if it were spawned."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.crew.programs import SOURCE, script, survivors
from torchcrew.crew.zygote_script import Words, was_only_drawn_from

pytestmark = pytest.mark.timeout(90)


def test_a_changed_module_is_imported_anew(tmp_path: Path) -> None:
    """An edit between two starts reaches the second, in the script's imports and in the preloads."""
    (tmp_path / "mine.py").write_text("value = 1\n")
    (tmp_path / "preloaded.py").write_text("value = 1\n")
    done = script(
        tmp_path,
        """
        import time
        from pathlib import Path
        import mine
        from torchcrew.crew import zygote

        def show():
            import preloaded
            print(mine.value, preloaded.value, flush=True)

        if __name__ == "__main__":
            zygote.preload("preloaded")
            ctx = zygote.get_context()
            for text in ("", "mine.py", "preloaded.py"):
                if text:
                    time.sleep(0.6)
                    Path(__file__).with_name(text).write_text("value = 22\\n")
                process = ctx.Process(target=show)
                process.start()
                process.join(30)
        """,
    )
    assert (done.stdout.split(), done.stderr) == (["1", "1", "22", "1", "22", "22"], "")


#: What a script does when imported, and what `explain` then says.
MAINS = {
    "plain": ("", "with the script imported"),
    "threads": (
        "import threading\nthreading.Thread(target=lambda: __import__('time').sleep(3), daemon=True).start()",
        "threads",
    ),
    "parallel region": ("import torch\na = torch.ones(600, 600)\n(a + a).exp_(); a @ a", "threads|with the script"),
    "an open file": ("f = open(__file__)", "files"),
    "a lock": ("import multiprocessing\nlock = multiprocessing.get_context('spawn').Lock()", "files|multiprocessing"),
    "a print": ("print('importing', flush=True)", "output"),
    "a seed": ("import random\nrandom.seed(1)", "seeded"),
    "settings": (
        """
import torch
a = torch.ones(3) * 2
torch.manual_seed(0)
torch.set_num_threads(1)
os.environ['MINE'] = 'x'
os.chdir('/')
signal.signal(signal.SIGUSR1, print)
""",
        "with the script imported",
    ),
}


#: Costly, and near enough to one of the others or to another test of this file.
RARE = ("parallel region", "a lock", "a print", "a seed", "settings")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.faults if kind in RARE else ()) for kind in MAINS]
)
def test_a_script_acts_as_under_spawn(tmp_path: Path, kind: str) -> None:
    """Whatever a script does when imported, its processes see what they see under spawn, and none hangs."""
    text, explanation = MAINS[kind]
    program = f"""
import random, signal, sys, os, time
{text}
state = [0]

def show():
    import torch

    state[0] += 1
    b = torch.ones(600, 600)
    (b + b).exp_(); b @ b
    print(__name__, state, random.random() if {kind!r} == "a seed" else 0, os.environ.get("MINE"), os.getcwd(),
          torch.get_num_threads(), torch.initial_seed() if {kind!r} == "settings" else 0,
          str(signal.getsignal(signal.SIGUSR1)), flush=True)

if __name__ == "__main__":
    import multiprocessing
    from torchcrew.crew import zygote
    method = os.environ["METHOD"]
    ctx = zygote.get_context() if method == "zygote" else multiprocessing.get_context(method)
    state[0] = 100
    for _ in range(2 if method == "zygote" else 1):
        print("start", flush=True)
        process = ctx.Process(target=show)
        process.start()
        process.join(30)
        assert process.exitcode == 0, process.exitcode
    if method == "zygote":
        print(zygote.explain(), file=sys.stderr)
"""
    stock = script(tmp_path, program, METHOD="spawn")
    ours = script(tmp_path, program, METHOD="zygote")
    before, start, one = stock.stdout.partition("start\n")
    assert one
    assert ours.stdout == before + 2 * (start + one)
    assert ours.returncode == 0, ours.stderr
    assert any(part in ours.stderr for part in explanation.split("|")), ours.stderr


DRAWS = """
import random, sys
import numpy, torch
{text}

def show():
    print(repr(random.random()), repr(float(numpy.random.rand())), repr(float(torch.rand((), dtype=torch.float64))),
          flush=True)

if __name__ == "__main__":
    from torchcrew.crew import zygote
    for _ in range(3):
        process = zygote.get_context().Process(target=show)
        process.start()
        process.join(30)
    print(zygote.explain())
"""


def test_a_script_that_draws_random_numbers_is_imported_beforehand(tmp_path: Path) -> None:
    """As rich does when imported; the generators of its processes start anew, each its own, as in spawned ones."""
    text = "for _ in range(5000):\n    random.gauss(0, 1), numpy.random.randn(), torch.rand(())"
    done = script(tmp_path, DRAWS.format(text=text))
    *lines, explanation = done.stdout.splitlines()
    assert "with the script imported" in explanation
    assert [len(set(column)) for column in zip(*(line.split() for line in lines), strict=True)] == [3, 3, 3]


def seeded_draws() -> list[float]:
    """First draws of Python's, numpy's and torch's generators when seeded with 1."""
    torchs = torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [random.Random(1).random(), float(np.random.RandomState(1).rand()), float(torchs)]


@pytest.mark.parametrize(
    ("which", "text", "explanation"),
    [
        pytest.param(0, "random.seed(1)", "it seeded random generators", marks=pytest.mark.faults),
        pytest.param(
            *(0, "state = random.Random(1).getstate()\nrandom.setstate(state)", "it seeded random generators"),
            marks=pytest.mark.faults,
        ),
        (1, "numpy.random.seed(1)", "it seeded random generators"),
        pytest.param(2, "torch.manual_seed(1)", "with the script imported", marks=pytest.mark.faults),
    ],
    ids=["random", "setstate", "numpy", "torch"],
)
def test_a_script_that_seeds_seeds_every_process(tmp_path: Path, which: int, text: str, explanation: str) -> None:
    """All its processes draw what the seed says, as spawned ones do; only torch's seed outlives a fork."""
    done = script(tmp_path, DRAWS.format(text=text))
    *lines, last = done.stdout.splitlines()
    assert explanation in last
    columns = list(zip(*(map(float, line.split()) for line in lines), strict=True))
    assert columns[which] == (seeded_draws()[which],) * 3
    assert [len(set(column)) for k, column in enumerate(columns) if k != which] == [3, 3]


def words(generator: random.Random) -> Words:
    return generator.getstate()[1][:-1]


@pytest.mark.parametrize("draws", [0, 1, 623, 624, 625, 10_000, 600_000])
def test_drawing_is_told_from_seeding(draws: int) -> None:
    """Also where it took place right after the import's beginning, or the generator is put back afterwards."""
    for seed in range(3):
        generator = random.Random(seed)
        before = words(generator)
        for _ in range(draws):
            generator.getrandbits(32)
        assert was_only_drawn_from(before, words(generator))
        generator.seed(seed + 100)
        assert not was_only_drawn_from(before, words(generator))


def test_numpys_generator_is_followed_too() -> None:
    """It is the same machine."""
    generator = np.random.RandomState(5)
    before = tuple(generator.get_state(legacy=False)["state"]["key"].tolist())
    generator.rand(1000)
    assert was_only_drawn_from(before, tuple(generator.get_state(legacy=False)["state"]["key"].tolist()))
    generator.seed(5)
    generator.rand(1)
    assert was_only_drawn_from(before, tuple(generator.get_state(legacy=False)["state"]["key"].tolist()))
    generator.seed(6)
    assert not was_only_drawn_from(before, tuple(generator.get_state(legacy=False)["state"]["key"].tolist()))
    assert not was_only_drawn_from(None, before)
    assert not was_only_drawn_from(before, ())


def test_a_script_without_a_main_guard_gets_stocks_message(tmp_path: Path) -> None:
    """The same text and exit code as under spawn."""
    program = """
import multiprocessing, os
from torchcrew.crew import zygote
ctx = zygote.get_context() if os.environ["METHOD"] == "zygote" else multiprocessing.get_context("spawn")
process = ctx.Process(target=print)
process.start()
process.join()
print("exit code", process.exitcode)
"""
    ours, stock = (script(tmp_path, program, METHOD=method) for method in ("zygote", "spawn"))
    assert ours.stdout == stock.stdout == "exit code 1\n"
    assert ours.stderr[ours.stderr.index("RuntimeError:") :] == stock.stderr[stock.stderr.index("RuntimeError:") :]


def test_other_ways_to_run_a_program(tmp_path: Path) -> None:
    """`python -m` and `python -c` start processes as under spawn."""
    (tmp_path / "module.py").write_text(
        "import sys\nfrom torchcrew.crew import zygote\n"
        "def f():\n    print(__name__, sys.argv[1:], flush=True)\n"
        "if __name__ == '__main__':\n"
        "    p = zygote.get_context().Process(target=f); p.start(); p.join(30); print(p.exitcode, zygote.explain())\n"
    )
    inline = (
        "import os; from torchcrew.crew import zygote; "
        "p = zygote.get_context().Process(target=os.write, args=(1, b'hello ')); p.start(); p.join(30); "
        "print(p.exitcode)"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}

    def output(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=40,
            check=True,
        ).stdout

    assert output("-m", "module", "x") == "__mp_main__ ['x']\n0 processes are forked with the script imported\n"
    assert output("-c", inline) == "hello 0\n"


def test_a_rank_in_the_environment_is_seen_by_the_scripts_import(tmp_path: Path) -> None:
    """A script that reads its environment when imported sees each process's own."""
    done = script(
        tmp_path,
        """
        import os
        from torchcrew.crew import zygote
        RANK = os.environ.get("RANK")

        def show():
            print(RANK, flush=True)

        if __name__ == "__main__":
            for rank in ("0", "1", "2", "2", "2", "0"):
                os.environ["RANK"] = rank
                process = zygote.get_context().Process(target=show)
                process.start()
                process.join(30)
        """,
    )
    assert (done.stdout.split(), done.stderr) == (["0", "1", "2", "2", "2", "0"], "")


def test_at_exit_handlers_run_and_output_is_flushed(tmp_path: Path) -> None:
    """A process ends as a spawned one, not by a bare `_exit`."""
    done = script(
        tmp_path,
        """
        import atexit, sys
        from torchcrew.crew import zygote

        def work():
            atexit.register(lambda: print("bye"))
            sys.stdout.write("unflushed ")

        if __name__ == "__main__":
            process = zygote.get_context().Process(target=work)
            process.start()
            process.join(30)
        """,
    )
    assert (done.stdout, done.stderr) == ("unflushed bye\n", "")


def test_warm_returns_at_once_and_nothing_outlives_the_program(tmp_path: Path) -> None:
    """A program that only warmed the zygote ends at once, and who reads its output gets the end."""
    done = script(
        tmp_path,
        """
        import time
        from torchcrew.crew import zygote

        if __name__ == "__main__":
            start = time.monotonic()
            zygote.warm()
            print(time.monotonic() - start < 0.5, *zygote.pids())
        """,
    )
    quick, *pids = done.stdout.split()
    assert quick == "True"
    assert pids
    assert survivors(map(int, pids), 1.0) == []


def test_a_forked_child_makes_its_own_zygote(tmp_path: Path) -> None:
    """A fork does not use its parent's."""
    done = script(
        tmp_path,
        """
        import os, time
        from torchcrew.crew import zygote

        def start():
            process = zygote.get_context().Process(target=time.sleep, args=(0,))
            process.start()
            process.join(30)
            return process.exitcode

        if __name__ == "__main__":
            print(start(), flush=True)
            before = zygote.pids()
            pid = os.fork()
            if pid == 0:
                assert zygote.pids() == ()
                print(start(), flush=True)
                assert not set(zygote.pids()) & set(before)
                os._exit(0)
            print(os.waitpid(pid, 0)[1], start(), flush=True)
            assert zygote.pids() == before
        """,
    )
    assert (done.stdout.split(), done.stderr) == (["0", "0", "0", "0"], "")
