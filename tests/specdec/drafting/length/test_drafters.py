"""Which of several drafters draft for a target: what is counted of each, and who rests."""

from __future__ import annotations

import pytest

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.length.controller import PROBE, Controller
from specdec.drafting.length.drafters import REST_S, TRIAL_ROUNDS, DrafterChoice
from specdec.drafting.length.modes import OFF, StepTime, StepTimes
from specdec.engine.timing import StepTimer

NAMES = ("a", "b")
FLAT = StepTimes((StepTime(1, 1, 0.030, 100), StepTime(1, 64, 0.031, 100)))
"""The target has time for any number of tokens."""
STEEP = StepTimes((StepTime(16, 16, 0.030, 100), StepTime(16, 64, 0.120, 100), StepTime(16, 256, 0.480, 100)))


def counted(rounds, **drafters):
    """Metrics of a target after so many rounds: of each drafter in them the tokens that it added and earned in each."""
    metrics = {"num_drafts": rounds}
    for name, (added, earned) in drafters.items():
        metrics[f"num_drafts_by_drafter/{name}"] = rounds
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
        ((3, 0.0), FLAT, 1, ("a",)),  # it is wrong
        ((0, 0.0), FLAT, 1, ("a",)),  # it says what the other says
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


def test_a_trial_begins_with_the_first_offer():
    choice = DrafterChoice()
    choice.choose(NAMES, FLAT, 1, 0.0)
    assert after(choice, FLAT, 1, 2.0, 10 * TRIAL_ROUNDS, a=(4, 2.0)) == ()  # the other one reads a prompt
    assert after(choice, FLAT, 1, 4.0, a=(4, 2.0), b=(3, 0.5)) == ()
    assert after(choice, FLAT, 1, 6.0, a=(4, 2.0), b=(3, 0.0)) == ("a",)


def test_of_many_sequences_those_that_are_still_read_say_nothing_of_a_drafter():
    """It has a part in one of sixteen rounds, and what it adds there is worth it."""
    choice = DrafterChoice()
    choice.choose(NAMES, FLAT, 1, 0.0)
    for _ in range(int(TRIAL_ROUNDS)):
        choice.count({}, counted(15, a=(4, 2.0)))
        choice.count({}, counted(1, a=(4, 2.0), b=(3, 0.15)))
    assert choice.choose(NAMES, FLAT, 1, 1.0) == ()


def test_who_never_offers_is_judged_when_something_was_drafted_for_long_enough():
    choice = DrafterChoice()
    assert choice.choose(NAMES, FLAT, 1, 0.0) == ()
    assert after(choice, FLAT, 1, 2 * REST_S, a=(4, 2.0)) == ()  # nothing was drafted meanwhile
    resting = [after(choice, FLAT, 1, 2 * REST_S + i / 2, a=(4, 2.0)) for i in range(1, int(2 * REST_S) + 1)]
    assert resting[: int(REST_S)] == [()] * int(REST_S)
    assert resting[-1] == ("a",)


def test_who_rests_takes_over_at_once_where_the_better_one_is_gone():
    choice = DrafterChoice()
    choice.choose(NAMES, FLAT, 1, 0.0)
    assert after(choice, FLAT, 1, a=(4, 2.0), b=(3, 0.0)) == ("a",)
    assert choice.choose(("b",), FLAT, 1, 1.0) == ()
    assert choice.choose(("b", "c"), FLAT, 1, 1.0) == ("c",)


def test_a_single_drafter_is_never_named():
    assert DrafterChoice().choose(("drafter",), STEEP, 16, 0.0) == ()


def test_a_probe_asks_those_that_there_are():
    """The drafter that was the better one is lost while nothing is drafted."""
    controller = Controller()
    for worker, step_s in (("target", 0.030), *((name, 0.040) for name in NAMES)):
        timer = StepTimer()
        for rows in (1, 8):
            timer.add(rows, rows, step_s)
        controller.reported(worker, worker, timer.metrics())
    spec, placements = SequenceSpec(SamplingParams(), 1, 1, 64), {"s": ("target", "a")}
    controller.opened("s", spec)
    assert controller.review(placements, 0.0)["s"].drafters == ()
    (group,) = controller._groups.values()
    assert group.choice == OFF, "such a draft is slower than the target"
    group.named = ("b",)
    assert controller.review(placements, 1.0)["s"].drafters == ("b",)
    controller.lost("b")
    plan = controller.review(placements, 2.0)["s"]
    assert (plan.num_draft_tokens, plan.drafters) == (PROBE.num_draft_tokens, ())
