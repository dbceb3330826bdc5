"""What all tests share."""

from __future__ import annotations

import os

import pytest

WITH_SERVICES = (
    "tests/integration/",
    "tests/deployments/transport/",
    "tests/cluster/bench/test_command.py",
    "tests/cluster/test_launch.py",
)
"""What starts Ray: one at a time, however many processes the tests run in."""


def pytest_configure(config: pytest.Config) -> None:
    """One torch thread in tests, and in what they start, unless the environment says otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one file run in one process (``--dist loadgroup``), all those that start Ray in one and the same."""
    for item in items:
        path = item.path.relative_to(config.rootpath).as_posix()
        item.add_marker(pytest.mark.xdist_group("services" if path.startswith(WITH_SERVICES) else path))
