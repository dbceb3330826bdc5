from __future__ import annotations

from typing import Any

import pytest

from deployments.http.generation import JoinedDeltas, SampleDelta, ShownToken
from specdec.core.types import TokenLogprobs


class CountedTokens(tuple[int, ...]):
    """Tokens that count how many of them are copied."""

    num_copied = 0

    def __add__(self, other: Any) -> CountedTokens:
        CountedTokens.num_copied += len(self) + len(other)
        return CountedTokens(super().__add__(other))


def delta(token: int, **others: Any) -> SampleDelta:
    shown = ShownToken(token, token, TokenLogprobs(-1.0, 1, ()))
    return SampleDelta(0, f"{token} ", CountedTokens((token,)), (shown,), **others)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 1000])
def test_pieces_are_joined_in_their_order(num_tokens: int) -> None:
    pieces = JoinedDeltas()
    for token in range(num_tokens):
        pieces.append(delta(token, prompt_logprobs=() if token == 0 else None))
    pieces.append(SampleDelta(0, "end", (), (), "stop", "x"))
    whole = pieces.pop()
    assert whole.text == "".join(f"{token} " for token in range(num_tokens)) + "end"
    assert whole.token_ids == tuple(range(num_tokens))
    assert [shown.token for shown in whole.logprobs or ()] == list(range(num_tokens))
    assert (whole.finish, whole.stop_reason, whole.prompt_logprobs) == ("stop", "x", ())


@pytest.mark.parametrize("sizes", [(1,), (1, 5, 2, 8, 3), (8, 7, 6, 5, 4, 3, 2, 1)])
def test_a_token_is_copied_about_as_often_as_their_number_can_be_halved(sizes: tuple[int, ...]) -> None:
    num_tokens = 1 << 12
    CountedTokens.num_copied = 0
    pieces = JoinedDeltas()
    start = 0
    while start < num_tokens:
        size = sizes[start % len(sizes)]
        pieces.append(SampleDelta(0, "", CountedTokens(range(start, start + size))))
        start += size
    assert list(pieces.pop().token_ids) == list(range(start))
    assert CountedTokens.num_copied <= 13 * start
