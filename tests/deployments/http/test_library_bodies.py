"""What libraries send is served, and has no field that is unknown: a service may refuse those."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from deployments.http.service import ApiSettings

from .bodies import MESSAGES, Json
from .conftest import Bench
from .library_bodies import LIBRARY_CHATS, LIBRARY_COMPLETIONS, LIBRARY_RESPONSES

PATHS = [
    ("/v1/completions", LIBRARY_COMPLETIONS, {"prompt": "def add"}),
    ("/v1/chat/completions", LIBRARY_CHATS, {"messages": MESSAGES}),
    ("/v1/responses", LIBRARY_RESPONSES, {"input": "Add."}),
]
SENT = [pytest.param(path, needed | body, id=name) for path, bodies, needed in PATHS for name, body in bodies.items()]


@pytest.fixture
def bench(tokenizer: PreTrainedTokenizerFast) -> Bench:
    bench = Bench(tokenizer, settings=ApiSettings(unknown_fields="refuse"), max_model_len=1024)
    bench.says("ok")
    return bench


@pytest.mark.parametrize(("path", "body"), SENT)
async def test_a_librarys_body_is_served(http: httpx2.AsyncClient, path: str, body: Json) -> None:
    answer = await http.post(path, json={"model": "demo"} | body)
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        assert answer.json().get("error") is None
        assert "ok" in answer.text
    else:
        assert '"error":{' not in answer.text


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        (1, "caller", {"type": "program", "caller_id": "p"}),
        (1, "namespace", "crm"),
        (1, "async", True),
        (2, "caller", {"type": "program", "caller_id": "p"}),
        (2, "namespace", "crm"),
    ],
)
async def test_calls_that_only_openai_has_are_refused_by_name(refused: Any, place: int, field: str, value: Any) -> None:
    items = [dict(item) for item in LIBRARY_RESPONSES["litellm 1.110: a call sent back"]["input"]]
    items[place][field] = value
    error = await refused("/v1/responses", {"model": "demo", "input": items})
    assert (error["code"], error["param"]) == ("unsupported_parameter", f"input[{place}].{field}")
