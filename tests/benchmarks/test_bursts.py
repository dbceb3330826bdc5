from __future__ import annotations

import random

import pytest

from benchmarks.bursts import ratio_of, table

RATES = {"default": [20.0, 10.0, 40.0], "alone": [10.0, 10.0, 10.0], "control": [10.0, 10.0, 10.0]}


def test_a_ratio_is_that_of_the_geometric_means_and_lies_within_its_interval() -> None:
    found = ratio_of(RATES, "default", random.Random(0))
    assert found.ratio == pytest.approx(2.0)
    assert 1.0 <= found.low < found.ratio < found.high <= 4.0
    assert ratio_of(RATES, "control", random.Random(0)) == (1.0, 1.0, 1.0)


def test_a_table_has_a_row_per_cell_and_the_mean_of_all() -> None:
    lines = table({"one": RATES, "two": {**RATES, "default": [5.0, 5.0, 5.0]}}).splitlines()
    assert len(lines) == 5
    assert "| one | 3 | 2.00" in lines[2]
    assert lines[-1].endswith("1.000")
