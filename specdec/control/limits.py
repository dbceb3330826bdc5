"""What each way of speculating gives at best: tokens of a round and the time of a round, as formulas.

Units: a round is one verification of one sequence. Notation of the design (section 7): ``t_T`` one target step, ``t_d``
one draft step, ``K`` the draft length, ``a`` the acceptance rate per draft token, ``E = (1 - a^(K+1)) / (1 - a)``, and
``2 delta`` the time from a verdict leaving the target to an offer made of it reaching the target, drafting left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from specdec.control.steptimes import StepTimes
from specdec.protocol.draft_row import offer_spacing

Wait = Literal["no", "branch", "chain"]
Kind = Literal["off", "in_turn", "overlap", "outcomes"]
KINDS: tuple[Kind, ...] = ("off", "in_turn", "overlap", "outcomes")
Style = tuple[Kind, Wait]

GUESS_SHARES = (0.65, 0.25, 0.1)
"""How often the true token is the draft's second, third, fourth guess, where it is one of them but not the first."""


class Arm(NamedTuple):
    """A way of speculating.

    Attributes:
        kind: ``overlap`` drafts ahead along the accepted path, ``outcomes`` for ``num_branches`` outcomes beside it.
        wait: For what the target holds a row back: ``branch`` for the rest of a branch that was begun, ``chain`` for a
            whole new chain after a miss, too.
    """

    kind: Kind
    num_draft_tokens: int = 0
    num_branches: int = 0
    wait: Wait = "no"

    @property
    def style(self) -> Style:
        """What its errors are alike in."""
        return self.kind, self.wait


OFF = Arm("off")
VAIN_WAIT = 1.05
"""Wait of a row for a branch, as a share of the time in which it should come."""


class Pace(NamedTuple):
    """What an arm gives in the long run.

    Attributes:
        tokens: Committed per round.
        round_s: Duration of a round.
        num_draft_tokens: Verified per round, rounds without a draft counted.
    """

    tokens: float
    round_s: float
    num_draft_tokens: float

    @property
    def tokens_per_s(self) -> float:
        """Of one sequence."""
        return self.tokens / self.round_s


@dataclass(frozen=True)
class Conditions:
    """What the pace of a sequence depends on.

    Attributes:
        target: Step times of its target.
        draft: Step times of its drafter.
        num_rows: Sequences that share its target's steps.
        num_draft_rows: Sequences that share its drafter's steps.
        round_trip_s: ``2 delta``.
        guess_rate: How often one of three guesses is right where the draft's own token is not.
        margin: Part of a target step that is left unused, as step times vary.
    """

    target: StepTimes
    draft: StepTimes
    num_rows: int
    num_draft_rows: int
    round_trip_s: float
    guess_rate: float = 0.7
    margin: float = 0.04
    _draft_steps_s: dict[int, float] = field(init=False, default_factory=dict, compare=False, repr=False)
    _target_steps_s: dict[float, float] = field(init=False, default_factory=dict, compare=False, repr=False)

    def at_load(self, num_rows: int, num_draft_rows: int) -> Conditions:
        """The same workers with another number of sequences."""
        if (num_rows, num_draft_rows) == (self.num_rows, self.num_draft_rows):
            return self
        return replace(self, num_rows=num_rows, num_draft_rows=num_draft_rows)

    def target_s(self, num_draft_tokens: float) -> float:
        """A step that verifies so many draft tokens per row."""
        if num_draft_tokens not in self._target_steps_s:
            rows = self.num_rows
            self._target_steps_s[num_draft_tokens] = self.target.at(rows, rows * (1 + num_draft_tokens))
        return self._target_steps_s[num_draft_tokens]

    def draft_s(self, rows_per_sequence: int) -> float:
        """A draft step with so many rows per sequence."""
        if rows_per_sequence not in self._draft_steps_s:
            rows = self.num_draft_rows * rows_per_sequence
            self._draft_steps_s[rows_per_sequence] = self.draft.at(rows, rows)
        return self._draft_steps_s[rows_per_sequence]

    def fit_steps(self, round_s: float, rows_per_sequence: int) -> float:
        """Draft steps from a verdict to the next boundary: (t_T - 2 delta - margin) / t_d, DESIGN section 8.

        Less one for the draft step that runs when the verdict comes, of which any part may be left: so many whole steps
        fit always, and one more as often as the fraction says.
        """
        left_s = round_s * (1 - self.margin) - self.round_trip_s
        return max(0.0, left_s / self.draft_s(rows_per_sequence) - 1)

    def has_seen(self, arm: Arm) -> bool:
        """Whether steps of the size that an arm makes were measured, so that its formula stands on something."""
        rows = self.num_draft_rows * (1 + arm.num_branches)
        return arm.kind == "off" or self.draft.has_seen(rows, rows)

    def waiting_round_s(self, step_s: float, arm: Arm, acceptance_rate: float) -> float:
        """A round of a row that waits for branches of K tokens: max(t_T, K t_d, (t_T + K t_d + 2 delta) / 2).

        Branches begin when the chain is drafted that they belong to, and not before the verdict that it follows. Where
        drafting is slower than the verification it sets the pace; in between two rounds take a step and a chain. After
        a chain that is kept whole the next token has to be drafted first: a step more. Where that step alone comes too
        late for a verification, rows that need it miss those of rows that do not, about every other time.
        """
        whole, draft_s = acceptance_rate**arm.num_draft_tokens, self.draft_s(1 + arm.num_branches)
        chain_s = (arm.num_draft_tokens + whole) * draft_s * (1 + self.margin / 2)
        round_s = max(step_s, chain_s, (step_s + chain_s + self.round_trip_s) / 2)
        late_s = 2 * step_s - (arm.num_draft_tokens + 1) * draft_s
        if arm.num_draft_tokens * draft_s <= step_s and late_s < step_s:
            round_s += whole * (1 - whole ** (self.num_rows - 1)) * late_s / 2
        return round_s


def pace(arm: Arm, conditions: Conditions, acceptance_rate: float) -> Pace:
    """The pace of one sequence where all that share its steps speculate alike."""
    match arm.kind:
        case "off":
            return Pace(1.0, conditions.target_s(0), 0.0)
        case "in_turn":
            return in_turn(arm, conditions, acceptance_rate)
        case _:
            return ahead(arm, conditions, acceptance_rate)


def in_turn(arm: Arm, conditions: Conditions, acceptance_rate: float) -> Pace:
    """Draft, then verify: E tokens in t_T + 2 delta + K t_d (DESIGN section 7; Leviathan et al. 2023, theorem 3.8)."""
    num_tokens = arm.num_draft_tokens
    drafting_s = num_tokens * conditions.draft_s(1) + conditions.round_trip_s
    round_s = conditions.target_s(num_tokens) + drafting_s
    return Pace(expected_tokens(acceptance_rate, num_tokens), round_s, num_tokens)


def ahead(arm: Arm, conditions: Conditions, acceptance_rate: float) -> Pace:
    """Draft while the target verifies, along the accepted path or for the likely outcomes.

    A chain of two states: a row has a draft (E tokens) or has none and goes on plainly (one token). From the first it
    comes to a draft again if the outcome was prepared (``hit_rate``), from the second if the plain token was. In the
    terms of SSD (arXiv 2603.03251) the first is a cache hit; a miss costs a plain round.
    """
    if arm.wait != "no":
        return _ahead_with_waits(arm, conditions, acceptance_rate)
    least = _ahead_with_steps(arm, conditions, acceptance_rate, 0)
    if not arm.num_branches:
        return least
    num_steps = conditions.fit_steps(least.round_s, 1 + arm.num_branches)
    is_in_time = arm.num_draft_tokens <= int(num_steps) + 1 or offer_spacing(conditions.num_draft_rows) == 1
    share = num_steps % 1
    if arm.num_draft_tokens < int(num_steps) or not is_in_time or not share:
        return least
    most = _ahead_with_steps(arm, conditions, acceptance_rate, 1)
    return Pace(*(share * more + (1 - share) * less for less, more in zip(least, most, strict=True)))


def _ahead_with_steps(arm: Arm, conditions: Conditions, acceptance_rate: float, num_more: int) -> Pace:
    """The same number of draft steps fits into every round: the least, or ``num_more``."""
    a, guess_rate, branches = acceptance_rate, conditions.guess_rate, arm.num_branches
    plain_hit, drafted = hit_rate(a, 0, branches, guess_rate), float(arm.num_draft_tokens)
    for _ in range(4):  # a longer step fits more draft tokens, which make it longer: from the longest down
        round_s = conditions.target_s(drafted)
        lengths = _lengths(arm, conditions, round_s, num_more)
        if lengths.usual < 1:
            return Pace(1.0, round_s, 0.0)
        found = plain_hit
        if lengths.after_plain < 1:  # the lead grows by what a round drafts beyond the one token that it commits
            gain = round_s / conditions.draft_s(1 + branches) - 1
            found *= a ** math.ceil((1 - lengths.after_plain) / gain) if gain > 0.02 else 0.0
        share = found / (1 - hit_rate(a, lengths.usual, branches, guess_rate) + found) if found else 0.0
        whole = a**lengths.usual
        drafted = share * (lengths.usual + whole * (lengths.after_whole - lengths.usual))
    tokens = (1 - whole) * expected_tokens(a, lengths.usual) + whole * expected_tokens(a, lengths.after_whole)
    return Pace(1 + share * (tokens - 1), conditions.target_s(drafted), drafted)


class _Lengths(NamedTuple):
    """Draft tokens that are there in time: as a rule, after a draft that was kept whole, and after a plain round."""

    usual: int
    after_whole: float
    after_plain: int


def _lengths(arm: Arm, conditions: Conditions, round_s: float, num_more: int) -> _Lengths:
    wanted = arm.num_draft_tokens
    fit = int(conditions.fit_steps(round_s, 1 + arm.num_branches)) + num_more
    after_plain = min(wanted, fit - 1)
    # The chain is drafted on and on: what did not go out in time is there after a draft that was kept whole.
    ahead_by = max(0.0, round_s / conditions.draft_s(1 + arm.num_branches) - 1)
    if arm.num_branches:
        unsent = offer_spacing(conditions.num_draft_rows) - 1 if ahead_by < wanted else 0
        return _Lengths(min(wanted, fit), min(wanted, max(fit - 1, ahead_by - unsent)), after_plain)
    part = -(-wanted // 2)  # the drafter offers a chain without branches in halves
    drafted = min(wanted, int(ahead_by) // part * part)
    return _Lengths(drafted, drafted, after_plain // part * part)


def _ahead_with_waits(arm: Arm, conditions: Conditions, acceptance_rate: float) -> Pace:
    """A row waits for what was prepared, and after a miss for the first half of a new chain, as it goes out by itself.

    SSD's own policy but for the half: with the share s of the drafts that are whole, E(K) or E(K / 2) tokens in
    s P + (1 - s) (t_T + 2 delta + K / 2 t_d). A row that waits for branches alone goes on plainly where that half comes
    later than they would.
    """
    a, guess_rate, branches, whole = acceptance_rate, conditions.guess_rate, arm.num_branches, arm.num_draft_tokens
    step_s, half = conditions.target_s(whole), -(-whole // 2)
    hit_s = conditions.waiting_round_s(step_s, arm, a)
    if whole > 1 and hit_s > step_s and conditions.num_rows <= 2:
        whole -= 1  # who waits goes on with the part that comes a step before the last; in company that gains less
        hit_s = conditions.waiting_round_s(step_s, arm._replace(num_draft_tokens=whole), a)
    miss_s = step_s + conditions.round_trip_s + (half + 0.5) * conditions.draft_s(1 + branches)
    missed = 1 - hit_rate(a, whole, branches, guess_rate)
    if conditions.num_rows > 1 and hit_s < VAIN_WAIT * step_s:  # whom others do not wait for, waits for their step
        are_others_there = 1 - missed ** (conditions.num_rows - 1)
        miss_s += are_others_there * (step_s * math.ceil(miss_s / step_s) - miss_s)
    elif arm.wait == "branch" and miss_s > VAIN_WAIT * hit_s:
        half, miss_s = 0, VAIN_WAIT * hit_s
    found = hit_rate(a, half, branches, guess_rate)
    share = found / (missed + found) if found else 0.0
    tokens = share * expected_tokens(a, whole) + (1 - share) * expected_tokens(a, half)
    drafted = share * whole + (1 - share) * half
    return Pace(tokens, share * hit_s + (1 - share) * miss_s, drafted)


def expected_tokens(acceptance_rate: float, num_draft_tokens: float) -> float:
    """E = 1 + a + ... + a^K: tokens of a verification of K draft tokens (Leviathan et al. 2023, equation 1)."""
    if acceptance_rate > 0.9999:
        return 1.0 + num_draft_tokens
    return float((1 - acceptance_rate ** (num_draft_tokens + 1)) / (1 - acceptance_rate))


def hit_rate(acceptance_rate: float, num_draft_tokens: int, num_branches: int, guess_rate: float) -> float:
    """How often the outcome of verifying K draft tokens was prepared with so many branches.

    The likeliest outcomes are prepared first: what follows all K and the draft's own next token costs no branch; every
    other outcome (number accepted, next token) costs one.
    """
    own: float = acceptance_rate ** (num_draft_tokens + 1)
    if not num_branches:
        return own
    guessed = _guessed(round(acceptance_rate * 50) / 50, num_draft_tokens, num_branches)
    return min(1.0, own + guessed * guess_rate)


@lru_cache(maxsize=1 << 14)
def _guessed(a: float, num_draft_tokens: int, num_branches: int) -> float:
    """How often the outcome is among the likeliest others, if guesses were always right."""
    refused = [a**n * (1 - a) for n in range(num_draft_tokens + 1)]
    others = sorted((share * part for part in refused for share in GUESS_SHARES), reverse=True)
    return sum(others[:num_branches])


def guess_rate_of(measured_hit_rate: float, acceptance_rate: float, num_draft_tokens: int, num_branches: int) -> float:
    """The guess rate at which so many hits are to be expected; within [0.05, 1]."""
    low, high = (hit_rate(acceptance_rate, num_draft_tokens, num_branches, g) for g in (0.0, 1.0))
    if high - low < 1e-6:
        return 1.0
    return min(1.0, max(0.05, (measured_hit_rate - low) / (high - low)))
