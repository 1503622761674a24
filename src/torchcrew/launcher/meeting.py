"""How the machines of one start of a job learn of each other, of a failure, and of a machine that is gone.

    node_main on machine i                           the rendezvous' store, in some machine's agent
    Meeting.gather()    ranks/i, store       ◄─────► what each has, where the ranks shall meet
    Meeting.watched()   run the ranks
      thread, each 0.5 s: alive/i, failure   ◄─────► signs of life; the first failure
      at the end          done/i

Owner      machine 0's node_main has the server of the ranks' store, on the interface by which the others know it.
Death      the failed machine writes `failure`; one that is gone gives no sign of life any more; a store that does not
           answer is gone with its machine. In each case the thread has the main thread end the ranks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from torchcrew.crew import reports
from torchcrew.errors import HostFailed
from torchcrew.launcher.options import Host

if TYPE_CHECKING:
    from torchcrew.launcher.nodes import Nodes

__all__ = ("Meeting", "Place", "distributed", "is_loopback", "listen", "serve")

#: How often a machine gives a sign of life, in seconds.
PERIOD = 0.5
#: How long one may give none, in seconds: what elastic allows before it takes a machine for gone.
SILENCE = 15.0
#: How long a machine may need to start node_main after the rendezvous, in seconds: torch from a cold network disk.
GATHER_TIMEOUT = 180.0
#: How long an answer of the store may take, in seconds.
STORE_TIMEOUT = 10.0
#: How often the main thread is told that the job is over, in seconds, until it has noticed.
REMIND_EVERY = 0.5
#: How long to wait for the machine that failed first, in seconds, where an error says that a peer is gone.
CAUSE_TIMEOUT = 2.0
#: Elastic's words for a rank, which mean node_main; the crew gives the ranks their own.
_OF_ELASTIC = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
)


@dataclass(frozen=True)
class Place:
    """What elastic says of this machine."""

    rank: int
    count: int
    address: str
    """Of machine 0."""
    port: int
    restart_count: int
    max_restarts: int

    @classmethod
    def from_environment(cls) -> Place:
        """Read it, and take it out of the environment, where it would be taken for a rank's."""
        environ = {name: os.environ.pop(name, "") for name in _OF_ELASTIC}
        return cls(
            int(environ["GROUP_RANK"]),
            int(environ["WORLD_SIZE"]),  # of elastic's workers, one a machine
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            int(environ["TORCHELASTIC_RESTART_COUNT"] or 0),
            int(environ["TORCHELASTIC_MAX_RESTARTS"] or 0),
        )


class _Interrupted(KeyboardInterrupt):
    """Raised in the main thread by the watch: another machine has failed, or is gone."""


class Meeting:
    """The machines of one start of the job, as one of them sees them, through the store of the rendezvous."""

    def __init__(self, nodes: Nodes, place: Place) -> None:
        dist = distributed()
        self.place = place
        self.run_id = nodes.run_id
        timeout = timedelta(seconds=STORE_TIMEOUT)
        store = dist.TCPStore(nodes.host, nodes.port, is_master=False, timeout=timeout, wait_for_workers=False)
        # What elastic has agreed on is new in every round but with "static", where all machines count alike.
        round_ = place.restart_count if nodes.backend == "static" else f"{place.address}:{place.port}"
        self.job: Any = dist.PrefixStore(f"torchcrew/{nodes.run_id}", store)
        self.store: Any = dist.PrefixStore(f"{round_}", self.job)
        self.server: Any = None
        self.names: list[str] = [f"node {index}" for index in range(place.count)]
        self.problem: Exception | None = None
        self.armed = False
        self.stop = threading.Event()
        self.watcher = threading.Thread(target=self._watch, name="torchcrew-nodes", daemon=True)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self.stop.set()
        if self.watcher.ident is not None:
            self.watcher.join(STORE_TIMEOUT)

    def gather(self, ranks: int) -> Host:
        """Tell the others of this machine, and learn of them.

        Raises:
            HostFailed: one has not come in time.
            ValueError: they have not the same number of ranks.
        """
        place = self.place
        self.job.set("nodes", str(place.count))
        self.store.set(f"ranks/{place.rank}", f"{ranks} {socket.gethostname()}")
        if place.rank == 0:
            self._open_store()
        others = self._wait_for([f"ranks/{index}" for index in range(place.count)])
        address, port, restart_count = self._wait_for(["store"])[0].split()
        counts = [int(other.split()[0]) for other in others]
        self.names = [f"node {index} ({other.split()[1]})" for index, other in enumerate(others)]
        if len(set(counts)) > 1:
            each = ", ".join(f"{name} has {count}" for name, count in zip(self.names, counts, strict=True))
            raise ValueError(f"all machines of a job need the same number of ranks, but {each}: say --nproc-per-node")
        return Host(
            node_rank=place.rank,
            nodes=place.count,
            address=address,
            port=int(port),
            first=place.rank * ranks,
            world_size=place.count * ranks,
            run_id=self.run_id,
            restart_count=int(restart_count),  # elastic's own differ where a machine has joined
            max_restarts=place.max_restarts,
        )

    def _open_store(self) -> None:
        """Make the store in which the ranks meet, on the interface by which the others know this machine."""
        address = self.place.address
        # An address that is only the router's cannot be bound: then on all, as torch's own.
        listener = listen(address, 0) or listen("", 0)
        if listener is None:
            raise HostFailed(f"{self.names[0]} can listen on no port")
        self.server = serve(address, listener)
        self.store.set("store", f"{address} {self.server.port} {self.place.restart_count}")

    def _wait_for(self, keys: Sequence[str]) -> list[str]:
        deadline = time.monotonic() + GATHER_TIMEOUT
        while not self.store.check(list(keys)):
            self._look()
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self.store.check([key])]
                raise HostFailed(f"{', '.join(missing)} did not come in {GATHER_TIMEOUT:.0f} s")
            time.sleep(0.01)
        return [self.store.get(key).decode() for key in keys]

    def watched(self, run: Callable[[], list[Any]]) -> list[Any]:
        """Run the ranks, and wait until those of all machines have ended well.

        Raises:
            HostFailed: another one failed first.
            Exception: of ``run``, which the others are told.
        """
        signal.signal(signal.SIGUSR1, self._interrupt)
        self.armed = True
        self.watcher.start()
        try:
            try:
                result = run()
                self.store.set(f"done/{self.place.rank}", "")
                while not self.store.check([f"done/{index}" for index in range(self.place.count)]):
                    time.sleep(0.02)
            finally:
                self.armed = False
        except _Interrupted:
            assert self.problem is not None
            raise self.problem from None
        except Exception as error:
            self._tell(error)
            raise
        return result

    def _interrupt(self, *_: object) -> None:
        if self.armed:
            raise _Interrupted

    def _tell(self, error: Exception) -> None:
        """Tell the others why this machine fails; raise what another one says if this is but its consequence."""
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if reports.says_peer_is_gone(error):
            deadline = time.monotonic() + CAUSE_TIMEOUT
            while time.monotonic() < deadline:
                self._look()
                time.sleep(0.02)
        with contextlib.suppress(Exception):  # the store is gone: so are the others
            said = self.store.compare_set("failure", "", f"{self.place.rank} {cause}").decode()
            if not said.startswith(f"{self.place.rank} "):
                self._look()

    def _look(self) -> None:
        """Raise what another machine says of its failure."""
        if self.store.check(["failure"]):
            rank, _, text = self.store.get("failure").decode().partition(" ")
            if int(rank) != self.place.rank:
                raise HostFailed(f"{self.names[int(rank)]} failed: {text}")

    def _watch(self) -> None:
        """Give signs of life, and look for the others'; the body of the thread."""
        seen = {index: (0, time.monotonic()) for index in range(self.place.count) if index != self.place.rank}
        while not self.stop.wait(PERIOD):
            try:
                self._breathe(seen)
            except HostFailed as problem:
                self._give_up(problem)
            except Exception as problem:
                self._give_up(HostFailed(f"the store of the rendezvous is gone, and so is its machine: {problem}"))

    def _breathe(self, seen: dict[int, tuple[int, float]]) -> None:
        self.store.add(f"alive/{self.place.rank}", 1)
        self._look()
        now = time.monotonic()
        for index, (count, moment) in seen.items():
            latest = self.store.add(f"alive/{index}", 0)
            if latest != count:
                seen[index] = latest, now
            elif now > moment + SILENCE and not self.store.check([f"done/{index}"]):
                raise HostFailed(f"{self.names[index]} has given no sign of life for {SILENCE:.0f} s")

    def _give_up(self, problem: HostFailed) -> NoReturn:
        self.problem = problem
        while self.armed:  # an exception raised in the middle of a finalizer is swallowed
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]
            self.stop.wait(REMIND_EVERY)
        sys.exit()  # ends this thread


# Stores ---------------------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket | None:
    """Listen at an address of this machine; None where it is another's, or taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError:
        return None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(socket.SOMAXCONN)
    except OSError:
        sock.close()
        return None
    return sock


def serve(host: str, listener: socket.socket) -> Any:
    dist = distributed()
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=STORE_TIMEOUT),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def distributed() -> Any:
    """`torch.distributed`, whose type hints leave out the stores. Imported late: a zygote shall do so meanwhile."""
    import torch.distributed

    return torch.distributed


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0]).is_loopback
    except (OSError, ValueError):
        return False
