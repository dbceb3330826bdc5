"""Strict in bfloat16: texts and log probabilities of sequences alone, and drafted among others, to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import NgramOptions, SpeculativeEngine
from specdec.checkpoint.compat import tokenizer_width
from specdec.core.params import LogprobsMode, SamplingParams
from specdec.core.types import Adapter
from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.engine import InProcessService
from specdec.engine.results import GenerationResult
from specdec.models.describe import linear_shapes
from specdec.models.loading import load_tokenizer
from specdec.models.lora import slots
from specdec.models.lora.slots import LoRAConfig
from tests.specdec.adapters import write_adapter
from tests.specdec.engine.features import PROMPTS, demo
from tests.specdec.engine.pairs import Case, Output, collect, deliver, start
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
    drafter, _ = build_drafter(demo("draft"), options, source)
    scarce, _ = build_target(source, replace(options, max_model_len=96, kv_cache_memory=2 << 20))
    service = InProcessService(scarce, drafter, 4)
    outputs = {name: Output() for name in start(service, cases[:4])}
    for _ in range(3):
        deliver(service, outputs)
    outputs |= {name: Output() for name in start(service, [replace(case, priority=-1) for case in cases[4:]])}
    while any(output.finish is None for output in outputs.values()):
        deliver(service, outputs)
    assert [said(output) for output in outputs.values()] == alone
    assert scarce.metrics()["num_evictions"] > 0, "sequences are preempted, and read again"
    assert service.target.counters.by_source["model"].num_accepted_tokens > 20


STRICT = replace(OPTIONS, max_num_seqs=256)


def make_engine(draft: str | None = "draft", options: BackendOptions = STRICT, **others: Any) -> SpeculativeEngine:
    target = replace(demo("target"), dtype="bfloat16")
    source = replace(demo(draft), dtype="bfloat16") if draft is not None else None
    return SpeculativeEngine.from_pretrained(target, source, options=options, **others)


def answers(engine: SpeculativeEngine) -> list[GenerationResult]:
    prompts = [engine._tokenizer.encode(prompt) for prompt in PROMPTS[:3]]
    return engine.generate_batch(prompts, SamplingParams(logprobs=0), seed=1, max_tokens=12)


def bits(engine: SpeculativeEngine) -> list[tuple[object, object]]:
    """Tokens, and their log probabilities to the last bit."""
    return [(result.token_ids, result.logprobs) for result in answers(engine)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="only MKL computes other bits when told to")
def test_where_logits_differ_the_hash_differs() -> None:
    """By the number of threads, the instruction set and the library's mode; with an adapter and without."""
    logits_of: dict[str, str] = {}
    for isa, mode in ("DEFAULT", "AUTO"), ("SSE41", "AUTO"), ("DEFAULT", "COMPATIBLE"):
        command = [sys.executable, "-m", "tests.thorough.engine.numeric_hashes", "1", "4"]
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "MKL_CBWR": mode}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=True)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(rows) == 8
        for row in rows:
            assert logits_of.setdefault(row["named"], row["logits"]) == row["logits"], row
    assert len(set(logits_of.values())) >= 8, "each type, with an adapter and without, has other bits in each mode"


def test_log_probabilities_are_those_of_a_plain_forward() -> None:
    """Of tokens drafted among others, and of the same text read as a prompt: the same bits."""
    engine = make_engine()
    prompts = [engine._tokenizer.encode(prompt) for prompt in PROMPTS]
    results = engine.generate_batch(prompts, SamplingParams(logprobs=5, top_p=0.9), seed=2, max_tokens=24)
    assert engine.stats.num_accepted_tokens > 20
    for prompt, result in zip(prompts, results, strict=True):
        whole = engine.generate([*prompt, *result.token_ids], SamplingParams(prompt_logprobs=5), max_tokens=1)
        assert whole.prompt_logprobs is not None
        assert whole.prompt_logprobs[len(prompt) :] == result.logprobs


def test_any_engine_with_the_same_hash_gives_the_same_bits() -> None:
    """With other drafts, threads, caches and neighbors."""
    with threads(1):
        first = make_engine()
        expected = bits(first)
        assert bits(first) == expected, "its prompts are cached"
        assert bits(make_engine(num_speculative_tokens=7)) == expected
        assert bits(make_engine(None, ngram=NgramOptions(3))) == expected
    plain = make_engine(None)
    for count in (2, 3):
        with threads(count):
            assert bits(plain) == expected, count
    small = make_engine(None, replace(STRICT, max_num_seqs=3, max_num_batched_tokens=24, block_size=16))
    small.generate([*small._tokenizer.encode(PROMPTS[2]), *answers(first)[2].token_ids], max_tokens=5)
    assert bits(small) == expected, "in chunks, and few at once"
