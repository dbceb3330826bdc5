"""Drafts of heads in one launch are those of passes one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.core.backends import Status, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.head_chains import HeadChains
from specdec.drafting.heads import HeadDrafter, HeadsOptions, load_heads
from specdec.drafting.medusa.heads import HeadsConfig, MedusaHeads
from specdec.engine.target import ModelTarget
from specdec.executor.chains import ChainGraphs, Chosen
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from specdec.sampling.pipeline import Sampler
from tests.specdec.drafting.eagle3_folders import write_eagle3
from tests.specdec.drafting.medusa_folders import write_medusa
from tests.specdec.models.families import VOCAB_SIZE, make_model

MAX_MODEL_LEN = 64
NUM_TOKENS = 4
LIMITS = ExecutorLimits(
    8, 128, MAX_MODEL_LEN, NUM_TOKENS, num_extra_words=1 << 13, num_chained_passes=NUM_TOKENS, has_trees=True
)
GREEDY = SamplingParams(temperature=0.0)


class Likeliest:
    """Chooses without kernels."""

    num_bytes = 0

    def padding(self) -> list[Any]:
        return []

    def arrays(self, _: object) -> list[Any]:
        return []

    def begin(self, sent: Sequence[Tensor]) -> None:
        pass

    def choose(self, logits: Tensor, number: int) -> Chosen:
        return Chosen(logits.argmax(-1).int(), None, None)


class LaysOutNothing(Sampler):
    """What :class:`Likeliest` needs."""

    def lay_out(self, *_: object) -> Any:
        return ()


def make_target(method: str, folder: Path, sampler: Sampler, limits: ExecutorLimits | None) -> ModelTarget:
    model = make_model("llama")
    if method == "eagle3":
        write_eagle3(folder, model, [[*range(3, 60)]], layout="authors", draft_vocab_size=100)
    else:
        torch.manual_seed(1)
        config = HeadsConfig(model.config.hidden_size, VOCAB_SIZE, 3)
        write_medusa(folder, config, MedusaHeads(config, None).state_dict())
    loaded, heads = load_heads(HeadsOptions(str(folder), NUM_TOKENS, method=method), prepare_model(model, "tiny"))
    runner = ModelRunner(loaded, num_blocks=100, block_size=4)
    if limits is not None:
        runner.record_graphs(limits)
    drafter = HeadDrafter(heads, runner, sampler, NUM_TOKENS)
    if limits is not None and drafter._chains is None:
        chains = HeadChains(heads, runner, sampler, Likeliest(), limits)  # type: ignore[arg-type]
        drafter._chains = runner.record_chains("drafts", lambda _: chains, lambda chains: chains.run_pass)
        assert drafter._chains is chains
    return ModelTarget(runner, sampler, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=48, heads=drafter)


def compare(recorded: ModelTarget, plain: ModelTarget, params: Sequence[SamplingParams], most_tokens: int) -> None:
    """Sequences that draft as far as each may; the last one begins later, and reads its prompt meanwhile."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (5, 2, 9, 30)]
    most = [NUM_TOKENS, 2, 0, 1]
    specs = [
        SequenceSpec(params[i % len(params)], i, len(prompt), MAX_MODEL_LEN, num_speculative_tokens=most[i])
        for i, prompt in enumerate(prompts)
    ]
    logs = [[TokenLog(prompt) for prompt in prompts] for _ in range(2)]
    drafts: list[tuple[int, ...]] = [()] * len(prompts)
    with patch.object(ChainGraphs, "launch", autospec=True, side_effect=ChainGraphs.launch) as launch:
        for number in range(4):
            proposed = [draft[: rng.randint(0, NUM_TOKENS)] for draft in drafts[: 3 if number < 2 else 4]]
            ours_and_theirs = [
                target.verify(
                    [
                        VerifyJob(f"{i}", of[i], draft, specs[i], max_own_tokens=NUM_TOKENS)
                        for i, draft in enumerate(proposed)
                    ]
                )
                for target, of in zip((recorded, plain), logs, strict=True)
            ]
            for i, (ours, theirs) in enumerate(zip(*ours_and_theirs, strict=True)):
                assert (ours.status, ours.run) == (theirs.status, theirs.run)
                assert ours.next_draft.tokens == theirs.next_draft.tokens
                if ours.status is Status.DECIDED:
                    assert len(ours.next_draft.tokens) == min(most[i], most_tokens)
                    drafts[i] = ours.next_draft.tokens
                    for of in logs:
                        of[i].extend(ours.run)
    assert launch.call_count == 4
    steps = recorded._runner._steps
    known = np.flatnonzero(steps._lengths >= 0)
    assert steps._state.tensors["num_computed_tokens"][known].tolist() == steps._lengths[known].tolist() != []


@pytest.mark.parametrize(("method", "most_tokens"), [("eagle3", 4), ("medusa", 3)])
def test_drafts_in_one_launch_are_those_of_passes(method: str, most_tokens: int, tmp_path: Path) -> None:
    limits = replace(LIMITS, num_chained_passes=most_tokens)
    recorded = make_target(method, tmp_path / "a", LaysOutNothing(VOCAB_SIZE), limits)
    compare(recorded, make_target(method, tmp_path / "b", Sampler(VOCAB_SIZE), None), [GREEDY], most_tokens)


def test_rows_that_are_not_plain_draft_pass_by_pass(tmp_path: Path) -> None:
    target = make_target("eagle3", tmp_path, LaysOutNothing(VOCAB_SIZE), LIMITS)
    spec = SequenceSpec(SamplingParams(frequency_penalty=0.5), 1, 3, MAX_MODEL_LEN)
    with patch.object(ChainGraphs, "launch", side_effect=AssertionError):
        (found,) = target.verify([VerifyJob("a", TokenLog([5, 6, 7]), (), spec, max_own_tokens=NUM_TOKENS)])
    assert len(found.next_draft.tokens) == NUM_TOKENS
