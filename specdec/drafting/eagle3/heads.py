"""The EAGLE-3 head: its layers run over features and tokens, with their keys and values in the target's blocks.

Li et al. 2024, "EAGLE: Speculative sampling requires rethinking feature uncertainty"; 2025, "EAGLE-3: Scaling up
inference acceleration of large language models via training-time test", section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specdec.core.errors import ModelLoadError
from specdec.drafting.eagle3.layouts import Eagle3Config, parameters, token_map
from specdec.drafting.heads import read_heads
from specdec.kernels.attention import ATTENTION_NAME, register_attention
from specdec.models.loading import LoadedModel
from specdec.models.probe import AttentionLayer

_LAYERS: dict[str, type[nn.Module]] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}


class Eagle3Heads(nn.Module):
    """One head that drafts any number of tokens; parameters have the names of ``speculators``.

    Args:
        config: The shape.
        hidden_layers: The layers of the target whose input it reads.
        first_index: Of its layers in the cache.
        embedding_weight: The target's, for a head without embeddings.
        lm_head: The target's, for a head without one.
        to_target: The target's token of each of its own; None where they are the same.
        vocab_size: Of the target.
    """

    def __init__(
        self,
        config: Eagle3Config,
        hidden_layers: Sequence[int],
        first_index: int,
        embedding_weight: Tensor | None = None,
        lm_head: nn.Module | None = None,
        to_target: Tensor | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.hidden_layers = config, tuple(hidden_layers)
        layer, width = config.layer, len(self.hidden_layers) * config.target_hidden_size
        layer._attn_implementation = ATTENTION_NAME
        size, epsilon = layer.hidden_size, layer.rms_norm_eps
        self.vocab_size = vocab_size or layer.vocab_size
        # In a tuple: it is no part of the head.
        self._borrowed = embedding_weight, lm_head, LlamaRotaryEmbedding(layer)
        if embedding_weight is None:
            self.embed_tokens = nn.Embedding(layer.vocab_size, size)
        if lm_head is None:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.fc = nn.Linear(width, size, bias=False)
        self.norm = LlamaRMSNorm(size, eps=epsilon)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(width, eps=epsilon)
        if config.fc_norm:
            norms = (LlamaRMSNorm(config.target_hidden_size, eps=epsilon) for _ in self.hidden_layers)
            self.fc_norm = nn.ModuleList(norms)
        make = _LAYERS[layer.model_type]
        self.layers = nn.ModuleList(make(layer, number) for number in range(layer.num_hidden_layers))
        self._indices = range(first_index, first_index + len(self.layers))
        for index, module in zip(self._indices, self.layers, strict=True):
            attention: Any = module.self_attn
            attention.layer_idx = index
        first: Any = self.layers[0]
        first.hidden_norm = LlamaRMSNorm(size, eps=epsilon)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(first.self_attn, name)
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(first.self_attn, name, wide)
        self.to_target: Tensor | None
        self.register_buffer("to_target", to_target, persistent=False)

    @property
    def num_tokens(self) -> None:
        """Any number."""

    @property
    def num_bytes(self) -> int:
        """Of its own weights."""
        return sum(parameter.nbytes for parameter in self.parameters())

    @property
    def cache_layers(self) -> tuple[AttentionLayer, ...]:
        """Its own keys and values."""
        config, weight = self.config.layer, self.fc.weight
        dims = config.num_key_value_heads, config.head_dim, config.head_dim
        return tuple(AttentionLayer(index, *dims, None, weight.dtype, weight.device) for index in self._indices)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """The states as one: [N, hidden size]."""
        states = [state.to(self.fc.weight.device) for state in states]
        if self.config.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(list(states), -1)
        fused: Tensor = self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)
        return fused

    def forward(self, features: Tensor, tokens: Tensor, positions: Tensor, **caches: Any) -> Tensor:
        """As :meth:`specdec.drafting.heads.DraftHeads.forward`."""
        embeddings, _, rotary = self._borrowed
        weight = self.embed_tokens.weight if embeddings is None else embeddings
        device = features.device
        embedded = embedding(tokens.to(weight.device), weight).to(device, features.dtype).unsqueeze(0)
        hidden, positions = features.unsqueeze(0), positions.to(device).unsqueeze(0)
        named = {"attention_mask": None} | caches | {"position_embeddings": rotary(hidden, positions)}
        hidden = self._first_layer(embedded, hidden, named)
        for layer in self.layers[1:]:
            hidden = layer(hidden, **named)
        return (self.norm(hidden) if self.config.norm_output else hidden)[0]

    def _first_layer(self, embedded: Tensor, hidden: Tensor, named: dict[str, Any]) -> Tensor:
        """It attends over embeddings and features side by side, and adds to the features."""
        layer: Any = self.layers[0]
        normalized = layer.hidden_norm(hidden)
        residual = normalized if self.config.norm_before_residual else hidden
        attended, _ = layer.self_attn(torch.cat((layer.input_layernorm(embedded), normalized), -1), **named)
        residual = residual + attended
        made: Tensor = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return made

    def logits(self, features: Tensor, place: int) -> Tensor:
        """As :meth:`specdec.drafting.heads.DraftHeads.logits`; -inf for tokens that the head does not know."""
        head = self._borrowed[1] or self.lm_head
        logits: Tensor = head(features if self.config.norm_output else self.norm(features)).float()
        if self.to_target is None:
            return logits
        spread = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        return spread.index_copy_(-1, self.to_target, logits)


def load(path: str, target: LoadedModel) -> Eagle3Heads:
    """Load an EAGLE-3 head for a model, into its dtype and onto the device of its vocabulary head.

    Args:
        path: Local folder or hub id, in the layout of ``speculators`` or of EAGLE's authors.
        target: The model.

    Raises:
        ModelLoadError: It cannot be read, or is not this model's.
    """
    register_attention()
    fields, weights = read_heads(path)
    try:
        config = Eagle3Config.read(fields)
        to_target = token_map(weights, config.draft_vocab_size, target.vocab_size)
    except KeyError as error:
        raise ModelLoadError(f"{path} has no EAGLE-3 head: its config.json lacks {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} has no EAGLE-3 head that can be served: {error}") from error
    named = parameters(weights)
    own, embeddings, lm_head = config.layer, target.model.get_input_embeddings(), target.model.get_output_embeddings()
    sizes = config.target_hidden_size, own.vocab_size
    if sizes != (target.config.hidden_size, target.vocab_size):
        raise ModelLoadError(
            f"the head {path} is not for {target.name}: hidden_size and vocab_size must be {target.config.hidden_size} "
            f"and {target.vocab_size}, not {sizes[0]} and {sizes[1]}"
        )
    borrows = {"embed_tokens.weight": own.hidden_size, "lm_head.weight": own.hidden_size}
    borrowed = {name for name, size in borrows.items() if name not in named and size == target.config.hidden_size}
    heads = Eagle3Heads(
        config,
        config.layers_read(target.config.num_hidden_layers),
        1 + max((target.config.num_hidden_layers, *(layer.index for layer in target.attention_layers))),
        embeddings.weight if "embed_tokens.weight" in borrowed else None,
        lm_head if "lm_head.weight" in borrowed and config.draft_vocab_size == target.vocab_size else None,
        to_target,
        target.vocab_size,
    )
    expected = {name: parameter.shape for name, parameter in heads.state_dict().items()}
    wrong = sorted(name for name in expected if name not in named or named[name].shape != expected[name])
    if wrong:
        raise ModelLoadError(f"the weights of the head {path} lack {wrong[0]}, or have it in another shape")
    heads.load_state_dict({name: named[name] for name in expected})
    device = lm_head.weight.device
    heads.eval().requires_grad_(False).to(device, target.dtype)
    heads._borrowed[2].to(device)
    return heads
