"""Log probabilities of a prompt as arrays: what they were, whatever they were."""

from __future__ import annotations

import math

import pytest

from specdec.core.types import PackedLogprobs, PromptLogprobs, TokenLogprobs

ENTRY = TokenLogprobs(-0.1, 3, ((7, -0.01), (2, -math.inf)))


@pytest.mark.parametrize(
    "entries",
    [
        (),
        (None,),
        (None, ENTRY, TokenLogprobs(-2.5, 1), None, TokenLogprobs(-math.inf, 128_000, ((127_999, -1e-9),))),
        (None, TokenLogprobs(0.0, 1)),
        (None, *[ENTRY] * 30_000),
    ],
)
def test_packed_entries_are_what_they_were(entries: PromptLogprobs) -> None:
    packed = PackedLogprobs.pack(entries)
    assert (len(packed), packed.unpack()) == (len(entries), entries)
    assert all(len(part.data) <= 1 << 19 for part in packed.parts)
    assert len(packed.parts) == -(-len(entries) // 14563)
