"""The comparison of ways to roll back: all do the same work and end in the same state."""

from cluster.bench.rollback import compare_rollback, delta_rule_model
from cluster.bench.rollback_costs import WAYS, RollbackWork


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


def test_large_states_take_less_memory_by_scanning_again() -> None:
    loaded = delta_rule_model(num_heads=8, head_dim=64, hidden_size=64)
    work = RollbackWork(num_rows=1, num_draft_tokens=2, num_rounds=1, num_warmup_rounds=0, prompt_length=4)
    by_way = {cost.way: cost.bytes_per_sequence for cost in compare_rollback(loaded, work).costs}
    assert by_way["rescan"] < by_way["states"]
    assert by_way["rescan"] < by_way["second forward"]
