"""Every parameter on every row, against plain Python; and what a batch may not change."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.kernels import sample
from specdec.sampling.noise import gumbel
from specdec.sampling.pipeline import RowGroup, Sampler, VerifiedRun
from tests.specdec.hooks import by_row

from .reference import TableModel, edited_row, make_spec, probs_of, random_params, row_probs

VOCAB = 12


def random_group(rng: random.Random, params: SamplingParams) -> RowGroup:
    tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
    spec = make_spec(params, rng.getrandbits(64), output_start=rng.randrange(1, len(tokens) + 1), eos_token_ids=(3,))
    return RowGroup(spec, tokens, tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(6))))


def row_contexts(groups: Sequence[RowGroup]) -> list[tuple[SequenceSpec, list[int]]]:
    return [(group.spec, [*group.tokens, *group.draft[:i]]) for group in groups for i in range(1 + len(group.draft))]


@pytest.mark.parametrize("case", range(40))
def test_probs_of_mixed_batches_are_the_naive_ones(case: int) -> None:
    rng = random.Random(case)
    groups = [
        random_group(rng, random_params(rng, VOCAB, temperature=rng.choice((0.0, 0.6, 1.0, 1.3))))
        for _ in range(rng.randrange(1, 7))
    ]
    contexts = row_contexts(groups)
    logits = torch.randn(len(contexts), VOCAB, generator=torch.Generator().manual_seed(case)) * 3
    before = logits.clone()
    expected = [row_probs(row, *context) for row, context in zip(logits.tolist(), contexts, strict=True)]
    torch.testing.assert_close(probs_of(Sampler(VOCAB), logits, groups), torch.tensor(expected), atol=1e-6, rtol=1e-5)
    assert torch.equal(logits, before)


def test_probs_are_those_of_transformers() -> None:
    bias = ((5, 1.5), (9, -2.0), (40, 0.7))
    params = SamplingParams(repetition_penalty=1.3, temperature=0.7, top_k=60, top_p=0.9, min_p=0.02, logit_bias=bias)
    tokens = [5, 9, 9, 31, 2]
    groups = [RowGroup(make_spec(params, output_start=2), tokens, (17, 5))]
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(4)) * 2
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias}),
            RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
            TemperatureLogitsWarper(params.temperature),
            TopKLogitsWarper(params.top_k),
            TopPLogitsWarper(params.top_p),
            MinPLogitsWarper(params.min_p),
        ]
    )
    expected = [processors(torch.tensor([[*tokens, *groups[0].draft[:i]]]), logits[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(probs_of(Sampler(100), logits, groups), torch.cat(expected).softmax(1))


@pytest.mark.parametrize("case", range(20))
def test_choices_are_the_argmax_of_log_probs_and_noise(case: int) -> None:
    rng = random.Random(case)
    groups = [random_group(rng, random_params(rng, VOCAB, temperature=rng.choice((0.0, 0.6, 1.0)))) for _ in range(8)]
    contexts = row_contexts(groups)
    logits = torch.randn(len(contexts), VOCAB, generator=torch.Generator().manual_seed(case)) * 3
    chosen = Sampler(VOCAB).sample(logits, groups).tolist()
    for token, row, (spec, tokens) in zip(chosen, logits.tolist(), contexts, strict=True):
        scores = torch.tensor(row_probs(row, spec, tokens)).log() + gumbel([spec.seed], [len(tokens)], VOCAB, "cpu")[0]
        assert token == scores.argmax().item()


@pytest.mark.parametrize("feature", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_of_each_row_count_the_drafts_before_it(feature: str) -> None:
    params = SamplingParams(**{feature: 1.5})  # type: ignore[arg-type]
    groups = [
        RowGroup(make_spec(params, output_start=3), [1, 2, 2, 5, 5, 1], (5, 7, 7, 2)),
        RowGroup(make_spec(output_start=1), [4], (4, 4)),
        RowGroup(make_spec(params, output_start=2), [6, 8], (8, 9)),
        RowGroup(make_spec(params, output_start=1), [0]),
    ]
    contexts = row_contexts(groups)
    logits = torch.randn(len(contexts), VOCAB, generator=torch.Generator().manual_seed(3))
    expected = [edited_row(row, *context) for row, context in zip(logits.tolist(), contexts, strict=True)]
    probs = probs_of(Sampler(VOCAB), logits, groups)
    torch.testing.assert_close(probs, torch.tensor(expected).softmax(1))
    without_drafts = probs_of(Sampler(VOCAB), logits[2:3], [groups[0]._replace(draft=())])[0]
    assert not torch.allclose(probs[2], without_drafts)


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    rng = random.Random(8)
    groups = [random_group(rng, random_params(rng, VOCAB)) for _ in range(17)]
    rows = [1 + len(group.draft) for group in groups]
    logits = torch.randn(sum(rows), VOCAB, generator=torch.Generator().manual_seed(8))
    together = Sampler(VOCAB).sample(logits, groups).split(rows)
    for own, group, chosen in zip(logits.split(rows), groups, together, strict=True):
        assert Sampler(VOCAB).sample(own, [group]).tolist() == chosen.tolist()
        # Row by row: what a step without drafts would have computed.
        for i in range(len(own)):
            plain = RowGroup(group.spec, [*group.tokens, *group.draft[:i]])
            assert Sampler(VOCAB).sample(own[i : i + 1], [plain]).tolist() == [chosen[i].item()]


def test_padding_columns_are_never_chosen_and_change_nothing() -> None:
    groups = [RowGroup(make_spec(seed=s), [1], (2,)) for s in range(20)]
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(2))
    padded = torch.cat((logits, torch.full((40, 5), 50.0)), 1)
    sampler = Sampler(VOCAB)
    assert torch.equal(sampler.sample(padded, groups), sampler.sample(logits, groups))
    assert torch.equal(probs_of(sampler, padded, groups), probs_of(sampler, logits, groups))
    asking = [group._replace(spec=make_spec(SamplingParams(logprobs=2))) for group in groups]
    runs = [VerifiedRun((1,), 0)] * 20
    assert sampler.logprobs(padded, asking, runs) == sampler.logprobs(logits, asking, runs)


def test_temperature_0_takes_the_lowest_id_of_a_tie_and_no_truncation_or_noise() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 4.0]])
    for seed in range(5):
        params = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0)
        group = RowGroup(make_spec(params, seed), [0])
        assert Sampler(4).sample(logits, [group]).tolist() == [1]
        assert probs_of(Sampler(4), logits, [group]).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 1e-3])
def test_tiny_temperatures_are_finite_and_near_argmax(temperature: float) -> None:
    group = RowGroup(make_spec(SamplingParams(temperature=temperature), 5), [0])
    logits = torch.tensor([[90.0, 90.5, -1e4, 0.0]])
    assert Sampler(4).sample(logits, [group]).tolist() == [1]
    torch.testing.assert_close(probs_of(Sampler(4), logits, [group]), torch.tensor([[0.0, 1.0, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {0, 1, 2}),
        (SamplingParams(top_p=0.4), {0, 1, 2}),
        (SamplingParams(top_k=1, top_p=0.999), {0}),
        # Among the three that top_k keeps, 0.7 of the mass is in the first two, which the third ties with.
        (SamplingParams(top_k=2, top_p=0.7), {0, 1, 2}),
        (SamplingParams(min_p=0.5), {0, 1, 2}),
        (SamplingParams(top_k=4, min_p=0.1), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.3), {0}),
    ],
)
def test_ties_with_the_last_token_kept_are_kept(params: SamplingParams, kept: set[int]) -> None:
    weights = torch.tensor([0.36, 0.2, 0.2, 0.1, 0.1, 0.02, 0.02])
    probs = probs_of(Sampler(7), weights.log().unsqueeze(0), [RowGroup(make_spec(params), [0])])[0]
    assert {token for token, prob in enumerate(probs.tolist()) if prob > 0} == kept
    torch.testing.assert_close(probs[[*kept]], weights[[*kept]] / weights[[*kept]].sum())


@pytest.mark.parametrize("num_candidates", [1, 3, 50, 300])
def test_top_p_finds_its_tokens_beyond_the_first_candidates(
    num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(top_p=0.01),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.999999),
        SamplingParams(top_p=0.8, top_k=20),
        SamplingParams(top_k=299),
        SamplingParams(min_p=0.2),
    ]
    groups = [RowGroup(make_spec(one), [0]) for one in params]
    expected = torch.tensor(
        [row_probs(row, group.spec, [0]) for row, group in zip(logits.tolist(), groups, strict=True)]
    )
    monkeypatch.setattr(sample, "_NUM_CANDIDATES", num_candidates)
    torch.testing.assert_close(probs_of(Sampler(300), logits, groups), expected, atol=1e-6, rtol=1e-5)


def test_a_row_that_keeps_everything_keeps_it_beside_one_that_does_not() -> None:
    # The last token's share is lost in any float64 sum.
    logits = torch.tensor([[0.0, -1.0, -60.0]]).expand(3, 3)
    params = (SamplingParams(), SamplingParams(min_p=1e-30), SamplingParams(top_p=0.5))
    groups = [RowGroup(make_spec(one), [0]) for one in params]
    assert (probs_of(Sampler(3), logits, groups) > 0).tolist() == [[True] * 3, [True] * 3, [True, False, False]]


class EvenPositionsOnly:
    """Allows the even half of the vocabulary at even positions, and records what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[RowGroup], tuple[int, ...]]] = []

    def __call__(self, groups: Sequence[RowGroup], logits: Tensor) -> Tensor | None:
        self.calls.append((list(groups), tuple(logits.shape)))
        return by_row(self._process)(groups, logits)

    def _process(self, spec: SequenceSpec, tokens: list[int], logits: Tensor) -> Tensor | None:
        if spec.seed == 99:
            return None
        if len(tokens) % 2:
            logits[: VOCAB // 2] = -torch.inf  # in place
            return None
        return logits.masked_fill(torch.arange(VOCAB) % 2 == 1, -torch.inf)


def test_processors_see_all_rows_at_once() -> None:
    processor = EvenPositionsOnly()
    groups = [RowGroup(make_spec(seed=1), [4, 5], (6, 7)), RowGroup(make_spec(seed=99), [8], (9,))]
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    probs = probs_of(Sampler(VOCAB, [processor]), logits, groups)
    assert processor.calls == [(groups, (5, VOCAB))]
    assert torch.equal(logits, before)
    even = torch.arange(VOCAB) % 2 == 0
    assert (probs[[0, 2]] > 0).equal(even.expand(2, -1))
    assert (probs[1] > 0).equal(torch.arange(VOCAB) >= VOCAB // 2)
    torch.testing.assert_close(probs[3:], before[3:].softmax(1))


def test_what_a_processor_gives_must_be_of_the_shape_of_what_it_got() -> None:
    """One row would fit all by broadcasting; each sequence is told, and its rows are as without a processor."""
    groups = [RowGroup(make_spec(seed=seed), [4, 5], (6,)) for seed in range(2)]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(VOCAB, [lambda groups, logits: logits[:1].clone()])
    torch.testing.assert_close(probs_of(sampler, logits, groups), logits.softmax(1))
    failures = sampler.take_failures()
    assert [str(failures[id(group)]) for group in groups] == ["a logits processor gave [1, 12] for [2, 12]"] * 2


def test_processors_come_after_penalties_and_before_truncation() -> None:
    seen: list[Tensor] = []

    def mask_best(groups: Sequence[RowGroup], logits: Tensor) -> Tensor:
        seen.append(logits.clone())
        return logits.index_fill(1, logits[0].argmax(), -torch.inf)

    params = SamplingParams(presence_penalty=2.0, logit_bias=((2, 1.0),), top_k=2)
    logits = torch.tensor([[3.0, 2.5, 1.0, 0.0]])
    probs = probs_of(Sampler(4, [mask_best]), logits, [RowGroup(make_spec(params, output_start=0), [0])])
    assert seen[0].tolist() == [[1.0, 2.5, 2.0, 0.0]]
    assert (probs[0] > 0).tolist() == [True, False, True, False]


def test_a_draft_token_outside_the_vocabulary_disturbs_nothing() -> None:
    model = TableModel(VOCAB, 0)
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5)
    groups = [RowGroup(make_spec(params), [1, 2], (VOCAB + 3, -5))]
    logits = model.rows([RowGroup(make_spec(), [1, 2], (0, 0))])
    probs = probs_of(Sampler(VOCAB), logits, groups)
    torch.testing.assert_close(probs[0], torch.tensor(row_probs(logits[0].tolist(), groups[0].spec, [1, 2])))
    assert torch.isfinite(probs).all()


def test_an_empty_batch_is_an_empty_answer() -> None:
    assert Sampler(VOCAB).sample(torch.empty(0, VOCAB), []).tolist() == []
    assert probs_of(Sampler(VOCAB), torch.empty(0, VOCAB), []).shape == (0, VOCAB)
    assert Sampler(VOCAB).logprobs(torch.empty(0, VOCAB), [], []) == []
