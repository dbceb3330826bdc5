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


@pytest.mark.parametrize("inc", [(1, 3), (2, 0)])
def test_a_newer_inc_replaces_the_row(rows, inc):
    rows.admit(row((1, 2)), 0.0)
    newer = row(inc)
    assert rows.admit(newer, 1.0) is newer
    assert list(rows) == [newer]
