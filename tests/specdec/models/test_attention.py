"""The attention function's own promises: what it refuses, padded layouts, and that any registered kernel does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.cache.blocks import BlockPool, CachedSequence
from specdec.core.errors import ModelLoadError
from specdec.executor.paged_cache import PagedCache
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner, choose_kernel
from specdec.kernels.attention import AttentionContext, GroupStep, StepBounds, paged_attention
from specdec.kernels.gather import GatherAttention
from specdec.models.loading import LoadedModel
from tests.specdec.kernels.steps import cache_slots, spread_step
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
    context = AttentionContext(GatherAttention)
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
        step = spread_step(tables, [i * width for i in range(3)], done, lengths, 3 * width)
        slots = cache_slots(step, 8, 12)
        by_group = [GroupStep(step, slots, 8)] * len(pool.groups)
        cache.begin(by_group)
        context = AttentionContext(GatherAttention, cache.group_of)
        context.begin(by_group, StepBounds(8, 3 * width, 3, 24))
        padded = torch.full((3, width), 9)
        positions = torch.zeros(3, width, dtype=torch.long)
        for i, n in enumerate(lengths):
            padded[i, :n] = torch.tensor(rows[i][done[i] : done[i] + n])
            positions[i, :n] = torch.arange(done[i], done[i] + n)
        logits = loaded.model(
            input_ids=padded,
            position_ids=positions,
            past_key_values=cache,
            attention_context=context,
        ).logits
        for i, n in enumerate(lengths):
            expected = whole_forward(stock, rows[i])[done[i] : done[i] + n]
            assert (logits[i, :n] - expected).abs().max() <= 1e-4
            done[i] += n


def test_a_cpu_gathers(models: Models) -> None:
    assert choose_kernel(models("llama")[0]) == "gather"
    assert ModelRunner(models("llama")[0], num_blocks=2).kernel == "gather"


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_registered_kernel_gives_what_gathering_gives(models: Models, family: str) -> None:
    """Over prompts in pieces, ragged rows and a tree, which any kernel takes."""
    outputs = []
    for kernel in ("gather", "reference"):
        runner = ModelRunner(models(family)[0], num_blocks=60, block_size=4, kernel=kernel)
        sequences = [runner.new_sequence() for _ in range(3)]
        steps = [runner_step(runner, sequences, counts, parents) for counts, parents in STEPS]
        outputs.append(torch.cat(steps))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)


STEPS = [((20, 3, 9), ()), ((1, 18, 4), (-1, 0, 0)), ((2, 1, 1), ())]


def runner_step(
    runner: ModelRunner, sequences: list[CachedSequence], counts: tuple[int, ...], parents: tuple[int, ...]
) -> torch.Tensor:
    rows = []
    for number, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        assert runner.reserve(sequence, len(sequence) + count)
        rows.append(RowInput(sequence, tokens(count, count + number), count, parents if number == 2 else ()))
    return runner.forward(rows)
