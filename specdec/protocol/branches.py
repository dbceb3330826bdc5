"""Which outcomes of a verification that still runs are worth a chain of their own: the drafter's fan-out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specdec.protocol.marks import Tokens
from specdec.protocol.messages import Outcome

_MISS_EXPONENT = 1.0
"""How fast guessing the next token gets better: m guesses miss it with probability (1 + m) ** -exponent."""


def fan_out(num_branches: int, num_verified: int, acceptance_rate: float) -> tuple[int, ...]:
    """For each branch, the likeliest first, the number of accepted tokens that it foresees.

    With an acceptance rate a, n of v draft tokens are accepted with probability a**n (1 - a), and all of them with
    a**v. Where m guesses miss the next token with probability (1 + m)**-r, the best numbers of guesses fall like
    F_n = F_0 a**(n / (1 + r)) ("Speculative speculative decoding", arXiv 2603.03251, geometric fan-out). They are
    small, so they are given out here one by one, each to the number of accepted tokens that gains most by it. After
    all are accepted the chain that is there already goes on: it counts as the first guess.

    Args:
        num_branches: Most branches in all.
        num_verified: v, draft tokens under verification.
        acceptance_rate: a, per draft token, in [0, 1].
    """
    counts = [0] * num_verified + [1]
    last = num_verified
    weights = [acceptance_rate**n * (1 - acceptance_rate if n < last else 1) for n in range(last + 1)]
    gains = [weight * _gain(count) for weight, count in zip(weights, counts, strict=True)]
    order: list[int] = []
    for _ in range(num_branches):
        best = max(range(last + 1), key=gains.__getitem__)
        order.append(best)
        counts[best] += 1
        gains[best] = weights[best] * _gain(counts[best])
    return tuple(order)


def _gain(count: int) -> float:
    """How much likelier one more guess makes it that the next token is among ``count`` of them."""
    return float((1 + count) ** -_MISS_EXPONENT - (2 + count) ** -_MISS_EXPONENT)


def likely_outcomes(order: Sequence[int], guesses: Sequence[Tokens]) -> Iterator[Outcome]:
    """The outcomes of a fan-out that can be named by now, the likeliest first.

    Args:
        order: From :func:`fan_out`.
        guesses: Of the chain's tokens, as far as it is drafted.
    """
    used = [0] * len(guesses)
    for n in order:
        if n < len(guesses):
            if used[n] < len(guesses[n]):
                yield Outcome(n, guesses[n][used[n]])
            used[n] += 1
