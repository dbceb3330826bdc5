"""Layers with sliding windows keep their window and a little more; texts stay what the plain model says."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from specdec.core.messages import Plan
from specdec.core.params import SamplingParams
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.executor.runner import ModelRunner
from specdec.sampling.pipeline import Sampler
from tests.sizes import some
from tests.specdec.engine.pairs import (
    MAX_MODEL_LEN,
    Case,
    greedy,
    make_draft,
    make_model,
    prepare_tiny,
    run,
    run_with_branches,
)
from tests.specdec.models.families import VOCAB_SIZE

FAMILIES = ("gemma3", "gpt_oss", "mistral")
CHUNK, LOOKAHEAD, WINDOW, BLOCK_SIZE = 16, 12, 6, 4
SHARE = 1 + (WINDOW + LOOKAHEAD) // BLOCK_SIZE + 1
"""Blocks that a sequence holds for a window, and so many more in a step of a prompt."""
PROMPTS = [tuple(3 + (7 * i + 5 * j) % 120 for j in range(length)) for i, length in enumerate((70, 33, 9, 51))]


def backend(kind: type, model: PreTrainedModel, num_window_blocks: int):
    runner = ModelRunner(
        prepare_tiny(model),
        num_blocks=400,
        block_size=BLOCK_SIZE,
        window_blocks={WINDOW: num_window_blocks},
        lookahead_tokens=LOOKAHEAD,
    )
    return kind(runner, Sampler(VOCAB_SIZE), max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=CHUNK)


@pytest.mark.parametrize("num_window_blocks", some([80, SHARE + CHUNK // BLOCK_SIZE + 3]))
@pytest.mark.parametrize("family", some(FAMILIES, 2))
def test_texts_are_the_plain_models(family: str, num_window_blocks: int) -> None:
    """As target and draft; with too few of the window's blocks for all, those that came last begin anew."""
    target = backend(ModelTarget, make_model(family), num_window_blocks)
    drafter = backend(ModelDrafter, make_draft(family, 0.06), num_window_blocks)
    cases = [Case(prompt, 30, SamplingParams(temperature=0.0), i) for i, prompt in enumerate(PROMPTS)]
    outputs, stats = run(InProcessService(target, drafter, 4), cases)
    assert outputs == [greedy(make_model(family), case) for case in cases]
    assert stats.num_accepted_tokens > 10
    assert (target.metrics()["num_evictions"] > 0) == (num_window_blocks < 80)
    assert target.metrics()["kv_blocks_in_use"] == 0
    again, _ = run(InProcessService(target, drafter, 4), cases)
    assert again == outputs
    assert target.metrics()["num_reused_tokens"] > 30 or num_window_blocks < 80


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_branches_share_and_leave_windows(family: str) -> None:
    target = backend(ModelTarget, make_model(family), 200)
    drafter = backend(ModelDrafter, make_draft(family, 0.06), 200)
    run_with_branches(target, drafter, PROMPTS, Plan(4, num_branches=3), 6)
