"""What a model's configuration files say of sequences: where they end, how long they may be, how tokens are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from specdec.core.errors import InvalidParameterError, ModelLoadError
from specdec.core.params import PLAIN_DEFAULTS, GenerationDefaults
from specdec.core.validation import validated, validated_max_tokens

_HONOURED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_NOT_HONOURED: dict[str, Any] = {
    "do_sample": True,
    "max_length": 20,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "stop_strings": None,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": None,
    "dola_layers": None,
    "guidance_scale": 1.0,
    "encoder_repetition_penalty": 1.0,
    "diversity_penalty": 0.0,
    "exponential_decay_length_penalty": None,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "token_healing": False,
    "watermarking_config": None,
}
"""Fields that change what transformers generates, with the value that changes nothing."""

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
        raise ModelLoadError(
            f"{name} does not say how long a sequence may be: its config.json lacks max_position_embeddings"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]:
        if parameters.get("rope_type") == "longrope":
            length = min(length, parameters.get("original_max_position_embeddings") or length)
    return length


def generation_defaults(generation: GenerationConfig | None, name: str) -> GenerationDefaults:
    """What a generation config sets for requests that do not say.

    Args:
        generation: As transformers reads it; None where a model has none.
        name: Of the model, for messages.

    Raises:
        ModelLoadError: A value is out of its range: every request that takes it would be refused.
    """
    if generation is None:
        return PLAIN_DEFAULTS
    values = {key: value for key, value in generation.to_diff_dict().items() if value is not None}
    ignored = tuple(key for key, neutral in _NOT_HONOURED.items() if values.get(key, neutral) not in (neutral, [], {}))
    try:
        max_tokens = values.get("max_new_tokens")
        given = GenerationDefaults(
            **{key: values[key] for key in _HONOURED if key in values},
            max_tokens=None if max_tokens is None else validated_max_tokens(max_tokens, name="max_new_tokens"),
            not_honoured=ignored,
        )
        sampling = validated(given.sampling, vocab_size=1)
    except InvalidParameterError as error:
        raise ModelLoadError(f"the generation config of {name} cannot be honoured: {error}") from error
    return replace(given, **{key: getattr(sampling, key) for key in _HONOURED})
