"""Any draft may be quantized; checkpoints that are. A quantized target's text is its own by ``test_matrix``."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.models.demos import demo_folder
from specdec import ModelSource, SamplingParams, SpeculativeEngine
from specdec.engine.results import GenerationResult
from specdec.executor.runner import ModelRunner
from specdec.models.loading import load_model
from specdec.models.parity_check import check_admission
from specdec.models.quantization import own_quantization
from tests.sizes import some
from tests.specdec.engine.features import assert_texts_are_its_own, demo
from tests.thorough.models.divergence import compare

pytest.importorskip("torchao", reason="torchao is not installed: pip install -e '.[quantization]'")

PROMPTS = ["def read(path):\n", "class A:\n", "import sys\n"]
DRAFTS = {
    "none": demo("draft"),
    "int8": demo("draft", quantization="int8"),
    "int4": replace(demo("draft", quantization="int4"), dtype="bfloat16"),
    "fp8": demo("draft", quantization="fp8"),
}


def generate(target: ModelSource, draft: ModelSource | None, temperature: float) -> list[GenerationResult]:
    engine = SpeculativeEngine.from_pretrained(target, draft, num_speculative_tokens=4)
    return engine.generate_batch(PROMPTS, SamplingParams(temperature=temperature), seed=3, max_tokens=40)


@pytest.mark.parametrize("quantization", some(["int8", "int4", "fp8"]))
def test_a_quantized_draft_changes_no_token(quantization):
    target = demo("target")
    want, got = (generate(target, DRAFTS[name], 1.0) for name in ("none", quantization))
    assert [result.token_ids for result in got] == [result.token_ids for result in want]


def save_compressed(folder: Path, form: str) -> None:
    """The demo target with weights of 8 bits, by the library whose format it is."""
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
    made = importlib.import_module("compressed_tensors.quantization")
    source = demo_folder("target")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    weights = made.QuantizationArgs(num_bits=8, strategy="channel", symmetric=True)
    scheme = made.QuantizationScheme(targets=["Linear"], weights=weights)
    made.apply_quantization_config(model, made.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.copy_(module.weight.abs().amax(1, keepdim=True) / 127)
    compressor = compressors.ModelCompressor.from_pretrained_model(model, form)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    for file in source.glob("tokenizer*"):
        shutil.copy(file, folder)


@pytest.mark.parametrize("form", some(["int-quantized", "pack-quantized"]))
def test_a_checkpoint_of_compressed_tensors_is_admitted_and_its_text_is_its_own(form, tmp_path):
    """Its weights are brought back as it is loaded: what is in memory is counted as it is."""
    save_compressed(tmp_path, form)
    source = replace(demo("target"), path=str(tmp_path))
    loaded, plain = load_model(source), load_model(demo("target"))
    assert own_quantization(loaded.model.config) == "compressed-tensors"
    assert (tmp_path / "model.safetensors").stat().st_size < 0.5 * plain.weights_bytes
    assert plain.weights_bytes <= loaded.weights_bytes < 1.01 * plain.weights_bytes
    runner = ModelRunner(loaded, num_blocks=64)
    assert check_admission(runner).relative_error < 1e-4
    assert 0 < compare(runner, ModelRunner(plain, num_blocks=64)).mean_kl < 3e-3
    assert_texts_are_its_own(source, demo("draft"), "drafts")
