"""Which frames of a stack are the user's, and how a stack is shown."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from torchcrew.crew.stack_text import Frame, Thread

__all__ = ("is_users", "lines_of", "place", "qualified", "site", "users_frame", "wait_for_ranks")

#: A standard library, of whatever interpreter.
_STDLIB = re.compile(r"^.*/lib/python3\.\d+t?/(?!site-packages/|dist-packages/)|^<frozen ")
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
#: What waits for other ranks, where gloo waits in native code.
_COLLECTIVES = os.path.join(_OURS, "collectives", "")
_TEAM = os.path.join(os.path.dirname(__file__), "team.py")
#: What a process is started in by `python -c`.
_STARTERS = ("/torchcrew/crew/zygote_main.py", "/multiprocessing/spawn.py", "/multiprocessing/forkserver.py")
#: Files whose outermost frames only start a process.
_STARTS = re.compile(
    r"/torchcrew/(crew/zygote_|multiprocessing/(context|popen))|/multiprocessing/(process|spawn|popen_)"
)
#: A larger source file is not searched for the class of a method, in bytes: parsing it would take a second.
_LARGEST_SOURCE = 2 << 20


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame that is the user's, else that of an installed package; None if there is neither."""
    frames = _without_command(frames)
    return next((frame for whose in (is_users, _is_packages) for frame in frames if whose(frame)), None)


def _without_command(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The frames without the text of a ``python -c`` by which such a process is started, which is nobody's program."""
    if len(frames) > 1 and frames[-1].file == "<string>" and frames[-2].file.endswith(_STARTERS):
        return frames[:-1]
    return frames


def wait_for_ranks(frames: Sequence[Frame]) -> str:
    """What a launching process does: "waits for its ranks, in launch (train.py:30)"; "" if it does anything else."""
    if not any(frame.function == "_collect" and frame.file == _TEAM for frame in frames):
        return ""
    for inner, outer in pairwise(frames):
        if is_users(outer):
            return f"waits for its ranks, in {qualified(inner)} ({site(outer)})"
    return "waits for its ranks"


def is_users(frame: Frame) -> bool:
    """Whether a frame is neither an installed package's, nor torchcrew's, nor the standard library's."""
    return _shortened(frame.file)[1]


def _is_packages(frame: Frame) -> bool:
    """Whether it is that of an installed package, but for torch and torchcrew."""
    match = _PACKAGES.match(frame.file)
    return match is not None and not _shortened(frame.file)[0].startswith(("torch/", "torchcrew/"))


def place(frame: Frame) -> str:
    """A frame in words: "Dataset.__getitem__ (data.py:17)"."""
    return f"{qualified(frame)} ({site(frame)})"


def site(frame: Frame) -> str:
    """Where a frame is: "data.py:17"."""
    return f"{os.path.basename(frame.file)}:{frame.line or '?'}"


def qualified(frame: Frame) -> str:
    """The name of a frame's function with that of its class, as far as the source tells."""
    try:
        status = os.stat(frame.file)
    except (OSError, ValueError):
        return frame.function
    if status.st_size > _LARGEST_SOURCE:
        return frame.function
    found = [
        (last - first, name)
        for first, last, name in _functions(frame.file, status.st_mtime_ns)
        if first <= frame.line <= last and name.rpartition(".")[2] == frame.function
    ]
    return min(found)[1] if found else frame.function


@functools.lru_cache(maxsize=64)
def _functions(path: str, _: int) -> tuple[tuple[int, int, str], ...]:
    """First and last line and name of every function in a file; none if it cannot be read as Python."""
    try:
        with open(path, "rb") as file:
            return tuple(_within(ast.parse(file.read()), ""))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _within(node: ast.AST, prefix: str) -> Iterator[tuple[int, int, str]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.ClassDef):
            inner = f"{prefix}{child.name}."
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child.lineno, child.end_lineno or child.lineno, prefix + child.name
            inner = ""
        yield from _within(child, inner)


@functools.cache
def _torch() -> str:
    """Where torch is, without importing it."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    return os.path.dirname(spec.origin) + os.sep if spec is not None and spec.origin else "\0"


@functools.lru_cache(maxsize=4096)
def _shortened(file: str) -> tuple[str, bool]:
    """A path as it is shown, and whether it is the user's."""
    if file.startswith(_OURS):
        return "torchcrew/" + file[len(_OURS) :], False
    if file.startswith(_torch()):
        return "torch/" + file[len(_torch()) :], False
    if (match := _PACKAGES.match(file)) is not None:
        return file[match.end() :], False
    if (match := _STDLIB.match(file)) is not None:
        return file if file.startswith("<") else file[match.end() :], False
    return file, not file.endswith("/bin/torchcrew")  # the command


def lines_of(threads: Sequence[Thread]) -> list[str]:
    """The stacks of a process, a line for each frame; the user's frames are marked.

    What is outside of a thread's first user frame only started it, and is one line.
    """
    lines = []
    for number, thread in enumerate(threads):
        if number or not thread.is_main:
            lines.append(f"  thread {thread.name}:" if thread.name else "  another thread:")
        lines += _lines(thread.frames)
    return lines


def _lines(frames: Sequence[Frame]) -> list[str]:
    frames = [frame for frame in _without_command(frames) if not frame.file.startswith(_COLLECTIVES)]
    if not frames:
        return ["    (no Python frame)"]
    end = max((number for number, frame in enumerate(frames, 1) if is_users(frame)), default=0)
    if not end:
        end = max((number for number, frame in enumerate(frames, 1) if _is_packages(frame)), default=0)
    if not end:
        end = max((number for number, frame in enumerate(frames, 1) if not _STARTS.search(frame.file)), default=0)
    shown = []
    for frame, same in groupby(frames[:end]):
        times = len(list(same))
        mark = ">" if is_users(frame) else " "
        name = qualified(frame) if is_users(frame) else frame.function
        many = f" ({times} times)" if times > 1 else ""
        shown.append(f"  {mark} {_shortened(frame.file)[0]}:{frame.line or '?'} {name}{many}")
    # Not how many: of two processes in the same place one may have been started in another way.
    return shown + ["    ..."] * (end < len(frames))
