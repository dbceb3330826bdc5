"""Libraries that people write clients with, against a running service; behind ``make test-clients``.

Well-formed, not wise: the demo pair writes Python, so what is asked for by a schema is forced, not hoped for. The
service refuses unknown fields: every field that a library sends is one that the API knows.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.asked import MESSAGES, NUM_TOKENS, TEXT, Order, Weather
from tests.integration.running import RunningService, eventually, nothing_held

pytestmark = pytest.mark.timeout(900)
logger = logging.getLogger(__name__)

WORDS = ("text", "pieces")
FOUR = (*WORDS, "order", "call")
LOOP = (*FOUR, "loop")
ALL = (*LOOP, "streamed_order", "streamed_call")
ORDERS = ("order", "streamed_order")
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


class SpeculationMode(NamedTuple):
    """One way of a client to ask.

    Attributes:
        client: Its script is ``ask_CLIENT.py``.
        environment: Where it is installed, below ``.venv``; ``make test-clients`` makes it of the file of that name.
        name: Of the class in the script.
        things: What it asks for.
    """

    client: str
    environment: str
    name: str
    things: tuple[str, ...]


MODES = [
    SpeculationMode("openai", "openai3", "Completions", WORDS),
    SpeculationMode("openai", "openai3", "Chat", ALL),
    SpeculationMode("openai", "openai3", "Responses", ALL),
    SpeculationMode("langchain", "openai3", "Completions", WORDS),
    SpeculationMode("langchain", "openai3", "Chat", ALL),
    SpeculationMode("langchain", "openai3", "NamedTool", ORDERS),
    SpeculationMode("langchain", "openai3", "Responses", ALL),
    SpeculationMode("pydantic_ai", "openai3", "Chat", ALL),
    SpeculationMode("pydantic_ai", "openai3", "NativeOutputs", ORDERS),
    SpeculationMode("pydantic_ai", "openai3", "Responses", ALL),
    SpeculationMode("pydantic_ai", "openai3", "NativeOutputsOfResponses", ORDERS),
    SpeculationMode("litellm", "openai2", "Completions", WORDS),
    SpeculationMode("litellm", "openai2", "Chat", (*LOOP, "streamed_call")),
    SpeculationMode("litellm", "openai2", "Responses", LOOP),
    SpeculationMode("llama_index", "openai2", "Completions", WORDS),
    SpeculationMode("llama_index", "openai2", "Chat", (*LOOP, "streamed_call")),
    SpeculationMode("llama_index", "openai2", "JsonSchema", ("order",)),
    SpeculationMode("llama_index", "openai2", "Responses", LOOP),
    SpeculationMode("instructor", "openai2", "Tools", (*FOUR, "streamed_order", "retry")),
    SpeculationMode("instructor", "openai2", "JsonSchema", (*ORDERS, "retry")),
    SpeculationMode("instructor", "openai2", "Responses", (*ORDERS, "retry")),
    SpeculationMode("vllm_bench", "openai2", "Completions", (*WORDS, "order")),
    SpeculationMode("vllm_bench", "openai2", "Chat", (*WORDS, "order")),
]


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    running = RunningService("--unknown-fields", "refuse")
    yield running
    eventually(lambda: nothing_held(running), 60, "no sequence and no block is held")
    assert running.stop() == 0


@pytest.fixture(scope="module")
def report(service: RunningService) -> Callable[[SpeculationMode], dict[str, Any]]:
    """What a client's script told, which is run once."""

    @cache
    def run(client: str, environment: str) -> dict[str, Any]:
        python = Path(sys.prefix) / environment / "bin" / "python"
        command = [python, Path(__file__).with_name(f"ask_{client}.py"), service.url, service.model]
        ran = subprocess.run(command, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stderr
        told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        logger.warning("%s: %s", client, told["versions"])
        return told

    return lambda mode: run(mode.client, mode.environment)


@pytest.fixture(scope="module")
def whole(service: RunningService) -> dict[str, str | None]:
    """What the official client of our own environment gets."""
    client, options = service.client(), {"model": service.model, "temperature": 0, "max_tokens": NUM_TOKENS}
    answer = client.chat.completions.create(messages=MESSAGES, **options)
    text = client.completions.create(prompt=TEXT, **options).choices[0].text
    return {"Completions": text, "Chat": answer.choices[0].message.content}


@pytest.mark.parametrize(
    ("mode", "thing"),
    [pytest.param(mode, thing, id=f"{mode.client}-{mode.name}-{thing}") for mode in MODES for thing in mode.things],
)
def test_a_client_gets_what_it_asks_for(
    report: Callable[[SpeculationMode], dict[str, Any]], whole: dict[str, str | None], mode: SpeculationMode, thing: str
) -> None:
    came = report(mode)[mode.name][thing]
    assert not (isinstance(came, dict) and "error" in came), came["error"]
    text = whole.get(mode.name, whole["Chat"])
    match thing:
        case "text":
            assert came == text != ""
        case "pieces":
            assert "".join(came) == text
            assert sum(map(bool, came)) > 1
        case "order" | "streamed_order":
            Order.model_validate(came)
        case "loop":
            assert came.strip()
        case "retry":
            assert came == 2
        case _:
            name, arguments = came
            assert name == "Weather"
            Weather.model_validate_json(arguments)
