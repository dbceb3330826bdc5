"""Strict in bfloat16: texts and log probabilities of sequences alone, and drafted among others, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specdec.checkpoint.compat import tokenizer_width
from specdec.core.params import LogprobsMode, SamplingParams
from specdec.core.types import Adapter
from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.engine import InProcessService
from specdec.models.describe import linear_shapes
from specdec.models.loading import load_tokenizer
from specdec.models.lora import slots
from specdec.models.lora.slots import LoRAConfig
from tests.specdec.adapters import write_adapter
from tests.specdec.engine.features import PROMPTS, demo
from tests.specdec.engine.pairs import Case, Output, collect
from tests.specdec.engine.schemas import grammar_of
from tests.thorough.engine.test_adapters import AtOnce
from tests.thorough.engine.test_structured import PERSON

OPTIONS = BackendOptions(
    max_model_len=256, block_size=4, max_num_seqs=8, skip_parity_check=True, measures_step=False, strict_tile_tokens=16
)


def said(output: Output) -> tuple[list[int], list[object]]:
    assert output.notes.logprobs is not None
    return output.tokens, list(output.notes.logprobs)


@pytest.mark.parametrize(("role", "mode"), [("target", "processed_logprobs"), ("hybrid", "raw_logprobs")])
def test_nothing_depends_on_drafts_or_on_others(
    role: str, mode: LogprobsMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "Thread", AtOnce)
    source = replace(demo(role, adapters=LoRAConfig(max_loras=2, max_rank=8)), dtype="bfloat16")
    adapters: list[Adapter | None] = [None, write_adapter(tmp_path / "a", linear_shapes(source), 8, 0), None]
    tokenizer = load_tokenizer(source)
    cases = [
        Case(
            tuple(tokenizer.encode(prompt)),
            24 + 2 * i,
            SamplingParams(temperature=float(i % 2), grammar=grammar, logprobs=3, top_p=0.95),
            seed=i,
            eos_token_ids=(0,),
            adapter=adapters[i % 3],
        )
        for i, (prompt, grammar) in enumerate(
            (prompt, grammar) for grammar in (None, grammar_of(PERSON)) for prompt in PROMPTS
        )
    ]
    options = replace(OPTIONS, vocab_size=tokenizer_width(tokenizer), logprobs_mode=mode)
    target, _ = build_target(source, options)
    plain = InProcessService(target, None, 0)
    alone = [said(collect(plain, [replace(case, num_speculative_tokens=0)])[0]) for case in cases]
    drafter, _, _ = build_drafter(demo("draft"), options, source)
    service = InProcessService(target, drafter, 4)
    outputs = collect(service, cases)
    assert [said(output) for output in outputs] == alone
    assert service.target.counters.by_source["model"].num_accepted_tokens > 20
