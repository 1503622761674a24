"""Have `torch.distributed` know the backend `crew`, without importing anything for it before it is used."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ("NAME", "autoload", "register")

NAME = "crew"


def register() -> None:
    """Tell `torch.distributed` of the backend; done again, nothing. Nothing, too, where torch has no distributed."""
    import torch.distributed

    if torch.distributed.is_available() and NAME not in torch.distributed.Backend.backend_list:
        torch.distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def autoload() -> None:
    """What `import torch` calls at its end, by the entry point that the installed package has (`torch.backends`).

    torch's own way for packages that bring a backend; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` keeps it from all of them.
    """
    if "torch.distributed.distributed_c10d" in sys.modules:
        register()


def _create(options: Any, _: Any) -> Any:
    """Make a group: called by every rank of it, with the same store."""
    from torchcrew.collectives.making import make

    return make(options)
