"""What attention copies of the cache at once is bounded, however many rows share a long prefix."""

from collections.abc import Callable

import pytest
import torch

from specdec.executor.runner import ModelRunner, RowInput
from specdec.kernels import attention_metadata as plans
from specdec.kernels import varlen
from specdec.kernels.attention import AttentionContext, Workspace, paged_attention
from specdec.kernels.attention_metadata import RowSpan, StepPlan
from specdec.kernels.latent import compact
from specdec.models.loading import LoadedModel
from tests.specdec.models.families import VOCAB_SIZE
from tests.specdec.models.test_attention import flash

BLOCK_SIZE, PREFIX_BLOCKS, NUM_ROWS = 16, 64, 256
LENGTH = BLOCK_SIZE * PREFIX_BLOCKS


@pytest.fixture
def shared_prefix() -> StepPlan:
    """256 rows of one new token, with a last block of their own behind one long prefix."""
    tables = [[*range(PREFIX_BLOCKS), PREFIX_BLOCKS + row] for row in range(NUM_ROWS)]
    spans = [RowSpan(row, 1, LENGTH + row % BLOCK_SIZE, table) for row, table in enumerate(tables)]
    return StepPlan(spans, NUM_ROWS, BLOCK_SIZE, 0)


def states(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def attend(plan: StepPlan, kernel: str, workspace: Workspace | None = None) -> torch.Tensor:
    pool = states(PREFIX_BLOCKS + NUM_ROWS, BLOCK_SIZE, 2, 4)
    context = AttentionContext(plan, workspace or Workspace(), kernel)
    query = states(1, 4, NUM_ROWS, 4)
    return paged_attention(torch.nn.Identity(), query, pool, -pool, attention_context=context)[0]


def test_rows_behind_one_prefix_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch, shared_prefix: StepPlan) -> None:
    most_numbers = 10 * (LENGTH + BLOCK_SIZE) * 8  # ten rows
    whole = {kernel: attend_with(monkeypatch, shared_prefix, kernel, 1 << 40) for kernel in ("varlen", "gather")}
    for kernel, (output, largest) in whole.items():
        assert largest > 100 * LENGTH, kernel
        in_pieces, largest_piece = attend_with(monkeypatch, shared_prefix, kernel, most_numbers)
        assert largest_piece * 8 <= most_numbers, kernel
        assert (in_pieces - output).abs().max() <= (0 if kernel == "varlen" else 1e-6)


def attend_with(
    monkeypatch: pytest.MonkeyPatch, plan: StepPlan, kernel: str, most_numbers: int
) -> tuple[torch.Tensor, int]:
    """The attention with a bound, and the most keys that were copied at once."""
    copied = []

    def counted(query: torch.Tensor, key: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        copied.append(len(key))
        return flash(query, key, *args, **kwargs)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", counted)
    monkeypatch.setitem(plans.MAX_GROUP_NUMBERS, "cpu", most_numbers)
    workspace = Workspace()
    rows = StepPlan(plan.rows, plan.num_tokens, BLOCK_SIZE, 0)
    output = attend(rows, kernel, workspace)
    copied += [len(buffer) * BLOCK_SIZE for buffer in workspace._buffers.values()]
    return output, max(copied)


def test_a_row_larger_than_the_bound_is_read_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plans.MAX_GROUP_NUMBERS, "cpu", 8)
    spans = [RowSpan(0, 3, 20, [0, 1]), RowSpan(3, 1, 30, [2, 3])]
    plan = StepPlan(spans, 4, BLOCK_SIZE, 0)
    pieces = varlen._pieces(plan, None, torch.device("cpu"), 1)
    assert [(piece.queries, piece.max_seqlen_k) for piece in pieces] == [(slice(0, 3), 23), (slice(3, 4), 31)]


@pytest.mark.xfail(
    strict=True, reason="part 17 item 1: the slots of all keys are listed for a kernel that reads blocks"
)
def test_a_kernel_that_reads_the_block_table_gets_no_list_of_keys(
    monkeypatch: pytest.MonkeyPatch, shared_prefix: StepPlan
) -> None:
    """At 64 rows of 8k tokens this list takes most of the step's own time."""
    made, make = list[varlen.VarlenTables](), varlen.make_tables
    monkeypatch.setattr(varlen, "make_tables", lambda *args: made.append(make(*args)) or made[-1])
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    attend(shared_prefix, "varlen_paged")
    assert [len(tables.gathered_slots) for tables in made] == [0]


def test_a_shared_block_of_latents_is_expanded_once(shared_prefix: StepPlan) -> None:
    compacted = compact(shared_prefix)
    assert len(compacted.blocks(torch.device("cpu"))) == PREFIX_BLOCKS + NUM_ROWS
    blocks = compacted.blocks(torch.device("cpu"))
    for row, original in zip(compacted.plan.rows, shared_prefix.rows, strict=True):
        assert blocks[list(row.block_ids)].tolist() == original.block_ids


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
