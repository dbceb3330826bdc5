"""Random EAGLE-3 heads and what they say, by the ``speculators`` package itself; in its own environment.

``python save_speculators.py FOLDER KIND LAYOUT FLAGS``: into FOLDER/head goes a checkpoint, of layers of the KIND llama
or qwen3, in the LAYOUT of speculators or of EAGLE's authors; into FOLDER/said.safetensors what it was given, and its
logits for the first, second and third token of a draft after each position.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

VOCAB_SIZE, DRAFT_VOCAB_SIZE, HIDDEN_SIZE, NUM_TOKENS, NUM_PLACES = 128, 40, 64, 23, 3
LAYER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def made(kind: str, flags: list[str]) -> Eagle3DraftModel:
    """A head with random weights, and maps between the vocabularies."""
    layer = AutoConfig.for_model(kind, **LAYER | ({"num_hidden_layers": 2} if "two_layers" in flags else {}))
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **{flag: True for flag in flags if flag != "two_layers"},
    )
    torch.manual_seed(5)
    model = Eagle3DraftModel(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
    known = torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB_SIZE].sort().values
    t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    t2d[known] = True
    model.load_vocab_mappings(t2d, known - torch.arange(DRAFT_VOCAB_SIZE))
    return model.eval()


def save_by_the_authors(model: Eagle3DraftModel, folder: Path) -> Eagle3DraftModel:
    """Writes a checkpoint as EAGLE's authors publish theirs; gives what the package's converter makes of it."""
    folder.mkdir()
    left_out = ("embed_tokens.", "verifier_")
    weights = {
        name.replace("layers.0.", "midlayer."): weight
        for name, weight in model.state_dict().items()
        if not name.startswith(left_out)
    }
    torch.save(weights, folder / "pytorch_model.bin")
    fields = LAYER | {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "rope_theta": 10000.0}
    fields |= {"draft_vocab_size": DRAFT_VOCAB_SIZE, "rms_norm_eps": 1e-6, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(fields))
    base = folder.parent / "base"
    base.mkdir()
    AutoConfig.for_model("llama", **LAYER).save_pretrained(base)
    Eagle3Converter().convert(folder, folder.parent / "converted", str(base), validate=False)
    config = Eagle3SpeculatorConfig.from_pretrained(folder.parent / "converted")
    config.speculators_config.verifier.name_or_path = None
    config.transformer_layer_config._attn_implementation = "eager"
    converted = Eagle3DraftModel(config).float()
    saved = load_file(folder.parent / "converted" / "model.safetensors")
    converted.load_state_dict(saved | {"embed_tokens.weight": model.embed_tokens.weight}, strict=False)
    return converted.eval()


def main() -> None:
    folder, kind, layout, *flags = sys.argv[1:]
    root = Path(folder)
    model = made(kind, flags)
    if layout == "authors":
        model = save_by_the_authors(model, root / "head")
    else:
        model.save_pretrained(root / "head")
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: logits.append(output[0]))
    states = torch.randn(1, NUM_TOKENS, 3 * HIDDEN_SIZE)
    tokens = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS))
    with torch.no_grad():
        model(states, tokens, torch.zeros(1, NUM_TOKENS, dtype=torch.long), ttt_steps=NUM_PLACES)
    said = {f"logits_{place}": of_place.contiguous() for place, of_place in enumerate(logits)}
    given = {"states": states[0].contiguous(), "tokens": tokens[0].contiguous()}
    embeddings = {"embeddings": model.embed_tokens.weight.detach().clone()}
    save_file(said | given | embeddings, root / "said.safetensors")


if __name__ == "__main__":
    main()
