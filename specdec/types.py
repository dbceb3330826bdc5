"""The words that every package uses: tokens, how a sequence ends, ways of speculating, weights, log probabilities."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import Literal

import numpy as np
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


class PackedLogprobs(Struct, frozen=True, array_like=True):
    """Log probabilities of a prompt as little-endian arrays: N entries are passed on without being looked at.

    Attributes:
        num_top: Most likely tokens of an entry, at most.
        logprobs: float64 [N].
        ranks: int32 [N]; 0 for an entry that is None.
        top_ids: int32 [N, num_top]; -1 where there are fewer.
        top_logprobs: float64 [N, num_top].
    """

    num_top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    def __len__(self) -> int:
        return len(self.ranks) // 4

    @classmethod
    def pack(cls, entries: PromptLogprobs) -> PackedLogprobs:
        """Of one entry per token."""
        num_top = max((len(entry.top) for entry in entries if entry is not None), default=0)
        empty = TokenLogprobs(0.0, 0)
        told = [empty if entry is None else entry for entry in entries]
        ids = np.full((len(told), num_top), -1, dtype="<i4")
        values = np.zeros((len(told), num_top), dtype="<f8")
        counts = np.array([len(entry.top) for entry in told], dtype="<i4")
        pairs = list(chain.from_iterable(entry.top for entry in told))
        is_told = np.arange(num_top) < counts[:, None]
        ids[is_told] = np.fromiter(map(itemgetter(0), pairs), "<i4", len(pairs))
        values[is_told] = np.fromiter(map(itemgetter(1), pairs), "<f8", len(pairs))
        return cls(
            num_top,
            np.array([entry.logprob for entry in told], dtype="<f8").tobytes(),
            np.array([entry.rank for entry in told], dtype="<i4").tobytes(),
            ids.tobytes(),
            values.tobytes(),
        )

    def unpack(self) -> PromptLogprobs:
        """One entry per token: some microseconds each."""
        ids = np.frombuffer(self.top_ids, dtype="<i4").reshape(len(self), self.num_top)
        values = np.frombuffer(self.top_logprobs, dtype="<f8").reshape(len(self), self.num_top)
        counts = (ids >= 0).sum(1).tolist()
        logprobs = np.frombuffer(self.logprobs, dtype="<f8").tolist()
        ranks = np.frombuffer(self.ranks, dtype="<i4").tolist()
        tops = (
            tuple(zip(of[:count], by[:count], strict=True))
            for of, by, count in zip(ids.tolist(), values.tolist(), counts, strict=True)
        )
        rows = zip(logprobs, ranks, tops, strict=True)
        return tuple(TokenLogprobs(logprob, rank, top) if rank else None for logprob, rank, top in rows)


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
