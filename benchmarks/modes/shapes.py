"""Models in a line of words: architecture, shape, precision."""

from __future__ import annotations

from cluster.config.app import AppArgs
from cluster.models.sources import draft_source, target_source
from specdec.models.loading import ModelSource, load_config


def model_shapes(args: AppArgs) -> dict[str, str]:
    """The shape of each model, by role, from its configuration; no weights are read."""
    draft = draft_source(args)
    shapes = {"target": shape_of(target_source(args))}
    return shapes if draft is None else shapes | {"draft": shape_of(draft)}


def shape_of(source: ModelSource) -> str:
    """Architecture, layers, widths, vocabulary and precision of one model."""
    config = load_config(source)
    text = config.get_text_config(decoder=True)
    names = {"num_hidden_layers": "layers", "hidden_size": "hidden", "intermediate_size": "intermediate"}
    sizes = [f"{getattr(text, name)} {word}" for name, word in names.items() if getattr(text, name, None)]
    return f"{config.model_type}, {', '.join(sizes)}, vocabulary {text.vocab_size}, {source.dtype}"
