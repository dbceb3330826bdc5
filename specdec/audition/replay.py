"""Replay: a target says recorded answers again, or the first token that it says otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specdec.audition.recording import Sample
from specdec.core.tokens import common_prefix_length
from specdec.core.types import Tokens
from specdec.engine.engine import SpeculativeEngine

BATCH_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a sample.

    Attributes:
        number: Of the sample in the recording, from 0.
        place: Of the first output token that differs; None if all are the same.
        recorded: The token that was recorded there; None if it is after the recorded output.
        said: The token that is said there now; None if the answer is shorter.
        skipped: Why the sample was not generated again; empty if it was.
        error: Why it could not be generated to its end; empty if it could.
    """

    number: int
    place: int | None = None
    recorded: int | None = None
    said: int | None = None
    skipped: str = ""
    error: str = ""

    @property
    def is_same(self) -> bool:
        """Whether the target said every recorded token again."""
        return not self.skipped and not self.error and self.place is None


def replay(engine: SpeculativeEngine, samples: Sequence[Sample]) -> Iterator[Replayed]:
    """Generate recorded answers again, in batches, and yield what became of each, in order.

    As many tokens are generated as were recorded: what ends an answer otherwise, such as a stop string, decides none.
    """
    for start in range(0, len(samples), BATCH_SEQUENCES):
        part = list(enumerate(samples[start : start + BATCH_SEQUENCES], start))
        able = [(number, sample) for number, sample in part if not _skipped(sample)]
        sequences = [
            (sample.prompt_token_ids, replace(sample.spec(), max_tokens=len(sample.output_token_ids)))
            for _, sample in able
        ]
        results = engine.generate_specs(sequences) if sequences else []
        found = {
            number: _compared(number, sample.output_token_ids, result.token_ids, result.error)
            for (number, sample), result in zip(able, results, strict=True)
        }
        for number, sample in part:
            yield found.get(number) or Replayed(number, skipped=_skipped(sample))


def _skipped(sample: Sample) -> str:
    if not sample.output_token_ids:
        return "it has no output"
    if sample.seed is None and not sample.sampling.is_greedy:
        return "it has no seed, and a temperature above 0"
    return ""


def _compared(number: int, recorded: Tokens, said: Tokens, error: str) -> Replayed:
    place = common_prefix_length(recorded, said)
    if place == len(recorded) == len(said):
        return Replayed(number)
    if place == len(said) and error:
        return Replayed(number, error=error)
    return Replayed(number, place, _at(recorded, place), _at(said, place))


def _at(tokens: Tokens, place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None
