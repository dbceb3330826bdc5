"""Where a sequence ends."""

from __future__ import annotations

import pytest

from specdec.core.params import SamplingParams, StopCondition

from .reference import make_spec

EOS, STOP = 3, 4
LONG = 10_000


@pytest.mark.parametrize(
    ("length", "token", "fields", "max_model_len", "expected"),
    [
        (6, 9, {}, LONG, None),
        (6, EOS, {}, LONG, "stop"),
        (6, STOP, {}, LONG, "stop"),
        (12, 9, {}, LONG, "length"),
        (13, 9, {}, LONG, "length"),
        (11, 9, {}, LONG, None),
        (12, EOS, {}, LONG, "stop"),
        (6, 9, {}, 6, "length"),
        (6, 9, {}, 7, None),
        (6, EOS, {}, 6, "stop"),
        (6, EOS, {"ignore_eos": True}, LONG, None),
        (6, STOP, {"ignore_eos": True}, LONG, "stop"),
        (12, EOS, {"ignore_eos": True}, LONG, "length"),
        (6, EOS, {"min_tokens": 3}, LONG, "stop"),
        (6, EOS, {"min_tokens": 4}, LONG, None),
        (12, EOS, {"min_tokens": 10}, LONG, "length"),
    ],
)
def test_reason(length: int, token: int, fields: dict[str, int], max_model_len: int, expected: str | None) -> None:
    params = SamplingParams(stop_token_ids=(STOP,), **fields)  # type: ignore[arg-type]
    spec = make_spec(params, output_start=2, max_tokens=10, eos_token_ids=(EOS, 7))
    assert StopCondition.of(spec, max_model_len).walk(length - 1, (token,)) == (1, expected)


def test_walk_ends_at_the_first_reason_and_commits_nothing_after_it() -> None:
    spec = make_spec(output_start=2, max_tokens=5, eos_token_ids=(EOS,))
    assert StopCondition.of(spec, LONG).walk(2, (9, 9, 9)) == (3, None)
    assert StopCondition.of(spec, LONG).walk(2, (9, EOS, 9)) == (2, "stop")
    assert StopCondition.of(spec, LONG).walk(5, (9, 9, EOS)) == (2, "length")
    assert StopCondition.of(spec, LONG).walk(5, (9, EOS, 9)) == (2, "stop")
    assert StopCondition.of(spec, 4).walk(2, (9, 9, EOS)) == (2, "length")
    assert StopCondition.of(spec, LONG).walk(2, ()) == (0, None)


def test_a_log_that_is_finished_when_opened() -> None:
    spec = make_spec(output_start=3, max_tokens=3, eos_token_ids=(EOS,))
    assert StopCondition.of(spec, LONG).of_log(3, []) is None
    assert StopCondition.of(spec, LONG).of_log(3, [1, EOS]) == "stop"
    assert StopCondition.of(spec, LONG).of_log(3, [1, 1]) is None
    assert StopCondition.of(spec, LONG).of_log(3, [1, 1, 1]) == "length"
    assert StopCondition.of(spec, LONG).of_log(3, [1, 1, EOS]) == "stop"
    assert StopCondition.of(spec, 4).of_log(3, [1]) == "length"
    assert StopCondition.of(spec, 3).of_log(3, []) == "length"
    assert StopCondition.of(spec, 5).of_log(3, [1]) is None
