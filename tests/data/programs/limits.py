"""Load batches under one of the kernel's limits. ``limits.py LIMIT CLASS``; prints "right" when every batch was.

LIMIT: shm (a /dev/shm of 64 MB), descriptors (RLIMIT_NOFILE=64), address_space (8 GB), file_size (1 GB),
small_file (RLIMIT_FSIZE of 8 MB, below one batch). CLASS: ours, stock.
"""

import os
import resource
import sys

SKIP = 77


def in_small_shm() -> None:
    """Run again in a mount namespace of our own with a small /dev/shm; exit with `SKIP` if that is not permitted."""
    if os.environ.get("IN_SMALL_SHM") == "1":
        return
    os.environ["IN_SMALL_SHM"] = "1"
    options = "-m" if os.geteuid() == 0 else "-rm"
    script = f'mount -t tmpfs -o size=64m tmpfs /dev/shm || exit {SKIP}; exec "$@"'
    if os.spawnlp(os.P_WAIT, "unshare", "unshare", options, "true") != 0:
        sys.exit(SKIP)
    os.execvp("unshare", ["unshare", options, "sh", "-c", script, "sh", sys.executable, *sys.argv])


def lower(name: str, value: int) -> None:
    number = getattr(resource, name)
    hard = resource.getrlimit(number)[1]
    resource.setrlimit(number, (value, hard if hard == resource.RLIM_INFINITY else max(hard, value)))


def main(limit: str, which: str) -> None:
    elements, size, count, hold = 10 * (1 << 20) // 4, 4, 8, 2  # batches of 40 MB, two of them held
    if limit == "shm":
        in_small_shm()
    elif limit == "descriptors":
        lower("RLIMIT_NOFILE", 64)
        elements, size, count, hold = 17_500, 1, 2000, 2000  # 70 KB: more than travels inline
    elif limit == "address_space":
        lower("RLIMIT_AS", 8 << 30)
        hold = count
    elif limit == "file_size":
        lower("RLIMIT_FSIZE", 1 << 30)
    elif limit == "small_file":
        lower("RLIMIT_FSIZE", 8 << 20)
        count = 2

    import torch.utils.data

    from tests.data.survival import Rows, check
    from torchcrew.data import DataLoader

    loader_class = DataLoader if which == "ours" else torch.utils.data.DataLoader
    held = []
    for number, batch in enumerate(loader_class(Rows(size * count, elements), batch_size=size, num_workers=2)):
        held.append((number, batch))
        del batch
        if len(held) > hold:
            check(held[0][1], held[0][0], size, elements)
            del held[0]
    for number, batch in held:
        check(batch, number, size, elements)
    assert number == count - 1, number
    if limit == "descriptors" and which == "ours":
        assert len(os.listdir("/proc/self/fd")) < 40, os.listdir("/proc/self/fd")
    sys.stdout.write("right\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
