"""The words that every package uses: tokens, how a sequence ends, speculation modes, weights, log probabilities."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Literal

import numpy as np
from msgspec import Struct

Tokens = tuple[int, ...]

Finish = Literal["stop", "length", "error"]
"""How a sequence ends. ``error`` is as final as the others, and comes with a reason."""

SpeculationMode = Literal["off", "sequential", "overlap", "outcomes"]
"""A speculation mode: none; draft, then verify; draft along the accepted path while the target verifies; draft for
the likely outcomes of the running verification beside that, a branch each."""

Progress = Callable[[str], None]
"""Is given a line of progress now and then."""

Quantization = Literal["none", "int8", "int4", "fp8"]
"""A model's weights: as its checkpoint has them, or in fewer bits."""

Engine = Literal["transformers", "openvino"]
"""What runs a model: transformers' layers on any device, or OpenVINO on a CPU."""


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


_PART_BYTES = 1 << 19


class LogprobsPart:
    """Some entries of a :class:`PackedLogprobs`, as bytes: short enough for a frame of its own."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LogprobsPart) and self.data == other.data

    __hash__ = None  # type: ignore[assignment]

    def to_bytes(self) -> bytes:
        """The bytes."""
        return self.data

    @classmethod
    def from_bytes(cls, data: bytes) -> LogprobsPart:
        """Of such bytes."""
        return cls(data)


class PackedLogprobs(Struct, frozen=True, array_like=True):
    """Log probabilities of a prompt as arrays, which are passed on without being looked at.

    Attributes:
        num_top: Most likely tokens of an entry, at most.
        parts: Records of ``_record(num_top)``, in order.
    """

    num_top: int
    parts: tuple[LogprobsPart, ...] = ()

    def __len__(self) -> int:
        return sum(len(part.data) for part in self.parts) // _record(self.num_top).itemsize

    @classmethod
    def pack(cls, entries: PromptLogprobs) -> PackedLogprobs:
        """Of one entry per token."""
        num_top = max((len(entry.top) for entry in entries if entry is not None), default=0)
        length = max(1, _PART_BYTES // _record(num_top).itemsize)
        starts = range(0, len(entries), length)
        return cls(num_top, tuple(_packed(entries[start : start + length], num_top) for start in starts))

    def unpack(self) -> PromptLogprobs:
        """One entry per token: some microseconds each."""
        return tuple(chain.from_iterable(_unpacked(part, self.num_top) for part in self.parts))


def _record(num_top: int) -> np.dtype[np.void]:
    """An entry: rank 0 where it is None, token -1 where there are fewer likely ones."""
    return np.dtype(
        [("logprob", "<f8"), ("rank", "<i4"), ("top_ids", "<i4", (num_top,)), ("top_logprobs", "<f8", (num_top,))]
    )


def _packed(entries: PromptLogprobs, num_top: int) -> LogprobsPart:
    empty = TokenLogprobs(0.0, 0)
    filled = [empty if entry is None else entry for entry in entries]
    records = np.zeros(len(filled), _record(num_top))
    records["logprob"] = [entry.logprob for entry in filled]
    records["rank"] = [entry.rank for entry in filled]
    pairs = list(chain.from_iterable(entry.top for entry in filled))
    is_present = np.arange(num_top) < np.array([len(entry.top) for entry in filled])[:, None]
    records["top_ids"] = -1
    records["top_ids"][is_present] = [token for token, _ in pairs]
    records["top_logprobs"][is_present] = [logprob for _, logprob in pairs]
    return LogprobsPart(records.tobytes())


def _unpacked(part: LogprobsPart, num_top: int) -> PromptLogprobs:
    records = np.frombuffer(part.data, _record(num_top))
    tops = (
        tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if token >= 0)
        for ids, logprobs in zip(records["top_ids"].tolist(), records["top_logprobs"].tolist(), strict=True)
    )
    rows = zip(records["logprob"].tolist(), records["rank"].tolist(), tops, strict=True)
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
    """

    decision: str = ""
    vocabulary: str = ""


UNKNOWN = Fingerprints()
"""Of whoever says nothing of its models: nothing is compared."""
