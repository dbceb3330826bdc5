"""The engine in this process: both models in turn in one thread, no service and no messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.modes.compare import Variant
from benchmarks.modes.load import Workload, fresh_salt
from benchmarks.modes.measures import Run, Stream, TokenArrival, device_use
from cluster.config.app import AppArgs
from cluster.models.sources import (
    backend_of,
    backend_options,
    check_one_process,
    draft_source,
    ngram_options,
    target_source,
)
from specdec.checkpoint.compat import tokenizer_width
from specdec.core.backends import DraftBackend, TargetBackend
from specdec.core.params import SamplingParams
from specdec.engine.build import build_drafter, build_target, pair_gpu_shares
from specdec.engine.engine import SpeculativeEngine
from specdec.engine.observed import ObservedDrafter, ObservedTarget, StepRecord
from specdec.engine.results import TokenEvent
from specdec.models.describe import describe_model
from specdec.models.loading import load_tokenizer


@dataclass(frozen=True, slots=True)
class Pair:
    """Both backends, observed, and the engine over them.

    Attributes:
        drafter: None where there is no draft model.
        steps: Of both, since the last run began.
        clock: Seconds, for everything.
    """

    engine: SpeculativeEngine
    target: ObservedTarget
    drafter: ObservedDrafter | None
    steps: list[StepRecord]
    clock: Callable[[], float]

    def run(self, variant: Variant, workload: Workload) -> Run:
        """Run a workload once; see :data:`benchmarks.modes.compare.Runner`."""
        self.steps.clear()
        before = self._emulated()
        arrivals: list[list[TokenArrival]] = [[] for _ in workload.prompts]
        started_s = self.clock()

        def note(event: TokenEvent) -> None:
            arrivals[event.index].append(TokenArrival(self.clock() - started_s, len(event.token_ids)))

        results = self.engine.generate_batch(
            workload.prompts,
            SamplingParams(temperature=workload.temperature, ignore_eos=True),
            seed=workload.first_seed,
            max_tokens=workload.max_tokens,
            num_speculative_tokens=variant.num_speculative_tokens,
            cache_salt=[fresh_salt() for _ in workload.prompts],
            on_token=note,
        )
        duration_s = self.clock() - started_s
        pairs = zip(results, arrivals, strict=True)
        streams = tuple(Stream(result.text, tuple(came), result.stats) for result, came in pairs)
        devices = device_use(self.steps, duration_s)
        for (device, figure), value in self._emulated().items():
            if device in devices:
                devices[device] = replace(devices[device], **{figure: int(value - before[device, figure])})
        return Run(streams, duration_s, os.getloadavg()[0], devices)

    def _emulated(self) -> dict[tuple[str, str], float]:
        """What the backends tell of emulated steps, by device and figure."""
        metrics = {"target": self.target.metrics(), "draft": {} if self.drafter is None else self.drafter.metrics()}
        names = ("num_emulated_steps", "num_overruns")
        return {(device, name): of.get(f"backend/{name}", 0.0) for device, of in metrics.items() for name in names}


def load_pair(
    args: AppArgs, report: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
) -> Pair:
    """Load what the configuration names, or what its key ``backend`` puts there, into this process.

    Raises:
        ModelLoadError: A model cannot be loaded or served exactly.
        IncompatiblePairError: The two do not fit together.
        MemoryPlanError: A cache cannot hold one sequence.
    """
    source, draft = target_source(args), draft_source(args)
    tokenizer = load_tokenizer(source)
    width = tokenizer_width(tokenizer)
    shares = (1.0, 1.0) if draft is None else pair_gpu_shares(source, draft)

    def built_target() -> TargetBackend:
        check_one_process(args)
        options = replace(backend_options(args, args.target, width), device_share=shares[0])
        return build_target(source, options, report)[0]

    def built_drafter() -> DraftBackend:
        assert draft is not None
        options = replace(backend_options(args, args.draft), device_share=shares[1])
        return build_drafter(draft, options, source, report, has_branches=False)[0]

    steps: list[StepRecord] = []
    target = ObservedTarget(backend_of(args, "target", built_target), [steps.append], lambda: round(clock() * 1e9))
    drafter = None
    if draft is not None:
        own = backend_of(args, "draft", built_drafter)
        drafter = ObservedDrafter(own, [steps.append], lambda: round(clock() * 1e9))
    engine = SpeculativeEngine(
        target,
        drafter,
        tokenizer,
        eos_token_ids=describe_model(source).eos_token_ids,
        vocab_size=width,
        num_speculative_tokens=0 if args.num_speculative_tokens == "auto" else args.num_speculative_tokens,
        ngram=ngram_options(args),
    )
    return Pair(engine, target, drafter, steps, clock)
