"""An engine of vLLM's over the demo target, and our own beside it; in vLLM's environment alone."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cluster.config.environment import VLLM_SETTINGS

if TYPE_CHECKING:
    from specdec.engine.target import ModelTarget
    from specdec.engine.vllm.target import VllmTarget

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Before torch and vLLM are imported, which read the environment then."""
    os.environ.update(VLLM_SETTINGS)


@pytest.fixture(scope="session")
def reference() -> ModelTarget:
    """Our own target, with room for everything."""
    from tests.vllm.models import own_target

    return own_target()


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmTarget]:
    """With room for less than is asked of it: 6 places, 24 blocks of 32, 64 tokens a step."""
    from tests.vllm.engines import make

    target = make(kv_cache_memory=18 << 20)
    yield target
    target.close()
