"""Reports: the better draft is better, an equal one is not, and the same figures give the same bytes."""

from __future__ import annotations

import json

from specdec.audition.report import Audition, as_json, as_table, differences, verdict
from specdec.audition.rounds import Earned


def audition(name: str, rounds: int) -> Audition:
    """A draft on 40 answers of 24 tokens, in about so many rounds each."""
    earned = [Earned(24, rounds + i % 3, 24, 24 - rounds - i % 3) for i in range(40)]
    return Audition(name, "run", {4: earned}, [(12, 16)] * 40)


def test_a_difference_has_an_interval_that_repeats() -> None:
    first, better = audition("a", 12), audition("b", 8)
    [found] = differences(first, better)
    assert 0 < found.low < found.mean < found.high
    assert differences(first, better) == [found]
    [same] = differences(first, audition("c", 12))
    assert (same.low, same.mean, same.high) == (0, 0, 0)


def test_figures_are_those_of_all_answers() -> None:
    drafts = [audition("a", 12), audition("b", 8)]
    found = as_json(drafts, (10.0, [1.0, 2.0]))
    [line] = found["drafts"][1]["by_length"]
    rounds = sum(8 + i % 3 for i in range(40))
    assert (line["k"], line["num_rounds"], line["num_tokens"]) == (4, rounds, 960)
    assert line["gain"] == 960 / rounds * 10 / (10 + 4 * 2)
    assert found["drafts"][0]["right"] == 0.75
    assert json.dumps(found) == json.dumps(as_json(drafts, (10.0, [1.0, 2.0])))
    assert "75.0%" in as_table(drafts, None)


def test_a_draft_is_better_only_if_chance_does_not_make_it_so() -> None:
    first, better = audition("a", 12), audition("b", 8)
    found = verdict(first, better, 4)
    assert found.is_better
    assert not found.is_worse
    assert found.p_value == 1 / 10_000
    assert found == verdict(first, better, 4)
    worse = verdict(better, first, 4)
    assert worse.is_worse
    assert not worse.is_better
    assert worse.p_value == found.p_value
    same = verdict(first, audition("c", 12), 4)
    assert (same.p_value, same.is_better, same.is_worse) == (1, False, False)


def test_few_samples_prove_nothing_however_much_better() -> None:
    drafts = [
        Audition(name, "run", {4: [Earned(24, rounds, 24, 24 - rounds)] * 5}, [])
        for name, rounds in (("a", 20), ("b", 5))
    ]
    found = verdict(*drafts, 4)
    assert abs(found.p_value - 2 / 2**5) < 0.01  # all five signs alike
    assert not found.is_better
