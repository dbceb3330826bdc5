"""Values that are not finite stay with their row: in its step, and in the blocks and slots that it leaves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from specdec.cache.recurrent.rescan import Rescan
from specdec.cache.recurrent.slots import Window
from specdec.core.backends import DraftJob, Proposal, Status, VerifyJob
from specdec.core.errors import NOT_FINITE
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.kernels.recurrent_metadata import StateRow, StateStep
from specdec.kernels.scan import DeltaRule
from specdec.models.loading import LoadedModel, prepare_model
from specdec.sampling.pipeline import Sampler
from tests.specdec.engine.pairs import Case, run
from tests.specdec.models.families import VOCAB_SIZE, make_model
from tests.specdec.operators import Operators

BAD = 7
"""The model has no finite embedding of this token."""
UNTIED = ("llama", "gpt_oss")


def loaded_with(value: float, family: str = "llama") -> LoadedModel:
    model = make_model(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = value
    return prepare_model(model, "tiny")


def spec(length: int, number: int) -> SequenceSpec:
    return SequenceSpec(SamplingParams(temperature=0.0), number, length, 50, arrival_s=float(number))


def step(target: ModelTarget, **prompts: list[int]) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """Verify one step of prompts: status, reason and tokens of each."""
    jobs = [
        VerifyJob(key, TokenLog(tokens), (), spec(len(tokens), i)) for i, (key, tokens) in enumerate(prompts.items())
    ]
    return {
        key: (result.status.value, result.reason, tuple(result.run))
        for key, result in zip(prompts, target.verify(jobs), strict=True)
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("family", UNTIED)
def test_a_prompts_part_ends_with_an_error_beside_others_and_leaves_nothing(value: float, family: str) -> None:
    """Of a part nobody wants logits. Its blocks are no prefix, and the next owners read nothing of them."""
    loaded = loaded_with(value, family)

    def target() -> ModelTarget:
        return ModelTarget(
            ModelRunner(loaded, num_blocks=7), Sampler(VOCAB_SIZE), max_model_len=112, max_num_batched_tokens=80
        )

    others = {"a": list(range(10, 50)) + [8] * 8, "b": list(range(9, 19)), "c": list(range(30, 16, -1))}
    wanted, spoilt = step(target(), **others), target()
    both = step(spoilt, good=[9, 10, 11], bad=[BAD] * 90)
    assert both["bad"] == ("failed", NOT_FINITE, ())
    assert both["good"][0] == "decided"
    assert spoilt.metrics()["kv_blocks_reusable"] == 0
    for key in both:
        spoilt.release(key)
    assert spoilt.metrics()["kv_blocks_reusable"] == 0
    assert step(spoilt, **others) == wanted


def test_a_drafters_row_fails_alone_and_publishes_nothing() -> None:
    runner = ModelRunner(loaded_with(float("nan")), num_blocks=8)
    drafter = ModelDrafter(runner, Sampler(VOCAB_SIZE), max_model_len=112, max_num_batched_tokens=100)
    logs = [[BAD] * 40, list(range(10, 50))]
    jobs = [DraftJob(f"{i}", log, spec(len(log), i), num_committed=len(log)) for i, log in enumerate(logs)]
    assert [proposal.status for proposal in drafter.propose(jobs)] == [Status.FAILED, Status.DECIDED]
    drafter.release("0")
    drafter.release("1")
    assert runner.pool.num_reusable == len(logs[1]) // runner.pool.block_size


class BadDrafter(ModelDrafter):
    """Proposes at every place the token that the target cannot read."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        return [p if p.token is None else p._replace(token=BAD) for p in super().propose(jobs)]


def test_drafts_that_the_target_cannot_read_change_no_token() -> None:
    def generate(num_draft_tokens: int) -> list[list[int]]:
        draft = ModelRunner(prepare_model(make_model("llama", seed=3), "tiny"), num_blocks=40)
        target = ModelRunner(loaded_with(float("nan")), num_blocks=40)
        limits = {"max_model_len": 112, "max_num_batched_tokens": 100}
        service = InProcessService(
            ModelTarget(target, Sampler(VOCAB_SIZE), **limits),
            BadDrafter(draft, Sampler(VOCAB_SIZE), **limits),
            num_draft_tokens,
        )
        return run(service, [Case((9, 10, 11 + i), 12, SamplingParams(temperature=0.0)) for i in range(2)])[0]

    wanted = generate(0)
    assert [len(output) for output in wanted] == [12, 12]
    assert generate(3) == wanted


def test_blocks_of_a_step_that_nobody_has_checked_are_clean_for_the_next_owner() -> None:
    """As where the step ends with an exception; and once they are clean, no later step clears anything."""
    runner = ModelRunner(loaded_with(float("nan")), num_blocks=4)
    bad = runner.new_sequence()
    runner.reserve(bad, 64)
    runner.forward([RowInput(bad, [BAD] * 64, 0)])
    assert runner.spoilt_rows() == (0,)
    runner.free(bad)
    rows = [(runner.new_sequence(), list(range(20, 20 + length))) for length in (10, 14)]
    for sequence, tokens in rows:  # of unlike length: the shorter one's keys are masked, and still multiplied
        runner.reserve(sequence, len(tokens))
    assert runner.forward([RowInput(sequence, tokens, 1) for sequence, tokens in rows]).isfinite().all()
    assert runner.spoilt_rows() == ()
    with Operators() as seen:
        runner.reserve(rows[0][0], 11)
        runner.forward([RowInput(rows[0][0], [9], 1)])
    assert "aten.index_fill_.int_Scalar" not in seen.names


def test_a_slot_of_recurrent_states_is_clean_for_the_next_owner() -> None:
    """States and the ring of inputs: neutral inputs are still multiplied."""
    window, heads, width = Window(18), 2, 4
    shapes = [((heads, width), torch.float32)] * 2 + [((heads,), torch.float32)] * 2
    states = Rescan((heads, width, width), shapes, 4, 18, torch.device("cpu"))

    def run(rows: list[StateRow], count: int, value: float = 1.0) -> torch.Tensor:
        wide, narrow = torch.ones(1, count, heads, width), torch.ones(1, count, heads)
        scan = DeltaRule(None, wide, wide, value * wide, -narrow, 0.5 * narrow)  # type: ignore[arg-type]
        return states.run(scan, StateStep(rows, count, window))

    run([StateRow(0, 4, 0, 0, 0, 0, 0)], 4, float("nan"))
    run([StateRow(0, 6, 0, 1, 0, 0, 0)], 6)
    states.clear([0])
    # The new owner of slot 0 reads beside a row that was cut back, and so is read with kept inputs, neutral for it.
    assert run([StateRow(0, 4, 0, 0, 0, 0, 0), StateRow(4, 2, 4, 1, 0, 6, 0)], 6).isfinite().all()


def test_what_a_scan_needs_of_a_step_is_made_once_for_all_layers() -> None:
    """Also where rows were cut back, and where windows move on."""
    window, heads, width, num_rows = Window(4), 1, 2, 6
    shapes = [((heads, width), torch.float32)] * 2 + [((heads,), torch.float32)] * 2
    layers = [Rescan((heads, width, width), shapes, num_rows, 4, torch.device("cpu")) for _ in range(2)]
    wide, narrow = torch.ones(1, 2 * num_rows, heads, width), torch.ones(1, 2 * num_rows, heads)
    scan = DeltaRule(None, wide, wide, wide, -narrow, 0.5 * narrow)  # type: ignore[arg-type]
    rows = [StateRow(2 * i, 2, 6, i, 0, 6 + i % 2, 4 * (i % 2)) for i in range(num_rows)]
    step = StateStep(rows, 2 * num_rows, window)
    layers[0].run(scan, step)
    with Operators() as seen:
        layers[1].run(scan, step)
    assert "aten.lift_fresh.default" not in seen.names  # what torch.tensor() dispatches
