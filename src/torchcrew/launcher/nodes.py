"""Ranks on several machines: `torch.distributed.elastic` brings the machines together, a crew on each has the ranks.

    machine 0                                                  machine 1
    caller: elastic's agent ◄────── rendezvous (HOST:PORT) ──────► caller: elastic's agent
      │ starts, restarts                                             │
    node_main: a Crew with its ranks' place in the job             node_main
      │ thread: a sign of life each second, a look at the others'    │ thread
      │ the ranks' store: one port on the interface that is named    │
    rank 0, rank 1  ◄──────────── torch.distributed ──────────►    rank 2, rank 3

Owner      elastic's agent owns node_main, and decides about membership and restarts; node_main's crew owns its ranks.
Death      rank: its crew ends its peers and raises; the machine's node_main says so in the store, and the others end.
           node_main: elastic's agent sees it. agent: its guardian ends node_main, whose guardian ends the ranks.
           A machine that is gone says nothing: the others miss its sign of life, or elastic its store.
Network    The ports of `torch.distributed` (rendezvous, store, gloo, NCCL) are open to whoever reaches them: there is
           neither authentication nor encryption. They belong into a network of their own. Both stores listen on the
           interface of the named address only, where it is one of this machine's; the process groups' own sockets on
           the one that torch chooses (``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME`` choose another), which is loopback
           where the endpoint is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import reduction
from typing import Any

from torchcrew.crew import zygote
from torchcrew.crew.foresight import imports_of_program
from torchcrew.crew.functions import Portable
from torchcrew.errors import HostFailed
from torchcrew.launcher import failures
from torchcrew.launcher.crew import Crew
from torchcrew.launcher.meeting import Meeting, Place, distributed, is_loopback, listen, serve
from torchcrew.launcher.options import Host, Options
from torchcrew.launcher.script import Script

__all__ = ("Nodes", "launch_on_nodes", "node_main")

#: Elastic's own for a rendezvous without a port, and for one of the static kind.
DEFAULT_PORT = 29400
#: How long the machine with the store of the rendezvous waits for the others to end, in seconds.
LEAVE_TIMEOUT = 5.0
#: How long node_main may take to end its ranks when it is asked to, in seconds; elastic kills it then.
SHUTDOWN_TIMEOUT = 15
#: The signals that elastic takes over and does not give back.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Nodes:
    """How several machines meet; the same on each of them but for `rank` and `local_address`."""

    least: int
    most: int
    endpoint: str
    """HOST or HOST:PORT, of one of the machines."""
    backend: str = "c10d"
    """Of elastic's rendezvous: "c10d", where the machines are numbered as they come, or "static"."""
    run_id: str = "none"
    rank: int | None = None
    """This machine's number, for "static"."""
    local_address: str | None = None
    """By which the others reach this machine; elastic finds one out."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """More for the rendezvous."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if not 1 <= self.least <= self.most:
            raise ValueError(f"there should be 1 <= least <= most machines, but {self.least} and {self.most} are given")
        if self.backend not in ("c10d", "static"):
            raise ValueError(f"the rendezvous should be c10d or static, but is {self.backend!r}")
        if self.backend == "static" and self.rank is None:
            raise ValueError("the static rendezvous needs the number of this machine")
        if self.backend == "static" and self.least != self.most:
            raise ValueError("the static rendezvous needs a fixed number of machines")
        if self.rank is not None and self.rank >= self.most:
            raise ValueError(f"machine {self.rank} is none of {self.most}")

    @property
    def host(self) -> str:
        """The endpoint's."""
        return self._split()[0]

    @property
    def port(self) -> int:
        """The endpoint's."""
        return self._split()[1]

    def _split(self) -> tuple[str, int]:
        host, colon, port = self.endpoint.rpartition(":")
        if not colon or "]" in port:  # no port; or a number of IPv6 in brackets
            return self.endpoint.strip("[]"), DEFAULT_PORT
        if not port.isdecimal() or not host:
            raise ValueError(f"an endpoint should be HOST or HOST:PORT, but is {self.endpoint!r}")
        return host.strip("[]"), int(port)


def launch_on_nodes(nodes: Nodes, options: Options, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Run a function in ranks of this machine and of others that call this, too; `launch` says the rest.

    ``options.restarts`` are of the job: after a failure anywhere, the ranks of all machines start anew.

    Returns:
        What it returned in the ranks of this machine.

    Raises:
        HostFailed: a rank of another machine failed, or that machine is gone or has never come; says which one and why.
        Exception: of a rank of this machine, as `launch` raises it.
        torch.distributed.elastic.multiprocessing.api.SignalException: this process got SIGTERM, SIGINT, SIGHUP or
            SIGQUIT while it waited; the ranks of this machine have ended.
    """
    if options.start_method == "zygote":
        zygote.register(zygote.get_context())
        zygote.preload("torch.distributed.elastic.multiprocessing.api")
        with _as_agent():  # the environment in which it will be asked for a process
            zygote.warm()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    from torchcrew.launcher.group import AGENT

    outcome = _Outcome()
    job = _Job(nodes, options, Portable(fn), args, kwargs, outcome)
    gone = (RendezvousError, distributed().DistError)
    with _as_agent(), _quiet_elastic(), _store_of_rendezvous(nodes) as server:
        os.environ[AGENT] = "1"
        try:
            returned = elastic_launch(_config(nodes, options, server is not None), node_main)(job)
        except ChildFailedError as error:
            failed = outcome.error() or HostFailed(_how_main_ended(error))
        except gone as error:
            failed = outcome.error() or HostFailed(_how_meeting_failed(nodes, error))
        else:
            return next(iter(returned.values())) if returned else []
        finally:
            outcome.close()
            _leave(nodes, server)
    raise failed


def node_main(job: _Job) -> list[Any]:
    """Be the process of one machine that has its ranks; what elastic's agent starts."""
    place = Place.from_environment()
    job.outcome.clear()  # of the error before a restart
    fn = job.fn = job.fn.value if isinstance(job.fn, Portable) else job.fn  # a Portable where we were forked
    if job.options.start_method == "zygote":
        zygote.preload("torchcrew.launcher.member")
        if isinstance(fn, Script):
            zygote.preload(*imports_of_program(fn.name, fn.module))
        zygote.warm()
    try:
        with Meeting(job.nodes, place) as meeting:
            host = meeting.gather(job.options.ranks())
            return meeting.watched(lambda: _run(job, host))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        job.outcome.write(error)
        sys.exit(1)


def _run(job: _Job, host: Host) -> list[Any]:
    """Run the ranks of this machine."""
    with Crew.of(job.options, host) as crew:
        return crew.run(job.fn, *job.args, **job.kwargs)


# Elastic --------------------------------------------------------------------------------------------------------------


@dataclass
class _Job:
    """What node_main is told."""

    nodes: Nodes
    options: Options
    fn: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outcome: _Outcome


class _Outcome:
    """Room for the error of node_main, which elastic would make a text."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("torchcrew-outcome")

    def __reduce__(self) -> Any:
        return _outcome_arrives, (reduction.DupFd(self.fd),)

    def clear(self) -> None:
        """Have nothing there."""
        os.ftruncate(self.fd, 0)

    def write(self, error: BaseException) -> None:
        """Put an error and its cause there."""
        cause = failures.pack(error.__cause__) if error.__cause__ is not None else b""
        data = pickle.dumps((failures.pack(error), cause, failures.describe(error)))
        os.pwrite(self.fd, data, 0)

    def error(self) -> Exception | None:
        """What stands there."""
        size = os.fstat(self.fd).st_size
        if not size:
            return None
        packed, packed_cause, text = pickle.loads(os.pread(self.fd, size, 0))
        cause = failures.unpack(packed_cause)
        error = failures.unpack(packed) or cause or HostFailed(text)
        if error is not cause:
            error.__cause__ = cause
        return error

    def close(self) -> None:
        os.close(self.fd)


def _outcome_arrives(fd: Any) -> _Outcome:
    outcome = _Outcome.__new__(_Outcome)
    outcome.fd = fd.detach()
    return outcome


def _config(nodes: Nodes, options: Options, hosts_store: bool) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    configs: dict[str, Any] = dict(nodes.config)
    if nodes.backend == "static":
        configs["rank"] = nodes.rank
    elif nodes.backend == "c10d" and hosts_store:
        configs.setdefault("is_host", "true")
    address = nodes.local_address
    if address is None and (hosts_store or is_loopback(nodes.host)):
        address = nodes.host
    values: dict[str, Any] = {
        "min_nodes": nodes.least,
        "max_nodes": nodes.most,
        "nproc_per_node": 1,
        "logs_specs": DefaultLogsSpecs(log_dir=os.devnull),
        "run_id": nodes.run_id,
        "role": "torchcrew",
        "rdzv_endpoint": f"[{nodes.host}]:{nodes.port}" if ":" in nodes.host else f"{nodes.host}:{nodes.port}",
        "rdzv_backend": nodes.backend,
        "rdzv_configs": configs,
        "max_restarts": options.restarts,
        "start_method": "zygote" if options.start_method == "zygote" else "spawn",
        "local_addr": address,
        "shutdown_timeout": SHUTDOWN_TIMEOUT,
    }
    known = {each.name for each in dataclasses.fields(LaunchConfig)}  # `shutdown_timeout` is younger than torch 2.6
    return LaunchConfig(**{name: value for name, value in values.items() if name in known})


@contextlib.contextmanager
def _as_agent() -> Iterator[None]:
    """Give back what elastic takes from its caller: signal handlers and the environment."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    before = dict(os.environ)
    # The ranks have a store of ours, on the named interface; elastic's other one would listen on all.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:  # one that C code has set: nobody can put that back
                    signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Have elastic's loggers not repeat what the error says that is raised; ``LOGLEVEL`` brings them back."""
    loggers = []
    if "LOGLEVEL" not in os.environ:
        names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
        loggers = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    for logger, _ in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in loggers:
            logger.setLevel(level)


def _how_main_ended(error: Any) -> str:
    """A text for the end of node_main that it has said nothing about."""
    codes = [failure.exitcode for failure in error.failures.values()]
    code = codes[0] if codes else None
    name = failures.signal_name(code)
    how = f"was killed by {name}" if name else f"ended with exit code {code}"
    return f"the process that has the ranks of this machine {how} before them"


def _how_meeting_failed(nodes: Nodes, error: Exception) -> str:
    """A text for an end of elastic's rendezvous."""
    cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
    return f"the rendezvous at {nodes.endpoint} failed or is gone: {type(error).__name__}: {error}{cause}"


@contextlib.contextmanager
def _store_of_rendezvous(nodes: Nodes) -> Iterator[Any]:
    """Where the endpoint is this machine's, have its store listen there only; None where it is another's.

    Torch's own would listen on all interfaces. One that is there already in this process is the one it takes.
    """
    server = None
    if nodes.backend == "c10d" or nodes.rank == 0:
        listener = listen(nodes.host, nodes.port)
        if listener is not None:
            server = serve(nodes.host, listener)
    yield server


def _leave(nodes: Nodes, server: Any) -> None:
    """Have the machine with the store of the rendezvous wait for the others, which need it to learn of their end."""
    dist = distributed()
    with contextlib.suppress(Exception):  # it is gone
        store: Any = server
        if store is None:
            timeout = timedelta(seconds=LEAVE_TIMEOUT)
            store = dist.TCPStore(nodes.host, nodes.port, is_master=False, timeout=timeout, wait_for_workers=False)
        store = dist.PrefixStore(f"torchcrew/{nodes.run_id}", store)
        left = store.add("left", 1)
        deadline = time.monotonic() + LEAVE_TIMEOUT
        while server is not None and time.monotonic() < deadline and store.check(["nodes"]):
            if left >= int(store.get("nodes")):
                break
            time.sleep(0.02)
            left = store.add("left", 0)
