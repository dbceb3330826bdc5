"""Which of several drafters draft for a target: what is counted of each, and who rests."""

from __future__ import annotations

import pytest

from specdec.drafting.length.drafters import REST_S, TRIAL_ROUNDS, DrafterChoice
from specdec.drafting.length.modes import StepTime, StepTimes

NAMES = ("a", "b")
FLAT = StepTimes((StepTime(1, 1, 0.030, 100), StepTime(1, 64, 0.031, 100)))
"""The target has time for any number of tokens."""
STEEP = StepTimes((StepTime(16, 16, 0.030, 100), StepTime(16, 64, 0.120, 100), StepTime(16, 256, 0.480, 100)))


def counted(rounds, **drafters):
    """Metrics of a target after so many rounds: of each drafter the tokens that it added and earned in each."""
    metrics = {"num_drafts": rounds}
    for name, (added, earned) in drafters.items():
        metrics[f"num_draft_tokens_by_drafter/{name}"] = rounds * added
        metrics[f"num_accepted_tokens_by_drafter/{name}"] = rounds * earned
    metrics["num_draft_tokens"] = sum(rounds * added for added, _ in drafters.values())
    metrics["num_accepted_tokens"] = sum(rounds * earned for _, earned in drafters.values())
    return metrics


def after(choice, times, num_rows, now_s=0.0, rounds=TRIAL_ROUNDS, **drafters):
    choice.count({}, counted(rounds, **drafters))
    return choice.choose(NAMES, times, num_rows, now_s)


@pytest.mark.parametrize(
    ("second", "times", "num_rows", "drafting"),
    [
        ((3, 0.5), FLAT, 1, ()),
        ((3, 0.0), FLAT, 1, ("a",)),  # it is wrong, or says what the other says
        ((0, 0.0), FLAT, 1, ("a",)),  # it is late
        ((3, 0.5), STEEP, 16, ("a",)),  # the target has no time for its tokens
        ((3, 5.0), STEEP, 16, ("b",)),  # it is the better one, and the other one is not worth its tokens
    ],
)
def test_who_adds_too_little_rests(second, times, num_rows, drafting):
    choice = DrafterChoice()
    assert choice.choose(NAMES, times, num_rows, 0.0) == ()
    assert after(choice, times, num_rows, a=(4, 2.0), b=second) == drafting


def test_nobody_is_judged_before_its_trial_and_who_rests_is_tried_again():
    choice = DrafterChoice()
    choice.choose(NAMES, FLAT, 1, 0.0)
    assert after(choice, FLAT, 1, rounds=TRIAL_ROUNDS - 1, a=(4, 2.0), b=(3, 0.0)) == ()
    assert after(choice, FLAT, 1, rounds=1, a=(4, 2.0), b=(3, 0.0)) == ("a",)
    assert after(choice, FLAT, 1, REST_S - 1, a=(4, 2.0), b=(0, 0.0)) == ("a",)
    assert choice.choose(NAMES, FLAT, 1, REST_S) == ()
    assert after(choice, FLAT, 1, REST_S + 1, a=(4, 2.0), b=(3, 0.5)) == ()


def test_who_rests_takes_over_at_once_where_the_better_one_is_gone():
    choice = DrafterChoice()
    choice.choose(NAMES, FLAT, 1, 0.0)
    assert after(choice, FLAT, 1, a=(4, 2.0), b=(3, 0.0)) == ("a",)
    assert choice.choose(("b",), FLAT, 1, 1.0) == ()
    assert choice.choose(("b", "c"), FLAT, 1, 1.0) == ("c",)


def test_a_single_drafter_is_never_named():
    assert DrafterChoice().choose(("drafter",), STEEP, 16, 0.0) == ()
