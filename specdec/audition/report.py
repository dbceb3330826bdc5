"""What drafts earned on a recording, and how sure it is which of them is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from specdec.audition.rounds import Earned

Certainty = Literal["run", "near", "law"]
"""How exact figures are. ``run``: drafting in turn would have counted the same. ``near``: the same except for near-ties
of a draft in bfloat16. ``law``: draft tokens were drawn without the target's noise, which is unknown. With it no fewer
are right on average."""
RESAMPLES = 2000
BETTER_P, WORSE_P = 0.001, 0.05
"""A draft counts as better, or as worse, below these p-values."""
_SIGN_FLIPS = (101, 99)
"""Sign flips of a test: this many times this many at a time."""


@dataclass(frozen=True, slots=True)
class Audition:
    """One draft on one recording.

    Attributes:
        name: Of the draft.
        certainty: What its figures are.
        earned: By draft length, then by sample.
        right: Of each sample, how many draft tokens were right with the text before them as recorded, and of how many;
            empty for prompt lookup.
        remark: What makes the figures worth less; empty if nothing does.
    """

    name: str
    certainty: Certainty
    earned: dict[int, list[Earned]]
    right: list[tuple[int, int]]
    remark: str = ""

    @property
    def right_share(self) -> float | None:
        """Share of draft tokens that were right; None if it is unknown."""
        total = sum(count for _, count in self.right)
        return sum(num for num, _ in self.right) / total if total else None

    def total(self, length: int) -> Earned:
        """All samples together."""
        return sum(self.earned[length], Earned())

    def gain(self, length: int, target_ms: float, draft_ms: float) -> float:
        """Tokens a second over those of plain decoding, for step times in milliseconds; a model of drafting in turn."""
        return self.total(length).tokens_per_round * target_ms / (target_ms + length * draft_ms)


@dataclass(frozen=True, slots=True)
class Difference:
    """Tokens a round of a draft less those of the first one, at one draft length.

    Attributes:
        low: Of the interval that holds 95% of the resampled differences.
        high: The same.
    """

    name: str
    length: int
    mean: float
    low: float
    high: float


def differences(first: Audition, other: Audition, seed: int = 0) -> list[Difference]:
    """Compare two drafts on the same samples, with an interval by bootstrap over samples; the seed decides it."""
    rng = np.random.default_rng(seed)
    num_samples = len(next(iter(first.earned.values())))
    counts = rng.multinomial(num_samples, [1 / num_samples] * num_samples, size=RESAMPLES)
    found = []
    for length in first.earned:
        one, two = (_tokens_per_round(draft.earned[length], counts) for draft in (first, other))
        low, high = np.quantile(two - one, (0.025, 0.975))
        mean = other.total(length).tokens_per_round - first.total(length).tokens_per_round
        found.append(Difference(other.name, length, mean, float(low), float(high)))
    return found


def _tokens_per_round(earned: Sequence[Earned], counts: Any) -> Any:
    """Of each of the resamples, which have so many of each sample: float64 [R] of int64 [R, samples]."""
    tokens, rounds = (np.array([getattr(one, name) for one in earned]) for name in ("num_tokens", "num_rounds"))
    return (counts @ tokens) / (counts @ rounds)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a draft is better than the first one, at one draft length.

    Attributes:
        length: Draft tokens of a round.
        mean: Tokens a round less those of the first draft.
        p_value: Of such a difference in rounds either way, by 9,999 sign flips over samples; at least 0.0001.
        num_samples: Samples that were tried; with fewer than 11 no draft can be better.
    """

    name: str
    first_name: str
    length: int
    mean: float
    p_value: float
    num_samples: int

    @property
    def is_better(self) -> bool:
        """Whether it is better with p < 0.001."""
        return self.mean > 0 and self.p_value < BETTER_P

    @property
    def is_worse(self) -> bool:
        """Whether it is worse with p < 0.05."""
        return self.mean < 0 and self.p_value < WORSE_P

    def __str__(self) -> str:
        judged = "better" if self.is_better else "worse" if self.is_worse else "not better"
        difference = f"{self.mean:+.3f} tokens a round at K = {self.length}"
        certainty = f"p = {self.p_value:.4f} by {self.num_samples} samples"
        return f"{self.name} is {judged} than {self.first_name}: {difference}, {certainty}"


def verdict(first: Audition, other: Audition, length: int, seed: int = 0) -> Verdict:
    """Test whether two drafts need the same rounds on the same samples; the seed decides the sign flips."""
    rounds = (np.array([one.num_rounds for one in draft.earned[length]]) for draft in (first, other))
    less = np.subtract(*rounds)
    saved = less[less != 0]
    rng = np.random.default_rng(seed)
    repeats, size = _SIGN_FLIPS
    flipped = [(rng.integers(0, 2, (size, len(saved)), np.int8) * 2 - 1) @ saved for _ in range(repeats)]
    num_as_large = int(sum((abs(sums) >= abs(saved.sum())).sum() for sums in flipped))
    mean = other.total(length).tokens_per_round - first.total(length).tokens_per_round
    p_value = (1 + num_as_large) / (1 + repeats * size)
    return Verdict(other.name, first.name, length, mean, p_value, len(less))


def as_json(auditions: Sequence[Audition], step_ms: tuple[float, Sequence[float]] | None) -> dict[str, Any]:
    """Everything as plain data; ``step_ms`` are step times of the target and of each draft, in milliseconds."""
    drafts = []
    for number, draft in enumerate(auditions):
        lengths = []
        for length in draft.earned:
            total = draft.total(length)
            line = {"k": length, **asdict(total), "tokens_per_round": total.tokens_per_round}
            if step_ms is not None:
                line["gain"] = draft.gain(length, step_ms[0], step_ms[1][number])
            lengths.append(line)
        figures = {"draft": draft.name, "figures": draft.certainty, "remark": draft.remark}
        drafts.append(figures | {"right": draft.right_share, "by_length": lengths})
    compared = [asdict(one) for other in auditions[1:] for one in differences(auditions[0], other)]
    return {"drafts": drafts, "differences_from_the_first": compared}


def as_table(auditions: Sequence[Audition], step_ms: tuple[float, Sequence[float]] | None) -> str:
    """The same as text."""
    lengths = list(auditions[0].earned)
    lines = [f"{'draft':30} {'figures':8} {'right':>6}  tokens a round at K = {', '.join(map(str, lengths))}"]
    for number, draft in enumerate(auditions):
        share = "-" if draft.right_share is None else f"{draft.right_share:.1%}"
        rounds = " ".join(f"{draft.total(length).tokens_per_round:.2f}" for length in lengths)
        lines.append(f"{draft.name[-30:]:30} {draft.certainty:8} {share:>6}  {rounds}")
        lines += [f"  {draft.remark}"] if draft.remark else []
        if step_ms is not None:
            best = max(lengths, key=lambda length: draft.gain(length, step_ms[0], step_ms[1][number]))
            gain = draft.gain(best, step_ms[0], step_ms[1][number])
            lines.append(f"  gain in turn at these step times, a model: {gain:.2f} times at K = {best}")
    for other in auditions[1:]:
        lines.append(f"{other.name} less {auditions[0].name}, tokens a round, with the interval of 95% of resamples:")
        lines += [
            f"  K = {one.length:2}: {one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f})"
            for one in differences(auditions[0], other)
        ]
    return "\n".join(lines)
