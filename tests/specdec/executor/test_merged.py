"""Weights of linear layers that read the same input lie behind one another, and the model does not notice."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.executor.merged import merge, merge_weights, unmerge
from specdec.models.hidden import layers_of
from tests.specdec.models.families import make_model


class Special(nn.Linear):
    """For example a quantized one."""


@torch.no_grad()
def qwen2() -> PreTrainedModel:
    """With biases of q_proj, k_proj and v_proj."""
    model = make_model("qwen2")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    return model


def test_weights_are_moved_once_and_stay_what_they_are() -> None:
    model = qwen2()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    products = merge_weights(layers_of(model))
    assert [len(linears) for linears in products] == [3, 2] * len(layers_of(model))
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    attention = layers_of(model)[0].self_attn
    for one, following in ((attention.q_proj, attention.k_proj), (attention.k_proj, attention.v_proj)):
        assert one.weight.data_ptr() + one.weight.nbytes == following.weight.data_ptr()
        assert one.bias.data_ptr() + one.bias.nbytes == following.bias.data_ptr()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.inference_mode():
        assert merge_weights(layers_of(model)) == products
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_special_or_unlike_layers_are_left_alone() -> None:
    model = qwen2()
    first, second, *_ = layers_of(model)
    first.self_attn.k_proj.__class__ = Special
    second.mlp.up_proj.bias = nn.Parameter(torch.ones(second.mlp.up_proj.out_features))
    products = merge_weights([first, second])
    assert [[one.out_features for one in linears] for linears in products] == [[96, 96], [64, 32, 32]]


@torch.no_grad()
def test_operator_by_operator_each_layer_multiplies_by_its_own_weight() -> None:
    model, tokens = qwen2(), torch.arange(1, 9)[None]
    expected = model(tokens).logits
    merged = merge(layers_of(model))
    assert len(merged) == 5 * len(layers_of(model))
    torch.testing.assert_close(model(tokens).logits, expected, atol=2e-5, rtol=2e-5)
    model.model.layers[0].self_attn.v_proj.weight[-1, -1] += 1
    assert merged[2].whole[-1, -1] == merged[2].weight[-1, -1]
    unmerge(merged)
    assert not any(hasattr(one, "whole") for one in merged)
    assert {type(one) for one in merged} == {nn.Linear}
