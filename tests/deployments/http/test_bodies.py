"""Each body that a client is known to send is served, or refused by a field that the API's table refuses."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from deployments.http.schemas.fields import REFUSED, REFUSED_IN_MESSAGES
from deployments.http.service import SequenceRequest
from specdec.core.types import TokenLogprobs
from tests.deployments.http.scripted import rounds

from .bodies import CHATS, COMPLETIONS, MESSAGES, Sent
from .conftest import Bench
from .test_api_table import rows

ENTRY = TokenLogprobs(-0.5, 1, ((5, -0.5), (6, -1.0), (7, -1.5), (8, -2.0), (9, -2.5)))
NOT_BY_THE_TABLE = {
    "messages[0].content[0].type": "unsupported_parameter",
    "tools[0].type": "unsupported_parameter",
    "tool_choice": "invalid_value",
    "tool_choice.type": "unsupported_parameter",
}


@pytest.fixture
def told(bench: Bench, tokenizer: PreTrainedTokenizerFast) -> Bench:
    """A service that tells of everything that it may be asked for."""
    ids = [*tokenizer.encode("return a + b"), 0]

    def script(request: SequenceRequest) -> Any:
        of_prompt = (None, *[ENTRY] * (len(request.prompt) - 1))
        logprobs = None if request.spec.sampling.logprobs is None else [ENTRY] * len(ids)
        return rounds(ids, 2, logprobs=logprobs, prompt_logprobs=of_prompt)

    bench.script = script
    return bench


@pytest.mark.parametrize("name", COMPLETIONS)
async def test_completions(told: Bench, http: httpx2.AsyncClient, name: str) -> None:
    await check(http, "/v1/completions", {"prompt": "def add"} | COMPLETIONS[name].body, COMPLETIONS[name])


@pytest.mark.parametrize("name", CHATS)
async def test_chats(told: Bench, http: httpx2.AsyncClient, name: str) -> None:
    await check(http, "/v1/chat/completions", {"messages": MESSAGES} | CHATS[name].body, CHATS[name])


async def check(http: httpx2.AsyncClient, path: str, body: dict[str, Any], sent: Sent) -> None:
    answer = await http.post(path, json={"model": "demo"} | body)
    if sent.param is None:
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.text
        assert answer.text.endswith("data: [DONE]\n\n") == bool(body.get("stream"))
        return
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == sent.param
    assert sent.param in error["message"]
    if error["code"] != NOT_BY_THE_TABLE.get(sent.param):
        assert error["code"] == "unsupported_parameter"
        in_message = sent.param.startswith("messages")
        assert sent.param.rpartition(".")[2] in (REFUSED_IN_MESSAGES if in_message else REFUSED)
        if not in_message:
            assert (sent.param, "refused") in [(name, kind) for name, kind, _ in rows("Completions and chat")]
