"""Rule 6: what remains of an offer."""

from __future__ import annotations

import pytest

from specdec.protocol.leases import Times
from specdec.protocol.messages import Candidates, Inc, Offer, Open, Outcome, Plan
from specdec.protocol.marks import TokenLog
from specdec.protocol.offers import remaining_draft
from specdec.protocol.worker import WorkerRow
from specdec.sampling.params import SamplingParams, SequenceSpec
from tests.specdec.protocol.scripted import PROMPT, log_of

INC = Inc(1, 0)


def row_with(output, acceptance="coupled") -> WorkerRow:
    spec = SequenceSpec(SamplingParams(acceptance=acceptance), 0, len(PROMPT), 20)
    return TargetRow(Open("s", INC, "R", (*PROMPT, *output), spec, Plan(), Times().lease_s))


def offer(committed, chain, branches=(), candidates=()) -> Offer:
    return Offer("s", INC, log_of(committed).mark(), chain, tuple(branches), tuple(candidates))


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
    assert remaining_draft(offer((1,), (2, 3, 4)), row_with(output)) == expected


BRANCHES = (
    (Outcome(0, 5), (6, 7)),
    (Outcome(1, 5), (8, 9)),
    (Outcome(2, 4), (1, 1, 1)),
    (Outcome(3, 0), (2, 2, 2)),
)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ((1, 5), (6, 7)),  # the first was refused, 5 corrected it
        ((1, 5, 6), (7,)),
        ((1, 2, 5), (8, 9)),
        ((1, 2, 3, 4, 0), (2, 2, 2)),  # all accepted, 0 the bonus token
        ((1, 2, 6), ()),  # an outcome that was not foreseen
        ((1,), (2, 3, 4, 0, 2, 2, 2)),  # nothing decided yet: the longest way on
        ((1, 2, 3, 4, 1), (1, 1)),  # a branch that went the chain's own way, and further
    ],
)
def test_branches_over_what_has_been_committed_since(output, expected):
    assert remaining_draft(offer((1,), (2, 3, 4), BRANCHES), row_with(output)) == expected


def test_under_the_rejection_rule_a_draft_needs_what_it_was_drawn_from():
    candidates = [Candidates((token,), (1.0,)) for token in (2, 3)]
    row = row_with((1,), "rejection")
    assert remaining_draft(offer((1,), (2, 3), candidates=candidates), row) == (2, 3)
    assert remaining_draft(offer((1,), (2, 3)), row) == ()
    assert remaining_draft(offer((1,), (2, 3), candidates=candidates[:1]), row) == ()
