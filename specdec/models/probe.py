"""What a model's layers need, found by asking the model: masks, windows, shapes of what they keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from specdec.cache.recurrent.binding import RecurrentLayer, RecurrentProbe, bind, recurrent_modules
from specdec.core.errors import ModelLoadError
from specdec.kernels.attention import FROM_MODULE, check_arguments, window_of

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
        is_latent: What is cached is expanded before it is attended to.
    """

    index: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    is_plain: bool = True
    is_latent: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position's keys and values."""
        return self.num_key_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class PromptCache(Cache):  # type: ignore[misc]
    """What layers ask a cache for beside keys and values, answered as at a prompt that is read from its beginning."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, always: a layer then takes the way of a prompt, whose functions are ours."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, as :meth:`get_conv_state`."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """No."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0, always: positions are given, and masks are not built."""
        return 0


class ProbeCache(PromptCache):
    """Keeps nothing but what a layer handed over, to see that attention gets the very same tensors."""

    def __init__(self, recurrent: RecurrentProbe) -> None:
        super().__init__()
        self.states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._recurrent = recurrent

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What was handed over."""
        self.states[layer_idx] = (key_states, value_states)
        return self.states[layer_idx]

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """As :meth:`RecurrentProbe.extended`."""
        return self._recurrent.extended(conv_states, layer_idx, state_idx, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """The same states, of layers known to have any."""
        if layer_idx not in self._recurrent.layers:
            raise ModelLoadError(f"layer {layer_idx} has a recurrent state of a kind that is not supported")
        return recurrent_states

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The queries."""
        return query_length, 0


@dataclass
class _Probe:
    """What the attention layers said in one forward pass."""

    cache: ProbeCache
    max_length: int
    layers: dict[int, AttentionLayer] = field(default_factory=dict)
    num_calls: int = 0

    def owner(self, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """The layer whose cached states these are, unchanged."""
        for index, (keys, values) in self.cache.states.items():
            if key is keys and value is values:
                return index
        return None

    def latent_owner(self, module: nn.Module, key: torch.Tensor, value: torch.Tensor) -> int:
        """The layer that expanded what it caches, a latent per position, to these."""
        index = getattr(module, "layer_idx", None)
        cached = self.cache.states.get(index) if isinstance(index, int) else None
        if cached is None or not cached[0].shape[1] == cached[1].shape[1] == 1 or key.shape[2] != value.shape[2]:
            raise ModelLoadError(f"{type(module).__name__} attends over other keys and values than it caches")
        assert isinstance(index, int)
        return index


def find_layers(
    model: PreTrainedModel, max_length: int
) -> tuple[tuple[AttentionLayer, ...], tuple[RecurrentLayer, ...]]:
    """Run two tokens through a model and note what each layer keeps and reads.

    The mask that transformers would build for a layer is compared with the window the layer passes to its attention:
    a layer whose mask is anything but causal, within that window, would come out wrong without a mask.

    Args:
        model: In eval mode; its attention implementation is left as :data:`_PROBE_NAME`.
        max_length: Longest sequence, in tokens, for which masks must agree.

    Returns:
        The layers that cache keys and values, and those that keep a recurrent state, in the order of their indices.

    Raises:
        ModelLoadError: a layer keeps other state than these, does not attend through transformers' attention
            interface, or wants what is not supported.
    """
    AttentionInterface.register(_PROBE_NAME, _probe_attention)
    AttentionMaskInterface.register(_PROBE_NAME, _probe_mask)
    name = type(model).__name__
    recurrent = RecurrentProbe()
    probe = _Probe(ProbeCache(recurrent), max_length)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(_PROBE_NAME)
    elif next(recurrent_modules(model), None) is None:
        raise ModelLoadError(f"{name} does not attend through transformers' attention interface")
    device = model.get_input_embeddings().weight.device
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device).unsqueeze(0)
    try:
        with torch.inference_mode(), bind(model, recurrent):
            model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=True,
                attention_context=probe,
                **{cache_argument(model): probe.cache},
            )
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{name} cannot run with a paged cache: {type(error).__name__}: {error}") from error
    _check_layers(model, probe, recurrent)
    return tuple(probe.layers[index] for index in sorted(probe.layers)), tuple(recurrent.layers.values())


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which a model's forward takes its cache."""
    return "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"


def _check_layers(model: PreTrainedModel, probe: _Probe, recurrent: RecurrentProbe) -> None:
    """Every layer keeps what its type says, and nothing was kept that no attention reads."""
    name, found = type(model).__name__, recurrent.layers
    config = model.config.get_text_config(decoder=True)
    if not found:
        if probe.num_calls != config.num_hidden_layers or set(probe.layers) != set(probe.cache.states):
            raise ModelLoadError(
                f"{name} has {config.num_hidden_layers} layers, but {probe.num_calls} attend through transformers' "
                f"attention interface and {len(probe.cache.states)} cache keys and values"
            )
        return
    for index, kind in enumerate(get_layer_types_and_kwargs(config)[0]):
        is_mixed = kind.startswith("hybrid")
        is_recurrent = is_mixed or kind in ("linear_attention", "conv")
        attends = is_mixed or (kind.endswith("_attention") and not is_recurrent)
        if (index in found) != is_recurrent or (index in probe.layers) != attends:
            raise ModelLoadError(f"{name} keeps in layer {index} ({kind}) a state of a kind that is not supported")
    if set(probe.layers) != set(probe.cache.states):
        raise ModelLoadError(f"{name} caches keys and values that it does not attend to")


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
    cached = (key, value)
    is_latent = index is None
    if index is None:
        index = attention_context.latent_owner(module, key, value)
        cached = attention_context.cache.states[index]
    window = window_of(module, sliding_window)
    _check_mask(name, getattr(attention_mask, "mask_function", None), window, attention_context.max_length)
    layer = AttentionLayer(
        index=index,
        num_key_heads=cached[0].shape[1],
        key_dim=cached[0].shape[3],
        value_dim=cached[1].shape[3],
        window=window,
        dtype=key.dtype,
        device=key.device,
        is_plain=softcap is None and s_aux is None,
        is_latent=is_latent,
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
