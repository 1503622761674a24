"""The process group `crew`: collectives of the ranks of one host through memory that they share.

`torch.distributed.init_process_group("crew")` makes one; the names here are what the layers above use.
"""

from torchcrew.collectives.registration import register

__all__ = ("register",)
