"""What a user may ask for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from specdec.core.errors import InvalidParameterError
from specdec.core.grammar import Grammar
from specdec.core.params import SamplingParams
from specdec.core.tokens import SharedTokens
from specdec.core.validation import (
    validated,
    validated_max_tokens,
    validated_num_speculative_tokens,
    validated_seed,
)

VOCAB = 100
NAN, INF = float("nan"), float("inf")
REFUSED: dict[str, list[Any]] = {
    "repetition_penalty": [0, -1, NAN, INF, 1e9, "1", True, None],
    "presence_penalty": [-2.1, 2.1, NAN, -INF, "0", False],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, None],
    "logit_bias": [
        ((VOCAB, 1.0),),
        ((-1, 1.0),),
        ((1, NAN),),
        ((1, INF),),
        ((1, -100.5),),
        ((1, 1.0), (1, 2.0)),
        ((1.0, 1.0),),
        ((True, 1.0),),
        ((1, "2"),),
        ((1,),),
        (1,),
        1,
        None,
    ],
    "allowed_token_ids": [
        *((VOCAB,), (-1,), (1.0,), (True,), ("1",), 5, None, "12", (0,) * (VOCAB + 1)),
        *(SharedTokens(tokens) for tokens in ((VOCAB,), (-1,), (0,) * (VOCAB + 1))),
    ],
    "bad_words": [((VOCAB,),), ((1, -1),), ((),), (1,), (("1",),), ((True,),), 5, None, "12", ("12",)],
    "min_tokens": [-1, 1.0, NAN, "3", True, 2**31, None],
    "temperature": [-0.1, 2.1, NAN, INF, "1", True, None],
    "top_k": [-2, 1.5, NAN, "5", True, None],
    "top_p": [0, 0.0, -0.5, 1.1, NAN, INF, "1", True],
    "min_p": [-0.1, 1.1, NAN, "0", True],
    "stop_token_ids": [(VOCAB,), (-1,), (1.0,), (True,), ("1",), 5, None, "12", (1, 1), (1,) * 1025],
    "ignore_eos": [1, 0, "true", None],
    "logprobs": [-1, 21, 1.0, NAN, "5", True],
    "prompt_logprobs": [-1, 21, 1.0, "5", False],
    "grammar": ["start: /a/", {"kind": "regex", "text": "a"}, Grammar("yaml", "a")],  # type: ignore[arg-type]
}


def test_every_field_has_a_check() -> None:
    assert {field.name for field in fields(SamplingParams)} == set(REFUSED)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_refused_by_name_and_with_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} must be ") as caught:
        validated(replace(SamplingParams(), **{name: value}), VOCAB)
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 10**6}, {"top_k": 10**6}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 2, "top_p": 1, "min_p": 1}, {"temperature": 2.0, "top_p": 1.0, "min_p": 1.0}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"logit_bias": [[0, -100], [99, 100]]}, {"logit_bias": ((0, -100.0), (99, 100.0))}),
        ({"stop_token_ids": [0, 99]}, {"stop_token_ids": (0, 99)}),
        ({"allowed_token_ids": [0, 99]}, {"allowed_token_ids": SharedTokens((0, 99))}),
        ({"bad_words": [[0, 99], [5], [0, 99]]}, {"bad_words": ((0, 99), (5,))}),
        ({"logprobs": 20, "prompt_logprobs": 0}, {"logprobs": 20, "prompt_logprobs": 0}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
    ],
)
def test_allowed_values_come_back_in_their_types(given: dict[str, Any], expected: dict[str, Any]) -> None:
    result = validated(SamplingParams(**given), VOCAB)
    assert result == SamplingParams(**expected)
    assert isinstance(result.temperature, float)
    assert isinstance(result.logit_bias, tuple)
    hash(result)


def test_more_logprobs_than_tokens_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="from 0 to 7"):
        validated(SamplingParams(logprobs=8), 7)


def test_a_huge_value_makes_a_short_message() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        validated(SamplingParams(ignore_eos="x" * 10**6), VOCAB)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [0, -1, 1.0, NAN, "5", True, None, 2**31])
def test_max_tokens_refused(value: Any) -> None:
    with pytest.raises(InvalidParameterError, match="max_tokens must be an integer of at least 1") as caught:
        validated_max_tokens(value)
    assert caught.value.parameter == "max_tokens"


def test_max_tokens_below_min_tokens_is_refused() -> None:
    assert validated_max_tokens(5, min_tokens=5) == 5
    with pytest.raises(InvalidParameterError) as caught:
        validated_max_tokens(4, min_tokens=5)
    assert caught.value.parameter == "min_tokens"


def test_seeds_are_any_integer_modulo_two_to_the_64() -> None:
    assert [validated_seed(seed) for seed in (0, -1, 2**64, 2**64 + 5, 2**63)] == [0, 2**64 - 1, 0, 5, 2**63]
    for value in (True, False, 1.0, "1", None, NAN):
        with pytest.raises(InvalidParameterError, match="seed must be an integer"):
            validated_seed(value)


def test_num_speculative_tokens_from_0_to_64() -> None:
    assert [validated_num_speculative_tokens(value) for value in (None, 0, 64)] == [None, 0, 64]
    for value in (-1, 65, 1.0, True, "4", NAN):
        with pytest.raises(InvalidParameterError, match="num_speculative_tokens must be an integer from 0 to 64"):
            validated_num_speculative_tokens(value)
