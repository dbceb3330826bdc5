"""Draft tokens of passes that are launched one behind another are those of steps that are waited for."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from specdec.core.backends import DraftJob, Proposal, Status
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.drafter import ModelDrafter
from specdec.executor.chains import ChainGraphs
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from specdec.sampling.pipeline import Sampler
from tests.specdec.kernels.in_torch import decide_in_torch
from tests.specdec.kernels.interpreter import interpreted
from tests.specdec.models.families import VOCAB_SIZE, make_model

MAX_MODEL_LEN = 60
LIMITS = ExecutorLimits(max_rows=16, max_tokens=128, max_length=MAX_MODEL_LEN)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.9),
)


class Counted(ModelRunner):
    """Counts its passes."""

    num_passes = 0

    def forward(self, rows, drawn=None, extra=()):  # type: ignore[no-untyped-def]
        self.num_passes += 1
        return super().forward(rows, drawn, extra)


def make_drafter(
    family: str,
    num_chained_passes: int,
    *,
    limits: ExecutorLimits | None = None,
    num_blocks: int = 200,
    on_kernels: bool = False,
    **of_draft: int,
) -> ModelDrafter:
    runner = Counted(prepare_model(make_model(family), "tiny"), num_blocks=num_blocks, block_size=4)
    if limits is not None:
        runner.record_graphs(limits)
    return ModelDrafter(
        runner,
        Sampler(VOCAB_SIZE, on_kernels=on_kernels),
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=128,
        max_num_seqs=16,
        num_chained_passes=num_chained_passes,
        **of_draft,
    )


def drawn(drafter: ModelDrafter, jobs: list[DraftJob]) -> list[list[Proposal]]:
    """For each job as many proposals as are of use, in however many steps."""
    found: list[list[Proposal]] = [[] for _ in jobs]
    while True:
        waiting = [i for i, job in enumerate(jobs) if len(found[i]) < job.num_tokens]
        if not waiting:
            return found
        step = []
        for i in waiting:
            said = [one.token for one in found[i]]
            step.append(replace_job(jobs[i], [*jobs[i].tokens, *said], jobs[i].num_tokens - len(said)))
        for i, proposal in zip(waiting, drafter.propose(step), strict=True):
            if proposal.status is Status.DECIDED:
                found[i] += [proposal._replace(further=(), num_passes=1), *proposal.further]
            else:
                assert proposal.status in (Status.PREFILLING, Status.WAITING)


def replace_job(job: DraftJob, tokens: list[int], num_tokens: int) -> DraftJob:
    return job._replace(tokens=tokens, num_tokens=num_tokens, agreed=min(job.agreed, len(tokens)))


def same(got: list[list[Proposal]], want: list[list[Proposal]]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert [one.token for one in ours] == [one.token for one in theirs]
        assert [one.guesses for one in ours] == [one.guesses for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.likelihoods == pytest.approx(other.likelihoods, abs=1e-4)


@pytest.mark.parametrize(("family", "limits"), [("llama", None), ("llama", LIMITS), ("gemma3", LIMITS)])
def test_a_step_of_several_passes_gives_what_several_steps_give(family: str, limits: ExecutorLimits | None) -> None:
    chained, plain = make_drafter(family, 4, limits=limits), make_drafter(family, 1)
    draw_from_both(chained, plain)
    num_passes, num_plain = (drafter._runner.num_passes for drafter in (chained, plain))  # type: ignore[attr-defined]
    assert num_passes < 1.5 * num_plain  # rows that read a prompt wait for more passes


@interpreted
def test_recorded_chains_give_what_several_steps_give() -> None:
    """Of a model with windows; the interpreter takes seconds for a round."""
    limits = replace(LIMITS, max_draft_tokens=3, num_chained_passes=6, num_guesses=3, num_extra_words=1 << 12)
    chained, plain = (
        make_drafter("gemma3", 6, limits=limits, on_kernels=True),
        make_drafter("gemma3", 1, on_kernels=True),
    )
    with patch.object(ChainGraphs, "launch", autospec=True, side_effect=ChainGraphs.launch) as launch:
        draw_from_both(chained, plain, num_texts=4, max_rounds=4)
    assert len({call.args[1] for call in launch.call_args_list}) > 2
    assert chained._runner.num_passes < launch.call_count  # type: ignore[attr-defined]
    steps = chained._runner._steps  # a row has gone on as far as its own chain, and no further
    known = np.flatnonzero(steps._lengths >= 0)
    assert steps._state.tensors["num_computed_tokens"][known].tolist() == steps._lengths[known].tolist() != []


def test_tokens_of_one_recorded_pass_are_those_of_a_pass_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    decide_in_torch(monkeypatch)
    limits = replace(LIMITS, max_draft_tokens=4, num_chained_passes=4, num_guesses=3, num_extra_words=1 << 12)
    recorded, plain = (
        make_drafter("llama", 1, limits=own, on_kernels=own is not None, mask_token_id=1, num_step_tokens=4)
        for own in (replace(limits, is_parallel=True), None)
    )
    with patch.object(ChainGraphs, "launch", autospec=True, side_effect=ChainGraphs.launch) as launch:
        draw_from_both(recorded, plain)
    assert launch.call_count > 0.9 * plain._runner.num_passes  # type: ignore[attr-defined]
    assert launch.call_count + recorded._runner.num_passes == plain._runner.num_passes  # type: ignore[attr-defined]
    steps = recorded._runner._steps
    known = np.flatnonzero(steps._lengths >= 0)
    assert steps._state.tensors["num_computed_tokens"][known].tolist() == steps._lengths[known].tolist() != []


def test_memory_of_recorded_chains_is_told() -> None:
    """For as many rows as there may be, rounded up, and no more of it for guesses."""
    pytest.importorskip("triton")
    common = replace(LIMITS, num_chained_passes=4, num_extra_words=1 << 12)
    found = [
        make_drafter("llama", 4, limits=replace(common, **own), on_kernels=True)._runner.graphs_bytes  # type: ignore[arg-type]
        for own in ({"max_rows": 18, "num_guesses": 3}, {"max_rows": 32}, {"max_rows": 48})
    ]
    assert 4 * 32 * VOCAB_SIZE < found[0] == found[1]
    assert found[2] == 1.5 * found[1]


@interpreted
def test_without_memory_for_recorded_chains_passes_are_launched_one_by_one() -> None:
    limits = replace(LIMITS, num_chained_passes=4, num_extra_words=1 << 12)
    with patch("specdec.engine.chained.ChainSampler", side_effect=torch.OutOfMemoryError("none")):
        drafter = make_drafter("llama", 4, limits=limits, on_kernels=True)
    spec = SequenceSpec(PARAMS[1], 1, 2, MAX_MODEL_LEN)
    jobs = [DraftJob("a", [1, 2, 3], spec, num_tokens=4)]
    assert drafter.propose(jobs) == make_drafter("llama", 4).propose(jobs)
    assert drafter._runner.num_passes == 4  # type: ignore[attr-defined]


def draw_from_both(
    chained: ModelDrafter, plain: ModelDrafter, num_texts: int = 2 * len(PARAMS), max_rounds: int = 1000
) -> None:
    """Over sequences that grow by some of their drafts and by other tokens, up to the longest that the model reads."""
    rng = random.Random(3)
    texts = {f"{i}": [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 30))] for i in range(num_texts)}
    for number in range(max_rounds):
        jobs, longest = [], (6, 1, 3, 5)[number % 4]
        for key, text in texts.items():
            spec = SequenceSpec(PARAMS[int(key) % len(PARAMS)], int(key), 2, MAX_MODEL_LEN)
            most = min(MAX_MODEL_LEN + 1 - len(text), rng.randint(1, longest))
            jobs.append(DraftJob(key, list(text), spec, 0, len(text), None, 2, most))
        found = drawn(chained, jobs)
        same(found, drawn(plain, jobs))
        for job, proposals in zip(jobs, found, strict=True):
            kept = [one.token for one in proposals[: rng.randint(0, len(proposals))]]
            texts[job.key] += [token for token in kept if token is not None] + [rng.randrange(VOCAB_SIZE)]
            if len(texts[job.key]) > MAX_MODEL_LEN:
                del texts[job.key]
                for drafter in (chained, plain):
                    drafter.release(job.key)
        if not texts:
            assert chained.metrics()["kv_blocks_in_use"] == 0
            return


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (SamplingParams(top_k=3), [4, 2, 4]),
        (SamplingParams(frequency_penalty=0.5), [1, 1, 1]),
    ],
)
def test_where_a_row_depends_on_its_tokens_each_gets_one(other: SamplingParams, expected: list[int]) -> None:
    drafter = make_drafter("llama", 4)
    jobs = [
        DraftJob(f"{i}", [1, 2, 3], SequenceSpec(params, i, 2, MAX_MODEL_LEN), num_tokens=num_tokens)
        for i, (params, num_tokens) in enumerate([(PARAMS[0], 6), (PARAMS[1], 2), (other, 6)])
    ]
    found = drafter.propose(jobs)
    assert [1 + len(one.further) for one in found] == expected
    assert drafter._runner.num_passes == found[0].num_passes == max(expected)  # type: ignore[attr-defined]


def test_without_room_for_more_tokens_a_row_gets_one() -> None:
    drafter = make_drafter("llama", 4, num_blocks=1)
    (found,) = drafter.propose([DraftJob("a", [1, 2, 3], SequenceSpec(PARAMS[0], 1, 2, MAX_MODEL_LEN), num_tokens=4)])
    assert (found.status, found.further) == (Status.DECIDED, ())


def test_a_row_that_breaks_in_a_later_pass_keeps_what_it_has() -> None:
    want = make_drafter("llama", 4)
    spec = SequenceSpec(PARAMS[0], 1, 2, MAX_MODEL_LEN)
    jobs = [DraftJob(key, tokens, spec, num_tokens=4) for key, tokens in (("a", [1, 2, 3]), ("b", [9, 8]))]
    right = want.propose(jobs)
    tokens = [right[0].token, *(one.token for one in right[0].further)]
    other = {right[1].token, *(one.token for one in right[1].further), 1, 2, 3, 9, 8}
    broken = next((i for i, token in enumerate(tokens[:3]) if token not in other | set(tokens[:i])), None)
    assert broken is not None, "another seed is wanted"
    drafter = make_drafter("llama", 4)
    with torch.no_grad():
        drafter._runner.loaded.model.get_input_embeddings().weight[tokens[broken]] = float("nan")
    found = drafter.propose(jobs)
    assert 1 + len(found[0].further) == broken + 1
    assert [found[0].token, *(one.token for one in found[0].further)] == tokens[: broken + 1]
    assert found[1] == right[1]
