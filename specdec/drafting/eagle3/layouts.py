"""What an EAGLE-3 checkpoint says of itself, in the layout of the ``speculators`` package or of EAGLE's authors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

_LAYERS = ("llama", "qwen3")
"""Kinds of layers that heads may have, by transformers' names."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head, by the names of ``speculators``.

    Attributes:
        layer: Of its own layers; its ``vocab_size`` is the target's.
        draft_vocab_size: Tokens that it knows.
        target_hidden_size: Width of the states that it reads.
        eagle_aux_hidden_state_layer_ids: The layers whose input it reads; None for what its authors read.
        norm_before_residual: Whether the first layer adds to normalized features.
        norm_before_fc: Whether all states are normalized as one.
        fc_norm: Whether each state is normalized by itself.
        norm_output: Whether features go on as normalized for the vocabulary head.
    """

    layer: PretrainedConfig
    draft_vocab_size: int
    target_hidden_size: int
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Eagle3Config:
        """From a ``config.json``.

        Raises:
            KeyError: A size is missing.
            ValueError: It is of another kind of drafter, or of layers that are not known here.
        """
        kind = fields.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ValueError(f"it is a drafter of the kind {kind}")
        named = fields.get("transformer_layer_config", fields)
        if named["model_type"] not in _LAYERS:
            raise ValueError(f"its layers are {named['model_type']}'s, and only {' and '.join(_LAYERS)} are known")
        layer = AutoConfig.for_model(**named)
        inner = fields.get("eagle_config") or {}
        read = fields.get("eagle_aux_hidden_state_layer_ids") or inner.get("eagle_aux_hidden_state_layer_ids")
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return cls(
            layer,
            int(fields["draft_vocab_size"]),
            int(fields.get("target_hidden_size") or layer.hidden_size),
            tuple(map(int, read)) if read else None,
            **{name: bool(fields.get(name, False)) for name in flags},
        )

    def to_dict(self) -> dict[str, Any]:
        """What ``config.json`` holds, in the layout of ``speculators``."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        layer = named.pop("layer").to_dict()
        return {"speculators_model_type": "eagle3", "transformer_layer_config": layer, **named}

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target of so many whose input is read. Li et al. 2025, "EAGLE-3", section 3.1."""
        return self.eagle_aux_hidden_state_layer_ids or (2, num_layers // 2, num_layers - 3)


def parameters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names of ``speculators``, without maps; its authors call the layer ``midlayer``."""
    return {
        name.replace("midlayer.", "layers.0."): weight
        for name, weight in weights.items()
        if name not in ("d2t", "t2d") and not name.startswith("verifier_")
    }


def token_map(weights: Mapping[str, Tensor], draft_vocab_size: int, vocab_size: int) -> Tensor | None:
    """The target's token of each of the head's, int64 [draft_vocab_size]; None where they are the same.

    ``d2t`` holds how far each token lies before the target's, ``t2d`` which of the target's there are.

    Raises:
        ValueError: There is no such map, or it is no map.
    """
    if "d2t" in weights:
        found = weights["d2t"].long() + torch.arange(len(weights["d2t"]))
    elif "t2d" in weights:
        found = weights["t2d"].bool().nonzero().flatten()
    elif draft_vocab_size == vocab_size:
        return None
    else:
        raise ValueError(f"it knows {draft_vocab_size} tokens of {vocab_size}, and has no d2t that maps them")
    if found.shape != (draft_vocab_size,) or len(set(found.tolist())) < draft_vocab_size:
        raise ValueError(f"d2t must map {draft_vocab_size} tokens to as many")
    if not 0 <= int(found.min()) <= int(found.max()) < vocab_size:
        raise ValueError(f"d2t must map to tokens in [0, {vocab_size})")
    return found
