"""Fewer bits, by vLLM's own arguments: another model, which keeps what it would have said itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdec.engine.target import ModelTarget
from specdec.models.loading import DTypeName
from tests.specdec.engine.contract import SAMPLINGS, generate
from tests.vllm.engines import make
from tests.vllm.models import TARGET, prompts, spec_of

LEAST_KEPT = 0.9
"""Of right drafts: a step of several tokens rounds otherwise, and may decide a near-tie otherwise."""


@pytest.mark.parametrize(
    ("dtype", "engine_args"),
    [("float32", {"kv_cache_dtype": "fp8"}), ("bfloat16", {"quantization": "int8_per_channel_weight_only"})],
)
def test_right_drafts_are_kept(reference: ModelTarget, dtype: DTypeName, engine_args: dict[str, Any]) -> None:
    target = make(replace(TARGET, dtype=dtype), engine_args=engine_args)
    try:
        for name in ("T0", "T1"):
            specs = [spec_of(SAMPLINGS[name], i, max_tokens=24) for i in range(len(prompts()))]
            plain, _ = generate(target, prompts(), specs.__getitem__)
            assert plain != generate(reference, prompts(), specs.__getitem__)[0]
            _, seen = generate(
                target, prompts(), specs.__getitem__, lambda i, log, p=plain: p[i][len(log) - len(prompts()[i]) :][:4]
            )
            assert LEAST_KEPT * seen["drafted"] < seen["accepted"]
            assert seen["drafted"] > 100
    finally:
        target.close()
