"""Torch knows the backend, in whichever order it and torchcrew are imported, and nothing heavy is imported for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = """
import sys, warnings
warnings.simplefilter("error")
{imports}
assert "torchcrew.collectives.making" not in sys.modules
import torch, torch.distributed as dist
dist.init_process_group("crew", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""
RUN = {
    "torch first": ("import torch\nimport torchcrew", "0"),
    "torchcrew first": ("import torchcrew\nimport torch", "1"),
    "torch alone": ("import torch", "1"),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what an installed package says of itself: the entry point of pyproject.toml."""
    folder = tmp_path_factory.mktemp("installed")
    section = (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."torch.backends"]\n')[2]
    name, _, value = section.splitlines()[0].partition(" = ")
    info = folder / "torchcrew_of_this_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchcrew-of-this-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {value.strip(chr(34))}\n")
    return folder


@pytest.mark.parametrize("order", RUN)
def test_either_order(order: str, installed: Path) -> None:
    """By the import of torchcrew, where torch is there; by the entry point, where it is not."""
    imports, autoload = RUN[order]
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload, "PYTHONPATH": str(installed)}
    run = subprocess.run(
        [sys.executable, "-c", PROBE.format(imports=imports)],
        capture_output=True,
        text=True,
        timeout=18,
        env=environment,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "crew [1.0, 1.0]\n"


def test_registering_again_is_nothing() -> None:
    """What is registered stays; the name is in torch's list once."""
    import torch.distributed as dist

    from torchcrew.collectives import registration

    for _ in range(2):
        registration.register()
        registration.autoload()
    assert dist.Backend.backend_list.count(registration.NAME) == 1
    assert dist.Backend.CREW == registration.NAME
