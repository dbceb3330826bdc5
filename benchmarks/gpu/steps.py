"""Steps of a pair of real shape over the time of reading its weights once.

The shapes are those of an 8B target and a 1B draft (Llama 3.1 and 3.2), the weights random: a step costs the same
whatever is in them. A decoding step must read every weight once, but for an input embedding of its own, of which it
reads a row a token. Random models agree on nothing: the tokens/s that these steps allow, drafting in turn, are
computed for a scripted acceptance rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.device import read_bandwidth
from benchmarks.gpu.report import Report
from benchmarks.step_times import StepTime, measure_steps, verify_cost
from specdec.drafting.length.modes import expected_tokens
from specdec.engine.drafter import ModelDrafter
from specdec.engine.target import ModelTarget
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, prepare_model
from specdec.sampling.pipeline import Sampler

SHAPES: dict[str, dict[str, dict[str, object]]] = {
    "8b-1b": {
        "target": {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        "draft": {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    },
    "32b-0.6b": {
        role: {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        }
        for role, hidden_size, intermediate_size, num_layers, num_heads in (
            ("target", 5120, 25600, 64, 64),
            ("draft", 1024, 3072, 28, 16),
        )
    },
    "tiny": {
        role: {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
        }
        for role, layers in (("target", 4), ("draft", 1))
    },
}
"""Configurations by name and role, of Llama's and Qwen3's sizes; ``tiny`` tries this script out without a GPU."""

BLOCK_SIZE = 16
ACCEPTANCE_RATE = 0.8


@dataclass(frozen=True)
class Sizes:
    """What is run: models, rows, draft tokens a row, tokens behind each row, and how often."""

    shapes: str
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    context: int
    repeats: int


FULL = Sizes("8b-1b", (1, 4, 16, 64), (0, 2, 4, 7), 1024, 21)
SMALL = Sizes("tiny", (1, 3), (0, 2), 20, 3)


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Make both models and time their steps; tokens are taken to the host at every step, as a worker does."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = {role: make_model(fields, device, dtype) for role, fields in SHAPES[sizes.shapes].items()}
    num_tokens = sizes.context + max(sizes.lengths) + 2
    num_blocks = max(sizes.batches) * (-(-num_tokens // BLOCK_SIZE) + 1)
    runners = {r: ModelRunner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE) for r, model in loaded.items()}
    limits = {"max_model_len": num_tokens, "max_num_batched_tokens": 2048}
    sampler = Sampler(runners["target"].vocab_size, ())
    steps = measure_steps(
        ModelTarget(runners["target"], sampler, **limits),
        ModelDrafter(runners["draft"], sampler, **limits),
        batches=sizes.batches,
        draft_lengths=sizes.lengths,
        context=sizes.context,
        repeats=sizes.repeats,
    )
    floors_s = {role: read_bytes(model) / read_bandwidth(device) for role, model in loaded.items()}
    for step in steps:
        tokens = "" if step.device == "draft" else f"x{1 + step.num_draft_tokens}"
        name = f"{step.device}_step_{step.num_rows}{tokens}_ms"
        report.figure(name, step.median_s * 1e3, over=floors_s[step.device] * 1e3)
    for line in table(steps, floors_s, ACCEPTANCE_RATE):
        report.say(line)


def make_model(fields: dict[str, object], device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model of a shape, made on its device with random weights."""
    return prepare_model(random_model(fields, device, dtype), "random weights")


def random_model(fields: dict[str, object], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The same as transformers has it."""
    config = AutoConfig.for_model(**{"model_type": "llama", "max_position_embeddings": 8192} | fields)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def read_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that a decoding step reads: of an input embedding that is not the output's too, few rows."""
    embedding = loaded.model.get_input_embeddings().weight
    if embedding is loaded.model.get_output_embeddings().weight:
        return loaded.weights_bytes
    return loaded.weights_bytes - embedding.nbytes


def table(steps: Sequence[StepTime], floors_s: Mapping[str, float], acceptance_rate: float) -> list[str]:
    """Lines of Markdown: every step beside the time of reading the weights once."""
    lines = [
        f"Random weights; acceptance {acceptance_rate:g} is scripted.",
        "| device | rows | draft tokens a row | step ms | weights once ms | step over that | v(K) | tokens/s in turn |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = {t.num_rows: t.median_s for t in steps if t.device == "target" and not t.num_draft_tokens}
    draft = {t.num_rows: t.median_s for t in steps if t.device == "draft"}
    for step in steps:
        floor_s, v = floors_s[step.device], None
        cells = [step.device, str(step.num_rows), "-", f"{1e3 * step.median_s:.2f}", f"{1e3 * floor_s:.2f}"]
        cells.append(f"{step.median_s / floor_s:.2f}")
        if step.device == "target":
            cells[2] = str(step.num_draft_tokens)
            v = verify_cost(steps, step.num_rows, step.num_draft_tokens)
        if v is None:
            cells += ["-", "-"]
        else:
            plain_s = plain[step.num_rows]
            c = draft[step.num_rows] / plain_s
            round_s = plain_s * (v + step.num_draft_tokens * c)
            tokens = step.num_rows * expected_tokens(acceptance_rate, step.num_draft_tokens)
            cells += [f"{v:.2f}", f"{tokens / round_s:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
