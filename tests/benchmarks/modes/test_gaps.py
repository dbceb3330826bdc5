"""Time between a target's steps, as its worker reports it; and what rounds have of their own."""

from __future__ import annotations

from benchmarks.modes.compare import Comparison, Variant, Work
from benchmarks.modes.measures import Run, Stream, TokenArrival
from benchmarks.modes.summary import summarize
from benchmarks.scripted import Script, ScriptedTarget
from specdec.core.backends import VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.observed import ObservedTarget
from specdec.engine.timing import StepMetrics
from tests.clock import VirtualClock

SPEC = SequenceSpec(SamplingParams(), 0, 1, 100)
VARIANTS = (Variant("in turn", 4, "sequential"), Variant("outcomes", 4, "outcomes"))


def job(key: str) -> VerifyJob:
    return VerifyJob(key, TokenLog((1,)), (), SPEC)


def test_gaps_are_between_steps_that_go_on() -> None:
    clock = VirtualClock()
    report = StepMetrics()
    backend = ScriptedTarget(Script(0.5, 0.5, tuple(range(20))), 100)
    target = ObservedTarget(backend, [report], lambda: round(1e9 * clock.now_s()))
    for keys, pause_s in (("a", 5.0), ("ab", 0.25), ("b", 0.5), ("c", 9.0)):
        clock.sleep(pause_s)
        target.verify([job(key) for key in keys])
    assert {name: report.metrics()[name] for name in ("gap_s", "num_gaps")} == {"gap_s": 0.75, "num_gaps": 2}


def test_every_round_has_texts_of_its_own() -> None:
    work = Work("code", 8, 10, 1.0)
    assert [work.workload(VARIANTS[0], number).first_seed for number in range(3)] == [0, 8, 16]
    runs = [tuple(Run((Stream(text, (TokenArrival(0.1, 1),)),), 1.0) for text in texts) for texts in ("ab", "ab", "ac")]
    compared = Comparison(work, (VARIANTS[0],) * 3, (runs[0], runs[2], runs[1]))
    assert [compared.has_equal_texts(variant) for variant in range(3)] == [True, False, True]
    assert [row.has_equal_texts for row in summarize(compared)] == [True, False, True]
