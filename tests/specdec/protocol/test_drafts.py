"""Rule 6: what remains of an offer."""

from __future__ import annotations

import pytest

from specdec.core.drafts import remaining_draft
from specdec.core.messages import Epoch, Offer, Outcome
from tests.specdec.protocol.scripted import log_of

EPOCH = Epoch(1, 0)


def rest_of(offer, output) -> tuple[int, ...]:
    return remaining_draft(offer, log_of(output)).tokens


def offer(committed, chain, branches=()) -> Offer:
    return Offer("s", EPOCH, log_of(committed).prefix_hash(), chain, tuple(branches))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ((1,), (2, 3, 4)),  # fresh
        ((1, 2), (3, 4)),  # partly stale: the useful tail is kept
        ((1, 2, 3), (4,)),
        ((1, 2, 3, 4), ()),  # nothing is left of it
        ((1, 2, 9), ()),  # the target has chosen otherwise
        ((8,), ()),  # made for another log
        ((8, 2, 3), ()),
        ((), ()),  # made for more than is committed here
    ],
)
def test_a_chain_after_what_has_been_committed_since(output, expected):
    assert rest_of(offer((1,), (2, 3, 4)), output) == expected


BRANCHES = (
    (Outcome(0, 5), (6, 7)),
    (Outcome(1, 5), (8, 9)),
    (Outcome(1, 6), (8, 9, 9, 9, 9)),
    (Outcome(3, 0), (2, 2, 2)),
)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ((1, 5), (6, 7)),  # the first was refused, 5 corrected it
        ((1, 5, 6), (7,)),
        ((1, 2, 5), (8, 9)),
        ((1, 2, 3, 4, 0), (2, 2, 2)),  # all accepted, 0 the bonus token
        ((1, 2, 6, 8), (9, 9, 9, 9)),
        ((1, 2, 6, 7), ()),  # the branch was left
        ((1, 2, 6, 8, 9, 9, 9, 9), ()),  # nothing is left of it
        ((1, 2, 8), ()),  # an outcome that was not foreseen
        ((1, 2, 3, 4, 1), ()),
        ((1,), (2, 3, 4)),  # nothing decided yet: the chain, however long a branch beside it is
        ((1, 2), (3, 4)),
        ((1, 2, 3, 4), ()),  # no outcome is guessed here: the target decides it
    ],
)
def test_branches_over_what_has_been_committed_since(output, expected):
    assert rest_of(offer((1,), (2, 3, 4), BRANCHES), output) == expected
