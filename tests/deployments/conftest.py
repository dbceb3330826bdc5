"""What is put back after each test."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's log reaches ``caplog``, which Serve's own set-up would keep from it, and each line once."""
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    for name in ("ray.serve", "specdec"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
