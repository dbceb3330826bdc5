"""Profiles of the scripted backends: which sizes of steps are told of, and that nothing is left behind."""

from __future__ import annotations

import pytest

from benchmarks.scripted import Script, ScriptedDrafter, ScriptedTarget
from specdec.core.backends import Status, Verification
from specdec.engine.timing import DRAFT_LENGTHS, NUM_ROWS, NUM_STEPS, StepMetrics, profile_drafter, profile_target

SCRIPT = Script(0.8, 0.9, tuple(range(64)))


def test_a_targets_steps_are_told_of_by_rows_and_tokens():
    steps = []
    profile_target(ScriptedTarget(SCRIPT, 128), steps.append, limit_s=1e9)
    sizes = [(step.num_rows, step.num_tokens) for step in steps if step.is_decode]
    assert sizes == [(rows, rows * (1 + k)) for rows in NUM_ROWS for k in DRAFT_LENGTHS for _ in range(NUM_STEPS)]


def test_a_drafters_steps_are_told_of_by_rows():
    steps = []
    profile_drafter(ScriptedDrafter(SCRIPT, 128), steps.append, limit_s=1e9)
    assert [step.num_rows for step in steps if step.is_decode] == [n for n in NUM_ROWS for _ in range(NUM_STEPS)]


@pytest.mark.parametrize(("max_model_len", "limit_s"), [(16, 1e9), (128, 0.0)])
def test_nothing_where_a_model_reads_little_or_no_time_is_left(max_model_len, limit_s):
    steps = []
    profile_target(ScriptedTarget(SCRIPT, max_model_len), steps.append, limit_s)
    profile_drafter(ScriptedDrafter(SCRIPT, max_model_len), steps.append, limit_s)
    assert steps == []


def test_without_room_a_size_is_left_and_all_is_released():
    released = []

    class Full(ScriptedTarget):
        def verify(self, jobs):
            return [Verification(Status.WAITING) for _ in jobs]

        def release(self, key):
            released.append(key)

    steps = []
    profile_target(Full(SCRIPT, 128), steps.append, limit_s=1e9)
    assert not any(step.is_decode for step in steps)
    assert len(released) == sum(NUM_ROWS)


def test_profiled_steps_are_no_work():
    report = StepMetrics()
    profile_target(ScriptedTarget(SCRIPT, 128), report.profiled)
    figures = report.metrics()
    assert figures["busy_s"] == 0
    assert figures["step/0/rows"] == 1
