"""Probes while nothing is drafted, between pauses too."""

from __future__ import annotations

from itertools import pairwise

import pytest

from specdec.control.limits import OFF
from specdec.control.probes import Probes
from specdec.control.settings import Settings
from tests.specdec.control.requests import REVIEW_S, Requests
from tests.specdec.control.test_controller import kept
from tests.specdec.control.test_limits import conditions


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
