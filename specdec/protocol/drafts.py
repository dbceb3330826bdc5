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
