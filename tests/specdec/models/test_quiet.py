"""What transformers tells developers is kept from users; two threads do not undo each other's settings."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import tqdm as hub_tqdm
from transformers.modeling_utils import local_torch_dtype
from transformers.utils import logging as transformers_logging

import specdec.demo
from specdec.models.describe import linear_shapes
from specdec.models.loading import ModelSource, load_model, quiet

DRAFT = ModelSource(str(Path(specdec.demo.__path__[0]) / "draft"), device="cpu")


def test_bars_of_downloads_are_shown_and_those_of_weights_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet():
        for bar in (hub_tqdm, transformers_logging.tqdm):
            assert list(bar(range(2), desc=f"from {bar.__module__}", disable=False)) == [0, 1]
    shown = capsys.readouterr().err
    assert "from huggingface_hub" in shown
    assert "from transformers" not in shown
    load_model(DRAFT)
    assert "Loading weights" not in capsys.readouterr().err


def test_a_thread_that_describes_a_model_waits_for_one_that_makes_another() -> None:
    """Else the second would find the first one's default dtype, and put it back when the first has gone."""
    order: list[str] = []
    began = threading.Event()

    def described() -> None:
        began.set()
        linear_shapes(DRAFT)
        order.append("described")

    thread = threading.Thread(target=described)
    with quiet(), local_torch_dtype(torch.bfloat16):
        thread.start()
        began.wait()
        thread.join(timeout=2)
        order.append("made")
    thread.join(timeout=60)
    assert order == ["made", "described"]
    assert torch.get_default_dtype() == torch.float32
