"""What ranks are told when they start: who they are, and where they meet."""

from __future__ import annotations

import socket

import torch.distributed

from torchcrew.collectives import registration
from torchcrew.crew.rendezvous import Rendezvous
from torchcrew.launcher.group import Plan
from torchcrew.launcher.options import Host, Options

__all__ = ("Starting",)


class Starting:
    """One start of all ranks of this machine.

    Args:
        options: how.
        count: of the ranks.
        host: the place of this machine, if others take part.
        restart: how often they were started before.
    """

    def __init__(self, options: Options, count: int, host: Host | None, restart: int) -> None:
        self.count = count
        self.first = 0 if host is None else host.first
        self._world_size = count if host is None else host.world_size
        self._backend = options.backend_for(count, 1 if host is None else host.nodes)
        if options.backend == "auto" and not torch.distributed.is_available():
            self._backend = None
        _check_backend(self._backend)
        self._env = _elastic_variables(options, host, restart)
        #: Keeps MASTER_PORT for the ranks; to be closed when they are gone.
        self.port: socket.socket | None = None
        self._rendezvous: Rendezvous | None = None
        if host is None:
            self.port = _reserve_port()
            self._address = self.port.getsockname()
            try:
                self._rendezvous = Rendezvous()
            except BaseException:
                self.port.close()
                raise
        else:
            self._address = host.address, host.port

    def plan(self, index: int) -> Plan:
        """That of a rank of this machine."""
        return Plan(
            rank=self.first + index,
            world_size=self._world_size,
            local_rank=index,
            local_world_size=self.count,
            first=self.first,
            backend=self._backend,
            address=self._address,
            rendezvous=self._rendezvous,
            env=self._env,
        )

    def done(self) -> None:
        """All ranks have their plans: close this process's copies of what they meet by."""
        if self._rendezvous is not None:
            self._rendezvous.close()


def _check_backend(backend: str | None) -> None:
    """Refuse a name that no rank could make a group of, before any is started."""
    if backend is None:
        return
    if not torch.distributed.is_available():
        raise RuntimeError(
            f"torch was built without torch.distributed, which the backend {backend!r} belongs to: backend=None makes "
            "no process group"
        )
    registration.register()
    known = [name for name in torch.distributed.Backend.backend_list if name != "undefined"]
    names = [part.rpartition(":")[2].lower() for part in backend.split(",") if part]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"backend {unknown[0]!r} is none of this torch's: {', '.join(known)}, or None for no group")


def _reserve_port() -> socket.socket:
    """A port of this machine that nobody else is given: bound, but without listening.

    torch's stores set the same option, so a rank that makes one can listen there.
    """
    port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
    except BaseException:
        port.close()
        raise
    return port


def _elastic_variables(options: Options, host: Host | None, restart: int) -> dict[str, str]:
    """What programs read that count their restarts."""
    return {
        "TORCHELASTIC_RESTART_COUNT": str(restart if host is None else host.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(options.restarts if host is None else host.max_restarts),
        "TORCHELASTIC_RUN_ID": "torchcrew" if host is None else host.run_id,
        "GROUP_RANK": str(0 if host is None else host.node_rank),
        "GROUP_WORLD_SIZE": str(1 if host is None else host.nodes),
        "TORCHELASTIC_USE_AGENT_STORE": str(host is not None),  # `nodes` serves the store
    }
