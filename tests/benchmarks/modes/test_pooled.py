"""Ratios over all rounds, and how sure they are."""

from __future__ import annotations

from typing import get_args

import pytest

from benchmarks.modes.__main__ import OWN_KEYS, _service_keys
from benchmarks.modes.compare import ALONE, Comparison, ServiceMode, Variant, Work, compare
from benchmarks.modes.load import Workload
from benchmarks.modes.measures import Run, Stream, TokenArrival
from benchmarks.modes.report import pooled_table
from benchmarks.modes.summary import summarize
from cluster.config.app import ServiceConfig
from cluster.config.files import config_keys

WORK = Work("code", 1, 10, 0.0)
VARIANTS = (Variant(ALONE, 0), Variant("in turn, 4 draft tokens", 4, "sequential"), Variant("auto", None, "auto"))


def run(duration_s: float) -> Run:
    return Run((Stream("a" * 10, tuple(TokenArrival(duration_s * i / 10, 1) for i in range(1, 11))),), duration_s)


def comparison(*durations_s: list[float]) -> Comparison:
    return Comparison(WORK, VARIANTS, tuple(tuple(map(run, each)) for each in durations_s))


def test_tokens_of_all_rounds_over_the_time_of_all() -> None:
    compared = comparison([2.0, 2.0], [1.0, 3.0], [1.0, 1.0])
    assert compared.pooled(1, 0).ratio == pytest.approx(1.0)
    assert compared.pooled(2, 0) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_holds_the_spread_of_the_rounds() -> None:
    even, uneven = [1.0] * 12, [0.8, 1.2] * 6
    ratio, low, high = comparison(even, even, uneven).pooled(2, 0)
    # Twelve draws of 1 +- 0.2: a standard error of 0.2 / sqrt(12), twice to either side.
    assert ratio == pytest.approx(1.0)
    assert (low, high) == pytest.approx((1 / 1.113, 1 / 0.887), abs=0.02)


def test_auto_is_held_against_the_best_fixed_mode() -> None:
    rows = summarize(comparison([2.0] * 3, [1.0] * 3, [1.25] * 3))
    assert [row.over_best_fixed for row in rows[:2]] == [None, None]
    assert rows[2].over_best_fixed == pytest.approx((0.8, 0.8, 0.8))
    *_, last = pooled_table(rows)
    assert last == "| code | 0 | 1 | auto | 1.600 (1.600 to 1.600) | 0.800 (0.800 to 0.800) |"
    assert pooled_table(rows[:2]) == []


def test_rounds_to_warm_up_are_run_and_do_not_count() -> None:
    asked, lines = [], []

    def runner(variant: Variant, workload: Workload) -> Run:
        asked.append((variant.name, workload.first_seed))
        return run(1.0 + len(asked))

    compared = compare(runner, VARIANTS[:2], WORK, rounds=2, warmup_rounds=2, report=lines.append)
    names = [variant.name for variant in VARIANTS[:2]]
    assert asked == [(name, number) for number in range(4) for name in names]
    assert [[one.duration_s for one in runs] for runs in compared.runs] == [[6.0, 8.0], [7.0, 9.0]]
    assert [line.split(": ")[1] for line in lines] == ["warm-up, not counted"] * 2 + ["round 1 of 2", "round 2 of 2"]


@pytest.mark.parametrize("mode", get_args(ServiceMode))
def test_services_of_a_mode_have_keys_that_the_configuration_knows(mode: str) -> None:
    assert ServiceConfig.model_validate(_service_keys(mode)).speculation_mode == mode
    assert {path for path, _ in config_keys()} >= OWN_KEYS
