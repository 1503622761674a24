"""`torch.distributed.ProcessGroup` for the ranks of one host, over memory that they share.

    torch.distributed.all_reduce, DistributedDataParallel, FSDP2, functional collectives
      ─► CrewProcessGroup: torch's names and options ─► Lane: one after the other ─► Collectives ─► Streams ─► Turns

Asynchronous   with ``async_op=True`` a collective runs in a thread of the group, in its turn; in the backward pass, as
               DistributedDataParallel calls it, and with ``async_op=False`` in the thread that calls.
Death          of a peer: `PeerDied` within some 10 ms in every rank that waits for it, then in whatever it calls.
Stuck          `CollectiveTimeout` after the group's timeout, with the Python stacks of those who did not come.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.futures import Future

from torchcrew.collectives.collectives import Collectives
from torchcrew.collectives.lane import Lane
from torchcrew.collectives.mail import Mail
from torchcrew.collectives.meeting import Meeting
from torchcrew.collectives.places import Places
from torchcrew.collectives.registration import NAME
from torchcrew.collectives.streams import Streams
from torchcrew.torch_private import completed_work, is_in_backward

__all__ = ("CrewProcessGroup",)

#: Seconds that the thread of a group which is destroyed has for what is pending.
_CLOSING = 5.0


# Methods of torch's class have several signatures each, for C++'s sake; ours have the one that torch calls.
_ProcessGroup: Any = distributed.ProcessGroup


class CrewProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """One rank's end of a group.

    Args:
        meeting: the others.
        rank: of this process in the group.
        ranks: of all of them, in the job.
        timeout: of a collective; as for gloo, each can have its own.
    """

    def __init__(self, meeting: Meeting, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        self._rank, self._size = rank, len(ranks)
        self._timeout = timeout.total_seconds()
        self._group_name = self._group_description = ""
        self._meeting = meeting
        self._places = Places(meeting.peers)
        self._streams = Streams(meeting.segment, meeting.turns, self._places)
        self._collectives = Collectives(self._streams, meeting.turns, [peer.rank for peer in meeting.peers.everybody])
        self._pid = os.getpid()
        self._is_shut = False
        self._lane = Lane(f"torchcrew-group-{ranks[rank]}")
        done: Future[Any] = Future()
        done.set_result([])
        self._done = completed_work(done)
        self._mailing = threading.Lock()
        self._mail: Mail | None = None

    # What torch asks of a group ---------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """The name that `init_process_group` takes."""
        return NAME

    def getSize(self) -> int:
        """How many ranks."""
        return self._size

    def getRank(self) -> int:
        """Of this process."""
        return self._rank

    def setGroupName(self, name: str) -> None:
        """What functional collectives find the group by."""
        self._group_name = name

    def getGroupName(self) -> str:
        """As it was set."""
        return self._group_name

    def setGroupDesc(self, description: str) -> None:
        """What it is for."""
        self._group_description = description

    def getGroupDesc(self) -> str:
        """As it was set."""
        return self._group_description

    @property
    def _device_types(self) -> list[torch.device]:
        """What some of torch's functions ask before they use a group."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """As a group of one backend, it is its own."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Of collectives from now on."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group: peers that wait for this rank learn it at once."""
        if self._pid != os.getpid() or self._is_shut:
            return  # a forked child has no part in it
        self._is_shut = True
        is_idle = self._lane.close(_CLOSING)
        if self._mail is not None:
            is_idle = self._mail.close(_CLOSING) and is_idle
        self._meeting.turns.leave()
        with self._lane.nobody_runs(_CLOSING) as is_free:
            if is_idle and is_free:  # else a thread is in the middle of it, and needs what would be closed here
                self._meeting.close()
                self._streams.clear()
                self._places.clear()

    def abort(self) -> None:
        """As `shutdown`, without finishing what is pending."""
        self._meeting.turns.give_up("its process group was aborted")
        self.shutdown()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.shutdown()

    # Collectives ------------------------------------------------------------------------------------------------------

    def _run(self, options: Any, result: Any, job: Callable[..., Any], *args: Any) -> Any:
        """Run a collective here, or, if it is asynchronous, in the group's thread; returns a `Work`."""
        timeout = self._seconds(options)
        self._collectives.usable()
        if (options is None or getattr(options, "asyncOp", True)) and not is_in_backward():
            return self._lane.submit(result, job, *args, timeout=timeout)
        self._lane.run(job, *args, timeout=timeout)
        if options is None or getattr(options, "asyncOp", True):
            done: Future[Any] = Future()
            done.set_result(result)
            return completed_work(done)
        return self._done

    def _seconds(self, options: Any) -> float:
        timeout = getattr(options, "timeout", None)
        if timeout is None or timeout < timedelta(0):
            return self._timeout
        return float(timeout.total_seconds()) or self._timeout

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce in place."""
        op = distributed.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._run(opts, tensors, self._collectives.all_reduce, tensors, op)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Copy the root's tensor."""
        root = 0 if opts is None else opts.rootRank
        return self._run(opts, tensors, self._collectives.broadcast, tensors[0], root)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce into the root's tensor."""
        return self._run(opts, tensors, self._collectives.reduce, tensors[0], opts.rootRank, opts.reduceOp)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Every rank's tensor, to all."""
        return self._run(opts, outputs[0], self._collectives.all_gather, outputs[0], inputs[0])

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Several of them: ``outputs[rank]`` has what is in ``inputs`` there."""
        if len(outputs) != self._size or any(len(tensors) != len(inputs) for tensors in outputs):
            raise ValueError(
                f"all_gather_coalesced of {len(inputs)} tensors needs {self._size} lists of as many outputs, "
                f"but got lists of {[len(tensors) for tensors in outputs]}"
            )
        columns = [list(column) for column in zip(*outputs, strict=True)]
        return self._each(opts, [self._collectives.all_gather] * len(inputs), columns, inputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Every rank's tensor, behind each other in one."""
        return self._run(opts, [output], self._collectives.all_gather_into, output, input)

    _allgather_base = all_gather_single

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Several of them."""
        return self._each(opts, [self._collectives.all_gather_into] * len(inputs), outputs, inputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Every rank's tensor, to the root."""
        outs = outputs[0] if outputs else []
        return self._run(opts, outs, self._collectives.gather, outs, inputs[0], opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """A tensor of the root to every rank."""
        ins = inputs[0] if inputs else []
        return self._run(opts, outputs, self._collectives.scatter, outputs[0], ins, opts.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Reduce a list of tensors, of which each rank gets one."""
        return self._run(opts, outputs, self._collectives.reduce_scatter, outputs, inputs, opts.reduceOp)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Reduce a tensor, of which each rank gets an equal part."""
        op = distributed.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._run(opts, [output], self._collectives.reduce_scatter, [output], [[input]], op)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Several of them."""
        op = distributed.ReduceOp.SUM if opts is None else opts.reduceOp
        lists = [[tensor] for tensor in inputs]
        return self._run(opts, outputs, self._collectives.reduce_scatter, outputs, lists, op)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """A tensor from each rank to each."""
        return self._run(opts, outputs, self._collectives.all_to_all, outputs, inputs)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        """A part of a tensor, along its first dimension, from each rank to each."""
        outs, ins = _split(output, output_splits, self._size), _split(input, input_splits, self._size)
        return self._run(opts, [output], self._collectives.all_to_all, outs, ins)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all."""
        return self._run(opts, [], self._collectives.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all; every barrier of this group names those who do not come."""
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        self._lane.run(self._collectives.barrier, timeout=seconds)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _mail_of_use(self) -> Mail:
        """The messages of this rank; made by the first of them."""
        self._collectives.usable()
        with self._mailing:
            if self._mail is None:
                self._mail = Mail(self._meeting.turns, f"torchcrew-mail-{self._meeting.peers.me.rank}")
            return self._mail

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        """Send a tensor; messages and collectives do not wait for each other."""
        return self._mail_of_use().send(tensors, dst, tag, self._timeout)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        """Receive the next message with this tag."""
        return self._mail_of_use().receive(tensors, src, tag, self._timeout)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        """Receive the next one from whoever sends; the `Work` says who it was."""
        return self._mail_of_use().receive_any(tensors, tag, self._timeout)

    def _each(self, options: Any, jobs: Sequence[Callable[..., Any]], outputs: Any, inputs: Any) -> Any:
        def run(timeout: float) -> None:
            for job, output, input in zip(jobs, outputs, inputs, strict=True):
                job(output, input, timeout=timeout)

        flat = [tensor for output in outputs for tensor in (output if isinstance(output, list) else [output])]
        return self._run(options, flat, run)


def _split(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """The parts of a tensor along its first dimension; equal ones where no sizes are given."""
    if not sizes:
        if tensor.dim() == 0 or tensor.shape[0] % ranks:
            raise ValueError(f"all_to_all without split sizes needs a first dimension that {ranks} ranks divide")
        sizes = [tensor.shape[0] // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != tensor.shape[0]:
        raise ValueError(f"the split sizes {list(sizes)} do not add up to {tensor.shape[0]}, for {ranks} ranks")
    return list(torch.split(tensor, list(sizes)))
