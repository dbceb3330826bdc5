"""Attention over the paged cache, for any transformers model that attends through ``AttentionInterface``.

Layers that cache a latent per position (MLA; DeepSeek-AI 2024, "DeepSeek-V2", section 2.1) expand it to keys and values
as a whole. So such a layer gets the blocks of the step's own rows, and attends over these blocks alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specdec.core.errors import ModelLoadError
from specdec.kernels.progress import StepProgress
from specdec.kernels.segmented import (
    AttentionKernel,
    AttentionLayer,
    AttentionShape,
    AttentionStep,
    MakeAttentionKernel,
)

ATTENTION_NAME = "specdec_paged"

FROM_MODULE: Any = object()
"""Stands for a window that the model does not pass, but keeps as an attribute of its attention module."""

_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "cache_position", "past_key_values", "layer_idx", "position_embeddings"}
)
"""Keyword arguments that do not change what attention computes from rotated queries and keys."""


class StepBounds(NamedTuple):
    """The largest step that kernels are made for; see :class:`AttentionShape`."""

    block_size: int
    max_tokens: int
    max_rows: int
    max_length: int
    has_trees: bool = False


class GroupStep:
    """A step of the layers that keep their blocks together, on each device that has some of them.

    Args:
        attention: On one device.
        cache_slots: [T], where keys and values are written, on the same one.
        block_size: Positions of a block.
    """

    def __init__(self, attention: AttentionStep, cache_slots: Tensor, block_size: int) -> None:
        self._block_size = block_size
        self._attention = {attention.row.device: attention}
        self._cache_slots = {cache_slots.device: cache_slots.long()}
        self._first = attention.row.device
        self._compacted: dict[torch.device, Compacted] = {}

    def attention(self, device: torch.device) -> AttentionStep:
        """What a layer's attention reads."""
        if device not in self._attention:
            self._attention[device] = self._attention[self._first].to(device)
        return self._attention[device]

    def cache_slots(self, device: torch.device) -> Tensor:
        """Where a layer's keys and values are written: int64 [T]."""
        if device not in self._cache_slots:
            self._cache_slots[device] = self._cache_slots[self._first].to(device)
        return self._cache_slots[device]

    def compacted(self, device: torch.device) -> Compacted:
        """The step over the blocks of its own rows alone. Waits for the device."""
        if device not in self._compacted:
            self._compacted[device] = compact(self.attention(device), self._block_size)
        return self._compacted[device]


def address(pool: Tensor) -> int:
    """Tells pools apart, also where they have no memory."""
    return int(pool.untyped_storage()._cdata)


class AttentionContext:
    """What a model's attention layers share; passed to its forward as ``attention_context``.

    Kernels are made when a layer first wants one: one for each group, shape and device. They stay until steps may be
    larger.

    Args:
        make_kernel: How keys are read.
        groups: By :func:`address` the pools of keys that are not the first group's, and their group.
        latent_layers: Indices of the layers that expand what they cache, which are of the first group.
        progress: Counts the layers that attend.
    """

    def __init__(
        self,
        make_kernel: MakeAttentionKernel,
        groups: Mapping[int, int] | None = None,
        latent_layers: frozenset[int] = frozenset(),
        progress: StepProgress | None = None,
    ) -> None:
        self.latent_layers = latent_layers
        self.progress = progress or StepProgress()
        self._make_kernel = make_kernel
        self._groups = groups or {}
        self._bounds: StepBounds | None = None
        self._steps: Sequence[GroupStep] = ()
        self._kernels: dict[tuple[object, ...], AttentionKernel] = {}
        self._is_prepared: set[tuple[object, ...]] = set()

    def begin(self, steps: Sequence[GroupStep], bounds: StepBounds) -> None:
        """The step whose layers come next, one for each group; it is within ``bounds``."""
        if bounds != self._bounds:
            self._bounds = bounds
            self._kernels.clear()
        self._is_prepared.clear()
        self._steps = steps

    def slow_reasons(self) -> Iterator[str]:
        """What keeps the kernels that were made so far from being fast, each once."""
        yield from dict.fromkeys(filter(None, (getattr(one, "slow_reason", "") for one in self._kernels.values())))

    @property
    def block_size(self) -> int:
        """Positions of a block."""
        assert self._bounds is not None, "begin comes first"
        return self._bounds.block_size

    def attend(
        self, queries: Tensor, key_pool: Tensor, value_pool: Tensor, layer: AttentionLayer, is_latent: bool
    ) -> Tensor:
        """A layer's attention, by the kernel for its shape; see :meth:`AttentionKernel.attend`."""
        assert self._bounds is not None, "begin comes first"
        group = self._groups.get(address(key_pool), 0) if self._groups else 0
        device, dtype = queries.device, queries.dtype
        dims = queries.shape[1], key_pool.shape[2], key_pool.shape[3], value_pool.shape[3]
        kind = (group, is_latent, device, dtype, *dims)
        kernel = self._kernels.get(kind)
        if kernel is None:
            shape = AttentionShape(*dims, dtype, **self._bounds._asdict())
            kernel = self._kernels[kind] = self._make_kernel(shape, device)
        with torch.cuda.device_of(queries):  # type: ignore[no-untyped-call]  # Triton launches there
            if kind not in self._is_prepared:
                step = self._steps[group]
                kernel.prepare(step.compacted(device).step if is_latent else step.attention(device))
                self._is_prepared.add(kind)
            return kernel.attend(queries, key_pool, value_pool, layer)


def check_arguments(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Refuse whatever would change the result of attention and is not computed here.

    Args:
        module: The attention layer.
        arguments: What it passes beyond the arguments of :func:`paged_attention`.

    Raises:
        ModelLoadError: naming the argument.
    """
    for name, value in arguments.items():
        has_effect = value is not None and value is not False and name not in _WITHOUT_EFFECT
        if name == "is_causal":
            has_effect = value is False
        if has_effect:
            raise ModelLoadError(f"{type(module).__name__} wants attention with {name!r}, which is not supported")


def window_of(module: nn.Module, sliding_window: Any) -> int | None:
    """The number of positions a layer reads, its own among them; None where it reads all."""
    if sliding_window is FROM_MODULE:
        sliding_window = getattr(module, "sliding_window", None)
    return None if sliding_window is None else int(sliding_window)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: Any = FROM_MODULE,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_context: AttentionContext | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention of a step's new tokens over what the cache holds of their own sequences.

    Args:
        module: The attention layer.
        query: [B, H, T, D]; the B x T tokens, flattened, are those of the step.
        key: The layer's pool of keys, [blocks, block size, H_kv, D], the step's own already written; of a layer that
            expands what it caches, [1, H_kv, positions, D] for the step's blocks one after another.
        value: The layer's pool of values, [blocks, block size, H_kv, D_v], or expanded likewise.
        attention_mask: None: models build no mask for an attention that has registered none.
        scaling: Factor of the scores; D ** -0.5 by default.
        dropout: 0.
        sliding_window: Positions read, the query's own among them; None reads all.
        softcap: Scores are bounded smoothly to this magnitude (gemma2).
        s_aux: [H], score of a sink per head, which takes probability and gives nothing (gpt_oss).
        attention_context: The step.
        arguments: Must be without effect.

    Returns:
        [B, T, H, D_v], and no weights.

    Raises:
        ModelLoadError: the model wants what is not computed here.
    """
    check_arguments(module, arguments)
    if attention_context is None or attention_mask is not None:
        raise ModelLoadError(f"{type(module).__name__} does not hand the step's context to its attention")
    batch, num_heads, length, head_dim = query.shape
    queries = query.transpose(1, 2).reshape(batch * length, num_heads, head_dim)
    scaling = head_dim**-0.5 if scaling is None else scaling
    layer = AttentionLayer(scaling, window_of(module, sliding_window), softcap, s_aux)
    latent = attention_context.latent_layers
    is_latent = bool(latent) and getattr(module, "layer_idx", None) in latent
    if is_latent:
        key, value = as_blocks(key, attention_context.block_size), as_blocks(value, attention_context.block_size)
    output = attention_context.attend(queries, key, value, layer, is_latent)
    attention_context.progress.advance(query.device)
    # Contiguous, as transformers' own attention gives it: some models take a view.
    return output.contiguous().view(batch, length, num_heads, value.shape[-1]), None


def register_attention() -> None:
    """Make ``ATTENTION_NAME`` known to transformers; repeating it changes nothing.

    No mask function is registered with it, so models build no masks.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)


@dataclass(frozen=True, slots=True)
class Compacted:
    """A step over the blocks of its own rows alone; a block that rows share comes once.

    Attributes:
        step: With a block table that counts these blocks.
        blocks: Their numbers in the pool, [blocks].
    """

    step: AttentionStep
    blocks: Tensor


def compact(step: AttentionStep, block_size: int) -> Compacted:
    """The step for layers that expand what they cache. Waits for the device: the blocks must be counted."""
    is_row = (step.span_row >= 0) & (step.span_count > 0)
    rows, last = step.span_row[is_row].long(), (step.span_start + step.span_count - 1)[is_row].long()
    table = step.block_table[rows]
    first_place = torch.arange(table.shape[1], device=table.device) * block_size
    is_used = first_place <= step.place[last].unsqueeze(1)
    blocks, numbers = torch.unique(table[is_used], return_inverse=True)
    table[is_used] = numbers.to(table.dtype)
    of_all = torch.zeros_like(step.block_table)
    of_all[rows] = table
    return Compacted(replace(step, block_table=of_all), blocks)


def as_blocks(expanded: Tensor, block_size: int) -> Tensor:
    """Expanded keys or values [1, H, positions, D] as a pool [blocks, block size, H, D]."""
    positions = expanded[0].transpose(0, 1)
    return positions.reshape(-1, block_size, *positions.shape[1:])
