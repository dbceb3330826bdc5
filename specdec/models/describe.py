"""What a model is, without its weights: for the processes that only talk of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import GenerationConfig

from specdec.checkpoint.compat import PairReport, check_pair
from specdec.checkpoint.configuration import eos_token_ids, generation_defaults, max_model_len
from specdec.checkpoint.parallel_drafting import step_tokens
from specdec.core.errors import ModelLoadError
from specdec.core.params import GenerationDefaults
from specdec.models.loading import ModelSource, auto_class, load_config, load_tokenizer, quiet
from specdec.models.lora.slots import layer_shapes


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a model's configuration says of it.

    Attributes:
        name: As the user gave it.
        vocab_size: Rows of its embedding, padding included.
        eos_token_ids: End-of-sequence ids.
        max_model_len: Longest sequence, in tokens.
        generation_defaults: What its ``generation_config.json`` sets for requests that do not say.
    """

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    generation_defaults: GenerationDefaults


def describe_model(source: ModelSource) -> ModelDescription:
    """Read a model's configuration.

    Raises:
        ModelLoadError: There is none, it is of a kind that cannot be served, or its defaults are out of their range.
    """
    text = load_config(source).get_text_config(decoder=True)
    generation = _generation_config(source)
    return ModelDescription(
        name=source.path,
        vocab_size=text.vocab_size,
        eos_token_ids=eos_token_ids(generation, text),
        max_model_len=max_model_len(text, source.path),
        generation_defaults=generation_defaults(generation, source.path),
    )


def describe_pair(
    target: ModelSource, draft: ModelSource, *, other_vocabulary: bool = False, num_step_tokens: int = 1
) -> PairReport:
    """What holds for a pair, by its configurations and tokenizers.

    See :func:`specdec.checkpoint.compat.check_pair` and :func:`specdec.checkpoint.parallel_drafting.step_tokens`.

    Raises:
        ModelLoadError: A configuration or a tokenizer cannot be read, or the draft gives a token a pass.
        IncompatiblePairError: The two do not fit together.
    """
    tokenizers = load_tokenizer(target), load_tokenizer(draft)
    of_step = step_tokens(load_config(draft).get_text_config(decoder=True), draft.path, num_step_tokens)
    report = check_pair(
        describe_model(target),
        tokenizers[0],
        describe_model(draft),
        tokenizers[1],
        other_vocabulary=other_vocabulary,
    )
    return replace(report, notes=(*report.notes, *of_step.notes), step_tokens=of_step)


def linear_shapes(source: ModelSource) -> dict[str, tuple[int, int]]:
    """(output width, input width) of the layers that adapters may change, by name.

    Raises:
        ModelLoadError: The model cannot be had.
    """
    config = load_config(source)
    with quiet(), torch.device("meta"):
        return layer_shapes(auto_class(config, source.path).from_config(config))


def _generation_config(source: ModelSource) -> GenerationConfig:
    """Its own, or what its ``config.json`` says where it has none: as transformers does when it loads the model."""
    path, options = Path(source.path).expanduser(), {"revision": source.revision, "token": source.token}
    name = str(path) if path.is_dir() else source.path
    try:
        with quiet():
            try:
                return GenerationConfig.from_pretrained(name, **options)
            except OSError:
                return GenerationConfig.from_pretrained(name, "config.json", _from_model_config=True, **options)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"the generation config of {source.path} cannot be read: {error}") from error
