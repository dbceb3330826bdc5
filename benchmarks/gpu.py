"""A real-architecture pair on a GPU: step times against the time of reading the weights once.

    python -m benchmarks.gpu [--json FILE] [--batches 1,4,16,64] [--num-speculative-tokens 0,4,8]

The shapes are those of an 8B target and a 1B draft (Llama 3.1 and 3.2), the weights random: a step costs the same
whatever is in them. A decoding step must read every weight once, but for an input embedding of its own, of which it
reads a row a token: that over the memory's bandwidth is the least it can take. The bandwidth is measured here, by
copying. With ``--acceptance-rate`` the tokens/s of turn-by-turn drafting that these steps allow are computed beside
them: acceptance by a script, as random models agree on nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.steps import StepTime, measure_steps, verify_cost
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
"""Llama configurations by name and role; ``tiny`` tries this script out without a GPU."""

BLOCK_SIZE = 16
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Figures:
    """What was measured.

    Attributes:
        device: Its name.
        bandwidth_bytes_per_s: Of a copy within its memory, reads and writes together.
        weights_bytes: That a step reads, by role; see :func:`read_bytes`.
        floor_s: Reading them once, by role.
    """

    device: str
    bandwidth_bytes_per_s: float
    weights_bytes: dict[str, int]
    floor_s: dict[str, float]
    steps: tuple[StepTime, ...]


def make_model(fields: dict[str, object], device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model of a shape, made on its device with random weights."""
    config = AutoConfig.for_model("llama", max_position_embeddings=8192, **fields)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return prepare_model(model, "random weights")


def read_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that a decoding step reads: of an input embedding that is not the output's too, few rows."""
    embedding = loaded.model.get_input_embeddings().weight
    if embedding is loaded.model.get_output_embeddings().weight:
        return loaded.weights_bytes
    return loaded.weights_bytes - embedding.nbytes


def bandwidth(device: torch.device, num_bytes: int = COPY_BYTES) -> float:
    """Bytes per second that a copy within the device's memory reads and writes, the best of several."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(10):
        synchronize(device)
        started_s = time.perf_counter()
        copy.copy_(source)
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2 * num_bytes / best_s


def synchronize(device: torch.device) -> None:
    """Wait for what the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(options: argparse.Namespace, device: torch.device) -> Figures:
    """Make both models and time their steps; tokens are taken to the host at every step, as a worker does."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batches, lengths = numbers(options.batches), numbers(options.num_speculative_tokens)
    loaded = {role: make_model(fields, device, dtype) for role, fields in SHAPES[options.shapes].items()}
    num_tokens = options.context + max(lengths) + 2
    num_blocks = max(batches) * (-(-num_tokens // BLOCK_SIZE) + 1)
    runners = {r: ModelRunner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE) for r, model in loaded.items()}
    limits = {"max_model_len": num_tokens, "max_num_batched_tokens": 2048}
    sampler = Sampler(runners["target"].vocab_size, ())
    target = ModelTarget(runners["target"], sampler, **limits)
    drafter = ModelDrafter(runners["draft"], sampler, **limits)
    steps = measure_steps(
        target, drafter, batches=batches, draft_lengths=lengths, context=options.context, repeats=options.repeats
    )
    speed = bandwidth(device, COPY_BYTES if device.type == "cuda" else 1 << 26)
    weights = {role: read_bytes(model) for role, model in loaded.items()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Figures(name, speed, weights, {r: size / speed for r, size in weights.items()}, tuple(steps))


def table(figures: Figures, acceptance_rate: float) -> list[str]:
    """Lines of Markdown: every step beside the time of reading the weights once."""
    speed = figures.bandwidth_bytes_per_s / 1e9
    lines = [
        f"{figures.device}, {speed:.0f} GB/s copying; random weights; acceptance {acceptance_rate:g} is scripted.",
        "",
        "| device | rows | draft tokens a row | step ms | weights once ms | step over that | v(K) | tokens/s in turn |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = {t.num_rows: t.median_s for t in figures.steps if t.device == "target" and not t.num_draft_tokens}
    draft = {t.num_rows: t.median_s for t in figures.steps if t.device == "draft"}
    for step in figures.steps:
        floor_s, v = figures.floor_s[step.device], None
        cells = [step.device, str(step.num_rows), "-", f"{1e3 * step.median_s:.2f}", f"{1e3 * floor_s:.2f}"]
        cells.append(f"{step.median_s / floor_s:.2f}")
        if step.device == "target":
            cells[2] = str(step.num_draft_tokens)
            v = verify_cost(figures.steps, step.num_rows, step.num_draft_tokens)
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


def numbers(text: str) -> list[int]:
    """Whole numbers separated by commas."""
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 0 also where there is no GPU, with a line that says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where to run; cpu tries the script out, with --shapes tiny")
    parser.add_argument("--shapes", default="8b-1b", choices=sorted(SHAPES), help="shapes of the two models")
    parser.add_argument("--batches", default="1,4,16,64", help="rows of a step, separated by commas")
    parser.add_argument("--num-speculative-tokens", default="0,2,4,8", help="draft tokens a row; 0 is a plain step")
    parser.add_argument("--context", type=int, default=512, help="tokens behind each row")
    parser.add_argument("--repeats", type=int, default=21, help="steps of each kind")
    parser.add_argument("--acceptance-rate", type=float, default=0.8, help="scripted, for the tokens/s column")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.stdout.write("skipped: torch finds no GPU here\n")
        return 0
    figures = measure(options, torch.device(options.device))
    sys.stdout.write("\n".join(table(figures, options.acceptance_rate)) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(figures), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
