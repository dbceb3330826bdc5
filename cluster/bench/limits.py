"""What a pair could give if the system added nothing: the figures that measurements are held against.

Times are in units of one plain target step; ``c`` is a draft step, ``alpha`` the probability that a draft token is
kept, ``num_draft_tokens`` (K) the draft length, ``verify_cost`` (v) a target step over 1 + K tokens. Every function
gives target steps per token, and its inverse is the speed-up over the target alone; nothing is charged for messages
unless ``round_trip`` says so.

Sources: Leviathan, Kalman and Matias 2023 (arXiv 2211.17192), section 3, for the expected tokens of a round and
drafting in turn; SSD (arXiv 2603.03251) for outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Tokens of one verification, the corrected or bonus token included: 1 + alpha + ... + alpha^K."""
    _check_rate("alpha", alpha)
    return sum(alpha**i for i in range(num_draft_tokens + 1))


def alpha_of_length(mean_acceptance_length: float, num_draft_tokens: int) -> float:
    """The ``alpha`` that gives a mean acceptance length at a draft length; the inverse of :func:`expected_tokens`.

    Raises:
        ValueError: The length is not in [1, K + 1].
    """
    if not 1 <= mean_acceptance_length <= num_draft_tokens + 1:
        raise ValueError(f"mean_acceptance_length must be in [1, {num_draft_tokens + 1}], not {mean_acceptance_length}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(middle, num_draft_tokens) < mean_acceptance_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def in_turn(
    alpha: float, c: float, num_draft_tokens: int, *, verify_cost: float = 1.0, round_trip: float = 0.0
) -> float:
    """Draft K tokens, verify them, and again: (v + Kc + round trip) / E (Leviathan et al., theorem 3.8 for v = 1)."""
    return (verify_cost + num_draft_tokens * c + round_trip) / expected_tokens(alpha, num_draft_tokens)


@dataclass(frozen=True, slots=True)
class MissPolicy:
    """What a row does when no chain is ready for the outcome it had.

    Attributes:
        num_draft_tokens: Length of the chain it waits for; 0 goes on plainly, and waits for nothing.
        verify_cost: A target step over that chain and one token.
    """

    num_draft_tokens: int = 0
    verify_cost: float = 1.0


def over_outcomes(
    alpha: float,
    c: float,
    num_draft_tokens: int,
    hit_rate: float,
    *,
    verify_cost: float = 1.0,
    miss: MissPolicy | None = None,
) -> float:
    """Prepare a chain for each likely outcome while the target verifies.

    With probability h a chain of K tokens is ready: a round of max(v, Kc), hidden drafting, for E(K) tokens. Otherwise
    the miss policy: a chain of J tokens that is waited for, v(J) + Jc for E(J) tokens; or, with J = 0, one plain step
    of max(1, Kc) for one token, in which the drafter prepares the next chains. With J = K and v = 1 this is
    [h max(1, Kc) + (1 - h)(1 + Kc)] / E.

    Args:
        alpha: Probability that a draft token is kept.
        c: A draft step over all branches.
        num_draft_tokens: Length of every prepared chain.
        hit_rate: Share of the rounds that began with a chain for their outcome.
        verify_cost: A target step over 1 + K tokens.
        miss: What happens otherwise; by default the row goes on plainly.
    """
    _check_rate("hit_rate", hit_rate)
    miss = miss if miss is not None else MissPolicy()
    drafting = num_draft_tokens * c
    waited = miss.num_draft_tokens * c
    miss_time = miss.verify_cost + waited if miss.num_draft_tokens else max(miss.verify_cost, drafting)
    time = hit_rate * max(verify_cost, drafting) + (1 - hit_rate) * miss_time
    hit_tokens = expected_tokens(alpha, num_draft_tokens)
    miss_tokens = expected_tokens(alpha, miss.num_draft_tokens)
    return time / (hit_rate * hit_tokens + (1 - hit_rate) * miss_tokens)


def _check_rate(name: str, rate: float) -> None:
    if not 0 <= rate <= 1:
        raise ValueError(f"{name} must be in [0, 1], not {rate}")
