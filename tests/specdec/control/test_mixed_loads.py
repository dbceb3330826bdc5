"""Requests' bounds, sequences that draft nothing, other routers."""

from __future__ import annotations

import pytest

from specdec.control.choice import Bounds, arms
from specdec.control.controller import Tracked
from specdec.control.estimates import Round
from specdec.control.experience import Observed
from specdec.control.group import Group
from specdec.control.limits import OFF, Arm, pace
from specdec.control.settings import Settings
from specdec.protocol.messages import Plan
from tests.specdec.control.requests import Requests
from tests.specdec.control.test_controller import kept
from tests.specdec.control.test_limits import conditions


@pytest.mark.parametrize("bound", [1, 2, 3, 7])
def test_an_arm_is_as_long_as_the_longest_draft_that_any_request_allows_and_is_measured(bound):
    service = Requests((bound, 1, 0))
    service.run(kept(1.0), 30.0)
    group = service.group
    assert 0 < group.arm.num_draft_tokens <= bound
    assert service.lengths == [group.arm.num_draft_tokens, 1, 0]
    assert group._num_steps > 0
    assert max(arm.num_draft_tokens for arm, _ in group.experience.entries) <= max(bound, 4)
    service.end()
    service.begin((None,))
    service.run(kept(0.95), 60.0)
    assert service.group.arm.num_draft_tokens > bound


def test_the_bound_itself_is_among_the_draft_lengths():
    assert max(arm.num_draft_tokens for arm in arms(Bounds(7))) == 7
    assert {arm.num_draft_tokens for arm in arms(Bounds(20))} == {arm.num_draft_tokens for arm in arms(Bounds(16))}
    assert arms(Bounds(0)) == [OFF]


def test_an_arm_is_measured_though_it_leaves_a_sequences_plan_as_it_was():
    """Two draft lengths beyond a request's bound give the same plan."""
    one = Tracked(2, Plan(2), Arm("overlap", 4), since=9)
    assert not one.follow(Arm("overlap", 8), Plan(2))
    assert (one.arm, one.since) == (Arm("overlap", 8), 0)
    one.since = 9
    assert not one.follow(Arm("overlap", 8), Plan(2))
    assert one.since == 9
    assert one.follow(Arm("overlap", 8), Plan(1))
    assert (one.plan, one.since) == (Plan(1), 0)


@pytest.mark.parametrize(
    ("bounds", "reported", "expected"),
    [((0,) * 60 + (None,) * 4, 4, 4), ((None,) * 4, 40, 40), ((None,) * 64, 4, 64), ((0,) * 3 + (None,), 0, 1)],
)
def test_a_drafters_load_is_who_drafts_there_of_this_router_and_of_others(bounds, reported, expected):
    service = Requests(bounds)
    service.controller.reported("D", "drafter", {**service.draft_report(4), "num_sequences": float(reported)})
    service.run(kept(0.9), 0.2)
    assert service.group.conditions.num_draft_rows == expected


def test_requests_for_the_draft_model_itself_are_not_drafted_for():
    service = Requests((None,) * 4)
    service.controller.reported(
        "D", "drafter", {**service.draft_report(4), "num_sequences": 44.0, "num_solo_sequences": 40.0}
    )
    service.run(kept(0.9), 0.2)
    assert service.group.conditions.num_draft_rows == 4


def test_who_is_off_alone_is_no_load_for_the_drafter():
    service = Requests((None,) * 4, growth=0.35, kinds=frozenset({"off", "overlap"}))
    service.controller.reported("D", "drafter", {**service.draft_report(4), "num_sequences": 3.0})
    turn = -1

    def rounds(plan):
        nonlocal turn
        turn = (turn + 1) % 4
        return Round(plan.num_draft_tokens, plan.num_draft_tokens if turn else 0)

    seen = set()
    for _ in range(120):
        service.run(rounds, 0.25)
        if service.controller._sequences["s0"].off_since_s is not None:
            service.run(rounds, 0.25)
            seen.add((service.lengths[0], service.group.conditions.num_draft_rows))
    assert (0, 3) in seen


def test_where_few_of_many_draft_each_may_have_all_branches():
    service = Requests((0,) * 60 + (None,) * 4, kinds=frozenset({"off", "outcomes"}))
    service.controller.reported("D", "drafter", service.draft_report(4))
    service.run(kept(0.6), 1.0)
    assert max(service.plans[seq].num_branches for seq in service.seqs) > 4


def test_rounds_that_are_long_by_design_are_taken_as_they_are():
    """In turn with a slow drafter a round is 5.8 steps; the limit is for rounds that something else held up."""
    arm, now = Arm("in_turn", 16), conditions(0.3)
    round_s = pace(arm, now, 0.95).round_s
    assert round_s > 4 + 0.05
    group = Group(Settings(first_arm=arm))
    group.review(now, [0.95], Bounds(kinds=frozenset({"in_turn"})), 0.0)
    group.arm = arm
    group.review(now, [0.95], Bounds(16, 0, frozenset({"in_turn"})), 1.0)
    group.arm, group.observed = arm, Observed()
    group.heard(arm, [Round(16, 9)] * 3, 3 * round_s, 20.0, is_settled=True)
    assert group.observed.seconds == pytest.approx(3 * round_s)
    group.heard(arm, [Round(16, 9)], 100 * round_s, 1000.0, is_settled=True)
    assert group.observed.seconds < 6 * round_s
