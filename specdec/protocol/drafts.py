"""What a target verifies: draft tokens, and where they are from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from specdec.protocol.messages import Candidates
from specdec.sampling.trees import depths
from specdec.types import Tokens

DraftSource = Literal["", "chain", "branch", "lookup", "prediction", "heads"]
"""What a draft is: none; the chain or a branch of an offer; looked up in the sequence's own text or its prediction; of
heads on the target."""
OFFERED = frozenset[DraftSource](("chain", "branch"))
"""Drafts of a draft model."""


class Draft(NamedTuple):
    """Draft tokens for one verification.

    Attributes:
        tokens: Proposed tokens after the log.
        candidates: Under the rejection rule, what each of them was drawn from; else empty.
        source: What it is.
        parents: Where it is a tree, which of its tokens each one follows, -1 for the log's last; a parent comes before
            its children. Empty for a chain.
    """

    tokens: Tokens = ()
    candidates: tuple[Candidates, ...] = ()
    source: DraftSource = ""
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

    def beside(self, siblings: Sequence[Tokens]) -> Draft:
        """The tree of a chain, and of others in the place of each of its tokens, which nothing follows.

        A sibling was not drawn: under the rejection rule it is told as drawn from itself, given what is before it.

        Args:
            siblings: For each of its tokens, as far as there are any.
        """
        places = [(place, token) for place, others in enumerate(siblings[: len(self.tokens)]) for token in others]
        if not places:
            return self
        others = tuple(token for _, token in places)
        certain = tuple(Candidates((token,), (1.0,)) for token in others)
        return self._replace(
            tokens=self.tokens + others,
            candidates=self.candidates + certain if self.candidates else (),
            parents=(*range(-1, len(self.tokens) - 1), *(place - 1 for place, _ in places)),
        )

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
            tuple(self.candidates[i] for i in places) if self.candidates else (),
            self.source,
            tuple(renumbered.get(self.parents[i], -1) for i in places) if self.parents else (),
        )


NO_DRAFT = Draft()
