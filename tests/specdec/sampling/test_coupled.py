"""For any draft the run is what plain decoding with the seed gives."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from specdec.core.params import SamplingParams
from specdec.sampling.acceptance import drawn_tokens, walk_drafts
from specdec.sampling.pipeline import RowGroup, Sampler, VerifiedRun
from tests.sizes import one_of_each

from .reference import TableModel, make_spec, plain_decoding, random_params

VOCAB = 16


@pytest.mark.parametrize("case", range(30))
def test_the_run_is_plain_decodings_whatever_the_draft(case: int) -> None:
    rng, model, sampler = random.Random(case), TableModel(VOCAB, case), Sampler(VOCAB)
    groups, plain = [], []
    for _ in range(12):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
        params = random_params(rng, VOCAB, temperature=rng.choice((0.0, 0.7, 1.0)))
        spec = make_spec(params, rng.getrandbits(64), output_start=rng.randrange(1, len(prompt) + 1))
        truth = plain_decoding(sampler, model, spec, prompt, 9)
        num_right = rng.randrange(9)
        draft = [*truth[:num_right], *(rng.randrange(VOCAB) for _ in range(8 - num_right))]
        groups.append(RowGroup(spec, prompt, tuple(draft[: rng.choice((0, 1, 3, 8))])))
        plain.append(truth)
    results = walk_drafts(sampler.sample(model.rows(groups), groups), groups)
    for result, group, truth in zip(results, groups, plain, strict=True):
        assert result.num_accepted == len(result.run) - 1
        assert result.run == tuple(truth[: len(result.run)])
        # Nothing right was refused.
        assert result.num_accepted == len(group.draft) or result.run[-1] != group.draft[result.num_accepted]


@pytest.mark.parametrize(("num_drafted", "temperature"), one_of_each([0, 1, 4, 8], [1.0, 0.0]))
def test_whole_generations_do_not_depend_on_the_draft_length_or_company(num_drafted: int, temperature: float) -> None:
    model, draft_model = TableModel(VOCAB, 1), TableModel(VOCAB, 1)
    draft_model.table = model.table + 0.8 * TableModel(VOCAB, 2).table
    rng, sampler = random.Random(4), Sampler(VOCAB)
    specs = [make_spec(random_params(rng, VOCAB, temperature=temperature), s, eos_token_ids=(5,)) for s in range(17)]
    logs = [[spec.seed % VOCAB] for spec in specs]
    num_accepted = 0
    while min(map(len, logs)) < 25:
        groups = []
        for spec, log in zip(specs, logs, strict=True):
            chain = plain_decoding(sampler, draft_model, spec, log, num_drafted)
            groups.append(RowGroup(spec, log, tuple(chain)))
        results = walk_drafts(sampler.sample(model.rows(groups), groups), groups)
        logs = [[*log, *result.run] for log, result in zip(logs, results, strict=True)]
        num_accepted += sum(result.num_accepted for result in results)
    for spec, log in zip(specs, logs, strict=True):
        assert log[1:25] == plain_decoding(Sampler(VOCAB), model, spec, log[:1], 24)
    assert (num_accepted > 0) == (num_drafted > 0)


def test_acceptance_is_exact_at_every_length() -> None:
    spec = make_spec(SamplingParams())
    groups = [RowGroup(spec, [1], draft) for draft in ((4, 5, 6), (4, 9, 6), (9, 5, 6), (), (4, 5, 9))]
    chosen = [4, 5, 6, 7] * 3 + [8] + [4, 5, 6, 7]
    expected = [
        VerifiedRun(run, num_accepted)
        for run, num_accepted in (((4, 5, 6, 7), 3), ((4, 5), 1), ((4,), 0), ((8,), 0), ((4, 5, 6), 2))
    ]
    assert walk_drafts(chosen, groups) == expected
    assert walk_drafts(torch.tensor(chosen), groups) == expected
    assert walk_drafts([], []) == []


def test_a_lead_is_worth_as_much_in_logits_at_every_temperature() -> None:
    """Scores are logits over temperature, or logits with temperature 0: a lead of a logit makes e times likelier."""
    for temperature in (0.0, 0.5, 2.0):
        group = RowGroup(make_spec(SamplingParams(temperature=temperature), 1, output_start=1), [5])
        scores = np.array([[3.0, 2.0]]) / (temperature or 1.0)
        (drawn,) = drawn_tokens([group], [np.array([7]), np.array([[7, 4]]), scores])
        assert (drawn.token, drawn.guesses) == (7, (4,))
        assert drawn.likelihoods == pytest.approx((np.e / (1 + np.e), 1 / (1 + np.e)))
