"""The models' shapes; growing a model in depth; the export that transformers loads."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

from examples.train_draft.tokens import END_ID
from specdec.drafting.eagle3.heads import Eagle3Heads
from specdec.drafting.eagle3.layouts import Eagle3Config
from specdec.drafting.medusa.heads import HeadsConfig, MedusaHeads


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama model with tied embeddings and as many key-value heads as query heads."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int = 4096
    max_positions: int = 2048

    def config(self) -> PreTrainedConfig:
        """The transformers configuration."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=True,
            bos_token_id=END_ID,
            eos_token_id=END_ID,
        )


@dataclass(frozen=True, slots=True)
class HybridShape(Shape):
    """A Qwen3.5 text model: gated delta rule layers, and full attention in every fourth.

    Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule". Keys of the linear layers are half as
    wide as their values.
    """

    def config(self) -> Qwen3_5TextConfig:
        """The transformers configuration."""
        head_size = self.hidden_size // self.num_heads
        return Qwen3_5TextConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads // 2,
            head_dim=head_size,
            linear_num_key_heads=self.num_heads,
            linear_num_value_heads=self.num_heads,
            linear_key_head_dim=head_size // 2,
            linear_value_head_dim=head_size,
            layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(self.num_layers)],
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=True,
            bos_token_id=END_ID,
            eos_token_id=END_ID,
        )


TARGET = Shape(num_layers=12, hidden_size=256, intermediate_size=768, num_heads=4)
DRAFT = Shape(num_layers=2, hidden_size=160, intermediate_size=512, num_heads=5)
HEADS = HeadsConfig(TARGET.hidden_size, TARGET.vocab_size, 4, 4, medusa_fc_bias=True, original_lm_head=True)
HYBRID = HybridShape(num_layers=4, hidden_size=256, intermediate_size=640, num_heads=4)


class _OnDevice(nn.Module):
    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return next(self.parameters()).device


class TrainedHeads(_OnDevice, MedusaHeads):
    """Medusa heads that share a vocabulary head which they neither hold nor train; new ones change nothing."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config, nn.Identity())
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class TrainedEagle3(_OnDevice, Eagle3Heads):
    """An EAGLE-3 head with transformers' own attention, and the target's embeddings, which it does not train."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, config.layers_read(0), 0, torch.empty(0), nn.Identity())
        config.layer._attn_implementation = "sdpa"

    def reads(self, embeddings: Tensor) -> None:
        """From now on it reads these, [vocabulary, hidden size]."""
        self._borrowed = (embeddings, *self._borrowed[1:])


def build(shape: Shape, seed: int) -> PreTrainedModel:
    """A float32 model with random weights; the projections that write to the residual stream start at zero."""
    torch.manual_seed(seed)
    model = from_fields(shape.config().to_dict())
    _silence(model, range(shape.num_layers))
    return model


def from_fields(fields: dict[str, Any]) -> PreTrainedModel:
    """A float32 model of any architecture that transformers has, or heads, from its configuration's ``to_dict()``."""
    if fields.get("model_type") == "medusa":
        return cast(PreTrainedModel, TrainedHeads(HeadsConfig.read(fields)))
    if "speculators_model_type" in fields:
        return cast(PreTrainedModel, TrainedEagle3(Eagle3Config.read(fields)))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    return model


def grow(model: PreTrainedModel, num_layers: int) -> tuple[PreTrainedModel, dict[str, str]]:
    """The same function with more layers: after every layer a copy of it that adds nothing yet.

    A copy keeps what it reads and computes and starts with zero output projections, so the loss does not jump and
    the new projections have a useful gradient at once. (Progressive stacking: Gong et al. 2019, "Efficient Training
    of BERT by Progressively Stacking"; zero outputs: Chen et al. 2016, "Net2Net", section 2.3.)

    Args:
        model: Has L layers.
        num_layers: A multiple of L.

    Returns:
        The grown model, and for each parameter that the old model had its old name by its new one.

    Raises:
        ValueError: ``num_layers`` is no multiple of L.
    """
    factor, rest = divmod(num_layers, model.config.num_hidden_layers)
    if rest or factor < 1:
        raise ValueError(f"num_layers must be a multiple of {model.config.num_hidden_layers}, not {num_layers}")
    grown = from_fields(model.config.to_dict() | {"num_hidden_layers": num_layers})
    state, old_names, old = {}, {}, model.state_dict()
    for name in grown.state_dict():
        parts = name.split(".")
        if parts[1] != "layers":
            state[name], old_names[name] = old[name], name
            continue
        source, copy_number = divmod(int(parts[2]), factor)
        old_name = ".".join([*parts[:2], str(source), *parts[3:]])
        state[name] = old[old_name]
        if copy_number == 0:
            old_names[name] = old_name
    grown.load_state_dict(state)
    _silence(grown, [i for i in range(num_layers) if i % factor])
    return grown, old_names


def export(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, chat_template: str | None = None
) -> None:
    """Writes a copy of the model in bfloat16 safetensors, and the tokenizer, as transformers loads them."""
    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)


def export_eagle3(head: TrainedEagle3, folder: Path) -> None:
    """Writes a head in bfloat16 in the layout of ``speculators``, without what it has of its target."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head.config.to_dict(), indent=2) + "\n")


def num_parameters(model: PreTrainedModel) -> int:
    """Number of parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def _silence(model: PreTrainedModel, layers: range | list[int]) -> None:
    """Zeroes the projections by which the layers write to the residual stream."""
    with torch.no_grad():
        for i in layers:
            layer = model.model.layers[i]
            mixer = layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj
            mixer.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
