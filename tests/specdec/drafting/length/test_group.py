"""What a group learns: a mode's factor by load, and when a sequence probes."""

from __future__ import annotations

import pytest

from specdec.drafting.length.controller import AGE_S, CAUTION, PROBE_ROUNDS, PROBE_SHARE, Group
from specdec.drafting.length.modes import OFF, Bounds, pace
from tests.specdec.drafting.length.test_modes import conditions

TOKENS = 400


def followed(group, conditions, share, now_s=0.0, rate=0.8):
    """The group's choice, which gives a share of what its formula says."""
    expected = pace(group.choice, conditions, rate)
    for _ in range(TOKENS):
        group.observe(group.choice, 2, 2 / (share * expected), now_s)


def test_a_gain_that_is_likely_is_taken_at_once():
    group = Group()
    group.review(conditions(), 0.5, Bounds(), 0.0)
    assert group.choice.mode == "outcomes"


def test_what_does_not_gain_is_off_after_some_rounds_and_stays_so_at_that_load():
    group, alone = Group(), conditions(0.02)
    group.review(alone, 0.6, Bounds(), 0.0)
    modes = [group.choice.mode]
    while group.choice != OFF:
        followed(group, alone, 0.5, rate=0.6)
        group.review(alone, 0.6, Bounds(), 0.0)
        modes.append(group.choice.mode)
    assert len(modes) == len(set(modes)) <= 4, "each way is tried once"
    assert group.choice_at(1) == OFF
    group.review(alone, 0.6, Bounds(), 10.0)
    assert group.choice == OFF


def test_a_factor_counts_at_its_load_then_nearby_and_less_as_it_ages():
    group, one, eight = Group(), conditions(), conditions(rows=8)
    assert group.factor("outcomes", one, 0.0) == pytest.approx(CAUTION)
    group.review(one, 0.8, Bounds(), 0.0)
    followed(group, one, 0.7)
    assert group.factor("outcomes", one, 0.0) == pytest.approx(0.7, abs=0.02)
    assert group.factor("outcomes", eight, 0.0) == pytest.approx(0.7, abs=0.02)
    assert group.factor("sequential", one, 0.0) == pytest.approx(CAUTION)
    assert group.factor("outcomes", one, 20 * AGE_S) == pytest.approx(CAUTION, abs=0.01)


def test_whatever_slows_the_target_down_when_it_is_alone_is_expected_of_all_ways():
    group, alone = Group(), conditions()
    group.review(alone, 0.0, Bounds(), 0.0)
    assert group.choice == OFF
    followed(group, alone, 0.75)
    assert group.factor("off", alone, 0.0) == pytest.approx(0.75, abs=0.02)
    assert group.factor("overlap", conditions(rows=8), 0.0) == pytest.approx(CAUTION * 0.75, abs=0.02)


def test_a_pause_counts_for_no_more_than_a_few_rounds():
    group, one = Group(), conditions()
    group.review(one, 0.0, Bounds(), 0.0)
    followed(group, one, 1.0)
    group.observe(OFF, 1, 1000.0, 0.0)
    assert group.factor("off", one, 0.0) > 0.95


def test_while_off_the_first_sequence_probes_and_then_all_rest():
    group, seqs = Group(), ["a", "b", "c"]
    group.review(conditions(), 0.0, Bounds(), 0.0)
    for _ in range(2):
        assert [group.probe(seqs), group.probe(seqs)] == ["a", "a"]
        group.probed(PROBE_ROUNDS)
        rounds = 0
        while group.probe(seqs) is None:
            group.rested(1)
            rounds += 1
        assert rounds == PROBE_ROUNDS / PROBE_SHARE


def test_a_probe_whose_sequence_has_ended_goes_to_another():
    group = Group()
    group.review(conditions(), 0.0, Bounds(), 0.0)
    assert group.probe(["a"]) == "a"
    assert group.probe(["b"]) == "b"
    assert group.probe([]) is None


def test_guesses_are_told_by_hits_of_prepared_outcomes():
    group = Group()
    group.guesses_reported(10, 90)
    assert group.guess_rate == 0.5, "nothing was prepared"
    group.review(conditions(), 0.8, Bounds(), 0.0)
    group.guesses_reported(10, 90)
    assert group.guess_rate < 0.2
