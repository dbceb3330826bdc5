"""Rates that are estimated from counts, older ones counting less."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MEMORY = 256.0
"""Trials after which a trial counts 1/e."""


class Round(NamedTuple):
    """One verification of one sequence, with or without a draft."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class DecayedRate:
    """Successes among trials, both weighted: what is older than ``MEMORY`` trials counts less and less."""

    successes: float = 0.0
    trials: float = 0.0

    def add(self, successes: float, trials: float) -> DecayedRate:
        """With newer counts."""
        kept = max(0.0, 1 - trials / MEMORY)
        return DecayedRate(self.successes * kept + successes, self.trials * kept + trials)

    def rate(self, prior: float, weight: float) -> float:
        """The rate, with a prior that counts like ``weight`` trials."""
        return (self.successes + prior * weight) / (self.trials + weight)


def acceptance_trials(rounds: Iterable[Round]) -> tuple[int, int]:
    """Accepted draft tokens, and draft tokens that were judged: what follows the first refused one was not.

    Their ratio estimates the acceptance rate per token whatever the draft length (it is the maximum-likelihood
    estimate for a geometric run cut at K); accepted over drafted would fall as K grows.
    """
    accepted = judged = 0
    for num_drafted, num_accepted in rounds:
        accepted += num_accepted
        judged += num_accepted + (num_accepted < num_drafted)
    return accepted, judged


def rounds_of(how: str, num_drafted: Iterable[int]) -> list[Round]:
    """The rounds in the notes of some tokens (:class:`specdec.protocol.messages.Notes`); the last token ends one."""
    rounds = []
    accepted = 0
    for letter, drafted in zip(how, num_drafted, strict=True):
        accepted += letter == "a"
        if drafted or letter != "a":
            rounds.append(Round(drafted, accepted))
            accepted = 0
    return rounds
