"""How much of a device a model's cache takes."""

import pytest

from specdec.engine.build import gpu_budget_bytes

GIB = 1 << 30


@pytest.mark.parametrize("target_first", [True, False])
def test_two_models_on_one_gpu_leave_each_other_room(target_first: bool) -> None:
    """Whoever loads first: both get a cache, and all of it fits."""
    weights = [16 * GIB, 2 * GIB] if target_first else [2 * GIB, 16 * GIB]
    free, budgets = 80 * GIB, []
    for weight in weights:
        free -= weight
        budgets.append(gpu_budget_bytes(80 * GIB, free, weight, 0.5))
        free -= budgets[-1]
    assert free > 0
    assert min(budgets) > 15 * GIB


def test_one_model_takes_most_of_its_gpu_and_no_more_than_is_free() -> None:
    assert gpu_budget_bytes(80 * GIB, 64 * GIB, 16 * GIB, 1.0) == pytest.approx(0.9 * 64 * GIB, abs=1)
    assert gpu_budget_bytes(80 * GIB, 10 * GIB, 16 * GIB, 1.0) == pytest.approx(0.9 * 10 * GIB, abs=1)
    assert gpu_budget_bytes(80 * GIB, 60 * GIB, 50 * GIB, 0.5) == 0
