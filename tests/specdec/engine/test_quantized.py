"""A quantized target's text is its own, whatever drafts; and any draft may be quantized."""

from __future__ import annotations

import pytest

from cluster.identity import demo_folder
from specdec import ModelSource, SamplingParams, SpeculativeEngine
from specdec.engine.results import GenerationResult

pytest.importorskip("torchao", reason="torchao is not installed: pip install 'specdec[quantization]'")

PROMPTS = ["def read(path):\n", "class A:\n", "import sys\n"]
DRAFTS = {
    "none": ModelSource(str(demo_folder("draft")), dtype="float32", device="cpu"),
    "int8": ModelSource(str(demo_folder("draft")), dtype="float32", device="cpu", quantization="int8"),
    "int4": ModelSource(str(demo_folder("draft")), dtype="bfloat16", device="cpu", quantization="int4"),
    "fp8": ModelSource(str(demo_folder("draft")), dtype="float32", device="cpu", quantization="fp8"),
}


def generate(target: ModelSource, draft: ModelSource | None, temperature: float) -> list[GenerationResult]:
    engine = SpeculativeEngine.from_pretrained(target, draft, num_speculative_tokens=4)
    return engine.generate_batch(PROMPTS, SamplingParams(temperature=temperature), seed=3, max_tokens=40)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("role", ["target", "hybrid"])
def test_the_text_is_the_quantized_targets_own(role, temperature):
    target = ModelSource(str(demo_folder(role)), dtype="float32", device="cpu", quantization="int8")
    alone = generate(target, None, temperature)
    for draft in DRAFTS.values():
        together = generate(target, draft, temperature)
        assert [result.token_ids for result in together] == [result.token_ids for result in alone]
        assert sum(result.stats.num_accepted_tokens for result in together) > 20


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_quantized_draft_changes_no_token(quantization):
    target = ModelSource(str(demo_folder("target")), dtype="float32", device="cpu")
    want, got = (generate(target, DRAFTS[name], 1.0) for name in ("none", quantization))
    assert [result.token_ids for result in got] == [result.token_ids for result in want]
