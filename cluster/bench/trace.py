"""Traces of benchmark runs: what all workers recorded, joined, and written in the JSON trace event format.

The format is that of "Trace Event Format" (Google, 2016), which ui.perfetto.dev and chrome://tracing read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from cluster.bench.compare import Runner, Variant
from cluster.bench.load import Workload
from cluster.bench.measures import Run
from specdec.engine.trace import (
    ClockReading,
    DraftStep,
    MachineKind,
    MessageEvent,
    TargetStep,
    Turn,
    WorkerTrace,
    read_clock,
)
from specdec.errors import InvalidParameterError


def check_trace(path: str | None) -> None:
    """Say before anything is measured whether a trace can be written.

    Raises:
        InvalidParameterError: There is no such folder, or the file is not to be JSON.
    """
    if path is None:
        return
    if Path(path).suffix.lower() != ".json":
        raise InvalidParameterError("trace", f"trace: {path} must end in .json")
    if not Path(path).resolve().parent.is_dir():
        raise InvalidParameterError("trace", f"trace: {path} is in no folder that there is")


class TraceSource(Protocol):
    """Gives what is recorded, and the time by the clock of this machine's workers."""

    def traces(self, variant: Variant) -> list[WorkerTrace]:
        """What all workers that serve a variant hold."""
        ...

    def now_ns(self) -> int:
        """Nanoseconds; offline, of the engine's clock."""
        ...


@dataclass(frozen=True, slots=True)
class TracedRun:
    """What happened in one run.

    Attributes:
        label: The variant and its work, in words.
        num_streams: Streams at once.
        duration_ns: Of the run.
        workers: What each did in it, target first; times are nanoseconds since the run began.
    """

    label: str
    num_streams: int
    duration_ns: int
    workers: tuple[WorkerTrace, ...]

    def of(self, role: MachineKind) -> tuple[WorkerTrace, ...]:
        """The workers of one role."""
        return tuple(worker for worker in self.workers if worker.role == role)


class Hop(NamedTuple):
    """A message from its sender to its receiver, by their names.

    Attributes:
        arrived_ns: When it was in the receiver's process; when it was received, where there is no way to go.
        received_ns: When the receiver's machine took it in.
        is_arrival_known: Whether its arrival was noted.
    """

    message: MessageEvent
    sender: str
    receiver: str
    sent_ns: int
    arrived_ns: int
    received_ns: int
    is_arrival_known: bool


@dataclass
class TracingRunner:
    """A runner that keeps the trace of the newest run of each variant on each workload, whatever its seeds.

    Attributes:
        runner: Runs them.
        source: Is asked after each run.
    """

    runner: Runner
    source: TraceSource
    _runs: dict[tuple[Variant, Workload], TracedRun] = field(default_factory=dict)

    def __call__(self, variant: Variant, workload: Workload) -> Run:
        """Run a workload once."""
        clock = read_clock(self.source.now_ns)
        run = self.runner(variant, workload)
        duration_ns = self.source.now_ns() - clock.monotonic_ns
        workers = [within(trace, clock, duration_ns) for trace in self.source.traces(variant)]
        order: dict[MachineKind, int] = {"target": 0, "drafter": 1, "router": 2}
        workers.sort(key=lambda worker: (order[worker.role], worker.name))
        num_streams = len(workload.prompts)
        label = f"{variant.name}, {num_streams} stream(s), temperature {workload.temperature:g}"
        self._runs[variant, replace(workload, first_seed=0)] = TracedRun(
            label, num_streams, duration_ns, tuple(workers)
        )
        return run

    @property
    def runs(self) -> tuple[TracedRun, ...]:
        """The newest run of each variant and workload, in the order of their first."""
        return tuple(self._runs.values())


S = TypeVar("S", TargetStep, DraftStep, Turn)


def within(trace: WorkerTrace, start: ClockReading, duration_ns: int) -> WorkerTrace:
    """The part of a trace that is within a run, its times counted from the run's start.

    Processes of one machine have one monotonic clock, and their times are exact beside each other. Workers of another
    machine are joined by the wall clocks, and are as far off as those are.
    """
    origin_ns = start.monotonic_ns
    if trace.clock.boot_id != start.boot_id:
        origin_ns += (start.wall_ns - start.monotonic_ns) - (trace.clock.wall_ns - trace.clock.monotonic_ns)

    def moments(events: Iterable[MessageEvent]) -> tuple[MessageEvent, ...]:
        moved = (event._replace(at_ns=event.at_ns - origin_ns) for event in events)
        return tuple(event for event in moved if 0 <= event.at_ns <= duration_ns)

    def spans(events: Iterable[S]) -> tuple[S, ...]:
        moved = (e._replace(start_ns=e.start_ns - origin_ns, end_ns=e.end_ns - origin_ns) for e in events)
        return tuple(event for event in moved if event.start_ns >= 0 and event.end_ns <= duration_ns)

    return replace(
        trace,
        messages=moments(trace.messages),
        target_steps=spans(trace.target_steps),
        draft_steps=spans(trace.draft_steps),
        turns=spans(trace.turns),
    )


def hops(workers: Sequence[WorkerTrace]) -> list[Hop]:
    """Messages both ends of which are known, in the order in which they were sent.

    Messages carry no number: the ends are matched by what the message says, the repeats of one in their order. What was
    received before it was sent, by clocks of two machines, is left out.
    """
    sent: dict[tuple[Any, ...], list[tuple[str, MessageEvent]]] = {}
    for worker in workers:
        for event in worker.messages:
            if event.what == "sent":
                sent.setdefault((event.peer, *_identity(event)), []).append((worker.name, event))
    found: list[Hop] = []
    for worker in workers:
        arrivals: dict[tuple[Any, ...], list[int]] = {}
        queues = {key: list(events) for key, events in sent.items() if key[0] == worker.name}
        for event in worker.messages:
            key = (worker.name, *_identity(event))
            if event.what == "arrived":
                arrivals.setdefault(key, []).append(event.at_ns)
            elif event.what == "received":
                is_known = bool(arrivals.get(key))
                arrived_ns = arrivals[key].pop(0) if is_known else event.at_ns
                queue = queues.get(key)
                if queue and queue[0][1].at_ns <= arrived_ns:
                    sender, origin = queue.pop(0)
                    found.append(Hop(origin, sender, worker.name, origin.at_ns, arrived_ns, event.at_ns, is_known))
    return sorted(found, key=lambda hop: hop.sent_ns)


def _identity(event: MessageEvent) -> tuple[Any, ...]:
    return event.kind, event.seq, event.inc, event.length, event.num_tokens, event.num_branches
