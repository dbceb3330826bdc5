"""A Llama model as llama.cpp reads it: GGUF, in float32, bfloat16, q8_0 or q4_0. Arguments: FOLDER WEIGHTS OUT DTYPE.

llama.cpp's own converter knows tokenizers by a hash and refuses those it never saw; this one says that the tokenizer
splits as GPT-2's does. Prompts are given as ids, so that no text depends on it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FORMATS = {
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def new_name(name: str) -> str:
    """What llama.cpp calls a parameter."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection, from halves rotated against each other to neighbours rotated in pairs."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write_shape(writer: gguf.GGUFWriter, config: dict) -> None:
    """What the file says of the model's shape."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict) -> None:
    """Tokens by id, and their merges."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    by_id = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    ids = range(config["vocab_size"])
    kinds = {False: gguf.TokenType.NORMAL, True: gguf.TokenType.CONTROL}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([special.get(i) or by_id.get(i, f"[unused {i}]") for i in ids])
    writer.add_token_types([kinds[i in special] for i in ids])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def main() -> None:
    """Write one file."""
    folder, weights, out, dtype = Path(sys.argv[1]), np.load(sys.argv[2]), sys.argv[3], sys.argv[4]
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    write_shape(writer, config)
    write_tokenizer(writer, folder, config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for old in weights.files:
        name, weight = new_name(old), weights[old]
        kind = name.split(".")[-2]
        if kind in heads:
            weight = interleaved(weight, heads[kind])
        if dtype in FORMATS and weight.ndim > 1:
            raw = gguf.quants.quantize(weight, FORMATS[dtype])
            writer.add_tensor(name, raw, raw_dtype=FORMATS[dtype])
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
