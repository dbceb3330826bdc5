"""Models with recurrent layers in steps of fixed sizes, whose rows only the device knows, by kernels."""

from __future__ import annotations

import pytest
from torch import Tensor

from specdec.cache.recurrent import binding, pool
from specdec.cache.recurrent.pool import checked_window
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner
from specdec.kernels import recurrent
from specdec.kernels.recurrent import KeptStates
from specdec.kernels.recurrent_metadata import StateRow
from specdec.kernels.scan import Scan
from tests.specdec.kernels.interpreter import interpreted
from tests.specdec.models.rounds import Rounds, pair

FAMILIES = ["qwen3_5", "mamba2", "bamba", "falcon_mamba", "lfm2"]
TOLERANCE = 3e-4


@pytest.mark.parametrize(("family", "is_fast"), [("qwen3_5", False), ("qwen3_5", True), ("bamba", True)])
@interpreted
def test_prompts_are_read_by_the_stock_scan_where_that_is_a_kernel(family: str, is_fast: bool) -> None:
    """By transformers' own here, in its place; but what a window needs, and where it is none, by ours."""
    loaded, stock = pair(family)
    ahead: list[int] = []
    read_ahead = pool._read_ahead

    def noting(scan: Scan, kept: KeptStates, row: StateRow) -> Tensor:
        ahead.append(row.num_ahead)
        return read_ahead(scan, kept, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recurrent._KERNELS, "reference", recurrent._KERNELS["triton"])
        patch.setattr(binding, "is_fast", lambda _: is_fast)
        patch.setattr(pool, "_read_ahead", noting)
        runner = ModelRunner(
            loaded, num_blocks=300, block_size=4, kernel="reference", num_state_slots=8, window=checked_window(6)
        )
        runner.record_graphs(ExecutorLimits(max_rows=5, max_tokens=160, max_length=200, max_draft_tokens=4))
        game = Rounds(runner, stock, seed=0)
        lengths = (75, 3, 71) if is_fast else (30, 3, 26)  # no recorded step holds them
        prompts = [(runner.new_sequence(), list[int](), game.tokens(length)) for length in lengths]
        game.forward(prompts)
        game.rows.extend((sequence, prompt) for sequence, _, prompt in prompts)
        for _ in range(2):  # what was taken back after the first is scanned again in the second
            game.verify(4)
    num_scans = sum(len(layer.scans) for layer in loaded.recurrent_layers)
    assert ahead == ([69, 65] * num_scans if is_fast else [])
    assert game.difference < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@interpreted
def test_recorded_steps_give_what_a_plain_forward_gives(family: str) -> None:
    """Prompts in pieces, drafts of which some are taken back, tokens read ahead, forks; some steps are not recorded."""
    loaded, stock = pair(family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recurrent._KERNELS, "reference", recurrent._KERNELS["triton"])
        runner = ModelRunner(
            loaded, num_blocks=300, block_size=4, kernel="reference", num_state_slots=8, window=checked_window(6)
        )
    runner.record_graphs(ExecutorLimits(max_rows=5, max_tokens=64, max_length=120, max_draft_tokens=4))
    assert not runner.graphs_failure
    game = Rounds(runner, stock, seed=0)
    game.prefill([9, 4, 44], max_chunk=20)
    for _ in range(3):
        game.verify(4)
    game.draft(2)
    fork = runner.fork(game.rows[0][0])
    game.rows.append((fork, list(fork.tokens)))
    graphs, runner._graphs = runner._graphs, None  # states and inputs are in the same places
    game.verify(4)
    runner._graphs = graphs
    game.verify(4)
    game.drop_all()
    assert runner.states is not None
    assert runner.states.num_in_use == 0
    assert game.difference < TOLERANCE
