"""What a model is, without its weights: for the processes that only talk of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from specdec.models.configuration import eos_token_ids, generation_defaults, max_model_len
from specdec.models.loading import ModelSource, load_config


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a model's configuration says of it.

    Attributes:
        name: As the user gave it.
        vocab_size: Rows of its embedding, padding included.
        eos_token_ids: End-of-sequence ids.
        max_model_len: Longest sequence, in tokens.
        generation_defaults: Sampling values its ``generation_config.json`` sets, under transformers' names.
    """

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    generation_defaults: Mapping[str, Any]


def describe_model(source: ModelSource) -> ModelDescription:
    """Read a model's configuration.

    Raises:
        ModelLoadError: There is none, or it is of a kind that cannot be served.
    """
    text = load_config(source).get_text_config(decoder=True)
    generation = _generation_config(source)
    return ModelDescription(
        name=source.path,
        vocab_size=text.vocab_size,
        eos_token_ids=eos_token_ids(generation, text),
        max_model_len=max_model_len(text, source.path),
        generation_defaults=generation_defaults(generation),
    )


def _generation_config(source: ModelSource) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(source.path, revision=source.revision, token=source.token)
    except OSError:  # a model need not have one
        return None
