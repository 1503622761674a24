"""A folder that `torchcrew run` puts on PYTHONPATH of its program's children; see `sitecustomize.py` in it."""

__all__ = ()
