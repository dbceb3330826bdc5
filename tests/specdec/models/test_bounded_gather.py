"""What attention copies of the cache at once is bounded, however many rows share a long prefix."""

from collections.abc import Callable

import pytest
import torch

from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.kernels import gather
from specdec.kernels.attention import compact
from specdec.kernels.gather import GatherAttention, Workspace
from specdec.kernels.segmented import AttentionLayer, AttentionShape, AttentionStep
from specdec.models.loading import LoadedModel
from tests.specdec.kernels.steps import spread_step
from tests.specdec.models.families import VOCAB_SIZE

BLOCK_SIZE, PREFIX_BLOCKS, NUM_ROWS = 16, 64, 256
LENGTH = BLOCK_SIZE * PREFIX_BLOCKS


SHAPE = AttentionShape(4, 2, 4, 4, torch.float32, BLOCK_SIZE, NUM_ROWS, NUM_ROWS, LENGTH + BLOCK_SIZE)


@pytest.fixture
def shared_prefix() -> AttentionStep:
    """256 rows of one new token, with a last block of their own behind one long prefix."""
    tables = [[*range(PREFIX_BLOCKS), PREFIX_BLOCKS + row] for row in range(NUM_ROWS)]
    before = [LENGTH + row % BLOCK_SIZE for row in range(NUM_ROWS)]
    return spread_step(tables, [*range(NUM_ROWS)], before, [1] * NUM_ROWS, NUM_ROWS)


def states(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def attend(step: AttentionStep, window: int | None = None) -> tuple[torch.Tensor, int]:
    """The attention, and the most keys that were copied at once."""
    pool, workspace = states(PREFIX_BLOCKS + NUM_ROWS, BLOCK_SIZE, 2, 4), Workspace()
    kernel = GatherAttention(SHAPE, torch.device("cpu"), workspace)
    kernel.prepare(step)
    output = kernel.attend(states(len(step.row), 4, 4), pool, -pool, AttentionLayer(0.5, window))
    return output, max(len(buffer) * BLOCK_SIZE for buffer in workspace._buffers.values())


def test_rows_behind_one_prefix_are_read_in_pieces(
    monkeypatch: pytest.MonkeyPatch, shared_prefix: AttentionStep
) -> None:
    most_numbers = 10 * (LENGTH + BLOCK_SIZE) * 8  # ten rows
    monkeypatch.setitem(gather.MAX_GROUP_NUMBERS, "cpu", 1 << 40)
    whole, largest = attend(shared_prefix)
    assert largest > 100 * LENGTH
    monkeypatch.setitem(gather.MAX_GROUP_NUMBERS, "cpu", most_numbers)
    in_pieces, largest_piece = attend(shared_prefix)
    assert largest_piece * 8 <= most_numbers
    assert (in_pieces - whole).abs().max() <= 1e-6


def test_a_row_larger_than_the_bound_is_read_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gather.MAX_GROUP_NUMBERS, "cpu", 8)
    output, largest = attend(spread_step([[0, 1], [2, 3]], [0, 3], [20, 30], [3, 1], 4))
    assert largest == 2 * BLOCK_SIZE
    assert output.isfinite().all()


@pytest.mark.parametrize(("window", "num_blocks"), [(None, 12), (20, 3)])
def test_no_more_blocks_are_copied_than_are_read(window: int | None, num_blocks: int) -> None:
    """The table of a sequence whose whole prompt has room is longer."""
    step = spread_step([[*range(60)]], [0], [170], [17], 17)
    assert attend(step, window)[1] == num_blocks * BLOCK_SIZE


def test_a_shared_block_of_latents_is_expanded_once(shared_prefix: AttentionStep) -> None:
    compacted = compact(shared_prefix, BLOCK_SIZE)
    assert len(compacted.blocks) == PREFIX_BLOCKS + NUM_ROWS
    assert torch.equal(compacted.blocks[compacted.step.block_table.long()], shared_prefix.block_table)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_forks_behind_a_prefix_give_what_each_gives_alone(
    family: str, models: Callable[[str], tuple[LoadedModel, object]], whole_forward: Callable[..., torch.Tensor]
) -> None:
    loaded, stock = models(family)
    runner = ModelRunner(loaded, num_blocks=40, block_size=4)
    prompt = torch.randint(VOCAB_SIZE, (22,), generator=torch.Generator().manual_seed(1)).tolist()
    first = runner.new_sequence()
    assert runner.reserve(first, 30)
    runner.forward([RowInput(first, prompt, 0)])
    rows = [first, *(runner.fork(first) for _ in range(4))]
    assert all(runner.reserve(row, 30) for row in rows)
    logits = runner.forward([RowInput(row, [number, 7], 1) for number, row in enumerate(rows, start=3)])
    for number, row_logits in enumerate(logits, start=3):
        assert (row_logits - whole_forward(stock, [*prompt, number, 7])[-1]).abs().max() <= 1e-4
