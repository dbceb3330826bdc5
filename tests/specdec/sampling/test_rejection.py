"""The classical rule: what it keeps, what it draws instead, and what it was drawn from."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from specdec.core.params import SamplingParams
from specdec.sampling import rejection as module
from specdec.sampling.noise import Purpose, uniforms
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.sampling.rejection import NUM_DRAFT_CANDIDATES, propose_truncated, verify_rejection

from .reference import TableModel, make_spec, random_params

VOCAB = 40


def drafted(
    sampler: Sampler, model: TableModel, groups: list[RowGroup], num_tokens: int
) -> tuple[list[RowGroup], Tensor, Tensor]:
    """The groups with chains of their own from ``model``, and the chains' ids and probabilities, in order."""
    chains: list[tuple[int, ...]] = [()] * len(groups)
    ids, probs = [], []
    for _ in range(num_tokens):
        heads = [RowGroup(g.spec, [*g.tokens, *chain]) for g, chain in zip(groups, chains, strict=True)]
        draft = propose_truncated(sampler, model.rows(heads), heads)
        chains = [(*chain, token) for chain, token in zip(chains, draft.tokens.tolist(), strict=True)]
        ids.append(draft.ids)
        probs.append(draft.probs)
    with_drafts = [RowGroup(g.spec, g.tokens, chain) for g, chain in zip(groups, chains, strict=True)]
    return with_drafts, torch.stack(ids, 1).flatten(0, 1), torch.stack(probs, 1).flatten(0, 1)


def naive_run(group: RowGroup, target: list[list[float]], ids: list[list[int]], probs: list[list[float]]) -> list[int]:
    """The rule for one sequence, token by token."""
    positions = range(len(group.tokens), len(group.tokens) + len(target))
    uniform = uniforms([group.spec.seed] * len(target), positions, Purpose.TARGET, "cpu").tolist()
    weights = target[-1]
    run = list(group.draft)
    for i, token in enumerate(group.draft):
        draft = dict(zip(ids[i], probs[i], strict=True))
        if not uniform[i][0] < target[i][token] / draft[token]:
            weights = [max(0.0, prob - draft.get(t, 0.0)) for t, prob in enumerate(target[i])]
            weights = weights if sum(weights) > 0 else target[i]
            run = run[:i]
            break
    goal, mass = uniform[len(run)][1] * sum(weights), 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if mass > goal:
            return [*run, token]
    raise AssertionError


@pytest.mark.parametrize("case", range(20))
def test_runs_are_those_of_the_rule_written_out(case: int) -> None:
    rng, sampler = random.Random(case), Sampler(VOCAB)
    model, draft_model = TableModel(VOCAB, case), TableModel(VOCAB, case)
    draft_model.table = model.table + TableModel(VOCAB, 99).table * rng.choice((0.0, 0.2, 0.5))
    params = [random_params(rng, VOCAB, temperature=rng.choice((0.0, 0.7, 1.0))) for _ in range(10)]
    groups = [RowGroup(make_spec(one, rng.getrandbits(64)), [rng.randrange(VOCAB)]) for one in params]
    groups, ids, probs = drafted(sampler, draft_model, groups, 4)
    # Drafts of unequal length.
    lengths = [rng.randrange(5) for _ in groups]
    keep = [i * 4 + j for i, length in enumerate(lengths) for j in range(length)]
    groups = [RowGroup(g.spec, g.tokens, g.draft[:length]) for g, length in zip(groups, lengths, strict=True)]
    ids, probs = ids[keep], probs[keep]
    target = sampler.probs(model.rows(groups), groups)
    results = verify_rejection(target, groups, ids, probs)
    for group, result, own_target, own_ids, own_probs in zip(
        groups,
        results,
        target.double().split([1 + length for length in lengths]),
        ids.split(lengths),
        probs.double().split(lengths),
        strict=True,
    ):
        assert list(result.run) == naive_run(group, own_target.tolist(), own_ids.tolist(), own_probs.tolist())
        assert result.num_accepted == len(result.run) - 1


def test_a_draft_is_cut_to_its_most_likely_tokens_before_it_is_drawn() -> None:
    sampler, model = Sampler(VOCAB), TableModel(VOCAB, 3, spread=0.1)
    groups = [RowGroup(make_spec(seed=seed), [7]) for seed in range(3000)]
    draft = propose_truncated(sampler, model.rows(groups), groups)
    full = model.row([7]).softmax(0)
    best = full.topk(NUM_DRAFT_CANDIDATES)
    assert draft.ids.shape == draft.probs.shape == (3000, NUM_DRAFT_CANDIDATES)
    assert draft.ids[0].tolist() == best.indices.tolist()
    torch.testing.assert_close(draft.probs[0], best.values / best.values.sum())
    assert set(draft.tokens.tolist()) == set(best.indices.tolist())


def test_no_drafts_is_plain_sampling_and_depends_only_on_seed_and_position() -> None:
    model, sampler = TableModel(VOCAB, 0), Sampler(VOCAB)
    groups = [RowGroup(make_spec(seed=seed), [3, 1][:length]) for seed in range(50) for length in (1, 2)]
    nothing = (torch.empty(0, 32, dtype=torch.int64), torch.empty(0, 32))
    together = verify_rejection(sampler.probs(model.rows(groups), groups), groups, *nothing)
    assert {result.num_accepted for result in together} == {0}
    for group, result in zip(groups, together, strict=True):
        assert verify_rejection(sampler.probs(model.rows([group]), [group]), [group], *nothing) == [result]
    assert len({result.run for result in together}) > 10


def test_temperature_0_is_argmax_equality() -> None:
    model, sampler = TableModel(VOCAB, 5), Sampler(VOCAB)
    params = SamplingParams(temperature=0.0)
    plain = [6]
    for _ in range(4):
        plain.append(int(model.row(plain).argmax()))
    for wrong in range(4):
        draft = [*plain[1:4]]
        if wrong < 3:
            draft[wrong] = (draft[wrong] + 1) % VOCAB
        for seed in range(5):
            group = RowGroup(make_spec(params, seed), [6], tuple(draft))
            ids = torch.tensor([[token, (token + 5) % VOCAB] for token in draft])
            target = sampler.probs(model.rows([group]), [group])
            (result,) = verify_rejection(target, [group], ids, torch.tensor([[1.0, 0.0]] * 3))
            assert (list(result.run), result.num_accepted) == (plain[1 : wrong + 2], wrong)


@pytest.mark.parametrize(
    ("ids", "probs"),
    [
        ([5, -7], [1.0, 0.5]),
        ([5, VOCAB], [0.5, 0.5]),
        ([3, 5], [float("nan"), 1.0]),
        ([3, 5], [-1.0, 1.0]),
        ([5, 6], [0.5, 0.5]),
        ([3, 3], [float("inf"), float("nan")]),
    ],
)
def test_a_draft_that_says_it_was_not_drawn_is_dropped_and_the_position_decoded_plainly(
    ids: list[int], probs: list[float]
) -> None:
    model, sampler = TableModel(VOCAB, 1), Sampler(VOCAB)
    for seed in range(30):
        bare = RowGroup(make_spec(seed=seed), [2])
        group = RowGroup(bare.spec, [2], (3, 3))
        target = sampler.probs(model.rows([group]), [group])
        (result,) = verify_rejection(target, [group], torch.tensor([ids, ids]), torch.tensor([probs, probs]))
        nothing = (torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
        assert [result] == verify_rejection(target[:1], [bare], *nothing)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("-inf")])
def test_what_is_no_probability_counts_as_none(wrong: float) -> None:
    model, sampler = TableModel(VOCAB, 1), Sampler(VOCAB)
    groups = [RowGroup(make_spec(seed=seed), [2], (3,)) for seed in range(300)]
    target = sampler.probs(model.rows(groups), groups)
    ids = torch.tensor([[3, 5]]).expand(300, 2)
    expected, results = (
        verify_rejection(target, groups, ids, torch.tensor([[1.0, prob]]).expand(300, 2)) for prob in (0.0, wrong)
    )
    assert results == expected


def test_a_draft_token_outside_the_vocabulary_is_dropped() -> None:
    model, sampler = TableModel(VOCAB, 1), Sampler(VOCAB)
    for token in (VOCAB, VOCAB + 100, -1):
        group = RowGroup(make_spec(), [2], (token,))
        target = sampler.probs(model.rows([RowGroup(make_spec(), [2], (0,))]), [group])
        (result,) = verify_rejection(target, [group], torch.tensor([[token, 1]]), torch.tensor([[1.0, 0.0]]))
        assert result.num_accepted == 0
        assert 0 <= result.run[0] < VOCAB


def test_rule_9_a_bonus_is_drawn_at_once_and_with_numbers_no_ratio_test_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Purpose]] = []
    monkeypatch.setattr(
        module,
        "uniforms",
        lambda seeds, positions, purpose, device, *more: (
            asked.extend((position, purpose) for position in positions)
            or uniforms(seeds, positions, purpose, device, *more)
        ),
    )
    model, sampler = TableModel(VOCAB, 1), Sampler(VOCAB)
    groups, ids, probs = drafted(sampler, model, [RowGroup(make_spec(seed=s), [1]) for s in range(20)], 3)
    results = verify_rejection(sampler.probs(model.rows(groups), groups), groups, ids, probs)
    # The draft is the target's own: all is accepted but for what the cut to 32 leaves out, and a bonus follows.
    full = [result for result in results if result.num_accepted == 3]
    assert len(full) > 10
    assert all(len(result.run) == 4 for result in full)
    assert {purpose for _, purpose in asked} == {Purpose.DRAFT, Purpose.TARGET}
    assert sorted({position for position, purpose in asked if purpose is Purpose.TARGET}) == [1, 2, 3, 4]
