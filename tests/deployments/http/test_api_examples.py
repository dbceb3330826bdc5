"""Each curl command of ``docs/api.md``, sent to the API over the demo pair in this process, and the answer shown."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from deployments.http.app import create_app
from deployments.http.service import ApiSettings

from .engine_service import EngineService

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "api.md").read_text()
EXAMPLES = re.findall(r"^```bash\n(curl .*?)\n```\n\n```(json|text)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def request_of(command: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a curl command; the model is called ``demo`` here."""
    words = shlex.split(command)
    (url,) = [word for word in words if word.startswith("http://")]
    body = json.loads(words[words.index("-d") + 1])
    return url.removeprefix("http://127.0.0.1:8000"), body | {"model": "demo"}


def contains(answer: Any, shown: Any) -> bool:
    """Whether an answer has all that is shown of it."""
    if isinstance(shown, dict):
        return isinstance(answer, dict) and all(contains(answer.get(key), value) for key, value in shown.items())
    if isinstance(shown, list):
        return len(answer) == len(shown) and all(map(contains, answer, shown))
    return answer == ("demo" if shown == "specdec-demo" else shown)


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events; the last line says that it is done."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def service() -> EngineService:
    return EngineService()


@pytest.mark.parametrize(("command", "kind", "shown"), EXAMPLES, ids=lambda value: value.split()[-1][:20])
async def test_the_answer_is_the_one_that_is_shown(
    service: EngineService, tokenizer: PreTrainedTokenizerFast, command: str, kind: str, shown: str
) -> None:
    path, body = request_of(command)
    app = create_app(service, ApiSettings(unknown_fields="refuse"), tokenizer)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api") as http:
        answer = (await http.post(path, json=body)).text
    if kind == "json":
        assert contains(json.loads(answer), json.loads(shown)), answer
    else:  # how a stream is cut depends on timing
        said, wanted = events(answer), events(shown)
        assert contains(said[-1], wanted[-1]), answer
        texts = ["".join(choice["text"] for event in one for choice in event["choices"]) for one in (said, wanted)]
        assert texts[0] == texts[1]


async def test_the_command_on_adapters_lacks_nothing_but_its_adapter(
    service: EngineService, tokenizer: PreTrainedTokenizerFast
) -> None:
    (command,) = re.findall(r"^ {4}(curl .*)$", (DOCS / "adapters.md").read_text(), flags=re.MULTILINE)
    path, body = request_of(command)
    app = create_app(service, ApiSettings(unknown_fields="refuse"), tokenizer)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api") as http:
        answer = await http.post(path, json=body | {"model": "sql"})
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "'sql'" in answer.json()["error"]["message"]


def test_every_example_of_the_page_is_sent() -> None:
    assert len(EXAMPLES) == PAGE.count("\n```bash\ncurl") >= 10
