"""One draft model under two applications: both draft, and its absence and its death cost speed alone."""

from __future__ import annotations

import pytest

from tests.integration.nodes import rows_of


@pytest.mark.timeout(900)
def test_one_draft_model_drafts_for_two_applications_and_costs_only_speed() -> None:
    rows = rows_of("draft_pools")
    for row in rows:
        assert row["broken"] == {"plain": 0, "hybrid": 0}, row
        assert row["exact"] == {"plain": True, "hybrid": True}, row
        assert row.get("ready", True), row
    taken = {row["step"]: [count > 0 for count in row["accepted"].values()] for row in rows}
    assert taken.pop("no pool") == [False, False]
    assert taken.pop("a pool") == taken.pop("an application went and came back") == [True, True]
    assert len(taken) == 2, "whether anything is drafted while the pool dies is a matter of when"
    assert rows[1]["placement"]["drafts"]["DraftServer"] == ["drafts"]
    for application in ("plain", "hybrid"):
        found = rows[1]["placement"][application]
        assert (found.pop("DraftServer"), set(map(tuple, found.values()))) == ([], {("head",)})
