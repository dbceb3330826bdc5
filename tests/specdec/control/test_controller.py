from __future__ import annotations

from itertools import pairwise

import pytest

from specdec.control.choice import Bounds
from specdec.control.controller import Controller
from specdec.control.estimates import Round
from specdec.control.experience import Entry
from specdec.control.group import Allowance, Group
from specdec.control.limits import OFF, Arm
from specdec.control.settings import Settings
from specdec.control.steptimes import step_times
from specdec.engine.timing import StepTimer
from specdec.protocol.messages import Notes
from specdec.sampling.params import SamplingParams, SequenceSpec
from tests.specdec.control.test_limits import conditions

STEP_S, DRAFT_S = 0.03, 0.003


def spec(bound=None):
    return SequenceSpec(SamplingParams(), 0, 1, 1000, num_speculative_tokens=bound)


def steps(sizes):
    timer = StepTimer()
    for rows, tokens, seconds in sizes:
        for _ in range(8):
            timer.add(rows, tokens, seconds)
    return timer.report()


class Service:
    """A controller with sequences on one target and one drafter, fed by hand."""

    def __init__(self, bounds=(None,), *, growth=0.0, cost_s=DRAFT_S, kinds=None):
        self.controller = Controller(Bounds(kinds=kinds) if kinds else None)
        self.growth = growth
        self.seqs = [f"s{i}" for i in range(len(bounds))]
        self.plans = {s: self.controller.opened(s, spec(b)) for s, b in zip(self.seqs, bounds, strict=True)}
        rows, self.now = len(bounds), 0.0
        count = {"num_sequences": float(rows)}
        target = steps((rows, rows * n, STEP_S * (1 + growth * (n - 1))) for n in (1, 2, 3, 5, 9, 17))
        draft = steps((rows * n, rows * n, cost_s) for n in (1, 2, 3, 5, 9, 17, 33))
        self.target = {**target, **count}
        self.controller.reported("T", "target", self.target)
        self.draft = {**draft, **count}
        self.controller.reported("D", "drafter", self.draft)

    def run(self, rounds, seconds=10.0, step_s=None):
        """Each sequence has ``rounds(plan)`` in every step."""
        placements = {seq: ("T", "D" if self.plans[seq].num_draft_tokens else None) for seq in self.seqs}
        end = self.now + seconds
        while self.now < end:
            for _ in range(8):
                drafted = sum(plan.num_draft_tokens for plan in self.plans.values()) / len(self.seqs)
                self.now += STEP_S * (1 + self.growth * drafted) if step_s is None else step_s
                for seq in self.seqs:
                    self.controller.judged(seq, [rounds(self.plans[seq])], self.now)
            self.plans.update(self.controller.review(placements, self.now))


def kept(share):
    return lambda plan: Round(plan.num_draft_tokens, int(plan.num_draft_tokens * share))


def test_good_drafts_are_drafted_and_bad_ones_are_not():
    good, bad = Service((None,) * 4), Service((None,) * 4)
    good.run(kept(0.9))
    bad.run(kept(0.0), 40.0)
    assert all(plan.num_draft_tokens >= 3 for plan in good.plans.values())
    assert sum(plan.num_draft_tokens > 0 for plan in bad.plans.values()) <= 1


@pytest.mark.parametrize(("num_right", "is_tried"), [(0, False), (1800, True)])
def test_drafts_that_come_too_late_to_be_verified_are_judged_by_the_drafter(num_right, is_tried):
    service, trials = Service((None,) * 64), []
    for second in range(1, 61):
        report = {"num_right_tokens": num_right * second, "num_wrong_tokens": 200.0 * second}
        service.controller.reported("D", "drafter", report | service.draft)
        service.run(lambda plan: Round(0, 0), 1.0)
        trials.append(sum(group.num_trials for group in service.controller._groups.values()))
    assert (trials[-1] > trials[20]) == is_tried
    assert service.controller.acceptance_rate == pytest.approx(num_right / (num_right + 200), abs=0.01)


def test_what_a_drafter_had_counted_before_its_first_report_is_of_long_ago():
    controller = Controller()
    controller.reported("D", "drafter", {"num_right_tokens": 1e6, "num_wrong_tokens": 0.0})
    controller.reported("D", "drafter", {"num_right_tokens": 1e6 + 980, "num_wrong_tokens": 20.0})
    assert controller.acceptance_rate == pytest.approx(0.98, abs=0.01)


def test_a_request_bounds_its_own_draft_length():
    service = Service((None, 0, 2))
    service.run(kept(0.9))
    lengths = [service.plans[seq].num_draft_tokens for seq in service.seqs]
    assert lengths[0] > 2
    assert lengths[1:] == [0, 2]


def test_where_every_token_costs_a_step_nothing_is_drafted():
    service = Service((None,) * 4, growth=1.0)
    service.run(kept(0.7))
    assert sum(plan.num_draft_tokens > 0 for plan in service.plans.values()) <= 1


@pytest.mark.parametrize(("kind", "mode"), [("in_turn", "in_turn"), ("overlap", "overlap")])
def test_the_kind_may_be_fixed(kind, mode):
    service = Service(kinds=frozenset({"off", kind}))
    service.run(kept(0.9))
    (plan,) = service.plans.values()
    assert (plan.mode, plan.num_branches) == (mode, 0)


def test_a_full_cache_leaves_no_room_for_branches():
    service = Service(kinds=frozenset({"off", "outcomes"}))
    service.run(kept(0.9))
    assert service.plans["s0"].num_branches > 0
    draft = steps((n, n, DRAFT_S) for n in (1, 9, 33))
    service.controller.reported("D", "drafter", {**draft, "num_sequences": 1.0, "kv_cache_usage_perc": 0.99})
    service.run(kept(0.9), 1.0)
    assert service.plans["s0"].num_branches == 0


def test_a_full_cache_must_get_emptier_than_what_made_it_full_before_there_are_branches_again():
    service = Service(kinds=frozenset({"off", "outcomes"}))
    draft = {**steps((n, n, DRAFT_S) for n in (1, 9, 33)), "num_sequences": 1.0}
    had_branches = []
    for usage in (0.9, 0.96, 0.9, 0.81, 0.79, 0.9):
        service.controller.reported("D", "drafter", {**draft, "kv_cache_usage_perc": usage})
        service.run(kept(0.9), 2.0)
        had_branches.append(service.plans["s0"].num_branches > 0)
    assert had_branches == [True, False, False, False, True, True]


@pytest.mark.parametrize(("num_slots", "most"), [(0, 32), (200, 32), (20, 4), (12, 2), (11, 1), (7, 0), (3, 0)])
def test_no_more_branches_than_a_recurrent_drafter_has_state_slots_for(num_slots, most):
    """A slot per sequence, and one per branch; that all of them are taken then leaves the plans as they are."""
    service, seen = Service((None,) * 4, kinds=frozenset({"off", "outcomes"})), set()
    report = {**steps((n, n, DRAFT_S) for n in (4, 36, 132)), "num_sequences": 4.0, "num_state_slots": float(num_slots)}

    def rounds(plan):
        seen.add(plan.num_branches)
        return Round(plan.num_draft_tokens, int(plan.num_draft_tokens * 0.6))

    for _ in range(10):
        held = 4 + sum(plan.num_branches for plan in service.plans.values())
        service.controller.reported("D", "drafter", {**report, "state_slots_in_use": float(min(held, num_slots))})
        service.run(rounds, 2.0)
    assert max(seen) <= most
    assert (max(seen) > 0) == (most > 0)


@pytest.mark.parametrize(("num_sequences", "most"), [(4, 32), (40, 4)])
def test_no_more_branches_than_a_sequences_share(num_sequences, most):
    service = Service((None,) * num_sequences, kinds=frozenset({"off", "outcomes"}))
    seen = set()

    def rounds(plan):
        seen.add(plan.num_branches)
        return Round(plan.num_draft_tokens, int(plan.num_draft_tokens * 0.6))

    service.run(rounds, 20.0)
    assert 0 < max(seen) <= most


def test_off_is_probed_now_and_then_and_left_when_drafts_get_good():
    service = Service((None,) * 4)
    service.run(kept(0.0), 20.0)
    drafting = []

    def rounds(plan):
        drafting.append(plan.num_draft_tokens > 0)
        return Round(plan.num_draft_tokens, 0)

    service.run(rounds, 60.0)
    assert 0 < sum(drafting) < 0.05 * len(drafting)
    service.run(kept(1.0), 90.0)
    assert all(plan.num_draft_tokens >= 3 for plan in service.plans.values())


def test_a_probe_beside_it_is_not_counted_as_target_alone():
    service = Service((None,) * 4, kinds=frozenset({"off", "overlap"}))
    service.run(kept(0.0), 20.0)
    group = service.controller._groups["T"]
    assert group.arm == OFF
    step_s = []
    for _ in range(400):
        is_probing = any(plan.num_draft_tokens for plan in service.plans.values())
        step_s.append(3 * STEP_S if is_probing else STEP_S)
        service.run(kept(0.0), 0.01, step_s[-1])
    assert max(step_s) > STEP_S
    measured = group.experience.entries[OFF, 2]
    assert measured.seconds / measured.num_rounds == pytest.approx(STEP_S, rel=0.02)


def test_a_worse_sequence_drafts_less_where_tokens_cost():
    service = Service((None,) * 4, growth=0.08, kinds=frozenset({"off", "overlap"}))

    def rounds(plan):
        service.turn = (getattr(service, "turn", -1) + 1) % 4
        share = 0.0 if service.turn == 0 else 1.0
        return Round(plan.num_draft_tokens, int(plan.num_draft_tokens * share))

    service.run(rounds, 20.0)
    lengths = [service.plans[seq].num_draft_tokens for seq in service.seqs]
    assert lengths[0] < min(lengths[1:])


def test_a_sequence_that_is_off_alone_is_tried_again_less_and_less_often_and_stays_where_it_has_become_better():
    service = Service((None,) * 4, growth=0.35, kinds=frozenset({"off", "overlap"}))
    shares = dict.fromkeys(service.seqs, 1.0) | {"s0": 0.0}

    def lengths(seconds):
        """Of s0, four times a second."""
        found = []
        for _ in range(int(4 * seconds)):
            service.run(rounds, 0.25)
            found.append(service.plans["s0"].num_draft_tokens)
        return found

    turn = -1

    def rounds(plan):
        nonlocal turn
        turn = (turn + 1) % 4
        return Round(plan.num_draft_tokens, int(plan.num_draft_tokens * shares[f"s{turn}"]))

    early, late = lengths(60.0), lengths(60.0)
    assert 0 in early
    was_tried = [a == 0 < b for a, b in pairwise(late)]
    assert 1 <= sum(was_tried) <= 3
    assert sum(a == 0 < b for a, b in pairwise(early)) >= sum(was_tried)
    assert sum(length == 0 for length in late) > len(late) / 2
    shares["s0"] = 1.0
    better = lengths(90.0)
    assert better[-1] == service.plans["s1"].num_draft_tokens > 0


@pytest.mark.parametrize(("kinds", "kind"), [({"off", "in_turn"}, "in_turn"), ({"off"}, "off")])
def test_what_needs_no_measurement_is_within_bounds_too(kinds, kind):
    service = Service((None,) * 2, kinds=frozenset(kinds))
    plan = service.plans["s0"]
    assert (plan.mode if plan.num_draft_tokens else "off") == kind
    service.run(kept(0.0), 30.0)
    modes = set()
    for _ in range(200):
        service.run(kept(0.0), 0.25)
        modes |= {plan.mode for plan in service.plans.values() if plan.num_draft_tokens}
    assert modes <= {kind}


def test_the_first_plan_is_no_longer_than_may_be():
    controller = Controller(Bounds(num_draft_tokens=2))
    assert controller.opened("s", spec()).num_draft_tokens == 2


def test_echoes_and_reports_become_estimates():
    service = Service()
    for _ in range(3):
        service.controller.echoed("T", 0.002)
        service.controller.echoed("D", 0.001)
    service.controller.echoed("nobody", 1.0)
    service.run(kept(0.9), 1.0)
    figures = service.controller.figures()
    assert figures["T"]["estimated_target_step_seconds"] == pytest.approx(STEP_S, rel=0.01)
    # 2 ms and 1 ms, of which half at most is taken for waiting on a running step.
    assert figures["T"]["estimated_round_trip_seconds"] == pytest.approx(0.0015, abs=1e-6)
    assert figures[""]["estimated_acceptance_rate"] > 0.7
    assert sum(value for name, value in figures[""].items() if name.startswith("planned_sequences/")) == 1


def test_the_longest_wait_that_is_planned_is_the_mean_over_those_that_draft():
    overlapping = Service((None, None), kinds=frozenset({"off", "overlap"}))
    assert overlapping.controller.figures()[""]["planned_draft_wait_seconds"] == 0
    service = Service((None, None, 0), kinds=frozenset({"off", "in_turn"}))
    service.run(kept(0.9), 1.0)
    assert [plan.draft_wait_s for plan in service.plans.values()] == [1.0, 1.0, 0.0]
    assert service.controller.figures()[""]["planned_draft_wait_seconds"] == 1.0


def test_a_drafter_with_branches_answers_after_a_longer_step():
    service = Service((None,) * 4)
    draft = steps([(4, 4, DRAFT_S), (36, 36, 4 * DRAFT_S)])
    service.controller.reported("D", "drafter", {**draft, "num_sequences": 4.0})
    for wait_s in (0.0, 0.3 * DRAFT_S, DRAFT_S):
        service.controller.echoed("T", 0.002)
        service.controller.echoed("D", 4 * DRAFT_S + 0.001 + wait_s)
    service.run(kept(0.9), 1.0)
    assert service.controller.figures()["T"]["estimated_round_trip_seconds"] < 0.003


def test_a_target_that_answers_after_little_more_than_a_step_is_not_taken_to_be_next_door():
    """It answers as its next step begins: who came as a step began waited for nearly all of it."""
    service = Service()
    for seconds in (0.010, STEP_S + 0.001, 0.020):
        service.controller.echoed("T", seconds)
        service.controller.echoed("D", 0.001)
    service.run(kept(0.9), 1.0)
    assert service.controller.figures()["T"]["estimated_round_trip_seconds"] >= 0.005


def test_what_may_be_lost_is_saved_up_but_not_for_what_costs_more_than_can_be_saved():
    group = Group(Settings(), 0.0)
    group.conditions, scored = conditions(0.1), {Arm("overlap", 2): 1.0, Arm("outcomes", 3, 4): 0.95, OFF: 0.2}
    best, affordable, hopeless = scored
    lucky = {best: 1.0, affordable: 1.2, hopeless: 1.5}
    trial = group._trial_steps(affordable) * group._price(affordable, scored)
    group._allowance = Allowance(credit=trial, most=3.0)
    assert group._trial_steps(hopeless) * group._price(hopeless, scored) > 3.0
    assert group._trial(best, scored, lucky) == affordable
    group._allowance = Allowance(credit=0.9 * trial, most=3.0)
    assert group._trial(best, scored, lucky | {Arm("overlap", 1): 1.1}) is None
    group._allowance = Allowance(credit=30.0, most=30.0)
    assert group._trial(best, scored, lucky) == hopeless


def test_a_trial_of_branches_ends_when_there_is_no_more_room_for_any():
    group, now = Group(Settings(), 0.0), conditions(0.1)
    group.arm, group._on_trial = Arm("outcomes", 4, 8), True
    group.review(now, [0.7], Bounds(num_branches=0), 1.0)
    assert group.arm.num_branches == 0
    assert not group._on_trial


def test_an_arm_that_was_not_tried_and_takes_long_must_promise_more():
    group = Group(Settings(), 0.0, num_rows=4)
    group.conditions, group._allowance = conditions(0.1, rows=4, growth=1.0), Allowance(most=3.0)
    scored = {group.arm: 1.0, OFF: 1.02, Arm("outcomes", 8, 4): 1.02}
    promised = group._promised(scored)
    assert promised[OFF] == 1.02
    assert promised[Arm("outcomes", 8, 4)] < 1.0
    entry = Entry(Arm("outcomes", 8, 4), 4, 4, 0.8, 80.0, 80.0, 80.0, 80.0, 0.0)
    group.experience = group.experience.add(entry)
    assert group._promised(scored) == scored


def test_nothing_is_tried_with_a_drafter_that_is_always_wrong_though_rounds_take_longer_than_steps():
    service = Service((None,) * 4)
    service.run(kept(0.0), 5.0, 1.1 * STEP_S)
    (group,) = service.controller._groups.values()
    before = group.num_trials
    service.run(kept(0.0), 60.0, 1.1 * STEP_S)
    assert group.arm.kind == "off"
    assert group.num_trials == before


def test_who_goes_on_in_a_well_measured_way_is_not_chosen_for_in_every_review():
    group, now, seen = Group(Settings()), conditions(0.1), []
    group._scores = lambda *_: seen.append(group.load.now_s) or ({group.arm: 1.0}, {group.arm: 1.0})

    def goes_on(num_reviews, bounds):
        seen.clear()
        for _ in range(num_reviews):
            at_s = group.load.now_s + 0.25
            group.heard(group.arm, [Round(4, 2)] * 8, 0.25, at_s, is_settled=True)
            group.review(now, [0.7], bounds, at_s)
        return len(seen)

    goes_on(4, Bounds())
    assert group._num_steps >= group.settings.trial_steps
    assert goes_on(40, Bounds()) == 10
    assert goes_on(1, Bounds(num_branches=4)) == 1
    group._on_trial = True
    assert goes_on(1, Bounds(num_branches=4)) == 1


def test_what_is_lost_or_closed_is_forgotten():
    service = Service()
    service.run(kept(0.9), 1.0)
    service.controller.closed("s0")
    service.controller.closed("s0")
    service.controller.decided("s0", Notes("p", (0,)), 99.0)
    assert service.controller.review({"s0": ("T", "D")}, 99.0) == {}
    service.controller.lost("T")
    assert set(service.controller.figures()) == {""}
    assert not step_times({})
