"""What metrics cost: processor time of a step, of a sequence's tokens, and of a second's hand-over to Ray.

``python -m benchmarks.observing [--rows 8] [--steps 4000] [--rounds 7]`` takes the medians of interleaved rounds, with
metrics on and off. The hand-over is that of an ingress with a hundred series that have all changed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from benchmarks.scripted import Script, ScriptedTarget
from cluster.config.environment import prepare_for_ray
from deployments.http.observer import Observer
from deployments.http.tally import Round
from specdec.core.backends import TargetBackend, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.observed import ObservedTarget
from specdec.engine.timing import StepMetrics

NUM_SERIES = 100


def per_call_us(work: Callable[[], object], num_calls: int) -> float:
    """Processor time of a call on this thread, in microseconds."""
    started_s = time.thread_time()
    for _ in range(num_calls):
        work()
    return 1e6 * (time.thread_time() - started_s) / num_calls


def steps(num_rows: int, *, observed: bool) -> Callable[[], object]:
    """A step of a target that costs next to nothing, with what metrics need or without."""
    backend: TargetBackend = ScriptedTarget(Script(0.8, 0.9, range(5, 50)), 100)
    if observed:
        backend = ObservedTarget(backend, [StepMetrics()])
    spec = SequenceSpec(SamplingParams(), seed=1, max_tokens=50, output_start=4)
    jobs = [VerifyJob(f"s{i}", TokenLog((5, 6, 7, 8)), (), spec) for i in range(num_rows)]
    return lambda: backend.verify(jobs)


def tokens() -> Callable[[], object]:
    """What comes of one round at an ingress: five tokens, of a draft of four."""
    sequence = Observer(CollectorRegistry(), "m").opened("m", "", 0.0)

    def came() -> None:
        sequence.tokens(5, 0, [Round(4, 4)])
        sequence.delivered(5)

    return came


def hand_over() -> Callable[[], object]:
    """What a replica does once a second."""
    prepare_for_ray()
    import ray

    from deployments.metrics.replica import RayExport

    ray.init(address="local", include_dashboard=False, logging_level="error", num_cpus=1)
    registry = CollectorRegistry()
    counter = Counter("specdec_example", "An example.", ["position"], registry=registry)
    export = RayExport()

    def once() -> None:
        for i in range(NUM_SERIES):
            counter.labels(str(i)).inc()
        export.hand_on(registry.collect())

    return once


def main() -> None:
    """Print the figures as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    works = {
        f"a step of {options.rows} rows, nobody listens": (steps(options.rows, observed=False), options.steps),
        f"a step of {options.rows} rows, observed": (steps(options.rows, observed=True), options.steps),
        "a sequence's tokens of one round, at the ingress": (tokens(), options.steps),
        f"a second's hand-over of {NUM_SERIES} series to Ray": (hand_over(), 20),
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, (work, num_calls) in works.items():
            found[name].append(per_call_us(work, num_calls))
    print("| what | microseconds |\n|---|---|")
    for name, figures in found.items():
        print(f"| {name} | {statistics.median(figures):.1f} |")


if __name__ == "__main__":
    main()
