"""Scripted tokens: the dials do what they say, and every schedule gives the same tokens."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from transformers import AutoTokenizer

import specdec.demo
from benchmarks.scripted import RANK_SHARES, Script, ScriptedDrafter, ScriptedTarget, plain_token_ids
from specdec.core.backends import DraftJob, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.engine import InProcessService
from tests.specdec.engine.pairs import Case, run

VOCABULARY = tuple(range(100, 200, 3))
NUM_POSITIONS = 20_000


def script(acceptance_rate: float = 0.8, next_guess_rate: float = 0.95) -> Script:
    return Script(acceptance_rate, next_guess_rate, VOCABULARY)


def test_draft_tokens_are_right_as_often_as_asked_for() -> None:
    ranks: Counter[int] = Counter()
    one = script()
    for position in range(NUM_POSITIONS):
        drawn = one.draft_tokens(3, position, 3)
        assert len(set(drawn)) == 4
        true = one.true_token(3, position)
        ranks[drawn.index(true) if true in drawn else -1] += 1
    misses = NUM_POSITIONS - ranks[0]
    assert ranks[0] / NUM_POSITIONS == pytest.approx(0.8, abs=0.01)
    assert 1 - ranks[-1] / misses == pytest.approx(0.95, abs=0.01)
    found = misses - ranks[-1]
    assert [ranks[i] / found for i in (1, 2, 3)] == pytest.approx(RANK_SHARES, abs=0.03)


def test_one_position_does_not_tell_of_the_next() -> None:
    """Where a draft token was right, the next is right as often as after a wrong one."""
    one = script()
    right = [one.draft_tokens(3, i, 0)[0] == one.true_token(3, i) for i in range(NUM_POSITIONS)]
    after = [b for a, b in pairwise(right) if not a]
    assert sum(after) / len(after) == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(("rate", "right"), [(0.0, False), (1.0, True)])
def test_always_and_never(rate: float, right: bool) -> None:
    one = script(rate, rate)
    drawn = [one.draft_tokens(9, i, 3) for i in range(500)]
    true = [one.true_token(9, i) for i in range(500)]
    assert all((tokens[0] == token) == right for tokens, token in zip(drawn, true, strict=True))
    assert all((token in tokens) == right for tokens, token in zip(drawn, true, strict=True))


def test_no_more_guesses_than_tokens() -> None:
    small = Script(0.5, 0.95, tuple(range(8)))
    assert all(len(set(small.draft_tokens(1, i, 50))) == 7 for i in range(50))


def test_sequences_differ_by_seed_alone() -> None:
    one = script()
    texts = [tuple(one.true_token(seed, i) for i in range(40)) for seed in (1, 2, 2**63 + 5)]
    assert len(set(texts)) == 3
    assert set(texts[0]) <= set(VOCABULARY)


def test_a_target_keeps_what_is_true() -> None:
    spec = SequenceSpec(SamplingParams(), 5, 3, 50)
    one = script()
    true = tuple(one.true_token(5, i) for i in range(3, 8))
    target = ScriptedTarget(one, 100)
    wrong = (*true[:2], true[2] + 1, true[3])
    results = target.verify([VerifyJob("a", TokenLog(range(3)), draft, spec) for draft in ((), true[:4], wrong)])
    assert [result.run for result in results] == [true[:1], true, true[:3]]
    assert [(result.num_accepted, result.num_drafted) for result in results] == [(0, 0), (4, 4), (2, 4)]


def test_a_drafter_says_its_guesses_where_asked() -> None:
    one, spec = script(), SequenceSpec(SamplingParams(), 5, 3, 50)
    jobs = [DraftJob("a", [1, 2, 3], spec, num_guesses=count) for count in (0, 3)]
    plain, guessing = ScriptedDrafter(one, 100).propose(jobs)
    assert (plain.token, plain.guesses) == (guessing.token, ())
    assert (guessing.token, *guessing.guesses) == one.draft_tokens(5, 3, 3)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 9])
def test_every_draft_length_gives_the_same_tokens(num_draft_tokens: int) -> None:
    one = script()
    sampling = SamplingParams(ignore_eos=True)
    cases = [Case((1, 2, 3), 40, sampling, seed) for seed in (4, 5)]
    service = InProcessService(ScriptedTarget(one, 100), ScriptedDrafter(one, 100), num_draft_tokens)
    outputs, stats = run(service, cases)
    assert outputs == [[one.true_token(case.seed, i) for i in range(3, 43)] for case in cases]
    assert (stats.num_draft_tokens > 0) == (num_draft_tokens > 0)


def test_plain_tokens_are_whole_characters() -> None:
    tokenizer = AutoTokenizer.from_pretrained(f"{specdec.demo.__path__[0]}/target")
    ids = plain_token_ids(tokenizer, len(tokenizer))
    assert len(ids) > 1000
    assert not set(ids) & set(tokenizer.all_special_ids)
    text = tokenizer.decode(ids[:500])
    assert text == "".join(tokenizer.decode([token]) for token in ids[:500])
    assert text.isascii()
    assert text.isprintable()
