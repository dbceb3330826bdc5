from __future__ import annotations

import pytest

from specdec.protocol.messages import Notes
from specdec.types import TokenLogprobs

LOGPROBS = tuple(TokenLogprobs(-float(i), i + 1) for i in range(4))
NOTES = Notes("aacp", (0, 0, 3, 0))
REPORTED = Notes("aacp", (0, 0, 3, 0), LOGPROBS, num_cached_tokens=7)


@pytest.mark.parametrize("notes", [NOTES, REPORTED])
@pytest.mark.parametrize("count", range(5))
def test_first_and_last_cut_every_field_alike(notes, count):
    first, last = notes.first(count), notes.last(count)
    assert (first.how, first.num_drafted) == (notes.how[:count], notes.num_drafted[:count])
    assert (last.how, last.num_drafted) == (notes.how[4 - count :], notes.num_drafted[4 - count :])
    if notes.logprobs is not None:
        assert (first.logprobs, last.logprobs) == (LOGPROBS[:count], LOGPROBS[4 - count :])
    else:
        assert first.logprobs is last.logprobs is None
    assert first.num_cached_tokens == (notes.num_cached_tokens if count else 0)
    assert last.num_cached_tokens == (notes.num_cached_tokens if count == 4 else 0)
    assert notes.first(count) + notes.last(4 - count) == notes


def test_sums_over_the_parts_of_a_log_count_each_draft_once():
    parts = [REPORTED.first(2), REPORTED.last(2).first(1), REPORTED.last(1)]
    assert sum(sum(part.num_drafted) for part in parts) == 3


def test_adding_nothing_changes_nothing():
    assert Notes() + NOTES == NOTES + Notes() == NOTES
    assert Notes() + REPORTED == REPORTED + Notes() == REPORTED
