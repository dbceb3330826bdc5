from __future__ import annotations

import pytest

from specdec.core.messages import Gone, Inc
from specdec.protocol.leases import LeasedRows, Outbox, Row, Times

LEASE_S, TOMBSTONE_S = 5.0, 50.0


@pytest.fixture
def rows():
    return LeasedRows(TOMBSTONE_S)


def row(inc, seq="s"):
    return Row(seq=seq, inc=Inc(*inc), lease_s=LEASE_S)


def test_a_row_is_admitted_and_found_under_its_inc_only(rows):
    first = row((1, 2))
    assert rows.admit(first, 0.0) is first
    assert rows.get("s") is first
    assert rows.current("s", Inc(1, 2)) is first
    assert rows.current("s", Inc(1, 1)) is None
    assert rows.current("s", Inc(1, 3)) is None
    assert rows.current("other", Inc(1, 2)) is None
    assert (len(rows), list(rows)) == (1, [first])


@pytest.mark.parametrize("inc", [(1, 2), (1, 1), (0, 9)])
def test_the_same_or_an_older_inc_changes_nothing(rows, inc):
    first = row((1, 2))
    rows.admit(first, 0.0)
    assert rows.admit(row(inc), 1.0) is None
    assert rows.get("s") is first


def test_only_the_same_inc_renews_the_lease(rows):
    first = row((1, 2))
    rows.admit(first, 0.0)
    rows.admit(row((1, 1)), 2.0)
    assert first.lease_until_s == LEASE_S
    rows.admit(row((1, 2)), 2.0)
    assert first.lease_until_s == 2.0 + LEASE_S


@pytest.mark.parametrize("inc", [(1, 3), (2, 0)])
def test_a_newer_inc_replaces_the_row(rows, inc):
    rows.admit(row((1, 2)), 0.0)
    newer = row(inc)
    assert rows.admit(newer, 1.0) is newer
    assert list(rows) == [newer]


def test_expiry_frees_what_nobody_renewed_and_only_that(rows):
    kept, left = row((1, 0), "kept"), row((1, 0), "left")
    rows.admit(kept, 0.0)
    rows.admit(left, 0.0)
    rows.renew(kept, 3.0)
    assert rows.expire(LEASE_S) == []
    assert rows.expire(LEASE_S + 1) == [left]
    assert list(rows) == [kept]
    assert rows.admit(row((1, 0), "left"), LEASE_S + 2) is None


@pytest.mark.parametrize("held", [True, False])
def test_what_was_closed_comes_back_under_a_newer_inc_only(rows, held):
    if held:
        rows.admit(row((1, 1)), 0.0)
    assert (rows.drop("s", Inc(1, 2), 1.0) is not None) == held
    assert rows.admit(row((1, 1)), 2.0) is None
    assert rows.admit(row((1, 2)), 2.0) is None
    assert rows.admit(row((1, 3)), 2.0) is not None


def test_closing_an_older_inc_leaves_the_row(rows):
    held = row((2, 0))
    rows.admit(held, 0.0)
    assert rows.drop("s", Inc(1, 9), 1.0) is None
    assert rows.get("s") is held


def test_closing_an_older_inc_does_not_weaken_a_tombstone(rows):
    rows.drop("s", Inc(2, 0), 0.0)
    rows.drop("s", Inc(1, 0), 1.0)
    assert rows.admit(row((2, 0)), 2.0) is None


def test_a_tombstone_stands_for_its_time_and_is_forgotten_after_it(rows):
    rows.drop("s", Inc(1, 0), 0.0)
    rows.expire(TOMBSTONE_S)
    assert rows.admit(row((1, 0)), TOMBSTONE_S) is None
    rows.expire(TOMBSTONE_S + 1)
    assert not rows._tombstones
    assert rows.admit(row((1, 0)), TOMBSTONE_S + 1) is not None


def test_a_tombstone_stands_for_ten_leases():
    assert Times(lease_s=5.0).tombstone_s == 50.0


def test_an_outbox_keeps_order_per_peer_and_gives_everything_once():
    outbox = Outbox()
    for peer, attempt in (("a", 1), ("b", 2), ("a", 3)):
        outbox.put(peer, Gone("s", attempt))
    assert outbox.take() == {"a": [Gone("s", 1), Gone("s", 3)], "b": [Gone("s", 2)]}
    assert outbox.take() == {}
