"""Tiny random models of many families."""

import torch
import transformers
from transformers import PreTrainedModel

from tests.sizes import sized

VOCAB_SIZE = 128
_MIXED = ["sliding_attention", "full_attention"] * 2
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "layer_types": _MIXED}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gemma3": (
        "Gemma3",
        {"sliding_window": 6, "layer_types": _MIXED, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
    ),
    "gemma": ("Gemma", {"tie_word_embeddings": False}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "tie_word_embeddings": False,
        },
    ),
    "phi3": ("Phi3", {}),
    "mixtral": ("Mixtral", _MOE),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "logits_scaling": 1.0}),
    "glm4": ("Glm4", {}),
    "cohere2": (
        "Cohere2",
        {"sliding_window": 6, "layer_types": _MIXED, "logit_scale": 1.0, "tie_word_embeddings": False},
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_oss": ("GptOss", {"sliding_window": 6, "layer_types": _MIXED, **_MOE}),
    "gpt2": ("GPT2", {"n_positions": 1024, "n_embd": 64, "n_layer": 4, "n_head": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": _MIXED, "num_experts": 4},
    ),
    # Caches latents, and attends over what it makes of them.
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 2,
        },
    ),
}
SOME_FAMILIES = sized(("llama", "mistral", "gemma3", "gpt_oss", "deepseek_v3", "qwen2_moe"), tuple(FAMILIES))
"""One of a kind, or all."""
REFUSED = {
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "llama4": (
        "Llama4",
        {"layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": 8, "num_local_experts": 2},
    ),
    "bert": ("Bert", {}),
}


_CONFIG_NAMES = {"gemma3": "Gemma3TextConfig", "llama4": "Llama4TextConfig"}
_MODEL_NAMES = {"gpt2": "GPT2LMHeadModel", "bert": "BertLMHeadModel"}


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model in float32 whose weights are scaled to 1 / sqrt(fan in), so that logits vary by about 1."""
    name, options = {**FAMILIES, **REFUSED}[family]
    config_name = _CONFIG_NAMES.get(family, f"{name}Config")
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**_COMMON, **options})
    model = getattr(transformers, _MODEL_NAMES.get(family, f"{name}ForCausalLM"))(config)
    # Whatever torch's default is, which loading a model changes for a while.
    return randomize(model.float(), seed)


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give every matrix of a model random values, scaled to 1 / sqrt(fan in); puts it into eval mode."""
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return model.eval()
