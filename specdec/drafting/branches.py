"""Which outcomes of a verification that still runs are worth a chain of their own: the drafter's fan-out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import nlargest
from itertools import pairwise

from specdec.core.messages import Outcome
from specdec.core.types import Tokens

Likelihoods = tuple[float, ...]
"""How likely it is that the target says a token: the one drawn, then each of the guesses beside it."""

BRANCHES_IN_ALL = 256
"""Branches of all sequences of a drafter together: about as many rows of a step as cost a device nothing."""

_FORESEEN_KEPT = 1024
_MISS_EXPONENT = 1.0
"""How fast guessing the next token gets better: m guesses miss it with probability (1 + m) ** -exponent."""


def branch_share(num_sequences: int, branches_in_all: int = BRANCHES_IN_ALL) -> int:
    """Most branches of each of the sequences that have any: all get the same share, whatever their plans say."""
    return branches_in_all // max(1, num_sequences)


def foreseen(
    num_branches: int, num_verified: int, acceptance_rate: float, likelihoods: Sequence[Likelihoods] = ()
) -> list[tuple[int, int]]:
    """The outcomes worth a branch, the likeliest first: pairs of number accepted and number of the guess there.

    After n draft tokens were accepted, the next is guess j with the likelihood that the draft gives that. Where it
    gives none, draft tokens are accepted with probability a, and m guesses miss a corrected token with probability
    (1 + m)**-r. The numbers of guesses then fall like F_n = F_0 a**(n / (1 + r)), the geometric fan-out of
    "Speculative speculative decoding" (arXiv 2603.03251). After all were accepted the chain itself goes on, and the
    guesses are of other bonus tokens.

    Args:
        num_branches: Most outcomes.
        num_verified: Draft tokens under verification.
        acceptance_rate: a, per draft token, in [0, 1].
        likelihoods: Of the chain's tokens, as far as it is drafted; an empty one is not known.
    """
    return list(_foreseen(num_branches, num_verified, acceptance_rate, tuple(likelihoods[: num_verified + 1])))


@lru_cache(_FORESEEN_KEPT)
def _foreseen(
    num_branches: int, num_verified: int, acceptance_rate: float, likelihoods: tuple[Likelihoods, ...]
) -> tuple[tuple[int, int], ...]:
    """See :func:`foreseen`; sequences of which nothing is known have it in common."""
    usual = _usual(num_branches, acceptance_rate)
    outcomes: list[tuple[float, int, int]] = []
    reached = 1.0
    for n in range(num_verified + 1):
        drawn, *others = (likelihoods[n] if n < len(likelihoods) else ()) or usual
        outcomes += [(reached * other, -n, -j) for j, other in enumerate(others)]
        reached *= drawn
    return tuple((-n, -j) for _, n, j in nlargest(num_branches, outcomes))


def _usual(num_guesses: int, acceptance_rate: float) -> Likelihoods:
    """Likelihoods where nothing is known of a place."""
    misses = [(1 + m) ** -_MISS_EXPONENT for m in range(num_guesses + 1)]
    return acceptance_rate, *((1 - acceptance_rate) * (before - after) for before, after in pairwise(misses))


def likely_outcomes(places: Sequence[tuple[int, int]], guesses: Sequence[Tokens]) -> list[Outcome]:
    """The outcomes that can be named by now.

    Args:
        places: From :func:`foreseen`.
        guesses: Of the chain's tokens, as far as it is drafted.
    """
    return [Outcome(n, guesses[n][j]) for n, j in places if n < len(guesses) and j < len(guesses[n])]
