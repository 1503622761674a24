"""Tools for tests of code that uses many processes: what leaked, and how it bears a crash.

```
leaks.py      snapshot, compare, assert_no_leaks: what a piece of code left behind
permanent.py  what stays on purpose, and the reasons
plugin.py     the same for every test: `pytest -p torchcrew.testing.plugin`
crash.py      a table of ways to die, and programs run with a deadline that nothing outlives
procfs.py     processes as /proc shows them
threads.py    whose a native thread is
```
"""

from __future__ import annotations

from torchcrew.testing.leaks import Snapshot, assert_no_leaks, compare, snapshot

__all__ = ("Snapshot", "assert_no_leaks", "compare", "snapshot")
