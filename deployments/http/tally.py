"""What speculation did for one sequence, round by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec.core.messages import Notes, Plan, TokenKind, TokenSource, token_kind, token_source


class Round(NamedTuple):
    """One verification of a draft."""

    num_draft_tokens: int
    num_accepted_tokens: int


class RoundTally:
    """Puts the notes of tokens together to rounds again, wherever a message cut them.

    Attributes:
        rounds: How often each kind of round came; only those that verified a draft.
        plan: The newest that was reported.
        num_predicted: Draft tokens of the request's prediction that were kept.
        num_mispredicted: Those that were verified and not kept.
    """

    def __init__(self) -> None:
        self.rounds: Counter[Round] = Counter()
        self.plan: Plan | None = None
        self.num_predicted = self.num_mispredicted = 0
        self._num_accepted = 0

    def add(self, notes: Notes) -> list[Round]:
        """Take the notes of the next tokens and return the rounds that are now complete."""
        complete = []
        for byte, num_drafted in zip(notes.provenance, notes.num_drafted, strict=True):
            is_accepted = token_kind(byte) is TokenKind.ACCEPTED
            self._num_accepted += is_accepted
            if num_drafted:
                complete.append(Round(num_drafted, self._num_accepted))
                if token_source(byte) is TokenSource.PREDICTION:
                    self.num_predicted += self._num_accepted
                    self.num_mispredicted += num_drafted - self._num_accepted
            if num_drafted or not is_accepted:
                self._num_accepted = 0
        self.rounds.update(complete)
        return complete

    @property
    def num_drafts(self) -> int:
        """Rounds that verified a draft."""
        return self.rounds.total()

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens verified."""
        return sum(kind.num_draft_tokens * count for kind, count in self.rounds.items())

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens kept."""
        return sum(kind.num_accepted_tokens * count for kind, count in self.rounds.items())


def answer_metrics(tallies: Sequence[RoundTally], num_spec_tokens: int, detail: str | None) -> dict[str, Any]:
    """The ``metrics`` of an answer, if they were asked for; for several choices there is no one answer to that.

    Args:
        tallies: By choice.
        num_spec_tokens: Bound on draft tokens per round.
        detail: What the request says: ``none``, ``summary`` or ``detailed``.
    """
    if detail in (None, "none"):
        return {}
    one = tallies[0] if len(tallies) == 1 else None
    metrics = None if one is None else speculation_metrics(one, num_spec_tokens, detail == "detailed")
    return {"metrics": {"speculative_decoding": metrics}}


def speculation_metrics(tally: RoundTally, num_spec_tokens: int, detailed: bool) -> dict[str, Any]:
    """The ``metrics.speculative_decoding`` object of an answer, by vLLM's names.

    Args:
        tally: Of the answer's one sequence.
        num_spec_tokens: Bound on draft tokens per round.
        detailed: Add the histograms: rounds by tokens accepted, over all and by draft length.
    """
    drafts, drafted, accepted = tally.num_drafts, tally.num_draft_tokens, tally.num_accepted_tokens
    metrics: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
    }
    if tally.plan is not None:
        metrics["plan"] = _written(tally.plan)
    if detailed:
        lengths = sorted({kind.num_draft_tokens for kind in tally.rounds})
        metrics["acceptance_histogram"] = _histogram(tally, lengths)
        metrics["acceptance_histogram_by_draft_length"] = {str(n): _histogram(tally, [n]) for n in lengths}
    return metrics


def how_it_came(notes: Notes, plan: Plan | None) -> dict[str, Any]:
    """The ``specdec`` object of a chunk's choice.

    Args:
        notes: Of the chunk's tokens.
        plan: The newest one; None where nobody says.
    """
    times = [None if one is None else {"target": one.target, "draft": one.draft} for one in notes.times]
    return {
        "kind": [token_kind(byte).name.lower() for byte in notes.provenance],
        "source": [token_source(byte).name.lower() for byte in notes.provenance],
        "num_draft_tokens": notes.num_drafted,
        "times": times or [None] * len(notes.provenance),
        "plan": None if plan is None else _written(plan),
    }


def _written(plan: Plan) -> dict[str, Any]:
    return {
        "num_draft_tokens": plan.num_draft_tokens,
        "num_branches": plan.num_branches,
        "mode": plan.mode,
        "acceptance_rate": plan.acceptance_rate,
        "draft_wait_s": plan.draft_wait_s,
    }


def _histogram(tally: RoundTally, lengths: list[int]) -> list[int]:
    """Rounds of these draft lengths, by the number of tokens accepted."""
    counts = [0] * (max(lengths, default=0) + 1)
    for kind, count in tally.rounds.items():
        if kind.num_draft_tokens in lengths:
            counts[kind.num_accepted_tokens] += count
    return counts
