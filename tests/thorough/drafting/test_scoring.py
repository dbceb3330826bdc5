"""A text of the demo target, read once: every token is the one that the model chooses, and an edited one is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec import BackendOptions, SamplingParams, SpeculativeEngine
from specdec.core.grammar import Grammar
from specdec.core.params import SequenceSpec
from specdec.drafting.scoring import Scorer
from specdec.engine.build import build_target, make_sampler
from specdec.sampling.noise import derive_seed
from tests.specdec.engine.features import PROMPTS, demo

EOS = (0,)
OPTIONS = BackendOptions(
    vocab_size=4096, max_model_len=256, kv_cache_memory=64 << 20, measures_step=False, skip_parity_check=True
)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.6, top_p=0.8, top_k=30),
    SamplingParams(min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((300, 2.0),)),
    SamplingParams(bad_words=((13,),), min_tokens=20, temperature=1.5),
    SamplingParams(grammar=Grammar("regex", "[a-z ]{30,80}")),
)


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    source = demo("target")
    _, built = build_target(source, OPTIONS)
    return Scorer(built.runner, make_sampler(source, built.runner.vocab_size, EOS, OPTIONS))


def test_tokens_are_those_that_the_model_chooses(scorer: Scorer) -> None:
    engine = SpeculativeEngine.from_pretrained(demo("target"), demo("draft"), options=OPTIONS)
    prompts = [tuple(engine._tokenizer.encode(prompt)) for prompt in PROMPTS[: len(SAMPLINGS)]]
    for i, sampling in enumerate(SAMPLINGS):
        prompt = prompts[i % len(prompts)]
        spec = SequenceSpec(sampling, derive_seed(i, 0, 0), len(prompt), 24, EOS)
        [result] = engine.generate_specs([(prompt, spec)])
        output = result.token_ids
        whole = scorer.score(spec, prompt, output)
        assert tuple(whole.chosen) == output, sampling
        assert float(whole.gaps.max()) == 0.0, sampling
        assert tuple(scorer.score(spec, prompt, output, chunk_tokens=5).chosen) == output, "in other chunks"
        at = len(output) // 2
        edited = (*output[:at], (output[at] + 1) % 4096, *output[at + 1 :])
        scores = scorer.score(spec, prompt, edited)
        assert scores.chosen[at] == output[at], "it is told what it would have been"
        assert scores.gaps[:at].max() == 0.0 < scores.gaps[at]
        other = scorer.score(replace(spec, seed=spec.seed + 1), prompt, output)
        assert sampling.is_greedy == (tuple(other.chosen) == output), "noise is of the seed"
