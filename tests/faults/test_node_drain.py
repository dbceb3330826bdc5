"""A node gets SIGTERM: no stream breaks or changes, through its own proxy or another's, and the node ends by itself."""

from __future__ import annotations

import pytest

from tests.integration.node_drains import LEAVING
from tests.integration.nodes import rows_of


@pytest.mark.timeout(900)
def test_a_node_that_drains_breaks_no_stream() -> None:
    (row,) = rows_of("node_drains", "--stream-s", "40", "--streams", "2")
    for compared in (row["through_staying"], row["through_leaving"]):
        assert not any(compared[what] for what in ("broken", "lost", "doubled", "changed")), row
        assert compared["num_tokens"] > 0
    assert set(row["requests"]) == {"200"}, row
    assert min(row["left_s"].values()) < row["streams_s"], "the streams had ended before any replica left"
    assert not row["was_killed"]
    assert all(roles and LEAVING not in roles for roles in row["placement"].values()), row
