"""What all tests share."""

from __future__ import annotations

import os

import pytest

WITH_SERVICES = (
    "tests/integration/",
    "tests/deployments/transport/test_over_serve.py",
    "tests/cluster/bench/test_command.py",
    "tests/cluster/test_launch.py",
)
"""What starts Ray; ``make test`` runs it after all others, one test at a time."""

FAULTS = (
    "tests/integration/test_kills.py",
    "tests/integration/test_metrics.py",
    "tests/integration/test_poison.py",
    "tests/integration/test_serve_deploy.py",
    "tests/integration/test_stalls.py",
)
"""What kills, stalls and updates services of its own; behind ``make test-faults``."""

SLOW = (
    "tests/specdec/protocol/",
    "tests/specdec/engine/",
    "tests/specdec/control/",
    "tests/specdec/models/test_admission.py",
    "tests/specdec/models/test_bounded_gather.py",
    "tests/specdec/models/test_compiled.py",
    "tests/specdec/models/test_packed.py",
    "tests/specdec/models/test_recurrent",
    "tests/specdec/models/test_runner.py",
    "tests/specdec/sampling/test_distribution.py",
    "tests/benchmarks/",
    "tests/examples/",
    "tests/cluster/test_commands.py",
)
"""What takes minutes in few files; begun early, lest one process goes on with it when all others are done."""


def pytest_configure(config: pytest.Config) -> None:
    """One torch thread in tests, and in what they start, unless the environment says otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before the expression of -m is held against the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests are marked by where they are; the longest come first."""
    paths = {item: item.path.relative_to(config.rootpath).as_posix() for item in items}
    for item, path in paths.items():
        if path.startswith(WITH_SERVICES):
            item.add_marker(pytest.mark.service)
        if path.startswith(FAULTS):
            item.add_marker(pytest.mark.faults)
        if path.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not paths[item].startswith(SLOW))
