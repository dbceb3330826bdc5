"""Machines tell of a sequence whose request is traced, once each, in sums; of others nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from benchmarks.scripted import Script, ScriptedDrafter, ScriptedTarget
from specdec.core.messages import Cancel, Close, Epoch, Open, Plan, Submit
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.engine import InProcessService
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.target import TargetMachine
from tests.letters import spelled
from tests.specdec.protocol.scripted import PROMPT
from tests.specdec.protocol.test_drafter import Counting
from tests.specdec.protocol.test_faults import FaultyDraft
from tests.specdec.protocol.test_router import SPEC, join, router
from tests.specdec.protocol.test_target import TIMES, Oracle, open_message

SCRIPT = Script(0.7, 0.9, tuple(range(3, 40)))


@dataclass
class RecordedSpan:
    """A span that remembers."""

    role: str
    above: str
    seq: str
    sums: Counter[str] = field(default_factory=Counter)
    ends: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.above}/{self.role}"

    def add(self, **counts: int) -> None:
        assert not self.ends
        self.sums.update(counts)

    def end(self, finish: str = "") -> None:
        self.ends.append(finish)


@dataclass
class Spans:
    """All spans, in the order in which they began."""

    recorded: list[RecordedSpan] = field(default_factory=list)

    def of(self, role: str):
        def begin(label: str, seq: str) -> RecordedSpan:
            self.recorded.append(RecordedSpan(role, label, seq))
            return self.recorded[-1]

        return begin


@pytest.fixture
def spans() -> Spans:
    return Spans()


def test_a_sequence_is_one_span_on_each_machine_and_the_sums_are_those_of_its_notes(spans: Spans) -> None:
    service = InProcessService(ScriptedTarget(SCRIPT, 200), ScriptedDrafter(SCRIPT, 200), 4)
    assert service.drafter is not None
    for machine, role in ((service.router, "router"), (service.target, "target"), (service.drafter, "drafter")):
        machine.tracer = spans.of(role)
    spec = SequenceSpec(SamplingParams(temperature=0.0), 7, len(PROMPT), 40)
    service.start("quiet", PROMPT, spec)
    service.start("s", PROMPT, replace(spec, trace="client"))
    how, drafted, rounds = "", 0, 0
    finished = set()
    while len(finished) < 2:
        for delivery in service.pump():
            if delivery.seq == "s":
                how += spelled(delivery.notes)
                drafted += sum(delivery.notes.num_drafted)
                rounds += sum(num > 0 for num in delivery.notes.num_drafted)
            if delivery.finish is not None:
                finished.add(delivery.seq)
    recorded = {span.role: span for span in spans.recorded}
    assert [(span.role, span.above, span.seq) for span in spans.recorded] == [
        ("router", "client", "s"),
        ("target", "client/router", "s"),
        ("drafter", "client/router", "s"),
    ]
    target = recorded["target"].sums
    assert target["num_tokens"] == recorded["router"].sums["num_tokens"] == len(how) == 40
    assert target["num_draft_tokens"] == drafted > target["num_accepted_tokens"] == how.count("a") > 0
    assert target["num_rounds"] >= rounds > 0
    assert recorded["router"].sums["num_target_openings"] == recorded["router"].sums["num_drafter_openings"] == 1
    assert recorded["drafter"].sums["num_proposed_tokens"] >= recorded["drafter"].sums["num_kept_tokens"] > 0
    assert recorded["drafter"].sums["num_offers"] > 0
    assert [(span.role, span.ends) for span in spans.recorded] == [
        ("router", [""]),
        ("target", ["length"]),
        ("drafter", [""]),
    ]


@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_what_is_opened_anew_is_another_span_and_each_ends_once(kind: str, spans: Spans) -> None:
    drafter, target = DrafterMachine("W", FaultyDraft(), TIMES), TargetMachine("W", Oracle(), TIMES)
    drafter.tracer, target.tracer = spans.of("drafter"), spans.of("target")
    machine = {"target": target, "drafter": drafter}[kind]
    machine.receive(open_message(seq="quiet"), 0.0)
    for n in (0, 0, 1):  # the second is repeated, and changes nothing
        machine.receive(open_message(epoch=Epoch(1, n), trace="r"), 0.0)
    assert [span.ends for span in spans.recorded] == [[""], []]
    machine.receive(open_message(seq="lapsed", trace="r"), 0.0)
    machine.receive(Close("s", Epoch(1, 1)), 0.0)
    machine.receive(Close("s", Epoch(1, 1)), 0.0)
    machine.step(2 * TIMES.lease_s)
    assert [(span.seq, span.ends) for span in spans.recorded] == [("s", [""]), ("s", [""]), ("lapsed", [""])]


def test_a_routers_span_counts_openings_and_ends_with_what_is_open(spans: Spans) -> None:
    machine = router("T0", "D0")
    machine.tracer = spans.of("router")
    machine.receive(Submit("s", 1, "I", PROMPT, replace(SPEC, trace="client")), 0.0)
    machine.receive(Submit("quiet", 1, "I", PROMPT, SPEC), 0.0)
    machine.worker_lost("D0", 0.0)
    join(machine, "D1")
    opened = [m for batch in machine.take_outbox().values() for m in batch if isinstance(m, Open)]
    assert {(m.seq, m.spec.trace) for m in opened} == {("s", "client/router"), ("quiet", "")}
    (span,) = spans.recorded
    assert span.sums == {"num_target_openings": 1, "num_drafter_openings": 2}
    for _ in range(2):
        machine.receive(Cancel("s", 1), 0.0)
    assert span.ends == [""]


def test_where_nobody_traces_a_label_is_handed_on(spans: Spans) -> None:
    machine = router("T0")
    machine.receive(Submit("s", 1, "I", PROMPT, replace(SPEC, trace="client")), 0.0)
    (opened,) = machine.take_outbox()["T0"]
    assert opened.spec.trace == "client"


def test_the_steps_of_a_sequence_are_timed_in_sums_alone(spans: Spans) -> None:
    def quarter() -> tuple[float, float]:
        return 10.0, 10.25

    target = TargetMachine("T", Oracle(), TIMES, last_interval=quarter)
    drafter = DrafterMachine("D", Counting(), TIMES, last_interval=quarter)
    target.tracer, drafter.tracer = spans.of("target"), spans.of("drafter")
    for machine in (target, drafter):
        machine.receive(open_message(plan=Plan(2, mode="sequential", draft_wait_s=0.0), trace="r"), 0.0)
        machine.step(0.0)
        machine.step(0.0)
    assert {span.role: span.sums["step_us"] for span in spans.recorded} == {"target": 500_000, "drafter": 500_000}
    (offer,) = drafter.take_outbox()["R"]
    assert offer.steps == ()
