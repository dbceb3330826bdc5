"""Pauses and outages of drafters: what they cost, and what goes on after them."""

from __future__ import annotations

import pytest

from specdec.control.estimates import Round
from specdec.control.experience import Observed, load_octave
from specdec.control.limits import OFF
from specdec.control.load import LoadTime
from tests.specdec.control.requests import REVIEW_S, Requests, on_trial
from tests.specdec.control.test_controller import STEP_S, kept, spec


def no_request(service):
    service.end()
    service.idle(60.0)
    service.begin((None,) * 4)


def none_that_may_draft(service):
    service.end()
    service.begin((0,) * 4)
    service.run(kept(0.0), 60.0)
    service.end()
    service.begin((None,) * 4)


def no_drafter(service):
    report = service.draft_report(4)
    service.controller.lost("D")
    service.run_alone(60.0)
    service.controller.reported("D", "drafter", report)


@pytest.mark.parametrize("pause", [no_request, none_that_may_draft, no_drafter])
def test_a_pause_costs_a_trial_nothing_and_the_allowance_is_no_older(pause):
    service = on_trial()
    group, allowance = service.group, service.group._allowance
    arm, credit, age, load_s = group.arm, allowance.credit, dict(allowance.ages), group.load.now_s
    pause(service)
    assert (group.arm, group._on_trial, allowance.credit, allowance.ages) == (arm, True, credit, age)
    before_s = service.now
    service.run(kept(0.6), 1.0)
    worked_s = service.now - before_s
    assert group.load.now_s == pytest.approx(load_s + worked_s, abs=0.3)
    octave = load_octave(4)
    assert allowance.ages[octave] == pytest.approx(age[octave] + worked_s / STEP_S, abs=10)
    assert allowance.credit > credit - worked_s / STEP_S


def test_what_was_measured_before_a_pause_is_booked_on_the_load_that_it_ended():
    service = Requests((None,) * 4)
    service.run(kept(0.6), 20.0)
    group = service.group
    arm, before = group.arm, service.now
    for _ in range(4):
        service.now += STEP_S
        for seq in service.seqs:
            service.controller.judged(seq, [Round(arm.num_draft_tokens, 1)], service.now)
    assert group.observed.num_rounds == 16
    service.end()
    service.idle(1.0)
    assert group.observed == Observed()
    assert group.num_rows == 0
    entry = group.experience.entries[arm, load_octave(4)]
    assert entry.at_s == pytest.approx(before + 4 * STEP_S + REVIEW_S)


def test_time_under_load_is_that_in_which_some_round_was_under_way():
    load = LoadTime()
    load.heard(1.0, 10.0)
    assert load.now_s == pytest.approx(1.0)
    load.heard(0.5, 10.0)  # beside it
    load.heard(1.0, 10.5)  # half of it beside it
    assert load.now_s == pytest.approx(1.5)
    load.heard(0.2, 70.5)  # after a pause
    assert load.now_s == pytest.approx(1.7)


def test_a_round_that_something_else_held_up_does_not_count_in_full():
    service = Requests((None,))
    service.run(kept(0.6), 5.0)
    load_s = service.group.load.now_s
    service.now += 60.0
    service.controller.judged("s0", [Round(0, 0)], service.now)
    assert service.group.load.now_s < load_s + 1


def test_rounds_of_those_that_may_not_draft_are_no_load():
    service = Requests((None, 0))
    service.run(kept(0.6), 5.0)
    load_s = service.group.load.now_s
    service.now += STEP_S
    service.controller.judged("s1", [Round(0, 0)], service.now)
    assert service.group.load.now_s == load_s


@pytest.mark.parametrize("request_s", [0.2, 0.3])
def test_a_trial_ends_though_requests_are_shorter_than_the_time_between_reviews(request_s):
    """They are heard of before a review places them, and are gone before the next."""
    service = on_trial()
    group, began = service.group, service.now
    service.end()
    while group._on_trial and service.now < began + 60:
        service.begin((None,) * 4)
        placements = dict.fromkeys(service.seqs, ("T", "D"))
        end = service.now + request_s
        while service.now < end:
            service.now += STEP_S
            for seq in service.seqs:
                service.controller.judged(seq, [kept(0.6)(service.plans[seq])], service.now)
        service.controller.review(placements, service.now)
        service.end()
        service.idle(0.6)
    assert not group._on_trial


def test_a_drafter_that_was_started_anew_is_tried_though_nothing_is_known_of_its_steps():
    service = Requests((None,) * 4)
    service.run(kept(0.0), 40.0)
    assert service.group.arm == OFF
    service.controller.lost("D")
    service.run_alone(1.0)
    assert service.lengths == [0] * 4
    service.controller.reported("D", "drafter", {"num_sequences": 0.0})
    service.run(kept(1.0), 0.5)
    assert sum(length > 0 for length in service.lengths) == 1
    service.controller.reported("D", "drafter", service.draft_report(1))
    service.run(kept(1.0), 90.0)
    assert min(service.lengths) >= 3


def test_rounds_without_a_drafter_that_is_known_are_not_booked_on_the_arm():
    service = Requests((None,) * 4, kinds=frozenset({"in_turn"}))
    service.run(kept(0.9), 20.0)
    group, report = service.group, service.draft_report(4)
    assert group.arm.kind == "in_turn"
    before = group.experience
    service.controller.lost("D")
    service.controller.reported("D", "drafter", {"num_sequences": 4.0})
    service.run(lambda plan: Round(0, 0), 4.0, 4 * STEP_S)
    assert all(service.lengths)
    assert group.experience is before
    service.controller.reported("D", "drafter", report)
    service.run(kept(0.9), 10.0)
    assert group.experience is not before
    for entry in group.experience.entries.values():
        assert not entry.lengths.get(0)
        assert entry.seconds / entry.num_rounds == pytest.approx(STEP_S, rel=0.01)


def test_where_no_drafter_is_left_nobody_waits_for_one():
    service = Requests((None, 3), kinds=frozenset({"in_turn"}))
    service.run(kept(0.9), 5.0)
    assert min(service.lengths) > 0
    report = service.draft_report(2)
    service.controller.lost("D")
    service.begin((None,))
    assert service.lengths[-1] == 0
    service.run_alone(0.5)
    service.begin((None,))
    assert service.lengths == [0] * 4
    assert [plan.draft_wait_s for plan in service.plans.values()] == [0.0] * 4
    service.controller.reported("D", "drafter", report)
    service.run(kept(0.9), 0.5)
    service.begin((None,))
    assert min(service.lengths) > 0


def test_a_drafter_that_has_not_reported_yet_but_holds_sequences_is_there():
    service = Requests((None, None))
    service.run(kept(0.9), 5.0)
    service.controller.lost("D")
    service.controller.review(dict.fromkeys(service.seqs, ("T", "another")), service.now)
    assert service.controller.opened("new", spec()).num_draft_tokens > 0
