"""What all tests share."""

from __future__ import annotations

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

WITH_SERVICES = (
    "tests/integration/",
    "tests/deployments/transport/",
    "tests/cluster/bench/test_command.py",
    "tests/cluster/test_launch.py",
)
"""What starts Ray: one at a time, however many processes the tests run in."""

SLOW = ("tests/specdec/protocol/", "tests/specdec/engine/", "tests/specdec/control/")
"""What takes minutes in few files; begun early, lest one process goes on with it when all others are done."""


def pytest_configure(config: pytest.Config) -> None:
    """One torch thread in tests, and in what they start, unless the environment says otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest come first, which ``--no-loadscope-reorder`` leaves so."""

    def rank(item: pytest.Item) -> tuple[bool, bool]:
        path = item.path.relative_to(config.rootpath).as_posix()
        return not path.startswith(WITH_SERVICES), not path.startswith(SLOW)

    items.sort(key=rank)


class ByFile(LoadScopeScheduling):
    """Tests of one file run in one process, all those that start Ray in one and the same."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0]
        return "services" if path.startswith(WITH_SERVICES) else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Who runs what, where tests run in several processes."""
    return ByFile(config, log)
