"""Data loading: stock's DataLoader on recycled shared memory."""

from torchcrew.data.loader import DataLoader, install, uninstall
from torchcrew.data.stats import LoaderStats, loader_stats

__all__ = ("DataLoader", "LoaderStats", "install", "loader_stats", "uninstall")
