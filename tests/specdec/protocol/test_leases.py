from __future__ import annotations

import pytest

from specdec.core.messages import Epoch, Gone
from specdec.protocol.leases import LeasedSequence, LeasedSequences, Outbox, Times

LEASE_S, TOMBSTONE_S = 5.0, 50.0


@pytest.fixture
def sequences():
    return LeasedSequences(TOMBSTONE_S)


def sequence(epoch, seq="s"):
    return LeasedSequence(seq=seq, epoch=Epoch(*epoch), lease_s=LEASE_S)


def test_a_tombstone_stands_for_its_time_and_is_forgotten_after_it(sequences):
    sequences.drop("s", Epoch(1, 0), 0.0)
    sequences.expire(TOMBSTONE_S)
    assert sequences.admit(sequence((1, 0)), TOMBSTONE_S) is None
    sequences.expire(TOMBSTONE_S + 1)
    assert not sequences._tombstones
    assert sequences.admit(sequence((1, 0)), TOMBSTONE_S + 1) is not None


def test_a_sequence_is_buried_if_the_tombstone_of_a_newer_epoch_has_run_out(sequences):
    sequences.drop("s", Epoch(2, 0), 0.0)
    sequences.drop("s", Epoch(1, 0), TOMBSTONE_S + 1)
    assert sequences.admit(sequence((1, 0)), TOMBSTONE_S + 1) is None


def test_a_tombstone_stands_for_ten_leases():
    assert Times(lease_s=5.0).tombstone_s == 50.0


def test_an_outbox_keeps_order_per_peer_and_gives_everything_once():
    outbox = Outbox()
    for peer, attempt in (("a", 1), ("b", 2), ("a", 3)):
        outbox.put(peer, Gone("s", attempt))
    assert outbox.take() == {"a": [Gone("s", 1), Gone("s", 3)], "b": [Gone("s", 2)]}
    assert outbox.take() == {}


@pytest.mark.parametrize("epoch", [(1, 3), (2, 0)])
def test_a_newer_inc_replaces_the_row(sequences, epoch):
    sequences.admit(sequence((1, 2)), 0.0)
    newer = sequence(epoch)
    assert sequences.admit(newer, 1.0) is newer
    assert list(sequences) == [newer]
