"""The engine in this process: both models in turn in one thread, no service and no messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

from cluster.bench.compare import Variant
from cluster.bench.load import Workload, fresh_salt
from cluster.bench.measures import DeviceUse, Run, Stream, TokenArrival, device_use
from cluster.config import AppArgs
from cluster.doubles import emulated_drafter, emulated_target, scripted_pair
from cluster.sources import backend_options, check_one_process, draft_source, target_source
from specdec.engine.build import build_drafter, build_target
from specdec.engine.emulation import Clock, EmulatedDrafter, EmulatedTarget, RealClock
from specdec.engine.engine import SpeculativeEngine
from specdec.engine.observed import ObservedDrafter, ObservedTarget, StepListener, StepRecord
from specdec.engine.results import TokenEvent
from specdec.engine.shares import pair_share
from specdec.engine.trace import MachineKind, Recorder, WorkerTrace
from specdec.models.compat import tokenizer_width
from specdec.models.describe import describe_model
from specdec.models.loading import load_tokenizer
from specdec.protocol.backends import DraftBackend, TargetBackend
from specdec.protocol.messages import Message
from specdec.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Pair:
    """Both backends, observed, and the engine over them.

    Attributes:
        drafter: None where there is no draft model.
        steps: Of both, since the last run began.
        clock: Of everything.
        recorders: Of target, drafter and router, where the configuration asks for a trace.
    """

    engine: SpeculativeEngine
    target: ObservedTarget
    drafter: ObservedDrafter | None
    steps: list[StepRecord]
    emulated: tuple[EmulatedTarget | EmulatedDrafter, ...]
    clock: Clock
    recorders: dict[str, Recorder]

    def run(self, variant: Variant, workload: Workload) -> Run:
        """Run a workload once; see :data:`cluster.bench.compare.Runner`."""
        self.steps.clear()
        before = {id(backend): backend.device.gauges() for backend in self.emulated}
        arrivals: list[list[TokenArrival]] = [[] for _ in workload.prompts]
        started_s = self.clock.now_s()

        def note(event: TokenEvent) -> None:
            arrivals[event.index].append(TokenArrival(self.clock.now_s() - started_s, len(event.token_ids)))

        results = self.engine.generate_batch(
            workload.prompts,
            SamplingParams(temperature=workload.temperature, ignore_eos=True),
            seed=workload.first_seed,
            max_tokens=workload.max_tokens,
            num_speculative_tokens=variant.num_speculative_tokens,
            cache_salt=[fresh_salt() for _ in workload.prompts],
            on_token=note,
        )
        duration_s = self.clock.now_s() - started_s
        pairs = zip(results, arrivals, strict=True)
        streams = tuple(Stream(result.text, tuple(came), result.stats) for result, came in pairs)
        uses = device_use(self.steps, duration_s)
        devices = {name: self._emulated_use(name, use, before) for name, use in uses.items()}
        return Run(streams, duration_s, os.getloadavg()[0], devices)

    def traces(self, variant: Variant) -> list[WorkerTrace]:
        """What was recorded; see :class:`cluster.bench.trace.TraceSource`."""
        return [recorder.trace() for recorder in self.recorders.values()]

    def now_ns(self) -> int:
        """The clock, in nanoseconds."""
        return _now_ns(self.clock)

    def _emulated_use(self, device: str, use: DeviceUse, before: dict[int, dict[str, float]]) -> DeviceUse:
        """The same with what was emulated since ``before``."""
        for backend in self.emulated:
            if isinstance(backend, EmulatedTarget) == (device == "target"):
                then, now = before[id(backend)], backend.device.gauges()
                counts = {name: int(now[name] - then[name]) for name in ("num_emulated_steps", "num_overruns")}
                return replace(use, **counts)
        return use


def load_pair(args: AppArgs, report: Callable[[str], None] | None = None, clock: Clock | None = None) -> Pair:
    """Load what the configuration names, or its stand-ins, into this process.

    Raises:
        ModelLoadError: A model cannot be loaded or served exactly.
        IncompatiblePairError: The two do not fit together.
        MemoryPlanError: A cache cannot hold one sequence.
    """
    clock = clock if clock is not None else RealClock()
    source = target_source(args)
    tokenizer = load_tokenizer(source)
    width = tokenizer_width(tokenizer)
    target, drafter = _backends(args, width, report)
    target = emulated_target(args, target, clock)
    steps: list[StepRecord] = []
    recorders = _recorders(args, clock)
    observed_target = ObservedTarget(target, _listeners(steps, recorders.get("target")), partial(_now_ns, clock))
    observed_drafter = None
    if drafter is not None:
        drafter = emulated_drafter(args, drafter, clock)
        listeners = _listeners(steps, recorders.get("drafter"))
        observed_drafter = ObservedDrafter(drafter, listeners, partial(_now_ns, clock))
    engine = SpeculativeEngine(
        observed_target,
        observed_drafter,
        tokenizer,
        eos_token_ids=describe_model(source).eos_token_ids,
        vocab_size=width,
        num_speculative_tokens=0 if args.num_speculative_tokens == "auto" else args.num_speculative_tokens,
        num_lookup_tokens=args.most_draft_tokens if args.looks_up else None,
        on_message=partial(_record, recorders) if recorders else None,
    )
    emulated = [backend for backend in (target, drafter) if isinstance(backend, EmulatedTarget | EmulatedDrafter)]
    return Pair(engine, observed_target, observed_drafter, steps, tuple(emulated), clock, recorders)


def _listeners(steps: list[StepRecord], recorder: Recorder | None) -> list[StepListener]:
    return [steps.append, *([] if recorder is None else [recorder.stepped])]


def _now_ns(clock: Clock) -> int:
    return round(clock.now_s() * 1e9)


def _recorders(args: AppArgs, clock: Clock) -> dict[str, Recorder]:
    """One for each part of the engine, by the names that they have there; none unless a trace is asked for."""
    roles = get_args(MachineKind) if args.trace else ()
    return {role: Recorder(role, role, clock_ns=partial(_now_ns, clock)) for role in roles}


def _record(recorders: dict[str, Recorder], sender: str, receiver: str, message: Message) -> None:
    if sender in recorders and receiver in recorders:
        recorders[sender].sent(receiver, (message,))
        recorders[receiver].received(message)


def _backends(
    args: AppArgs, vocab_size: int, report: Callable[[str], None] | None
) -> tuple[TargetBackend, DraftBackend | None]:
    if args.is_scripted:
        scripted, script_drafter = scripted_pair(args)
        return scripted, script_drafter if args.has_draft else None
    check_one_process(args)
    source, draft = target_source(args), draft_source(args)
    share = pair_share(source, draft)
    options = replace(backend_options(args, args.target, vocab_size), device_share=share)
    target, _ = build_target(source, options, report)
    if draft is None:
        return target, None
    options = replace(backend_options(args, args.draft), device_share=share)
    drafter, _, _ = build_drafter(draft, options, source, report)
    return target, drafter
