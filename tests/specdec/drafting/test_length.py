"""The one answer to how many tokens to draft: its laws, its step times, and what a target learns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec.core.drafts import Draft, nodes_of, tree_shape
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import Tokens
from specdec.drafting.length import (
    GAIN,
    MARGIN,
    MEMORY,
    PROBE_EVERY,
    PROBE_LENGTH,
    REVIEW_STEPS,
    DecayedRate,
    DraftLengths,
    StepTime,
    StepTimes,
    best_choice,
    best_length,
    interpolate,
    step_times,
    tally,
)
from specdec.drafting.ngram import LONG_MATCH
from specdec.engine.timing import StepTimer
from tests.letters import provenance

# The law of a choice.


def test_a_choice_that_gains_less_than_gain_is_off() -> None:
    assert best_choice({0: 1.0, 4: 1 + GAIN - 0.01}, 0, 0) == 0
    assert best_choice({0: 1.0, 4: 1 + GAIN - 0.01}, 0, 4) == 0
    assert best_choice({0: 1.0, 4: 1 + GAIN + 0.01}, 0, 0) == 4


def test_the_present_choice_stays_until_another_is_better_by_margin() -> None:
    paces = {0: 1.0, 2: 2.0, 4: 2.0 * (1 + MARGIN - 0.005)}
    assert best_choice(paces, 0, 2) == 2
    assert best_choice(paces, 0, 4) == 4
    assert best_choice(paces | {4: 2.0 * (1 + MARGIN + 0.005)}, 0, 2) == 4
    assert best_choice(paces, 0, 9) == 4, "a present choice that is no longer allowed does not stay"


def test_of_choices_that_tie_the_one_that_drafts_least_is_taken() -> None:
    assert best_choice({0: 1.0, 2: 1.999, 4: 2.0}, 0, 0) == 2


def test_a_length_weighs_tokens_kept_against_seconds() -> None:
    kept = [0.8**place for place in range(1, 9)]
    free = [1.0] * 9
    by_token = [1.0 + 0.5 * length for length in range(9)]
    assert best_length(kept, free) >= 7
    assert best_length(kept, by_token) == 2
    assert best_length([0.3**place for place in range(1, 9)], by_token) == 0
    # A step of graphs: five tokens cost what eight do.
    assert best_length(kept, [1.0] * 5 + [2.0] * 4) == 4


# Acceptance.


@pytest.mark.parametrize(
    ("how", "num_drafted", "counts"),
    [
        ("", (), (0, 0, 0)),
        ("pp", (0, 0), (2, 0, 0)),
        ("aab", (0, 0, 2), (1, 2, 2)),
        ("aac", (0, 0, 4), (1, 2, 3)),
        ("cpaa", (3, 0, 0, 2), (3, 2, 3)),
        ("aaaab", (0, 0, 0, 0, 16), (1, 4, 4)),
    ],
)
def test_tokens_after_a_refused_one_are_not_judged(how: str, num_drafted: Tokens, counts: tuple[int, int, int]) -> None:
    assert tally(provenance(how), num_drafted) == counts


def test_a_rate_begins_at_its_prior_and_forgets() -> None:
    rate = DecayedRate()
    assert rate.rate(0.5, 4) == 0.5
    for _ in range(100):
        rate = rate.add(0, 10)
    assert rate.trials == pytest.approx(MEMORY, rel=0.03)
    for _ in range(100):
        rate = rate.add(10, 10)
    assert rate.rate(0.5, 4) > 0.95
    assert rate.times(0.0).rate(0.5, 4) == 0.5


# Step times.


def test_a_timers_report_is_read_and_nonsense_is_left_out() -> None:
    timer = StepTimer()
    for seconds in (0.03, 0.031, 0.5):
        timer.add(2, 10, seconds)
    report = timer.metrics()
    assert step_times(report).points == (StepTime(2.0, 10.0, 0.031, 3.0),)
    assert not step_times({**report, "step/0/seconds": float("nan")})
    assert not step_times({**report, "step/0/rows": 0.0})
    assert not StepTimes()


def test_the_table_gives_what_was_measured_and_lines_between() -> None:
    times = StepTimes(tuple(StepTime(4, n, 0.01 * max(1, n / 16), 9) for n in (4, 8, 16, 24, 32)))
    assert [round(times.at(4, n), 4) for n in (2, 6, 16, 20, 32, 48)] == [0.01, 0.01, 0.01, 0.0125, 0.02, 0.03]
    assert StepTimes((StepTime(4, 8, 0.01, 9),)).at(4, 800) == pytest.approx(0.01)
    assert interpolate([1.0, 2.0], [5.0, 7.0], 1.5) == 6.0


def test_recorded_steps_stay_steps() -> None:
    times = StepTimes(tuple(StepTime(64, 64 * n, seconds, 9) for n, seconds in ((1, 10), (3, 11), (4, 12), (5, 16))))
    assert [times.at(64, 64 * n) for n in (1, 3, 4, 5)] == [10, 11, 12, 16]


def test_of_equal_sizes_the_closest_number_of_rows_counts() -> None:
    times = StepTimes((StepTime(1, 16, 0.01, 9), StepTime(16, 16, 0.02, 9)))
    assert times.at(1, 16) == 0.01
    assert times.at(16, 16) == 0.02


# What a target learns.

SPEC = SequenceSpec(SamplingParams(temperature=0.0), 1, 1, 1 << 20)
HOT = SequenceSpec(SamplingParams(temperature=1.0), 1, 1, 1 << 20)
SHAPE = tree_shape(24, 4)
TREE = Draft(tuple(range(100, 124)), source="heads", parents=tuple(node.parent for node in SHAPE))
STEP_S = 0.03
MODEL = Draft(tuple(range(4)), source="chain")
SHORT = Draft(tuple(range(10, 13)), source="ngram")
LONG = Draft(tuple(range(10, 10 + LONG_MATCH)), source="ngram")
SPREAD = (0, 0, 0, 0), (1, 0), (2, 0), (0, 2), (0, 1), (3,)
"""Paths of all parts of the tree, as ranks."""


def free_up_to(num_tokens: float) -> Callable[[int], float]:
    """A step that takes longer in proportion beyond ``num_tokens`` tokens."""
    return lambda tokens: STEP_S * max(1.0, tokens / num_tokens)


def timer_of(step_s: Callable[[int], float], rows: int = 1) -> StepTimer:
    timer = StepTimer()
    for tokens in range(1, 33):
        timer.add(rows, rows * tokens, step_s(rows * tokens))
    return timer


def lengths_of(step_s: Callable[[int], float], rows: int = 1) -> DraftLengths:
    return DraftLengths(timer_of(step_s, rows).metrics)


def path(draft: Draft, ranks: Tokens) -> Tokens:
    """The tokens of a draft by their ranks among those that follow the one before."""
    shape, nodes = nodes_of(draft.parents or tuple(range(-1, len(draft.tokens) - 1))), [-1]
    for rank in ranks:
        nodes += [i for i, node in enumerate(shape) if (node.parent, node.rank) == (nodes[-1], rank)]
    return tuple(draft.tokens[i] for i in nodes[1:])


def learn(lengths: DraftLengths, draft: Draft, *paths: Tokens, spec: SequenceSpec = SPEC, rounds: int = 60) -> None:
    """Rounds in which these ranks were kept, by turns."""
    for i in range(rounds):
        lengths.judge(draft, path(draft, paths[i % len(paths)]), spec)
    for _ in range(REVIEW_STEPS):
        lengths.begin_step()


def sizes(lengths: DraftLengths, rounds: int, rows: int = 1) -> list[int]:
    """Tokens of the tree that are verified in each round; 0 if heads draft nothing."""
    return [lengths.length(TREE, SPEC, rows) if lengths.own_length(SPEC, rows) else 0 for _ in range(rounds)]


@pytest.mark.parametrize(
    ("free_tokens", "least", "most"), [(1 << 20, 20, 24), (3, 2, 2), (2, 1, 1)], ids=["free", "two", "one"]
)
def test_a_tree_is_as_large_as_a_step_has_room_for(free_tokens: int, least: int, most: int) -> None:
    lengths = lengths_of(free_up_to(free_tokens))
    learn(lengths, TREE, *SPREAD)
    found = sizes(lengths, PROBE_EVERY - 1)
    assert least <= min(found) <= max(found) <= most
    assert lengths.length(TREE, SPEC, 1) == len(TREE.tokens), "one in PROBE_EVERY is verified whole, to learn"


def test_heads_that_do_not_pay_draft_in_one_round_of_probe_every() -> None:
    lengths = lengths_of(free_up_to(1))
    learn(lengths, TREE, ())
    found = sizes(lengths, 10 * PROBE_EVERY)
    assert found.count(len(TREE.tokens)) == 1 + 10, "the first round tells how many tokens the tree has"
    assert found.count(0) == 10 * PROBE_EVERY - 11


def test_heads_that_have_become_better_are_taken_up_again() -> None:
    lengths = lengths_of(free_up_to(1.5))
    learn(lengths, TREE, ())
    assert sizes(lengths, 100).count(0) > 90
    learn(lengths, TREE, (0, 0, 0, 0), rounds=600)
    sizes(lengths, PROBE_EVERY)
    assert sizes(lengths, PROBE_EVERY).count(0) == 0


def test_rows_share_a_step() -> None:
    for rows, least, most in ((1, 8, 24), (16, 1, 1)):
        lengths = lengths_of(free_up_to(32), rows)
        learn(lengths, TREE, *SPREAD)
        found = sizes(lengths, PROBE_EVERY - 1, rows)
        assert least <= min(found) <= max(found) <= most


def test_newer_step_times_count_after_review_steps() -> None:
    timer = timer_of(lambda _: STEP_S)
    lengths = DraftLengths(timer.metrics)
    learn(lengths, TREE, *SPREAD)
    assert lengths.length(TREE, SPEC, 1) > 16
    for _ in range(40):
        for tokens in range(1, 33):
            timer.add(1, tokens, free_up_to(3)(tokens))
    for _ in range(REVIEW_STEPS - 1):
        lengths.begin_step()
    assert lengths.length(TREE, SPEC, 1) > 16
    lengths.begin_step()
    assert lengths.length(TREE, SPEC, 1) == 2


def test_a_draft_that_pays_at_temperature_0_rests_at_1_alone() -> None:
    lengths = lengths_of(free_up_to(2))
    learn(lengths, SHORT, (0, 0, 0))
    learn(lengths, SHORT, (), spec=HOT)
    assert lengths.length(SHORT, SPEC, 1) > 0
    assert lengths.length(SHORT, HOT, 1) == 0


def test_long_matches_are_a_source_of_their_own() -> None:
    lengths = lengths_of(free_up_to(64))
    learn(lengths, SHORT, ())
    learn(lengths, LONG, (0,) * LONG_MATCH)
    assert lengths.length(SHORT, SPEC, 1) == 0
    assert lengths.length(LONG, SPEC, 1) == LONG_MATCH


def test_before_a_step_was_timed_tokens_cost_nothing() -> None:
    assert DraftLengths(dict).length(TREE, SPEC, 1) >= 20
    assert DraftLengths(dict).length(SHORT, SPEC, 1) == len(SHORT.tokens)


@pytest.mark.parametrize(("draft_s", "least", "most"), [(0.001, 6, 16), (0.02, 0, 1), (0.1, 0, 0)])
def test_a_draft_model_in_the_process_drafts_what_its_steps_allow(draft_s: float, least: int, most: int) -> None:
    lengths = DraftLengths(timer_of(free_up_to(64)).metrics, timer_of(lambda _: draft_s).metrics)
    for i in range(120):
        lengths.judge(MODEL, MODEL.tokens[: i % 5], SPEC)
    for _ in range(REVIEW_STEPS):
        lengths.begin_step()
    found = [lengths.own_length(SPEC, 1) for _ in range(2 * PROBE_EVERY)]
    assert least <= sorted(found)[len(found) // 2] <= most
    assert max(found) >= min(PROBE_LENGTH, 1), "it is tried now and then"
