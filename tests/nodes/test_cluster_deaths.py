"""The GCS, the head and a node die, and a node stands still: no stream breaks or changes; replicas stay in place."""

from __future__ import annotations

import pytest

from tests.integration.cluster_deaths import EVENTS
from tests.integration.nodes import rows_of

pytestmark = pytest.mark.timeout(900)


def test_deaths_in_the_cluster_change_no_stream_and_no_place() -> None:
    rows = rows_of("cluster_deaths", *EVENTS)
    assert [row["event"] for row in rows] == list(EVENTS)
    for row in rows:
        assert row["placement"] == {
            "OpenAIIngress": ["front"],
            "SpeculationRouter": ["front"],
            "TargetServer": ["models"],
            "DraftServer": ["models"],
        }, row
    for row in (row for row in rows if row["event"] != "restart"):
        assert not any(row[what] for what in ("broken", "lost", "doubled", "changed")), row
        assert row["num_tokens"] > 0
