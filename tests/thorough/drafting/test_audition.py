"""What is told from recorded answers is what the engine counts: rounds, draft tokens and accepted ones, for each K."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import (
    Adapter,
    BackendOptions,
    Grammar,
    LoRAConfig,
    ModelSource,
    NgramOptions,
    SamplingParams,
    SpeculativeEngine,
)
from specdec.audition.audition import audition_heads, audition_model
from specdec.audition.logs import AnswerReader
from specdec.audition.reading import read_drafts
from specdec.audition.recording import Sample
from specdec.audition.rounds import Earned, earned_by_lookup, earned_by_reading
from specdec.drafting.heads import HeadsOptions
from specdec.engine.build import build_drafter, build_target
from specdec.engine.engine import InProcessService
from specdec.engine.pair import PairedTarget
from tests.specdec.adapters import save_adapter
from tests.specdec.engine.features import CHANGES, demo, eagle3
from tests.specdec.engine.pairs import Case, run
from tests.specdec.vocabularies import save_masked, save_shuffled, save_smaller

MOST = 8
OPTIONS = BackendOptions(
    vocab_size=4096,
    max_model_len=192,
    block_size=4,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    kv_cache_memory=32 << 20,
    skip_parity_check=True,
    measures_step=False,
)
PROMPTS = ("def read(path):\n", "class A:\n    def __init__(self", "import sys\nimport os\n", "x = 1\nx = 1\nx = 1\n")
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "warm": SamplingParams(temperature=0.6),
    "plain": SamplingParams(),
    "cut": SamplingParams(temperature=0.6, top_k=20, top_p=0.9, min_p=0.01),
    "edited": SamplingParams(
        repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logit_bias=((300, 2.0),), min_tokens=6
    ),
}


@dataclass(frozen=True)
class Candidate:
    """A draft model, and how it is run."""

    source: ModelSource
    options: BackendOptions = OPTIONS
    is_parallel: bool = False


def folder() -> Path:
    return Path(mkdtemp()) / "draft"


def source_of(path: Path) -> ModelSource:
    return ModelSource(str(path), dtype="float32", device="cpu")


CANDIDATES: dict[str, Callable[[], Candidate]] = {
    "demo": lambda: Candidate(demo("draft")),
    "shuffled": lambda: Candidate(source_of(save_shuffled(folder())), replace(OPTIONS, other_vocabulary=True)),
    "smaller": lambda: Candidate(source_of(save_smaller(folder())), replace(OPTIONS, other_vocabulary=True)),
    "parallel": lambda: Candidate(
        source_of(save_masked(folder())), replace(OPTIONS, num_step_tokens=1 + MOST), is_parallel=True
    ),
    "few a pass": lambda: Candidate(
        source_of(save_masked(folder())), replace(OPTIONS, num_step_tokens=3), is_parallel=True
    ),
    "short": lambda: Candidate(demo("draft"), replace(OPTIONS, max_model_len=32)),
}


@cache
def ending() -> tuple[int, ...]:
    """Tokens that the demo target often says: answers end early with these."""
    engine = SpeculativeEngine.from_pretrained(demo("target"), options=OPTIONS)
    [ids] = [engine.generate("x = 1\n", SAMPLINGS["greedy"], max_tokens=40).token_ids]
    return tuple(sorted(set(ids), key=ids.count)[-2:])


@cache
def recorded(names: tuple[str, ...] = tuple(SAMPLINGS)) -> list[Sample]:
    """Answers of the demo target alone: each way of sampling, to their length and ended early."""
    engine = SpeculativeEngine.from_pretrained(demo("target"), options=OPTIONS)
    results = []
    for number, name in enumerate(names):
        for prompts, stops in ((PROMPTS[:2], ()), (PROMPTS[1:], ending())):
            sampling = replace(SAMPLINGS[name], stop_token_ids=stops)
            results += engine.generate_batch(prompts, sampling, max_tokens=20 + number, seed=number)
    samples = [Sample.of(result) for result in results]
    assert any(len(one.output_token_ids) < one.max_tokens for one in samples)
    return samples


def served(engine: SpeculativeEngine, samples: Sequence[Sample], most: int) -> list[Earned]:
    """What the engine counts as it says the answers again."""
    specs = [replace(sample.spec(), num_speculative_tokens=most) for sample in samples]
    # Each alone: beside others a first draft may come a round later, when the draft model has read the prompt.
    results = [
        engine.generate_specs([(one.prompt_token_ids, spec)])[0] for one, spec in zip(samples, specs, strict=True)
    ]
    assert [one.token_ids for one in results] == [one.output_token_ids for one in samples]
    stats = [result.stats for result in results]
    return [Earned(s.num_tokens, s.num_rounds, s.num_draft_tokens, s.num_accepted_tokens) for s in stats]


def assert_told_is_served(
    samples: Sequence[Sample],
    told: Callable[[int], list[Earned]],
    engine: SpeculativeEngine,
    lengths: Sequence[int] = (1, 3, MOST),
) -> None:
    total = 0
    for most in lengths:
        expected = served(engine, samples, most)
        for sample, ours, theirs in zip(samples, told(most), expected, strict=True):
            assert ours == theirs, (most, sample)
        total += sum(one.num_accepted_tokens for one in expected)
    assert total > 20


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_rounds_of_heads_are_those_that_the_engine_counts(method: str) -> None:
    heads = CHANGES["heads"]["heads"] if method == "medusa" else HeadsOptions(eagle3().name, MOST, 0, "eagle3")
    options, samples = replace(OPTIONS, heads=replace(heads, most_tokens=MOST)), recorded()[::3]
    tried = audition_heads(samples, demo("target"), options, (1, 3, MOST))
    engine = SpeculativeEngine.from_pretrained(demo("target"), num_speculative_tokens=MOST, options=options)
    assert_told_is_served(samples, tried.earned.__getitem__, engine)
    assert tried.certainty == "run"
    assert 0 < tried.right_share < 1
    other = [replace(sample, output_token_ids=(*sample.output_token_ids[:-1], 7)) for sample in samples]
    others = audition_heads(other, demo("target"), options, (1,))
    assert others.certainty == "near", "another target said these"
    assert others.remark == f"{len(other)} answers of the target are others than the recorded ones"
    assert tried.remark == ""


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_draft_models_rounds_are_those_that_the_engine_counts(name: str) -> None:
    candidate, samples = CANDIDATES[name](), recorded()[::3]
    lengths = range(1, MOST + 1) if name == "demo" else (1, 3, MOST)
    engine = SpeculativeEngine.from_pretrained(
        demo("target"),
        candidate.source,
        num_speculative_tokens=MOST,
        options=OPTIONS,
        draft_options=candidate.options,
    )
    drafter, _ = build_drafter(candidate.source, candidate.options, demo("target"), has_branches=False)
    readings = read_drafts(drafter, samples, MOST, seeds=[0] * len(samples), is_parallel=candidate.is_parallel)
    assert all(one.is_whole for one in readings)
    assert_told_is_served(
        samples, lambda most: [earned_by_reading(one, most, drafts_first=True) for one in readings], engine, lengths
    )


GRAMMARS = (
    Grammar("regex", "[a-z]{3,9}( [a-z]+){1,4}"),
    Grammar("json_schema", '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'),
    Grammar("choice", '["yes", "no", "perhaps not"]'),
)


def test_rounds_under_a_grammar_are_those_that_the_engine_counts() -> None:
    engine = SpeculativeEngine.from_pretrained(
        demo("target"), demo("draft"), num_speculative_tokens=MOST, options=OPTIONS, draft_options=OPTIONS
    )
    samplings = [SamplingParams(temperature=t, grammar=one) for one in GRAMMARS for t in (0.0, 0.8)]
    results = [one for sampling in samplings for one in engine.generate_batch(PROMPTS[:2], sampling, max_tokens=24)]
    samples = [Sample.of(result) for result in results]  # the engine has compiled the grammars by now
    assert {one.finish_reason for one in samples} == {"stop", "length"}
    drafter, _ = build_drafter(demo("draft"), OPTIONS, demo("target"), has_branches=False)
    readings = read_drafts(drafter, samples, MOST, seeds=[0] * len(samples))
    assert all(one.is_whole for one in readings)
    assert_told_is_served(
        samples, lambda most: [earned_by_reading(one, most, drafts_first=True) for one in readings], engine
    )


def test_a_services_first_round_has_no_draft() -> None:
    samples = recorded()
    target, _ = build_target(demo("target"), OPTIONS)
    drafter, _ = build_drafter(demo("draft"), OPTIONS, demo("target"), has_branches=False)
    readings = read_drafts(drafter, samples, 4, seeds=[0] * len(samples))
    cases = [
        Case(
            one.prompt_token_ids,
            one.max_tokens,
            one.sampling,
            one.spec().seed,
            eos_token_ids=one.eos_token_ids,
        )
        for one in samples
    ]
    outputs, stats = run(InProcessService(PairedTarget(target, drafter, 4), None, 0), cases)
    assert [tuple(one) for one in outputs] == [one.output_token_ids for one in samples]
    told = sum((earned_by_reading(one, 4, drafts_first=False) for one in readings), Earned())
    assert told == Earned(stats.num_tokens, stats.num_rounds, stats.num_draft_tokens, stats.num_accepted_tokens)


def test_rounds_of_adapters_are_those_that_the_engine_counts(tmp_path: Path) -> None:
    adapters = {}
    for role in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(demo(role).path, dtype=torch.float32)
        adapters[role] = save_adapter(tmp_path / role, model, strength=0.1)
    target, draft = (demo(role, adapters=LoRAConfig(1, 16)) for role in ("target", "draft"))
    engine = SpeculativeEngine.from_pretrained(target, draft, num_speculative_tokens=MOST, options=OPTIONS)
    samples = [
        Sample.of(result)
        for draft_adapter in (None, adapters["draft"])
        for result in engine.generate_batch(
            PROMPTS, max_tokens=24, seed=1, adapter=adapters["target"], draft_adapter=draft_adapter
        )
    ]
    drafter, _ = build_drafter(draft, OPTIONS, target, has_branches=False)
    readings = read_drafts(drafter, samples, MOST, seeds=[0] * len(samples))
    assert_told_is_served(
        samples, lambda most: [earned_by_reading(one, most, drafts_first=True) for one in readings], engine
    )


def test_answers_that_a_draft_cannot_read_are_told(tmp_path: Path) -> None:
    """They have an adapter of the draft, which is tried without room for one."""
    samples = recorded()[:4]
    adapter = Adapter("a", str(tmp_path), "f00")
    with_adapter = [replace(one, draft_adapter=adapter) for one in samples]
    told = [audition_model(one, demo("target"), demo("draft"), OPTIONS, [4]).remark for one in (samples, with_adapter)]
    assert told[0] == ""
    assert told[1].startswith("4 answers could not be read to their end")


def test_another_servers_greedy_log_tells_what_drafting_live_counts(tmp_path: Path) -> None:
    """Transformers has said the texts, and a log has nothing else of them."""
    path = demo("target").path
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
    )
    lines = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        said = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        choice = {"text": tokenizer.decode(said), "finish_reason": "length"}
        request = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
        lines.append(json.dumps({"request": request, "response": {"choices": [choice]}}))
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    samples = list(AnswerReader(demo("target")).read(tmp_path / "log.jsonl"))
    engine = SpeculativeEngine.from_pretrained(
        demo("target"), demo("draft"), num_speculative_tokens=MOST, options=OPTIONS, draft_options=OPTIONS
    )
    drafter, _ = build_drafter(demo("draft"), OPTIONS, demo("target"), has_branches=False)
    readings = read_drafts(drafter, samples, MOST, seeds=[0] * len(samples))
    assert_told_is_served(
        samples, lambda most: [earned_by_reading(one, most, drafts_first=True) for one in readings], engine
    )


def test_rounds_of_lookup_are_those_that_the_engine_counts() -> None:
    engine = SpeculativeEngine.from_pretrained(demo("target"), options=OPTIONS, ngram=NgramOptions(MOST))
    samples = recorded(("greedy", "warm", "plain", "cut", "edited"))
    text = samples[0].output_token_ids
    samples = [*samples, *(replace(one, prediction_token_ids=text[2:]) for one in samples[:6])]
    assert_told_is_served(samples, lambda most: [earned_by_lookup(one, most) for one in samples], engine)
