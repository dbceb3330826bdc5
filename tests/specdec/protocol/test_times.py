"""When rounds were worked on: told of where a request asked, and only there."""

from __future__ import annotations

import time
from itertools import count

from specdec.core.drafts import Draft
from specdec.core.messages import Commit, Offer, Open, Plan, RoundTimes
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.observed import StepRecord
from specdec.engine.timing import LastRound, LastStep
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.leases import Times
from specdec.protocol.target import TargetMachine
from tests.letters import spelled
from tests.specdec.protocol.scripted import PROMPT, log_of
from tests.specdec.protocol.test_drafter import EPOCH, Counting, chain
from tests.specdec.protocol.test_target import TIMES, TRUE, Oracle


def opened(seq: str, wants_times: bool, plan: Plan) -> Open:
    spec = SequenceSpec(SamplingParams(), 0, len(PROMPT), 12, wants_times=wants_times)
    return Open(seq, EPOCH, "R", PROMPT, spec, plan, 5.0)


def clock():
    """Steps that end one after the other, each at once: the n-th is (n, n)."""
    steps = count(1)
    return lambda: (float(step := next(steps)), float(step))


def test_a_drafter_tells_of_its_steps_once_with_the_offer_that_follows():
    machine = DrafterMachine("D", Counting(), Times(lease_s=5.0), last_interval=clock())
    for seq, wants_times in (("s", True), ("t", False)):
        machine.receive(opened(seq, wants_times, Plan(2, mode="sequential")), 0.0)
    while machine.step(0.0):
        pass
    offers = {offer.seq: offer for offer in machine.take_outbox()["R"]}
    assert offers["s"].steps == ((1.0, 1.0), (2.0, 2.0))
    assert offers["t"].steps == ()
    prefix_hash = log_of(chain(0, 2)).prefix_hash()
    machine.receive(Commit("s", EPOCH, len(PROMPT), chain(0, 2), prefix_hash), 0.0)
    while machine.step(0.0):
        pass
    assert [offer.steps for offer in machine.take_outbox()["R"]] == [((3.0, 3.0), (4.0, 4.0))]


def test_a_step_without_room_for_a_sequence_was_none_of_its_own():
    backend = Counting()
    machine = DrafterMachine("D", backend, Times(lease_s=5.0), last_interval=clock())
    for seq in ("s", "t"):
        machine.receive(opened(seq, True, Plan(1, mode="sequential")), 0.0)
    backend.room = 1
    machine.step(0.0)
    backend.room = 9
    machine.step(0.0)
    assert {offer.seq: offer.steps for offer in machine.take_outbox()["R"]} == {
        "s": ((1.0, 1.0),),
        "t": ((2.0, 2.0),),
    }


def test_a_target_notes_its_step_and_the_drafters_at_the_last_token_of_a_round():
    machine = TargetMachine("T", Oracle(), TIMES, last_interval=clock())
    for seq, wants_times in (("s", True), ("t", False)):
        machine.receive(opened(seq, wants_times, Plan(8)), 0.0)
    steps = ((0.25, 0.5), (0.5, 0.75))
    machine.receive(Offer("s", EPOCH, log_of(()).prefix_hash(), TRUE[:2], steps=steps), 0.0)
    machine.step(0.0)
    machine.step(0.0)
    newest = {verdict.seq: verdict.notes for verdict in machine.take_outbox()["R"]}
    assert spelled(newest["s"]) == "aabp"
    assert newest["s"].times == (None, None, RoundTimes((1.0, 1.0), steps), RoundTimes((2.0, 2.0)))
    assert newest["t"].times == ()


class OwnDrafts(Oracle):
    """Drafts two tokens itself, of which the first is right."""

    def verify(self, jobs):
        own = Draft((*TRUE[:1], 0), source="chain")
        return [result._replace(own=own, num_drafted=2) for result in super().verify(jobs)]


def test_a_target_that_drafts_itself_notes_the_steps_of_its_own_draft_model():
    steps = ((0.25, 0.5), (0.5, 0.75))
    machine = TargetMachine("T", OwnDrafts(), TIMES, last_interval=clock(), last_draft_intervals=lambda: steps)
    machine.receive(opened("s", True, Plan(0)), 0.0)
    machine.step(0.0)
    (verdict,) = machine.take_outbox()["R"]
    assert verdict.notes.times == (RoundTimes((1.0, 1.0), steps),)


def test_a_round_of_a_pair_is_its_draft_steps_and_the_targets():
    """A draft step goes on from the one before, unless it is the first of its round; the fourth round has failed."""
    last, rounds = LastRound(), []
    for number, (role, goes_on) in enumerate(
        (
            *(("target", False), ("drafter", False), ("drafter", True), ("target", False)),
            *(("drafter", False), ("target", False), ("drafter", False), ("drafter", True)),
            *(("drafter", False), ("target", False)),
        )
    ):
        start_ns = number * 1_000_000_000
        since_ns = start_ns - 500_000_000 * goes_on
        last(StepRecord(role, start_ns, start_ns + 500_000_000, since_ns, 1, 1, 0, True, goes_on, 1))
        if role == "target":
            (start_s, end_s), drafts = last.interval(), last.draft_intervals()
            rounds.append([[round(at - start_s, 3) for at in one] for one in ((start_s, end_s), *drafts)])
    assert rounds == [[[0, 0.5]], [[0, 0.5], [-2, -1.5], [-1, -0.5]], *2 * [[[0, 0.5], [-1, -0.5]]]]


def test_the_newest_step_is_told_by_the_wall_clock():
    last, before_s = LastStep(), time.time()
    start_ns = time.monotonic_ns()
    last(StepRecord("target", start_ns, start_ns + 5_000_000, start_ns, 1, 1, 0, True, False, 1))
    start_s, end_s = last.interval()
    assert abs(start_s - before_s) < 10
    assert round(end_s - start_s, 4) == 0.005
