"""What it costs to take drafts back from a recurrent state, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RollbackMethod = Literal["rescan", "second forward"]
METHODS: tuple[RollbackMethod, ...] = ("rescan", "second forward")
"""``second forward``: a copy of the state is taken before each verification, put back where drafts were refused, and
what was accepted is read once more by the whole model."""


@dataclass(frozen=True, slots=True)
class RollbackCost:
    """One method's cost.

    Attributes:
        rounds_per_s: Of the whole batch, median over the rounds.
        spread: Slowest and fastest tenth of the rounds, in rounds per second.
        bytes_per_sequence: Recurrent state and what it takes to roll it back; the copy too, where one is taken.
        max_difference: Largest one of a logit after the last round from the first method's: all must end alike.
    """

    method: RollbackMethod
    rounds_per_s: float
    spread: tuple[float, float]
    bytes_per_sequence: int
    max_difference: float


@dataclass(frozen=True, slots=True)
class RollbackWork:
    """What is done by every method.

    Attributes:
        num_rows: Sequences in the batch.
        num_draft_tokens: K: a round reads 1 + K tokens of every row, and keeps 1 to 1 + K of them.
        num_rounds: Measured rounds.
        num_warmup_rounds: Rounds before them.
        prompt_length: Tokens read beforehand.
        seed: Of tokens and of what is accepted.
    """

    num_rows: int = 4
    num_draft_tokens: int = 4
    num_rounds: int = 10
    num_warmup_rounds: int = 2
    prompt_length: int = 64
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        """Cache blocks of 16 positions for all rows, and as many copies of them."""
        return 2 * self.num_rows * (self.length // 16 + 2)

    @property
    def length(self) -> int:
        """Longest row there may be."""
        return self.prompt_length + (self.num_rounds + self.num_warmup_rounds + 1) * (1 + self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class RollbackCosts:
    """The methods, compared on the same rounds.

    Attributes:
        model: What ran.
        work: What was done.
        costs: One per method; the last is the one that the others are compared with.
    """

    model: str
    work: RollbackWork
    costs: tuple[RollbackCost, ...]

    def markdown(self) -> list[str]:
        """Lines of a table in Markdown, with what it is made of before it."""
        work, base = self.work, self.costs[-1].rounds_per_s
        table = [
            f"Taking drafts back from recurrent states: {self.model}; "
            f"{work.num_rows} rows, {work.num_draft_tokens} draft tokens, {work.num_rounds} rounds.",
            "",
            "| method | rounds/s | p10 to p90 | over second forward | MiB per sequence | largest logit difference |",
            "|---|---|---|---|---|---|",
        ]
        for cost in self.costs:
            spread = f"{cost.spread[0]:.2f} to {cost.spread[1]:.2f}"
            table.append(
                f"| {cost.method} | {cost.rounds_per_s:.2f} | {spread} | {cost.rounds_per_s / base:.2f} "
                f"| {cost.bytes_per_sequence / (1 << 20):.1f} | {cost.max_difference:.1e} |"
            )
        return table
