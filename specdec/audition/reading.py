"""Read recorded answers with a draft model: which drafts it would have drawn at each place, without a target.

Under the coupled rule a draft token depends on the text before it, on the seed and on the draft model, and on nothing
that was served. The drafter draws here by its own pipeline: noise, edits, grammar, truncation, adapters, vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.audition.recording import Sample
from specdec.core.backends import DraftBackend, DraftJob, Proposal, Status
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenArray, as_array, followed
from specdec.core.types import Tokens

OPEN_SEQUENCES = 128
"""Samples that are read at the same time, a token of each in a step."""
_WAIT_S = 0.005


@dataclass(frozen=True, slots=True)
class Reading:
    """The drafts that would be drawn at each of an answer's n places; three lists of n integers.

    Attributes:
        room: Draft tokens that a round may verify that begins at the place.
        num_right: Tokens of the draft that begins there which are the answer's, up to the first that is not.
        num_drawn: Tokens of that draft, up to its ending token; more than any length that was asked for counts as that.
        is_whole: Whether the drafter read the answer to its end.
    """

    room: list[int]
    num_right: list[int]
    num_drawn: list[int]
    is_whole: bool = True


class _Ask(NamedTuple):
    """What a reader wants drawn: tokens after ``tokens``, which agree with those that it asked with before."""

    tokens: TokenArray
    agreed: int
    num_committed: int
    num_tokens: int


_Reader = Generator[_Ask, Tokens | None, Reading]


def read_drafts(
    drafter: DraftBackend, samples: Sequence[Sample], most: int, *, seeds: Sequence[int], is_parallel: bool = False
) -> list[Reading]:
    """Read answers, a step of the drafter for each token, many answers in a step.

    A draft goes on after a token that is not the answer's, as it would have when it was served: an ending token may
    shorten it.

    Args:
        drafter: Is driven by nobody else.
        samples: Those without a seed are drawn for with that of ``seeds``.
        most: Longest draft of interest, in tokens.
        seeds: For each sample.
        is_parallel: Whether tokens of a draft depend on where it begins, as with several tokens in a pass.
    """
    readings: list[Reading | None] = [None] * len(samples)
    waiting = list(enumerate(samples))[::-1]
    open_readers: dict[int, tuple[_Reader, SequenceSpec, _Ask]] = {}
    while waiting or open_readers:
        while waiting and len(open_readers) < OPEN_SEQUENCES:
            number, sample = waiting.pop()
            spec = sample.spec(seeds[number])
            reader = _reader(sample, spec, most, drafter.max_model_len, is_parallel)
            _go_on(number, reader, spec, None, open_readers, readings)
        jobs = [
            DraftJob(str(number), ask.tokens, spec, ask.agreed, ask.num_committed, num_tokens=ask.num_tokens)
            for number, (_, spec, ask) in open_readers.items()
        ]
        if not jobs:
            continue
        proposals = drafter.propose(jobs)
        if all(one.status is Status.WAITING for one in proposals):
            time.sleep(_WAIT_S)  # for a grammar or an adapter, which another thread reads
        for (number, (reader, spec, ask)), proposal in zip(list(open_readers.items()), proposals, strict=True):
            if proposal.status in (Status.PREFILLING, Status.WAITING):
                continue
            _go_on(number, reader, spec, _drawn(proposal, ask), open_readers, readings)
            if number not in open_readers:
                drafter.release(str(number))
    return [reading for reading in readings if reading is not None]


def _go_on(
    number: int,
    reader: _Reader,
    spec: SequenceSpec,
    drawn: Tokens | None,
    open_readers: dict[int, tuple[_Reader, SequenceSpec, _Ask]],
    readings: list[Reading | None],
) -> None:
    """Hand a reader what was drawn, and take what it asks for next, or its reading."""
    try:
        ask = reader.send(drawn)
    except StopIteration as end:
        open_readers.pop(number, None)
        readings[number] = end.value
    else:
        open_readers[number] = reader, spec, ask


def _drawn(proposal: Proposal, ask: _Ask) -> Tokens | None:
    """The tokens of a proposal; None if there are none and will be none."""
    if proposal.status is not Status.DECIDED:
        return None
    tokens = [one.token for one in (proposal, *proposal.further)[: ask.num_tokens]]
    return tuple(token for token in tokens if token is not None)


def _reader(sample: Sample, spec: SequenceSpec, most: int, max_model_len: int, is_parallel: bool) -> _Reader:
    """Ask for the drafts of one answer, place by place."""
    output, start = sample.output_token_ids, spec.output_start
    text = as_array([*sample.prompt_token_ids, *output])
    ending, count = spec.ending_token_ids, len(output)
    room = [max(0, min(spec.max_tokens - place - 1, max_model_len + 1 - start - place)) for place in range(count)]
    num_right, num_drawn, goes_on = [0] * count, [0] * count, [False] * count
    agreed, is_whole = 0, True  # what was asked with last agrees so far
    for place in range(count):
        own: list[int] = []
        wanted = min(most, room[place])
        while len(own) < wanted and is_whole:
            tokens = followed(text[: start + place], own) if own else text[: start + place]
            num_tokens = wanted - len(own) if own or is_parallel else 1
            drawn = yield _Ask(tokens, agreed, start + place, num_tokens)
            agreed = start + place + len(own)
            own += _cut(drawn or (), ending)
            is_whole = drawn is not None
            # What comes after a right token is drawn at the next place.
            goes_on[place] = not is_parallel and len(own) == 1 and own[0] == output[place] and own[0] not in ending
            if goes_on[place] or (own and own[-1] in ending):
                break
        agreed = min(agreed, start + place)
        num_drawn[place], num_right[place] = len(own), num_right_of(own, output[place:])
    for place in range(count - 2, -1, -1):
        if goes_on[place] and room[place + 1]:
            num_right[place] += num_right[place + 1]
            num_drawn[place] += num_drawn[place + 1]
    return Reading(room, num_right, num_drawn, is_whole)


def num_right_of(draft: Sequence[int], rest: Tokens) -> int:
    """Return how many tokens of a draft are those of the text, up to the first that is not."""
    return next((i for i, token in enumerate(draft) if rest[i : i + 1] != (token,)), len(draft))


def _cut(tokens: Tokens, ending: frozenset[int]) -> Tokens:
    """Up to the first ending token, that included."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ending), tokens)
