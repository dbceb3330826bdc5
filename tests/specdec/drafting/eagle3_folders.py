"""EAGLE-3 checkpoints for tiny models: fitted by least squares, so that something of their drafts is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from specdec.drafting.eagle3.heads import Eagle3Heads
from specdec.drafting.eagle3.layouts import Eagle3Config
from specdec.models.hidden import AFTER_NORM, HiddenStates

Layout = Literal["speculators", "authors"]


@torch.no_grad()
def write_eagle3(
    folder: Path,
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    kind: str = "llama",
    layout: Layout = "speculators",
    draft_vocab_size: int | None = None,
) -> str:
    """Write a head for a model, fitted to what the model says in some texts; its own layer adds a little noise.

    Args:
        folder: New; gets ``config.json`` and weights.
        model: The target.
        texts: Token ids.
        kind: Of its layer: llama or qwen3.
        layout: Of the checkpoint. The authors' has no embeddings.
        draft_vocab_size: Tokens that it knows, those that occur most; None for all.
    """
    config = model.config.get_text_config(decoder=True)
    size, vocab_size, read = config.hidden_size, config.vocab_size, (0, 1, config.num_hidden_layers)
    sizes = {"vocab_size": vocab_size, "hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size // 4, "max_position_embeddings": 512}
    hidden, states, following = HiddenStates(model, (*read, AFTER_NORM)), list[Tensor](), list[Tensor]()
    for text in texts:
        model(torch.tensor([list(text)]), use_cache=False)
        *of_layers, last = hidden.take()
        states.append(torch.cat(of_layers, -1)[:-1].double())
        following.append(last[1:].double())
    known = torch.bincount(torch.tensor([token for text in texts for token in text]), minlength=vocab_size)
    known = known.topk(draft_vocab_size or vocab_size).indices.sort().values
    shape = Eagle3Config(AutoConfig.for_model(kind, **sizes), len(known), size, read)
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.ones(weight.shape)
        if "norm" in name
        else torch.randn(weight.shape, generator=generator) * (0.02 if "o_proj" in name or "down" in name else 0.1)
        for name, weight in Eagle3Heads(shape, read, 0).state_dict().items()
    }
    weights["fc.weight"] = torch.linalg.lstsq(torch.cat(states), torch.cat(following)).solution.T.float().contiguous()
    weights["lm_head.weight"] = model.get_output_embeddings().weight[known].float().contiguous()
    weights["embed_tokens.weight"] = model.get_input_embeddings().weight.float().clone()
    if draft_vocab_size is not None:
        weights["d2t"] = known - torch.arange(len(known))
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, known, True)
    fields = {"draft_vocab_size": len(known), "eagle_aux_hidden_state_layer_ids": list(read)}
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "authors":
        del weights["embed_tokens.weight"]
        torch.save(
            {name.replace("layers.0.", "midlayer."): w for name, w in weights.items()}, folder / "pytorch_model.bin"
        )
        fields |= sizes | {"model_type": kind, "rope_theta": 10000.0}
    else:
        save_file(weights, folder / "model.safetensors")
        fields |= {"speculators_model_type": "eagle3", "transformer_layer_config": sizes | {"model_type": kind}}
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)
