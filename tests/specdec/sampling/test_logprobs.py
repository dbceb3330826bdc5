"""Reported log probabilities: the model's own, from the row of the token."""

from __future__ import annotations

import math

import pytest
import torch

from specdec.core.params import SamplingParams
from specdec.sampling import logprobs as module
from specdec.sampling.logprobs import token_logprobs
from specdec.sampling.pipeline import RowGroup, Sampler, VerifiedRun

from .reference import make_spec, probs_of


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
    reports = Sampler(9).logprobs(logits, groups, [VerifiedRun((2, 5), 1), VerifiedRun((4,), 0), VerifiedRun((6,), 0)])
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


def test_processed_ones_are_those_of_the_distribution_that_is_drawn_from() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    random = SamplingParams(temperature=0.3, top_k=3, presence_penalty=2.0, logit_bias=((1, 1.0),), logprobs=5)
    greedy = SamplingParams(temperature=0.0, logit_bias=((1, 2.0),), logprobs=9)
    groups = [
        RowGroup(make_spec(random), [1, 3], (2, 3)),
        RowGroup(make_spec(greedy), [1]),
    ]
    sampler = Sampler(9, processed_logprobs=True, on_kernels=True)
    probs = probs_of(sampler, logits, groups).double()
    biased = logits[3].double()
    biased[1] += 2
    chosen = [int(probs[row].argmax()) for row in range(4)]
    runs = [VerifiedRun(tuple(chosen[:3]), 2), VerifiedRun((chosen[3],), 0)]
    reports = sampler.logprobs(logits, groups, runs)
    assert reports[0] is not None
    assert reports[1] is not None
    for row, entry in enumerate(reports[0]):
        assert entry.logprob == pytest.approx(probs[row, chosen[row]].log().item(), rel=1e-4)
        assert len(entry.top) == 3  # what is truncated is not listed
        assert sum(math.exp(value) for _, value in entry.top) == pytest.approx(1.0)
    (entry,) = reports[1]
    assert dict(entry.top) == pytest.approx(dict(enumerate(biased.log_softmax(0).tolist())))


def test_more_than_the_vocabulary_lists_all_of_it() -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, 1.0, 2.0]]), [0], [20])
    assert [i for i, _ in entry.top] == [2, 1, 0]


def test_no_tokens_no_entries() -> None:
    assert token_logprobs(torch.empty(0, 4), [], []) == []


@pytest.mark.parametrize("margin", [1.0, 30.0, 37.0, 60.0, 100.0, 500.0, 740.0])
def test_edge_05_a_certain_looking_token_has_the_logprob_of_what_the_others_weigh(margin: float) -> None:
    logits = torch.tensor([[0.0, margin, 0.0, 0.0]])
    for token, expected in ((1, -math.log1p(3 * math.exp(-margin))), (2, -margin - math.log1p(3 * math.exp(-margin)))):
        (entry,) = token_logprobs(logits, [token], [1])
        assert entry.logprob == pytest.approx(expected, rel=1e-9 if margin < 700 else 0.02, abs=0.0)
        assert entry.top == ((1, pytest.approx(-math.log1p(3 * math.exp(-margin)), rel=0.02, abs=0.0)),)


@pytest.mark.parametrize("margin", [744.0, 745.0, 746.0, 1e4, 1e38])
def test_edge_05_a_weight_that_no_float_holds_is_still_not_nothing(margin: float) -> None:
    (entry,) = token_logprobs(torch.tensor([[margin, 0.0]]), [0], [1])
    assert -1e-322 < entry.logprob < 0.0


def test_only_a_token_without_any_other_has_a_logprob_of_zero() -> None:
    for logits in (torch.tensor([[7.0]]), torch.tensor([[7.0, -torch.inf, -torch.inf]])):
        (entry,) = token_logprobs(logits, [0], [1])
        assert repr(entry.logprob) == "0.0"


def test_equally_likely_tokens_share() -> None:
    (entry,) = token_logprobs(torch.full((1, 8), 90.0), [5], [8])
    assert entry.logprob == pytest.approx(-math.log(8), abs=1e-12)
    assert [value for _, value in entry.top] == pytest.approx([-math.log(8)] * 8, abs=1e-12)


@pytest.mark.parametrize("max_rows", [0, 1, 3, 100])
def test_rows_are_taken_in_slices_of_bounded_size(max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(10, 7, generator=torch.Generator().manual_seed(1))
    tokens, num_top = [i % 7 for i in range(10)], [i % 4 for i in range(10)]
    whole = token_logprobs(logits, tokens, num_top)
    sizes: list[int] = []
    take = module._slice_numbers
    monkeypatch.setattr(module, "_MAX_SLICE_BYTES", max_rows * 7 * 8)
    monkeypatch.setattr(module, "_slice_numbers", lambda rows, *rest: (sizes.append(len(rows)), take(rows, *rest))[1])
    assert token_logprobs(logits, tokens, num_top) == whole
    assert sum(sizes) == 10
    assert max(sizes) == min(10, max(1, max_rows))
