"""What a worker's error means on this machine, where its own text does not say it."""

from __future__ import annotations

import sys
from typing import Any

from torchcrew.crew import functions

__all__ = ("explain",)

#: What torch says when a program asks for a GPU and there is none: a build without CUDA, no driver, no device.
_NO_GPU = (
    "not compiled with CUDA",
    "compiled without CUDA",
    "Cannot access accelerator device when none is available",
    "has no attribute '_cuda_",
    "requires CUDA support",
    "Tried to instantiate dummy base class",
    "without ATen_cuda library",
    "not linked with support for cuda",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "no CUDA-capable device",
    "Attempting to deserialize object on a CUDA device",
    "have NCCL built in",
    "NCCL is only supported with GPUs",
    "no GPUs found",
    # Of DistributedDataParallel, which was given device_ids=[rank] for a model on the CPU.
    "device_ids and output_device arguments only work with",
)
#: What CUDA says of a GPU past the last one.
_TOO_FEW_GPUS = ("invalid device ordinal",)

_ADVICE = (
    "torchcrew.device() is this rank's GPU where there is one and the CPU elsewhere: "
    "use .to(torchcrew.device()) and the like"
)


def explain(error: BaseException) -> str:
    """Return a sentence to add to an error's text, without a line break at its end; "" when there is nothing to say."""
    if isinstance(error, NameError):
        return _explain_name(error)
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    text = str(error)
    if torch.cuda.is_available():
        if any(words in text for words in _TOO_FEW_GPUS):
            return f"This machine has {torch.cuda.device_count()} GPU(s), fewer than the program asks for; {_ADVICE}."
        return ""
    if any(words in text for words in _NO_GPU):
        return (
            f"This machine has no GPU that torch can use; {_ADVICE}, "
            'no device_ids for DistributedDataParallel, and the backend "gloo".'
        )
    return ""


def _explain_name(error: NameError) -> str:
    """A worker has not run what stands under the script's main guard."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    name = getattr(error, "name", None)
    if frame is None or not name or frame.tb_frame.f_globals.get("__name__") not in ("__main__", "__mp_main__"):
        return ""
    if not functions.is_guarded(frame.tb_frame.f_code.co_filename, name):
        return ""
    return (
        f'{name!r} is set under `if __name__ == "__main__":`, which only the process that was started first runs: '
        "pass it as an argument, or set it outside of that block."
    )
