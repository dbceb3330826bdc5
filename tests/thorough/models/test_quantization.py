"""Quantized weights: what is in memory, what multiplies with it, what is left as it was, and what is refused."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    TorchAoConfig,
)

from cluster.config.app import AppArgs
from cluster.models.demos import demo_folder
from cluster.models.identity import fingerprints
from specdec import SamplingParams, SpeculativeEngine
from specdec.core.errors import ModelLoadError
from specdec.core.types import Quantization
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, ModelSource, load_model
from specdec.models.parity_check import check_admission
from specdec.models.quantization import (
    QUANTIZATIONS,
    PackedInt8Linear,
    is_quantized,
    own_quantization,
    pack_int8,
    stored_bytes,
)
from tests.sizes import some
from tests.specdec.models.families import randomize
from tests.specdec.models.recurrent_families import make_recurrent
from tests.thorough.models.divergence import compare

pytest.importorskip("torchao", reason="torchao is not installed: pip install -e '.[quantization]'")
torchao = pytest.importorskip("torchao.quantization")

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
CASES = [
    (quantization, dtype)
    for dtype in DTYPES
    for quantization in QUANTIZATIONS
    if quantization != "none" and (quantization, dtype) != ("int4", torch.float32)
]
BITS = {"int8": 8 + 1, "fp8": 8 + 1, "int4": 4 + 1.5}
"""Of a weight, with its share of scales."""


def load(folder: Path | str, quantization: Quantization, dtype: torch.dtype) -> LoadedModel:
    return load_model(ModelSource(str(folder), dtype=DTYPES[dtype], device="cpu", quantization=quantization))


def runner_of(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, num_blocks=64)


@pytest.mark.parametrize(("quantization", "dtype"), some(CASES, 2))
@pytest.mark.parametrize("role", some(["target", "hybrid"]))
def test_quantized_models_are_admitted_and_near_their_originals(role, quantization, dtype):
    folder = demo_folder(role)
    plain, loaded = load(folder, "none", dtype), load(folder, quantization, dtype)
    runner = runner_of(loaded)
    report = check_admission(runner)
    assert report.relative_error <= (1e-4 if dtype == torch.float32 else report.tolerance)
    found = compare(runner, runner_of(plain))
    assert 0 < found.mean_kl < {"int8": 3e-3, "fp8": 2e-2, "int4": 0.2}[quantization]
    assert found.mean_kl <= found.max_kl
    assert found.same_top > {"int8": 0.97, "fp8": 0.9, "int4": 0.8}[quantization]
    assert (runner.pool.num_in_use, found.num_tokens) == (0, 256)


@pytest.mark.parametrize(("quantization", "dtype"), some(CASES, 2))
def test_memory_is_what_the_parts_of_a_tensor_take(quantization, dtype):
    loaded = load(demo_folder("target"), quantization, dtype)
    embedding = loaded.model.get_input_embeddings().weight
    num_quantized = loaded.num_parameters - embedding.numel()
    expected = embedding.nbytes + num_quantized * BITS[quantization] / 8
    assert expected * 0.85 < loaded.weights_bytes <= expected
    layer = nn.Linear(64, 32, bias=False, dtype=dtype)
    assert stored_bytes(nn.ModuleList([layer, layer])) == layer.weight.nbytes, "shared"


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9])
def test_few_tokens_multiply_with_int8_weights_as_they_lie_in_memory(num_tokens, is_transposed, monkeypatch):
    layer = load(demo_folder("target"), "int8", torch.bfloat16).model.get_decoder().layers[0].mlp.down_proj
    assert isinstance(layer, PackedInt8Linear)
    calls, packed = [], torch._weight_int8pack_mm
    monkeypatch.setattr(torch, "_weight_int8pack_mm", lambda *given: calls.append(1) or packed(*given))
    layer.bias = nn.Parameter(torch.ones(layer.out_features, dtype=torch.bfloat16), requires_grad=False)
    inputs = torch.randn(1, num_tokens, layer.in_features, dtype=torch.bfloat16)
    if is_transposed:  # as the inputs of Mamba-1's layers are
        inputs = inputs.transpose(1, 2).contiguous().transpose(1, 2)
    found = layer(inputs)
    weight = (layer.weight.qdata * layer.weight.scale).double()
    expected = inputs.double() @ weight.T + layer.bias.double()
    assert found.shape == expected.shape
    # bfloat16 rounds three times: the product, the scaled product, and the sum with the bias.
    assert (found - expected).abs().max() < 3 * 2**-8 * expected.abs().max()
    assert len(calls) == (num_tokens <= 8)


def test_int8_layers_multiply_by_torchao_in_float32_and_where_inputs_are_narrow():
    assert not any(
        isinstance(m, PackedInt8Linear) for m in load(demo_folder("target"), "int8", torch.float32).model.modules()
    )
    narrow = nn.Linear(40, 32, bias=False, dtype=torch.bfloat16)
    torchao.quantize_(narrow, torchao.Int8WeightOnlyConfig())
    pack_int8(nn.ModuleList([narrow]))
    assert type(narrow) is nn.Linear


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_head_and_embeddings_are_left_alone(quantization):
    model = load(demo_folder("target"), quantization, torch.bfloat16).model
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert sum(is_quantized(module) for module in model.modules()) == 12 * 7


def test_layers_whose_shape_the_int4_kernels_do_not_take_are_left_alone():
    model = load(demo_folder("hybrid"), "int4", torch.bfloat16).model
    left = {
        name.split(".")[-1]
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and not is_quantized(layer)
    }
    assert left == {"in_proj_a", "in_proj_b", "lm_head"}


def test_the_fingerprint_knows_what_quantizes_the_target():
    plain, int8, draft = (
        fingerprints(AppArgs.model_validate(keys))
        for keys in ({}, {"target": {"quantization": "int8"}}, {"draft": {"quantization": "int8"}})
    )
    assert int8.decision != plain.decision == draft.decision
    assert int8.vocabulary == plain.vocabulary == draft.vocabulary


def save_gpt2(folder: Path) -> None:
    randomize(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))).save_pretrained(folder)


def say_quantized(folder: Path, **config: object) -> Path:
    shutil.copytree(demo_folder("draft"), folder, dirs_exist_ok=True)
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_what_cannot_be_quantized_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="int4 needs dtype bfloat16"):
        load(demo_folder("target"), "int4", torch.float32)
    with pytest.raises(ModelLoadError, match="quantization must be one of none, int8, int4, fp8, got 'int3'"):
        load(demo_folder("target"), "int3", torch.float32)
    save_gpt2(tmp_path / "gpt2")
    with pytest.raises(ModelLoadError, match=r"no layer of .*gpt2 can be quantized by int8"):
        load(tmp_path / "gpt2", "int8", torch.float32)
    folder = say_quantized(tmp_path / "gptq", quant_method="gptq", bits=4)
    with pytest.raises(ModelLoadError, match=r"is quantized already \(gptq\): leave quantization out"):
        load(folder, "int8", torch.float32)


RECURRENT = [
    ("bamba", "float32", {"mamba_d_state": 32}),
    *((family, dtype, {}) for family in ("mamba", "falcon_mamba", "jamba") for dtype in DTYPES.values()),
]


@pytest.mark.parametrize(("family", "dtype", "fields"), RECURRENT)
def test_a_recurrent_model_is_quantized_too(tmp_path, family, dtype, fields):
    """Of Mamba-1, the weight of ``dt_proj`` is multiplied directly, and inputs are not contiguous."""
    make_recurrent(family, vocab_size=4096, **fields).save_pretrained(tmp_path)
    loaded = load(tmp_path, "int8", getattr(torch, dtype))
    report = check_admission(runner_of(loaded))
    assert report.relative_error < (1e-4 if dtype == "float32" else report.tolerance)
    packed = {name for name, module in loaded.model.named_modules() if isinstance(module, PackedInt8Linear)}
    assert bool(packed) == (dtype == "bfloat16")
    assert not any(name.endswith("dt_proj") for name in packed)


def test_torchao_is_named_where_it_is_missing(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("specdec.checkpoint.fingerprint.version", missing)
    with pytest.raises(
        ModelLoadError, match=r"quantization needs torchao: pip install 'specdec-serve\[quantization\]'"
    ):
        load(demo_folder("target"), "int8", torch.float32)
    with pytest.raises(ModelLoadError, match="quantization needs torchao"):
        fingerprints(AppArgs.model_validate({"target": {"quantization": "int8"}}))


@pytest.mark.parametrize(
    ("config", "package"),
    [
        ({"quant_method": "gptq", "bits": 4}, "(?i)optimum|gptq"),
        ({"quant_method": "awq", "bits": 4}, "(?i)gptqmodel|awq"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "compressed"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_a_checkpoint_that_needs_a_package_names_it(tmp_path, config, package):
    if importlib.util.find_spec(config["quant_method"].replace("-", "_")):
        pytest.skip("the package is here")
    with pytest.raises(ModelLoadError, match=package):
        load(say_quantized(tmp_path, **config), "none", torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_that_is_quantized_already_is_taken_as_it_is(tmp_path, dtype):
    made = load(demo_folder("draft"), "int8", dtype)
    for module in made.model.modules():
        if isinstance(module, PackedInt8Linear):
            module.__class__ = nn.Linear
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    source = str(demo_folder("draft"))
    AutoModelForCausalLM.from_pretrained(source, dtype=dtype, quantization_config=config).save_pretrained(tmp_path)
    loaded = load(tmp_path, "none", dtype)
    assert own_quantization(loaded.model.config) == "torchao"
    assert not any(isinstance(module, PackedInt8Linear) for module in loaded.model.modules())
    assert (loaded.weights_bytes, loaded.num_parameters) == (made.weights_bytes, made.num_parameters)
    runners = runner_of(made), runner_of(loaded)
    assert check_admission(runners[1]).relative_error <= check_admission(runners[0]).relative_error * 1.01
    assert compare(runners[1], runners[0]).max_kl < 1e-6


INT8_CHECKPOINTS = {
    "a scale per row": torchao.Int8WeightOnlyConfig(),
    "a scale per group": torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32)),
    "quantized inputs": torchao.Int8DynamicActivationInt8WeightConfig(),
}


@pytest.mark.parametrize("kind", INT8_CHECKPOINTS)
def test_an_int8_checkpoint_gives_the_text_that_transformers_gives(tmp_path, kind):
    source, config = demo_folder("target"), TorchAoConfig(INT8_CHECKPOINTS[kind])
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=config)
    theirs.save_pretrained(tmp_path)
    for file in source.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(source)
    engine = SpeculativeEngine.from_pretrained(ModelSource(str(tmp_path), dtype="bfloat16", device="cpu"))
    for prompt in ("def read(path):\n", "class A:\n"):
        inputs = tokenizer(prompt, return_tensors="pt")
        expected = theirs.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs.input_ids.shape[1] :]
        (result,) = engine.generate_batch([prompt], SamplingParams(temperature=0), seed=0, max_tokens=32)
        assert list(result.token_ids) == expected.tolist()


def test_a_checkpoint_of_bitsandbytes_is_counted_and_checked(tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    source, plain = str(demo_folder("target")), load(demo_folder("target"), "none", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, "none", torch.bfloat16)
    assert (own_quantization(loaded.model.config), loaded.num_parameters) == ("bitsandbytes", plain.num_parameters)
    assert loaded.weights_bytes < 0.4 * plain.weights_bytes
    assert check_admission(runner_of(loaded)).relative_error < 0.06
