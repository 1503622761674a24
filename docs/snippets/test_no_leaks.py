"""Run with: pytest -p torchcrew.testing.plugin test_no_leaks.py"""

from torch.utils.data import TensorDataset

from torchcrew.data import DataLoader


def test_my_pipeline():
    """Fails if it leaves a process, a descriptor, a thread or shared memory behind."""
    import torch

    batches = list(DataLoader(TensorDataset(torch.arange(100)), batch_size=10, num_workers=2))
    assert len(batches) == 10
