"""Bits of logits over batches, drafts, chunks, cached prefixes and lost caches: none differ under strict."""

from __future__ import annotations

import pytest

from benchmarks.flips import Case, FlipRuns, Texts, num_blocks, random_model
from cluster.models.demos import demo_folder
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, ModelSource, load_model

TEXTS = Texts(num_prompt=48, num_output=40)
CASES = [Case(1, 4, 7, True), Case(6, 0, 20, False), Case(6, 8, 48, True), Case(6, 4, 7, False)]


@pytest.fixture(scope="module")
def wide() -> LoadedModel:
    """Of a hidden size whose products libraries split."""
    return random_model(2048)


def differing(loaded: LoadedModel, tile_tokens: int | None) -> tuple[int, int]:
    most = max(case.batch for case in CASES)
    runner = ModelRunner(
        loaded, num_blocks=num_blocks(TEXTS, most), num_state_slots=2 * most + 2, tile_tokens=tile_tokens
    )
    runs = FlipRuns(runner, TEXTS, most)
    found = [runs.compare(case) for case in CASES]
    return sum(flips.num_positions for flips in found), sum(flips.num_bits for flips in found)


@pytest.mark.parametrize("tile_tokens", [8, 16])
def test_strict_differs_nowhere(wide: LoadedModel, tile_tokens: int) -> None:
    num_positions, num_bits = differing(wide, tile_tokens)
    assert num_positions > 2 * 19 * TEXTS.num_prompt  # all of it is read twice
    assert num_bits == 0


def test_fast_differs(wide: LoadedModel) -> None:
    assert differing(wide, None)[1] > 0


@pytest.mark.parametrize("name", ["target", "hybrid"])
def test_strict_differs_nowhere_with_a_demo_target(name: str) -> None:
    loaded = load_model(ModelSource(str(demo_folder(name)), dtype="bfloat16", device="cpu"))
    assert differing(loaded, 16)[1] == 0
