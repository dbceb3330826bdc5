"""Steps of a hybrid, of experts, of adapters and of int8 over the least: launched one by one, then recorded.

A step must read its weights once, of the experts those that random tokens choose, and read and write its rows' states.
Shapes are those of models in use; weights are random, and where not all would fit a GPU, experts or layers are fewer.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from benchmarks.gpu.device import read_bandwidth
from benchmarks.gpu.executor import record
from benchmarks.gpu.report import Report
from benchmarks.gpu.shapes import BLOCK_SIZE, SHAPES, random_model, read_bytes
from specdec.cache.blocks import CachedSequence
from specdec.cache.recurrent.pool import state_bytes
from specdec.core.errors import ModelLoadError
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, prepare_model
from specdec.models.lora.slots import AdapterSlots, LoRAConfig
from specdec.models.parity_check import check_admission

_ADAPTERS = LoRAConfig(max_loras=4, max_rank=16)
_CHUNK = 1024
_NEEDED_S = 60.0
"""For a kind."""
_KINDS = ("hybrid", "experts", "adapters", "int8")
_TINY = SHAPES["tiny"]["draft"] | {"num_hidden_layers": 2}
_TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TINY_STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 32,
}


@dataclass(frozen=True)
class Sizes:
    """What is run: configurations by kind, which kinds, rows, tokens of a row, tokens behind each, how often, kernels.

    Attributes:
        kernel: Of a hybrid.
    """

    shapes: dict[str, dict[str, object]]
    kinds: tuple[str, ...]
    batches: tuple[int, ...]
    counts: tuple[int, ...]
    context: int
    repeats: int
    kernel: str = "auto"

    @property
    def max_length(self) -> int:
        """Of a sequence: a token of each step stays."""
        return self.context + self.repeats * len(self.batches) * len(self.counts) + max(self.counts)


FULL = Sizes(
    {
        "hybrid": {"model_type": "qwen3_next", "num_experts": 32},
        "experts": {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "vocab_size": 151936,
        },
        "adapters": SHAPES["8b-1b"]["target"],
        "int8": SHAPES["8b-1b"]["target"],
    },
    _KINDS,
    (1, 16, 64),
    (1, 8),
    1024,
    15,
)
SMALL = Sizes(
    {
        "hybrid": {"model_type": "qwen3_next"} | _TINY | _TINY_EXPERTS | _TINY_STATES,
        "experts": {"model_type": "qwen3_moe"} | _TINY | _TINY_EXPERTS,
        "adapters": _TINY,
        "int8": _TINY,
    },
    _KINDS,
    (2,),
    (1, 3),
    6,
    1,
    "triton",
)


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Of each kind compare a small model's recorded steps with transformers, then time the model of real shape."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for kind in sizes.kinds:
        if kind not in sizes.shapes:
            raise ValueError(f"kinds: {kind!r} is none of {', '.join(sizes.shapes)}")
        if not report.has_time(_NEEDED_S, kind):
            break
        if kind == "int8" and find_spec("torchao") is None:
            report.say("int8 is not run: torchao is not installed")
            continue
        small = make_kind(kind, _compared(SMALL.shapes[kind]), device, dtype)
        check(report, kind, runner_of(small, replace(SMALL, kernel=sizes.kernel)))
        loaded = make_kind(kind, sizes.shapes[kind], device, dtype)
        for name in ("launched", "recorded"):
            runner = runner_of(loaded, sizes)
            if name == "recorded":
                record_steps(report, kind, runner, sizes)
            time_steps(report, f"{kind}_{name}", runner, sizes)
            runner.forget_graphs()
            del runner
            _free(device)
        del loaded
        _free(device)


def _compared(fields: dict[str, object]) -> dict[str, object]:
    """The same with all experts chosen: rounding, which is not alike in both, chooses no others."""
    return fields | {"num_experts_per_tok": fields["num_experts"]} if "num_experts" in fields else fields


def make_kind(kind: str, fields: dict[str, object], device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model of a kind, made on its device: its int8 layers or its adapters too."""
    model = random_model(fields, device, dtype)
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.base_model, Int8WeightOnlyConfig())
    loaded = prepare_model(model, kind)
    if kind != "adapters":
        return loaded
    slots, rank = AdapterSlots(model, _ADAPTERS), _ADAPTERS.max_rank
    for slot in range(_ADAPTERS.max_loras):
        weights = [
            (name, torch.randn(rank, width) * 0.01, torch.randn(rank, height) * 0.01)
            for name, (height, width) in slots.shapes.items()
        ]
        slots.put(slot, slots.staged(weights))
    return replace(loaded, adapters=slots)


def runner_of(loaded: LoadedModel, sizes: Sizes) -> ModelRunner:
    """With room for all rows, and for the check."""
    rows = max(*sizes.batches, 8)
    blocks = (rows + 2) * (-(-sizes.max_length // BLOCK_SIZE) + 4)
    kernel = sizes.kernel if loaded.recurrent_layers else "auto"
    return ModelRunner(loaded, num_blocks=blocks, block_size=BLOCK_SIZE, kernel=kernel, num_state_slots=rows + 2)


def record_steps(report: Report, kind: str, runner: ModelRunner, sizes: Sizes) -> None:
    """Record them as a service does."""
    rows, most = max(*sizes.batches, 8), max(sizes.counts)
    limits = ExecutorLimits(rows, max(2048, rows * most), max(sizes.max_length, 512), max_draft_tokens=most - 1)
    record(report, f"the model of kind {kind}", runner, limits)


def check(report: Report, kind: str, runner: ModelRunner) -> None:
    """Recorded steps of a small model beside transformers' own, with tokens that are taken back."""
    record_steps(report, f"{kind}, small", runner, SMALL)
    try:
        error = check_admission(runner).relative_error
    except ModelLoadError as refused:
        report.check(f"{kind}: as transformers has it", False, str(refused))
    else:
        report.check(f"{kind}: as transformers has it", True, f"relative error {error:.2g}")
    runner.forget_graphs()


def time_steps(report: Report, name: str, runner: ModelRunner, sizes: Sizes) -> None:
    """Steps of rows x tokens, of which one token is kept; what a hybrid takes back it scans again in the next one."""
    loaded, bandwidth = runner.loaded, read_bandwidth(runner.loaded.device)
    sequences = [runner.new_sequence() for _ in range(max(sizes.batches))]
    for sequence in sequences:
        assert runner.reserve(sequence, sizes.context)
        for start in range(0, sizes.context, _CHUNK):
            runner.forward([RowInput(sequence, [1] * min(_CHUNK, sizes.context - start), 1)])
    for num_rows in sizes.batches:
        for count in sizes.counts:
            times = [_time_step(runner, sequences[:num_rows], count) for _ in range(sizes.repeats)]
            least_s = least_bytes(loaded, num_rows, num_rows * count) / bandwidth
            report.figure(f"{name}_step_{num_rows}x{count}_ms", statistics.median(times) * 1e3, over=least_s * 1e3)
    for sequence in sequences:
        runner.free(sequence)


def least_bytes(loaded: LoadedModel, num_rows: int, num_tokens: int) -> float:
    """What a step must move: weights, the chosen experts among them, adapters that are used, and the rows' states."""
    total = float(read_bytes(loaded)) + 2 * num_rows * state_bytes(loaded.recurrent_layers)
    if loaded.adapters is not None:
        total += loaded.adapters.num_bytes * min(1.0, num_rows / _ADAPTERS.max_loras)
    chosen = getattr(loaded.config, "num_experts_per_tok", 0)
    for name, module in loaded.model.named_modules():
        if name.endswith(".experts"):
            not_chosen = (1 - chosen / loaded.config.num_experts) ** num_tokens
            total -= not_chosen * sum(weight.nbytes for weight in module.parameters())
    return total


def _time_step(runner: ModelRunner, sequences: Sequence[CachedSequence], count: int) -> float:
    has_adapters = runner.loaded.adapters is not None
    rows = []
    for number, sequence in enumerate(sequences):
        assert runner.reserve(sequence, len(sequence) + count)
        adapter = number % _ADAPTERS.max_loras if has_adapters else None
        rows.append(RowInput(sequence, [1 + number % 50] * count, count, adapter=adapter))
    start_s = time.monotonic()
    runner.forward(rows).argmax(1).cpu()
    took_s = time.monotonic() - start_s
    for sequence in sequences:
        runner.truncate(sequence, len(sequence) - count + 1)
    return took_s


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()  # a runner and its graphs know each other
        torch.cuda.empty_cache()
