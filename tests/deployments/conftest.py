"""What is put back after each test."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _garbage() -> Iterator[None]:
    """A replica that starts to serve keeps what there is from being collected."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's log reaches ``caplog``, which Serve's own set-up would keep from it, and each line once."""
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    for name in ("ray.serve", "specdec"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
