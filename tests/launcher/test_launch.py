"""`launch`: what goes in and comes out, the process group, where a program may call it from, and when it gives up."""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import operator
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import torchcrew
import torchcrew.multiprocessing as mp
from tests.crew.programs import SOURCE, survivors
from tests.launcher import launch_cases as cases
from torchcrew.crew import zygote
from torchcrew.errors import RankFailed, RanksStuck

pytestmark = pytest.mark.timeout(60)
PROGRAMS = Path(__file__).with_name("programs")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCE), str(SOURCE.parent)))}


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


@pytest.fixture(scope="module")
def crew() -> Iterator[torchcrew.Crew]:
    """Warm ranks, for what is not about their start."""
    with torchcrew.Crew(2) as ranks:
        ranks.run(cases.nothing)
        yield ranks


def echoed(crew: torchcrew.Crew, value: Any) -> Any:
    """A value that has been to a rank and back."""
    first, second = crew.run(cases.the_same, value)
    assert type(first) is type(second)
    return first


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_values_come_by_rank(ranks: int) -> None:
    """One for each, in their order."""
    assert torchcrew.launch(cases.who, nprocs=ranks) == [(rank, rank, ranks) for rank in range(ranks)]


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_tensors_of_every_type(crew: torchcrew.Crew) -> None:
    """Bit for bit, and their shapes."""
    for dtype in DTYPES:
        for shape in ((), (0,), (3, 0, 2), (2, 3)):
            bits = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
            value = bits.view(dtype).reshape(shape)
            back = echoed(crew, value)
            assert (back.dtype, back.shape) == (dtype, torch.Size(shape))
            assert back.contiguous().reshape(-1).view(torch.uint8).tolist() == bits.tolist()
            assert not back.is_shared()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_tensors_of_every_kind(crew: torchcrew.Crew) -> None:
    """Views, gradients, parameters, sparse and quantized ones."""
    base = torch.arange(24.0).reshape(4, 6)
    for value in (
        base[1:3, ::2],
        base.t(),
        torch.ones(1).expand(5),
        base[0, 0],
        base.to_sparse(),
        base.to_sparse_csr(),
    ):
        back = echoed(crew, value)
        assert back.layout is value.layout
        assert torch.equal(back.to_dense(), value.to_dense())
    assert echoed(crew, torch.ones(2, requires_grad=True)).requires_grad
    assert not echoed(crew, torch.ones(2)).requires_grad
    parameter = echoed(crew, torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert type(parameter) is torch.nn.Parameter
    assert not parameter.requires_grad
    with pytest.raises(RuntimeError, match="non-leaf"):
        crew.run(cases.the_same, torch.ones(2, requires_grad=True) * 2)


@pytest.mark.parametrize(
    "value",
    [
        None,
        (),
        0,
        "ä\0\ud800",
        b"bytes",
        float("inf"),
        {"nested": [{1, 2}, (None, ...)]},
        NotImplemented,
        len,
        int,
        cases.Squares,
        torch.float32,
        torch.device("cpu"),
        torch.Size([1, 2]),
        Path("here"),
        Exception("a value like any other"),
    ],
    ids=repr,
)
def test_what_is_no_tensor(crew: torchcrew.Crew, value: Any) -> None:
    """Comes back as what it was."""
    back = echoed(crew, value)
    assert back is value or back == value or (type(back) is Exception and back.args == value.args)


def test_arrays(crew: torchcrew.Crew) -> None:
    """Writable ones, whatever they were."""
    for value in (np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((3, 4))), np.array(["a", "bc"]), np.float32(3)):
        back = echoed(crew, value)
        assert back.dtype == value.dtype
        assert np.array_equal(back, value)
    frozen = np.arange(3)
    frozen.flags.writeable = False
    assert echoed(crew, frozen).flags.writeable
    assert echoed(crew, np.array([{"any": 1}, None], dtype=object)).tolist() == [{"any": 1}, None]


def test_views_stay_views(crew: torchcrew.Crew) -> None:
    """Within one message, on the way there and back."""
    whole = torch.zeros(4)
    assert crew.run(cases.sum_of_view, [whole, whole[1:]]) == [21.0] * 2
    assert whole.sum() == 0
    back = echoed(crew, [whole, whole[1:]])
    back[1].fill_(1)
    assert back[0].tolist() == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("count", [1, 10_000, 25_000_000])
def test_every_rank_has_a_copy_of_its_own(crew: torchcrew.Crew, count: int) -> None:
    """What it writes into an argument no other rank sees, nor this process: also where 100 MB travel."""
    value = torch.zeros(count)
    for rank, back in enumerate(crew.run(cases.fill_with_rank, value)):
        assert back.min() == back.max() == rank + 1
    assert value.max() == 0


def test_shared_tensors_are_the_same_memory(crew: torchcrew.Crew) -> None:
    """What ranks write there, this process reads."""
    value = torch.zeros(2).share_memory_()
    crew.run(cases.add_rank, value)
    crew.run(cases.add_rank, value)
    assert value.tolist() == [2.0, 4.0]
    back = echoed(crew, value)
    assert back.is_shared()
    back.fill_(7)
    assert value.tolist() == [7.0, 7.0]


def test_a_shared_model(crew: torchcrew.Crew) -> None:
    """Its parameters are one for all, as hogwild wants it."""
    model = torch.nn.Linear(2, 1, bias=False)
    model.share_memory()

    def write(model: torch.nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters())[0, torchcrew.rank()] = torchcrew.rank() + 5

    crew.run(write, model)
    assert model.weight.tolist() == [[5.0, 6.0]]


@pytest.mark.parametrize("method", ["zygote", "fork", pytest.param("spawn", marks=pytest.mark.faults)])
def test_a_value_that_cannot_be_sent(method: Any) -> None:
    """Pickle's own error, from the rank, as the failure of that rank."""
    with pytest.raises(TypeError, match="cannot pickle 'generator' object") as caught:
        torchcrew.launch(cases.generator, nprocs=2, start_method=method)
    assert isinstance(caught.value.__cause__, RankFailed)
    with pytest.raises(TypeError, match="cannot pickle 'generator' object"):
        torchcrew.launch(cases.numbers, nprocs=1, start_method=method)


# Functions ------------------------------------------------------------------------------------------------------------


def outer_function(value: int) -> Any:
    def inner(more: int) -> int:
        return value + more + torchcrew.rank()

    return inner


@pytest.mark.parametrize("method", ["zygote", "spawn", "fork", "forkserver"])
def test_every_function(method: Any) -> None:
    """By every start method: what has a name, and what has none."""
    factor = 3
    wanted: list[tuple[Any, tuple[Any, ...], list[Any]]] = [
        (cases.Scale(2), (4,), [8, 8]),
        (cases.Scale(2).method, (4,), [8, 9]),
        (cases.Scale.static, (4,), [4, 5]),
        (functools.partial(cases.Scale.static, 4), (), [4, 5]),
        (functools.partial(operator.mul, 3), (4,), [12, 12]),
        (lambda value: factor * value + torchcrew.rank(), (4,), [12, 13]),
        (outer_function(1), (2,), [3, 4]),
        (functools.partial(lambda a, b: a - b + torchcrew.rank(), b=1), (1,), [0, 1]),
        (max, (3, 4), [4, 4]),
        (torch.Tensor.item, (torch.tensor(3),), [3, 3]),
        (dict, (), [{}, {}]),
    ]
    with torchcrew.Crew(2, start_method=method) as crew:
        for fn, args, values in wanted:
            assert crew.run(fn, *args) == values
        made = crew.run(cases.Scale.made, 3)
        assert all(type(one) is cases.Scale for one in made)


def test_values_of_local_classes(crew: torchcrew.Crew) -> None:
    """A class that goes by value comes back as itself."""

    class Local:
        def __init__(self, number: int) -> None:
            self.number = number

    back = crew.run(lambda: Local(torchcrew.rank()))
    assert [one.number for one in back] == [0, 1]
    assert [type(one) for one in back] == [Local, Local]


def test_arguments_by_name(crew: torchcrew.Crew) -> None:
    """All of a crew's are the function's; `launch` keeps its own, and a `partial` brings others with these names."""
    own = {"nprocs": 7, "timeout": None, "env": {}, "logs": "x", "restarts": 2, "backend": "b", "host": 1}
    assert crew.run(cases.echo, 1, **own) == [((1,), own)] * 2
    assert torchcrew.launch(cases.echo, 1, nprocs=1, name=2) == [((1,), {"name": 2})]
    assert torchcrew.launch(functools.partial(cases.echo, nprocs=7), nprocs=1) == [((), {"nprocs": 7})]


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torchcrew", "drop-in", "drop-in simple", "stock spawn", "stock simple"])
def test_queues(crew: torchcrew.Crew, kind: str) -> None:
    """Ours and stock's, given to a warm crew, which stock's may only be while a process starts."""
    context: Any = mp.get_context("spawn") if kind.startswith("drop-in") else multiprocessing.get_context("spawn")
    queue = torchcrew.Queue() if kind == "torchcrew" else context.SimpleQueue() if "simple" in kind else context.Queue()
    crew.run(put_on_main_thread if kind == "drop-in" else cases.put_rank, queue)
    got = sorted((queue.get() for _ in range(2)), key=operator.itemgetter(0))
    assert [(rank, tensor.tolist()) for rank, tensor in got] == [(0, [0] * 3), (1, [1] * 3)]
    queue.close()
    if hasattr(queue, "join_thread"):
        queue.join_thread()
    del got
    gc.collect()


def put_on_main_thread(queue: Any) -> None:
    cases.put_rank(queue)


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_synchronisation(crew: torchcrew.Crew, library: str) -> None:
    """`Value`, `Lock`, `Event` and a pipe's end."""
    context: Any = mp.get_context("spawn") if library == "ours" else multiprocessing.get_context("spawn")
    value, lock, event = context.Value("i", 0), context.Lock(), context.Event()
    ours, theirs = context.Pipe()
    event.set()
    with ours, theirs:
        assert crew.run(cases.with_synchronisation, value, lock, event, theirs) == [True, True]
        assert ours.recv() == "from rank 0"
    assert value.value == 200


def test_a_pipe_of_ours(crew: torchcrew.Crew) -> None:
    """`torchcrew.Pipe`, whose messages are snapshots."""
    ours, theirs = torchcrew.Pipe()

    def send(end: Any) -> None:
        if torchcrew.rank() == 1:
            end.send(torch.ones(3))

    crew.run(send, theirs)
    assert ours.recv().tolist() == [1.0] * 3
    ours.close()
    theirs.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders(workers: int) -> None:
    """Datasets and loaders, with processes of their own in the ranks."""
    loader = DataLoader(cases.Squares(10), batch_size=4, num_workers=workers)
    assert torchcrew.launch(cases.sum_of_loader, loader, nprocs=2) == [285, 285]


def test_shared_lists_and_models(crew: torchcrew.Crew) -> None:
    """One list for all, and a model for each."""
    items = torchcrew.SharedList(["zero", {"one": 1}, None])
    assert crew.run(cases.shared_list, items) == [(3, "zero"), (3, {"one": 1})]
    model = torch.nn.Linear(2, 1)
    back = echoed(crew, model)
    assert torch.equal(back.weight, model.weight)


# The process group ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["crew", "gloo"])
def test_collectives(name: str) -> None:
    """All at once, of three ranks."""
    found = torchcrew.launch(cases.collectives, nprocs=3, backend="auto" if name == "crew" else name)
    for rank, (total, objects, gathered, backend) in enumerate(found):
        assert total == 6.0
        assert objects == [{"from": 1}]
        assert gathered == ([0, 1] if rank < 2 else [None, None])
        assert backend == name


def test_the_sampler(crew: torchcrew.Crew) -> None:
    """Without arguments it knows its rank."""
    first, second = crew.run(cases.sampled, 10)
    assert sorted(first + second) == list(range(10))


@pytest.mark.parametrize(
    ("init", "destroy"),
    [
        pytest.param(init, destroy, marks=() if destroy or init == "nothing" else pytest.mark.faults)
        for init in ("by name", "nothing", "env", "numbers", "tcp", "twice")
        for destroy in (False, True)
    ],
)
def test_code_written_for_torchrun(init: str, destroy: bool) -> None:
    """It makes the group that is there already."""
    assert torchcrew.launch(cases.torchrun_style, init, destroy, nprocs=2) == [(0, 2, 2.0), (1, 2, 2.0)]


def test_a_second_group_that_differs() -> None:
    """Stock's error, with what differs."""
    with pytest.raises(ValueError, match=r"twice!\n(.|\n)*world_size 2; this call asks for world_size 3|world_size"):
        torchcrew.launch(cases.init_otherwise, nprocs=2)


@pytest.mark.faults  # `tests/cli/test_launch.py` compares the same by default
def test_training_is_stocks_bit_for_bit() -> None:
    """`DistributedDataParallel` in `launch` and in stock's `mp.spawn`."""
    run = subprocess.run(
        [sys.executable, str(PROGRAMS / "api_ddp.py")],
        capture_output=True,
        text=True,
        timeout=55,
        env=ENVIRONMENT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    ours, stock = json.loads(run.stdout)
    assert ours == stock
    assert len(ours) == 2


def test_nothing_listens_but_gloo() -> None:
    """Of all processes of the job; and gloo, where it is asked for, only where nobody else gets at it."""
    if not cases.listening([os.getpid()]):
        with multiprocessing.connection.Listener(("127.0.0.1", 0)):
            assert cases.listening([os.getpid()]), "a listening socket is not seen here"
    for found in torchcrew.launch(cases.all_listening, os.getpid(), nprocs=2, backend="gloo"):
        assert found  # gloo's own
        assert set(found) <= {("tcp", "0100007F"), ("tcp6", "0" * 24 + "01000000")}
    before = cases.listening(cases.tree(os.getpid()))
    assert torchcrew.launch(cases.all_listening, os.getpid(), nprocs=2) == [before] * 2

    def without_group(launcher: int) -> Any:
        return cases.listening(cases.tree(launcher))

    assert torchcrew.launch(without_group, os.getpid(), nprocs=2, backend=None) == [before] * 2


def test_the_environment() -> None:
    """What torchrun sets, and `env` in addition; nothing of it here."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MINE", "HOME")
    before = dict(os.environ)
    values = torchcrew.launch(cases.read_environ, *names, nprocs=2, env={"MINE": "ä", "HOME": "/nowhere"})
    for rank, value in enumerate(values):
        assert value == [str(rank), str(rank), "2", "2", "0", "127.0.0.1", "ä", "/nowhere"]
    assert dict(os.environ) == before


def test_a_store_at_the_jobs_address() -> None:
    """MASTER_PORT is kept for the ranks, one after the other."""
    for _ in range(2):
        assert torchcrew.launch(cases.own_store, nprocs=2) == ["from 1", "from 0"]


@pytest.mark.parametrize(
    "method", ["zygote", "fork", *(pytest.param(name, marks=pytest.mark.faults) for name in ("spawn", "forkserver"))]
)
def test_start_methods(method: Any) -> None:
    """Each has a group."""
    assert torchcrew.launch(cases.all_reduce_sum, 2.0, nprocs=2, start_method=method) == [4.0, 4.0]


def test_where_a_rank_computes(crew: torchcrew.Crew) -> None:
    """The CPU, where there is nothing else."""
    if not torch.cuda.is_available():
        assert crew.run(torchcrew.device) == [torch.device("cpu")] * 2
    assert (torchcrew.rank(), torchcrew.local_rank(), torchcrew.world_size()) == (0, 0, 1)


# Programs -------------------------------------------------------------------------------------------------------------

HEAD = """
import torchcrew

class Message:
    def __init__(self, text): self.text = text

def work(message, more=""):
    assert type(message) is Message, type(message)
    return Message(f"{torchcrew.rank()} {message.text}{more}")
"""

TAIL = """
for value in torchcrew.launch({function}, Message("ok"), nprocs=2):
    assert type(value) is Message, type(value)
    print(value.text)
"""


def program(function: str = "work", before: str = "", guard: bool = True) -> str:
    """The text of a program that launches something."""
    body = before + TAIL.format(function=function)
    return HEAD + ("if __name__ == '__main__':\n" + textwrap.indent(body, "    ") if guard else body)


def run(*arguments: str, stdin: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=50,
        cwd=cwd,
        env=ENVIRONMENT,
        check=False,
    )


def check(result: subprocess.CompletedProcess[str], more: str = "") -> None:
    """Each rank was right."""
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == [f"0 ok{more}", f"1 ok{more}"], (result.stdout, result.stderr)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("function", "before"),
    [
        ("work", ""),
        ("lambda message: work(message)", ""),
        ("inner", "def inner(message):\n    return work(message)\n"),
        ("closure()", "def closure():\n    word = work\n    return lambda message: word(message)\n"),
        ("Local().run", "class Local:\n    def run(self, message):\n        return work(message)\n"),
    ],
    ids=["function", "lambda", "guarded", "closure", "method"],
)
def test_a_script(function: str, before: str, tmp_path: Path) -> None:
    """Whatever function it gives; its classes stay what they are, both ways."""
    path = tmp_path / "script.py"
    path.write_text(program(function, before))
    check(run(str(path)))


@pytest.mark.faults
def test_globals_under_the_main_guard(tmp_path: Path) -> None:
    """A function that was defined there has them; one outside of it does not, and the error says why."""
    path = tmp_path / "script.py"
    path.write_text(program("inner", "word = '!'\ndef inner(message):\n    return work(message, word)\n"))
    check(run(str(path)), "!")
    path.write_text(HEAD + "def outer(message): return work(message, word)\n" + program("outer", "word = '!'\n"))
    result = run(str(path))
    assert result.returncode == 1
    assert "NameError: name 'word' is not defined" in result.stderr
    assert "'word' is set under `if __name__ == \"__main__\":`" in result.stderr


@pytest.mark.faults
def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """What to do, in a sentence."""
    path = tmp_path / "script.py"
    path.write_text(program(guard=False))
    result = run(str(path))
    assert result.returncode == 1
    assert 'put what the script does under `if __name__ == "__main__":`' in result.stderr
    assert "importing the script failed" in result.stderr
    assert result.stdout == ""


@pytest.mark.faults
def test_a_module_and_a_folder(tmp_path: Path) -> None:
    """`python -m package.module`, `python -m package`, `python package`."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text(program())
    (package / "__main__.py").write_text(program())
    check(run("-m", "package.module", cwd=tmp_path))
    check(run("-m", "package", cwd=tmp_path))
    check(run(str(package)))


@pytest.mark.parametrize("guard", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_a_command(guard: bool) -> None:
    """`python -c`, which needs no guard."""
    check(run("-c", program(guard=guard)))


def test_standard_input() -> None:
    """`python -`, with functions that refer to globals."""
    check(run("-", stdin=program("lambda message: work(message, word)", "word = '!'\n", guard=False)), "!")


@pytest.mark.faults
def test_a_prompt() -> None:
    """Lines that are typed; functions that are typed later go to a warm crew, too."""
    typed = (
        "import torchcrew\ncrew = torchcrew.Crew(2)\nword = 'ok'\n"
        "def first():\n    return f'{torchcrew.rank()} {word}'\n\n"
        "print(crew.run(first))\n"
        "def second():\n    crew.local.value = first()\n\n"
        "_ = crew.run(second)\n"
        "print(*crew.run(lambda: crew.local.value), sep='\\n')\n"
    )
    check(run("-i", "-q", "-", stdin=typed))


# Within others --------------------------------------------------------------------------------------------------------


def test_launch_in_a_rank() -> None:
    """No process is started: each takes part, and gets all values."""
    assert torchcrew.launch(cases.nested, nprocs=3) == [[0, 10, 20]] * 3


@pytest.mark.faults
def test_launch_in_a_child() -> None:
    """Of multiprocessing, which may have processes."""
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=cases.put_launched, args=(queue,))
        process.start()
        assert queue.get() == [(0, 0, 2), (1, 1, 2)]
        process.join(20)
        assert process.exitcode == 0
        process.close()
        queue.close()


def test_launch_in_a_loaders_worker() -> None:
    """Daemons have no children: stock's error."""
    assert "daemonic processes are not allowed to have children" in cases.launch_in_worker()


def test_launch_in_a_worker_of_a_rank() -> None:
    """It is no rank, whatever its environment says: as any loader's worker."""
    for text in torchcrew.launch(cases.launch_in_worker, nprocs=2):
        assert "daemonic processes are not allowed to have children" in text


@pytest.mark.timeout(120)  # two zygotes, one after the other
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.faults)])
def test_launch_in_a_child_of_a_rank(method: str) -> None:
    """Nor is this one: it has ranks of its own."""
    assert torchcrew.launch(cases.launch_in_child, method, nprocs=1) == [[(0, 0, 1)]]


def test_launch_in_a_thread() -> None:
    """While this one launches, too."""
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.extend(torchcrew.launch(cases.all_reduce_sum, nprocs=2)))
    thread.start()
    assert torchcrew.launch(cases.all_reduce_sum, nprocs=3) == [3.0] * 3
    thread.join(30)
    assert values == [2.0, 2.0]


# Output ---------------------------------------------------------------------------------------------------------------


def test_lines_with_their_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """`logs="prefix"`, and a file for each."""
    torchcrew.launch(lambda: print("from", torchcrew.rank()), nprocs=2, logs="prefix")  # noqa: T201
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] from 0", "[1] from 1"]
    torchcrew.launch(lambda: print("from", torchcrew.rank()), nprocs=2)  # noqa: T201
    assert sorted(capfd.readouterr().out.splitlines()) == ["from 0", "from 1"]


def test_a_file_for_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a folder that is made; a `Path` or a text."""
    for folder in (tmp_path / "new" / "one", str(tmp_path / "two")):
        torchcrew.launch(lambda: print("from", torchcrew.rank()), nprocs=2, logs=folder)  # noqa: T201
        assert [path.read_text() for path in sorted(Path(folder).iterdir())] == ["from 0\n", "from 1\n"]
    assert capfd.readouterr().out == ""


# Hanging --------------------------------------------------------------------------------------------------------------


def test_no_progress_is_an_error() -> None:
    """Which says who waits where, and who is missing; all ranks have ended."""
    with torchcrew.Crew(3, timeout=1.0) as crew:
        pids = crew.run(cases.pid)
        with pytest.raises(RanksStuck, match="no rank made any progress for 1 s") as caught:
            crew.run(cases.rank_1_is_away, 60)
        text = str(caught.value)
        assert isinstance(caught.value, TimeoutError)
        assert "ranks 0, 2 wait in all_reduce #" in text or "ranks 0 and 2 wait in all_reduce #" in text, text
        assert "rank 1 is in rank_1_is_away" in text, text
        assert "launch_cases.py:" in text
        assert survivors(pids, 0) == []
        assert len(crew.run(cases.pid)) == 3


@pytest.mark.parametrize("kind", ["output", "collectives", "steps"])
def test_progress_is_waited_for(kind: str) -> None:
    """Each sort of it, for longer than the timeout in all."""
    with torchcrew.Crew(2, timeout=2.0) as crew:
        crew.run(cases.slow_but_busy, kind, 1, 0.0)  # DDP imports much the first time
        assert crew.run(cases.slow_but_busy, kind, 6, 0.5) == [kind, kind]


def test_a_crew_may_rest_for_longer_than_its_timeout() -> None:
    """Between two runs nobody is stuck."""
    with torchcrew.Crew(1, timeout=0.3) as crew:
        crew.run(cases.nothing)
        time.sleep(0.6)
        assert crew.run(cases.who) == [(0, 0, 1)]


def test_where_ranks_are_on_demand(tmp_path: Path) -> None:
    """SIGQUIT prints it, and the job goes on."""
    path = tmp_path / "go on"
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "api_waits.py"), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "both run\n"
        for _ in range(2):
            process.send_signal(signal.SIGQUIT)
            text = ""
            while "rank 1 is in wait_for" not in text:
                line = process.stderr.readline()
                assert line, text
                text += line
        path.touch()
        out, _ = process.communicate(timeout=30)
        assert out == "['waited', 'seen']\n"
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_a_handler_of_the_users_stays(crew: torchcrew.Crew) -> None:
    """SIGQUIT is taken only where the program has no use for it, and given back."""
    assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    crew.run(cases.nothing)
    assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    caught: list[int] = []
    signal.signal(signal.SIGQUIT, lambda number, _: caught.append(number))
    try:
        crew.run(lambda pid: os.kill(pid, signal.SIGQUIT) if torchcrew.rank() == 0 else None, os.getpid())
        assert caught == [signal.SIGQUIT]
    finally:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


# Restarts -------------------------------------------------------------------------------------------------------------


def attempt(path: str, needed: int) -> str:
    """Fail until it has been tried often enough."""
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if torchcrew.rank() == 0:
        with open(path, "a") as file:
            file.write(f"{count} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}\n")
    torch.distributed.barrier()  # or the other one's failure may end rank 0 before it has written
    if count < needed:
        raise OSError(f"attempt {count}")
    return "at last"


def test_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All ranks anew, told how often; the last failure is raised when there have been enough."""
    path = tmp_path / "attempts"
    assert torchcrew.launch(attempt, str(path), 2, nprocs=2, restarts=2) == ["at last"] * 2
    assert path.read_text() == "0 of 2\n1 of 2\n2 of 2\n"
    assert len(caplog.records) == 2
    with pytest.raises(OSError, match="attempt 1"):
        torchcrew.launch(attempt, str(path), 2, nprocs=2, restarts=1)


def test_what_never_began_is_not_restarted(caplog: pytest.LogCaptureFixture) -> None:
    """An argument that cannot be sent will not be sendable the next time."""
    with pytest.raises((TypeError, pickle.PicklingError)):
        torchcrew.launch(cases.nothing, threading.Lock(), nprocs=1, restarts=3)
    assert not caplog.records
