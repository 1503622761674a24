"""Run a notebook from top to bottom: python notebook_program.py NOTEBOOK FOLDER; it is then FOLDER/done.ipynb.

The kernel is this interpreter, by a specification in the folder, where everything else is that Jupyter writes.
"""

import json
import os
import sys
from pathlib import Path


def main(notebook: Path, folder: Path) -> None:
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        os.environ[name] = str(folder / name.lower())  # before anything of Jupyter is imported
    kernels = folder / "kernels"
    specification = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "this interpreter",
        "language": "python",
    }
    (kernels / "this").mkdir(parents=True)
    (kernels / "this" / "kernel.json").write_text(json.dumps(specification))

    import nbformat
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager
    from nbclient import NotebookClient

    found = KernelSpecManager(kernel_dirs=[str(kernels)], ensure_native_kernel=False)
    manager = AsyncKernelManager(kernel_name="this", kernel_spec_manager=found, ip="127.0.0.1")
    cells = nbformat.read(notebook, as_version=4)
    try:
        NotebookClient(cells, km=manager, timeout=60, resources={"metadata": {"path": str(folder)}}).execute()
    finally:
        nbformat.write(cells, folder / "done.ipynb")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
