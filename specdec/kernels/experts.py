"""Experts of a mixture where bits count: each expert that a pass needs multiplies all tokens of the pass.

How many tokens choose an expert depends on which others are beside them; how many a pass has does not. So a library
always sees the same shapes, and a token's sum is taken in the order of its experts' numbers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

TILED_EXPERTS = "specdec_tiled"


def has_tiled_experts(module: nn.Module) -> bool:
    """Whether a layer's experts can be computed by :func:`tiled_experts`: transformers knows how they are laid out."""
    return hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def use_tiled_experts(model: PreTrainedModel) -> None:
    """Have a model compute its experts by :func:`tiled_experts`, if it has any."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if any(map(has_tiled_experts, model.modules())):
        if TILED_EXPERTS not in ALL_EXPERTS_FUNCTIONS.valid_keys():
            ALL_EXPERTS_FUNCTIONS.register(TILED_EXPERTS, tiled_experts)
        model.set_experts_implementation(TILED_EXPERTS)


def tiled_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers' ``batched_mm_experts_forward`` gives, with products over all tokens.

    Args:
        experts: A layer of transformers' with an experts' implementation to be chosen.
        hidden_states: [tokens, hidden].
        top_k_index: int64 [tokens, k], the experts of each token.
        top_k_weights: [tokens, k], by which their outputs are added up.

    Returns:
        [tokens, hidden].
    """
    total = hidden_states.new_zeros(hidden_states.shape).float()
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    for number in sorted(set(top_k_index.flatten().tolist())):
        chosen = top_k_index == number
        inner = _product(experts, first, number, hidden_states)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        output = _product(experts, "down_proj", number, inner)
        if getattr(experts, "has_post_expert_norm", False):  # transformers 5.17 knows none
            output = experts.post_expert_norm(output)
        weight = (top_k_weights * chosen).sum(1, keepdim=True)
        total += (output * weight).float().masked_fill_(~chosen.any(1, keepdim=True), 0)
    return total.to(hidden_states.dtype)


def _product(experts: Any, name: str, number: int, inputs: Tensor) -> Tensor:
    weight = getattr(experts, name)[number]
    bias = getattr(experts, f"{name}_bias")[number] if experts.has_bias else None
    return functional.linear(inputs, weight.T if experts.is_transposed else weight, bias)
