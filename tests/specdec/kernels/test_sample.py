"""Sampling in kernels decides what the sampler in torch decides, token for token."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from specdec.core.params import SamplingParams
from specdec.core.tokens import SharedTokens
from specdec.kernels import sample
from specdec.sampling.acceptance import decide, walk_draft
from specdec.sampling.on_kernels import StagedStep
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rows import RowGroup
from tests.specdec.kernels.interpreter import interpreted
from tests.specdec.kernels.sampled import bits, random_groups, step_of
from tests.specdec.operators import Operators
from tests.specdec.sampling.reference import make_spec

CPU = torch.device("cpu")
VOCAB = 100
MAX_TOKENS = 8
BY_ROW = ("sequence", "position", "draft", "parent", "grammar")


def decided(logits: torch.Tensor, staged: StagedStep, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's token, and the records."""
    from specdec.kernels.triton.sample import TritonSampler

    step = staged.step
    sampler = TritonSampler(VOCAB, len(step.sequence), len(step.first), MAX_TOKENS, CPU, block_size=64)
    sampler.decide(logits, step, **staged.options | options)
    return sampler.chosen, sampler.record


def drafts_that_stand(groups: list[RowGroup], logits: torch.Tensor, rng: random.Random) -> list[RowGroup]:
    """The groups with most draft tokens replaced by what is chosen before them, front to back."""
    sampler, at = Sampler(VOCAB), 0
    for number, group in enumerate(groups):
        for node in range(len(group.draft)):
            row = 1 + (group.parents[node] if group.parents else node - 1)
            token = int(sampler.sample(logits[at + row][None], [groups[number].by_row()[row]]))
            if rng.random() < 0.8:
                draft = list(groups[number].draft)
                draft[node] = token
                groups[number] = groups[number]._replace(draft=tuple(draft))
        at += 1 + len(group.draft)
    return groups


@pytest.mark.parametrize("trees", [False, True])
@interpreted
def test_rows_and_records_are_those_of_the_sampler(trees: bool) -> None:
    rng, generator = random.Random(5 + trees), torch.Generator().manual_seed(5)
    groups = random_groups(rng, VOCAB, 6, trees)
    # A draft's own tokens are counted; bad words give way where nothing is left; all else gives way to the grammar.
    one = make_spec(SamplingParams(temperature=0.0, frequency_penalty=2.0), output_start=2)
    bad = make_spec(
        SamplingParams(temperature=0.0, allowed_token_ids=SharedTokens((7,)), bad_words=((7,),)), output_start=2
    )
    only = bits([token == 9 for token in range(VOCAB)])[None]
    first = RowGroup(one, [1, 2, 3], (5, 6), parents=(-1, 0) if trees else ())
    groups = [first, RowGroup(bad, [1, 2, 3]), RowGroup(bad, [1, 2, 3], (), only), *groups]
    num_rows = sum(1 + len(group.draft) for group in groups)
    logits = torch.randn(num_rows + 2, VOCAB + 7, generator=generator) * 3
    logits[:3, 5], logits[:3, 6] = 23.0, 22.5
    groups = drafts_that_stand(groups, logits, rng)
    step, *rest = step_of(groups, VOCAB)
    padding = {name: functional.pad(getattr(step, name), (0, 2), value=-1) for name in BY_ROW}
    padding |= {name: functional.pad(getattr(step, name), (0, 0, 0, 2), value=-1) for name in ("ahead", "ended", "bad")}
    step = replace(step, **padding)
    chosen, records = decided(logits, StagedStep(step, *rest))
    expected = Sampler(VOCAB).sample(logits[:num_rows], groups)
    by_row = Sampler(VOCAB).sample(logits[:num_rows], [row for group in groups for row in group.by_row()])
    assert torch.equal(by_row, expected)
    assert chosen.tolist() == [*expected.tolist(), -1, -1]
    assert chosen[3:5].tolist() == [7, 9]
    accepted = 0
    for number, group in enumerate(groups):
        start = int(step.first[number])
        run = walk_draft(expected[start : start + 1 + len(group.draft)].tolist(), group.draft, group.parents)
        found = records[number].tolist()
        assert found[:2] == [run.num_accepted, 0]
        assert found[2 : 2 + MAX_TOKENS] == [*run.run, *[-1] * (MAX_TOKENS - len(run.run))]
        path = found[2 + MAX_TOKENS :][: run.num_accepted]
        assert path == [*(run.path or range(run.num_accepted))]
        accepted += run.num_accepted
    assert 0 < accepted < num_rows - len(groups)


@interpreted
def test_what_none_uses_can_be_left_out() -> None:
    params = SamplingParams(temperature=0.0)
    groups = random_groups(random.Random(3), VOCAB, 3)
    groups = [group._replace(spec=replace(group.spec, sampling=params), mask=None) for group in groups]
    num_rows = sum(1 + len(group.draft) for group in groups)
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(1)).round()
    step = step_of(groups, VOCAB)
    assert not any(step.options.values())
    chosen, _ = decided(logits, step)
    # Of the many that tie the lowest.
    assert chosen.tolist() == logits.argmax(1).tolist()
    half, _ = decided(logits.bfloat16().half(), step)
    assert torch.equal(half, chosen)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@interpreted
def test_rows_that_are_not_finite_are_told(broken: float) -> None:
    groups = random_groups(random.Random(3), VOCAB, 3)
    groups = [group._replace(mask=None, draft=()) for group in groups]
    logits = torch.randn(3, VOCAB)
    logits[1, 70] = broken
    _, records = decided(logits, step_of(groups, VOCAB))
    assert records[:, sample.FLAGS].tolist() == [0, sample.NOT_FINITE, 0]


def kept(row: torch.Tensor, params: SamplingParams) -> list[bool]:
    """The tokens that truncation keeps, by probabilities in float64."""
    probs, ordered = row.double().exp(), row.sort(descending=True).values
    is_kept = torch.ones_like(row, dtype=torch.bool)
    if 0 < params.top_k < len(row):
        is_kept &= row >= ordered[params.top_k - 1]
    if params.top_p < 1:
        left = probs.where(is_kept, 0).sort(descending=True).values
        is_kept &= row >= ordered[int((left.cumsum(0) < params.top_p * left.sum()).sum())]
    return (is_kept & (probs >= params.min_p)).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_truncation_keeps_what_probabilities_keep(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CPU_NUMBERS_PER_PASS", "_GPU_NUMBERS_PER_PASS"):
        monkeypatch.setattr(sample, name, 9000)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    params = [
        SamplingParams(
            top_k=rng.choice([0, 1, 5, 50, 1000]),
            top_p=rng.choice([1.0, 0.1, 0.9, 0.95, 0.999]),
            min_p=rng.choice([0.0, 0.02]),
        )
        for _ in range(20)
    ]
    logits = torch.randn(20, 3000, generator=generator) * torch.tensor([0.5, 2.5, 6, 2.5])[:, None].repeat(5, 1)
    logits[::4] = logits[::4].mul(10).round() / 10
    logits[::5, ::3] = -torch.inf
    scaled = logits - logits.amax(1, keepdim=True)
    k, p = torch.tensor([one.top_k for one in params]), torch.tensor([one.top_p for one in params], dtype=torch.float64)
    least = torch.tensor([one.min_p for one in params], dtype=torch.float64).log().float()
    expected = [kept(*pair) for pair in zip(scaled, params, strict=True)]
    assert (scaled >= sample.thresholds(scaled, k, p, least)[:, None]).tolist() == expected
    in_numpy = sample.thresholds(*(each.numpy() for each in (scaled, k, p, least)))
    assert (scaled.numpy() >= in_numpy[:, None]).tolist() == expected


@interpreted
def test_kernel_truncates_as_the_reference() -> None:
    """Over few tokens that it has gathered, and over all tokens of rows that are too flat for that."""
    from specdec.kernels.triton.sample import TritonSampler

    rng, generator = random.Random(9), torch.Generator().manual_seed(9)
    values = [(rng.choice([0, 1, 7, 40, 99, 100]), rng.choice([1.0, 0.05, 0.9, 0.99])) for _ in range(9)]
    groups = [random_groups(rng, VOCAB, 1, temperature=1.0)[0] for _ in values]
    groups = [
        group._replace(
            draft=(),
            mask=None,
            spec=replace(group.spec, sampling=SamplingParams(top_k=k, top_p=p, min_p=rng.choice([0, 0.01]))),
        )
        for group, (k, p) in zip(groups, values, strict=True)
    ]
    logits = torch.randn(len(groups), VOCAB, generator=generator) * torch.tensor([0.1, 2.0, 8.0]).repeat(3)[:, None]
    logits[4:7] = logits[4:7].mul(4).round() / 4
    logits[::2, 30:70] = -torch.inf
    step = step_of(groups, VOCAB).step
    sampler = TritonSampler(VOCAB, len(groups), len(groups), MAX_TOKENS, CPU, block_size=32)
    sampler._candidates.fill_(math.nan)
    sampler.decide(logits, step, penalties=False, truncation=True, noise=True)
    scaled = logits - logits.amax(1, keepdim=True)
    expected = sample.thresholds(scaled, step.top_k, step.top_p, step.min_p)
    assert torch.equal(scaled >= sampler._threshold[:, None], scaled >= expected[:, None])
    gathered = sampler._candidates.isfinite()
    assert torch.equal(gathered.sum(1), gathered.int().cummin(1).values.sum(1)), "one behind another"
    of_scales = gathered.any(1).view(3, 3).sum(0).tolist()
    assert of_scales[0] == 0 < of_scales[1] < of_scales[2] == 3, (of_scales, values)


@interpreted
def test_steps_that_kernels_decide_are_those_that_torch_decides() -> None:
    """Runs, log probabilities, guesses and flags, over logs that grow: what is kept by slot is that of the log."""
    rng, generator = random.Random(23), torch.Generator().manual_seed(23)
    by_kernels, by_torch = Sampler(VOCAB, on_kernels=True), Sampler(VOCAB)
    groups = random_groups(rng, VOCAB, 5, trees=True)
    params = [replace(group.spec.sampling, logprobs=rng.choice([None, 0, 3])) for group in groups]
    specs = [replace(group.spec, sampling=one) for group, one in zip(groups, params, strict=True)]
    logs, num_accepted = [list(group.tokens) for group in groups], 0
    for step in range(4):
        new = random_groups(rng, VOCAB, len(specs), trees=step % 2 > 0)
        groups = [one._replace(spec=spec, tokens=log) for one, spec, log in zip(new, specs, logs, strict=True)]
        groups = groups[step % 2 :]
        logits = torch.randn(sum(1 + len(one.draft) for one in groups), VOCAB + 3, generator=generator) * 3
        groups, flags = drafts_that_stand(groups, logits, rng), torch.tensor([True, False, True])
        found = decide(by_kernels, logits, groups, flags)
        wanted = decide(by_torch, logits, groups, flags)
        assert found[:2] == wanted[:2]
        assert found.flags.tolist() == wanted.flags.tolist()
        ranked = by_kernels.choose_and_guess(logits, groups, 3), by_torch.choose_and_guess(logits, groups, 3)
        assert torch.equal(ranked[0].chosen, ranked[1].chosen)
        assert torch.equal(ranked[0].tokens, ranked[1].tokens)
        num_accepted += sum(run.num_accepted for run in found.runs)
        for log, run in zip(logs[step % 2 :], found.runs, strict=True):
            log += run.run
    assert num_accepted > 5
    assert any(report for report in found.logprobs)


@interpreted
def test_a_step_waits_once_for_one_copy_each_way() -> None:
    from specdec.kernels.triton.sample import TritonSampler

    groups = random_groups(random.Random(3), VOCAB, 4, trees=True)
    params = [replace(group.spec.sampling, logprobs=2, frequency_penalty=0.5) for group in groups]
    groups = [g._replace(spec=replace(g.spec, sampling=one)) for g, one in zip(groups, params, strict=True)]
    sampler, flags = Sampler(VOCAB, on_kernels=True), torch.ones(9, dtype=torch.bool)
    logits = torch.randn(sum(1 + len(group.draft) for group in groups), VOCAB)
    decide(sampler, logits, groups, flags)
    with patch.object(TritonSampler, "decide"), Operators() as seen:  # the interpreter copies for itself
        decide(sampler, logits, groups, flags)
    # The flags are put into the record on the device, and the numbers are.
    assert seen.names.count("aten.copy_.default") == 4
    waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "lift_fresh")
    assert not [name for name in seen.names if name.split(".")[1] in waits]
