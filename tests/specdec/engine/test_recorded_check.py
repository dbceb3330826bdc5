"""Recorded steps, chains and decisions that are wrong are found as a model loads, and operators run in their place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec.demo
import specdec.engine.build as build_module
import specdec.engine.recorded_check as check_module
from specdec.core.errors import RecordedStepsError
from specdec.engine.build import BackendOptions, build_target
from specdec.engine.drafter import ModelDrafter
from specdec.engine.recorded_check import check_decisions, check_recorded_chains, check_recorded_steps
from specdec.executor.chains import ChainGraphs, ChainKey
from specdec.executor.graphs import ExecutorLimits, PassOutput, StepGraphs
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, prepare_model
from specdec.sampling.chains import ChainSampler
from specdec.sampling.pipeline import Sampler
from tests.specdec.kernels.in_torch import TorchSampler, decide_in_torch
from tests.specdec.models.families import VOCAB_SIZE, make_model

CPU = torch.device("cpu")
DEMO = ModelSource(str(Path(specdec.demo.__path__[0]) / "draft"), device="cpu")
LIMITS = ExecutorLimits(8, 64, 60, 7)
CHAINS = replace(LIMITS, max_draft_tokens=1, num_chained_passes=6, num_extra_words=1 << 12)


def make_runner(limits: ExecutorLimits, family: str = "llama") -> ModelRunner:
    runner = ModelRunner(prepare_model(make_model(family), "tiny"), num_blocks=200, block_size=4)
    runner.record_graphs(limits)
    assert not runner.graphs_failure
    return runner


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_that_are_right_pass(family: str) -> None:
    runner = make_runner(LIMITS, family)
    assert check_recorded_steps(runner) > 0
    assert runner.is_recorded
    assert runner.pool.num_in_use == 0


@pytest.mark.parametrize("wrong_size", LIMITS.graph_sizes[:1] + LIMITS.graph_sizes[2:])
def test_a_step_of_any_checked_size_that_is_wrong_is_found(wrong_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is whose graph holds a number of the step that it was recorded with."""
    launch = StepGraphs.launch

    def frozen(self: StepGraphs, size: int) -> PassOutput:
        output = launch(self, size)
        return replace(output, logits=output.logits.roll(1, 0)) if size == wrong_size else output

    assert LIMITS.graph_sizes == (16, 32, 48, 64)
    monkeypatch.setattr(StepGraphs, "launch", frozen)
    with pytest.raises(RecordedStepsError, match=r"a recorded step of tiny of .* tokens gives logits that differ"):
        check_recorded_steps(make_runner(LIMITS))


def test_logits_that_are_no_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = StepGraphs.launch

    def spoilt(self: StepGraphs, size: int) -> PassOutput:
        output = launch(self, size)
        return replace(output, logits=output.logits * float("nan"))

    monkeypatch.setattr(StepGraphs, "launch", spoilt)
    with pytest.raises(RecordedStepsError, match="nan of their spread"):
        check_recorded_steps(make_runner(LIMITS))


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> tuple[ModelDrafter, ModelRunner]:
    decide_in_torch(monkeypatch)
    runner = make_runner(CHAINS)
    sampler = Sampler(VOCAB_SIZE, on_kernels=True)
    lengths = {"max_model_len": 60, "max_num_batched_tokens": 64, "max_num_seqs": 8, "num_chained_passes": 6}
    return ModelDrafter(runner, sampler, **lengths), runner  # type: ignore[arg-type]


def test_chains_that_are_right_pass(drafter: tuple[ModelDrafter, ModelRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch = list[ChainKey](), ChainGraphs.launch

    def note(self: ChainGraphs, key: ChainKey) -> None:
        launched.append(key)
        launch(self, key)

    monkeypatch.setattr(ChainGraphs, "launch", note)
    check_recorded_chains(*drafter, max_rows=8, spread=1.0)
    assert {key.goes_on for key in launched} == {False, True}
    assert drafter[1].pool.num_in_use == 0


@pytest.mark.parametrize("fault", ["noise", "token", "tokens read"])
def test_chains_that_are_wrong_are_found(
    fault: str, drafter: tuple[ModelDrafter, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, go_on = ChainSampler.choose, ChainGraphs._go_on

    def wrong(self: ChainSampler, logits: torch.Tensor, number: torch.Tensor) -> Any:
        found = choose(self, logits, number * 0 if fault == "noise" else number)
        return found._replace(tokens=(found.tokens + 1) % 50) if fault == "token" else found

    def reads_another(self: ChainGraphs, num_rows: int, num_passes: int) -> None:
        if fault == "tokens read":
            self._record_of.tensors["tokens"].add_(1).remainder_(50)
        go_on(self, num_rows, num_passes)

    monkeypatch.setattr(ChainSampler, "choose", wrong)
    monkeypatch.setattr(ChainGraphs, "_go_on", reads_another)
    with pytest.raises(RecordedStepsError, match="a recorded chain of tiny drafts"):
        check_recorded_chains(*drafter, max_rows=8, spread=1.0)


def test_decisions_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    decide_in_torch(monkeypatch)
    # The kernels' stand-in edits nothing.
    monkeypatch.setattr(check_module, "_PARAMS", check_module._PARAMS[:-1])
    sampler = Sampler(VOCAB_SIZE, on_kernels=True)
    check_decisions(sampler, CPU)
    decide = TorchSampler.decide

    def with_other_noise(self: TorchSampler, logits: torch.Tensor, step: Any, **options: Any) -> None:
        decide(self, logits, replace(step, position=step.position + 1), **options)

    monkeypatch.setattr(TorchSampler, "decide", with_other_noise)
    with pytest.raises(RecordedStepsError, match=r"kernels decide .*temperature=.* of the same logits"):
        check_decisions(sampler, CPU)


@pytest.mark.parametrize("executor", ["auto", "graphs"])
@pytest.mark.parametrize("fault", ["check", "recording"])
def test_where_recorded_steps_are_wrong_operators_run_with_a_memory_plan_of_their_own(
    fault: str, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, planned = build_module._executor_limits, []

    def as_on_a_gpu(loaded: Any, length: int, options: BackendOptions, *more: int) -> ExecutorLimits | None:
        recorded = replace(options, executor="graphs" if options.executor == "auto" else options.executor)
        planned.append(limits(loaded, length, recorded, *more))
        return planned[-1]

    monkeypatch.setattr(build_module, "_executor_limits", as_on_a_gpu)
    if fault == "check":
        monkeypatch.setattr(
            StepGraphs, "launch", lambda self, size: replace(self._run(size), logits=torch.randn(64, 1))
        )
    else:
        monkeypatch.setattr(StepGraphs, "record", lambda *_: "no compiler here")
    options = BackendOptions(
        max_model_len=128, max_num_seqs=4, skip_parity_check=True, measures_step=False, executor=executor
    )
    said = "differ by" if fault == "check" else "no compiler here"
    if executor == "graphs":
        with pytest.raises(RecordedStepsError, match=said):
            build_target(DEMO, options)
        assert [plan is not None for plan in planned] == [True]
        return
    backend, built = build_target(DEMO, options)
    assert [plan is not None for plan in planned] == [True, False]
    assert not built.runner.is_recorded
    assert any("runs without CUDA graphs: " in note and said in note for note in built.notes)
    assert backend.metrics()["executor_recorded"] == 0
