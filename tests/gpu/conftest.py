"""What runs on a GPU; skipped where torch finds none."""

from __future__ import annotations

import pytest
import torch

from tests.specdec.models.conftest import models, whole_forward  # noqa: F401 - fixtures


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
