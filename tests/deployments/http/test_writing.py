"""Long answers are written by slices, and are the same bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.http.writing import json_bytes


@pytest.mark.parametrize(
    "value",
    [
        None,
        "é\n\ud83d\ude42".encode("utf-16", "surrogatepass").decode("utf-16"),
        [],
        {},
        {"a": [], "b": {}, "c": [1, "x", None, True, {"d": [2.5]}]},
        {"choices": [{"tokens": list(range(1000)), "top": [{"é": -0.5}] * 257}, {"empty": [[]] * 256}]},
        list(range(256)),
        list(range(257)),
        list(range(512)),
    ],
)
def test_slices_are_what_the_whole_is(value: Any) -> None:
    whole = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    assert json_bytes(value).decode() == whole


@pytest.mark.parametrize("value", [{"a": float("nan")}, [0.0] * 300 + [float("inf")]])
def test_what_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes(value)
