"""`import torchcrew` starts nothing, changes nothing, and leaves torch for those who use it."""

import json
import subprocess
import sys

import pytest

PROBE = """
import json, os, signal, sys, threading
def state():
    return {
        "environment": dict(os.environ),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "tasks": len(os.listdir("/proc/self/task")),
        "threads": threading.active_count(),
        "children": open("/proc/self/task/%d/children" % os.getpid()).read().split(),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)],
        "path": sys.path,
    }
before = state()
import torchcrew
after = state()
print(json.dumps({"before": before, "after": after, "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def probe():
    """What a fresh interpreter looks like before and after the import."""
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=15, check=True)
    return json.loads(run.stdout)


def test_importing_leaves_torch_alone(probe):
    """Neither torch nor anything else that takes long is imported."""
    heavy = {"torch", "numpy", "cloudpickle", "multiprocessing", "typer", "rich"}
    assert not heavy & set(probe["modules"])


@pytest.mark.parametrize("what", ["environment", "descriptors", "tasks", "threads", "children", "signals", "path"])
def test_importing_changes_nothing_of_the_process(probe, what):
    """No variable, descriptor, thread, child, signal handler or path entry more or less than before."""
    assert probe["after"][what] == probe["before"][what]


def test_a_public_submodule_is_imported_at_its_first_use():
    """`torchcrew.errors` works without an import of its own, and a name that is not there is an AttributeError."""
    code = "import torchcrew; torchcrew.errors.ArenaFull; assert not hasattr(torchcrew, 'nothing')"
    subprocess.run([sys.executable, "-c", code], timeout=15, check=True)
