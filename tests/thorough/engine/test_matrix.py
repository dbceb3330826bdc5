"""Each kind of target with each feature: its texts are its own. Kills are one hostile loop over all that drafts."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.sizes import some
from tests.specdec.engine.features import Feature, assert_texts_are_its_own, demo

NOT_OF_HYBRIDS = ("heads", "trees", "EAGLE-3", "EAGLE-3 trees", "preemption")
"""Heads are of the other target; and what hybrids run short of is states, for which sequences wait."""
CELLS = [
    (role, quantization, feature)
    for feature in ("kills", "trees", *get_args(Feature))
    for role, quantization in (("target", "none"), ("hybrid", "none"), ("target", "int8"), ("hybrid", "int8"))
    if role == "target" or feature not in NOT_OF_HYBRIDS
]


@pytest.mark.parametrize(("role", "quantization", "feature"), some([*dict.fromkeys(CELLS)], 7))
def test_each_text_is_the_targets_own(role: str, quantization: str, feature: Feature) -> None:
    if quantization != "none":
        pytest.importorskip("torchao")
    assert_texts_are_its_own(demo(role, quantization=quantization), demo("draft"), feature)
