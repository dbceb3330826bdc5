"""Drafts of heads that kernels draw in one launch are those of passes one by one; the interpreter takes minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.core.params import SamplingParams
from specdec.sampling.pipeline import Sampler
from tests.specdec.drafting.test_head_chains import LIMITS, VOCAB_SIZE, compare, make_target
from tests.specdec.kernels.interpreter import interpreted

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.9),
)


@pytest.mark.parametrize(("method", "most_tokens"), [("eagle3", 4), ("medusa", 3)])
@interpreted
def test_recorded_drafts_are_those_of_passes(method: str, most_tokens: int, tmp_path: Path) -> None:
    recorded, plain = (
        make_target(method, tmp_path / name, Sampler(VOCAB_SIZE, on_kernels=True), limits)
        for name, limits in (("a", LIMITS), ("b", None))
    )
    compare(recorded, plain, PARAMS, most_tokens)
