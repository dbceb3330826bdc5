"""The recorder of one worker: what it keeps, what it forgets, and what it makes of offers and rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from specdec.engine.foresight import Foresight, Offered
from specdec.engine.scripted import Script, ScriptedDrafter, ScriptedTarget
from specdec.engine.trace import Recorder, Role
from specdec.engine.traced import TracedDrafter, TracedMachine, TracedTarget, traced
from specdec.protocol.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.protocol.leases import Times
from specdec.protocol.marks import Mark, TokenLog
from specdec.protocol.messages import (
    Ack,
    Alive,
    Close,
    Inc,
    Message,
    Notes,
    Offer,
    Open,
    Outcome,
    Plan,
    PlanUpdate,
    Verdict,
)
from specdec.protocol.target import TargetMachine
from specdec.sampling.params import SamplingParams, SequenceSpec
from tests.specdec.engine.overlap import OverlapService

SPEC = SequenceSpec(SamplingParams(temperature=0), 0, 3, 20)
INC = Inc(1, 0)


def recorder(role: Role = "target", capacity: int = 1000) -> Recorder:
    ticks = count(0, 10)
    return Recorder("w", role, capacity, clock_ns=lambda: next(ticks))


def opened(plan: Plan) -> Open:
    return Open("s", INC, "router", (1, 2, 3), SPEC, plan, 5.0)


def offer(length: int, chain: tuple[int, ...], *branches: tuple[tuple[int, int], tuple[int, ...]]) -> Offer:
    return Offer("s", INC, Mark(length, 0), chain, tuple((Outcome(*outcome), rest) for outcome, rest in branches))


def decided(found: Recorder, log: list[int], num_drafted: int, *run: int) -> None:
    result = Verification(Status.DECIDED, run, len(run) - 1, num_drafted)
    found.verified(0, [VerifyJob("s", TokenLog(log), (), SPEC)], [result])


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
        found.drafted(0, jobs, [Proposal(Status.DECIDED, 7)] * 4)
    assert len(found.trace().draft_steps) == 2


@pytest.mark.parametrize(
    ("plan", "mode"),
    [
        (Plan(), "plain"),
        (Plan(4), "overlap"),
        (Plan(4, num_branches=2), "outcomes"),
        (Plan(4, num_branches=2, mode="in_turn"), "in_turn"),
    ],
)
def test_mode_of_a_row_is_that_of_its_plan(plan: Plan, mode: str) -> None:
    found = recorder()
    found.received(opened(Plan()))
    found.received(PlanUpdate("s", INC, plan))
    decided(found, [1, 2, 3], 0, 4)
    found.received(Close("s", INC))
    decided(found, [1, 2, 3, 4], 0, 5)
    before, after = (step.rows[0] for step in found.trace().target_steps)
    assert (before.mode, before.round) == (mode, 1)
    assert (after.mode, after.round) == ("plain", 1), "it was forgotten"


@pytest.mark.parametrize(
    ("plan", "may_wait"), [(Plan(4), False), (Plan(4, draft_wait_s=0.1), True), (Plan(0, draft_wait_s=0.1), False)]
)
def test_a_row_tells_whether_its_plan_lets_it_wait(plan: Plan, may_wait: bool) -> None:
    found = recorder()
    found.received(opened(plan))
    decided(found, [1, 2, 3], 0, 4)
    assert found.trace().target_steps[0].rows[0].may_wait == may_wait


def test_a_step_in_which_nothing_was_done_is_not_kept() -> None:
    found = recorder()
    waiting = Verification(Status.WAITING)
    assert not found.verified(0, [VerifyJob("s", TokenLog([1]), (), SPEC)], [waiting])
    assert not found.drafted(0, [DraftJob("s", [1], SPEC)], [Proposal(Status.WAITING)])
    assert found.trace().target_steps == found.trace().draft_steps == ()


def test_rows_of_a_draft_step_by_sequence() -> None:
    found = recorder("drafter")
    branch = [DraftJob(f"s#{i}", [1, 2, 3, 9], SPEC, num_committed=3, fork_of="s") for i in range(3)]
    jobs = [DraftJob("s", [1, 2, 3, 4], SPEC, num_committed=3), DraftJob("t", [1], SPEC, num_committed=1), *branch]
    proposals = [Proposal(Status.DECIDED, 5), Proposal(Status.PREFILLING), *[Proposal(Status.DECIDED, 6)] * 2]
    found.drafted(0, jobs, [*proposals, Proposal(Status.WAITING)])
    assert [row[:4] for row in found.trace().draft_steps[0].rows] == [("s", 3, 2, 2), ("t", 1, 0, 0)]


def rounds(*events: Any) -> list[tuple[str, str]]:
    """Sources and outcomes of the rounds among offers and (log, number drafted, run)."""
    found = recorder()
    for event in events:
        if isinstance(event, Offer):
            found.received(event)
        else:
            decided(found, event[0], event[1], *event[2])
    return [(row.source, row.outcome) for step in found.trace().target_steps for row in step.rows]


def test_a_draft_is_ahead_if_it_was_made_before_the_round_before_was_decided() -> None:
    found = recorder()
    for event in (offer(3, (4, 5, 6)), ([1, 2, 3], 1, (4,)), ([1, 2, 3, 4], 2, (5, 9)), offer(6, (7,))):
        if isinstance(event, Offer):
            found.received(event)
        else:
            decided(found, *event[:2], *event[2])
    decided(found, [1, 2, 3, 4, 5, 9], 1, 8)
    decided(found, [1, 2, 3, 4, 5, 9, 8], 0, 8)
    rows = [row for step in found.trace().target_steps for row in step.rows]
    assert [(row.source, row.is_ahead) for row in rows] == [
        ("chain", False),
        ("chain", True),
        ("chain", False),
        ("", False),
    ]


def test_a_draft_offered_after_its_verdict_is_no_hit() -> None:
    assert rounds(offer(3, (4, 5)), ([1, 2, 3], 2, (4, 5, 6))) == [("chain", "")]


def test_a_branch_that_was_there_in_time() -> None:
    first, ahead = offer(3, (4, 5)), offer(3, (4, 5), ((1, 8), (9, 10)), ((2, 6), (7,)))
    found = rounds(first, ahead, ([1, 2, 3], 2, (4, 8)), ([1, 2, 3, 4, 8], 2, (9, 11)))
    assert found == [("chain", ""), ("branch", "hit")]


def test_the_longest_draft_is_the_one_that_was_taken() -> None:
    ahead, fresh = offer(3, (4, 5), ((1, 8), (9, 10))), offer(5, (9,))
    assert rounds(ahead, ([1, 2, 3], 2, (4, 8)), fresh, ([1, 2, 3, 4, 8], 2, (9, 11)))[1] == ("branch", "hit")


def test_the_chain_may_go_on_beyond_what_was_verified() -> None:
    ahead = offer(3, (4, 5, 6, 7), ((0, 9), (9,)))
    assert rounds(ahead, ([1, 2, 3], 2, (4, 5, 6)), ([1, 2, 3, 4, 5, 6], 1, (7, 8)))[1] == ("chain", "hit")


def test_branches_none_of_which_fits() -> None:
    ahead, fresh = offer(3, (4, 5), ((1, 8), (9,))), offer(5, (9, 9))
    assert rounds(ahead, ([1, 2, 3], 2, (4, 7)), fresh, ([1, 2, 3, 4, 7], 2, (9, 1)))[1] == ("chain", "miss")
    assert rounds(ahead, ([1, 2, 3], 2, (4, 7)), ([1, 2, 3, 4, 7], 0, (9,)))[1] == ("", "miss")


def test_rounds_that_were_dropped_leave_nothing_to_judge_by() -> None:
    ahead = offer(3, (4, 5), ((1, 8), (9,)))
    assert rounds(ahead, ([1, 2, 3, 4, 8], 1, (9, 2))) == [("", "")]


def test_an_offer_is_late_when_two_rounds_have_begun_since() -> None:
    foresight = Foresight()
    for base in (3, 4):
        foresight.judge("s", base, has_draft=False)
        foresight.decided("s", base, (5,))
    assert not foresight.take(Offered(0, "s", 4, (9,), ()))
    assert foresight.take(Offered(0, "s", 3, (9,), ()))


def test_a_later_part_of_an_offer_takes_the_place_of_the_earlier_one() -> None:
    """Four are held, as by the target: parts of the newer one must not push out the older one."""
    first = offer(3, (4, 5), ((1, 8), (9, 10, 11, 12, 13, 14)))
    parts = [offer(5, tuple(range(20, 20 + length))) for length in range(1, 6)]
    assert rounds(first, ([1, 2, 3], 2, (4, 8)), *parts, ([1, 2, 3, 4, 8], 2, (9, 12)))[1] == ("branch", "hit")


def test_what_is_left_of_no_use_makes_no_miss_of_a_later_round() -> None:
    ahead = offer(3, (4, 5), ((1, 8), (9,)))
    first, second, third = ([1, 2, 3], 2, (4, 7)), ([1, 2, 3, 4, 7], 0, (6,)), ([1, 2, 3, 4, 7, 6], 0, (6,))
    assert rounds(ahead, first, second, third) == [("chain", ""), ("", "miss"), ("", "")]


class Interrupted(ScriptedTarget):
    """During each of its steps messages are delivered, as on the event loop."""

    def __init__(self, script: Script, messages: list[list[Message]], at: str) -> None:
        super().__init__(script, 200)
        self.messages, self.at = messages, at
        self.receive: Callable[[Message, float], None] = lambda message, now_s: None
        self.drafts: list[tuple[int, ...]] = []

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        self.deliver("just before")
        yield

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        self.drafts += [job.draft for job in jobs]
        self.deliver("within")
        return super().verify(jobs)

    def deliver(self, at: str) -> None:
        for message in self.messages.pop(0) if at == self.at else ():
            self.receive(message, 0.0)


@pytest.mark.parametrize("at", ["just before", "within"])
def test_a_step_is_judged_by_the_offers_that_had_come_before_its_drafts_were_chosen(at: str) -> None:
    script = Script(1.0, 1.0, range(5, 500))
    a, b, c, d, e = (script.true_token(0, length) for length in range(3, 8))
    log = TokenLog([1, 2, 3])
    ahead = Offer("s", INC, log.mark(), (499,), ((Outcome(0, a), (b, c)),))
    just_in_time = Offer("s", INC, log.mark(), (498,))
    log.extend((a,))
    longer = Offer("s", INC, log.mark(), (b, c, d, e))
    backend, seen = Interrupted(script, [[ahead], [just_in_time, longer], []], at), recorder()
    machine = TargetMachine("w", TracedTarget(backend, seen), Times(lease_s=1e6, silence_s=1e6))
    machine.meanwhile = backend.meanwhile
    whole = TracedMachine(machine, seen)
    backend.receive = whole.receive
    whole.receive(opened(Plan(4, 2)), 0.0)
    for _ in range(3):
        whole.step(0.0)
    assert backend.drafts == [(), (b, c), (e,)]
    rows = [row for step in seen.trace().target_steps for row in step.rows]
    assert [(row.source, row.outcome) for row in rows] == [("", ""), ("branch", "hit"), ("chain", "")]
    assert machine.counters.num_branch_hits == 1
    assert seen.trace().late_offers == ()


class TracedOverlap(OverlapService):
    """The same with recorders at its workers."""

    def __init__(self, plan: Plan, draft_steps: int) -> None:
        script = Script(0.6, 0.9, range(5, 500))
        self.seen, self.drawn = recorder("target", 10_000), recorder("drafter", 10_000)
        target = TracedTarget(ScriptedTarget(script, 200), self.seen)
        super().__init__(target, TracedDrafter(ScriptedDrafter(script, 200), self.drawn), plan, lambda: draft_steps)
        self.counters = self.target.counters
        self.target = self._machines["target"] = TracedMachine(self.target, self.seen)  # type: ignore[assignment]
        self.drafter = self._machines["drafter"] = TracedMachine(self.drafter, self.drawn)  # type: ignore[assignment]


@pytest.mark.parametrize(("draft_steps", "num_branches"), [(12, 6), (5, 6), (2, 4), (6, 0)])
def test_rounds_are_judged_as_the_target_judges_them(draft_steps: int, num_branches: int) -> None:
    service = TracedOverlap(Plan(4, num_branches, num_fit_steps=9), draft_steps)
    spec = SequenceSpec(SamplingParams(temperature=0, ignore_eos=True), 5, 3, 120)
    service.start("s", [1, 2, 3], spec)
    while not any(delivery.finish for delivery in service.pump()):
        pass
    rows = [row for step in service.seen.trace().target_steps for row in step.rows]
    counters = service.counters
    assert sum(row.num_decided for row in rows) == counters.num_committed_tokens == 120
    assert sum(row.num_accepted for row in rows) == counters.num_accepted_tokens
    outcomes = [row.outcome for row in rows]
    assert any(row.is_ahead for row in rows), "a chain without branches is, too"
    if num_branches:
        judged = counters.num_branch_hits, counters.num_branch_misses
        assert (outcomes.count("hit"), outcomes.count("miss")) == judged
        assert counters.num_branch_hits or draft_steps == 2
    assert all(bool(row.source) == bool(row.num_drafted) for row in rows)
    branches = sum(row.num_branches for step in service.drawn.trace().draft_steps for row in step.rows)
    assert bool(branches) == bool(num_branches)


def test_without_a_recorder_the_machine_is_itself() -> None:
    service = TracedOverlap(Plan(2), 1)
    assert traced(service.router, None) is service.router
    assert isinstance(traced(service.router, recorder()), TracedMachine)
