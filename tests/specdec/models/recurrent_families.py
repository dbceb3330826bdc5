"""Tiny random models with recurrent layers: every family of transformers whose states can be rolled back here."""

import importlib

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 128
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 3}
# Heads of few channels now and then give outputs near zero, whose norm magnifies rounding.
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "head_dim": 8,
}
_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_CONV = ["conv", "full_attention", "conv"]

RECURRENT: dict[str, tuple[str, str, dict[str, object]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_ATTENTION, **_DELTA, **_MOE, "shared_expert_intermediate_size": 16, "layer_types": _MIXED},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_ATTENTION, **_DELTA, "layer_types": _MIXED}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_ATTENTION, **_DELTA, **_MOE, "shared_expert_intermediate_size": 16, "layer_types": _MIXED},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {**_ATTENTION, **_DELTA, "layer_types": _MIXED}),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            **_LATENT,
            "moe_intermediate_size": 16,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "layer_types": _MIXED,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {
            **_LATENT,
            "head_dim": 8,
            "q_lora_rank": 16,
            "moe_intermediate_size": 16,
            "num_experts_per_tok": 2,
            "num_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "layer_types": _MIXED,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_hidden_layers": 3, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    ),
    "bamba": ("BambaConfig", "BambaForCausalLM", {**_ATTENTION, **_MAMBA2, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_ATTENTION,
            **_MAMBA2,
            "shared_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": _MIXED,
            "logits_scaling": 1.0,
        },
    ),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", {**_ATTENTION, **_MAMBA2, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "chunk_size": 8,
            "num_mem_blocks": 1,
        },
    ),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {**_ATTENTION, "block_multiple_of": 16, "layer_types": _CONV}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {**_ATTENTION, **_MOE, "num_dense_layers": 1, "layer_types": _CONV},
    ),
    "lfm3": (
        "Lfm3Config",
        "Lfm3ForCausalLM",
        {
            **_ATTENTION,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        },
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"num_hidden_layers": 3, "state_size": 8}),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", {"num_hidden_layers": 3, "state_size": 8}),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            **_ATTENTION,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "zamba": (
        "ZambaConfig",
        "ZambaForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "hybrid"],
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
}

OPAQUE: dict[str, tuple[str, str, dict[str, object]]] = {
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {"num_hidden_layers": 2, "context_length": 256}),
    "xlstm": (
        "xLSTMConfig",
        "xLSTMForCausalLM",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "chunk_size": 16,
            "autocast_kernel_dtype": "float32",
            "qk_dim_factor": 1.0,
            "ffn_round_up_to_multiple_of": 16,
        },
    ),
    "minimax": (
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {
            **_ATTENTION,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "block_size": 8,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "attention_window_size": 12,
        },
    ),
    "zaya": (
        "ZayaConfig",
        "ZayaForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_hidden_layers": 2,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "router_hidden_size": 16,
        },
    ),
}
"""Families whose state can only be copied as a whole."""


def make_recurrent(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random model: matrices scaled to 1 / sqrt(fan in), states that last for many tokens."""
    config_name, model_name, options = {**RECURRENT, **OPAQUE}[family]
    torch.manual_seed(seed)
    config = _find(family, config_name)(**{**_COMMON, **options, **changes})
    model = _find(family, model_name)(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "A_log" not in name:
                fan_in = parameter[0].numel() if parameter.ndim == 2 or "conv" in name else parameter.shape[-1]
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 - 2)
    return model.eval()


def _find(family: str, name: str) -> type:
    """A class of transformers, also where it is not exported at the top."""
    if hasattr(transformers, name):
        return getattr(transformers, name)
    for kind in ("modeling", "configuration"):
        module = importlib.import_module(f"transformers.models.{family}.{kind}_{family}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(name)
