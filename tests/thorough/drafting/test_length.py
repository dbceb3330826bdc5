"""The controller between the real machines, in virtual time."""

from __future__ import annotations

import statistics

import pytest

from specdec.drafting.plans import SEQUENTIAL_WAIT_S, Planner, fixed_plan, no_drafts
from tests.specdec.drafting.machines import Pair, Service

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


PAIRS = (
    {"cost": 0.1, "free_tokens": 512},
    {"cost": 0.3, "free_tokens": 512},
    {"cost": 0.1, "free_tokens": 64},
    {"cost": 0.2, "free_tokens": 64, "step_s": 0.008},
)
GRID = [(n, i, alpha) for n in (1, 4, 8, 16) for i in range(len(PAIRS)) for alpha in (0.5, 0.8)]
FAST = [(1, 3, 0.5), (4, 1, 0.8)]
LEAST, MEDIAN = 0.93, 0.97
"""Of the pace of the best fixed plan: in each cell, and in the median one."""


def over_best(num_sequences: int, pair: Pair) -> tuple[float, dict[tuple[str, int], float]]:
    """Return the controller's pace over the best fixed plan's, and the paces of all, on the same part of the texts."""
    rounds = (60, 100)
    auto = rate(Service(pair), num_sequences, *rounds)
    plans = [(mode, length) for mode in ("sequential", "overlap", "outcomes") for length in (1, 2, 4, 8)]
    rates = {plan: rate(Service(pair, fixed(*plan)), num_sequences, *rounds) for plan in plans}
    rates["off", 0] = rate(Service(pair, no_drafts), num_sequences, *rounds)
    return auto / max(rates.values()), rates


@pytest.mark.parametrize("cell", FAST)
def test_auto_comes_near_the_best_fixed_plan(cell: tuple[int, int, float]) -> None:
    num_sequences, i, alpha = cell
    share, rates = over_best(num_sequences, Pair(alpha, **PAIRS[i]))
    assert share >= LEAST, rates


@pytest.mark.whole
@pytest.mark.timeout(1800)
def test_auto_comes_near_the_best_fixed_plan_in_every_cell() -> None:
    shares = {(n, i, alpha): over_best(n, Pair(alpha, **PAIRS[i]))[0] for n, i, alpha in GRID}
    assert min(shares.values()) >= LEAST, shares
    assert statistics.median(shares.values()) >= MEDIAN, shares


STRETCH_TOKENS, MOST_OVER_BEST = 400, 1.1


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_steady_load_stays_near_the_best_fixed_plan(alpha: float) -> None:
    """Ten minutes of two streams that never pause; each stretch against the same stretch of the best plan's."""
    pair = Pair(alpha, 0.1, free_tokens=64)
    _, rates = over_best(2, pair)
    best = max(rates, key=rates.__getitem__)
    planner = fixed(*best) if best[1] else no_drafts
    seconds = []
    for service in (Service(pair), Service(pair, planner)):
        service.begin(2)
        service.run_rounds(2 * 60)
        began_s, stretches = service.now_s, []
        while service.now_s < began_s + 600:
            num_tokens, start_s = service.target.counters.num_committed_tokens, service.now_s
            while service.target.counters.num_committed_tokens < num_tokens + 2 * STRETCH_TOKENS:
                service.run_rounds(2)
            stretches.append(service.now_s - start_s)
        seconds.append(stretches)
    ratios = [auto_s / best_s for auto_s, best_s in zip(*seconds, strict=False)]
    assert max(ratios) <= MOST_OVER_BEST, ratios


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_a_draft_that_is_always_wrong_is_off_after_fifty_rounds(num_sequences: int) -> None:
    service = Service(Pair(0.0, 0.1, hit=0.0))
    service.begin(num_sequences)
    service.run_rounds(50 * num_sequences)
    num_offers = service.target.counters.num_offers
    num_drafts, _, _ = service.run_rounds(2000 * num_sequences)
    assert num_drafts <= 0.02 * 2000 * num_sequences
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
    assert service.controller._acceptance.rate(1.0) > 0.7


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
