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

SLOW = ("tests/specdec/protocol/", "tests/specdec/engine/", "tests/specdec/control/")
"""What takes minutes in few files; begun early, lest one process goes on with it when all others are done."""


def pytest_configure(config: pytest.Config) -> None:
    """One torch thread in tests, and in what they start, unless the environment says otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    config.addinivalue_line(
        "markers", "xdist_group(name): tests that pytest-xdist runs in one process, where it is used"
    )


@pytest.hookimpl(tryfirst=True)  # before the expression of -m is held against the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest come first; tests of one file run in one process, all those that start Ray in one and the same.

    With pytest-xdist this holds for ``--dist loadgroup --no-loadscope-reorder``; without it the groups mean nothing.
    """
    paths = {item: item.path.relative_to(config.rootpath).as_posix() for item in items}
    for item, path in paths.items():
        starts_ray = path.startswith(WITH_SERVICES)
        item.add_marker(pytest.mark.xdist_group("services" if starts_ray else path))
        if starts_ray:
            item.add_marker(pytest.mark.service)
        if path.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: (not paths[item].startswith(WITH_SERVICES), not paths[item].startswith(SLOW)))
