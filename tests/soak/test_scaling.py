"""Replicas come and go with the load, and no stream and no request is the worse for it."""

from __future__ import annotations

import pytest

from tests.integration.scaling import start, under_load, undisturbed


@pytest.mark.timeout(900)
def test_replicas_follow_the_load_and_streams_do_not_notice() -> None:
    expected = undisturbed()
    service = start(most_targets=2)
    try:
        outcome = under_load(service, expected, most_targets=2, at_once=32)
    finally:
        service.stop()
    compared = outcome.compared
    assert compared is not None
    assert not compared.broken
    assert compared.is_exact
    assert outcome.changes == {"target": [1, 2, 1], "ingress": [1, 2, 1]}, "replicas came and went in turn"
    assert outcome.most_targets == 2
    assert outcome.least_targets == 1, "the long streams went on there"
    assert set(outcome.statuses) == {200}, "somebody was refused"
    assert outcome.num_drafts[0] > 0
    assert outcome.num_drafts[1] > 0, "the pool came back"
