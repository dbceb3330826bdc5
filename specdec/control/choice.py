"""The choice: of all ways of speculating the one with the most tokens per second of the pair."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from specdec.control.limits import OFF, VAIN_WAIT, Arm, Conditions, Kind, Pace, Wait
from specdec.protocol.draft_row import offer_spacing
from specdec.protocol.messages import Plan
from specdec.protocol.plans import IN_TURN_WAIT_S

DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
WAITS: tuple[Wait, ...] = ("no", "branch", "chain")
BRANCHES = (2, 4, 8, 16, 32)
_EARLY_OFFER, _JITTER = 0.75, 0.93
"""Offers begin a step before the deadline: at the steps that fit always, or one less where a bit more would not fit.

Of many steps some do not fit now and then, as their times vary; an offer that comes too early costs far less than one
that comes too late.
"""
_LATE_MESSAGES_S = 0.004
"""... and as messages do: on a busy machine a tenth of those there and back take so much longer than the quickest.

So they begin by as many steps earlier, where each part follows a step after the last: an early one costs a message.
Where parts are further apart, by fewer: it costs what would have been drafted until the next.
"""


@dataclass(frozen=True)
class Bounds:
    """What the controller may choose from.

    Attributes:
        num_draft_tokens: Most draft tokens per round.
        num_branches: Most branches per sequence: by configuration, and by its share of what a drafter holds.
        kinds: Ways of speculating.
    """

    num_draft_tokens: int = 16
    num_branches: int = 32
    kinds: frozenset[Kind] = frozenset({"off", "in_turn", "overlap", "outcomes"})


def arms(bounds: Bounds) -> list[Arm]:
    """All ways of speculating within bounds."""
    longest = min(bounds.num_draft_tokens, DRAFT_LENGTHS[-1])
    lengths = [n for n in DRAFT_LENGTHS if n < longest] + [longest] * (longest > 0)
    branches = [n for n in BRANCHES if n <= bounds.num_branches] or [1] * (bounds.num_branches > 0)
    ways = [OFF]
    ways += [Arm("in_turn", n) for n in lengths]
    ways += [Arm("overlap", n) for n in lengths]
    ways += [Arm("outcomes", n, b, wait) for n in lengths for b in branches for wait in WAITS]
    return [arm for arm in ways if arm.kind in bounds.kinds]


def within(arm: Arm, bounds: Bounds) -> Arm:
    """An arm that needs no measurements, or what comes next to it within bounds."""
    kind = next(kind for kind in (arm.kind, "overlap", "in_turn", "off") if kind in bounds.kinds)
    length = min(arm.num_draft_tokens, bounds.num_draft_tokens)
    return Arm(kind, length) if length and kind != "off" else OFF


def margin_over_alone(hysteresis: float) -> float:
    """What drafting has to give over target alone: gains of less are not worth a drafter's time."""
    return 1 + 1.5 * hysteresis


def best(scored: Mapping[Arm, float], current: Arm, hysteresis: float) -> Arm:
    """Target alone unless the best arm gains enough over it; else the best, or the current one if that is as good.

    Another arm than the current one has to be better by more than ``hysteresis``.
    """
    if scored.get(OFF, 0.0) * margin_over_alone(hysteresis) > max(scored.values()):
        return OFF
    winner = max(scored, key=lambda arm: (scored[arm], -arm.num_draft_tokens - arm.num_branches))
    return current if scored[winner] <= scored.get(current, 0.0) * (1 + hysteresis) else winner


def own_length(arm: Arm, acceptance_rate: float, token_price: float, bound: int | None) -> int:
    """Draft length of one sequence within its group's arm.

    A draft token is worth verifying while its chance to be kept, a^k, exceeds what the time it takes would have given
    the group otherwise (the marginal form of the goodput that Liu et al. 2024, arXiv 2406.14066, maximise).

    Args:
        arm: Of the group.
        acceptance_rate: Of the sequence.
        token_price: Tokens that the group loses by verifying one token more.
        bound: The request's own.
    """
    most = arm.num_draft_tokens if bound is None else min(bound, arm.num_draft_tokens)
    length = 0
    while length < most and acceptance_rate ** (length + 1) >= token_price:
        length += 1
    return length


def token_price(arm: Arm, conditions: Conditions, group: Pace) -> float:
    """Tokens that a group loses by verifying one token more: its pace times the growth of a step."""
    if arm.kind == "off":
        return 0.0
    drafted = group.num_draft_tokens
    growth_s = conditions.target_s(drafted + 0.5) - conditions.target_s(max(drafted - 0.5, 0.0))
    num_tokens = conditions.num_rows * (0.5 + min(drafted, 0.5))
    return conditions.num_rows * group.tokens_per_s * growth_s / num_tokens


def plan_of(arm: Arm, num_draft_tokens: int, conditions: Conditions | None, acceptance_rate: float) -> Plan:
    """The plan that carries out an arm for one sequence.

    In overlap ``draft_wait_s`` counts from the start of the step that decided last, as the target's does.
    """
    if not num_draft_tokens:
        return Plan()
    a = round(acceptance_rate * 20) / 20
    if arm.kind == "in_turn":
        return Plan(num_draft_tokens, acceptance_rate=a, mode="in_turn", draft_wait_s=IN_TURN_WAIT_S)
    if conditions is None or not conditions.draft or not conditions.target:
        return Plan(num_draft_tokens, arm.num_branches, acceptance_rate=a)
    step_s, wait_s = conditions.target_s(arm.num_draft_tokens), 0.0
    fit = steps_until_offer(conditions, step_s, 1 + arm.num_branches)
    if arm.wait != "no":
        fit, wait_s = arm.num_draft_tokens, VAIN_WAIT * conditions.waiting_round_s(step_s, arm, acceptance_rate)
    if arm.wait == "chain":
        chain_s = arm.num_draft_tokens * conditions.draft_s(1 + arm.num_branches) + conditions.round_trip_s
        wait_s = 1.1 * (step_s + chain_s)
    return Plan(num_draft_tokens, arm.num_branches, min(fit, arm.num_draft_tokens + 1), a, "overlap", round(wait_s, 4))


def steps_until_offer(conditions: Conditions, step_s: float, rows_per_sequence: int) -> int:
    """Draft steps after a verdict by which there should be an offer; 0 where not even one step fits."""
    usual = int(_JITTER * conditions.fit_steps(step_s, rows_per_sequence) + _EARLY_OFFER)
    spacing = offer_spacing(conditions.num_draft_rows)
    late = _LATE_MESSAGES_S / (spacing * conditions.draft_s(rows_per_sequence))
    return max(usual - (math.ceil(late) if spacing == 1 else int(late)), min(usual, 1))
