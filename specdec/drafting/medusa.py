"""Drafts of heads on the target, for the next round of each sequence that a step has decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.core.drafts import NO_DRAFT, Draft
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenBuffer, TokenSequence
from specdec.core.trees import chain_shape, tree_shape
from specdec.drafting.medusa_heads import DraftHeads
from specdec.sampling.acceptance import Drawn, propose_siblings
from specdec.sampling.pipeline import RowGroup, Sampler


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """Which heads are on a target, and how far they draft.

    Attributes:
        path: Local folder or hub id.
        most_tokens: Draft tokens in a row, at most, where the request names no bound of its own.
        tree_tokens: Tokens of a draft that is a tree; with no more than are in a row it is a chain.
    """

    path: str
    most_tokens: int
    tree_tokens: int = 0


class HeadDrafter:
    """Draws from each head in turn, by the rule and the parameters of its sequence: a token, or several for a tree.

    Args:
        heads: Give logits for the positions after the next token.
        sampler: Of the target: what it may not say is not drafted.
        most_tokens: As in :class:`HeadsOptions`.
        tree_tokens: As there.
    """

    def __init__(self, heads: DraftHeads, sampler: Sampler, most_tokens: int, tree_tokens: int = 0) -> None:
        self._heads = heads
        self._sampler = sampler
        self._most = min(most_tokens, heads.num_tokens)
        self._shape = tree_shape(tree_tokens, self._most) if tree_tokens > self._most > 0 else chain_shape(self._most)
        self._most = 1 + max((node.place for node in self._shape), default=-1)
        ranks = {(node.place, node.rank) for node in self._shape}
        self._num_ranks = [sum(place == at for place, _ in ranks) for at in range(self._most)]

    def drafts(self, hidden: torch.Tensor, decided: Sequence[tuple[SequenceSpec, TokenSequence]]) -> list[Draft]:
        """A draft for each sequence; the heads know its last token only by what made the model choose it.

        Args:
            hidden: [R, hidden size], from which each sequence's last token was chosen.
            decided: R sequences: parameters, and all committed tokens.
        """
        drafts = [NO_DRAFT] * len(decided)
        counts = [self._count(spec) for spec, _ in decided]
        drafting = [i for i, count in enumerate(counts) if count]
        if not drafting:
            return drafts
        logits = self._heads.logits(hidden[drafting] if len(drafting) < len(decided) else hidden)
        texts = {i: TokenBuffer(decided[i][1]) for i in drafting}
        places: list[list[list[Drawn]]] = [[] for _ in drafting]
        for of_head, num_ranks in zip(logits, self._num_ranks[: max(counts)], strict=False):
            groups = [RowGroup(decided[i][0], texts[i].array) for i in drafting]
            # Heads that overflow draft badly, and no more: what they were drawn from stays a distribution.
            siblings = propose_siblings(self._sampler, of_head.nan_to_num(0.0), groups, num_ranks)
            for i, of_row, drawn in zip(drafting, places, siblings, strict=True):
                texts[i].append(drawn[0].token)
                of_row.append(drawn)
        self._sampler.take_failures()  # what a hook made of a draft fails no sequence
        for i, of_row in zip(drafting, places, strict=True):
            drafts[i] = self._shaped(of_row[: counts[i]])
        return drafts

    def _shaped(self, places: list[list[Drawn]]) -> Draft:
        """The shape's tokens, as far as there are heads and candidates; which ones depends on no token drawn."""
        numbers, parents = {-1: -1}, list[int]()
        drawn: list[Drawn] = []
        for number, node in enumerate(self._shape):
            if node.parent in numbers and node.place < len(places) and node.rank < len(places[node.place]):
                numbers[number] = len(drawn)
                parents.append(numbers[node.parent])
                drawn.append(places[node.place][node.rank])
        candidates = tuple(one.candidates for one in drawn if one.candidates is not None)
        is_chain = parents == list(range(-1, len(parents) - 1))
        return Draft(tuple(one.token for one in drawn), candidates, "heads", () if is_chain else tuple(parents))

    def _count(self, spec: SequenceSpec) -> int:
        bound = spec.num_speculative_tokens
        return self._most if bound is None else min(bound, self._most)
