"""Configurations of real size, and models of them with random weights: a step costs the same whatever is in them.

They are those of an 8B target and a 1B draft (Llama 3.1 and 3.2), and of a 32B and a 0.6B (Qwen3).
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specdec.models.loading import LoadedModel, prepare_model

SHAPES: dict[str, dict[str, dict[str, object]]] = {
    "8b-1b": {
        "target": {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        "draft": {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    },
    "32b-0.6b": {
        role: {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        }
        for role, hidden_size, intermediate_size, num_layers, num_heads in (
            ("target", 5120, 25600, 64, 64),
            ("draft", 1024, 3072, 28, 16),
        )
    },
    "tiny": {
        role: {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
        }
        for role, layers in (("target", 4), ("draft", 1))
    },
}
"""Configurations by name and role; ``tiny`` tries the sections out without a GPU."""

BLOCK_SIZE = 16


def make_model(fields: dict[str, object], device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model of a shape, made on its device with random weights."""
    return prepare_model(random_model(fields, device, dtype), "random weights")


def random_model(fields: dict[str, object], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The same as transformers has it."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(fields), dtype=dtype)
    return model.eval()


def config_of(fields: dict[str, object]) -> PretrainedConfig:
    """A configuration of transformers: Llama's, unless the fields name another."""
    return AutoConfig.for_model(**{"model_type": "llama", "max_position_embeddings": 8192} | fields)


def read_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that a decoding step reads: of an input embedding that is not the output's too, few rows."""
    embedding = loaded.model.get_input_embeddings().weight
    if embedding is loaded.model.get_output_embeddings().weight:
        return loaded.weights_bytes
    return loaded.weights_bytes - embedding.nbytes
