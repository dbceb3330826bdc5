"""Kernels compiled for sm_80, sm_90 and sm_100: nothing spills, and a model has one version for all numbers of rows."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specdec.cache.recurrent.rescan import Rescan
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.kernels.recurrent import StateTensors
from specdec.kernels.sample import SampleStep
from specdec.kernels.scan import DeltaRule, Mamba1, Mamba2, Scan
from specdec.kernels.segmented import AttentionLayer, AttentionShape, AttentionStep
from specdec.kernels.triton import attention, recurrent
from specdec.kernels.triton.attention import TritonAttention, tile_config, write_cache
from specdec.kernels.triton.product import product
from specdec.kernels.triton.sample import TritonSampler
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rows import RowGroup, Rows
from tests.sizes import one_of_each, some
from tests.thorough.kernels.compiling import compiled_for, examined, versions_for

META = torch.device("meta")
CAPABILITIES = (80, 100, 90)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Heads, key heads, width of keys and of values, type.
SHAPES = {
    "llama-8b": (32, 8, 128, 128, BF16),
    "qwen2-7b": (28, 4, 128, 128, FP16),
    "gemma2": (16, 8, 256, 256, BF16),
    "gpt-oss": (64, 8, 64, 64, BF16),
    "float32": (32, 8, 128, 128, FP32),
    "float32, narrow": (32, 8, 64, 64, FP32),
    "float32, wide": (16, 8, 256, 256, FP32),
}
# What changes how attention is compiled: whether a step may have trees, and what of a layer.
OPTIONS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {}),
    "trees": (True, {}),
    "window": (False, {"window": 4096}),
    "softcap": (False, {"softcap": 50.0}),
    "sinks": (False, {"sinks": torch.empty(64, device=META)}),
    "all": (True, {"window": 4096, "softcap": 50.0, "sinks": torch.empty(64, device=META)}),
}


SPILLED_BYTES = {("_attend", "float32, wide", 80): 48}
"""By Triton 3.7, with several options at once; 3.6 spills none. With 4 or 16 warps there is more, or elsewhere."""


def attention_cases() -> list[tuple[str, int, str]]:
    """Each shape, capability and option at least once; with ``--whole`` all of them."""
    return one_of_each([*SHAPES], CAPABILITIES, [*OPTIONS, "all"])


# Columns, inputs, type.
PRODUCTS = {
    "8b-output": (4096, 4096, BF16),
    "8b-down": (4096, 14336, BF16),
    "8b-head": (128256, 4096, FP16),
    "float32": (4096, 4096, FP32),
}


def shape_of(name: str, has_trees: bool = True) -> AttentionShape:
    return AttentionShape(*SHAPES[name], 16, 512, 64, 8192, has_trees)


def step_of(num_tokens: int, num_rows: int) -> AttentionStep:
    def int32(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=META)

    tokens = [int32(num_tokens) for _ in range(4)]
    word = torch.empty(num_tokens, dtype=torch.int64, device=META)
    return AttentionStep(int32(64, 512), *tokens, word, *(int32(num_rows) for _ in range(3)))


def launch(
    shape: AttentionShape, sizes: list[tuple[int, int]], layers: list[AttentionLayer], dependent: bool = False
) -> None:
    """Steps of (tokens, rows) through layers."""
    kernel = TritonAttention(shape, META, num_processors=132, dependent_launches=dependent)
    pools = [
        torch.empty(1000, 16, shape.num_kv_heads, dim, dtype=shape.dtype, device=META)
        for dim in (shape.head_dim, shape.value_dim)
    ]
    for num_tokens, num_rows in sizes:
        kernel.prepare(step_of(num_tokens, num_rows))
        queries = torch.empty(num_tokens, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=META)
        for layer in layers:
            kernel.attend(queries, *pools, layer)
        # Keys lie head by head, values are a part of a merged product.
        keys = torch.empty(shape.num_kv_heads, num_tokens, shape.head_dim, dtype=shape.dtype, device=META)
        product = torch.empty(num_tokens, 3, *pools[1].shape[2:], dtype=shape.dtype, device=META)
        slots = torch.empty(num_tokens, dtype=torch.int64, device=META)
        write_cache(keys.transpose(0, 1), product[:, 2], *pools, slots, dependent)


@pytest.mark.parametrize(("name", "capability", "options"), attention_cases())
def test_attention_has_two_buffers_and_spills_nothing(name: str, capability: int, options: str) -> None:
    has_trees, of_layer = OPTIONS[options]
    shape = shape_of(name, has_trees)
    with compiled_for(capability) as kernels:
        launch(shape, [(16, 16)], [AttentionLayer(0.1, **of_layer)])
    for kernel in kernels:
        found = examined(kernel, capability)
        print(name, capability, options, found)
        assert found.spilled_bytes <= SPILLED_BYTES.get((kernel.name, name, capability), 0), found
        if kernel.name == "_attend":
            assert len(found.products) == (SHAPES[name][4] != FP32), "one kind of matrix instruction"
            assert max(found.waits) > 0, "keys are loaded while others are used"
            assert found.shared_bytes <= tile_config(shape).shared_bytes(shape) <= 99 << 10, found
        if kernel.name in ("_attend", "_merge") and SHAPES[name][4] != FP32:
            assert not found.contracted, "products and sums are rounded one by one"


def test_one_buffer_is_one_and_a_tile_that_fits_is_taken() -> None:
    """For a device whose programs may have less shared memory than any has."""
    shape = shape_of("llama-8b", has_trees=False)
    best = tile_config(shape)
    fewer = tile_config(shape, best.shared_bytes(shape) - 1)
    assert (best.keys, fewer.keys) == (64, 32)
    assert fewer.has_two_buffers
    least = tile_config(shape, fewer.shared_bytes(shape) - 1)
    assert not least.has_two_buffers
    with compiled_for(90) as kernels, pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "tile_config", lambda *_: least)
        launch(shape, [(16, 16)], [AttentionLayer(0.1)])
    (attend,) = (kernel for kernel in kernels if kernel.name == "_attend")
    found = examined(attend, 90)
    assert found.waits == {0}
    assert found.shared_bytes <= least.shared_bytes(shape)


def test_dependent_launches_wait_first() -> None:
    """Before anything is read or written: what the kernel before has written may not be there yet."""
    with compiled_for(90) as kernels:
        launch(shape_of("llama-8b"), [(16, 16)], [AttentionLayer(0.1, window=64)], dependent=True)
    assert {kernel.name for kernel in kernels} == {"_make_tiles", "_make_items", "_attend", "_merge", "_write_cache"}
    for kernel in kernels:
        assert kernel.metadata.launch_pdl
        before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
        assert wait, kernel.name
        assert not re.search(r"\b(ld|st|atom|cp\.async)\S*\.global", before), kernel.name
    with compiled_for(90) as kernels:
        launch(shape_of("llama-8b"), [(16, 16)], [AttentionLayer(0.1, window=64)])
    assert not any("griddepcontrol" in kernel.asm["ptx"] or kernel.metadata.launch_pdl for kernel in kernels)


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_has_one_version_for_all_numbers_of_rows(name: str) -> None:
    sizes = [(1, 1), (16, 1), (16, 16), (17, 3), (64, 64), (512, 64)]
    with compiled_for(90) as kernels:
        launch(shape_of(name, has_trees=False), sizes, [AttentionLayer(0.1)])
    assert set(Counter(kernel.name for kernel in kernels).values()) == {1}
    (attend,) = (kernel for kernel in kernels if kernel.name == "_attend")
    assert not examined(attend, 90).spilled_bytes


@pytest.mark.parametrize(("name", "capability"), one_of_each([*PRODUCTS], CAPABILITIES))
def test_products_have_one_version_that_spills_nothing(name: str, capability: int) -> None:
    num_columns, depth, dtype = PRODUCTS[name]
    weight = torch.empty(num_columns, depth, dtype=dtype, device=META)
    with compiled_for(capability) as kernels:
        for num_rows in (1, 3, 16, 64, 100, 512):
            product(torch.empty(num_rows, depth, dtype=dtype, device=META), weight)
    (kernel,) = kernels
    found = examined(kernel, capability)
    print(name, capability, found)
    assert not found.spilled_bytes, found
    assert found.shared_bytes <= 163 << 10, "what compute capability 8.0 has"
    assert len(found.products) == (dtype != FP32), "one kind of matrix instruction"


def sample_step_of(num_rows: int, num_sequences: int, vocab_size: int, width: int) -> SampleStep:
    """A step of which every feature has ``width`` entries."""

    def meta(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=META)

    words = -(-vocab_size // 32)
    shapes = {
        **dict.fromkeys(("sequence", "position", "draft", "parent", "grammar"), (num_rows,)),
        **dict.fromkeys(("first", "count", "top_k", "slot", "allowed"), (num_sequences,)),
        "bias_token": (num_sequences, width),
        "ahead": (num_rows, width),
        "ended": (num_rows, width),
        "bad": (num_rows, width),
        "counts": (64, vocab_size),
        "prompt_bits": (64, words),
        "masks": (width, words),
    }
    return SampleStep(
        **{name: meta(*shape) for name, shape in shapes.items()},
        seed=meta(num_sequences, dtype=torch.int64),
        temperature=meta(num_sequences, dtype=FP32),
        top_p=meta(num_sequences, dtype=torch.float64),
        min_p=meta(num_sequences, dtype=FP32),
        penalties=meta(num_sequences, 3, dtype=FP32),
        bias=meta(num_sequences, width, dtype=FP32),
    )


@pytest.mark.parametrize("capability", some(CAPABILITIES))
def test_sampling_spills_nothing_and_rounds_each_operation(capability: int) -> None:
    vocab_size = 128_256
    sampler = TritonSampler(vocab_size, 512, 64, 16, META)
    with compiled_for(capability) as kernels:
        for num_rows, num_sequences in [(1, 1), (16, 3), (512, 64)]:
            logits = torch.empty(num_rows, vocab_size, dtype=BF16, device=META)
            for width, is_used in ((4, True), (0, False)):
                step = sample_step_of(num_rows, num_sequences, vocab_size, width)
                sampler.decide(logits, step, penalties=is_used, truncation=is_used, noise=is_used)
    # One with everything and one without, whatever the numbers of rows.
    versions = {"_edit": 2, "_scale": 2, "_gather": 1, "_truncate": 1, "_choose": 2, "_settle": 1, "_walk": 1}
    assert Counter(kernel.name for kernel in kernels) == versions
    for kernel in kernels:
        found = examined(kernel, capability)
        print(capability, found)
        assert not found.spilled_bytes, found
        assert not found.contracted, found


def test_sampling_has_one_version_for_all_numbers_of_sequences() -> None:
    """Whose arrays lie behind one another: where one begins, and how that is aligned, follows from the numbers."""
    params = SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.1)
    kernels = Sampler(4096, on_kernels=True).kernels(torch.device("cpu"))
    assert kernels is not None
    with versions_for(90) as found:
        for number in (1, 2, 3, 4, 17):
            groups = [RowGroup(SequenceSpec(params, seed, 2, 8), [3, 4], (5, 6)) for seed in range(number)]
            kernels.sample(torch.zeros(3 * number, 4096), kernels.lay_out(Rows(groups)))
    names = ("_edit", "_scale", "_gather", "_truncate", "_choose", "_settle", "_walk")
    assert Counter(name for name, _ in found) == dict.fromkeys(names, 1)


def recurrent_scan(kind: str) -> Scan:
    """As many tokens as a step of drafts has, of the shapes of Qwen3-Next, Kimi Linear, Mamba-2 and Falcon-Mamba."""

    def meta(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(1, 64, *sizes, dtype=dtype, device=META)

    if kind == "mamba1":
        x, b, rates = meta(8192).transpose(1, 2), meta(16).transpose(1, 2), torch.empty(8192, 16, device=META)
        return Mamba1(lambda: None, x, x, rates, b, b, D=rates[:, 0].contiguous(), z=x)
    if kind == "mamba2":
        rates = torch.empty(128, device=META)
        return Mamba2(lambda: None, meta(128, 64), meta(128), rates, meta(8, 128), meta(8, 128), 256, D=rates)
    decay = meta(32, dtype=FP32) if kind == "delta_rule" else meta(32, 128, dtype=FP32)
    keys = [meta(16 if kind == "delta_rule" else 32, 128) for _ in range(2)]
    return DeltaRule(lambda: None, *keys, meta(32, 128), decay, meta(32), use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize(("kind", "capability"), one_of_each(["delta_rule", "kimi", "mamba2", "mamba1"], CAPABILITIES))
def test_recurrent_layers_spill_nothing(kind: str, capability: int) -> None:
    found = recurrent_scan(kind)
    shapes = [(tuple(value.shape[2:]), value.dtype) for value in found.inputs]
    states = Rescan(found.state_shape, shapes, 65, 18, META)
    at = StateTensors(*(torch.empty(size, dtype=torch.int32, device=META) for size in [17] * 7 + [64] * 4))
    inputs = torch.empty(1, 64, 8192, dtype=BF16, device=META).transpose(1, 2)
    ring, weight = torch.empty(65, 39, 8192, dtype=BF16, device=META), torch.empty(8192, 4, dtype=BF16, device=META)
    with compiled_for(capability) as kernels:
        recurrent.scan(found, states.kept, at)
        recurrent.convolve(inputs, ring, weight, weight[:, 0].contiguous(), "silu", at)
    names = Counter(kernel.name for kernel in kernels)
    assert names == {f"_{'delta_rule' if kind == 'kimi' else kind}": 1, "_convolve": 1, "_keep": 2}
    for kernel in kernels:
        compiled = examined(kernel, capability)
        print(kind, capability, compiled)
        assert not compiled.spilled_bytes, compiled
        assert kernel.name == "_keep" or not compiled.contracted, compiled
