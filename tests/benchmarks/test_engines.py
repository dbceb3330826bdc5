"""The comparison of engines: what it says of figures, and which processes are whose."""

from __future__ import annotations

import subprocess
import sys

import psutil

from benchmarks.engines import Samples, processor_ms, servers, table


def test_ratios_are_of_neighbours_and_not_of_medians() -> None:
    spent = {"target": 4.0, "draft": 0.0, "rest": 2.0}
    rates = {"vLLM alone": (100.0, 200.0, 50.0), "specdec": (90.0, 180.0, 45.0)}
    samples: Samples = {
        "8 1": {name: [{"tokens_per_s": one} | spent for one in rounds] for name, rounds in rates.items()}
    }
    *_, line = table(samples).splitlines()
    assert line == "| 8 | 1 | specdec | 45.0, 90.0, 180.0 | 0.90 | 4.0 | | 2.0 |"


def test_processor_time_is_told_apart_by_titles() -> None:
    code = "import sys; sum(range(20_000_000)); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, "ray::ServeReplica:specdec:TargetServer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        spent = processor_ms(psutil.Process())
        assert spent["target"] >= 1e3 * psutil.Process(child.pid).cpu_times().user / 2 > 0
        assert spent["draft"] == 0
        assert spent["rest"] > 0
        child.stdin.close()


def test_all_have_as_many_threads_and_drafts() -> None:
    found = servers("T", "D", "bfloat16", 5)
    vllm = [one for name, one in found.items() if name.startswith("vLLM")]
    assert {one.environment["OMP_NUM_THREADS"] for one in vllm} == {"2"}
    assert all(
        one.flags[one.flags.index("--num-speculative-tokens") + 1] == "5" for one in found.values() if one not in vllm
    )
    assert '"num_speculative_tokens": 5' in vllm[1].flags[-1]
