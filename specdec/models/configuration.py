"""What a model's configuration files say of sequences: where they end, how long they may be, how tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from specdec.errors import ModelLoadError

_GENERATION_DEFAULTS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)

MAX_LENGTH_WITHOUT_POSITIONS = 1 << 15
"""A model of recurrent layers alone has no positions and so no longest sequence; here it has."""
_WITHOUT_POSITIONS = {"xlstm"}
"""Models of recurrent layers alone that do not say so by their layer types."""


def eos_token_ids(generation: GenerationConfig | None, config: PretrainedConfig) -> tuple[int, ...]:
    """End-of-sequence ids, of the generation config if it names any, else of a text configuration."""
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return ()
    return (int(ids),) if isinstance(ids, int) else tuple(int(token) for token in ids)


def max_model_len(config: PretrainedConfig, name: str) -> int:
    """Longest sequence whose positions are all computed in one way.

    Position scaling of the kind ``longrope`` takes other frequencies for all positions once a batch holds a longer
    sequence than it was first trained on; cached keys, and other rows, would be wrong. Such a model ends there.
    """
    length = getattr(config, "max_position_embeddings", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if length is None and (kinds == {"linear_attention"} or config.model_type in _WITHOUT_POSITIONS):
        return MAX_LENGTH_WITHOUT_POSITIONS
    if not isinstance(length, int):
        raise ModelLoadError(f"{name} does not say how long a sequence may be (max_position_embeddings)")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]:
        if parameters.get("rope_type") == "longrope":
            length = min(length, parameters.get("original_max_position_embeddings") or length)
    return length


def generation_defaults(generation: GenerationConfig | None) -> Mapping[str, Any]:
    """Sampling values that a generation config sets, under transformers' names."""
    if generation is None:
        return MappingProxyType({})
    values = generation.to_diff_dict()
    return MappingProxyType({key: values[key] for key in _GENERATION_DEFAULTS if values.get(key) is not None})
