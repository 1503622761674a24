"""Programs of several ranks, and where each of them computes.

device.py   this rank's GPU, or the CPU
"""

__all__: tuple[str, ...] = ()
