"""From drafts at each place of an answer to the rounds that it would have taken, for each draft length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdec.audition.reading import Reading, num_right_of
from specdec.audition.recording import Sample
from specdec.core.log import TokenLog
from specdec.core.types import Tokens
from specdec.drafting.ngram import NgramOptions, token_drafter
from specdec.drafting.ngram import Reading as Indexing

Round = Callable[[int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Earned:
    """What a draft earns on one answer at one draft length; the engine's own counters have the same meaning.

    Attributes:
        num_tokens: Output tokens.
        num_rounds: Verifications, with and without a draft.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens kept.
    """

    num_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: Earned) -> Earned:
        return Earned(
            self.num_tokens + other.num_tokens,
            self.num_rounds + other.num_rounds,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )

    @property
    def tokens_per_round(self) -> float:
        """Output tokens of a verification; 1 without drafts."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 1.0


def earned_by_reading(reading: Reading, num_draft_tokens: int, *, drafts_first: bool) -> Earned:
    """Count the rounds of an answer, drafted in turn with ``num_draft_tokens`` a round.

    Args:
        reading: Of the answer.
        num_draft_tokens: At least 1, and not more than was read for.
        drafts_first: Whether the first token may have a draft: with the library it may, and not in a service.
    """

    def one_round(place: int) -> tuple[int, int]:
        length = min(num_draft_tokens, reading.room[place]) if place or drafts_first else 0
        return min(length, reading.num_drawn[place]), min(length, reading.num_right[place])

    return _count(len(reading.room), one_round)


def earned_by_lookup(sample: Sample, num_draft_tokens: int) -> Earned:
    """Count the rounds of an answer, drafted by prompt lookup alone: each round is made again.

    Of what a step indexes each answer has all, as if it were alone in its step.
    """
    spec, output = sample.spec(), sample.output_token_ids
    drafter = token_drafter(spec, NgramOptions(num_draft_tokens))
    log = TokenLog(sample.prompt_token_ids)

    def one_round(place: int) -> tuple[int, int]:
        log.extend(output[len(log) - spec.output_start : place])
        room = spec.max_tokens - place - 1
        draft: Tokens = drafter.draft(log, room, Indexing()).first(room).tokens if drafter is not None else ()
        num_right = num_right_of(draft, output[place:])
        if draft and drafter is not None:
            drafter.judge(len(draft), num_right)
        return len(draft), num_right

    return _count(len(output), one_round)


def _count(num_tokens: int, one_round: Round) -> Earned:
    """Count rounds; ``one_round`` gives the tokens drafted and accepted of the round that begins at a place."""
    place = num_rounds = num_drafted = num_accepted = 0
    while place < num_tokens:
        drafted, accepted = one_round(place)
        num_rounds += 1
        num_drafted += drafted
        num_accepted += accepted
        place += accepted + 1
    return Earned(num_tokens, num_rounds, num_drafted, num_accepted)
