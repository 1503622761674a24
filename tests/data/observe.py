"""What can be observed of a loader, as plain data; and the child process in which a scenario is observed.

    pytest                                         child (fork, own process group)
    ┌──────────────────────┐   Observation         ┌─────────────────────────────────┐
    │ observe(scenario, C) │ ◄──────── pipe ────── │ scenario(C): value or exception │
    │ deadline → SIGKILL   │                       │ warnings, threads, children     │
    └──────────────────────┘                       └─────────────────────────────────┘

The child is what a user's process is: its name is MainProcess, its process counter starts at 1, its generators have one
fixed seed. A scenario that hangs is observed as `HANG`; its process group is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import hashlib
import itertools
import multiprocessing
import os
import pickle
import random
import re
import select
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import process as mp_process
from multiprocessing import util as mp_util
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = (
    "HANG",
    "SCENARIOS",
    "Observation",
    "Scenario",
    "describe",
    "describe_exception",
    "describe_warning",
    "differences",
    "observe",
    "overlaps",
    "register",
    "rng",
    "scenario",
    "steps",
)

HANG = "hangs"
# A process that ended counts as ended when it is seen within this time: workers that are not joined end on their own.
END_SECONDS = 5.0
# Where stock's and our loader stand: stock's stacklevel points into it.
LIBRARY_FILES = ("dataloader.py", "loader.py", "iterator.py")
# Values up to this many bytes are written out, so that a difference can be read; longer ones are hashed.
HEX_BYTES = 64
# Element addresses are compared one by one up to this many elements.
OVERLAP_ELEMENTS = 4096


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A piece of loader use: ``run`` takes the DataLoader class and returns what it saw, as plain data."""

    run: Callable[[Any], Any]
    seconds: float = 15.0
    slow: bool = False


@dataclasses.dataclass
class Observation:
    """Everything that one run of a scenario showed."""

    value: Any
    warnings: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    threads_left: list[str] = dataclasses.field(default_factory=list)
    children_left: int = 0
    exits: bool = True
    stderr: str = dataclasses.field(default="", compare=False)


SCENARIOS: dict[str, Scenario] = {}


def scenario(run: Callable[[Any], Any] | None = None, *, seconds: float = 15.0, slow: bool = False) -> Any:
    """Register a function as a scenario under its own name."""
    if run is None:
        return lambda function: scenario(function, seconds=seconds, slow=slow)
    register(run.__name__, run, seconds=seconds, slow=slow)
    return run


def register(name: str, run: Callable[[Any], Any], *, seconds: float = 15.0, slow: bool = False) -> None:
    """Register ``run`` as the scenario ``name``."""
    if name in SCENARIOS:
        raise ValueError(f"two scenarios are called {name}")
    SCENARIOS[name] = Scenario(run, seconds, slow)


# ---------------------------------------------------------------------------------------------------- plain data


def rng() -> tuple[str, str, str]:
    """The states of torch's, numpy's and Python's global generators, as digests."""
    states = (torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), repr(random.getstate()))
    return tuple(_digest(state) for state in states)  # type: ignore[return-value]


def _digest(data: bytes | str) -> str:
    return hashlib.sha1(data.encode() if isinstance(data, str) else data).hexdigest()[:12]


def _content(data: bytes) -> str:
    return data.hex() if len(data) <= HEX_BYTES else f"{len(data)} bytes {_digest(data)}"


def _type(obj: object) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


class Describer:
    """Turns a batch into plain data: every tensor and container by kind, repeated objects as references."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.keep: list[object] = []  # an id is only unique while its object lives
        self.tensors: list[torch.Tensor] = []

    def describe(self, obj: Any) -> Any:
        """Plain data that is equal for two objects exactly if a user could not tell them apart."""
        if obj is None or isinstance(obj, (bool, int, float, complex, str, bytes, type)):
            return (_type(obj), repr(obj))
        if id(obj) in self.seen and not isinstance(obj, tuple):
            return ("again", self.seen[id(obj)])
        self.seen[id(obj)] = len(self.seen)
        self.keep.append(obj)
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return self._tensor(obj)
        if isinstance(obj, np.ndarray):
            return self._array(obj)
        if isinstance(obj, np.generic):
            return (_type(obj), str(obj.dtype), repr(obj))
        return self._container(obj)

    def _container(self, obj: Any) -> Any:
        extra = self._attributes(obj)
        if isinstance(obj, Mapping):
            factory = [repr(obj.default_factory)] if isinstance(obj, defaultdict) else []
            items = [(self.describe(key), self.describe(value)) for key, value in obj.items()]
            return (_type(obj), items, *factory, *extra)
        if isinstance(obj, (set, frozenset)):
            return (_type(obj), sorted(map(repr, obj)))
        if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
            fields = [(field.name, self.describe(getattr(obj, field.name))) for field in dataclasses.fields(obj)]
            return (_type(obj), fields)
        if isinstance(obj, (list, tuple)):
            return (_type(obj), [self.describe(value) for value in obj], *extra)
        return (_type(obj), *(extra or [repr(obj)]))

    def _attributes(self, obj: Any) -> list[Any]:
        attributes = getattr(obj, "__dict__", None)
        return [{name: self.describe(value) for name, value in attributes.items()}] if attributes else []

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        told: dict[str, Any] = {
            "type": _type(tensor),
            "dtype": str(tensor.dtype),
            "layout": str(tensor.layout),
            "device": str(tensor.device),
            "requires_grad": tensor.requires_grad,
            "leaf": tensor.is_leaf,
            "bits": (tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
            "attributes": self._attributes(tensor),
        }
        plain = tensor.detach()
        if plain.is_nested:
            return {**told, "parts": [self._tensor(part) for part in plain.unbind()]}
        told["shape"] = tuple(plain.shape)
        if plain.layout is torch.sparse_coo:
            told["parts"] = [self._tensor(plain._indices()), self._tensor(plain._values()), plain.is_coalesced()]
        elif plain.layout is torch.sparse_csr:
            told["parts"] = [self._tensor(one) for one in (plain.crow_indices(), plain.col_indices(), plain.values())]
        elif plain.is_quantized:
            told["parts"] = [self._tensor(plain.int_repr()), plain.stride()]
        else:
            plain = plain.as_subclass(torch.Tensor)
            told["stride"] = plain.stride()
            told["values"] = "meta" if plain.is_meta else _content(_bytes(plain))
        return told

    def _array(self, array: np.ndarray[Any, Any]) -> dict[str, Any]:
        flags = array.flags
        return {
            "type": _type(array),
            "dtype": repr(array.dtype),
            "shape": array.shape,
            "strides": array.strides,
            "flags": (flags.writeable, flags.c_contiguous, flags.f_contiguous, flags.aligned),
            # Objects by their text; so long doubles, whose padding bytes are anything.
            "values": repr(array.tolist()) if array.dtype.char in "OgG" else _content(array.tobytes()),
            "attributes": self._attributes(array),
        }


def _bytes(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, bit for bit."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def overlaps(tensors: list[torch.Tensor]) -> list[tuple[int, int, int, int]]:
    """Which tensors share memory: (i, j, elements in common, bytes from i's first element to j's)."""
    strided = {i: t for i, t in enumerate(tensors) if t.layout is torch.strided and not (t.is_nested or t.is_meta)}
    spots = {i: _addresses(t) for i, t in strided.items() if 0 < t.numel() <= OVERLAP_ELEMENTS}
    found = []
    for (i, mine), (j, its) in itertools.combinations(spots.items(), 2):
        common = len(mine & its)
        if common:
            found.append((i, j, common, tensors[j].data_ptr() - tensors[i].data_ptr()))
    return found


def _addresses(tensor: torch.Tensor) -> set[int]:
    size = tensor.element_size()
    spots = {0}
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        spots = {spot + k * stride * size for spot in spots for k in range(length)}
    base = tensor.data_ptr()
    return {base + spot + byte for spot in spots for byte in range(size)}


def describe(obj: Any) -> Any:
    """``obj`` as plain data, with the memory that its tensors have in common."""
    describer = Describer()
    told = describer.describe(obj)
    shared = overlaps(describer.tensors)
    return (told, {"overlaps": shared}) if shared else told


def _normal(text: str) -> str:
    text = re.sub(r"\b(pid(?:\(s\))?:?) \d+(?:, \d+)*", r"\1 N", text)
    text = re.sub(r"\(pid(\(s\))? ?\d+\)", "(pid N)", text)
    text = re.sub(r"0x[0-9a-f]{6,}", "0xN", text)
    # The frames of a remote traceback name the code that ran, which is ours in part; its first and last lines stay.
    text = re.sub(r'(?m)^  File ".*\n(?:    .*\n)*', "", text)
    return re.sub(r"/tmp/[\w./-]+", "/TMP", text)


def describe_exception(error: BaseException) -> dict[str, Any]:
    """Type, text and causes of an exception, process ids left out."""
    return {
        "type": _type(error),
        "args": [_normal(arg if isinstance(arg, str) else repr(arg)) for arg in error.args],
        "text": _normal(str(error)),
        "cause": describe_exception(error.__cause__) if error.__cause__ is not None else None,
        "notes": getattr(error, "__notes__", []),
        "attributes": sorted(vars(error)),
    }


def describe_warning(warning: warnings.WarningMessage) -> tuple[str, str, str]:
    """Category, text, and the file that the warning names as its source; a loader's own files count as one."""
    file = Path(warning.filename).name
    source = "the library" if file in LIBRARY_FILES else file
    return (warning.category.__qualname__, _normal(str(warning.message)), source)


def steps(iterable: Iterable[Any], limit: int = 100, errors: int = 3, with_rng: bool = True) -> list[Any]:
    """Iterate, and note every batch, exception and the end, each with the main process's generators after it.

    Args:
        iterable: a loader, or an iterator of one.
        limit: stop after this many steps (a break: the iterator is dropped).
        errors: go on after so many exceptions, then stop.
        with_rng: note the generators' states as well.
    """
    state = rng if with_rng else lambda: None
    try:
        iterator = iter(iterable)
    except Exception as error:
        return [("iter raises", describe_exception(error), state())]
    noted: list[Any] = [("iter", state())]
    while len(noted) <= limit:
        try:
            batch = next(iterator)
        except StopIteration as stop:
            noted.append(("end", state()))
            stop.__traceback__ = None
            break
        except Exception as error:
            noted.append(("raises", describe_exception(error), state()))
            # An exception and the frames that it passed hold each other, and the iterator with them. Left to the cycle
            # collector, stock's queues are finalized before its iterator, whose join then waits for its full 5 s.
            error.__traceback__ = None
            errors -= 1
            if errors < 0:
                break
        else:
            noted.append(("batch", describe(batch), state()))
            del batch
    return noted


# ------------------------------------------------------------------------------------------------- the child


def observe(scenario: Scenario, loader_class: Any) -> Observation:
    """Run ``scenario`` on ``loader_class`` in a child process, within the scenario's deadline."""
    with tempfile.TemporaryFile() as stderr:
        reader, writer = os.pipe()
        # pytest's watchdog is a thread, which the child would wait for in vain; this scenario has its own deadline.
        faulthandler.cancel_dump_traceback_later()
        pid = os.fork()
        if pid == 0:
            _child(scenario, loader_class, reader, writer, stderr.fileno())
        os.close(writer)
        try:
            data = _read_message(reader, time.monotonic() + scenario.seconds)
            exits = data is not None and _ends(pid, time.monotonic() + END_SECONDS)
        finally:
            os.close(reader)
            # The group holds stock's workers as well, so a hang leaves nothing of them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")
    if data is None:
        return Observation(HANG, stderr=said)
    if not data:
        return Observation(f"the process ended with status {status}", stderr=said)
    observation: Observation = pickle.loads(data)
    observation.stderr, observation.exits = said, exits
    return observation


def _ends(pid: int, deadline: float) -> bool:
    """Whether the process ends on its own; it is left for `waitpid`."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _read_message(reader: int, deadline: float) -> bytes | None:
    """One message with its length in front, so that a worker that inherited the pipe delays nobody.

    None past the deadline; an empty message means that the child ended without one.
    """
    data = b""
    while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return None
        part = os.read(reader, 1 << 20)
        if not part:
            return b""
        data += part
    return data[8:]


def _child(scenario: Scenario, loader_class: Any, reader: int, writer: int, stderr: int) -> None:
    status = 1
    try:
        os.close(reader)
        os.setpgid(0, 0)
        os.dup2(stderr, 2)
        os.set_inheritable(writer, False)
        # Late enough for a slow machine, early enough to say where it hangs.
        faulthandler.dump_traceback_later(max(scenario.seconds - 1.0, 1.0), file=stderr)
        _as_fresh_process()
        observation = _observed(scenario, loader_class)
        data = pickle.dumps(observation)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(len(data).to_bytes(8, "little") + data)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            mp_util._exit_function()  # type: ignore[attr-defined]
        os._exit(status)


def _as_fresh_process() -> None:
    """Forget what the forked copy of pytest knows: its children, finalizers, process counter and signal handlers."""
    mp_util._finalizer_registry.clear()  # type: ignore[attr-defined]
    mp_util._run_after_forkers()  # type: ignore[attr-defined]
    mp_process._children.clear()  # type: ignore[attr-defined]
    mp_process._process_counter = itertools.count(1)  # type: ignore[attr-defined]
    for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.disable()  # workers that abort on purpose would write to pytest's own standard error
    gc.freeze()  # what pytest made is no business of this process: collections here are many, and quick
    # OpenMP's pool does not survive a fork.
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    np.random.seed(1234)
    random.seed(1234)


def _observed(scenario: Scenario, loader_class: Any) -> Observation:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = scenario.run(loader_class)
        except Exception as error:
            value = ("the scenario raises", describe_exception(error), traceback.format_exc())
        gc.collect()
    told = [describe_warning(warning) for warning in caught if "multi-threaded" not in str(warning.message)]
    return Observation(value, told, *_left())


def _left() -> tuple[list[str], int]:
    """Threads and children that are still there after a moment."""
    deadline = time.monotonic() + END_SECONDS
    while True:
        # `_serve` is the standard library's resource sharer, which never ends once a tensor went through a queue.
        others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        threads = sorted(name for name in others if "_serve" not in name)
        children = len(multiprocessing.active_children())
        if not (threads or children) or time.monotonic() > deadline:
            return threads, children
        time.sleep(0.01)


def differences(stock: Any, ours: Any, path: str = "", limit: int = 12) -> list[str]:
    """Where two pieces of plain data differ, as ``path: stock's, ours``; at most ``limit`` places."""
    if dataclasses.is_dataclass(stock) and type(stock) is type(ours):
        names = [field.name for field in dataclasses.fields(stock) if field.compare]
        stock, ours = ({name: getattr(one, name) for name in names} for one in (stock, ours))
    if isinstance(stock, dict) and isinstance(ours, dict) and stock.keys() == ours.keys():
        pairs = [(f"{path}.{key}", stock[key], ours[key]) for key in stock]
    elif isinstance(stock, (list, tuple)) and isinstance(ours, (list, tuple)) and len(stock) == len(ours):
        pairs = [(f"{path}[{i}]", *both) for i, both in enumerate(zip(stock, ours, strict=True))]
    else:
        return [] if stock == ours else [f"{path or 'value'}: stock {stock!r}, ours {ours!r}"]
    found: list[str] = []
    for where, one, other in pairs:
        found += differences(one, other, where, limit - len(found))
        if len(found) >= limit:
            break
    return found
