"""What a model's attention layers need, found by asking the model: masks, windows, shapes of what they cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache

from specdec.errors import ModelLoadError
from specdec.models.attention import FROM_MODULE, check_arguments, window_of

_PROBE_NAME = "specdec_probe"


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer caches per position, and how far its attention reads.

    Attributes:
        index: The layer's index in the cache.
        num_key_heads: Heads of keys and of values.
        key_dim: Dimension of a key.
        value_dim: Dimension of a value.
        window: Positions read, the query's own among them; None reads all.
        dtype: Of what is cached.
        device: Of what is cached.
        is_plain: Neither soft cap nor sinks.
    """

    index: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    is_plain: bool = True

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position's keys and values."""
        return self.num_key_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class _ProbeCache(Cache):  # type: ignore[misc]
    """Keeps nothing but what a layer handed over, to see that attention gets the very same tensors."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.states[layer_idx] = (key_states, value_states)
        return self.states[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


@dataclass
class _Probe:
    """What the attention layers said in one forward pass."""

    cache: _ProbeCache
    max_length: int
    layers: dict[int, AttentionLayer] = field(default_factory=dict)
    num_calls: int = 0

    def owner(self, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """The layer whose cached states these are, unchanged."""
        for index, (keys, values) in self.cache.states.items():
            if key is keys and value is values:
                return index
        return None


def find_attention_layers(model: PreTrainedModel, max_length: int) -> tuple[AttentionLayer, ...]:
    """Run two tokens through a model and note what each attention layer caches and reads.

    The mask that transformers would build for a layer is compared with the window the layer passes to its attention:
    a layer whose mask is anything but causal, within that window, would come out wrong without a mask.

    Args:
        model: In eval mode; its attention implementation is left as :data:`_PROBE_NAME`.
        max_length: Longest sequence, in tokens, for which masks must agree.

    Returns:
        The layers that cache, in the order of their indices.

    Raises:
        ModelLoadError: a layer keeps other state than keys and values, does not attend through transformers' attention
            interface, or wants what is not supported.
    """
    AttentionInterface.register(_PROBE_NAME, _probe_attention)
    AttentionMaskInterface.register(_PROBE_NAME, _probe_mask)
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ModelLoadError(f"{name} does not attend through transformers' attention interface")
    model.set_attn_implementation(_PROBE_NAME)
    probe = _Probe(_ProbeCache(), max_length)
    device = model.get_input_embeddings().weight.device
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device).unsqueeze(0)
    try:
        with torch.inference_mode():
            model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=probe.cache,
                use_cache=True,
                attention_context=probe,
            )
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{name} cannot run with a paged cache: {type(error).__name__}: {error}") from error
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if probe.num_calls != num_layers or set(probe.layers) != set(probe.cache.states):
        raise ModelLoadError(
            f"{name} has {num_layers} layers, but {probe.num_calls} attend through transformers' attention interface "
            f"and {len(probe.cache.states)} cache keys and values"
        )
    return tuple(probe.layers[index] for index in sorted(probe.layers))


def _probe_mask(mask_function: Callable[..., Any], device: torch.device | str, **_: object) -> torch.Tensor:
    """A mask that carries the rule it would be built by."""
    mask = torch.zeros(1, 1, 1, 1, device=device)
    mask.mask_function = mask_function  # type: ignore[attr-defined]
    return mask


def _probe_attention(
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
    attention_context: _Probe | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    check_arguments(module, arguments)
    name = type(module).__name__
    if attention_context is None:
        raise ModelLoadError(f"{name} does not hand the step's context to its attention")
    index = attention_context.owner(key, value)
    if index is None:
        raise ModelLoadError(f"{name} attends over other keys and values than it caches")
    window = window_of(module, sliding_window)
    _check_mask(name, getattr(attention_mask, "mask_function", None), window, attention_context.max_length)
    layer = AttentionLayer(
        index=index,
        num_key_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        window=window,
        dtype=key.dtype,
        device=key.device,
        is_plain=softcap is None and s_aux is None,
    )
    attention_context.layers.setdefault(index, layer)
    attention_context.num_calls += 1
    batch, num_heads, length, _ = query.shape
    return query.new_zeros(batch, length, num_heads, value.shape[3]), None


def _check_mask(name: str, mask_function: Callable[..., Any] | None, window: int | None, max_length: int) -> None:
    """Compare the model's own mask rule with causal attention within ``window``, at the edges and at all scales."""
    if mask_function is None:
        raise ModelLoadError(f"{name} makes a mask of its own, which is not supported")
    zero = torch.tensor(0)
    reach = max_length if window is None else window
    distances = {-1, 0, reach - 1, reach, reach + 1, *(1 << k for k in range(max_length.bit_length()))}
    for query in (max_length - 1, max_length // 2):
        for distance in sorted(distances):
            if not 0 <= query - distance < max_length:
                continue
            reads = bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(query - distance)))
            if reads != (0 <= distance < reach):
                what = "all positions" if window is None else f"a window of {window} positions"
                raise ModelLoadError(f"{name} reads {what}, but its mask says otherwise at a distance of {distance}")
