"""How many cache blocks fit into the memory there is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.errors import InvalidParameterError, MemoryPlanError
from specdec.models.layers import AttentionLayer
from specdec.models.loading import LoadedModel

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory for one model's weights and cache.

    Attributes:
        num_blocks: Blocks of the cache.
        block_size: Positions per block.
        max_model_len: Longest sequence, in tokens.
        bytes_per_token: Of one position's keys and values in all layers.
        bytes_per_block: Of one block in all layers.
        sequence_bytes: Of one sequence of ``max_model_len``.
        cache_bytes: Of all blocks, and of the one more that padding is written to.
        weights_bytes: Of the weights, which are there already.
        budget_bytes: What the cache was allowed to take.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    bytes_per_token: int
    bytes_per_block: int
    sequence_bytes: int
    cache_bytes: int
    weights_bytes: int
    budget_bytes: int

    @property
    def total_bytes(self) -> int:
        """Weights and cache."""
        return self.weights_bytes + self.cache_bytes

    @property
    def num_full_sequences(self) -> int:
        """Sequences of ``max_model_len`` that fit at once."""
        return self.num_blocks // -(-self.max_model_len // self.block_size)


def cache_bytes_per_token(layers: Iterable[AttentionLayer]) -> int:
    """Bytes of one position's keys and values in all layers."""
    return sum(layer.bytes_per_token for layer in layers)


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can be taken on a device now without pushing anything out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _meminfo_available()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if available is None else available


def plan_memory(
    loaded: LoadedModel,
    *,
    budget_bytes: int | None = None,
    fraction: float = 0.8,
    max_model_len: int | None = None,
    max_num_sequences: int | None = None,
    block_size: int = 16,
) -> MemoryPlan:
    """Size the cache of a loaded model.

    Args:
        loaded: Its weights are in memory, so what is free is free for the cache.
        budget_bytes: For the cache; by default ``fraction`` of what is free. A model spread over several devices is
            bounded by the one with the least room for its share.
        fraction: In (0, 1]; of what is free.
        max_model_len: Longest sequence wanted, in tokens; by default the model's own, which it may not exceed.
        max_num_sequences: Take no more blocks than this many sequences of ``max_model_len`` can use.
        block_size: Positions per block.

    Raises:
        MemoryPlanError: the budget does not hold one sequence of ``max_model_len``.
        InvalidParameterError: ``max_model_len`` or ``fraction`` is out of range.
    """
    length = loaded.max_model_len if max_model_len is None else max_model_len
    if not 1 <= length <= loaded.max_model_len:
        message = f"max_model_len must be in [1, {loaded.max_model_len}] for {loaded.name}, got {length}"
        raise InvalidParameterError("max_model_len", message)
    if not 0 < fraction <= 1:
        raise InvalidParameterError("fraction", f"fraction must be in (0, 1], got {fraction}")
    bytes_per_token = cache_bytes_per_token(loaded.attention_layers)
    bytes_per_block = bytes_per_token * block_size
    budget = _budget(loaded.attention_layers, fraction) if budget_bytes is None else budget_bytes
    blocks_per_sequence = -(-length // block_size)
    num_blocks = budget // bytes_per_block - 1
    if num_blocks < blocks_per_sequence:
        needed = (blocks_per_sequence + 1) * bytes_per_block
        raise MemoryPlanError(
            f"one sequence of {length} tokens of {loaded.name} takes {_mib(needed)} of cache "
            f"({bytes_per_token} bytes per token), but only {_mib(budget)} may be used; "
            f"lower max_model_len to {max(num_blocks, 0) * block_size} or give more memory"
        )
    if max_num_sequences is not None:
        num_blocks = min(num_blocks, max(1, max_num_sequences) * blocks_per_sequence)
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=length,
        bytes_per_token=bytes_per_token,
        bytes_per_block=bytes_per_block,
        sequence_bytes=blocks_per_sequence * bytes_per_block,
        cache_bytes=(num_blocks + 1) * bytes_per_block,
        weights_bytes=loaded.weights_bytes,
        budget_bytes=budget,
    )


def _budget(layers: tuple[AttentionLayer, ...], fraction: float) -> int:
    """Bytes for all layers such that each device holds its layers' share."""
    total = cache_bytes_per_token(layers)
    budgets = []
    for device in {layer.device for layer in layers}:
        share = cache_bytes_per_token(layer for layer in layers if layer.device == device)
        budgets.append(int(free_memory_bytes(device) * fraction) * total // share)
    return min(budgets)


def _meminfo_available() -> int | None:
    """Linux counts caches it can drop as available, which ``SC_AVPHYS_PAGES`` does not; None elsewhere."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"
