"""The controller on the real machines in virtual time, where load pauses, drafters come and go, and requests differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.control.limits import OFF
from specdec.engine.scripted import Script, ScriptedDrafter
from tests.specdec.control.machines import MAX_LEN, Service
from tests.specdec.control.pairs import Scenario

GOOD = Scenario(0, 0.8, 0.3, 0.9, is_compute_bound=False)
USELESS = replace(GOOD, alpha=0.0, hit=0.0)
PAUSE_S = 30.0


def accepted(service, num_times, num_tokens=300, bounds=(None, 2, 0)):
    """Requests come together, end, and after a pause others come; accepted draft tokens as a share of all tokens."""
    counters = service.target.counters
    before = counters.num_accepted_tokens, counters.num_committed_tokens
    for _ in range(num_times):
        for bound in bounds:
            service.request(num_tokens, bound)
        service.run_until_idle()
        service.run_for(PAUSE_S)
    return (counters.num_accepted_tokens - before[0]) / (counters.num_committed_tokens - before[1])


def useless_and_off(bounds):
    """A service whose drafts are never right, after it has found that out."""
    service = Service(USELESS)
    for _ in range(12):
        accepted(service, 1, bounds=bounds)
        group = service.controller._groups["target"]
        if group.arm == OFF and not group._on_trial:
            return service
    raise AssertionError(f"still {group.arm}")


def improve(service):
    """What drafters that come from now on say is mostly right."""
    service.script = Script(GOOD.alpha, GOOD.hit, tuple(range(64)))


def test_trials_go_on_though_requests_come_with_pauses():
    """Ten pauses are 10000 steps, of each of which a trial that it fell into would have been charged a part."""
    service, credits = Service(GOOD), []
    for _ in range(10):
        assert accepted(service, 1) > 0.2
        group = service.controller._groups["target"]
        credits.append(group._allowance.credit)
    assert group.num_trials >= 10
    assert min(credits) > -group.settings.most_credit
    assert group.load.now_s < service.now_s - 10 * (PAUSE_S - 1)


def test_while_no_drafter_is_there_nothing_waits_and_afterwards_it_speculates_as_before():
    service = Service(GOOD)
    before = accepted(service, 3)
    service.request(300)
    service.run_for(1.0)
    service.lose_drafter()
    service.run_until_idle()
    group = service.controller._groups["target"]
    arm, num_trials, entries = group.arm, group.num_trials, group.experience.entries
    began_s, began = service.now_s, service.target.counters.num_steps
    assert accepted(service, 1) == 0
    step_s = (service.now_s - began_s - PAUSE_S) / (service.target.counters.num_steps - began)
    assert step_s == pytest.approx(GOOD.target_s(1), rel=0.1)
    assert (group.arm, group.num_trials, group.experience.entries) == (arm, num_trials, entries)
    service.new_drafter("another")
    assert accepted(service, 3) > 0.8 * before


@pytest.mark.parametrize("bounds", [(None, 2, 0), (1, 1)])
def test_a_better_drafter_in_the_place_of_one_that_was_not_worth_it_is_used(bounds):
    service = useless_and_off(bounds)
    service.lose_drafter()
    accepted(service, 1, bounds=bounds)
    improve(service)
    service.new_drafter("better")
    accepted(service, 6, bounds=bounds)
    assert accepted(service, 2, bounds=bounds) > 0.2


def test_drafts_that_get_better_are_noticed_between_pauses_by_requests_shorter_than_the_intervals():
    service = useless_and_off((None, 2, 0))
    improve(service)
    service.drafter._backend = ScriptedDrafter(service.script, MAX_LEN)
    accepted(service, 2, 60)
    assert accepted(service, 2, 60) > 0.2
