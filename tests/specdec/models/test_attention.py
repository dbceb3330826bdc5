"""The attention function's own promises: what it refuses, padded layouts, and the arguments of the flash kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.cache.blocks import BlockPool
from specdec.core.errors import ModelLoadError
from specdec.executor.paged_cache import PagedCache
from specdec.executor.runner import ModelRunner, RowInput, choose_kernel
from specdec.kernels.attention import AttentionContext, Workspace, paged_attention
from specdec.kernels.attention_metadata import RowSpan, StepPlan
from specdec.models.loading import LoadedModel
from tests.specdec.models.families import VOCAB_SIZE

Models = Callable[[str], tuple[LoadedModel, PreTrainedModel]]
Whole = Callable[[PreTrainedModel, list[int]], torch.Tensor]


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    "arguments", [{"is_causal": False}, {"position_bias": torch.zeros(1)}, {"indices": torch.zeros(1)}, {"new": 1.0}]
)
def test_what_is_not_computed_is_refused(arguments: dict[str, Any]) -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelLoadError, match=f"Identity wants attention with '{next(iter(arguments))}'"):
        paged_attention(nn.Identity(), states, states, states, **arguments)


def test_a_model_that_drops_the_context_or_makes_a_mask_is_refused() -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelLoadError, match="does not hand the step's context"):
        paged_attention(nn.Identity(), states, states, states, is_causal=True, position_bias=None)
    context = AttentionContext(StepPlan([RowSpan(0, 3, 0, [0])], 3, 4, 4), Workspace())
    with pytest.raises(ModelLoadError):
        paged_attention(nn.Identity(), states, states, states, torch.zeros(1, 1, 3, 3), attention_context=context)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2", "gpt_oss"])
@torch.inference_mode()
def test_a_padded_layout_reads_the_same(models: Models, whole_forward: Whole, family: str) -> None:
    loaded, stock = models(family)
    rows = [tokens(length, length) for length in (11, 3, 20)]
    windows = {layer.window for layer in loaded.attention_layers} - {None}
    pool = BlockPool(12, 8, dict.fromkeys(windows, 12))
    cache = PagedCache(loaded.attention_layers, pool)
    tables = [[1, 5, 3], [0], [2, 4, 9]]
    done = [0, 0, 0]
    for lengths in ([7, 2, 17], [4, 1, 3]):
        width = max(lengths) + 1
        spans = [RowSpan(i * width, n, done[i], tables[i]) for i, n in enumerate(lengths)]
        plan = StepPlan(spans, 3 * width, 8, trash_slot=12 * 8)
        cache.begin([plan] * len(pool.groups))
        padded = torch.full((3, width), 9)
        positions = torch.zeros(3, width, dtype=torch.long)
        for i, n in enumerate(lengths):
            padded[i, :n] = torch.tensor(rows[i][done[i] : done[i] + n])
            positions[i, :n] = torch.arange(done[i], done[i] + n)
        logits = loaded.model(
            input_ids=padded,
            position_ids=positions,
            past_key_values=cache,
            attention_context=AttentionContext(plan, Workspace()),
        ).logits
        for i, n in enumerate(lengths):
            expected = whole_forward(stock, rows[i])[done[i] : done[i] + n]
            assert (logits[i, :n] - expected).abs().max() <= 1e-4
            done[i] += n


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """What torch documents of ``varlen_attn``, row by row: it needs a GPU, and its arguments are ours."""
    output = torch.empty_like(query)
    assert enable_gqa == (query.shape[1] != key.shape[-2])
    assert max_q == int(cu_seq_q.diff().max())
    for row in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[row] : cu_seq_q[row + 1]]
        if block_table is None:
            assert cu_seq_k is not None
            k, v = (x[cu_seq_k[row] : cu_seq_k[row + 1]] for x in (key, value))
        else:
            assert seqused_k is not None
            assert block_table.dtype == seqused_k.dtype == torch.int32
            k, v = (x[block_table[row].long()].flatten(0, 1)[: seqused_k[row]] for x in (key, value))
        assert len(k) <= max_k
        offset = len(k) - len(q)  # queries align with the end of the keys
        distance = torch.arange(len(q))[:, None] + offset - torch.arange(len(k))
        seen = (distance >= -window_size[1]) & ((window_size[0] < 0) | (distance <= window_size[0]))
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1).transpose(0, 1) for x in (k, v))
        scores = (q.transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        output[cu_seq_q[row] : cu_seq_q[row + 1]] = (scores.softmax(-1) @ v).transpose(0, 1)
    return output


@pytest.mark.parametrize("kernel", ["varlen", "varlen_paged"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_flash_kernel_is_called_as_documented(
    models: Models, whole_forward: Whole, monkeypatch: pytest.MonkeyPatch, family: str, kernel: str
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    loaded, stock = models(family)
    runner = ModelRunner(loaded, num_blocks=40, block_size=4, kernel=kernel)
    rows = [tokens(length, length) for length in (11, 3, 20, 1)]
    sequences = [runner.new_sequence() for _ in rows]
    for cut in (0.6, 1.0):
        inputs = []
        for sequence, row in zip(sequences, rows, strict=True):
            new = row[len(sequence) : max(len(sequence) + 1, int(len(row) * cut))]
            assert runner.reserve(sequence, len(sequence) + len(new) + 5)
            if new:
                inputs.append(RowInput(sequence, new, len(new)))
        logits = runner.forward(inputs).split([row.num_logits for row in inputs])
        for row, part in zip(inputs, logits, strict=True):
            expected = whole_forward(stock, row.sequence.tokens)[-row.num_logits :]
            assert (part - expected).abs().max() <= 1e-4


def test_a_cpu_gathers(models: Models) -> None:
    assert choose_kernel(models("llama")[0]) == "gather"
    assert ModelRunner(models("llama")[0], num_blocks=2).kernel == "gather"
