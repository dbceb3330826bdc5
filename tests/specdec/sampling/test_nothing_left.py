"""Rows at the end of what numbers and bans allow: tiny temperatures, and rows in which nothing may be chosen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec.core.errors import InvalidParameterError
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.core.validation import validated
from specdec.sampling.acceptance import propose
from specdec.sampling.pipeline import RowGroup, Sampler
from tests.specdec.hooks import by_row

from .reference import make_spec, probs_of

VOCAB = 6
LOGITS = torch.tensor([[1.0, 4.0, 2.0, 4.0, 0.5, 3.9]])


def decided(sampler: Sampler, group: RowGroup) -> list[int]:
    """The token of one row as the target chooses it, and as the draft proposes it."""
    (proposed,) = propose(sampler, LOGITS, [group], 1)
    return [int(sampler.sample(LOGITS, [group])), proposed.token]


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-39, 1e-7, 9.9e-6])
def test_tiny_temperatures_are_temperature_0(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9)
    assert params.is_greedy
    assert validated(params, VOCAB).temperature == 0.0
    for seed in range(20):
        group = RowGroup(make_spec(params, seed), [0])
        assert decided(Sampler(VOCAB), group) == [1, 1]
        assert probs_of(Sampler(VOCAB), LOGITS, [group]).tolist() == [[0, 1, 0, 0, 0, 0]]


def test_the_least_temperature_still_draws_among_ties() -> None:
    params = SamplingParams(temperature=1e-5)
    assert validated(params, VOCAB).temperature == 1e-5
    seen = {token for seed in range(40) for token in decided(Sampler(VOCAB), RowGroup(make_spec(params, seed), [0]))}
    assert seen == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_bad_words_that_leave_nothing_are_not_applied(temperature: float) -> None:
    """Tokens 2 and 3 are allowed, and after 3 both are forbidden: the row after it is as if there were no bad words."""
    words = ((3, 2), (3, 3))
    params = SamplingParams(temperature=temperature, allowed_token_ids=SharedTokens((2, 3)))
    barred = SamplingParams(temperature=temperature, allowed_token_ids=SharedTokens((2, 3)), bad_words=words)
    for seed in range(20):
        after = {seen: decided(Sampler(VOCAB), RowGroup(make_spec(barred, seed), [0, seen])) for seen in (2, 3)}
        free = decided(Sampler(VOCAB), RowGroup(make_spec(params, seed), [0, 3]))
        assert after[3] == free
        assert set(after[2]) <= {2, 3}
    # Drafted tokens count as the output's do: the row after the draft token 3 has the ban, and the first row has not.
    group = RowGroup(make_spec(SamplingParams(bad_words=((3, 1),)), 1), [0], (3,))
    assert (probs_of(Sampler(VOCAB), LOGITS.expand(2, -1), [group])[:, 1] > 0).tolist() == [True, False]


def test_min_tokens_needs_an_allowed_token_that_does_not_end_the_text() -> None:
    with pytest.raises(InvalidParameterError, match="min_tokens must be 0"):
        validated(
            SamplingParams(allowed_token_ids=SharedTokens((3, 4)), min_tokens=1, stop_token_ids=(4,)), VOCAB, (3,)
        )


class Forbids:
    """Makes rows unusable from position 1 on: by -inf everywhere, or with one value."""

    def __init__(self, value: float, everywhere: bool) -> None:
        self.value = value
        self.everywhere = everywhere

    def __call__(self, groups: Sequence[RowGroup], logits: Tensor) -> None:
        logits[:, : None if self.everywhere else 1] = self.value


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("processor", [Forbids(-torch.inf, True), Forbids(torch.nan, False), Forbids(torch.inf, False)])
def test_a_row_that_processors_leave_nothing_of_is_drawn_without_them(processor: Forbids, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, min_tokens=5, logit_bias=((2, 1.0),), frequency_penalty=0.5, stop_token_ids=(1,)
    )
    for seed in range(30):
        group = RowGroup(make_spec(params, seed), [0, 3])
        tokens = decided(Sampler(VOCAB, [processor]), group)
        assert tokens == decided(Sampler(VOCAB), group)
        assert 1 not in tokens


def test_only_the_row_with_nothing_left_is_drawn_without_processors() -> None:
    @by_row
    def only_token_4_then_nothing(spec: SequenceSpec, tokens: list[int], logits: Tensor) -> Tensor:
        allowed = torch.full_like(logits, -torch.inf)
        allowed[4] = 0.0 if len(tokens) < 2 else -torch.inf
        return allowed

    group = RowGroup(make_spec(), [0], (4, 4))
    probs = probs_of(Sampler(VOCAB, [only_token_4_then_nothing]), LOGITS.expand(3, -1), [group])
    assert probs[0].tolist() == [0, 0, 0, 0, 1, 0]
    torch.testing.assert_close(probs[1:], LOGITS.softmax(1).expand(2, -1))


def test_min_tokens_forbids_nothing_where_every_token_ends() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=tuple(range(VOCAB - 1)))
    groups = [RowGroup(make_spec(params, eos_token_ids=eos), [0]) for eos in ((VOCAB - 1, VOCAB + 7), (1,))]
    probs = probs_of(Sampler(VOCAB), LOGITS.expand(2, -1), groups)
    torch.testing.assert_close(probs[:1], LOGITS.softmax(1))
    assert probs[1].tolist() == [0, 0, 0, 0, 0, 1]


def test_min_tokens_is_refused_where_every_token_ends() -> None:
    stops = SamplingParams(min_tokens=3, stop_token_ids=tuple(range(VOCAB)))
    most = SamplingParams(min_tokens=3, stop_token_ids=tuple(range(VOCAB - 1)))
    for params, eos in ((stops, ()), (most, (VOCAB - 1,))):
        with pytest.raises(InvalidParameterError, match="min_tokens must be 0 where every token ends") as caught:
            validated(params, VOCAB, eos)
        assert caught.value.parameter == "min_tokens"
    for params, eos in (
        (most, ()),
        (most, (VOCAB, VOCAB + 1)),
        (SamplingParams(min_tokens=3, stop_token_ids=most.stop_token_ids, ignore_eos=True), (VOCAB - 1,)),
        (SamplingParams(stop_token_ids=stops.stop_token_ids), ()),
    ):
        assert validated(params, VOCAB, eos) == params
