"""Reported log probabilities: the model's own, from the row of the token."""

from __future__ import annotations

import pytest
import torch

from specdec.sampling.logprobs import token_logprobs
from specdec.sampling.params import SamplingParams
from specdec.sampling.pipeline import RowGroup, Sampler

from .reference import make_spec


def test_they_are_those_of_the_raw_row_whatever_the_parameters() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    expected = logits.double().log_softmax(1)
    params = SamplingParams(
        temperature=0.3, top_k=1, presence_penalty=2.0, logit_bias=((1, 50.0),), min_tokens=4, logprobs=3
    )
    groups = [
        RowGroup(make_spec(params, eos_token_ids=(2,)), [1], (2, 3)),
        RowGroup(make_spec(SamplingParams()), [1]),
        RowGroup(make_spec(SamplingParams(logprobs=0)), [1]),
    ]
    reports = Sampler(9).logprobs(logits, groups, [(2, 5), (4,), (6,)])
    assert reports[1] is None
    assert reports[0] is not None
    assert reports[2] is not None
    assert [len(report) for report in (reports[0], reports[2])] == [2, 1]
    for row, token, entry, count in ((0, 2, reports[0][0], 3), (1, 5, reports[0][1], 3), (4, 6, reports[2][0], 0)):
        assert entry.logprob == pytest.approx(expected[row, token].item())
        assert entry.rank == sorted(expected[row].tolist(), reverse=True).index(expected[row, token].item()) + 1
        best = expected[row].topk(count)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist())


def test_more_than_the_vocabulary_lists_all_of_it() -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, 1.0, 2.0]]), [0], [20])
    assert [i for i, _ in entry.top] == [2, 1, 0]


def test_no_tokens_no_entries() -> None:
    assert token_logprobs(torch.empty(0, 4), [], []) == []
    groups = [RowGroup(make_spec(SamplingParams(logprobs=1)), [1])]
    assert Sampler(4).logprobs(torch.zeros(1, 4), groups, [()]) == [()]
