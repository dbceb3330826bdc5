"""What each speculation mode gives: tokens and time of a round, as closed formulas over measured step times.

A round is one verification of one sequence. Notation: ``t_T`` a target step, ``t_d`` a draft
step, ``K`` the draft length, ``a`` the acceptance rate per draft token, ``E = (1 - a^(K+1)) / (1 - a)``, ``2 delta``
the time from a verdict leaving the target to an offer made of it reaching the target, drafting left out.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) for ``E`` and drafting in turn, SSD (arXiv 2603.03251) for outcomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor
from typing import NamedTuple, get_args

from specdec.core.types import SpeculationMode
from specdec.drafting.length import StepTimes

MODES: tuple[SpeculationMode, ...] = get_args(SpeculationMode)
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
BRANCHES = (2, 4, 8, 16, 32)
ROUND_TRIP_S = 0.004
"""From a verdict's leaving the target to the arrival of an offer made of it, drafting left out: four messages."""
GUESS_RATE = 0.6
"""How often the draft's next guess is right if its token and the guesses before it were wrong."""


class Choice(NamedTuple):
    """A speculation mode with its draft length and its fan-out."""

    mode: SpeculationMode = "off"
    num_draft_tokens: int = 0
    num_branches: int = 0


OFF = Choice()


@dataclass(frozen=True)
class Bounds:
    """What may be chosen: most draft tokens, most branches (0 is none), modes beside ``off``."""

    num_draft_tokens: int = DRAFT_LENGTHS[-1]
    num_branches: int = 16
    modes: frozenset[SpeculationMode] = frozenset(MODES)

    def choices(self) -> Iterator[Choice]:
        """All choices within these bounds, ``off`` first."""
        yield OFF
        for length in sorted({min(n, self.num_draft_tokens) for n in DRAFT_LENGTHS} - {0}):
            for mode in ("sequential", "overlap"):
                if mode in self.modes:
                    yield Choice(mode, length)
            if "outcomes" in self.modes and self.num_branches:
                for branches in sorted({min(n, self.num_branches) for n in BRANCHES}):
                    yield Choice("outcomes", length, branches)


@dataclass(frozen=True)
class Conditions:
    """What the pace of a sequence depends on.

    Attributes:
        alone: Step times of its target as profiled at load. Plain decoding is taken to be as fast as the faster of
            these and the newest: while it drafts, a drafter may slow its target down.
        target: Newest step times of its target.
        draft: Newest step times of its drafter.
        num_rows: Sequences that share its target's steps.
        num_draft_rows: Sequences that share its drafter's steps.
        num_step_tokens: Tokens in a row that a step of its drafter gives each sequence or branch.
        round_trip_s: ``2 delta``, in seconds.
    """

    alone: StepTimes
    target: StepTimes
    draft: StepTimes
    num_rows: int
    num_draft_rows: int
    num_step_tokens: int = 1
    round_trip_s: float = ROUND_TRIP_S

    def target_s(self, num_draft_tokens: float) -> float:
        """Return the seconds of a step that verifies this many draft tokens a row."""
        return self.target.at(self.num_rows, self.num_rows * (1 + num_draft_tokens))

    def draft_s(self, num_branches: int) -> float:
        """Return the seconds of a draft step with this many branches a sequence."""
        rows = self.num_draft_rows * (1 + num_branches)
        return self.draft.at(rows, rows * self.num_step_tokens)

    def num_fitting(self, seconds: float, draft_s: float) -> float:
        """Return the draft tokens that are there in time; a part of a step that gives several gives none of them."""
        num_steps = max(0.0, seconds / draft_s)
        return num_steps if self.num_step_tokens == 1 else self.num_step_tokens * floor(num_steps)


def pace(choice: Choice, conditions: Conditions, acceptance_rate: float) -> float:
    """Return the tokens per second of one sequence if all do alike; in turn E / (t_T + 2 delta + K t_d)."""
    length = choice.num_draft_tokens
    if choice.mode == "off":
        return 1 / min(conditions.alone.at(conditions.num_rows, conditions.num_rows), conditions.target_s(0))
    if choice.mode == "sequential":
        num_steps = ceil(length / conditions.num_step_tokens)
        round_s = conditions.target_s(length) + num_steps * conditions.draft_s(0)
        return expected_tokens(acceptance_rate, length) / (round_s + conditions.round_trip_s)
    return ahead(choice, conditions, acceptance_rate)


def ahead(choice: Choice, conditions: Conditions, acceptance_rate: float) -> float:
    """Return the tokens per second of drafting while the target verifies: the accepted path, or the likely outcomes.

    A chain of two states: a row has a draft of E tokens, or none and goes on plainly with one. It has a draft again if
    the outcome of its round was prepared (:func:`hit_rate`), as many tokens as fit into a step. What follows a plain
    round is a token shorter, as the token that the round decides has to be drafted first; if that leaves less than
    one, a draft follows only as often.
    """
    length, branches = choice.num_draft_tokens, choice.num_branches
    a, draft_s = acceptance_rate, conditions.draft_s(branches)
    plain_s = conditions.target_s(0)
    fit_plain = conditions.num_fitting(plain_s - conditions.round_trip_s, draft_s)
    step_s = conditions.target_s(min(length, fit_plain))
    fit = min(length, conditions.num_fitting(step_s - conditions.round_trip_s, draft_s))
    found = hit_rate(a, fit, branches) * min(1.0, fit)
    found_after_plain = hit_rate(a, 0, branches) * max(0.0, min(1.0, fit_plain - 1))
    share = found_after_plain / (1 - found + found_after_plain) if found_after_plain else 0.0
    tokens = 1 + share * (expected_tokens(a, fit) - 1)
    return tokens / (share * conditions.target_s(fit) + (1 - share) * plain_s)


def expected_tokens(acceptance_rate: float, num_draft_tokens: float) -> float:
    """Return E = 1 + a + ... + a^K: tokens of a verification of K draft tokens, the target's own token included."""
    if acceptance_rate > 1 - 1e-9:
        return 1.0 + num_draft_tokens
    return float((1 - acceptance_rate ** (num_draft_tokens + 1)) / (1 - acceptance_rate))


def hit_rate(acceptance_rate: float, num_draft_tokens: float, num_branches: int) -> float:
    """Return how often the outcome of verifying K draft tokens was prepared with this many branches.

    What follows all K and the draft's own next token costs no branch; every other outcome (number accepted, next token)
    costs one, and the likeliest are prepared first.
    """
    own = acceptance_rate ** (num_draft_tokens + 1)
    return float(min(1.0, own + _guessed(round(acceptance_rate, 2), round(num_draft_tokens), num_branches)))


@lru_cache(maxsize=1 << 14)
def _guessed(a: float, num_draft_tokens: int, num_branches: int) -> float:
    """Return how often the outcome is among the likeliest others: guess j at a place is right with g (1 - g)^j."""
    g = GUESS_RATE
    likelihoods = (a**n * (1 - a) * g * (1 - g) ** j for n in range(num_draft_tokens + 1) for j in range(num_branches))
    return sum(sorted(likelihoods, reverse=True)[:num_branches])


def paces(conditions: Conditions, acceptance_rate: float, bounds: Bounds) -> dict[Choice, float]:
    """Return the tokens per second of every choice within some bounds, those that draft least first."""
    return {choice: pace(choice, conditions, acceptance_rate) for choice in bounds.choices()}
