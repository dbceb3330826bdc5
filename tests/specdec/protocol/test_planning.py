"""The controller is told and asked when nothing waits for it."""

from __future__ import annotations

from itertools import count

from specdec.core.messages import Notes, Plan
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.plans import Planning
from tests.letters import provenance
from tests.specdec.protocol.test_replans import Chooser

SPEC = SequenceSpec(SamplingParams(), 1, 1, 8)


def planning():
    chooser = Chooser(Plan(2))
    one = Planning(chooser)
    assert one.take_turn(0.0)  # nothing was reviewed yet
    return one, chooser


def test_what_was_decided_is_handed_over_in_the_turn_after_the_one_that_relays_it():
    one, chooser = planning()
    one.decided("s", Notes(provenance("p")), 0.01)
    one.decided("t", Notes(provenance("p")), 0.01)
    one.take_turn(0.01)
    assert chooser.calls == []
    one.take_turn(0.02)
    one.take_turn(0.03)
    assert chooser.calls == [("decided", "s", "p"), ("decided", "t", "p")]


def test_a_sequence_ends_after_all_that_was_decided():
    one, chooser = planning()
    one.decided("s", Notes(provenance("p")), 0.01)
    one.closed("s")
    assert chooser.calls == [("decided", "s", "p"), ("closed", "s")]


def test_a_review_follows_a_verdict_by_a_turn():
    one, _ = planning()
    reviews = []
    for turn in range(1, 101):  # a verdict in every tenth turn
        if turn % 10 == 0:
            one.decided("s", Notes(provenance("p")), turn / 100)
        if one.take_turn(turn / 100):
            reviews.append(turn)
    assert reviews == [31, 61, 91]


def test_without_verdicts_and_with_too_many_a_review_waits_for_another_period():
    for verdicts in (False, True):
        one, chooser = planning()
        for turn in count(1):
            if verdicts:
                one.decided("s", Notes(provenance("p")), turn / 100)
            if one.take_turn(turn / 100):
                break
        assert turn == 50
        assert len(chooser.calls) == 50 * verdicts


def test_a_burst_is_reviewed_once_it_has_come():
    one, _ = planning()
    reviews = []
    for ms in range(1, 201):
        if ms in (10, 30, 50):
            one.opened(f"s{ms}", SPEC)
        if one.take_turn(ms / 1000):
            reviews.append(ms)
    assert reviews == [100]
