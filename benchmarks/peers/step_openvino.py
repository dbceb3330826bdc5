"""OpenVINO's step of one row, with cached keys and values as inputs and outputs, so that to cut them back is ours.

The graph is traced from transformers' own layers. A step reads the cached positions in place and gives those of its new
tokens alone. Decoders alone whose layers all attend to all positions. The fourth argument is the quantization.
"""

from __future__ import annotations

import sys
from typing import Any

import nncf
import numpy as np
import openvino
import torch
from step_loop import Given, take_steps
from transformers import AutoModelForCausalLM


class CachedKeyValues:
    """What the layers' attention takes for a cache, while they are traced."""

    is_compileable = False

    def __init__(self, past: tuple[torch.Tensor, ...]) -> None:
        self._past = past
        self.new: list[torch.Tensor] = [torch.empty(0)] * len(past)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any) -> tuple[torch.Tensor, ...]:
        """All keys and all values, [1, heads, positions, dim] each; the new ones are kept with positions first."""
        both = []
        for index, new in ((2 * layer, key), (2 * layer + 1, value)):
            self.new[index] = new[0].transpose(0, 1)
            both.append(torch.cat((self._past[index].transpose(0, 1).unsqueeze(0), new), 2))
        return tuple(both)


class Step(torch.nn.Module):
    """A step of a decoder: tokens, positions, a mask to add, and keys and values by layer, [positions, heads, dim]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: torch.Tensor, position: torch.Tensor, mask: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The last token's logits, then the new keys and values."""
        cache, base = CachedKeyValues(past), self.model.model
        hidden = base.embed_tokens(tokens)
        rotary = base.rotary_emb(hidden, position)
        for layer in base.layers:
            given = {"position_ids": position, "past_key_values": cache, "position_embeddings": rotary}
            hidden = layer(hidden, attention_mask=mask, use_cache=True, **given)
        return (self.model.lm_head(base.norm(hidden)[:, -1]), *cache.new)


def traced(model: Any, num_heads: int, head_dim: int) -> openvino.Model:
    """The step as a graph, for any number of tokens and of cached positions."""
    step, num_cached = Step(model), 2 * model.config.num_hidden_layers
    past = [torch.randn(5, num_heads, head_dim) for _ in range(num_cached)]
    example = (torch.tensor([[1, 2]]), torch.tensor([[5, 6]]), torch.zeros(1, 1, 2, 7), *past)
    with torch.inference_mode():
        graph = openvino.convert_model(step, example_input=example)
        expected = step(*example)[0].numpy()
    shapes = [[1, -1], [1, -1], [1, 1, -1, -1], *[[-1, num_heads, head_dim]] * num_cached]
    for node, shape in zip(graph.inputs, shapes, strict=True):
        node.get_node().set_partial_shape(openvino.PartialShape(shape))
    graph.validate_nodes_and_infer_types()
    found = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(
        [tensor.numpy() for tensor in example]
    )[0]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    return graph


def main() -> None:
    """Trace, quantize, compile, and take steps after a context."""
    given, quantization = Given.read(), sys.argv[4]
    torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, attn_implementation="eager").eval()
    config = model.config
    num_heads, head_dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    graph = traced(model, num_heads, head_dim)
    del model
    if quantization == "int8":
        graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_SYM)
    elif quantization == "int4":
        graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=32, ratio=1.0)
    settings = {
        "INFERENCE_NUM_THREADS": given.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = openvino.Core().compile_model(graph, "CPU", settings).create_infer_request()
    random = np.random.default_rng(0)
    past = [
        random.standard_normal((given.context, num_heads, head_dim), np.float32)
        for _ in range(2 * config.num_hidden_layers)
    ]
    position, mask = np.array([[given.context]]), np.zeros((1, 1, 1, given.context + 1), np.float32)

    def step(count: int) -> None:
        token = 7
        for _ in range(count):
            given_arrays = [np.array([[token]]), position, mask, *past]
            request.infer(given_arrays, share_inputs=True, share_outputs=True)
            token = int(request.get_output_tensor(0).data.argmax())

    take_steps(f"weights {quantization}, float32", step)


if __name__ == "__main__":
    main()
