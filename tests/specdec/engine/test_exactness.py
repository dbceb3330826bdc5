"""The output is the target's own: whatever the draft, the draft length, the batch."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import specdec.executor.runner as runner_module
from specdec.cache.blocks import CachedSequence
from specdec.core.params import SamplingParams
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.executor.steps import StepRows
from tests.sizes import one_of_each, sized, some
from tests.specdec.engine.pairs import Case, assert_same, greedy, make_model, make_service, run
from tests.specdec.models.families import VOCAB_SIZE

FIVE = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
DRAFTS = ("never right", "half right", "always right")
HALF_RIGHT = {"llama": 0.06, "qwen2": 0.07, "qwen3": 0.1, "mistral": 0.1, "gemma3": 0.08}
RANGES = {"never right": (0.0, 0.15), "half right": (0.3, 0.7), "always right": (1.0, 1.0)}
GREEDY = SamplingParams(temperature=0.0)


def noise(family: str, draft: str) -> float:
    """How much a draft's weights differ from the target's."""
    return {"never right": float("inf"), "half right": HALF_RIGHT[family], "always right": 0.0}[draft]


def make_cases(sampling: SamplingParams, draft_lengths: tuple[int | None, ...] = (None,)) -> list[Case]:
    """Prompts from one token to more than two prefill chunks, longer than any window, with different ends."""
    rng = random.Random(11)
    lengths = (1, 5, 23, 40, 2, 17)
    return [
        Case(
            tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)),
            max_tokens=18 + 3 * i,
            sampling=sampling,
            seed=1000 + i,
            num_speculative_tokens=draft_lengths[i % len(draft_lengths)],
        )
        for i, length in enumerate(lengths)
    ]


CHOSEN = list(dict.fromkeys(("llama", *some(FIVE))))


@pytest.fixture(scope="module")
def references() -> dict[str, tuple]:
    """Each family's stock model, and what its greedy generate gives."""
    made = {}
    for family in CHOSEN:
        stock = make_model(family)
        made[family] = stock, [greedy(stock, case) for case in make_cases(GREEDY)]
    return made


@pytest.mark.parametrize(("family", "draft"), one_of_each(CHOSEN, DRAFTS))
def test_greedy_output_is_that_of_transformers(family: str, draft: str, references: dict[str, tuple]) -> None:
    stock, wanted = references[family]
    for num_draft_tokens in sized((1, 8), (0, 1, 3, 8)):
        cases = make_cases(GREEDY)
        outputs, stats = run(make_service(family, noise(family, draft), num_draft_tokens), cases)
        for got, want, case in zip(outputs, wanted, cases, strict=True):
            assert_same(got, want, case, stock)
        if num_draft_tokens == 1:
            low, high = RANGES[draft]
            assert low <= stats.acceptance_rate <= high, stats
        assert (stats.num_drafts > 0) == (num_draft_tokens > 0)


@pytest.mark.parametrize("family", CHOSEN)
def test_mixed_draft_lengths_in_one_batch(family: str, references: dict[str, tuple]) -> None:
    stock, wanted = references[family]
    cases = make_cases(GREEDY, (0, 1, 3, 8))
    outputs, _ = run(make_service(family, HALF_RIGHT[family], 4), cases)
    for got, want, case in zip(outputs, wanted, cases, strict=True):
        assert_same(got, want, case, stock)


@pytest.mark.parametrize(
    ("family", "draft"),
    [*((family, "half right") for family in CHOSEN), ("llama", "never right"), ("llama", "always right")],
)
def test_a_seed_gives_the_same_tokens_with_and_without_drafts(family: str, draft: str) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95)
    plain, _ = run(make_service(family, noise(family, draft), 0), make_cases(sampling))
    for num_draft_tokens in sized((3,), (1, 3, 8)):
        outputs, stats = run(make_service(family, noise(family, draft), num_draft_tokens), make_cases(sampling))
        assert outputs == plain
        assert stats.num_draft_tokens > 0
    alone = [run(make_service(family, noise(family, draft), 3), [case])[0][0] for case in make_cases(sampling)[:2]]
    assert alone == plain[:2]


def test_scarce_blocks_change_no_token(references: dict[str, tuple]) -> None:
    """Room for two of six sequences: the draft shrinks, sequences are preempted and read again."""
    stock, wanted = references["llama"]
    cases = make_cases(GREEDY)
    outputs, _ = run(make_service("llama", HALF_RIGHT["llama"], 4, num_blocks=42), cases)
    for got, want, case in zip(outputs, wanted, cases, strict=True):
        assert_same(got, want, case, stock)


def test_a_rollback_that_is_off_by_one_is_found(references: dict[str, tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that keeps one refused position visible gives other tokens, and the tests above see it."""
    truncate, reserve, lay_out = ModelRunner.truncate, ModelRunner.reserve, runner_module.lay_out_rows
    rolled_back: set[int] = set()

    def noting_truncate(self: ModelRunner, sequence: CachedSequence, length: int) -> None:
        if length < len(sequence.tokens):
            rolled_back.add(id(sequence))
        truncate(self, sequence, length)

    def off_by_one(rows: list[RowInput], *more: Any) -> StepRows:
        own = lay_out(rows, *more)
        late = np.array([id(row.sequence) in rolled_back for row in rows], np.int64)
        return replace(own, num_cached=own.num_cached + late)

    monkeypatch.setattr(ModelRunner, "truncate", noting_truncate)
    monkeypatch.setattr(
        ModelRunner, "reserve", lambda self, sequence, length, *more: reserve(self, sequence, length + 1, *more)
    )
    _stock, wanted = references["llama"]
    cases = make_cases(GREEDY)
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(runner_module, "lay_out_rows", off_by_one)
        outputs, _ = run(make_service("llama", HALF_RIGHT["llama"], 3), cases)
        assert (outputs == wanted) != broken
