"""Time between a target's steps, as its worker reports it and a row shows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.bench.compare import Comparison, Mode, Work
from cluster.bench.load import devices_between, worker_figures
from cluster.bench.measures import Arrival, DeviceUse, Run, Stream, tokens_per_round
from cluster.bench.summary import summarize
from specdec.engine.emulation import VirtualClock
from specdec.engine.observed import ObservedTarget
from specdec.engine.scripted import Script, ScriptedTarget
from specdec.engine.timing import StepReport
from specdec.protocol.backends import VerifyJob
from specdec.protocol.marks import TokenLog
from specdec.sampling.params import SamplingParams, SequenceSpec

SPEC = SequenceSpec(SamplingParams(), 0, 1, 100)
MODES = (Mode("in turn", 4, "in_turn"), Mode("outcomes", 4, "outcomes"))


def job(key: str) -> VerifyJob:
    return VerifyJob(key, TokenLog((1,)), (), SPEC)


def test_gaps_are_between_steps_that_go_on() -> None:
    clock = VirtualClock()
    report = StepReport()
    backend = ScriptedTarget(Script(0.5, 0.5, tuple(range(20))), 100)
    target = ObservedTarget(backend, [report], lambda: round(1e9 * clock.now_s()))
    for keys, pause_s in (("a", 5.0), ("ab", 0.25), ("b", 0.5), ("c", 9.0)):
        clock.sleep(pause_s)
        target.verify([job(key) for key in keys])
    assert {name: report.gauges()[name] for name in ("gap_s", "num_gaps")} == {"gap_s": 0.75, "num_gaps": 2}


def test_gaps_between_two_reports() -> None:
    page = "\n".join(f'specdec_{name}{{role="target",worker="a"}} {value}' for name, value in FIGURES.items())
    use = devices_between({"target": {"gap_s": 0.5, "num_gaps": 50.0}}, worker_figures(page), 4.0)["target"]
    assert (use.gap_s, use.num_gaps) == (pytest.approx(0.25), 150)
    without = devices_between({}, {"target": {"busy_s": 1.0, "num_steps": 5.0}}, 4.0)["target"]
    assert without.gap_s is None


FIGURES = {"busy_s": 3.0, "num_steps": 200.0, "gap_s": 0.75, "num_gaps": 200.0}


def comparison() -> Comparison:
    stream = Stream("text", (Arrival(0.1, 1), Arrival(1.1, 40)), 8, 32, 28)
    devices = {"target": DeviceUse(2.0, 0.4, 13, gap_s=0.24, num_gaps=12), "draft": DeviceUse(2.0, 0.13, 40)}
    run = Run((stream,), 2.0, devices=devices)
    return Comparison(Work("code", 1, 41, 0.0), MODES, ((run,), (run,)))


def test_outside_is_the_gap_less_what_one_stream_waits_for_in_turn() -> None:
    """Not the rest of the time, in which there was nothing to do."""
    in_turn, outcomes = summarize(comparison())
    assert outcomes.outside_s_per_round == pytest.approx(0.02)
    assert in_turn.outside_s_per_round == pytest.approx(0.02 - 0.01)


def test_drafting_in_turn_for_several_streams_is_not_told_from_waiting() -> None:
    """Over HTTP, where steps are known by counters alone; what one process notes step by step is known."""
    compared = comparison()
    (run,), _ = compared.runs
    several = replace(run, streams=run.streams * 2)
    noted = replace(several, outside_s=0.13)
    row, outcomes = summarize(replace(compared, runs=((several,), (several,))))
    assert row.outside_s_per_round is None
    assert outcomes.outside_s_per_round == pytest.approx(0.02)
    assert summarize(replace(compared, runs=((noted,), (noted,))))[0].outside_s_per_round == pytest.approx(0.01)


def test_tokens_of_a_round() -> None:
    assert summarize(comparison())[1].tokens_per_round == pytest.approx(40 / 12)
    assert tokens_per_round([Stream("", (Arrival(0.1, 1),))]) is None


def test_every_round_has_texts_of_its_own() -> None:
    work = Work("code", 8, 10, 1.0)
    assert [work.workload(MODES[0], number).first_seed for number in range(3)] == [0, 8, 16]
    runs = [tuple(Run((Stream(text, (Arrival(0.1, 1),)),), 1.0) for text in texts) for texts in ("ab", "ab", "ac")]
    compared = Comparison(work, (MODES[0],) * 3, (runs[0], runs[2], runs[1]))
    assert [compared.has_equal_texts(mode) for mode in range(3)] == [True, False, True]
    assert [row.has_equal_texts for row in summarize(compared)] == [True, False, True]
