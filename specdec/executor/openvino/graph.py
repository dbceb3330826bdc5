"""A decoder of transformers as a graph of OpenVINO whose attention reads a paged cache.

The model is traced as the runner calls it, with keys and values as inputs and outputs; OpenVINO's own transformation
puts its paged attention in the place of that. What it reads and writes are tensors of ours, in blocks, so that whose
they are, what is cut back and what branches share is ours to say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import torch
from openvino import opset13
from openvino._offline_transformations import apply_make_stateful_transformation, paged_attention_transformation
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from specdec.executor.openvino.checks import PRECISIONS
from specdec.kernels.progress import StepProgress
from specdec.kernels.segmented import AttentionLayer
from specdec.models.loading import LoadedModel, quiet
from specdec.models.probe import PromptCache, cache_argument

_INT8 = 127.0


class _TracedCache(PromptCache):
    """Keys and values of the past, before a step's own."""

    def __init__(self, past: tuple[Tensor, ...], layers: list[int]) -> None:
        super().__init__()
        self.kept = {layer: (past[2 * i], past[2 * i + 1]) for i, layer in enumerate(layers)}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, ...]:
        """All keys and all values, [1, heads, positions, dim]."""
        keys, values = self.kept[layer_idx]
        self.kept[layer_idx] = torch.cat((keys, key_states), 2), torch.cat((values, value_states), 2)
        return self.kept[layer_idx]


class _TracedAttention:
    """Attention in the form that the transformation looks for; which tokens are whose sequence's it does not matter."""

    def __init__(self) -> None:
        self.latent_layers: frozenset[int] = frozenset()
        self.progress = StepProgress()

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, _is_latent: bool) -> Tensor:
        """See :meth:`specdec.kernels.attention.AttentionContext.attend`."""
        keys, values = (_repeated(states, int(queries.shape[1]) // int(states.shape[1])) for states in (keys, values))
        rows, mask = queries.unsqueeze(2), torch.zeros(1, 1, dtype=queries.dtype)
        return scaled_dot_product_attention(rows, keys, values, mask, scale=layer.scaling).squeeze(2)


def _repeated(states: Tensor, count: int) -> Tensor:
    """Each key head as often as queries share it."""
    if count == 1:
        return states
    batch, num_heads, length, dim = states.shape
    return states.unsqueeze(2).expand(batch, num_heads, count, length, dim).reshape(batch, -1, length, dim)


class _Step(nn.Module):
    """A pass over tokens, as it is traced."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.model = loaded.model
        self._layers = [layer.index for layer in loaded.attention_layers]
        self._cache_argument = cache_argument(loaded.model)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, beam_idx: Tensor, wanted: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits of the wanted tokens, the mean magnitude of each token's hidden state, all keys and values."""
        cache = _TracedCache(tuple(states.index_select(0, beam_idx) for states in past), self._layers)
        magnitudes: list[Tensor] = []

        def choose(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            hidden = output[0].flatten(0, 1)
            magnitudes.append(hidden.float().abs().mean(-1))
            output.last_hidden_state = hidden.index_select(0, wanted).unsqueeze(0)
            return output

        with self.model.base_model.register_forward_hook(choose):
            logits = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                use_cache=True,
                attention_context=_TracedAttention(),
                **{self._cache_argument: cache},
            ).logits
        return (logits[0].float(), magnitudes[0], *(states for pair in cache.kept.values() for states in pair))


def compiled_graph(loaded: LoadedModel, quantization: str, num_threads: int) -> openvino.CompiledModel:
    """Trace, convert and compile a model.

    Args:
        loaded: With no :func:`~specdec.executor.openvino.checks.refused_reason`. By ``int8`` its weights are rounded.
        quantization: ``none``, or ``int8``: a scale for each row of a linear layer's weight.
        num_threads: That compute.

    Returns:
        The graph. Its inputs beside the caches: ``input_ids``, ``position_ids``, ``wanted``, and what OpenVINO's paged
        attention takes. Its outputs: float32 [wanted, vocabulary] and [tokens].
    """
    if quantization == "int8":
        round_to_int8(loaded.model)
    graph = _traced(loaded)
    if quantization == "int8":
        hold_in_int8(graph)
    precision = PRECISIONS[loaded.dtype]
    settings = {
        "INFERENCE_NUM_THREADS": num_threads,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "PERFORMANCE_HINT": "LATENCY",
        # A token's product must not depend on what stands beside it, nor its text on what is drafted.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "ENABLE_CPU_PINNING": False,
    }
    return openvino.Core().compile_model(graph, "CPU", settings)


@torch.inference_mode()
def _traced(loaded: LoadedModel) -> openvino.Model:
    layers, dtype = loaded.attention_layers, loaded.dtype
    names, shapes = ["input_ids", "position_ids", "beam_idx", "wanted"], [[-1, -1], [-1, -1], [-1], [-1]]
    states, past = [], []
    for layer in layers:
        for name, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
            names.append(f"past.{layer.index}.{name}")
            shapes.append([-1, layer.num_key_heads, -1, dim])
            states.append(f"present.{layer.index}.{name}")
            past.append(torch.zeros(1, layer.num_key_heads, 5, dim, dtype=dtype))
    step = _Step(loaded).eval()
    example = (torch.tensor([[1, 2]]), torch.tensor([[5, 6]]), torch.tensor([0]), torch.tensor([1]), *past)
    with quiet():  # what tracing takes for constants is the model's shape
        decoder = TorchScriptPythonDecoder(step, example_input=example)
    frontend = FrontEndManager().load_by_framework("pytorch")
    graph = frontend.convert(frontend.load(decoder))
    for node, name, shape in zip(graph.inputs, names, shapes, strict=True):
        node.get_tensor().set_names({name})
        node.get_node().set_friendly_name(name)
        node.get_node().set_partial_shape(openvino.PartialShape(shape))
    for node, name in zip(graph.outputs, ["logits", "magnitude", *states], strict=True):
        node.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, dict(zip(names[4:], states, strict=True)))
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            shape = node.get_output_partial_shape(0)
            empty = [1, shape[1].get_length(), 0, shape[3].get_length()]
            zero = opset13.constant(0.0, node.get_output_element_type(0))
            node.set_arguments([opset13.broadcast(zero, opset13.constant(np.array(empty)))])
    graph.validate_nodes_and_infer_types()
    paged_attention_transformation(graph)
    return graph


@torch.inference_mode()
def round_to_int8(model: nn.Module) -> None:
    """Round the weights of linear layers to 255 steps a row, so that the model is what the graph computes."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.float()
            scale = _row_scale(weight)
            module.weight.copy_((weight / scale).round() * scale)


def hold_in_int8(graph: openvino.Model) -> None:
    """Keep the weights of products, [out, in], as int8 with a scale for each row; they are rounded already."""
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul" or not node.get_attributes()["transpose_b"]:
            continue  # GPT-2's layers have theirs as [in, out], not rounded
        constant = node.input_value(1).get_node()
        if constant.get_type_name() != "Constant" or len(constant.shape) != 2:
            continue
        dtype, data = constant.get_element_type(), constant.data
        is_bfloat16 = dtype == openvino.Type.bf16  # which NumPy lacks
        weight = torch.from_numpy(np.array(data.view(np.int16) if is_bfloat16 else data))
        weight = weight.view(torch.bfloat16).float() if is_bfloat16 else weight
        scale = _row_scale(weight)
        held = opset13.constant((weight / scale).round().to(torch.int8).numpy())
        factor = opset13.convert(opset13.constant(scale.numpy()), dtype)
        node.input(1).replace_source_output(opset13.multiply(opset13.convert(held, dtype), factor).output(0))


def _row_scale(weight: Tensor) -> Tensor:
    return weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _INT8
