"""What is not a steady load: pauses, outages of drafters, probes between them, requests' bounds, other routers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from specdec.control.choice import Bounds, arms
from specdec.control.controller import Tracked
from specdec.control.estimates import Round
from specdec.control.experience import Observed, load_octave
from specdec.control.group import Group
from specdec.control.limits import OFF, Arm, pace
from specdec.control.load import LoadTime
from specdec.control.probes import Probes
from specdec.control.settings import Settings
from specdec.protocol.messages import Plan
from tests.specdec.control.test_controller import DRAFT_S, STEP_S, Service, kept, spec, steps
from tests.specdec.control.test_limits import conditions

REVIEW_S = 0.25


class Requests(Service):
    """A service whose requests end and come again, with a drafter that may be lost."""

    def __init__(self, *args, **others):
        super().__init__(*args, **others)
        self.num_opened = 0

    @property
    def group(self):
        return self.controller._groups["T"]

    @property
    def lengths(self):
        return [self.plans[seq].num_draft_tokens for seq in self.seqs]

    def end(self):
        for seq in self.seqs:
            self.controller.closed(seq)
        self.seqs, self.plans = [], {}

    def begin(self, bounds):
        for bound in bounds:
            self.num_opened += 1
            seq = f"r{self.num_opened}"
            self.seqs.append(seq)
            self.plans[seq] = self.controller.opened(seq, spec(bound))

    def idle(self, seconds):
        """No request is there; reviews take place all the same."""
        end = self.now + seconds
        while self.now < end:
            self.now += REVIEW_S
            assert self.controller.review({}, self.now) == {}

    def draft_report(self, rows):
        sizes = ((rows * n, rows * n, DRAFT_S) for n in (1, 2, 3, 5, 9, 17, 33))
        return {**steps(sizes), "num_sequences": float(rows)}

    def run_alone(self, seconds, step_s=STEP_S):
        """No drafter can be had."""
        end = self.now + seconds
        while self.now < end:
            for _ in range(8):
                self.now += step_s
                for seq in self.seqs:
                    self.controller.judged(seq, [Round(0, 0)], self.now)
            self.plans.update(self.controller.review(dict.fromkeys(self.seqs, ("T", None)), self.now))


def on_trial():
    """A service in the middle of a trial."""
    service = Requests((None,) * 4)
    while not (service.group._on_trial if service.controller._groups else False):
        service.run(kept(0.6), 0.2)
        assert service.now < 60
    return service


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


def test_short_requests_with_pauses_between_them_are_probed_too():
    service = Requests((None,) * 4)
    service.run(kept(0.0), 20.0)
    assert service.group.arm == OFF
    probes, drafting, reviews = service.group.probes, 0, 0
    began, intervals = [], [probes.interval_s]
    for _ in range(60):
        service.end()
        service.idle(4.0)
        service.begin((None,) * 4)
        for _ in range(3):
            was_on = probes.began_s
            service.run(kept(0.0), 0.2)
            if probes.began_s not in (None, was_on):
                began.append(service.now)
            drafting, reviews = drafting + any(service.lengths), reviews + 1
            intervals.append(probes.interval_s)
    grown = sum(b > a for a, b in pairwise(intervals))
    assert began
    assert 0 < grown <= len(began)
    assert 0 < drafting < reviews / 2


@pytest.mark.parametrize(("step_s", "growth"), [(0.002, 0.02), (0.03, 0.02), (0.03, 0.0)])
def test_every_probe_runs_and_costs_no_more_than_it_may(step_s, growth):
    """Reviews are further apart than a probe of short steps is long; a pause is no probe."""
    settings = Settings()
    now = conditions(0.1, rows=4, growth=growth)
    scale = 1 / step_s  # steps of these conditions take a second
    probes, load_s, clock_s, num_on, ran, intervals = Probes(settings), 0.0, 0.0, 0, 0, []
    probes.plan(0.0, 0.0, now)
    for i in range(20000):
        clock_s += REVIEW_S * scale * (200 if i % 50 == 0 else 1)
        load_s += REVIEW_S * scale
        was_on = probes.began_s is not None
        is_on = probes.is_on(clock_s, load_s, now, 4)
        num_on += is_on
        ran += is_on and not was_on
        if was_on and not is_on:
            intervals.append(probes.interval_s)
    assert ran in (len(intervals), len(intervals) + 1)
    assert intervals[:3] == [2 * settings.probe_first_s, 4 * settings.probe_first_s, 8 * settings.probe_first_s]
    longer = now.target.at(4, 4 + settings.probe_arm.num_draft_tokens) - 1
    if growth:
        assert num_on * longer <= 1.05 * settings.probe_cost * 20000


def test_a_probe_lasts_and_is_paid_for_in_time_under_load():
    now, settings = conditions(0.1, rows=4, growth=0.1), Settings()  # steps take a second
    longer_s = now.target.at(4, 4 + settings.probe_arm.num_draft_tokens) - now.target_s(0)
    probes = Probes(settings)
    probes.plan(0.0, 0.0, now)
    begin_s = longer_s * settings.probe_rounds / settings.probe_cost
    assert not probes.is_on(begin_s + 1, begin_s - 1, now, 4)
    assert probes.is_on(begin_s + 2, begin_s, now, 4)
    assert probes.is_on(begin_s + 1000, begin_s + settings.probe_rounds - 1, now, 4)
    taken = 5 * settings.probe_rounds  # the next review comes late
    assert not probes.is_on(begin_s + 2000, begin_s + taken, now, 4)
    paid_s = begin_s + taken + longer_s * taken / settings.probe_cost
    assert not probes.is_on(1e6, paid_s - 1, now, 4)
    assert probes.is_on(1e6, paid_s + 1, now, 4)


def test_intervals_between_probes_begin_anew_once_drafting_was_worthwhile():
    service = Requests((None,) * 4)
    service.run(kept(0.0), 100.0)
    assert service.group.probes.interval_s > 8 * Settings().probe_first_s
    while service.group.arm == OFF or service.group._on_trial:
        service.run(kept(1.0), 0.2)
        assert service.now < 300
    probes = service.group.probes
    assert probes.interval_s == 0
    probes.plan(service.now, service.now, service.group.conditions)
    assert probes.interval_s == Settings().probe_first_s


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
