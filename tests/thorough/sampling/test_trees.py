"""Drafts that are trees, by the rules: without bias, and no token of the coupled rule changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

import specdec.sampling.rejection as rejection_module
from specdec.core.drafts import Node, chain_shape, children_of, depths, path_to, tree_shape
from specdec.core.params import SamplingParams
from specdec.sampling.acceptance import propose_siblings, verify
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.sampling.rejection import propose_several, verify_rejection
from tests.sizes import sized
from tests.specdec.sampling.reference import make_spec

VOCAB = 6
NUM_DRAWS = sized(20_000, 200_000)
FEW_DRAWS = sized(20_000, 40_000)
PARENTS = (-1, -1, 0, 0, 1, 2, -1, 5)
"""Up to three children, four deep."""
SIBLINGS = children_of(PARENTS)
RANKS = [SIBLINGS[parent].index(node) for node, parent in enumerate(PARENTS)]
SAMPLER = Sampler(VOCAB)


def table(seed: int, spread: float = 1.0) -> Tensor:
    """A model of order one: logits by the last token."""
    return spread * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def drafted(
    target: Tensor, draft: Tensor, seeds: Sequence[int], rule: str, temperature: float
) -> tuple[list[RowGroup], Tensor, list[tuple]]:
    """Trees of which each place's tokens are drawn for all parents at once, as heads do; and the target's rows."""
    params = SamplingParams(temperature=temperature, acceptance=rule)
    groups = [RowGroup(make_spec(params, seed=seed), [seed % VOCAB]) for seed in seeds]
    places = []
    for place in range(max(depths(PARENTS))):
        at = [RowGroup(group.spec, [*group.tokens, *[0] * place]) for group in groups]
        logits = draft[[(group.tokens[0] + place) % VOCAB for group in groups]]
        places.append(propose_siblings(SAMPLER, logits, at, 3))
    result, candidates = [], []
    for i, group in enumerate(groups):
        drawn = [places[depth - 1][i][rank] for rank, depth in zip(RANKS, depths(PARENTS), strict=True)]
        result.append(RowGroup(group.spec, group.tokens, tuple(one.token for one in drawn), parents=PARENTS))
        candidates.append(tuple(one.candidates for one in drawn if one.candidates is not None))
    rows = torch.cat([target[[group.tokens[-1], *group.draft]] for group in result])
    return result, rows, candidates


def p_value(num_draws: int = NUM_DRAWS) -> float:
    """Chi-square of the first token of runs, and of the second where the first was drafted, given the one before."""
    target, draft = table(1).softmax(1), table(2)
    params = SamplingParams(acceptance="rejection")
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    seeds = num_accepted = num_by_others = 0
    while counts.sum() < num_draws:
        specs = [make_spec(params, seed=seed) for seed in range(seeds, seeds + min(num_draws, 20_000))]
        seeds += len(specs)
        before = torch.arange(len(specs)) % VOCAB
        drafts = []
        for place in range(max(depths(PARENTS))):
            at = [RowGroup(spec, [0] * (1 + place)) for spec in specs]
            drafts.append(propose_several(SAMPLER, draft[(before + place) % VOCAB], at, 3))
        nodes = [drafts[depth - 1][rank] for depth, rank in zip(depths(PARENTS), RANKS, strict=True)]
        tokens, ids, probs = (torch.stack(parts, 1) for parts in zip(*nodes, strict=True))
        drawn = zip(specs, tokens.tolist(), strict=True)
        groups = [RowGroup(spec, [0], tuple(row), parents=PARENTS) for spec, row in drawn]
        rows = target[torch.cat((before.unsqueeze(1), tokens), 1).flatten()]
        runs = verify_rejection(rows, groups, ids.flatten(0, 1), probs.flatten(0, 1))
        firsts = torch.tensor([run.run[0] for run in runs])
        pairs = [before * VOCAB + firsts, torch.tensor([run.run[0] * VOCAB + run.run[1] for run in runs if run.path])]
        counts += torch.bincount(torch.cat(pairs), minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)
        num_accepted += sum(run.num_accepted for run in runs)
        num_by_others += sum(run.path[:1] not in ((), (0,)) for run in runs)
    assert min(num_accepted, num_by_others) > num_draws / 20
    expected = counts.sum(1, keepdim=True) * target.double()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, VOCAB * (VOCAB - 1)))


def test_the_rejection_rule_gives_the_targets_distribution() -> None:
    assert p_value() > 1e-3


def test_tests_that_are_passed_too_often_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = rejection_module.uniforms

    def smaller(*arguments: object) -> Tensor:
        numbers = known(*arguments)
        num_tests = numbers.shape[1] // 2
        numbers[:, :num_tests] *= sized(0.92, 0.98)
        return numbers

    monkeypatch.setattr(rejection_module, "uniforms", smaller)
    assert p_value() < 1e-3


def test_a_refused_sibling_that_leaves_the_target_as_it_was_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_module, "_residual", lambda target_probs, _ids, _probs: target_probs)
    assert p_value(FEW_DRAWS) < 1e-6


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_walks_end_where_the_chain_of_their_path_would(rule: str, temperature: float) -> None:
    """By the coupled rule, and with temperature 0, at the tokens of plain decoding; other ranks are taken as well."""
    target, draft = table(1), table(1) + 0.5 * table(2)
    groups, rows, candidates = drafted(target, draft, range(400), rule, temperature)
    paths = set()
    for group, run in zip(groups, verify(SAMPLER, rows, groups, candidates), strict=True):
        paths.add(run.path)
        if rule == "rejection" and temperature:
            continue
        tokens = list(group.tokens)
        for token in run.run:
            chosen = SAMPLER.sample(target[tokens[-1:]], [RowGroup(group.spec, tokens)])
            assert token == int(chosen)
            tokens.append(token)
        ended = path_to(PARENTS, run.path[-1]) if run.path else []
        assert list(run.path) == ended
        assert run.run[-1] not in [group.draft[i] for i in children_of(PARENTS).get((run.path or (-1,))[-1], ())]
    assert len(paths) > 3


def test_a_tree_of_one_path_is_decided_as_a_chain_is_by_the_same_numbers() -> None:
    params, target, draft = SamplingParams(acceptance="rejection"), table(1), table(2)
    groups, ids, probs = [], [], []
    for seed in range(300):
        group = RowGroup(make_spec(params, seed=seed), [seed % VOCAB])
        for place in range(3):
            at = RowGroup(group.spec, [*group.tokens, *group.draft])
            drawn = propose_siblings(SAMPLER, draft[[place]], [at], 1)[0][0]
            group = RowGroup(group.spec, group.tokens, (*group.draft, drawn.token))
            ids.append(drawn.candidates.ids)
            probs.append(drawn.candidates.probs)
        groups.append(group)
    rows = torch.cat([target[[group.tokens[-1], *group.draft]] for group in groups]).softmax(1)
    drawn_from = torch.tensor(ids), torch.tensor(probs)
    as_chains = verify_rejection(rows, groups, *drawn_from)
    trees = [group._replace(parents=(-1, 0, 1)) for group in groups]
    as_trees = verify_rejection(rows, trees, *drawn_from)
    assert [run[:2] for run in as_trees] == [run[:2] for run in as_chains]
    assert len({run.num_accepted for run in as_trees}) == 4


def test_siblings_are_different_and_told_with_what_was_left() -> None:
    params = SamplingParams(acceptance="rejection")
    groups = [RowGroup(make_spec(params, seed=seed), [0]) for seed in range(50)]
    for drawn in propose_siblings(SAMPLER, table(3)[[0] * 50], groups, VOCAB + 2):
        assert sorted(one.token for one in drawn[:VOCAB]) == list(range(VOCAB))
        # Nothing was left for more; they are there, so that a tree's shape tells nothing of its tokens.
        assert [sum(one.candidates.probs) for one in drawn[VOCAB:]] == [0, 0]
        for number, one in enumerate(drawn[:VOCAB]):
            assert sum(one.candidates.probs) == pytest.approx(1)
            said = dict(zip(*one.candidates, strict=True))
            assert all(said[earlier.token] == 0 for earlier in drawn[:number])
            assert said[one.token] > 0


def test_shapes_begin_with_the_likeliest_and_parents_come_first() -> None:
    assert chain_shape(3) == (Node(-1, 0, 0), Node(0, 1, 0), Node(1, 2, 0))
    shape = tree_shape(24, 4)
    assert len(shape) == len(set(shape)) == 24
    assert all(node.parent < i for i, node in enumerate(shape))
    for node in shape:
        assert node.place == (0 if node.parent < 0 else shape[node.parent].place + 1)
    assert {node.place for node in shape} == {0, 1, 2, 3}
    assert tree_shape(10, 4) == shape[:10]
