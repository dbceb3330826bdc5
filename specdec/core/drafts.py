"""What a target verifies: draft tokens, where they are from, and what of an offer is left after the log.

Drafts that are trees: a token and, for each, which it follows; -1 stands for the token before the tree.

Miao et al. 2024, "SpecInfer: Accelerating large language model serving with tree-based speculative inference and
verification", section 4; Cai et al. 2024, "Medusa", section 2.1.2.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from specdec.core.log import TokenLog
from specdec.core.messages import Offer, Outcome
from specdec.core.params import SequenceSpec
from specdec.core.types import Tokens

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


OFFERED = frozenset(("chain", "branch"))
"""Sources of drafts of a draft model."""
OF_HEADS = "heads"
"""Source of drafts of heads on the target."""
OFFERS_KEPT = 4
"""Offers per sequence that a target holds at once."""


class Draft(NamedTuple):
    """Draft tokens for one verification.

    Attributes:
        tokens: Proposed tokens after the log.
        source: What it is: empty for none; ``chain`` or ``branch`` of an offer; ``heads``, of heads on the target;
            ``ngram`` or ``prediction``, looked up in the sequence's own text or in its prediction; or the name that
            another token drafter gives.
        parents: Where it is a tree, which of its tokens each one follows, -1 for the log's last; a parent comes before
            its children. Empty for a chain.
    """

    tokens: Tokens = ()
    source: str = ""
    parents: Tokens = ()

    @property
    def depth(self) -> int:
        """Most tokens of it that can be accepted."""
        return max(depths(self.parents)) if self.parents else len(self.tokens)

    def first(self, count: int) -> Draft:
        """Those of its tokens before which there are less than ``count``."""
        if not self.parents:
            return self.only(range(min(max(count, 0), len(self.tokens))))
        return self.only([i for i, depth in enumerate(depths(self.parents)) if depth <= count])

    def chain(self) -> Draft:
        """Of a tree, the first child of each token."""
        if not self.parents:
            return self
        path: list[int] = []
        for i, parent in enumerate(self.parents):
            if parent == (path[-1] if path else -1):
                path.append(i)
        return self.only(path)._replace(parents=())

    def only(self, places: Sequence[int]) -> Draft:
        """Some of its tokens, in order, and all that they follow."""
        if len(places) == len(self.tokens):
            return self
        renumbered = {-1: -1} | {place: i for i, place in enumerate(places)}
        return Draft(
            tuple(self.tokens[i] for i in places),
            self.source,
            tuple(renumbered.get(self.parents[i], -1) for i in places) if self.parents else (),
        )


NO_DRAFT = Draft()
MAX_TREE_TOKENS = 64
"""Most tokens of a tree: attention has a bit of a word for each."""


class DraftChooser(Protocol):
    """Says how much to draft for the most tokens a second; no token depends on it."""

    def begin_step(self) -> None:
        """Count a step of the target."""
        ...

    def length(self, draft: Draft, spec: SequenceSpec, num_rows: int) -> int:
        """Return how many of a draft's first tokens to verify in a step of ``num_rows`` sequences."""
        ...

    def own_length(self, spec: SequenceSpec, num_rows: int) -> int:
        """Return how many tokens the backend itself should draft for a sequence; 0 for none."""
        ...

    def judge(self, draft: Draft, accepted: Tokens, spec: SequenceSpec) -> None:
        """Learn what was accepted of a draft that was verified whole."""
        ...


def remaining_draft(offer: Offer, log: TokenLog) -> Draft:
    """What an offer still proposes after a log; nothing if it does not fit (rule 6).

    Its chain, or the branch of the outcome that has come, must agree with every token committed since.

    Args:
        offer: Of the same sequence.
        log: The committed tokens.
    """
    since, chain = log.since(offer.prefix_hash), offer.chain
    if since is None:
        return NO_DRAFT
    count = len(since)
    if chain[:count] == since:
        return Draft(chain[count:], "chain")
    same = 0
    while same < len(chain) and chain[same] == since[same]:
        same += 1
    return _branch(offer, same, since[same], since[same + 1 :])


def awaits_token(offer: Offer, log: TokenLog) -> bool:
    """Whether a log ends as an offer's chain does, so that a branch of the offer may be left after the next token."""
    length, chain = offer.prefix_hash.length, offer.chain
    if length + len(chain) != len(log) or not log.has(offer.prefix_hash) or log.tail(length) != chain:
        return False
    return any(outcome.num_accepted == len(chain) for outcome, _ in offer.branches)


def foresees(chain: Tokens, branches: Sequence[tuple[Outcome, Tokens]], tokens: Tokens, num_before: int) -> bool | None:
    """Whether the outcome of a round is among those that an offer is prepared for.

    Args:
        chain: Of the offer, whose prefix the log has.
        branches: Of the offer.
        tokens: What was committed since that prefix, up to the end of the round.
        num_before: How many of them were there when the round began.

    Returns:
        None where the offer was not made for that round: the log had left its chain before, or it has no branches.
    """
    if not branches or chain[:num_before] != tokens[:num_before]:
        return None
    if chain[: len(tokens)] == tokens:
        return True
    same = next((i for i, (a, b) in enumerate(zip(chain, tokens, strict=False)) if a != b), len(chain))
    return any(outcome == (same, tokens[same]) for outcome, _ in branches)


def _branch(offer: Offer, num_accepted: int, next_token: int, since: Tokens) -> Draft:
    """What is left of the branch of an outcome after the tokens committed since that."""
    outcome = (num_accepted, next_token)
    for foreseen, chain in offer.branches:
        if foreseen == outcome and chain[: len(since)] == since:
            return Draft(chain[len(since) :], "branch")
    return NO_DRAFT
