"""Traces of offline runs in virtual time, as they are written."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.compare import Work, parse_variants
from cluster.bench.offline import Pair, load_pair
from cluster.bench.perfetto import trace_events, write_trace
from cluster.bench.trace import TracedRun, TracingRunner, check_trace, hops, within
from cluster.config import AppArgs
from specdec.engine.trace import ClockReading, MessageEvent, TargetStep, VerifiedRow, WorkerTrace
from specdec.errors import InvalidParameterError
from tests.clock import VirtualClock

Event = dict[str, Any]


def traced(num_streams: int = 2, draft_length: int = 4, max_tokens: int = 24) -> tuple[Pair, TracedRun]:
    keys = {"scripted": {"acceptance_rate": 0.8}, "emulate_step_ms": "target=30,draft=3", "trace": True}
    pair = load_pair(AppArgs.model_validate(keys), clock=VirtualClock())
    runner = TracingRunner(pair.run, pair)
    variant = parse_variants(["in_turn"], [draft_length])[0]
    runner(variant, Work("code", num_streams, max_tokens, 0.0).workload(variant))
    return pair, runner.runs[0]


@pytest.fixture(scope="module")
def run() -> TracedRun:
    return traced()[1]


@pytest.fixture(scope="module")
def events(run: TracedRun) -> list[Event]:
    return trace_events(run)


def spans(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def holds(span: Event, at: float) -> bool:
    return bool(span["ts"] <= at <= span["ts"] + span["dur"])


def test_of_several_rounds_the_newest_is_kept() -> None:
    keys = {"scripted": {"acceptance_rate": 0.8}, "emulate_step_ms": "target=30,draft=3", "trace": True}
    pair = load_pair(AppArgs.model_validate(keys), clock=VirtualClock())
    runner = TracingRunner(pair.run, pair)
    variants = parse_variants(["in_turn"], [0, 4])
    work = Work("code", 1, 8, 0.0)
    for number in range(2):
        for variant in variants:
            runner(variant, work.workload(variant, number))
    assert [run.label for run in runner.runs] == [f"{variant.name}, 1 stream(s), temperature 0" for variant in variants]


def test_what_a_step_took_and_did(run: TracedRun, events: list[Event]) -> None:
    steps = [event for event in events if event["name"] == "target step"]
    assert {event["dur"] for event in steps} == {30_000.0}
    assert {event["dur"] for event in events if event["name"] == "draft step"} == {3_000.0}
    assert steps[0]["args"]["ways"] == ["in_turn"]
    assert steps[0]["args"]["rounds"] == [1, 1]
    assert steps[0]["args"]["tokens per row"] == [5, 5]
    decided = Counter[str]()
    for step in run.of("target")[0].target_steps:
        for row in step.rows:
            decided[row.seq] += row.num_decided
            assert row.num_accepted <= row.num_drafted <= 4
            assert row.source == ("chain" if row.num_drafted else "")
    assert sorted(decided.values()) == [24, 24]


def test_events_nest(events: list[Event]) -> None:
    for track, found in spans(events).items():
        found.sort(key=lambda event: (event["ts"], -event["dur"]))
        for before, after in pairwise(found):
            end = before["ts"] + before["dur"]
            inside = after["ts"] + after["dur"] <= end
            assert after["ts"] >= end or inside, (track, before, after)


def test_times_are_within_the_run(run: TracedRun, events: list[Event]) -> None:
    for event in events:
        if event["ph"] != "M":
            assert 0 <= event["ts"] <= run.duration_ns / 1e3


def test_a_verdict_follows_its_step(run: TracedRun) -> None:
    target = run.of("target")[0]
    ends = {(row.seq, row.base + row.num_decided): step.end_ns for step in target.target_steps for row in step.rows}
    verdicts = [event for event in target.messages if event.kind == "Verdict" and event.what == "sent"]
    assert len(verdicts) == len(ends) > 10
    for verdict in verdicts:
        assert verdict.at_ns >= ends[verdict.seq, verdict.length]


def test_flows_have_both_ends_in_slices_of_their_own(events: list[Event]) -> None:
    tracks = spans(events)
    ends: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            ends[event["id"]].append(event)
            assert any(holds(span, event["ts"]) for span in tracks[event["pid"], event["tid"]])
    kinds = Counter(found[0]["name"] for found in ends.values())
    assert {"Offer", "Verdict", "Commit", "Ack", "Open", "Close"} == set(kinds)
    for found in ends.values():
        assert [event["ph"] for event in found] == ["s", "f"]
        assert found[0]["ts"] <= found[1]["ts"]
        assert found[0]["pid"] != found[1]["pid"]


def test_each_stream_has_a_track_of_its_rounds(run: TracedRun, events: list[Event]) -> None:
    rounds = [event for event in events if event["name"].startswith("round ")]
    by_track = {track: sorted(e["args"]["round"] for e in rounds if e["tid"] == track) for track in (1, 2)}
    assert all(numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 4 for numbers in by_track.values())
    for event in rounds:
        args = event["args"]
        assert args["accepted"] + args["rejected"] == args["drafted"]
    waits = [event["dur"] for event in events if event["name"] == "waits for a draft" and event["pid"] == 1]
    assert waits[0] == pytest.approx(4 * 3_000)


@pytest.mark.parametrize(("way", "waits"), [("in_turn", True), ("overlap", False), ("outcomes", False)])
def test_a_wait_for_a_draft_is_told_by_the_way_of_drafting(way: str, waits: bool) -> None:
    rows = [VerifiedRow("s", 1, 5, 0, 0, 1, way), VerifiedRow("s", 2, 6, 0, 0, 1, "overlap")]
    steps = tuple(TargetStep(10 * i, 10 * i + 5, (row,)) for i, row in enumerate(rows))
    trace = replace(worker("w"), role="target", target_steps=steps)
    names = [event["name"] for event in trace_events(TracedRun("", 1, 20, (trace,))) if event.get("dur") == 0.005]
    told = ["waits for a draft"] * 2 if waits else ["between steps"] * 2
    assert sorted(name for name in names if name.startswith(("waits", "between"))) == told


def test_what_is_written_is_what_viewers_read(tmp_path: Path, run: TracedRun) -> None:
    path = tmp_path / "out.json"
    write_trace([run, run], str(path))
    body = json.loads(path.read_text())
    assert body["displayTimeUnit"] == "ms"
    needed = {"X": {"name", "ts", "dur", "pid", "tid"}, "M": {"name", "pid", "args"}, "i": {"name", "ts", "pid", "s"}}
    flow = {"name", "cat", "id", "ts", "pid", "tid"}
    needed |= {"s": flow, "t": flow, "f": flow}
    for event in body["traceEvents"]:
        assert needed[event["ph"]] <= event.keys()
    names = Counter((e["pid"], e["args"]["name"]) for e in body["traceEvents"] if e["name"] == "process_name")
    assert len(names) == 2 * 4, "the second run has processes of its own"
    assert set(names.values()) == {1}
    flows = Counter(e["id"] for e in body["traceEvents"] if e["ph"] == "s")
    assert set(flows.values()) == {1}


@pytest.mark.parametrize("path", ["out.txt", "nowhere/out.json"])
def test_a_path_that_cannot_be(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidParameterError, match="trace: "):
        check_trace(str(tmp_path / path))


def test_nothing_is_recorded_unless_asked_for() -> None:
    pair = load_pair(AppArgs.model_validate({"scripted": {"acceptance_rate": 0.8}}))
    assert pair.recorders == {}
    assert pair.engine._service._on_message is None


# Clocks and lost messages.


CLOCK = ClockReading("a", 1000, 5000)


def event(what: Any, at_ns: int, peer: str = "", kind: str = "Offer", length: int = 7) -> MessageEvent:
    return MessageEvent(what, at_ns, peer, kind, "s", (0, 0), length, 4, 0)


def worker(name: str, *messages: MessageEvent, clock: ClockReading = CLOCK) -> WorkerTrace:
    return WorkerTrace(name, "router", clock, 0, messages)


def test_repeats_are_matched_in_order_and_what_has_no_other_end_is_left_out() -> None:
    sender = worker("x", event("sent", 10, "y"), event("sent", 20, "y"), event("sent", 30, "z"))
    receiver = worker("y", event("arrived", 12), event("received", 15), event("arrived", 24), event("received", 25))
    found = hops([sender, receiver])
    assert [(hop.sent_ns, hop.arrived_ns, hop.received_ns) for hop in found] == [(10, 12, 15), (20, 24, 25)]


def test_what_was_received_before_it_was_sent_is_another_message() -> None:
    """The one that was sent has been dropped from the ring."""
    assert hops([worker("x", event("sent", 10, "y")), worker("y", event("received", 8))]) == []


def test_processes_of_one_machine_share_a_clock_whatever_the_wall_says() -> None:
    start = ClockReading("a", 100, 9000)
    found = within(worker("x", event("sent", 99), event("sent", 150), event("sent", 301)), start, duration_ns=200)
    assert [message.at_ns for message in found.messages] == [50]


def test_machines_are_joined_by_wall_clocks() -> None:
    start = ClockReading("a", 100, 5000)
    there = ClockReading("b", 700, 5050)  # 5050 there is 150 here
    step = TargetStep(700, 710, ())
    trace = WorkerTrace("x", "target", there, 0, (event("sent", 720),), (step,))
    found = within(trace, start, duration_ns=1000)
    assert found.messages[0].at_ns == 70
    assert found.target_steps[0][:2] == (50, 60)
