"""A draft model's step on this machine's CPUs, in several runtimes and quantizations, interleaved: one row, T = 0.

    python -m benchmarks.peers.steps --work FOLDER [--shapes 135m,600m] [--runtimes ours-int8,openvino-int8,...]

The models are random: a step's time does not depend on what it computes. Runtimes of others are installed into
``--work``, and one that cannot be is skipped with a message. Milliseconds of CPU time stand beside those by the clock,
as other work on the machine changes them less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.modes.report import processor_name
from benchmarks.peers.install import HERE, SkippedError, gguf_file, python_of
from cluster.models.demos import demo_folder

INSTALL_TIMEOUT_S = 900.0
SHAPES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "135m": {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
        },
        "600m": {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 151_936,
        },
    }
)
"""Shapes of SmolLM2-135M, and of Qwen3-0.6B but for its wider heads."""
RUNTIMES = (
    *("ours-none", "ours-int8", "ours-int4", "ours-none*8", "ours-int8*8"),
    *("openvino-none", "openvino-bfloat16", "openvino-int8"),
    *("llama_cpp-float32", "llama_cpp-q8_0", "llama_cpp-q4_0"),
)
"""Each with how its weights are held, and how many tokens a step reads where it is not one. The first two are ours."""


def model_folder(shape: str, work: Path) -> Path:
    """A random model of a shape, with the demo pair's tokenizer; made once."""
    folder = work / shape
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPES[shape], tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
        LlamaForCausalLM(config).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((demo_folder("target") / name).read_bytes())
        written = json.loads((folder / "config.json").read_text())
        written["rope_theta"] = 10_000.0  # where older code looks for it
        (folder / "config.json").write_text(json.dumps(written))
    return folder


def command_of(runtime: str, folder: Path, work: Path) -> tuple[list[str], dict[str, str]]:
    """What runs a runtime, without its numbers, and the environment that it needs.

    Raises:
        SkippedError: It cannot be installed.
    """
    name, _, weights = runtime.partition("-")
    if name == "llama_cpp":
        python = python_of("llama_cpp", work, INSTALL_TIMEOUT_S)
        model = gguf_file(python, folder, weights, INSTALL_TIMEOUT_S)
        return [python, str(HERE / "step_llama_cpp.py"), str(model)], {"PYTHONPATH": ""}
    return [sys.executable, "-m", "benchmarks.peers.step_ours", str(folder)], {}


class Runtime:
    """A runtime's process; a context manager.

    Args:
        runtime: One of :data:`RUNTIMES`.
        folder: The model.
        options: As given on the command line.

    Raises:
        SkippedError: It cannot be installed, or ends before it is ready.
    """

    def __init__(self, runtime: str, folder: Path, options: argparse.Namespace) -> None:
        command, environment = command_of(runtime, folder, options.work)
        numbers = [str(options.threads), str(options.context), runtime.partition("-")[2], runtime.partition("-")[0]]
        threads = {"OMP_NUM_THREADS": str(options.threads)}
        log = options.work / f"{folder.name}-{runtime}.log"
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, *numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | threads | environment,
            )
        self.settings = self._answer(f"see {log}")["settings"]
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def take(self, count: int) -> None:
        """Take steps, and note their times."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        times = self._answer("it ended")
        self.wall_ms.append(times["wall_ms"])
        self.cpu_ms.append(times["cpu_ms"])

    def _answer(self, failure: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print at import
                return dict(json.loads(line))
        self._process.wait()
        raise SkippedError(failure)


def main() -> None:
    """Measure, and print a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where models and environments are kept")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    options = parser.parse_args()
    print(f"{processor_name()}, {options.threads} threads, context {options.context}, {options.rounds} rounds")
    for shape in options.shapes.split(","):
        folder = model_folder(shape, options.work)
        running: dict[str, Runtime] = {}
        with ExitStack() as stack:
            for runtime in options.runtimes.split(","):
                try:
                    running[runtime] = stack.enter_context(Runtime(runtime, folder, options))
                except SkippedError as reason:
                    print(f"{shape}, {runtime}: skipped, {reason}")
            for _ in range(options.rounds):
                for process in running.values():
                    process.take(options.steps)
        print("\n| shape | runtime, weights | settings | CPU ms a step | ms a step | CPU over the first's |")
        print("|---|---|---|---|---|---|", flush=True)
        first = next(iter(running.values()))
        for runtime, process in running.items():
            ratio = statistics.median(a / b for a, b in zip(process.cpu_ms, first.cpu_ms, strict=True))
            cpu_ms, wall_ms = statistics.median(process.cpu_ms), statistics.median(process.wall_ms)
            print(f"| {shape} | {runtime} | {process.settings} | {cpu_ms:.1f} | {wall_ms:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
