"""What requests say of sampling, as rows of one array: a sequence's row is worked out once, not in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.core.params import SequenceSpec
from specdec.sampling.kept import WhileAlive
from specdec.sampling.rows import UNUSED_TRUNCATION, RowGroup
from specdec.sampling.token_counts import uses_penalties

PARAMETERS = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("temperature", np.float32),  # 0 where the largest logit is taken
        ("min_p", np.float32),  # its logarithm
        ("top_k", np.int32),
        ("penalties", np.float32, (3,)),  # repetition, frequency, presence
        ("features", np.int32),
    ]
)
"""A sequence's row. ``features`` has a bit for each of the following that it uses."""

NOISE, TRUNCATION, BIAS, PENALTIES, ALLOWED, MIN_TOKENS, BAD_WORDS, LOGPROBS = (1 << i for i in range(8))


class ParameterRows:
    """The rows of all sequences that are alive."""

    def __init__(self) -> None:
        self._rows = WhileAlive[SequenceSpec, bytes]()

    def of(self, groups: Sequence[RowGroup]) -> NDArray[Any]:
        """Each group's row: :data:`PARAMETERS` [R]."""
        get, put = self._rows.get, self._rows.put
        rows = [get(group.spec) or put(group.spec, _row(group.spec)) for group in groups]
        return np.frombuffer(b"".join(rows), PARAMETERS) if rows else np.zeros(0, PARAMETERS)


def all_features(parameters: NDArray[Any]) -> int:
    """What any of some sequences uses."""
    return int(np.bitwise_or.reduce(parameters["features"]))


def _row(spec: SequenceSpec) -> bytes:
    params = spec.sampling
    with np.errstate(divide="ignore"):
        truncation = params.top_k, params.top_p, float(np.log(params.min_p))
    uses = {
        NOISE: not params.is_greedy,
        TRUNCATION: truncation != UNUSED_TRUNCATION,
        BIAS: params.logit_bias,
        PENALTIES: uses_penalties(params),
        ALLOWED: params.allowed_token_ids,
        MIN_TOKENS: params.min_tokens > 0,
        BAD_WORDS: params.bad_words,
        LOGPROBS: params.logprobs is not None,
    }
    row = np.zeros((), PARAMETERS)
    row["seed"], row["temperature"] = spec.seed, 0.0 if params.is_greedy else params.temperature
    row["top_k"], row["top_p"], row["min_p"] = truncation
    row["penalties"] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    row["features"] = sum(feature for feature, is_used in uses.items() if is_used)
    return row.tobytes()
