"""Emulated devices: real tokens, emulated time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from benchmarks.emulation import (
    EmulatedDevice,
    EmulatedDrafter,
    EmulatedTarget,
    RealClock,
    StepCost,
    step_cost,
)
from benchmarks.scripted import Script, ScriptedDrafter, ScriptedTarget
from specdec.core.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from tests.clock import VirtualClock

SPEC = SequenceSpec(SamplingParams(), 5, 4, 50)
SCRIPT = Script(1.0, 0.95, tuple(range(20)))


class SlowTarget(ScriptedTarget):
    """Computes for a while, by the clock, and has no room for sequences called ``late``."""

    def __init__(self, clock: VirtualClock, compute_s: float) -> None:
        super().__init__(SCRIPT, 100)
        self._clock, self._compute_s = clock, compute_s

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        self._clock.sleep(self._compute_s)
        results = super().verify(jobs)
        waiting = Verification(Status.WAITING)
        return [waiting if job.key == "late" else result for job, result in zip(jobs, results, strict=True)]


def job(key: str, length: int, num_draft_tokens: int = 0) -> VerifyJob:
    log = TokenLog(range(length))
    draft = tuple(SCRIPT.true_token(SPEC.seed, length + i) for i in range(num_draft_tokens))
    return VerifyJob(key, log, draft, SPEC)


def test_costs_are_read() -> None:
    assert step_cost("30") == StepCost(30)
    assert step_cost("2.5+0.1/row") == StepCost(2.5, 0.1)
    assert step_cost("30+0.1/row+0.02/token") == StepCost(30, 0.1, 0.02)
    assert step_cost("30+0.02/token") == StepCost(30, 0, 0.02)
    assert StepCost(30, 2, 0.5).seconds(4, 10) == pytest.approx(0.043)


BAD_COSTS = ["", "fast", "0", "-1", "3+1"]


@pytest.mark.parametrize("text", BAD_COSTS)
def test_other_costs_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be written as 30, 30\\+1/row"):
        step_cost(text)


STEPS = [(0.0, 0.030, 0), (0.020, 0.030, 0), (0.050, 0.050, 1)]


@pytest.mark.parametrize(("compute_s", "step_s", "num_overruns"), STEPS)
def test_a_step_ends_at_its_time_or_says_that_it_did_not(compute_s: float, step_s: float, num_overruns: int) -> None:
    clock = VirtualClock()
    target = EmulatedTarget(SlowTarget(clock, compute_s), EmulatedDevice(StepCost(30), clock))
    assert target.verify([job("a", 4)])[0].status is Status.DECIDED
    assert clock.now_s() == pytest.approx(step_s)
    gauges = target.metrics()
    assert gauges["backend/num_emulated_steps"] == 1
    assert gauges["backend/num_overruns"] == num_overruns
    assert gauges["backend/overrun_s"] == pytest.approx(0.020 * num_overruns)
    assert gauges["backend/is_scripted"] == 1, "what the inner backend says is passed on"


def test_tokens_are_the_inner_backends() -> None:
    device = EmulatedDevice(StepCost(30), VirtualClock())
    jobs = [job("a", 4, 3), job("b", 7)]
    plain = ScriptedTarget(SCRIPT, 100)
    target = EmulatedTarget(plain, device)
    assert target.verify(jobs) == plain.verify(jobs)
    assert target.max_model_len == 100


def test_rows_that_wait_cost_nothing() -> None:
    clock = VirtualClock()
    target = EmulatedTarget(SlowTarget(clock, 0.0), EmulatedDevice(StepCost(10, row_ms=1), clock))
    target.verify([job("late", 4)])
    assert clock.now_s() == 0
    target.verify([job("a", 4), job("late", 4)])
    assert clock.now_s() == pytest.approx(0.011)


def test_a_target_is_charged_for_new_tokens_only() -> None:
    """A prompt once, then what was committed since and the draft; all of it again after it was released."""
    clock = VirtualClock()
    target = EmulatedTarget(ScriptedTarget(SCRIPT, 100), EmulatedDevice(StepCost(1, token_ms=1), clock))
    spent = []
    for step in (job("a", 4), job("a", 5, 3), job("a", 9, 2), job("a", 12)):
        before_s = clock.now_s()
        target.verify([step])
        spent.append(round(1e3 * (clock.now_s() - before_s)) - 1)
    assert spent == [4, 4, 3, 1]
    target.release("a")
    before_s = clock.now_s()
    target.verify([job("a", 12)])
    assert clock.now_s() - before_s == pytest.approx(0.013)


def charged(drafter: EmulatedDrafter, clock: VirtualClock, key: str, length: int, fork_of: str | None = None) -> int:
    before_s = clock.now_s()
    proposals = drafter.propose([DraftJob(key, list(range(length)), SPEC, fork_of=fork_of)])
    assert isinstance(proposals[0], Proposal)
    return round(1e3 * (clock.now_s() - before_s)) - 1


def test_a_branch_begins_with_what_its_sequence_has() -> None:
    clock = VirtualClock()
    drafter = EmulatedDrafter(ScriptedDrafter(SCRIPT, 100), EmulatedDevice(StepCost(1, token_ms=1), clock))
    assert charged(drafter, clock, "a", 6) == 6
    assert charged(drafter, clock, "a/1", 7, fork_of="a") == 1
    assert charged(drafter, clock, "other", 7) == 7
    drafter.rename("a/1", "a")
    assert charged(drafter, clock, "a", 9) == 2
    drafter.release("a")
    assert charged(drafter, clock, "a", 9) == 9


def test_the_real_clock_waits_without_a_core() -> None:
    device = EmulatedDevice(StepCost(20), RealClock())
    started_s, cpu_s = time.monotonic(), time.thread_time()
    device.finish(started_s, 1, 1)
    assert time.monotonic() - started_s >= 0.020
    assert time.thread_time() - cpu_s < 0.010
    assert device.counters.late_wake_s >= 0
