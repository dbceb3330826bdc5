"""Step times by batch and draft length."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from benchmarks import step_cpu
from benchmarks.step_times import StepTime, measure_steps, step_table, verify_cost
from benchmarks.steps import main
from tests.benchmarks.modes.virtual import virtual_pair


def test_step_times_are_those_of_the_devices() -> None:
    engine = virtual_pair("acceptance=0.5,target=10+1/row+0.5/token,draft=2+0.25/row")
    times = measure_steps(
        engine.target,
        engine.drafter,
        batches=[1, 8],
        draft_lengths=range(3),
        context=20,
        repeats=3,
        clock=engine.clock,
    )
    assert {(t.device, t.num_rows, t.num_draft_tokens): round(1e3 * t.median_s, 6) for t in times} == {
        ("target", 1, 0): 11.5,
        ("target", 1, 1): 12.0,
        ("target", 1, 2): 12.5,
        ("draft", 1, 0): 2.25,
        ("target", 8, 0): 22.0,
        ("target", 8, 1): 26.0,
        ("target", 8, 2): 30.0,
        ("draft", 8, 0): 4.0,
    }
    assert verify_cost(times, 8, 2) == pytest.approx(30 / 22)
    assert verify_cost(times, 8, 5) is None


def test_step_times_come_with_the_cost_of_verifying() -> None:
    steps = (
        StepTime("target", 1, 0, 0.03, 0.04),
        StepTime("target", 1, 4, 0.036, 0.04),
        StepTime("draft", 1, 0, 0.003, 0.003),
    )
    text = step_table(steps)
    assert "| target | 1 | 4 | 36.00 | 40.00 | 1.20 |" in text
    assert "| draft | 1 | - | 3.00 | 3.00 | - |" in text


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    script = ["--backend", "benchmarks.backends:stand_in:target=1,draft=0.1,acceptance=0.8"]
    main(["--streams", "2", "--draft-length", "1", "--repeats", "1", *script])
    assert capsys.readouterr().out.count("| 2 |") == 3


def test_the_host_s_time_of_a_step_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "no_device", "specdec.kernels.triton.sample":  # these it puts there
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert step_cpu.main(["--rows", "2", "--context", "40", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == [*step_cpu.SCENES]
    assert all(float(line.split("|")[2]) > 0 for line in lines)
