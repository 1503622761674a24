"""The process group that is ready when a rank's function begins, and an `init_process_group` that knows of it.

    rank i
    set_environment(plan)   RANK, WORLD_SIZE, MASTER_ADDR ... as torchrun has them
    make_ready(plan)        the rendezvous answers `env://`; the gate stands in `init_process_group`; a group is made
    fn()                    init_process_group(...)    gate: │ asks for what is there    returns
                                                             │ the first to ask, else    ours is destroyed, theirs made
                                                             └ a later one               ValueError, both sides named
                            destroy_process_group()    stock's; the next init_process_group makes one
    renew(plan)             before the next function, if some rank has lost its group

Owner      each rank has its own. Nothing listens where all ranks are of one machine, but gloo's sockets, where gloo was
           asked for, and those on the loopback interface; else rank 0 serves torch's store at the job's address.
Death      a rank that ends before it came: the others get an error at once (one machine), or torch's timeout. Later
           deaths are noticed by the backend, and by the launcher, which ends the others.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed

from torchcrew import torch_private
from torchcrew.collectives import registration
from torchcrew.crew import rendezvous
from torchcrew.crew.rank import Rank
from torchcrew.launcher.device import device

if TYPE_CHECKING:
    from torchcrew.crew.rendezvous import Rendezvous

__all__ = (
    "AGENT",
    "MEMBER",
    "Plan",
    "begin_run",
    "environment",
    "forget",
    "has_group",
    "make_ready",
    "release",
    "renew",
    "set_environment",
)

#: Set in the environment of a process that has to start ranks although a launcher's variables say that it is one.
AGENT = "TORCHCREW_AGENT"
#: Which process the other variables are about: what `multiprocessing` starts or a rank forks has them, and is no rank.
MEMBER = "TORCHCREW_MEMBER"

#: What torch makes for the two common types of device, where nobody says otherwise.
_DEFAULTS = {"cpu": "gloo", "cuda": "nccl"}
#: What `init_process_group` takes for "nothing given", where that is not its default.
_NOTHING = {"rank": (-1,), "world_size": (-1,), "group_name": ("",), "backend": ("", "undefined")}


@dataclass(frozen=True)
class Plan:
    """The place of one rank, and the group it shall find. It can be pickled while a process is being started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    first: int
    """The rank of this machine's first."""
    backend: str | None
    """Of the group that is ready; None: none is made."""
    address: tuple[str, int]
    """MASTER_ADDR and MASTER_PORT."""
    rendezvous: Rendezvous | None
    """Where the ranks of one machine meet; None: by torch's store at the address."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More of the environment, or other than would be set: restart count, run id, ..."""


def environment(plan: Plan) -> dict[str, str]:
    """The variables that torchrun sets, for this rank."""
    variables = {
        "RANK": plan.rank,
        "LOCAL_RANK": plan.local_rank,
        "WORLD_SIZE": plan.world_size,
        "LOCAL_WORLD_SIZE": plan.local_world_size,
        "GROUP_RANK": plan.first // plan.local_world_size,
        "GROUP_WORLD_SIZE": -(-plan.world_size // plan.local_world_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": plan.rank,
        "ROLE_WORLD_SIZE": plan.world_size,
        "MASTER_ADDR": plan.address[0],
        "MASTER_PORT": plan.address[1],
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "none",
        # An agent's store is one that serves already at that address.
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") or 1,
    }
    return {name: str(value) for name, value in variables.items()} | dict(plan.env)


def set_environment(plan: Plan) -> None:
    """Have the environment say which rank this is, as torchrun's does."""
    os.environ.pop(AGENT, None)  # this process is a rank, whoever started it
    os.environ.update(environment(plan))
    os.environ[MEMBER] = str(os.getpid())


def make_ready(plan: Plan) -> None:
    """Make the group that the plan asks for, and have `init_process_group` know of it. All ranks call it.

    Called again, it makes the group anew. Does nothing where torch was built without `torch.distributed`.

    Raises:
        RuntimeError: the ranks cannot meet: one has ended, or the address does not answer (`DistStoreError` and
            `DistNetworkError` are such); or torch has no such backend.
    """
    global _gate
    if not torch.distributed.is_available():
        return
    registration.register()
    if _gate is None:
        _gate = _Gate(plan)
    _gate.plan = plan
    if plan.backend is not None:
        _gate.make()


def renew(plan: Plan) -> None:
    """Replace the group, or what is left of it, by a new one as the plan says. All ranks call it.

    Raises:
        RuntimeError: see `make_ready`.
    """
    make_ready(plan)


def begin_run() -> None:
    """Have the next `init_process_group` get what it asks for, as the first in a rank: another function begins."""
    if _gate is not None:
        _gate.provisional = True


def has_group() -> bool:
    """Whether this rank has a group of all ranks, be it ours or one that the user's code made."""
    dist: Any = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return False
    if _gate is None:
        return True
    own = dist.get_rank(), dist.get_world_size()
    return own == (_gate.plan.rank, _gate.plan.world_size)


def release(unless_of: str | None = None) -> None:
    """Destroy the group if it is ours, and not of the backend named."""
    if _gate is not None and _gate.is_ours() and (unless_of is None or _gate.plan.backend != unless_of):
        _gate.drop()


def forget() -> None:
    """Put torch's own functions back, and destroy the group if it is ours."""
    global _gate
    release()
    if _gate is not None:
        _gate.close()
    _gate = None


_gate: _Gate | None = None


class _Gate:
    """Stands in for `init_process_group`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.dist: Any = torch.distributed
        self.signature = inspect.signature(self.dist.init_process_group)
        self.provisional = True  # nobody has asked for a group
        self.making = False  # it is our own call that comes
        self.group: Any = None  # the last one that was made
        self.is_users = False  # it was made by a call that was not ours
        self.there: dict[str, Any] = {}  # what it is, as a call would say it
        self.hooks: tuple[Any, Any] | None = None  # sys.excepthook before and after
        if plan.rendezvous is not None:
            self.leave = plan.rendezvous.attend(Rank(plan.rank, plan.world_size), plan.address)
        else:
            self.leave = rendezvous.attend_at(plan.address)
        self.restore = torch_private.replace_init_process_group(self.wrap)

    def close(self) -> None:
        """Undo what was done to torch."""
        self.restore()
        self.leave()

    def wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """What is called instead of ``stock``."""

        @functools.wraps(stock)
        def init_process_group(*args: Any, **options: Any) -> Any:
            return self.pass_through(stock, args, options)

        return init_process_group

    def pass_through(self, stock: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call stock's, unless the group that it would make is there."""
        if self.making:
            return stock(*args, **options)
        try:
            call = dict(self.signature.bind(*args, **options).arguments)
        except TypeError:
            return stock(*args, **options)  # which says what is wrong
        if self.dist.is_initialized():
            differences = self.differences(call)
            if not differences:
                self.accept(call)
                return None
            if not self.provisional:
                raise ValueError(self.explanation(differences))
            self.drop()
        before = sys.excepthook
        made = stock(**self.without_port(call))
        self.took(before, call)
        return made

    def make(self) -> None:
        """Make ours, in place of any."""
        if self.dist.is_initialized():
            self.drop()
        backend = str(self.plan.backend)
        if "nccl" in _devices(backend).values() and (own := device()).type == "cuda":
            torch.cuda.set_device(own)
        before = sys.excepthook
        self.making = True
        try:
            self.dist.init_process_group(backend, rank=self.plan.rank, world_size=self.plan.world_size)
        finally:
            self.making = False
        self.took(before, None)

    def took(self, before: Any, call: dict[str, Any] | None) -> None:
        """Take note of the group that was made."""
        self.group, self.is_users = self.dist.group.WORLD, call is not None
        self.hooks = before, sys.excepthook
        self.provisional = call is None
        self.there = {"backend": str(self.plan.backend), "address": "{}:{}".format(*self.plan.address)}
        if call is not None:
            self.there = {"backend": "undefined", **self.demands(call)}
        self.there |= {"rank": self.dist.get_rank(), "world_size": self.dist.get_world_size()}

    def drop(self) -> None:
        """Destroy the group in place, with the line prefix that it has put before tracebacks."""
        self.dist.destroy_process_group()
        if self.hooks is not None and sys.excepthook is self.hooks[1]:
            sys.excepthook = self.hooks[0]
        self.hooks = self.group = None

    def is_ours(self) -> bool:
        """Whether the group in place is the one that was made before the function began."""
        return self.is_known() and not self.is_users

    def is_known(self) -> bool:
        """Whether the group in place came through here."""
        return bool(self.dist.is_initialized()) and self.dist.group.WORLD is self.group

    def accept(self, call: dict[str, Any]) -> None:
        """Let somebody have the group in place."""
        timeout: timedelta | None = call.get("timeout")
        if timeout is not None:
            torch_private.set_group_timeout(timeout)
        self.provisional = False

    def differences(self, call: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """What a call asks for that the group in place is not: the name of it, what there is, what is asked for.

        What a call does not say is as it is.
        """
        if not self.is_known():
            return [("group", "that was made in another way", "a new one")]
        found = []
        for name, asked in self.demands(call).items():
            there: Any = self.there.get(name)
            if there is asked or (_serves(there, asked) if name == "backend" else there == asked):
                continue
            found.append((name, there, asked))
        return found

    def demands(self, call: dict[str, Any]) -> dict[str, Any]:
        """What a call says of the group, itself or by its address or by what the user has put into the environment."""
        url = urlparse(call.get("init_method") or "env://")
        query = dict(parse_qsl(url.query))
        demands = {
            name: value
            for name, value in call.items()
            if name not in ("init_method", "timeout") and not _is_nothing(name, value)
        }
        for name, ours in (("rank", self.plan.rank), ("world_size", self.plan.world_size)):
            text = query.get(name) or os.environ.get(name.upper()) or str(ours)
            if name not in demands and (name in query or text != str(ours)):
                demands[name] = int(text)
        if url.scheme == "env":
            host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            if (host or port) and not rendezvous.same_address(host, port, self.plan.address):
                demands["address"] = f"{host}:{port}"
        elif url.scheme != "tcp" or not rendezvous.same_address(url.hostname, str(url.port), self.plan.address):
            demands["address"] = str(call["init_method"])
        return demands

    def without_port(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call, but where it names the job's own address: who answers ``env://`` needs no port, and is there."""
        demands = self.demands(call)
        if "address" in demands or urlparse(call.get("init_method") or "").scheme != "tcp":
            return call
        numbers = {name: demands[name] for name in ("rank", "world_size") if name in demands}
        return {name: value for name, value in call.items() if name != "init_method"} | numbers

    def explanation(self, differences: list[tuple[str, Any, Any]]) -> str:
        """Stock's words for a second group, and then ours."""
        there = ", ".join(f"{name} {theirs}" for name, theirs, _ in differences)
        asked = ", ".join(f"{name} {theirs}" for name, _, theirs in differences)
        who = "was ready before this function began" if self.is_ours() else "was made by an earlier call"
        return (
            "trying to initialize the default process group twice!\n"
            f"The group in place {who} and has been asked for since. It has {there}; this call asks for {asked}.\n"
            "Call torch.distributed.destroy_process_group() before it, or ask for the group in place: "
            "init_process_group() without arguments does."
        )


def _is_nothing(name: str, value: Any) -> bool:
    """Whether this is as if the argument was not given."""
    return value is None or (isinstance(value, (int, str)) and value in _NOTHING.get(name, ()))


def _devices(backend: str) -> dict[str, str]:
    """The backend of each type of device, as a name or a map says it."""
    c10d: Any = torch.distributed.distributed_c10d
    if ":" not in backend and backend.lower() not in c10d.Backend.backend_list:
        return {"": backend.lower()}  # torch would warn that it does not know its devices
    config = c10d.BackendConfig(c10d.Backend(backend))
    return {name: str(value) for name, value in config.get_device_backend_map().items()}


def _serves(there: str, asked: str) -> bool:
    """Whether a group of one backend does what another one would, on the devices that this machine has.

    Who says "gloo" gets gloo. Who says torch's own choice for each type of device says no more than who says nothing:
    there our backend serves the CPU.
    """
    if asked.lower() == there.lower():
        return True
    try:
        have, want = _devices(there), _devices(asked)
    except ValueError:
        return False  # not a backend: stock says so
    accelerator = torch.accelerator.current_accelerator()
    usable = {"cpu", *have} | ({accelerator.type} if accelerator is not None else set())
    if want.items() >= _DEFAULTS.items():
        want |= {name: backend for name, backend in have.items() if backend == registration.NAME}
    relevant = {name: backend for name, backend in want.items() if name in usable}
    return bool(relevant) and relevant.items() <= have.items()
