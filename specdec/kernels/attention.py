"""Attention over the paged cache, for any transformers model that attends through ``AttentionInterface``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from specdec.core.errors import ModelLoadError
from specdec.core.types import StepProgress
from specdec.kernels.attention_metadata import AttentionGroup, StepPlan
from specdec.kernels.latent import as_blocks, compact
from specdec.kernels.varlen import attend_varlen

ATTENTION_NAME = "specdec_paged"
AttentionKernel = Literal["gather", "varlen", "varlen_paged"]
"""``gather``: gathered blocks and SDPA, on any device. ``varlen``: torch's variable-length flash attention over
gathered keys. ``varlen_paged``: the same, reading the block table itself (flash attention 3)."""

FROM_MODULE: Any = object()
"""Stands for a window that the model does not pass, but keeps as an attribute of its attention module."""

_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "cache_position", "past_key_values", "layer_idx", "position_embeddings"}
)
"""Keyword arguments that do not change what attention computes from rotated queries and keys."""


class Workspace:
    """Buffers that gathered keys and values are copied into, one of each kind, reused by all layers in turn."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}

    def rows(self, name: str, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised [num_rows, *like.shape[1:]] of the dtype and device of ``like``."""
        kind = (name, like.dtype, like.device, like.shape[1:])
        buffer = self._buffers.get(kind)
        if buffer is None or len(buffer) < num_rows:
            buffer = self._buffers[kind] = like.new_empty((num_rows, *like.shape[1:]))
        return buffer[:num_rows]


class AttentionContext:
    """What a model's attention layers need in one step; passed to its forward as ``attention_context``.

    Args:
        plan: The step's rows, for layers whose blocks are those of the first group.
        workspace: Shared by all steps of a runner.
        kernel: How keys are read.
        latent_layers: Indices of the layers that expand what they cache.
        progress: Is told of each layer whose attention is done.
        plans: By the address of a pool of keys, the plan for its group's blocks, as :meth:`PagedCache.begin` gives it.
    """

    def __init__(
        self,
        plan: StepPlan,
        workspace: Workspace,
        kernel: AttentionKernel = "gather",
        latent_layers: frozenset[int] = frozenset(),
        progress: StepProgress | None = None,
        plans: Mapping[int, StepPlan] | None = None,
    ) -> None:
        self.plan = plan
        self.plans = plans or {}
        self.workspace = workspace
        self.kernel = kernel
        self.latent_layers = latent_layers
        self.progress = progress or StepProgress()


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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: Any = FROM_MODULE,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention_context: AttentionContext | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a step's new tokens over what the cache holds of their own sequences.

    Args:
        module: The attention layer.
        query: [B, H, T, D]; the B x T tokens, flattened, are those of the plan.
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
    window = window_of(module, sliding_window)
    kernel, plan = attention_context.kernel, attention_context.plans.get(key.data_ptr(), attention_context.plan)
    if attention_context.latent_layers and getattr(module, "layer_idx", None) in attention_context.latent_layers:
        key, value = as_blocks(key, plan.block_size), as_blocks(value, plan.block_size)
        plan = compact(plan).plan
    if kernel == "gather" or plan.has_trees:  # torch's variable-length attention takes no mask
        output = _gathered(queries, key, value, plan, attention_context.workspace, scaling, window, softcap, s_aux)
    else:
        output = attend_varlen(queries, key, value, plan, scaling, window, paged=kernel == "varlen_paged")
    attention_context.progress.advance()
    # Contiguous, as transformers' own attention gives it: some models take a view.
    return output.contiguous().view(batch, length, num_heads, value.shape[-1]), None


def _gathered(
    queries: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: StepPlan,
    workspace: Workspace,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Group by group, [N, H, D] -> [N, H, D_v]."""
    groups = plan.groups(window, queries, key_pool)
    output: torch.Tensor | None = None
    if plan.has_padding or len(groups) > 1 or not isinstance(groups[0].queries, slice):
        output = queries.new_zeros(len(queries), queries.shape[1], value_pool.shape[-1])
    for group in groups:
        selected = queries[group.queries]
        keys = _keys_of(key_pool, group, workspace, "keys")
        values = _keys_of(value_pool, group, workspace, "values")
        rows = selected.view(group.num_rows, group.num_queries, *queries.shape[1:])
        result = _attend(rows, keys, values, group, scaling, softcap, sinks).flatten(0, 1)
        if output is None:
            return result
        output[group.queries] = result
    assert output is not None
    return output


def _keys_of(pool: torch.Tensor, group: AttentionGroup, workspace: Workspace, name: str) -> torch.Tensor:
    """A copy of what a group's rows read, [R, S, H_kv, D]."""
    buffer = workspace.rows(name, len(group.blocks), pool)
    torch.index_select(pool, 0, group.blocks, out=buffer)
    slots = buffer.view(group.num_rows, -1, *pool.shape[2:])
    return slots[:, group.first_key : group.first_key + group.num_keys]


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: AttentionGroup,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[R, T, H, D] over [R, S, H_kv, D] -> [R, T, H, D_v], with query heads grouped by the key head they share."""
    num_rows, num_queries, num_heads, head_dim = queries.shape
    num_groups = num_heads // keys.shape[2]
    grouped = queries.view(num_rows, num_queries, -1, num_groups, head_dim)
    if group.is_packed:
        q = grouped.permute(0, 2, 3, 1, 4).reshape(num_rows, -1, num_groups * num_queries, head_dim)
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        if sinks is not None:
            sinks = sinks.view(-1, num_groups).repeat_interleave(num_queries, dim=1).view(1, -1, q.shape[2], 1)
        result = _dot_product(q, k, v, group, scaling, softcap, sinks)
        result = result.view(num_rows, -1, num_groups, num_queries, values.shape[-1])
        return result.permute(0, 3, 1, 2, 4).reshape(num_rows, num_queries, num_heads, -1)
    # One long row: key heads become the batch, and each is seen by its query heads without being copied.
    q = grouped[0].permute(1, 2, 0, 3)
    k, v = (x[0].transpose(0, 1).unsqueeze(1).expand(-1, num_groups, -1, -1) for x in (keys, values))
    sinks = None if sinks is None else sinks.view(-1, num_groups, 1, 1)
    result = _dot_product(q, k, v, group, scaling, softcap, sinks)
    return result.permute(2, 0, 1, 3).reshape(1, num_queries, num_heads, -1)


def _dot_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AttentionGroup,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Scaled dot-product attention, [.., T, D] over [.., S, D]; term by term where scores are capped or have sinks."""
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=group.is_causal, scale=scaling)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if group.is_causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
    if group.mask is not None:
        scores = scores + group.mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights[..., : k.shape[-2]], v)


def register_attention() -> None:
    """Make ``ATTENTION_NAME`` known to transformers; repeating it changes nothing.

    No mask function is registered with it, so models build no masks.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
