from __future__ import annotations

import pytest

from specdec.drafting.length.estimates import MEMORY, DecayedRate, tally
from tests.letters import provenance


@pytest.mark.parametrize(
    ("how", "num_drafted", "counts"),
    [
        ("", (), (0, 0, 0)),
        ("pp", (0, 0), (2, 0, 0)),
        ("aab", (0, 0, 2), (1, 2, 2)),
        ("aac", (0, 0, 4), (1, 2, 3)),
        ("cpaa", (3, 0, 0, 2), (3, 2, 3)),
        ("aaaab", (0, 0, 0, 0, 16), (1, 4, 4)),
    ],
)
def test_what_follows_a_refused_token_was_not_judged(how, num_drafted, counts):
    assert tally(provenance(how), num_drafted) == counts


def test_a_rate_begins_at_its_prior_and_forgets():
    rate = DecayedRate()
    assert rate.rate(0.5, 4) == 0.5
    for _ in range(100):
        rate = rate.add(0, 10)
    assert rate.trials == pytest.approx(MEMORY, rel=0.03)
    for _ in range(100):
        rate = rate.add(10, 10)
    assert rate.rate(0.5, 4) > 0.95
    assert rate.times(0.0).rate(0.5, 4) == 0.5
