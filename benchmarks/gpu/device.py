"""What the device can do at best, and how long work takes on it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.gpu.report import Report

_READ_BYTES, _SIDE = 4 << 30, 8192
_CALLS_PER_GRAPH = 10


@dataclass(frozen=True)
class Sizes:
    """There is nothing to choose."""


FULL = SMALL = Sizes()


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Name the device, and measure the two rates that floors are computed from."""
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        name = f"{torch.cuda.get_device_name(device)}, compute capability {capability}"
        report.say(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    report.figure("read_gb_per_s", read_bandwidth(device) / 1e9)
    report.figure("bf16_product_tflop_per_s", product_rate(device) / 1e12)


@cache
def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that a sum over a large tensor reads."""
    data = torch.ones(_READ_BYTES // 2 if device.type == "cuda" else 1 << 20, dtype=torch.bfloat16, device=device)
    return data.nbytes / seconds(lambda: data.sum(), device)


@cache
def product_rate(device: torch.device) -> float:
    """Operations per second of a large bfloat16 product."""
    side = _SIDE if device.type == "cuda" else 64
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return 2 * side**3 / seconds(lambda: left @ right, device)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """Median time of work on the device: on a GPU captured in a graph, so that no launch is in it.

    Args:
        work: Waits for nothing, and can be repeated.
        device: Where it runs.
        repeats: Timed runs, each of several calls.
    """
    if device.type != "cuda":
        work()
        return 1.0
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which has made what the work reads
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_CALLS_PER_GRAPH):
            work()
    spent = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end) / 1e3 / _CALLS_PER_GRAPH)
    return statistics.median(spent)
