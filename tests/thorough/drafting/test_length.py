"""The controller between the real machines, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.core.messages import DRAFTER, Notes
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.length.controller import Controller, Group
from specdec.drafting.length.plans import SEQUENTIAL_WAIT_S, Planner, fixed_plan
from tests.letters import provenance
from tests.specdec.drafting.length.machines import Pair, Service

BRANCHES = 16


def rate(service: Service, num_sequences: int, warm_up: int, num_rounds: int) -> float:
    """Tokens per second of all sequences."""
    service.begin(num_sequences)
    service.run_rounds(warm_up * num_sequences)
    _, num_tokens, seconds = service.run_rounds(num_rounds * num_sequences)
    return num_tokens / seconds


def fixed(mode: str, length: int) -> Planner:
    if mode == "sequential":
        return fixed_plan(length, "sequential", SEQUENTIAL_WAIT_S)
    return fixed_plan(length, "overlap", num_branches=BRANCHES if mode == "outcomes" else 0)


GRID = [(n, alpha, cost) for n in (1, 8, 64) for alpha in (0.3, 0.6, 0.8, 0.9) for cost in (0.05, 0.1, 0.3)]
FAST = [(1, 0.3, 0.1), (1, 0.9, 0.3)]


@pytest.mark.parametrize(
    ("num_sequences", "alpha", "cost"),
    [pytest.param(*point, marks=() if point in FAST else pytest.mark.whole) for point in GRID],
)
def test_auto_comes_near_the_best_fixed_way(num_sequences: int, alpha: float, cost: float) -> None:
    """Steps beyond 64 tokens take longer, so that there is something to choose."""
    pair, rounds = Pair(alpha, cost, free_tokens=64), (80, 100)  # the same part of the same text for all
    auto = rate(Service(pair), num_sequences, *rounds)
    plans = [(mode, length) for mode in ("sequential", "overlap", "outcomes") for length in (2, 4, 7)]
    rates = {plan: rate(Service(pair, fixed(*plan)), num_sequences, *rounds) for plan in plans}
    rates["off", 0] = num_sequences / pair.target_s(num_sequences)
    assert auto > 0.9 * max(rates.values()), rates


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_a_draft_that_is_always_wrong_is_off_after_fifty_rounds(num_sequences: int) -> None:
    service = Service(Pair(0.0, 0.1, hit=0.0))
    service.begin(num_sequences)
    service.run_rounds(50 * num_sequences)
    num_offers = service.target.counters.num_offers
    num_drafts, _, _ = service.run_rounds(1000 * num_sequences)
    assert num_drafts <= 0.02 * 1000 * num_sequences
    assert service.target.counters.num_offers > num_offers, "now and then it is tried"


@pytest.mark.parametrize("pair", [Pair(0.0, 0.2, hit=0.0), Pair(0.9, 5.0)], ids=["lies", "late"])
def test_a_sequence_that_probes_beside_others_misses_no_step(pair: Pair) -> None:
    service, num_tokens = Service(pair), 96
    service.burst(16, num_tokens)
    counters, num_probes = service.target.counters, 0
    for _ in range(5):
        num_steps, num_offers = counters.num_steps, counters.num_offers
        service.burst(16, num_tokens)
        assert counters.num_steps - num_steps == num_tokens
        num_probes += counters.num_offers > num_offers
    assert num_probes > 1


def test_a_probe_beside_others_learns_how_often_a_draft_is_right() -> None:
    """The target has no time for drafts, whatever they are worth."""
    service = Service(Pair(0.9, 0.2, free_tokens=16))
    for _ in range(6):
        service.burst(16, 96)
    assert service.controller._acceptance.rate((1.0,)) > 0.7


def test_off_where_the_workers_share_what_they_run_on() -> None:
    """Formulas see a gain; what was measured does not, and decides."""
    pair = Pair(0.5, 0.4, beside=3.0)
    service = Service(pair)
    assert rate(service, 1, 400, 200) > 0.93 / pair.target_s(1)


def test_a_burst_begins_with_what_the_one_before_has_taught() -> None:
    good, bad = Service(Pair(0.8, 0.1)), Service(Pair(0.0, 0.1, hit=0.0))
    for service in (good, bad):
        for _ in range(4):
            service.burst(4, 64)
    before = [service.target.counters for service in (good, bad)]
    rounds, drafts = ([getattr(one, name) for one in before] for name in ("num_rounds", "num_drafts"))
    for service in (good, bad):
        service.burst(4, 64)
    after = [service.target.counters for service in (good, bad)]
    assert after[0].num_drafts - drafts[0] > 0.7 * (after[0].num_rounds - rounds[0])
    assert after[1].num_drafts - drafts[1] <= 0.04 * 256


def test_a_lost_drafter_is_done_without() -> None:
    service = Service(Pair(0.8, 0.1))
    service.begin(4)
    service.run_rounds(100)
    service.router.worker_lost("drafter", service.now_s)
    service.run_for(0.5)
    assert service.run_rounds(100)[0] == 0


@pytest.mark.parametrize(("pair", "num_without_drafter"), [(Pair(0.8, 0.1), 4), (Pair(0.0, 0.1, hit=0.0), 0)])
def test_a_drafter_is_missed_where_drafts_were_chosen(pair: Pair, num_without_drafter: int) -> None:
    """And not where they were tried at that load and were of no use."""
    service = Service(pair)
    service.begin(4)
    service.run_rounds(400)
    assert service.router.metrics()["num_without_drafter"] == 0
    service.router.worker_lost("drafter", service.now_s)
    service.run_for(0.5)
    assert service.router.metrics()["num_without_drafter"] == num_without_drafter


def test_a_drafter_is_missed_until_one_was_tried() -> None:
    controller = Controller()
    controller.opened("a", SequenceSpec(SamplingParams(), 1, 1, 64))
    controller.opened("b", SequenceSpec(SamplingParams(), 1, 1, 64, num_speculative_tokens=0))
    assert controller.metrics()["num_without_drafter"] == 1
    controller.review({"a": ("target", None), "b": ("target", None)}, 0.0)
    assert controller.metrics()["num_without_drafter"] == 1
    controller.reported("drafter", "drafter", {})
    assert controller.metrics()["num_without_drafter"] == 0


def test_no_pace_is_measured_while_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []
    monkeypatch.setattr(Group, "observe", lambda group, choice, num_tokens, seconds, now_s: measured.append(seconds))
    controller = Controller()
    for seq in ("a", "b"):
        controller.opened(seq, SequenceSpec(SamplingParams(), 1, 1, 64))
    controller.review({"a": ("target", None), "b": ("target", None)}, 0.0)

    def decided(seq: str, *times_s: float) -> None:
        for now_s in times_s:
            controller.decided(seq, Notes(provenance("p"), (0,)), now_s)

    decided("a", 1.0, 2.0, 3.0, 4.0)
    assert measured == [], "b has no token yet"
    decided("b", 10.0)
    decided("a", 10.0, 10.5, 11.5)
    assert measured == [0.5, 1.0]


ONE = Pair(0.7, 0.2, free_tokens=64)


def with_others(*others: tuple[float, float]) -> Service:
    return Service(replace(ONE, others=others))


def plans_of(service: Service) -> set[tuple[str, ...]]:
    """Which drafters are named by the plans of the sequences that are there."""
    return {session.plan.drafters for session in service.router._sessions}


@pytest.mark.parametrize(("mode", "gain"), [("overlap", 1.15), ("outcomes", 1.1)])
def test_two_drafters_are_right_more_often_than_one(mode: str, gain: float) -> None:
    """Independent errors, one stream, a target with time for both."""
    plan = fixed_plan(4, "overlap", num_branches=BRANCHES if mode == "outcomes" else 0)
    alone = rate(Service(ONE, plan), 1, 80, 300)
    both = rate(Service(replace(ONE, others=((0.7, 0.2),)), plan), 1, 80, 300)
    assert both > gain * alone


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_a_drafter_that_lies_or_is_late_costs_little_and_is_dropped(num_sequences: int) -> None:
    alone = rate(Service(ONE), num_sequences, 150, 200)
    lies, late = (with_others(other) for other in ((0.0, 0.2), (0.9, 5.0)))
    for service in (lies, late):
        assert rate(service, num_sequences, 150, 200) > 0.95 * alone
        assert plans_of(service) <= {(), (DRAFTER,)}
    named = [group.named for group in lies.controller._groups.values()]
    assert named == [(DRAFTER,)] or plans_of(lies) == {()}, "it rests, or nothing is drafted at all"


def test_the_second_drafter_goes_by_itself_where_the_target_has_no_time_for_it() -> None:
    one, many = with_others((0.5, 0.2)), with_others((0.5, 0.2))
    rate(one, 1, 150, 200)
    assert plans_of(one) == {()}
    rate(many, 32, 150, 100)
    assert plans_of(many) == {(DRAFTER,)}


def test_one_of_two_drafters_that_is_lost_is_done_without() -> None:
    service = with_others((0.9, 0.1))
    service.begin(1)
    service.run_rounds(50)
    service.router.worker_lost(DRAFTER, service.now_s)
    service.run_for(1.0)
    num_drafts, _, _ = service.run_rounds(100)
    assert num_drafts > 80
