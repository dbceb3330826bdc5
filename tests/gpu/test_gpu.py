"""A target on a GPU decides as one on the CPU does, whatever drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import attention, pair, sampling
from benchmarks.gpu.report import Report
from cluster.models.demos import demo_folder
from specdec import ModelSource, SamplingParams, SpeculativeEngine
from specdec.engine.target import ModelTarget
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner, choose_kernel
from specdec.models.loading import prepare_model
from specdec.models.lora.slots import AdapterSlots, LoRAConfig
from specdec.sampling.noise import gumbel
from tests.specdec.engine.contract import SAMPLINGS, Soak
from tests.specdec.engine.pairs import backend
from tests.specdec.models.families import SOME_FAMILIES, VOCAB_SIZE, make_model

DEVICE = "cuda"
SEEDS = [0, 1, 2**63, 2**64 - 1, 7]
POSITIONS = [0, 1, 100_000, 2**31, 2**32 - 1]
PROMPTS = tuple(tuple((7 * i + j) % VOCAB_SIZE for j in range(40)) for i in range(4))
TEXTS = ["def read_file(path):\n", "import os\n\n\nclass"]


@pytest.mark.parametrize("vocab_size", [1, 1001, 128_256])
def test_noise_is_that_of_the_cpu_bit_by_bit(vocab_size: int) -> None:
    on_cpu = gumbel(SEEDS, POSITIONS, vocab_size, "cpu")
    assert torch.equal(gumbel(SEEDS, POSITIONS, vocab_size, DEVICE).cpu(), on_cpu)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_triton_kernel_gives_what_gathering_gives(family: str) -> None:
    loaded = prepare_model(make_model(family).to(DEVICE, torch.bfloat16), family)
    assert choose_kernel(loaded) == "triton"
    logits = []
    for kernel in ("gather", "auto"):
        runner = ModelRunner(loaded, num_blocks=40, kernel=kernel)
        sequences = [runner.new_sequence() for _ in range(3)]
        for sequence, length in zip(sequences, (30, 9, 1), strict=True):
            assert runner.reserve(sequence, length + 3)
            runner.forward([RowInput(sequence, PROMPTS[length % 4][:length], 0)])
        logits.append(runner.forward([RowInput(sequence, PROMPTS[0][:3], 3) for sequence in sequences]))
    assert (logits[0] - logits[1]).abs().max() < 0.1


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_float32_logits_are_those_of_the_cpu(family: str, models: Callable, whole_forward: Callable) -> None:
    runner = ModelRunner(prepare_model(make_model(family).to(DEVICE), family), num_blocks=40)
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, 40)
    logits = torch.cat([runner.forward([RowInput(sequence, PROMPTS[1][at : at + 8], 8)]) for at in range(0, 40, 8)])
    torch.testing.assert_close(logits.cpu(), whole_forward(models(family)[1], list(PROMPTS[1])), atol=1e-3, rtol=1e-3)


def test_each_decision_is_that_of_a_target_on_the_cpu() -> None:
    on_gpu: ModelTarget = backend(ModelTarget, make_model("llama").to(DEVICE), num_blocks=200)
    on_cpu: ModelTarget = backend(ModelTarget, make_model("llama"), num_blocks=2000, chunk=160)
    samplings = [replace(one, logit_bias=(), prompt_logprobs=None, logprobs=None) for one in SAMPLINGS.values()]
    soak = Soak(on_gpu, on_cpu, PROMPTS, vocab_size=VOCAB_SIZE, samplings=samplings, most_rounded=4)
    seen = soak.run(2_000)
    assert 0 < seen["accepted"] < seen["drafted"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_device", [DEVICE, "cpu"])
def test_a_seed_gives_the_same_text_with_and_without_drafts(temperature: float, draft_device: str) -> None:
    target = ModelSource(str(demo_folder("target")), dtype="float32", device=DEVICE)
    draft = ModelSource(str(demo_folder("draft")), dtype="float32", device=draft_device)
    engine = SpeculativeEngine.from_pretrained(target, draft)
    sampling = SamplingParams(temperature=temperature)
    plain, drafted = (
        engine.generate_batch(TEXTS, sampling, seed=3, max_tokens=64, num_speculative_tokens=length)
        for length in (0, 4)
    )
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert sum(one.stats.num_accepted_tokens for one in drafted) > 20


def test_kernels_are_right_and_the_script_that_measures_runs() -> None:
    report = Report()
    attention.run(report, torch.device(DEVICE))
    sampling.run(report, torch.device(DEVICE))
    pair.run(report, torch.device(DEVICE), pair.SMALL)
    assert report.failures == []


def test_an_adapter_waits_for_its_slot_in_pinned_memory() -> None:
    slots = AdapterSlots(make_model("llama").to(DEVICE, torch.bfloat16), LoRAConfig(1, 8))
    weights = [
        (name, torch.randn(4, width_in), torch.randn(4, width_out))
        for name, (width_out, width_in) in slots.shapes.items()
    ]
    staged = slots.staged(weights)
    assert all(tensor.is_pinned() and tensor.dtype == torch.bfloat16 for _, *both in staged for tensor in both)
    slots.put(0, staged)
    torch.cuda.synchronize()
    for name, down, up in weights:
        layer = slots._layers[name]
        assert torch.equal(layer.down[0, :4].cpu(), down.bfloat16())
        assert torch.equal(layer.up[0, :4].cpu(), up.bfloat16())
