"""Where a rank computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchcrew.launcher import identity

if TYPE_CHECKING:
    import torch

__all__ = ("device",)


def device() -> torch.device:
    """Return the device of this rank: its GPU where there are any, and the CPU elsewhere.

    A program written with it runs unchanged on a machine without GPUs, on one with a GPU for each rank, and on one
    with fewer GPUs than ranks, which then share them. The rank among those of this machine is, in this order:

    - the environment variable ``LOCAL_RANK``, which `torchrun` sets;
    - the number that `torchcrew.multiprocessing.spawn` gave to this process;
    - 0.

    Only the GPUs in ``CUDA_VISIBLE_DEVICES`` count, as everywhere in torch. Nothing is allocated, and the current
    device is not changed: `torch.cuda.set_device(torchcrew.device())` does that where a program needs it.

    Returns:
        ``torch.device("cuda", n)`` with n below `torch.cuda.device_count()`, or ``torch.device("cpu")``.

    Raises:
        ValueError: ``LOCAL_RANK`` is set and is no number from 0 on.

    Example:
        ```python
        def train(rank, data):
            device = torchcrew.device()
            model = DistributedDataParallel(Model().to(device))
        ```
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", identity.local_rank() % torch.cuda.device_count())
