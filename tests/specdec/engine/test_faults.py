"""Errors of single rows and of whole steps, in the real backends: the others' tokens stay what they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.core.errors import DeviceLostError
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.executor.graphs import ExecutorLimits, PassOutput, StepGraphs
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.sampling.pipeline import RowGroup, Sampler
from tests.letters import spelled
from tests.sizes import some
from tests.specdec.engine.pairs import MAX_MODEL_LEN, Case, Output, add_noise, backend, collect, make_model
from tests.specdec.hooks import by_row

POISON_SEED = 13
PROMPTS = ((5, 9, 77, 31), tuple(range(30, 63)), (8,), (11, 12))


def cases(temperature: float) -> list[Case]:
    params = SamplingParams(temperature=temperature)
    return [Case(prompt, 20, params, seed=POISON_SEED - 1 + i) for i, prompt in enumerate(PROMPTS)]


@by_row
def raising(spec: SequenceSpec, tokens: list[int], logits: Tensor) -> None:
    """Fails for one sequence, from its sixth token on, having spoilt its row."""
    if spec.seed == POISON_SEED and len(tokens) >= spec.output_start + 5:
        logits.fill_(float("nan"))
        raise ValueError("no such state")


def service(in_target: bool, in_draft: bool) -> InProcessService:
    return InProcessService(
        backend(ModelTarget, make_model("llama"), processors=(raising,) if in_target else ()),
        backend(ModelDrafter, add_noise(make_model("llama"), 0.06), processors=(raising,) if in_draft else ()),
        3,
    )


def assert_only_the_poison_fails(outputs: list[Output], wanted: list[Output], num_tokens: int | None = None) -> None:
    for i, (output, want) in enumerate(zip(outputs, wanted, strict=True)):
        if i == 1:
            assert output.finish == "error"
            assert output.tokens == want.tokens[: len(output.tokens)]
            assert num_tokens is None or len(output.tokens) == num_tokens
        else:
            assert (output.tokens, output.finish) == (want.tokens, want.finish)


@pytest.mark.parametrize("temperature", some([0.0, 1.0]))
@pytest.mark.parametrize("is_in_draft", [False, True])
def test_a_hook_that_raises_ends_its_own_sequence(temperature: float, is_in_draft: bool) -> None:
    wanted = collect(service(False, False), cases(temperature))
    faulty = service(True, is_in_draft)
    assert_only_the_poison_fails(collect(faulty, cases(temperature)), wanted)
    report = faulty.target.metrics()
    assert (report["num_errors"], report["num_failed_steps"]) == (1, 0)
    assert faulty.target._backend.metrics()["num_cached_sequences"] == 0


def test_a_hook_that_raises_in_the_draft_only_costs_the_drafts() -> None:
    service_ = service(False, True)
    outputs = collect(service_, cases(0.0))
    assert [output.tokens for output in outputs] == [o.tokens for o in collect(service(False, False), cases(0.0))]
    assert service_.drafter is not None
    assert service_.drafter.metrics()["num_skipped_sequences"] == 1
    num_plain = [spelled(output.notes).count("p") for output in outputs]
    assert num_plain[1] > 2 * max(num_plain[i] for i in (0, 2, 3))


@pytest.fixture
def failing_forward(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Every forward pass with the poison's prompt in it raises the last of these errors, after it has done its work."""
    errors: list[BaseException] = []
    forward = ModelRunner.forward

    def fail(self: ModelRunner, rows: Sequence[RowInput], **more: Any) -> Tensor:
        logits = forward(self, rows, **more)
        if errors and any(tuple(row.sequence.tokens[:33]) == PROMPTS[1] for row in rows):
            raise errors[-1]
        return logits

    monkeypatch.setattr(ModelRunner, "forward", fail)
    return errors


@pytest.mark.parametrize("temperature", some([0.0, 1.0]))
def test_who_runs_out_of_memory_alone_twice_is_at_fault(
    temperature: float, failing_forward: list[BaseException]
) -> None:
    wanted = collect(service(False, False), cases(temperature))
    failing_forward.append(torch.OutOfMemoryError("CUDA out of memory"))
    faulty = service(False, False)
    assert_only_the_poison_fails(collect(faulty, cases(temperature)), wanted, num_tokens=0)
    report = faulty.target.metrics()
    assert (report["num_errors"], report["num_failed_steps"], report["num_suspects"]) == (1, 0, 1)
    assert faulty.drafter is not None
    assert faulty.drafter.metrics()["num_skipped_sequences"] <= 1
    assert faulty.target._backend.metrics()["num_cached_sequences"] == 0


@pytest.mark.parametrize("worker", ["target", "drafter"])
def test_who_runs_out_of_memory_alone_once_is_tried_again(worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step fails until one has a single token; that one fails, too, and then there is memory again."""
    wanted = collect(service(False, False), cases(0.0))
    forward, sizes = ModelRunner.forward, list[int]()
    scarce = service(False, False)
    runner = getattr(scarce, worker)._backend._runner

    def fail(self: ModelRunner, rows: Sequence[RowInput], **more: Any) -> Tensor:
        if self is runner and 1 not in sizes:
            sizes.append(sum(len(row.tokens) for row in rows))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, rows, **more)

    monkeypatch.setattr(ModelRunner, "forward", fail)
    outputs = collect(scarce, cases(0.0))
    assert [output.tokens for output in outputs] == [output.tokens for output in wanted]
    assert sizes == ([16, 11, 9, 6, 4, 3, 2, 1] if worker == "target" else [11, 8, 6, 4, 3, 2, 1])
    report = getattr(scarce, worker).metrics()
    assert report["num_suspects" if worker == "target" else "num_skipped_sequences"] == (worker == "target")
    assert report["num_failed_steps"] == 0


@pytest.mark.parametrize("is_in_draft", [False, True])
def test_memory_is_given_back_once_nothing_holds_the_failed_steps_tensors(
    is_in_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting = service(False, False)
    runner = (collecting.drafter if is_in_draft else collecting.target)._backend._runner  # type: ignore[union-attr]
    forward, held, seen = ModelRunner.forward, list[weakref.ref[Tensor]](), list[bool]()

    def fail(self: ModelRunner, rows: Sequence[RowInput], **more: Any) -> Tensor:
        logits = forward(self, rows, **more)
        if self is runner and not held:
            held.append(weakref.ref(logits))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits

    monkeypatch.setattr(ModelRunner, "forward", fail)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(held[0]() is None))
    collect(collecting, cases(0.0))
    assert seen == [True]


@pytest.mark.parametrize("is_in_draft", [False, True])
def test_what_a_hook_raised_in_a_step_that_is_tried_again_is_no_other_groups(
    is_in_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are told apart by where they lie in memory, and another's may come to lie there."""
    faulty = service(not is_in_draft, is_in_draft)
    sampler = (faulty.drafter if is_in_draft else faulty.target)._backend._sampler  # type: ignore[union-attr]
    processed, masked, taken = Sampler._processed_alone, Sampler.masked, list[set[int]]()
    alive: list[RowGroup] = []

    def run_out(self: Sampler, own: Tensor, group: RowGroup) -> Tensor:
        result = processed(self, own, group)
        if self is sampler and self._failures and not alive:
            alive.append(group)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    def remember(self: Sampler, groups: Sequence[RowGroup]) -> list[RowGroup]:
        if self is sampler and alive:
            taken.append(set(self._failures))
        return masked(self, groups)

    monkeypatch.setattr(Sampler, "_processed_alone", run_out)
    monkeypatch.setattr(Sampler, "masked", remember)
    collect(faulty, cases(0.0))
    assert taken[0] == set()


def test_a_step_too_large_for_memory_is_tried_again_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 10 tokens at once do not fit: nobody is suspected, no token is lost, and later steps are small."""
    wanted = collect(service(False, False), cases(0.0))
    forward, sizes = ModelRunner.forward, list[int]()

    def fail(self: ModelRunner, rows: Sequence[RowInput], **more: Any) -> Tensor:
        sizes.append(sum(len(row.tokens) for row in rows))
        if sizes[-1] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, rows, **more)

    monkeypatch.setattr(ModelRunner, "forward", fail)
    scarce = service(False, False)
    assert [output.tokens for output in collect(scarce, cases(0.0))] == [output.tokens for output in wanted]
    report = scarce.target.metrics()
    assert (report["num_errors"], report["num_failed_steps"], report["num_suspects"]) == (0, 0, 0)
    assert 1 <= sum(size > 10 for size in sizes) < 12


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: assert"),
    ],
)
def test_a_device_that_is_lost_is_not_contained(error: BaseException, failing_forward: list[BaseException]) -> None:
    failing_forward.append(error)
    with pytest.raises(DeviceLostError):
        collect(service(False, False), cases(0.0))


def recorded(monkeypatch: pytest.MonkeyPatch, fail: Callable[[int], BaseException | None]) -> InProcessService:
    """A service of recorded steps, whose launches of a size may fail, before or after the device has run it."""
    recording = service(False, False)
    limits = ExecutorLimits(max_rows=8, max_tokens=64, max_length=MAX_MODEL_LEN + 4, max_draft_tokens=3)
    for machine in (recording.target, recording.drafter):
        runner = machine._backend._runner  # type: ignore[union-attr]
        runner.record_graphs(limits)
        assert runner.is_recorded
    launch = StepGraphs.launch

    def launched(self: StepGraphs, size: int) -> PassOutput:
        output = launch(self, size)
        if (error := fail(size)) is not None:
            raise error
        return output

    monkeypatch.setattr(StepGraphs, "launch", launched)
    return recording


@pytest.mark.parametrize(
    "text", ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"]
)
def test_a_recorded_step_too_large_for_memory_is_tried_again_in_parts(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a driver or a library says of a graph's launch is no loss of the device."""
    wanted = collect(service(False, False), cases(1.0))
    kind, sizes = torch.AcceleratorError if text.endswith("memory") else RuntimeError, list[int]()

    def fail(size: int) -> BaseException | None:
        sizes.append(size)
        return kind(text) if size > 16 or sizes.count(16) % 20 == 6 else None

    scarce = recorded(monkeypatch, fail)
    assert [output.tokens for output in collect(scarce, cases(1.0))] == [output.tokens for output in wanted]
    report = scarce.target.metrics()
    assert (report["num_errors"], report["num_failed_steps"]) == (0, 0)
    assert len(sizes) > 20


def test_a_device_that_is_lost_in_a_recorded_step_is_not_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        collect(recorded(monkeypatch, lambda _size: lost), cases(0.0))
