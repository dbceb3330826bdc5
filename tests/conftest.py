"""What all tests share."""

from __future__ import annotations

import os

import pytest

from tests import sizes
from tests.durations import Durations


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--whole``: statistics, families and mutations in full; ``--padded``: steps as CUDA graphs hold them."""
    parser.addoption("--whole", action="store_true", help="statistics, families and mutations in full, and long tests")
    parser.addoption("--padded", action="store_true", help="every step is padded to a fixed size, as graphs hold it")


def pytest_configure(config: pytest.Config) -> None:
    """One torch thread in tests, and in what they start, unless the environment says otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    sizes.WHOLE = config.option.whole
    if config.option.padded:
        from tests.padded import pad_all_steps

        pad_all_steps()
    config.pluginmanager.register(Durations(config), "durations")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked ``whole`` runs with that option alone."""
    if not config.option.whole:
        left_out = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
