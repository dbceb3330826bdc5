"""Host time of a target's step: what it takes around the model's own calls, by engine.

    python -m benchmarks.host_time [--engine transformers|vllm] [--target FOLDER] [--repeats 50]

Run it in the environment that has the engine; torch and vLLM take their threads from ``OMP_NUM_THREADS``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.modes.report import processor_name
from cluster.models.demos import demo_folder
from specdec.core.backends import Status, TargetBackend, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.build import BackendOptions, build_target
from specdec.models.loading import ModelSource

OPTIONS = BackendOptions(max_model_len=512, kv_cache_memory=512 << 20, max_num_seqs=16)
PROMPT_TOKENS = 100
NUM_WARM = 10


class Inside:
    """Seconds spent in a model's calls."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_s += time.perf_counter() - began_s

        return run


def own_target(source: ModelSource, inside: Inside) -> TargetBackend:
    """Our own; its model's call plans the attention of a step, too."""
    target, built = build_target(source, OPTIONS)
    built.loaded.model.forward = inside.timed(built.loaded.model.forward)
    return target


def vllm_target(source: ModelSource, inside: Inside) -> TargetBackend:
    """Over vLLM, eager."""
    from specdec.engine.vllm.build import build_vllm_target
    from specdec.engine.vllm.checks import VllmOptions

    target = build_vllm_target(source, OPTIONS, VllmOptions(4, {"enforce_eager": True}))
    runner = target._core.model_executor.driver_worker.worker.model_runner
    runner._model_forward = inside.timed(runner._model_forward)
    runner.model.compute_logits = inside.timed(runner.model.compute_logits)
    return target


def measure(target: TargetBackend, inside: Inside, num_rows: int, length: int, repeats: int) -> tuple[float, float]:
    """Medians, in ms, of a step and of what is around the model in it."""
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    logs = [TokenLog((7 + row + 3 * i) % 4000 for i in range(PROMPT_TOKENS + row)) for row in range(num_rows)]
    steps: list[float] = []
    around: list[float] = []
    while len(steps) < NUM_WARM + repeats:
        jobs = [
            VerifyJob(f"{row}", log, (5,) * length, SequenceSpec(sampling, row, PROMPT_TOKENS + row, 400))
            for row, log in enumerate(logs)
        ]
        inside.spent_s, began_s = 0.0, time.perf_counter()
        results = target.verify(jobs)
        spent_s = time.perf_counter() - began_s
        if all(result.status is Status.DECIDED for result in results):
            steps.append(spent_s)
            around.append(spent_s - inside.spent_s)
        for log, result in zip(logs, results, strict=True):
            log.extend(result.run)
    for row in range(num_rows):
        target.release(f"{row}")
    return 1e3 * statistics.median(steps[NUM_WARM:]), 1e3 * statistics.median(around[NUM_WARM:])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one engine and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--target", default=str(demo_folder("target")))
    parser.add_argument("--repeats", type=int, default=50)
    given = parser.parse_args(argv)
    inside = Inside()
    make = vllm_target if given.engine == "vllm" else own_target
    target = make(ModelSource(given.target, dtype="float32"), inside)
    print(f"{given.engine}, {processor_name()}")
    print("| rows | draft tokens | step, ms | around the model, ms |\n|---|---|---|---|")
    for num_rows in (1, 16):
        for length in (0, 4):
            step, around = measure(target, inside, num_rows, length, given.repeats)
            print(f"| {num_rows} | {length} | {step:.1f} | {around:.1f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
