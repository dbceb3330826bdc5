"""What drafts gain: how much of a tree is verified at which step times, and which of several drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from specdec.core.drafts import NO_DRAFT, Draft, nodes_of, tree_shape
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import Tokens
from specdec.drafting.length.estimates import PROBE_EVERY, REVIEW_EVERY, DraftGains
from specdec.drafting.ngram import LONG_MATCH
from specdec.engine.timing import StepTimer

SPEC = SequenceSpec(SamplingParams(temperature=0.0), 1, 1, 1 << 20)
SHAPE = tree_shape(24, 4)
TREE = Draft(tuple(range(100, 124)), source="heads", parents=tuple(node.parent for node in SHAPE))
STEP_S = 0.03


def free_up_to(num_tokens: float) -> Callable[[int], float]:
    """A step that takes longer in proportion beyond so many tokens."""
    return lambda tokens: STEP_S * max(1.0, tokens / num_tokens)


def gains(step_s: Callable[[int], float], rows: int = 1) -> DraftGains:
    timer = StepTimer()
    for tokens in range(1, 33):
        timer.add(rows, rows * tokens, step_s(rows * tokens))
    return DraftGains(timer.metrics)


def path(draft: Draft, ranks: Tokens) -> Tokens:
    """The tokens of a draft by their ranks among those that follow the one before."""
    shape, found = nodes_of(draft.parents or tuple(range(-1, len(draft.tokens) - 1))), [-1]
    for rank in ranks:
        found += [i for i, node in enumerate(shape) if (node.parent, node.rank) == (found[-1], rank)]
    return tuple(draft.tokens[i] for i in found[1:])


def learn(one: DraftGains, draft: Draft, *paths: Tokens, spec: SequenceSpec = SPEC, rounds: int = 60) -> DraftGains:
    """Rounds in which these ranks were kept, by turns."""
    for i in range(rounds):
        one.judge(draft, path(draft, paths[i % len(paths)]), spec)
    return one


def sizes(one: DraftGains, rounds: int, rows: int = 1) -> list[int]:
    """Tokens that are verified in each round; 0 where nothing is drafted."""
    return [len(one.cut(TREE, SPEC, rows).tokens) if one.wants_own(SPEC, rows) else 0 for _ in range(rounds)]


def test_a_shape_is_told_from_what_its_tokens_follow() -> None:
    assert nodes_of(TREE.parents) == SHAPE


SPREAD = (0, 0, 0, 0), (1, 0), (2, 0), (0, 2), (0, 1), (3,)
"""Paths of all parts of the tree."""


@pytest.mark.parametrize(
    ("free_tokens", "least", "most"), [(1 << 20, 24, 24), (3, 2, 2), (2, 1, 1)], ids=["free", "two", "one"]
)
def test_a_tree_is_as_large_as_a_step_has_room_for(free_tokens: int, least: int, most: int) -> None:
    """And a chain where that is little: its first two tokens follow each other."""
    one = learn(gains(free_up_to(free_tokens)), TREE, *SPREAD)
    found = sizes(one, PROBE_EVERY - 1)
    assert least <= min(found) <= max(found) <= most
    assert one.cut(TREE, SPEC, 1).tokens == TREE.tokens, "all of it, to learn"
    if most <= 2:
        assert TREE.only(range(most)).parents == (-1, 0)[:most]


def test_where_no_size_pays_hardly_a_round_has_a_draft() -> None:
    one = learn(gains(free_up_to(1)), TREE, (0,), ())
    rounds = 10 * PROBE_EVERY
    found = sizes(one, rounds)
    assert found.count(0) >= rounds - 12
    assert sum(size > 0 for size in found[PROBE_EVERY:]) >= 8, "now and then it is tried"


def test_what_was_off_is_tried_and_taken_up_where_it_has_become_better() -> None:
    one = learn(gains(free_up_to(1.5)), TREE, ())
    assert sizes(one, 100).count(0) > 90
    learn(one, TREE, (0, 0, 0, 0), rounds=600)
    assert sizes(one, 3 * PROBE_EVERY)[-PROBE_EVERY:].count(0) == 0


def test_rows_share_a_step() -> None:
    """One sequence has room for a tree, of sixteen each has room for a token."""
    for rows, least, most in ((1, 8, 24), (16, 1, 1)):
        one = learn(gains(free_up_to(32), rows), TREE, *SPREAD)
        found = sizes(one, PROBE_EVERY - 1, rows)
        assert least <= min(found) <= max(found) <= most


def test_newer_step_times_are_followed() -> None:
    timer = StepTimer()
    for tokens in range(1, 33):
        timer.add(1, tokens, STEP_S)
    one = learn(DraftGains(timer.metrics), TREE, *SPREAD)
    assert sizes(one, REVIEW_EVERY // 2)[-1] > 16
    for _ in range(40):
        for tokens in range(1, 33):
            timer.add(1, tokens, free_up_to(3)(tokens))
    assert sizes(one, REVIEW_EVERY)[-1] == 2


def test_before_a_step_was_timed_a_draft_is_whole() -> None:
    assert DraftGains(dict).cut(TREE, SPEC, 1) == TREE
    assert DraftGains(dict).cut(NO_DRAFT, SPEC, 1) == NO_DRAFT


MODEL = Draft(tuple(range(4)), source="chain")
LONG = Draft(tuple(range(10, 10 + LONG_MATCH)), source="ngram")
SHORT = Draft(tuple(range(10, 13)), source="ngram")
HEADS = TREE.only(range(4))


@pytest.mark.parametrize("best", [MODEL, LONG, SHORT, HEADS], ids=["model", "long match", "match", "heads"])
def test_of_several_drafts_the_one_is_verified_that_was_right_before(best: Draft) -> None:
    one, drafts = gains(free_up_to(64)), [MODEL, LONG, SHORT, HEADS]
    for draft in drafts:
        learn(one, draft, path(draft, (0,) * len(draft.tokens)) and (0,) * 8 if draft is best else ())
    found = [one.best(drafts, SPEC, 1) for _ in range(2 * PROBE_EVERY)]
    assert found.count(best) >= 2 * PROBE_EVERY - 2
    assert found.count(MODEL) >= 2, "the first of them is tried now and then"


def test_of_two_that_are_as_often_right_the_longer_one_is_verified_where_that_costs_nothing() -> None:
    drafts = [SHORT, MODEL]
    for free_tokens, best in ((64, MODEL), (1, SHORT)):
        one = gains(free_up_to(free_tokens))
        for draft in drafts:
            learn(one, draft, (0,) * len(draft.tokens), ())
        assert one.best(drafts, SPEC, 1) == best


def test_temperatures_are_apart_and_nothing_is_a_choice() -> None:
    warm = replace(SPEC, sampling=SamplingParams(temperature=1.0))
    one = learn(gains(free_up_to(64)), MODEL, (0,) * 4)
    learn(one, MODEL, (), spec=warm)
    learn(one, SHORT, (0,), spec=warm)
    assert one.best([MODEL, SHORT], SPEC, 1) == MODEL
    assert one.best([MODEL, SHORT], warm, 1) == SHORT
    assert one.best([NO_DRAFT, SHORT], SPEC, 1) == SHORT
    assert one.best([NO_DRAFT, NO_DRAFT], SPEC, 1) == NO_DRAFT


def test_the_size_for_one_temperature_is_not_anothers() -> None:
    warm = replace(SPEC, sampling=SamplingParams(temperature=1.0))
    one = learn(learn(gains(free_up_to(1.5)), TREE, (0, 0, 0, 0)), TREE, (), spec=warm)
    found = [(one.cut(TREE, spec, 1), one.wants_own(spec, 1)) for spec in (SPEC, warm, SPEC, warm)]
    assert [wants for _, wants in found] == [True, False] * 2


def test_what_follows_a_refused_token_is_not_judged() -> None:
    """A chain that is right half of the time is so to its end, which is more than two of three at each place."""
    chain = HEADS.chain()
    one = learn(learn(gains(free_up_to(64)), chain, (0,) * len(chain.tokens), ()), MODEL, (0, 0))
    expected = [one._paces(draft, SPEC, 1)[-1] * STEP_S for draft in (chain, MODEL)]
    assert expected == pytest.approx([1 + len(chain.tokens) / 2, sum((2 / 3) ** i for i in range(5))], rel=0.1)
