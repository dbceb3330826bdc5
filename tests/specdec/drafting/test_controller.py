"""What the controller learns: corrections of its predictions, plans by temperature, and when a sequence probes."""

from __future__ import annotations

import pytest

from specdec.core.messages import Notes
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.controller import (
    AGE_S,
    CAUTION,
    PROBE_ROUNDS,
    PROBE_SHARE,
    SETTLE_ROUNDS,
    Controller,
    Group,
    Kind,
)
from specdec.drafting.modes import OFF, Bounds, Choice, pace
from specdec.engine.timing import StepTimer
from tests.letters import provenance
from tests.specdec.drafting.test_modes import conditions

TOKENS = 400


def group_with(draft_s: float = 0.003) -> Group:
    return Group(conditions(draft_s))


def follow(group: Group, share: float, now_s: float = 0.0, rate: float = 0.8) -> None:
    """The group's choice gives a share of its prediction."""
    assert group.conditions is not None
    choice = group.kinds[1.0].choice
    expected = pace(choice, group.conditions, rate)
    for _ in range(TOKENS):
        group.measure(choice, rate, 2, 2 / (share * expected), now_s)


def test_a_gain_that_is_likely_is_taken_at_once() -> None:
    group = group_with()
    group.review(1.0, 0.5, Bounds(), 0.0)
    assert group.kinds[1.0].choice.mode == "outcomes"


def test_each_mode_that_does_not_gain_is_tried_once() -> None:
    group = group_with(0.02)
    group.review(1.0, 0.6, Bounds(), 0.0)
    modes = [group.kinds[1.0].choice.mode]
    while modes[-1] != "off":
        follow(group, 0.5, rate=0.6)
        group.review(1.0, 0.6, Bounds(), 0.0)
        modes.append(group.kinds[1.0].choice.mode)
        assert len(modes) == len(set(modes)) <= 4
    group.review(1.0, 0.6, Bounds(), 10.0)
    assert group.kinds[1.0].choice == OFF


def test_a_correction_ages() -> None:
    group = group_with()
    assert group.correction("outcomes", 0.0) == pytest.approx(CAUTION)
    group.review(1.0, 0.8, Bounds(), 0.0)
    follow(group, 0.7)
    assert group.correction("outcomes", 0.0) == pytest.approx(0.7, abs=0.02)
    assert group.correction("sequential", 0.0) == pytest.approx(CAUTION)
    assert group.correction("outcomes", 20 * AGE_S) == pytest.approx(CAUTION, abs=0.01)


def test_what_slows_plain_decoding_down_is_expected_of_all_modes() -> None:
    group = group_with()
    group.review(1.0, 0.0, Bounds(), 0.0)
    assert group.kinds[1.0].choice == OFF
    follow(group, 0.75)
    assert group.correction("off", 0.0) == pytest.approx(0.75, abs=0.02)
    assert group.correction("overlap", 0.0) == pytest.approx(CAUTION * 0.75, abs=0.02)


def test_a_pause_counts_for_no_more_than_a_few_rounds() -> None:
    group = group_with()
    group.review(1.0, 0.0, Bounds(), 0.0)
    follow(group, 1.0)
    group.measure(OFF, 0.0, 1, 1000.0, 0.0)
    assert group.correction("off", 0.0) > 0.95


def test_one_sequence_probes_while_drafts_are_off_and_then_all_rest() -> None:
    kind, seqs = Kind(), ["a", "b", "c"]
    for _ in range(2):
        assert [kind.probe(seqs), kind.probe(seqs)] == ["a", "a"]
        kind.count_rounds("a", PROBE_ROUNDS)
        rounds = 0
        while kind.probe(seqs) is None:
            kind.count_rounds("b", 1)
            rounds += 1
        assert rounds == PROBE_ROUNDS / PROBE_SHARE


def test_a_probe_whose_sequence_has_ended_goes_to_another() -> None:
    kind = Kind()
    assert kind.probe(["a"]) == "a"
    assert kind.probe(["b"]) == "b"
    assert kind.probe([]) is None


def reported(controller: Controller, target_s: float = 0.03, draft_s: float = 0.003) -> Controller:
    for name, kind, seconds in (("t", "target", target_s), ("d", "drafter", draft_s)):
        timer = StepTimer()
        for tokens in (1, 2, 4, 8, 16, 64):
            timer.add(1, tokens, seconds)
        controller.reported(name, kind, timer.metrics())
    return controller


def spec(temperature: float = 1.0, bound: int | None = None) -> SequenceSpec:
    return SequenceSpec(SamplingParams(temperature=temperature), 1, 1, 64, num_speculative_tokens=bound)


def test_a_draft_that_is_wrong_at_one_temperature_rests_there_alone() -> None:
    controller = reported(Controller())
    placements = {"cold": ("t", "d"), "hot": ("t", "d")}
    controller.opened("cold", spec(0.0))
    controller.opened("hot", spec(1.0))
    controller.review(placements, 0.0)
    for i in range(1, 100):
        controller.decided("cold", Notes(provenance("aaaab"), (0, 0, 0, 0, 4)), 0.03 * i)
        controller.decided("hot", Notes(provenance("c"), (4,)), 0.03 * i)
    plans = {seq: sequence.plan for seq, sequence in controller._sequences.items()}
    for seq, plan in controller.review(placements, 3.0).items():
        plans[seq] = plan
    assert plans["cold"].num_draft_tokens >= 4
    assert controller._groups["t"].kinds[1.0].choice == OFF


def test_a_plan_keeps_to_its_requests_bound() -> None:
    controller = reported(Controller())
    for seq, bound in (("none", 0), ("two", 2), ("free", None)):
        controller.opened(seq, spec(bound=bound))
    controller.review(dict.fromkeys(("none", "two", "free"), ("t", "d")), 0.0)
    lengths = {seq: sequence.plan.num_draft_tokens for seq, sequence in controller._sequences.items()}
    assert (lengths["none"], lengths["two"]) == (0, 2)
    assert lengths["free"] > 2


def test_rounds_that_began_under_the_plan_before_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Choice] = []
    monkeypatch.setattr(Group, "measure", lambda group, choice, *_: measured.append(choice))
    controller = reported(Controller())
    controller.opened("a", spec())
    controller.review({"a": ("t", "d")}, 0.0)
    for n in range(SETTLE_ROUNDS):
        controller.decided("a", Notes(provenance("c"), (4,)), float(n))
        assert measured == []
    controller.decided("a", Notes(provenance("c"), (4,)), 9.0)
    assert len(measured) == 1


def test_nothing_is_measured_while_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []
    monkeypatch.setattr(
        Group, "measure", lambda group, choice, rate, num_tokens, seconds, now_s: measured.append(seconds)
    )
    controller = Controller()
    for seq in ("a", "b"):
        controller.opened(seq, spec())
    controller.review({"a": ("t", None), "b": ("t", None)}, 0.0)

    def decided(seq: str, *times_s: float) -> None:
        for now_s in times_s:
            controller.decided(seq, Notes(provenance("p"), (0,)), now_s)

    decided("a", 1.0, 2.0, 3.0, 4.0)
    assert measured == [], "b has no token yet"
    decided("b", 10.0)
    decided("a", 10.0, 10.5, 11.5)
    assert measured == [0.5, 1.0]


def test_a_drafter_is_missed_until_drafts_were_found_useless() -> None:
    controller = Controller()
    controller.opened("a", spec())
    controller.opened("b", spec(bound=0))
    assert controller.metrics()["num_without_drafter"] == 1
    controller.review({"a": ("t", None), "b": ("t", None)}, 0.0)
    assert controller.metrics()["num_without_drafter"] == 1
    controller.reported("d", "drafter", {})
    assert controller.metrics()["num_without_drafter"] == 0
