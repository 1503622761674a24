"""torch's tests of its process groups, for the backend that the environment's BACKEND names, with WORLD_SIZE ranks.

The suite `torch-distributed` is this file, written beside a copy of the wheel's distributed_test.py. It is what torch's
test/distributed/test_distributed_spawn.py is, but its ranks are forked from a server that has imported it: that takes
3.5 s of a core, which each of a test's ranks would spend, while the others' first barrier ends after 10 s.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from torch.testing._internal.common_distributed import DistTestCases

BACKEND = os.environ["BACKEND"]
if BACKEND == "crew":
    from torchcrew.collectives.registration import register

    register()
# Tests are chosen when the suite is imported, by these tables.
for _backends in DistTestCases.backend_feature.values():
    if "gloo" in _backends:
        _backends.add(BACKEND)
DistTestCases.backend_feature["plugin"].add(BACKEND)

import distributed_test  # noqa: E402

multiprocessing.set_forkserver_preload([__name__])


class TestCollectives(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """Each test in a group of its own."""

    def setUp(self) -> None:
        """Start the ranks, which run the test, too."""
        super().setUp()
        context = multiprocessing.get_context("forkserver")

        def rank(*, kwargs: dict[str, Any], **options: Any) -> Any:
            # What setUp has put into it, the server does not know.
            return context.Process(kwargs={**kwargs, "environment": dict(os.environ)}, **options)

        self._start_processes(rank)

    @classmethod
    def _run(cls, *args: Any, environment: dict[str, str], **kwargs: Any) -> None:
        os.environ.update(environment)
        distributed_test.INIT_METHOD = environment["INIT_METHOD"]
        super()._run(*args, **kwargs)
