from __future__ import annotations

import pytest

from specdec.core.messages import Notes, RoundTimes
from specdec.core.types import TokenLogprobs
from tests.letters import provenance, spelled

LOGPROBS = tuple(TokenLogprobs(-float(i), i + 1) for i in range(4))
NOTES = Notes(provenance("aacp"), (0, 0, 3, 0))
REPORTED = Notes(provenance("aacp"), (0, 0, 3, 0), LOGPROBS, num_cached_tokens=7)
TIMES = None, None, RoundTimes((1.0, 2.0), ((0.5, 0.75),)), RoundTimes((2.0, 3.0))
TIMED = Notes(provenance("aacp"), (0, 0, 3, 0), times=TIMES)


@pytest.mark.parametrize("notes", [NOTES, REPORTED, TIMED])
@pytest.mark.parametrize("count", range(5))
def test_first_and_last_cut_every_field_alike(notes, count):
    first, last = notes.first(count), notes.last(count)
    assert (spelled(first), first.num_drafted) == (spelled(notes)[:count], notes.num_drafted[:count])
    assert (spelled(last), last.num_drafted) == (spelled(notes)[4 - count :], notes.num_drafted[4 - count :])
    if notes.logprobs is not None:
        assert (first.logprobs, last.logprobs) == (LOGPROBS[:count], LOGPROBS[4 - count :])
    else:
        assert first.logprobs is last.logprobs is None
    assert (first.times, last.times) == (notes.times[:count], notes.times[4 - count :])
    assert first.num_cached_tokens == (notes.num_cached_tokens if count else 0)
    assert last.num_cached_tokens == (notes.num_cached_tokens if count == 4 else 0)
    assert notes.first(count) + notes.last(4 - count) == notes


def test_sums_over_the_parts_of_a_log_count_each_draft_once():
    parts = [REPORTED.first(2), REPORTED.last(2).first(1), REPORTED.last(1)]
    assert sum(sum(part.num_drafted) for part in parts) == 3


def test_what_nobody_measured_keeps_its_place_beside_what_was():
    assert (NOTES + TIMED).times == (None,) * 4 + TIMES
    assert (TIMED + NOTES).times == TIMES + (None,) * 4
    assert (NOTES + NOTES).times == ()


def test_adding_nothing_changes_nothing():
    assert Notes() + NOTES == NOTES + Notes() == NOTES
    assert Notes() + REPORTED == REPORTED + Notes() == REPORTED
