"""The comparison of ways to roll back: all do the same work and end in the same state."""

import pytest

from benchmarks.one_state import OneState
from benchmarks.rollback import compare_rollback, delta_rule_model
from benchmarks.rollback_costs import WAYS, RollbackWork
from specdec.models.recurrent.pool import state_bytes


def test_all_ways_end_in_the_same_state() -> None:
    loaded = delta_rule_model(num_heads=4, head_dim=16, hidden_size=64)
    work = RollbackWork(num_rows=3, num_draft_tokens=3, num_rounds=6, num_warmup_rounds=1, prompt_length=20)
    found = compare_rollback(loaded, work)
    costs = found.costs
    assert [cost.way for cost in costs] == list(WAYS)
    for cost in costs:
        assert cost.max_difference < 1e-4
        assert cost.spread[0] <= cost.rounds_per_s <= cost.spread[1]
        assert cost.bytes_per_sequence > 0
    assert sum(line.startswith("| ") for line in found.markdown()) == 1 + len(WAYS)


def test_memory_is_counted_as_it_is_needed() -> None:
    """A copy takes one state more; inputs to scan again a little more than that."""
    loaded = delta_rule_model(num_heads=8, head_dim=64, hidden_size=64)
    work = RollbackWork(num_rows=1, num_draft_tokens=2, num_rounds=1, num_warmup_rounds=0, prompt_length=4)
    by_way = {cost.way: cost.bytes_per_sequence for cost in compare_rollback(loaded, work).costs}
    num_state_bytes = 3 * 8 * 64 * 64 * 4
    assert 2 * num_state_bytes < by_way["second forward"] < by_way["rescan"]
    assert by_way["second forward"] == 2 * state_bytes(loaded.recurrent_layers)


def test_a_copy_that_is_not_put_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneState, "copy", lambda self, source, destination: None)
    loaded = delta_rule_model(num_heads=4, head_dim=16, hidden_size=64)
    work = RollbackWork(num_rows=2, num_draft_tokens=3, num_rounds=3, num_warmup_rounds=0, prompt_length=8)
    assert compare_rollback(loaded, work).costs[-1].max_difference > 3e-4
