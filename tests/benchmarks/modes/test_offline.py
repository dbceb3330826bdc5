"""The bench on scripted tokens and emulated devices in virtual time: its figures are those worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.backends import scripted
from benchmarks.emulation import EmulatedDevice, EmulatedTarget, StepCost
from benchmarks.limits import ScriptedPair
from benchmarks.modes.compare import ALONE, Variant, Work, compare, parse_variants
from benchmarks.modes.load import Workload
from benchmarks.modes.offline import Pair, load_pair
from benchmarks.modes.summary import SummaryRow, summarize
from cluster.config.app import AppArgs
from specdec.core.errors import InvalidParameterError
from specdec.drafting.modes import expected_tokens
from specdec.sampling.noise import derive_seed
from tests.benchmarks.modes.virtual import virtual_pair
from tests.clock import VirtualClock


def pair(acceptance_rate: float, costs: str = "target=30,draft=3") -> Pair:
    return virtual_pair(f"acceptance={acceptance_rate},{costs}")


def rows(pair: Pair, num_streams: int = 1, max_tokens: int = 20, lengths: tuple[int, ...] = (0, 4)) -> list[SummaryRow]:
    variants = parse_variants(["sequential"], lengths)
    work = Work("code", num_streams, max_tokens, 0.0)
    return summarize(compare(pair.run, variants, work, rounds=2, report=lambda line: None))


def test_target_alone() -> None:
    row = rows(pair(1.0))[0]
    assert row.variant == ALONE
    assert row.tokens_per_s == pytest.approx(20 / 0.6)
    assert row.first_s == pytest.approx(0.030)
    assert row.gap_mean_s == pytest.approx(0.030)
    assert row.gap_percentiles_s == pytest.approx((0.030, 0.030, 0.030))
    assert row.idle_share == {"target": pytest.approx(0)}
    assert (row.acceptance_rate, row.mean_acceptance_length) == (None, None)
    assert row.decode_tokens_per_s == pytest.approx(1 / 0.030)


def test_everything_accepted() -> None:
    """Four rounds of four draft steps and one target step, five tokens each."""
    row = rows(pair(1.0))[1]
    assert row.tokens_per_s == pytest.approx(20 / (4 * 0.042))
    assert row.ratio == pytest.approx((0.6 / 0.168,) * 3)
    assert row.first_s == pytest.approx(0.042)
    assert row.gap_mean_s == pytest.approx(3 * 0.042 / 19)
    # 16 gaps of 0 and 3 of 42 ms: the median is 0, the 95th percentile the 18.1th of 19.
    assert row.gap_percentiles_s == pytest.approx((0.0, 0.042, 0.042))
    assert row.acceptance_rate == 1
    assert row.mean_acceptance_length == 5
    assert row.step_s == pytest.approx({"target": 0.030, "draft": 0.003})
    assert row.idle_share == pytest.approx({"target": 1 - 0.120 / 0.168, "draft": 1 - 0.048 / 0.168})
    assert row.decode_tokens_per_s == pytest.approx(1 / (0.030 * (1 + 4 * 0.1) / 5))
    assert (row.num_emulated_steps, row.num_overruns) == (2 * (4 + 16), 0)
    assert row.has_equal_texts


def test_nothing_accepted() -> None:
    row = rows(pair(0.0), max_tokens=10)[1]
    # The last token takes no draft, the three before it shorter ones: 6 rounds of 42 ms, then 39, 36, 33 and 30.
    assert row.tokens_per_s == pytest.approx(10 / (6 * 0.042 + 0.138))
    assert row.acceptance_rate == 0
    assert row.mean_acceptance_length == 1


def test_acceptance_and_time_of_a_script() -> None:
    """Played out again from the script alone."""
    engine, max_tokens, length = pair(0.8), 200, 4
    row = rows(engine, max_tokens=max_tokens)[1]
    script = scripted("target", AppArgs(), 0.8)._script
    start, drafted, kept, rounds, rates = 8, 0, 0, 0, []  # tokens of the first prompt
    for number in (1, 2):  # the first round does not count
        seed, position, duration_s = derive_seed(number, 0, 0), 0, 0.0
        while position < max_tokens:
            count = min(length, max_tokens - position - 1)
            places = range(start + position, start + position + count)
            right = [script.draft_tokens(seed, at, 0)[0] == script.true_token(seed, at) for at in places]
            run = right.index(False) if False in right else count
            drafted, kept, rounds = drafted + count, kept + run, rounds + bool(count)
            duration_s += 0.030 + 0.003 * count
            position += run + 1
        rates.append(max_tokens / duration_s)
    assert row.tokens_per_s == pytest.approx(sum(rates) / 2)
    assert row.round_tokens_per_s == pytest.approx(rates)
    assert row.acceptance_rate == pytest.approx(kept / drafted)
    assert row.mean_acceptance_length == pytest.approx(1 + kept / rounds)
    assert row.mean_acceptance_length == pytest.approx(expected_tokens(0.8, length), rel=0.15)


def test_costs_by_row_and_token() -> None:
    """Two streams alone: the first step reads 8 and 19 prompt tokens, the others one token a row."""
    row = rows(pair(1.0, "target=10+1/row+0.5/token,draft=1"), num_streams=2, max_tokens=5)[0]
    first_s = 0.010 + 0.002 + 0.0005 * 27
    assert row.first_s == pytest.approx(first_s)
    assert row.tokens_per_s == pytest.approx(10 / (first_s + 4 * 0.013))
    assert row.step_s["target"] == pytest.approx(0.013)
    assert row.decode_tokens_per_s == pytest.approx(2 / 0.013)


def test_with_everything_accepted_the_limit_is_met() -> None:
    """Also where a verification costs more than a plain step."""
    row = rows(pair(1.0, "target=10+2/token,draft=1"), max_tokens=100)[1]
    limit = ScriptedPair(1.0, 0.95, StepCost(10, token_ms=2), StepCost(1)).sequential(4)
    assert limit == pytest.approx(5 / 0.024)
    assert row.decode_tokens_per_s == pytest.approx(limit)


def test_a_drafter_is_idle_while_the_target_works() -> None:
    engine = pair(1.0)
    engine.run(Variant("in turn", 2, "sequential"), Work("code", 1, 3, 0.0).workload(Variant("in turn", 2)))
    assert [(step.role, step.start_ns, step.end_ns) for step in engine.steps] == [
        ("drafter", 0, 3_000_000),
        ("drafter", 3_000_000, 6_000_000),
        ("target", 6_000_000, 36_000_000),
    ]
    assert [step.is_decode for step in engine.steps] == [False, True, False]
    assert [(step.num_rows, step.num_tokens, step.num_draft_tokens) for step in engine.steps] == [
        (1, 1, 0),
        (1, 1, 0),
        (1, 3, 2),
    ]


def test_a_second_run_reads_its_prompts_again() -> None:
    """Two runs of four streams with two prompts, each a whole cache block and more."""
    memory = {"device": "cpu", "kv_cache_memory": "64MiB"}
    pair = load_pair(AppArgs.model_validate({"target": memory, "draft": memory, "max_model_len": 128}))
    prompts = ("def fibonacci(number):\n" * 8, "for item in items:\n    print(item)\n" * 6) * 2
    for _ in range(2):
        pair.run(Variant("in turn", 2, "sequential"), Workload(prompts, 4, 0.0, 2))
    assert pair.drafter is not None
    for backend in (pair.target, pair.drafter):
        assert backend.metrics()["num_reused_tokens"] == 0
    for _ in range(2):
        pair.engine.generate_batch(prompts, max_tokens=4, cache_salt="one for all")
    assert pair.target.metrics()["num_reused_tokens"] > 0


def test_modes() -> None:
    names = [(m.name, m.num_speculative_tokens, m.mode) for m in parse_variants(["sequential", "overlap"], [0, 2])]
    assert names == [
        (ALONE, 0, None),
        ("sequential, 2 draft tokens", 2, "sequential"),
        ("overlap, 2 draft tokens", 2, "overlap"),
    ]
    assert parse_variants(["auto"], [0, 2, 4])[1:] == (Variant("auto", None, "auto"),)
    assert [variant.name for variant in parse_variants([], [3])] == ["3 draft tokens"]
    with pytest.raises(InvalidParameterError, match="'fast' is none of sequential, overlap, outcomes, auto"):
        parse_variants(["fast"], [3])


def test_an_emulated_device_without_work_takes_no_time() -> None:
    clock = VirtualClock()
    EmulatedTarget(scripted("target", AppArgs(), 1.0), EmulatedDevice(StepCost(30), clock)).verify([])
    assert clock.now_s() == 0
