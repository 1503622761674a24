"""Importing this module imports what making the first optimizer does; for zygotes, see `foresight`."""

import importlib

from torchcrew.torch_private import IMPORTED_BY_TRAINING

__all__: tuple[str, ...] = ()

importlib.import_module(IMPORTED_BY_TRAINING)
