"""What a pair could give if the system added nothing: the figures that measurements are held against.

Times are in units of one plain target step; ``c`` is a draft step, ``alpha`` the probability that a draft token is
kept, ``num_draft_tokens`` (K) the draft length, ``verify_cost`` (v) a target step over 1 + K tokens. Every function
gives target steps per token, and its inverse is the speed-up over the target alone; nothing is charged for messages
unless ``round_trip`` says so.

Sources: Leviathan, Kalman and Matias 2023 (arXiv 2211.17192), section 3, for the expected tokens of a round and
drafting in turn; PEARL (arXiv 2408.11850) for one chain ahead; SSD (arXiv 2603.03251) for outcomes. The Markov chains
behind the last two are written out at the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


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


def one_chain_ahead(alpha: float, c: float, num_draft_tokens: int) -> float:
    """Draft on along the accepted path while the target verifies, as PEARL does.

    Two states. After a refusal the target decodes one token while the drafter makes K: one token in either case, and on
    to the other state with probability alpha. There the target verifies K tokens while the drafter makes the next K:
    (1 - alpha^K) / (1 - alpha) tokens, and it stays there with probability alpha^K. Both last max(1, Kc). So a step
    gives (1 - alpha^K) / ((1 - alpha) (1 - alpha^K + alpha)) tokens.
    """
    _check_rate("alpha", alpha)
    step = max(1.0, num_draft_tokens * c)
    if alpha == 1:
        return step / num_draft_tokens
    refused = 1 - alpha**num_draft_tokens
    return step * (1 - alpha) * (refused + alpha) / refused


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


def scripted_hit_rate(
    alpha: float, next_guess_rate: float, fan_outs: Sequence[int], rank_shares: Sequence[float]
) -> float:
    """Probability that one of the prepared branches is the outcome's, under a script.

    Args:
        alpha: Probability that a draft token is right.
        next_guess_rate: Probability that, where it is not, the true token is among the next guesses.
        fan_outs: Branches for each number of accepted tokens, from none to all K. Where not all are accepted, the
            corrected token is one of the guesses, never the draft's own; where all are, the draft's own token after
            the chain is the first branch.
        rank_shares: Where among the guesses the true token is, if it is there; from the first on.
    """
    _check_rate("alpha", alpha)
    reached = [0.0, *accumulate(rank_shares)]

    def guessed(count: int) -> float:
        return next_guess_rate * reached[min(max(count, 0), len(rank_shares))]

    num_draft_tokens = len(fan_outs) - 1
    refused = sum(alpha**n * (1 - alpha) * guessed(fan_outs[n]) for n in range(num_draft_tokens))
    last = fan_outs[-1]
    all_kept = alpha + (1 - alpha) * guessed(last - 1) if last else 0.0
    return refused + alpha**num_draft_tokens * all_kept


def _check_rate(name: str, rate: float) -> None:
    if not 0 <= rate <= 1:
        raise ValueError(f"{name} must be in [0, 1], not {rate}")
