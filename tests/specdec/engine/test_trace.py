"""The recorder of one worker: what it keeps, what it forgets, and what it makes of offers and rounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from specdec.engine.observed import ObservedDrafter, ObservedTarget
from specdec.engine.scripted import Script, ScriptedDrafter, ScriptedTarget
from specdec.engine.trace import MachineKind, Recorder
from specdec.engine.traced import TracedMachine, traced
from specdec.protocol.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.protocol.marks import Mark, TokenLog
from specdec.protocol.messages import (
    Ack,
    Alive,
    Close,
    Inc,
    Notes,
    Offer,
    Open,
    Outcome,
    Plan,
    PlanUpdate,
    Verdict,
)
from specdec.sampling.params import SamplingParams, SequenceSpec
from tests.specdec.engine.overlap import OverlapService

SPEC = SequenceSpec(SamplingParams(temperature=0), 0, 3, 20)
INC = Inc(1, 0)


def recorder(role: MachineKind = "target", capacity: int = 1000) -> Recorder:
    ticks = count(0, 10)
    return Recorder("w", role, capacity, clock_ns=lambda: next(ticks))


def opened(plan: Plan) -> Open:
    return Open("s", INC, "router", (1, 2, 3), SPEC, plan, 5.0)


def offer(length: int, chain: tuple[int, ...], *branches: tuple[tuple[int, int], tuple[int, ...]]) -> Offer:
    return Offer("s", INC, Mark(length, 0), chain, tuple((Outcome(*outcome), rest) for outcome, rest in branches))


class Answering:
    """A backend of either kind that gives the answers it was told."""

    max_model_len = 64

    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers = list(answers)

    def verify(self, jobs: Sequence[Any]) -> list[Any]:
        return self.answers

    propose = verify


def decided(found: Recorder, log: list[int], num_drafted: int, *run: int, source: Any = "") -> None:
    result = Verification(Status.DECIDED, run, len(run) - 1, num_drafted)
    job = VerifyJob("s", TokenLog(log), (), SPEC, source=source)
    ObservedTarget(Answering([result]), [found.stepped]).verify([job])


def drafted(found: Recorder, jobs: list[DraftJob], proposals: list[Proposal]) -> None:
    ObservedDrafter(Answering(proposals), [found.stepped]).propose(jobs)


def test_a_message_is_told_by_what_it_says() -> None:
    found = recorder("router")
    found.sent("w", [Verdict("s", INC, 3, (4, 5), Notes("ab", (0, 1)), Mark(5, 9)), Ack("s", INC, 5), Alive("w")])
    found.arrived([offer(5, (6, 7), ((0, 8), (9,)))])
    found.received(Close("s", INC))
    told = [(e.what, e.at_ns, e.peer, e.kind, e.length, e.num_tokens, e.num_branches) for e in found.trace().messages]
    assert told == [
        ("sent", 0, "w", "Verdict", 5, 2, 0),
        ("sent", 0, "w", "Ack", 5, 0, 0),
        ("arrived", 10, "", "Offer", 5, 2, 1),
        ("received", 20, "", "Close", 0, 0, 0),
    ]


def test_the_newest_is_kept_and_the_rest_counted() -> None:
    found = recorder("router", capacity=3)
    for length in range(10):
        found.sent("w", [Ack("s", INC, length)])
    trace = found.trace()
    assert [message.length for message in trace.messages] == [7, 8, 9]
    assert trace.num_dropped == 7


def test_rows_count_against_the_capacity() -> None:
    found = recorder("drafter", capacity=8)
    jobs = [DraftJob(f"s{i}", [1, 2, 3], SPEC, num_committed=3) for i in range(4)]
    for _ in range(5):
        drafted(found, jobs, [Proposal(Status.DECIDED, 7)] * 4)
    assert len(found.trace().draft_steps) == 2


@pytest.mark.parametrize(
    ("plan", "way"),
    [
        (Plan(), "off"),
        (Plan(4), "overlap"),
        (Plan(4, num_branches=2), "outcomes"),
        (Plan(4, num_branches=2, way="in_turn"), "in_turn"),
    ],
)
def test_way_of_a_row_is_that_of_its_plan(plan: Plan, way: str) -> None:
    found = recorder()
    found.received(opened(Plan()))
    found.received(PlanUpdate("s", INC, plan))
    decided(found, [1, 2, 3], 0, 4)
    found.received(Close("s", INC))
    decided(found, [1, 2, 3, 4], 0, 5)
    before, after = (step.rows[0] for step in found.trace().target_steps)
    assert (before.way, before.round) == (way, 1)
    assert (after.way, after.round) == ("off", 1), "it was forgotten"


def test_rows_of_a_draft_step_by_sequence() -> None:
    found = recorder("drafter")
    branch = [DraftJob(f"s#{i}", [1, 2, 3, 9], SPEC, num_committed=3, fork_of="s") for i in range(3)]
    jobs = [DraftJob("s", [1, 2, 3, 4], SPEC, num_committed=3), DraftJob("t", [1], SPEC, num_committed=1), *branch]
    proposals = [Proposal(Status.DECIDED, 5), Proposal(Status.PREFILLING), *[Proposal(Status.DECIDED, 6)] * 2]
    drafted(found, jobs, [*proposals, Proposal(Status.WAITING)])
    assert [row[:4] for row in found.trace().draft_steps[0].rows] == [("s", 3, 2, 2), ("t", 1, 0, 0)]


def test_a_row_tells_what_of_an_offer_its_draft_was() -> None:
    found = recorder()
    decided(found, [1, 2, 3], 1, 4, source="branch")
    decided(found, [1, 2, 3, 4], 0, 5, source="chain")  # there was no room to verify it
    assert [step.rows[0].source for step in found.trace().target_steps] == ["branch", ""]


class TracedOverlap(OverlapService):
    """The same with recorders at its workers."""

    def __init__(self, plan: Plan, draft_steps: int) -> None:
        script = Script(0.6, 0.9, range(5, 500))
        self.seen, self.drawn = recorder("target", 10_000), recorder("drafter", 10_000)
        target = ObservedTarget(ScriptedTarget(script, 200), [self.seen.stepped])
        super().__init__(
            target, ObservedDrafter(ScriptedDrafter(script, 200), [self.drawn.stepped]), plan, lambda: draft_steps
        )
        self.counters = self.target.counters
        self.target = self._machines["target"] = TracedMachine(self.target, self.seen)  # type: ignore[assignment]
        self.drafter = self._machines["drafter"] = TracedMachine(self.drafter, self.drawn)  # type: ignore[assignment]


@pytest.mark.parametrize(("draft_steps", "num_branches"), [(12, 6), (5, 6), (2, 4), (6, 0)])
def test_rounds_are_those_that_the_target_counts(draft_steps: int, num_branches: int) -> None:
    service = TracedOverlap(Plan(4, num_branches), draft_steps)
    spec = SequenceSpec(SamplingParams(temperature=0, ignore_eos=True), 5, 3, 120)
    service.start("s", [1, 2, 3], spec)
    while not any(delivery.finish for delivery in service.pump()):
        pass
    rows = [row for step in service.seen.trace().target_steps for row in step.rows]
    counters = service.counters
    assert sum(row.num_decided for row in rows) == counters.num_committed_tokens == 120
    assert sum(row.num_accepted for row in rows) == counters.num_accepted_tokens
    assert all(bool(row.source) == bool(row.num_drafted) for row in rows)
    assert any(row.source == "branch" for row in rows) == bool(num_branches)
    branches = sum(row.num_branches for step in service.drawn.trace().draft_steps for row in step.rows)
    assert bool(branches) == bool(num_branches)


def test_without_a_recorder_the_machine_is_itself() -> None:
    service = TracedOverlap(Plan(2), 1)
    assert traced(service.router, None) is service.router
    assert isinstance(traced(service.router, recorder()), TracedMachine)
