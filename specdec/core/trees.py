"""Drafts that are trees: a token and, for each, which it follows; -1 stands for the token before the tree.

Miao et al. 2024, "SpecInfer: Accelerating large language model serving with tree-based speculative inference and
verification", section 4; Cai et al. 2024, "Medusa", section 2.1.2.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

FIRST_KEPT, KEPT_AFTER, RANKS = 0.6, 0.8, (1.0, 0.25, 0.12, 0.07, 0.05, 0.03)
"""How likely a shape takes tokens to be kept: the best one at the first place, each further place by the one before,
and other ranks by the best. They shape trees, and decide no token."""


class Node(NamedTuple):
    """A token of a shape: which one it follows, its place after the log from 0, and its rank among its siblings."""

    parent: int
    place: int
    rank: int


def kept_share(place: int, rank: int) -> float:
    """How often a shape takes a token of this place and rank to be kept where the one it follows was."""
    return FIRST_KEPT * KEPT_AFTER**place * RANKS[min(rank, len(RANKS) - 1)]


def tree_shape(num_tokens: int, num_places: int) -> tuple[Node, ...]:
    """The likeliest ``num_tokens`` tokens of all trees over so many places, the likeliest first."""
    nodes: list[Node] = []
    waiting = [(-kept_share(0, 0), Node(-1, 0, 0))]
    while waiting and len(nodes) < num_tokens:
        value, node = heapq.heappop(waiting)
        parent, place, rank = node
        if rank + 1 < len(RANKS):
            heapq.heappush(waiting, (value * RANKS[rank + 1] / RANKS[rank], Node(parent, place, rank + 1)))
        if place + 1 < num_places:
            heapq.heappush(waiting, (value * kept_share(place + 1, 0), Node(len(nodes), place + 1, 0)))
        nodes.append(node)
    return tuple(nodes)


def chain_shape(num_places: int) -> tuple[Node, ...]:
    """A token at each place."""
    return tuple(Node(place - 1, place, 0) for place in range(num_places))


def nodes_of(parents: Sequence[int]) -> tuple[Node, ...]:
    """The shape of a tree of which it is known what each token follows; siblings rank in their order."""
    num_children: Counter[int] = Counter()
    nodes: list[Node] = []
    for parent, depth in zip(parents, depths(parents), strict=True):
        nodes.append(Node(parent, depth - 1, num_children[parent]))
        num_children[parent] += 1
    return tuple(nodes)


def depths(parents: Sequence[int]) -> list[int]:
    """How many of a tree's tokens there are from its beginning to each one, itself among them."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """A token and all that it follows, first to last."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def children_of(parents: Sequence[int]) -> dict[int, list[int]]:
    """The tokens that follow each one, in order; those that follow none are at -1."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children
