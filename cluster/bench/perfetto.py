"""Traced runs as JSON trace events, for ui.perfetto.dev: a process per worker, and one for the streams."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from cluster.bench.trace import Hop, TracedRun, hops
from specdec.engine.trace import DraftStep, MessageEvent, TargetStep, VerifiedRow, WorkerTrace

TraceEvent = dict[str, Any]

_TRACKS = ("steps", "waits", "received", "arrived", "sent")
_MESSAGE_NS = 20_000
"""A message takes no time: its slice is drawn this long, or up to the next."""
_PIDS_PER_RUN = 1000


def write_trace(runs: Sequence[TracedRun], path: str) -> None:
    """Write runs to a file; all begin at time 0, so that variants lie above each other."""
    events: list[TraceEvent] = []
    for number, run in enumerate(runs):
        events += trace_events(run, first_pid=1 + number * _PIDS_PER_RUN)
    body = {"displayTimeUnit": "ms", "traceEvents": events}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(body, file, separators=(",", ":"))


def trace_events(run: TracedRun, first_pid: int = 1) -> list[TraceEvent]:
    """All events of a run; its processes are numbered from ``first_pid`` on."""
    pids = {worker.name: first_pid + 1 + i for i, worker in enumerate(run.workers)}
    events = [*_streams(run, first_pid)]
    found = hops(run.workers)
    for worker in run.workers:
        pid = pids[worker.name]
        name = f"{run.label}: {worker.role} {worker.name}"
        events += _names(pid, name, enumerate(_TRACKS, 1))
        if worker.num_dropped:
            events.append(_instant(f"{worker.num_dropped} older entries were not kept", 0, pid, 1, {}))
        events += _steps(worker, pid)
        events += _messages(worker, pid)
    for number, hop in enumerate(found):
        events += _flow(hop, first_pid * _PIDS_PER_RUN * _PIDS_PER_RUN + number, pids)
    return events


# Workers.


def _steps(worker: WorkerTrace, pid: int) -> Iterator[TraceEvent]:
    for turn in worker.turns:
        yield _span("turn", turn.start_ns, turn.end_ns, pid, 1, {})
    for step in worker.target_steps:
        yield _span("target step", step.start_ns, step.end_ns, pid, 1, _target_args(step))
    for draft in worker.draft_steps:
        yield _span("draft step", draft.start_ns, draft.end_ns, pid, 1, _draft_args(draft))
    for before, after in pairwise(worker.target_steps):
        name = _wait_name(row.way for row in before.rows)
        yield from _wait(name, before.end_ns, after.start_ns, pid, 2)
    for earlier, later in pairwise(worker.draft_steps):
        yield from _wait("idle", earlier.end_ns, later.start_ns, pid, 2)


def _wait_name(ways: Iterable[str]) -> str:
    """What a target does after a step whose rows are drafted for in these ways."""
    return "waits for a draft" if all(way == "in_turn" for way in ways) else "between steps"


def _target_args(step: TargetStep) -> TraceEvent:
    return {
        "rows": len(step.rows),
        "tokens per row": [1 + row.num_drafted if row.num_decided else 0 for row in step.rows],
        "accepted": [row.num_accepted for row in step.rows],
        "rounds": [row.round for row in step.rows],
        "ways": sorted({row.way for row in step.rows}),
        "streams": [row.seq for row in step.rows],
    }


def _draft_args(step: DraftStep) -> TraceEvent:
    return {
        "rows": sum(row.num_branches + min(row.num_ahead, 1) for row in step.rows),
        "tokens per row": 1,
        "branches": sum(row.num_branches for row in step.rows),
        "log lengths": [row.base for row in step.rows],
        "ahead of the log": [row.num_ahead for row in step.rows],
        "ways": sorted({row.way for row in step.rows}),
        "streams": [row.seq for row in step.rows],
    }


def _messages(worker: WorkerTrace, pid: int) -> Iterator[TraceEvent]:
    """A slice per moment at which messages were sent, arrived or were received: flows need something to hold on to."""
    for tid, what in enumerate(_TRACKS, 1):
        groups: dict[int, list[MessageEvent]] = {}
        for event in worker.messages:
            if event.what == what:
                groups.setdefault(event.at_ns, []).append(event)
        moments = sorted(groups)
        for at_ns, next_ns in zip(moments, [*moments[1:], None], strict=False):
            end_ns = at_ns + _MESSAGE_NS if next_ns is None else min(at_ns + _MESSAGE_NS, next_ns)
            group = groups[at_ns]
            name = group[0].kind if len(group) == 1 else f"{len(group)} messages"
            yield _span(name, at_ns, end_ns, pid, tid, {"messages": [_told(event) for event in group]})


def _told(event: MessageEvent) -> str:
    branches = f" and {event.num_branches} branches" if event.num_branches else ""
    return f"{event.kind} of {event.seq} at {event.length}: {event.num_tokens} tokens{branches}"


def _flow(hop: Hop, number: int, pids: dict[str, int]) -> Iterator[TraceEvent]:
    """From the sent message to the received one, by its arrival where that is known."""
    args = {
        "message": _told(hop.message),
        "one way, ms": (hop.arrived_ns - hop.sent_ns) / 1e6,
        "until received, ms": (hop.received_ns - hop.sent_ns) / 1e6,
    }
    common = {"name": hop.message.kind, "cat": "message", "id": number}
    sent, arrived, received = (_TRACKS.index(what) + 1 for what in ("sent", "arrived", "received"))
    yield common | {"ph": "s", "ts": hop.sent_ns / 1e3, "pid": pids[hop.sender], "tid": sent, "args": args}
    if hop.is_arrival_known:
        yield common | {"ph": "t", "ts": hop.arrived_ns / 1e3, "pid": pids[hop.receiver], "tid": arrived}
    end = {"ph": "f", "bp": "e", "ts": hop.received_ns / 1e3, "pid": pids[hop.receiver], "tid": received}
    yield common | end | {"args": args}


# Streams.


def _streams(run: TracedRun, pid: int) -> Iterator[TraceEvent]:
    """A track per sequence: its rounds, and the time between them."""
    rounds: dict[str, list[tuple[TargetStep, VerifiedRow]]] = {}
    for worker in run.of("target"):
        for step in worker.target_steps:
            for row in step.rows:
                rounds.setdefault(row.seq, []).append((step, row))
    tids = {seq: number for number, seq in enumerate(rounds, 1)}
    yield from _names(pid, f"{run.label}: streams", ((tid, seq) for seq, tid in tids.items()))
    for seq, entries in rounds.items():
        entries.sort(key=lambda entry: entry[0].start_ns)
        for step, row in entries:
            yield _span(_title(row), step.start_ns, step.end_ns, pid, tids[seq], _row_args(row))
        for (before, row), (after, _) in pairwise(entries):
            yield from _wait(_wait_name([row.way]), before.end_ns, after.start_ns, pid, tids[seq])


def _title(row: VerifiedRow) -> str:
    if not row.num_decided:
        return "reads the prompt"
    if not row.num_drafted:
        return f"round {row.round}: no draft"
    return f"round {row.round}: {row.num_accepted} of {row.num_drafted} accepted"


def _row_args(row: VerifiedRow) -> TraceEvent:
    return {
        "round": row.round,
        "log length": row.base,
        "drafted": row.num_drafted,
        "accepted": row.num_accepted,
        "rejected": row.num_drafted - row.num_accepted,
        "decided": row.num_decided,
        "way": row.way,
        "draft from": row.source,
    }


# The format.


def _span(name: str, start_ns: int, end_ns: int, pid: int, tid: int, args: TraceEvent) -> TraceEvent:
    duration = (end_ns - start_ns) / 1e3
    return {"name": name, "ph": "X", "ts": start_ns / 1e3, "dur": duration, "pid": pid, "tid": tid, "args": args}


def _wait(name: str, start_ns: int, end_ns: int, pid: int, tid: int) -> Iterator[TraceEvent]:
    if end_ns > start_ns:
        yield _span(name, start_ns, end_ns, pid, tid, {})


def _instant(name: str, at_ns: int, pid: int, tid: int, args: TraceEvent) -> TraceEvent:
    return {"name": name, "ph": "i", "s": "t", "ts": at_ns / 1e3, "pid": pid, "tid": tid, "args": args}


def _names(pid: int, process: str, threads: Any) -> Iterator[TraceEvent]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    for tid, name in threads:
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
