"""What tests of ``/v1/responses`` share: bodies, and a reader of streams that checks each event's form."""

from __future__ import annotations

import json
from typing import Any

import httpx2
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

PATH = "/v1/responses"
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
ASK = {"model": "demo", "input": "Add."}
Json = dict[str, Any]
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def checked(response: Json) -> Response:
    """A response, after the official client's types have taken it as it is."""
    return Response.model_validate(response)


async def whole(http: httpx2.AsyncClient, **fields: Any) -> Json:
    """A response's own JSON, of the form that the official client's types ask for."""
    answer = await http.post(PATH, json=ASK | fields)
    assert answer.status_code == 200, answer.text
    checked(answer.json())
    return answer.json()


async def events(http: httpx2.AsyncClient, **fields: Any) -> list[Json]:
    """The events of a stream: each of the form of its type, numbered without a gap, under its own name."""
    answer = await http.post(PATH, json=ASK | fields | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read_events(answer.text)


def read_events(text: str) -> list[Json]:
    """The same of what was sent."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert _EVENTS.validate_python(event).type == event["type"]
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def rebuilt(found: list[Json]) -> list[Json]:
    """The output items as the events alone tell of them, checked against what each event repeats."""
    items: list[Json] = []
    for event in found:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(json.loads(json.dumps(event["item"])))
            case "response.content_part.added":
                assert event["content_index"] == len(_of(items, event)["content"])
                _of(items, event)["content"].append(dict(event["part"]))
            case "response.output_text.delta" | "response.reasoning_text.delta":
                part = _of(items, event)["content"][event["content_index"]]
                part["text"] += event["delta"]
                if "logprobs" in event:
                    part["logprobs"] = part["logprobs"] + event["logprobs"]
            case "response.function_call_arguments.delta":
                _of(items, event)["arguments"] += event["delta"]
            case "response.output_text.done" | "response.reasoning_text.done":
                part = _of(items, event)["content"][event["content_index"]]
                assert (part["text"], part.get("logprobs")) == (event["text"], event.get("logprobs"))
            case "response.content_part.done":
                assert _of(items, event)["content"][event["content_index"]] == event["part"]
            case "response.function_call_arguments.done":
                assert _of(items, event)["arguments"] == event["arguments"]
            case "response.output_item.done":
                item = items[event["output_index"]]
                assert item["status"] == "in_progress"
                item["status"] = event["item"]["status"]
                assert item == event["item"]
    return items


def _of(items: list[Json], event: Json) -> Json:
    item = items[event["output_index"]]
    assert item["id"] == event["item_id"]
    return item
