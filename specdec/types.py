"""The words that every package uses: tokens, how a sequence ends, ways of speculating, weights, log probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

Tokens = tuple[int, ...]

Finish = Literal["stop", "length", "error"]
"""How a sequence ends. ``error`` is as final as the others, and comes with a reason."""

Way = Literal["off", "in_turn", "overlap", "outcomes"]
"""A way of speculating: none; draft, then verify; draft along the accepted path while the target verifies; draft for
the likely outcomes of the running verification beside that, a branch each."""

Progress = Callable[[str], None]
"""Is given a line of progress now and then."""

Quantization = Literal["none", "int8", "int4", "fp8"]
"""A model's weights: as its checkpoint has them, or in fewer bits."""


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log probabilities at one position, from the target's own row.

    Attributes:
        logprob: Of the token that stands there.
        rank: Of that token, 1 being the most likely.
        top: Pairs (token id, log probability), most likely first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


PromptLogprobs = tuple[TokenLogprobs | None, ...]
"""One entry per prompt token; None for the first, which nothing foretold."""


class Adapter(Struct, frozen=True, array_like=True):
    """A LoRA checkpoint, as sequences name it. Whoever lacks it loads it from its path.

    Attributes:
        name: By which requests ask for it.
        path: Hub id, or a folder on every machine with a model.
        fingerprint: Of its content: what lies at the path must have it.
    """

    name: str
    path: str
    fingerprint: str


class Fingerprints(Struct, frozen=True):
    """What a process serves, for peers to compare (rule 14); empty texts are compared with nothing.

    Attributes:
        decision: Everything that decides tokens.
        vocabulary: What the token ids mean; a drafter needs no more.
        draft: Everything that decides tokens where the draft itself is asked; empty where there is none.
    """

    decision: str = ""
    vocabulary: str = ""
    draft: str = ""

    def deciding(self, model: Literal["target", "draft"]) -> str:
        """Of what decides the tokens of sequences of a model."""
        return self.decision if model == "target" else self.draft


UNKNOWN = Fingerprints()
"""Of whoever says nothing of its models: nothing is compared."""
