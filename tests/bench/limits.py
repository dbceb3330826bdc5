"""What a pair could give if the system added nothing: the figures that measurements are held against.

Times are in units of one plain target step; ``c`` is a draft step, ``alpha`` the probability that a draft token is
kept, ``num_draft_tokens`` (K) the draft length, ``verify_cost`` (v) a target step over 1 + K tokens. Every function
gives target steps per token, and its inverse is the speed-up over the target alone; nothing is charged for messages
unless ``round_trip`` says so.

``python -m tests.bench.limits FILE.json`` adds them to what ``specdec bench --json FILE.json`` has measured.

Sources: Leviathan, Kalman and Matias 2023 (arXiv 2211.17192), section 3, for the expected tokens of a round and
drafting in turn; SSD (arXiv 2603.03251) for outcomes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bench.compare import ALONE


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


@dataclass(frozen=True, slots=True)
class Limit:
    """What the devices could give, from the second token on, if the system added nothing.

    Attributes:
        tokens_per_s: Of all streams.
        policy: What it assumes: ``in turn``, or what happens where no draft is ready.
        draft_cost: c, a draft step over a plain target step; None for the target alone.
        verify_cost: v(K), a target step over 1 + K tokens over a plain one; where the mode has plain steps too, from
            the mean of all steps and the share of rounds with a draft.
        alpha: Acceptance per draft token, from the mean acceptance length.
        hit_rate: Over outcomes, share of the rounds with branches whose outcome had a draft; elsewhere that of the
            rounds with a draft. Lost and late drafts lower both, and so the limit.
        num_draft_tokens: Over outcomes the best length up to the one asked for, else the mean one.
    """

    tokens_per_s: float
    policy: str
    draft_cost: float | None = None
    verify_cost: float = 1.0
    alpha: float | None = None
    hit_rate: float | None = None
    num_draft_tokens: int | None = None


def mode_of(name: str) -> tuple[str | None, int | None]:
    """Service mode and draft length of a mode as the bench names it; see :func:`cluster.bench.compare.parse_modes`."""
    if name == ALONE:
        return None, 0
    if name == "auto":
        return "auto", None
    mode, _, length = name.rpartition(", ")
    return mode.replace(" ", "_") or None, int(length.split()[0])


def limit_of(row: Mapping[str, Any], plain_step_s: float) -> Limit | None:
    """The limit of a mode from its own figures and a plain target step at the same number of streams.

    None where the steps' times are not known. A draft step's time is a mean over all it did; drafts are taken to be as
    long as they were on average.

    Args:
        row: A row of the bench's JSON file.
        plain_step_s: Of the target alone.
    """
    (mode, asked), num_streams, steps = mode_of(row["mode"]), row["num_streams"], row["step_s"]
    if asked == 0:
        return Limit(num_streams / plain_step_s, "plain steps")
    length, hits = row["mean_acceptance_length"], row["hit_rate"]
    if length is None or not hits or not {"target", "draft"} <= steps.keys():
        return None
    num_draft_tokens = max(1, round(row["mean_draft_tokens"]))
    alpha = alpha_of_length(min(length, num_draft_tokens + 1), num_draft_tokens)
    c, v = steps["draft"] / plain_step_s, steps["target"] / plain_step_s
    if mode != "in_turn":  # the mean is over plain steps too, which cost 1 each
        v = 1 + (v - 1) / hits
    v = max(1.0, v)
    policy, foreseen = "on a miss a plain step", row["foreseen"]
    if mode == "in_turn":
        time, policy = in_turn(alpha, c, num_draft_tokens, verify_cost=v), "in turn"
    elif foreseen is not None and asked is not None:
        hits, lengths = foreseen, range(1, asked + 1)
        time, num_draft_tokens = min((over_outcomes(alpha, c, k, hits, verify_cost=v), k) for k in lengths)
    else:
        time = over_outcomes(alpha, c, num_draft_tokens, hits, verify_cost=v)
    return Limit(num_streams / (plain_step_s * time), policy, c, v, alpha, hits, num_draft_tokens)


def limit_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a Markdown table; rows of work that was not done by the target alone, too, have no limit."""
    lines = [
        "| prompts | T | streams | mode | decoding tokens/s | limit | share | c, v, alpha, h, K | assumes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    work = ("prompts", "temperature", "num_streams")
    plain = {tuple(row[key] for key in work): row["step_s"].get("target") for row in rows if row["mode"] == ALONE}
    for row in rows:
        plain_step_s = plain.get(tuple(row[key] for key in work))
        limit = None if plain_step_s is None else limit_of(row, plain_step_s)
        rate, figures = row["decode_tokens_per_s"], "- | - | - | -"
        if limit is not None:
            basis = ", ".join(
                "-" if value is None else f"{value:.2f}"
                for value in (limit.draft_cost, limit.verify_cost, limit.alpha, limit.hit_rate)
            )
            share = f"{100 * rate / limit.tokens_per_s:.0f}%"
            basis += f", {limit.num_draft_tokens if limit.num_draft_tokens is not None else '-'}"
            figures = f"{limit.tokens_per_s:.1f} | {share} | {basis} | {limit.policy}"
        head = f"{row['prompts']} | {row['temperature']:g} | {row['num_streams']} | {row['mode']}"
        lines.append(f"| {head} | {rate:.1f} | {figures} |")
    return lines


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.limits", description="limits beside what was measured")
    parser.add_argument("figures", type=Path, metavar="FILE.json", help="written by specdec bench --json")
    arguments = parser.parse_args(argv)
    print("\n".join(limit_table(json.loads(arguments.figures.read_text(encoding="utf-8"))["rows"])))


if __name__ == "__main__":
    main()
