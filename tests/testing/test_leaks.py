"""Each kind of leak is made on purpose and must be named; what is permanent must not be."""

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from multiprocessing import shared_memory

import pytest

from torchcrew.testing import procfs
from torchcrew.testing.crash import run_program
from torchcrew.testing.leaks import Descriptor, assert_no_leaks, compare, settle, snapshot

libc = ctypes.CDLL(None, use_errno=True)
NAME = f"torchcrew-test-{os.getpid()}"


def wait_until(condition):
    """Wait for something that takes milliseconds, five seconds at most."""
    end = time.monotonic() + 5
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


@contextlib.contextmanager
def child_process():
    """A child that sleeps."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield f"pid {process.pid} "
        process.kill()


@contextlib.contextmanager
def grandchild():
    """A child of a child."""
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True) as process:
        wait_until(lambda: len(procfs.descendants(process.pid)) == 1)
        yield "sleep 60"
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def orphan():
    """A grandchild whose parent is gone: nobody's child any more."""
    script = "sleep 60 >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=5, check=True).stdout)
    yield f"pid {pid} "
    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def zombie():
    """A child that ended and that nobody waited for."""
    with subprocess.Popen(["true"]) as process:
        wait_until(lambda: procfs.read_process(process.pid).is_zombie)
        yield f"pid {process.pid} "


@contextlib.contextmanager
def python_thread():
    """A thread that waits."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    thread.start()
    yield "'forgotten'"
    end.set()
    thread.join()


@contextlib.contextmanager
def native_thread():
    """A thread that Python knows nothing of."""
    thread = ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, libc.sleep, ctypes.c_void_p(60)) == 0
    yield "native"
    libc.pthread_cancel(thread)
    libc.pthread_join(thread, None)


@contextlib.contextmanager
def descriptor(*numbers):
    """Descriptors, closed in the end."""
    yield f"{numbers[0]} ("
    for number in numbers:
        os.close(number)


@contextlib.contextmanager
def mapped_memfd():
    """A memfd that is mapped, its descriptor closed."""
    libc.mmap.restype = ctypes.c_void_p
    number = os.memfd_create(NAME)
    os.ftruncate(number, mmap.PAGESIZE)
    address = libc.mmap(None, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ, mmap.MAP_SHARED, number, ctypes.c_long(0))
    os.close(number)
    yield NAME
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE))


@contextlib.contextmanager
def anonymous_shared_memory():
    """Memory that is shared with forked children."""
    with mmap.mmap(-1, mmap.PAGESIZE):
        yield "/dev/zero"


@contextlib.contextmanager
def shared_file():
    """A block of multiprocessing.shared_memory, which starts the resource tracker too."""
    block = shared_memory.SharedMemory(NAME, create=True, size=64)
    block.close()
    yield f"/dev/shm/{NAME}"
    block.unlink()


@contextlib.contextmanager
def semaphore():
    """A named POSIX semaphore."""
    libc.sem_open.restype = ctypes.c_void_p
    opened = libc.sem_open(f"/{NAME}".encode(), os.O_CREAT | os.O_EXCL, 0o600, 1)
    libc.sem_close(ctypes.c_void_p(opened))
    yield f"sem.{NAME}"
    libc.sem_unlink(f"/{NAME}".encode())


@contextlib.contextmanager
def handler():
    """A handler of SIGUSR2."""
    old = signal.signal(signal.SIGUSR2, lambda *_: None)
    yield "SIGUSR2"
    signal.signal(signal.SIGUSR2, old)


LEAKS = {
    "child": ("process", child_process),
    "grandchild": ("process", grandchild),
    "orphan": ("process", orphan),
    "zombie": ("zombie", zombie),
    "Python thread": ("thread", python_thread),
    "native thread": ("thread", native_thread),
    "pipe": ("descriptor", lambda: descriptor(*os.pipe())),
    "socket": ("descriptor", lambda: descriptor(*(end.detach() for end in socket.socketpair()))),
    "file": ("descriptor", lambda: descriptor(os.open(__file__, os.O_RDONLY))),
    "eventfd": ("descriptor", lambda: descriptor(libc.eventfd(0, 0))),
    "epoll": ("descriptor", lambda: descriptor(libc.epoll_create(1))),
    "pidfd": ("descriptor", lambda: descriptor(os.pidfd_open(os.getppid()))),
    "memfd": ("memfd", lambda: descriptor(os.memfd_create(NAME))),
    "mapped memfd": ("mapping", mapped_memfd),
    "anonymous shared memory": ("mapping", anonymous_shared_memory),
    "shared memory": ("shared memory", shared_file),
    "semaphore": ("semaphore", semaphore),
    "signal handler": ("signal handler", handler),
}


@pytest.mark.parametrize("name", LEAKS)
def test_each_kind_is_named_and_gone_afterwards(name):
    """What was made on purpose is in the report under its kind, alone, and no longer once it is cleaned up."""
    kind, make = LEAKS[name]
    before = snapshot()
    with make() as mark:
        found = compare(before, snapshot())
    assert any(mark in leak for leak in found), found
    assert {leak.partition(": ")[0] for leak in found} == {kind}, found
    assert settle(before) == []


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("socket:[1]", "socket"),
        ("pipe:[1]", "pipe"),
        ("anon_inode:[eventfd]", "eventfd"),
        ("anon_inode:[eventpoll]", "eventpoll"),
        ("anon_inode:inotify", "inotify"),
        ("anon_inode:[pidfd]", "pidfd"),
        ("pidfd:[7]", "pidfd"),
        ("/memfd:arena (deleted)", "memfd"),
        ("/dev/null", "device"),
        ("/dev/shm/torch_1 (deleted)", "file"),
        ("/etc/hosts", "file"),
    ],
)
def test_descriptors_are_typed(target, kind):
    """The links of /proc/self/fd, as old and new kernels write them, give the type."""
    assert Descriptor(3, target).kind == kind


@pytest.mark.parametrize(("old", "new", "word"), [(None, "1", "set"), ("1", None, "removed"), ("1", "2", "changed")])
def test_environment_is_compared_and_its_values_are_kept_secret(monkeypatch, old, new, word):
    """A variable is named with what happened to it; its value is not printed."""

    def put(value):
        if value is None:
            monkeypatch.delenv("TEST_SECRET", raising=False)
        else:
            monkeypatch.setenv("TEST_SECRET", value)

    put(old)
    before = snapshot()
    put(new)
    assert compare(before, snapshot()) == [f"environment: TEST_SECRET was {word}"]
    monkeypatch.undo()


def test_what_vanished_is_no_leak():
    """Closing what was open before is nobody's fault."""
    numbers = os.pipe()
    before = snapshot()
    for number in numbers:
        os.close(number)
    assert compare(before, snapshot()) == []


def test_a_process_that_became_a_zombie_is_the_leak_of_who_started_it():
    """One that lived before is not blamed on the code during which it ended."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        before = snapshot()
        process.stdin.close()
        wait_until(lambda: procfs.read_process(process.pid).is_zombie)
        after = snapshot()
        assert [zombie.pid for zombie in after.zombies] == [process.pid]
        assert compare(before, after) == []


def test_leaks_can_be_ignored_by_what_the_report_says():
    """A regular expression found in a leak's text leaves it out, and no other."""
    before = snapshot()
    numbers = [*os.pipe(), os.open(__file__, os.O_RDONLY)]
    found = compare(before, snapshot(), ignore=[r"^descriptor: \d+ \(pipe\)", "nothing"])
    assert found == [f"descriptor: {numbers[2]} (file) -> {__file__}"]
    with assert_no_leaks(deadline=0, ignore=["pipe", "file"]):
        numbers.append(os.open(__file__, os.O_RDONLY))
    for number in numbers:
        os.close(number)


def test_a_descriptor_that_only_garbage_holds_is_collected():
    """A cycle keeps its socket open until the collector comes by; `settle` calls it."""

    class Holder:
        pass

    before = snapshot()
    gc.disable()
    try:
        holder = Holder()
        holder.itself, holder.socket = holder, os.fdopen(os.dup(0), "rb")
        del holder
        assert compare(before, snapshot())
        with pytest.warns(ResourceWarning):
            assert settle(before) == []
    finally:
        gc.enable()


def test_idle_arenas_are_closed_before_anything_is_called_a_leak(monkeypatch):
    """Memory that is kept warm for the next loader is given up first, and only when something is left."""
    trimmed = []

    def trim():
        trimmed.append(len(numbers))
        while numbers:
            os.close(numbers.pop())

    monkeypatch.setitem(sys.modules, "torchcrew.memory", types.SimpleNamespace(trim=trim))
    numbers = []
    before = snapshot()
    assert settle(before) == []
    assert trimmed == []
    numbers.append(os.memfd_create(NAME))
    assert settle(before) == []
    assert trimmed == [1]


def test_settle_waits_for_what_is_ending():
    """A process that ends within the deadline is no leak, and waiting stops when it has."""
    before = snapshot()
    process = subprocess.Popen(["sleep", "0.3"])
    threading.Timer(0.0, process.wait).start()
    start = time.monotonic()
    assert settle(before, deadline=5) == []
    assert time.monotonic() - start < 3


def test_assert_no_leaks_names_the_leak():
    """The error has one line for each leak."""
    numbers = []
    with pytest.raises(AssertionError, match=r"2 leaks:\n  descriptor: \d+ \(pipe\)"), assert_no_leaks(deadline=0):
        numbers += os.pipe()
    for number in numbers:
        os.close(number)


def test_assert_no_leaks_lets_an_error_pass():
    """An exception of the body is what the user wants to see, not what it left open."""
    numbers = []

    def body():
        numbers.extend(os.pipe())
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), assert_no_leaks(deadline=0):
        body()
    for number in numbers:
        os.close(number)


def test_unknown_names_of_services_are_refused():
    """A typing error in `allow` would otherwise allow nothing, silently."""
    now = snapshot()
    with pytest.raises(ValueError, match=r"allow should hold names of resource_tracker, .* but got tracker"):
        compare(now, now, allow=["tracker"])


def test_shared_memory_of_an_unrelated_program_is_not_ours():
    """A file, a semaphore and a tensor's file that somebody else has in /dev/shm meanwhile are left out."""
    source = f"""
        import multiprocessing, os, sys
        lock = multiprocessing.get_context("spawn").Lock()
        names = ["{NAME}", "{NAME}-closed", "torch_%d_{NAME}" % os.getpid()]
        file = open("/dev/shm/" + names[0], "w")
        for name in names[1:]:
            open("/dev/shm/" + name, "w").close()
        print(lock._semlock.name, flush=True)
        sys.stdin.readline()
        os.unlink("/dev/shm/" + names[1])
        print("removed", flush=True)
        sys.stdin.read()
        os.unlink("/dev/shm/" + names[0])
        os.unlink("/dev/shm/" + names[2])
    """
    before = snapshot()
    command = ["setsid", "--fork", sys.executable, "-c", textwrap.dedent(source)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        semaphore = process.stdout.readline().strip().replace("/", "sem.")
        process.wait(5)
        after = snapshot()
        assert {NAME, f"{NAME}-closed"} <= after.shared_files
        assert semaphore in after.semaphores
        # Who made the closed one and left it cannot be known; once it is removed it is nobody's leak.
        found = [leak for leak in compare(before, after) if NAME in leak or semaphore in leak]
        assert found == [f"shared memory: /dev/shm/{NAME}-closed"]
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "removed\n"
        assert not [leak for leak in compare(before, after) if NAME in leak]
    wait_until(lambda: not os.path.exists(f"/dev/shm/{NAME}") and not os.path.exists(f"/dev/shm/{semaphore}"))


SERVICES = """
    import multiprocessing, os, signal, sys, time
    from multiprocessing import resource_tracker
    from torchcrew.crew import guardian
    from torchcrew.testing import leaks

    def main():
        before = leaks.snapshot()
        process = multiprocessing.get_context("forkserver").Process(target=int)
        process.start()
        process.join(20)
        process.close()
        value = multiprocessing.Value("i", 1, lock=False)
        worker = os.fork()
        if worker == 0:
            os.setpgid(0, 0)
            signal.pause()
        guardian.watch(worker)
        guardian.forget(worker)
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        os.environ["KMP_INIT_AT_FORK"] = "FALSE"
        after = leaks.snapshot()
        assert resource_tracker._resource_tracker._pid and guardian.pid()
        assert leaks.compare(before, after) == [], leaks.compare(before, after)
        print(*leaks.compare(before, after, allow=()), sep="\\n")

    if __name__ == "__main__":
        main()
"""


def test_permanent_services_are_allowed_by_asking_their_owner():
    """Resource tracker, fork server, guardian and the like are no leaks, unless nothing is allowed."""
    found = run_program(SERVICES, timeout=15).check().stdout
    assert found.count("process: ") == 3
    marks = ["resource_tracker", "forkserver", "guardian_main", "(socket)", "(pidfd)", "pym-", "SIGCHLD"]
    if not any(name.startswith("KMP_") for name in os.environ):  # set on import, if nobody has done so before
        marks.append("KMP_")
    for mark in marks:
        assert mark in found


ZYGOTE = """
    from torchcrew.crew import zygote
    from torchcrew.testing import leaks

    def main():
        before = leaks.snapshot()
        process = zygote.get_context().Process(target=int)
        process.start()
        process.join(30)
        process.close()
        del process
        assert leaks.settle(before) == []
        everything = "".join(leaks.compare(before, leaks.snapshot(), allow=()))
        assert zygote.pids() and all("pid %d " % pid in everything for pid in zygote.pids())
        zygote.stop()
        assert leaks.settle(before, allow=("guardian", "resource_tracker", "stacks")) == []

    if __name__ == "__main__":
        main()
"""


@pytest.mark.timeout(60)
def test_the_zygote_is_kept_and_its_processes_are_not():
    """It stays for the next start; once stopped, nothing of it is left."""
    run_program(ZYGOTE, timeout=50).check()


POOLS = """
    from torchcrew.testing import leaks
    before = leaks.snapshot()
    import torch
    torch.set_num_threads(3)
    (torch.ones(1000, 1000) @ torch.ones(1000, 1000)).requires_grad_().sum().backward()
    assert leaks.settle(before) == []
    found = leaks.compare(before, leaks.snapshot(), allow=())
    assert sum("native" in leak for leak in found) >= 2 and any("libgomp" in leak for leak in found), found
"""


def test_threads_of_numeric_libraries_are_told_from_others():
    """torch's pools stay for life; the report can still name the library that each thread is of."""
    run_program(POOLS, timeout=15).check()


SHARER = """
    import torch
    import torch.multiprocessing as mp
    from torchcrew.testing import leaks, permanent

    def main():
        queue = mp.get_context("fork").Queue()
        before = leaks.snapshot()
        queue.put(torch.ones(3))
        assert queue.get().sum() == 3
        queue.close()
        queue.join_thread()
        del queue
        assert leaks.settle(before) == [], leaks.settle(before)
        found = leaks.compare(before, leaks.snapshot(), allow=set(permanent.PERMANENT) - {"resource_sharer"})
        assert len(found) == 2 and "_serve" in found[0] and "(socket)" in found[1], found

    main()
"""


def test_the_resource_sharer_is_allowed():
    """The first tensor in a queue starts a thread with a listening socket, which multiprocessing keeps."""
    run_program(SHARER, timeout=15).check()


UNCLAIMED = """
    import torch
    import torch.multiprocessing as mp
    from torchcrew.testing import leaks

    queue = mp.get_context("fork").Queue()
    before = leaks.snapshot()
    queue.put(torch.ones(3))
    queue.close()
    queue.join_thread()
    print(*leaks.settle(before, deadline=0.2), sep="\\n")
"""


def test_a_tensor_that_nobody_received_is_a_leak():
    """The sharer holds its descriptor until somebody asks for it: allowed is the service, not what is left in it."""
    assert "/torch_" in run_program(UNCLAIMED, timeout=15).check().stdout


FONTS = """
    import io, os
    from torchcrew.testing import leaks, permanent
    before = leaks.snapshot()
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    figure = Figure()
    figure.suptitle("text")
    figure.savefig(io.BytesIO(), format="png")
    assert leaks.settle(before) == [], leaks.settle(before)
    fonts = leaks.compare(before, leaks.snapshot(), allow=set(permanent.PERMANENT) - {"matplotlib_fonts"})
    assert all(".ttf" in font for font in fonts), fonts
    beside = os.open(matplotlib.__file__, os.O_RDONLY)
    inside = os.open(os.path.join(matplotlib.get_data_path(), "matplotlibrc"), os.O_RDONLY)
    assert len(leaks.compare(before, leaks.snapshot())) == 1
"""


def test_fonts_of_matplotlib_are_allowed():
    """It keeps those it has used open; a file that is not among its data is a leak as ever."""
    pytest.importorskip("matplotlib")
    run_program(FONTS, timeout=19).check()
