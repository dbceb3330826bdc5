"""Planned and measured peak memory of the demo target under load, in a control group of a given size where that can be.

Usage: ``python -m benchmarks.memory_peak [--limit-mib 4096] [--kv-cache-memory auto|FRACTION] [--requests 256]``

So many requests run at once that the cache is full and every row of a step is taken. All ask for the log probabilities
of their prompts and sample with top_p. Prints one JSON object: the plan, the most memory the process
held, and their ratio. A control group of its own needs root and version 1 or 2 of the memory controller; without it the
load runs all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import specdec.demo

MIB = 1 << 20
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def own_group(limit_bytes: int) -> Path | None:
    """A new memory control group below this process's, with a limit; None where none can be made."""
    entries = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    for _, controllers, path in entries:
        if controllers not in ("", "memory"):
            continue
        folder = (V1 if controllers else V2) / path.lstrip("/") / f"specdec-memory-peak-{os.getpid()}"
        limit_file = "memory.limit_in_bytes" if controllers else "memory.max"
        with suppress(OSError):
            folder.mkdir()
            if (folder / limit_file).exists():
                (folder / limit_file).write_text(str(limit_bytes))
                return folder
            folder.rmdir()
    return None


def load(kv_cache_memory: str, num_requests: int) -> dict[str, Any]:
    """Serve the load in this process, and compare."""
    from specdec.core.params import SamplingParams
    from specdec.engine import build
    from specdec.engine.build import BackendOptions
    from specdec.engine.engine import SpeculativeEngine
    from specdec.engine.warmup import peak_resident_bytes
    from specdec.models import memory
    from specdec.models.host_memory import host_memory
    from specdec.models.loading import ModelSource

    plans = []
    original = memory.plan_memory

    def noting(*args: Any, **kwargs: Any) -> Any:
        plans.append(original(*args, **kwargs))
        return plans[-1]

    vars(build)["plan_memory"] = noting
    wanted: Any = "auto" if kv_cache_memory == "auto" else float(kv_cache_memory)
    source = ModelSource(str(Path(specdec.demo.__path__[0]) / "target"), dtype="float32", device="cpu")
    free_bytes = host_memory().free_bytes
    engine = SpeculativeEngine.from_pretrained(
        source, options=BackendOptions(kv_cache_memory=wanted, max_num_seqs=num_requests)
    )
    plan = plans[0]
    # Together somewhat more than the cache holds, so that every block is written.
    length = min(1900, 32 + int(1.05 * plan.num_blocks * plan.block_size / num_requests))
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 4000) for _ in range(length)] for _ in range(num_requests)]
    sampling = SamplingParams(temperature=1.0, top_p=0.9, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    Path("/proc/self/clear_refs").write_text("5")
    results = engine.generate_batch(prompts, sampling, max_tokens=16)
    peak = peak_resident_bytes()
    return {
        "free_mib": free_bytes // MIB,
        "plan": plan.describe(),
        "prompt_tokens": length,
        "finished": len(results),
        "planned_mib": plan.total_bytes // MIB,
        "peak_mib": peak // MIB,
        "planned_to_peak": round(plan.total_bytes / peak, 3),
    }


def main() -> int:
    """Run the load in a control group, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=int, default=4096)
    parser.add_argument("--kv-cache-memory", default="auto")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--in-group", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_group:
        print(json.dumps(load(arguments.kv_cache_memory, arguments.requests)))
        return 0
    group = own_group(arguments.limit_mib * MIB)

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-m", "benchmarks.memory_peak", "--in-group", *sys.argv[1:]]
    try:
        done = subprocess.run(command, preexec_fn=enter, stdout=subprocess.PIPE, text=True, check=False)
    finally:
        if group is not None:
            group.rmdir()
    if done.returncode:
        print(f"the load ended with {done.returncode}", file=sys.stderr)
        return 1
    figures = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({"limit_mib": arguments.limit_mib if group is not None else None} | figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
