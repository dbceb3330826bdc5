"""Drafts that are trees change no token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec.core.drafts import Node, chain_shape, children_of, depths, path_to, tree_shape
from specdec.core.params import SamplingParams
from specdec.sampling.acceptance import decide, propose
from specdec.sampling.pipeline import RowGroup, Sampler
from tests.specdec.sampling.reference import make_spec

VOCAB = 6
PARENTS = (-1, -1, 0, 0, 1, 2, -1, 5)
"""Up to three children, four deep."""
SIBLINGS = children_of(PARENTS)
RANKS = [SIBLINGS[parent].index(node) for node, parent in enumerate(PARENTS)]
SAMPLER = Sampler(VOCAB)


def table(seed: int, spread: float = 1.0) -> Tensor:
    """A model of order one: logits by the last token."""
    return spread * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def drafted(target: Tensor, draft: Tensor, seeds: Sequence[int], temperature: float) -> tuple[list[RowGroup], Tensor]:
    """Trees of which each place's tokens are drawn for all parents at once, as heads do; and the target's rows."""
    params = SamplingParams(temperature=temperature)
    groups = [RowGroup(make_spec(params, seed=seed), [seed % VOCAB]) for seed in seeds]
    places = []
    for place in range(max(depths(PARENTS))):
        at = [RowGroup(group.spec, [*group.tokens, *[0] * place]) for group in groups]
        logits = draft[[(group.tokens[0] + place) % VOCAB for group in groups]]
        places.append([(one.token, *one.guesses) for one in propose(SAMPLER, logits, at, 2)])
    result = []
    for i, group in enumerate(groups):
        drawn = tuple(places[depth - 1][i][rank] for rank, depth in zip(RANKS, depths(PARENTS), strict=True))
        result.append(RowGroup(group.spec, group.tokens, drawn, parents=PARENTS))
    return result, torch.cat([target[[group.tokens[-1], *group.draft]] for group in result])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_walks_give_the_tokens_of_plain_decoding(temperature: float) -> None:
    """They end where the chain of their path would; other ranks are taken as well."""
    target = table(1)
    groups, rows = drafted(target, target + 0.5 * table(2), range(400), temperature)
    paths = set()
    for group, run in zip(groups, decide(SAMPLER, rows, groups).runs, strict=True):
        paths.add(run.path)
        tokens = list(group.tokens)
        for token in run.run:
            chosen = SAMPLER.sample(target[tokens[-1:]], [RowGroup(group.spec, tokens)])
            assert token == int(chosen)
            tokens.append(token)
        ended = path_to(PARENTS, run.path[-1]) if run.path else []
        assert list(run.path) == ended
        assert run.run[-1] not in [group.draft[i] for i in children_of(PARENTS).get((run.path or (-1,))[-1], ())]
    assert len(paths) > 3


def test_shapes_begin_with_the_likeliest_and_parents_come_first() -> None:
    assert chain_shape(3) == (Node(-1, 0, 0), Node(0, 1, 0), Node(1, 2, 0))
    shape = tree_shape(24, 4)
    assert len(shape) == len(set(shape)) == 24
    assert all(node.parent < i for i, node in enumerate(shape))
    for node in shape:
        assert node.place == (0 if node.parent < 0 else shape[node.parent].place + 1)
    assert {node.place for node in shape} == {0, 1, 2, 3}
    assert tree_shape(10, 4) == shape[:10]
