"""Drafts by prompt lookup, alone and beside a draft model: fewer steps, and no token changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from specdec.core.params import SamplingParams
from specdec.drafting.ngram import NgramOptions
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.results import SpecStats
from specdec.engine.target import ModelTarget
from specdec.executor.runner import ModelRunner
from specdec.sampling.pipeline import Sampler
from tests.letters import ACCEPTED, spelled
from tests.sizes import some
from tests.specdec.engine.pairs import MAX_MODEL_LEN, Case, Output, collect, greedy, make_model, run
from tests.specdec.engine.test_hostile_network import runner
from tests.specdec.models.recurrent_families import VOCAB_SIZE, make_recurrent
from tests.thorough.engine.test_recurrent import NOISE, make_cases, make_runner

LENGTHS = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64}
FAMILIES = ("llama", "qwen3_5")


def looking_up(
    family: str,
    most: int = 16,
    draft: Callable[[], ModelRunner] | None = None,
    num_draft_tokens: int = 4,
) -> InProcessService:
    """A target that looks up, without a draft model or with one."""
    target = ModelTarget(runner(family, 0.0), Sampler(VOCAB_SIZE), **LENGTHS)
    drafter = None if draft is None else ModelDrafter(draft(), Sampler(VOCAB_SIZE), **LENGTHS)
    return InProcessService(target, drafter, num_draft_tokens, ngram=NgramOptions(most))


def plainly(family: str, cases: list[Case]) -> list[list[int]]:
    undrafted = [replace(case, num_speculative_tokens=0) for case in cases]
    return run(looking_up(family), undrafted)[0]


def edited(output: list[int], rng: random.Random) -> tuple[int, ...]:
    """An output with a token changed, one left out and one put in."""
    other = list(output)
    for place in sorted(rng.sample(range(len(other)), 3), reverse=True):
        other[place : place + 1] = [[3], [], [3, other[place]]][place % 3]
    return tuple(other)


def predicted_cases(family: str, sampling: SamplingParams, *, of: list[list[int]] | None = None) -> list[Case]:
    """Prompts whose outputs are known, with predictions that are nearly right."""
    rng = random.Random(3)
    cases = [replace(case, max_tokens=40) for case in make_cases(sampling)]
    outputs = plainly(family, cases) if of is None else of
    return [replace(case, prediction=edited(output, rng)) for case, output in zip(cases, outputs, strict=True)]


@pytest.mark.parametrize("temperature", some([0.0, 1.0]))
@pytest.mark.parametrize("family", some(FAMILIES))
def test_the_tokens_are_those_without_drafts(family: str, temperature: float) -> None:
    """Alone and beside a draft model that is right now and then, whatever the lengths of drafts."""
    sampling = SamplingParams(temperature=temperature, top_p=0.95)
    cases = predicted_cases(family, sampling)
    wanted = plainly(family, cases)
    for most in (1, 3, 16):
        outputs, stats = run(looking_up(family, most), cases)
        assert outputs == wanted
        assert stats.num_accepted_tokens > 10
        assert stats.num_draft_tokens <= most * stats.num_drafts
    for num_draft_tokens in (1, 5):
        service = looking_up(family, draft=partial(runner, family, NOISE), num_draft_tokens=num_draft_tokens)
        both = collect(service, cases)
        assert [output.tokens for output in both] == wanted
        letters = Counter("".join(spelled(output.notes) for output in both))
        assert min(letters["a"], letters["x"]) > 0, letters
    bounded = [replace(case, num_speculative_tokens=i) for i, case in enumerate(cases)]
    assert run(looking_up(family, 16), bounded)[0] == wanted


def test_greedy_output_is_that_of_transformers() -> None:
    stock = make_model("llama")
    cases = [replace(case, prompt=case.prompt * 2, max_tokens=60) for case in make_cases()]
    outputs, stats = run(looking_up("llama"), cases)
    assert outputs == [greedy(stock, case) for case in cases]
    assert stats.num_accepted_tokens > 10  # tiny models repeat themselves


def letters_of(outputs: list[Output]) -> Counter[str]:
    return Counter("".join(spelled(output.notes) for output in outputs))


def test_notes_and_counters_tell_where_drafts_are_from() -> None:
    cases = predicted_cases("llama", SamplingParams(temperature=1.0))
    without = [replace(case, prediction=()) for case in cases]
    service = looking_up("llama")
    outputs = collect(service, cases)
    letters = letters_of(outputs)
    stats = sum((SpecStats.of([output.notes]) for output in outputs), SpecStats())
    counters = service.target.counters
    assert set(letters) <= set("pxyzACB")
    assert letters["x"] > 20
    assert stats.num_accepted_tokens == sum(letters[letter] for letter in ACCEPTED)
    assert stats.num_rounds == counters.num_rounds
    assert set(counters.by_source) <= {"ngram", "prediction"}
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(one, name) for one in counters.by_source.values()) == getattr(counters, name)
    assert stats.num_draft_tokens == counters.num_draft_tokens
    mixed = looking_up("llama", draft=partial(runner, "llama", 0.0))
    assert not set(letters_of(collect(mixed, without))) & set("xyz")
    assert 0 < mixed.target.counters.by_source["ngram"].num_drafts + 1 <= mixed.target.counters.num_drafts


def test_a_long_match_goes_before_the_draft_models_offer_and_a_short_one_after_it() -> None:
    """The draft model here is always right, and says less than is found."""
    cases = [replace(case, max_tokens=60) for case in make_cases(SamplingParams(temperature=1.0))]
    outputs = plainly("llama", cases)
    exact = [replace(case, prediction=tuple(output)) for case, output in zip(cases, outputs, strict=True)]
    right = partial(runner, "llama", 0.0)
    letters = letters_of(collect(looking_up("llama", draft=right, num_draft_tokens=2), exact))
    assert letters["x"] > 0.8 * sum(letters.values())
    model_alone = letters_of(collect(looking_up("llama", draft=right, num_draft_tokens=2), cases))
    assert model_alone["a"] > 0.6 * sum(model_alone.values())


def test_on_a_text_in_which_nothing_is_found_hardly_a_row_has_a_draft() -> None:
    cases = [replace(case, max_tokens=100) for case in make_cases(SamplingParams(temperature=1.0))]
    _, stats = run(looking_up("llama"), cases)
    assert stats.num_rounds > 200
    assert stats.num_drafts <= 0.02 * stats.num_rounds


def test_a_state_that_cannot_go_back_so_far_gets_a_shorter_draft() -> None:
    target = make_runner(make_recurrent("qwen3_5"))
    cases = predicted_cases("qwen3_5", SamplingParams(temperature=0.0))
    outputs, stats = run(looking_up("qwen3_5", most=64), cases)
    assert outputs == plainly("qwen3_5", cases)
    assert stats.num_draft_tokens <= target.max_rollback * stats.num_drafts
