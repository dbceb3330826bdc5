"""``docs/api-fields.md`` says of every field what the schemas say."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from deployments.http.routes.completions import DetokenizeBody, TokenizeBody
from deployments.http.schemas.chat import ChatBody, CompletionBody, TemplatedBody
from deployments.http.schemas.common import SamplingBody
from deployments.http.schemas.fields import (
    IGNORED,
    IGNORED_IN_MESSAGES,
    IGNORED_IN_RESPONSES,
    REFUSED,
    REFUSED_IN_MESSAGES,
    REFUSED_IN_RESPONSES,
    is_neutral,
)
from deployments.http.schemas.responses import ResponsesBody

from .conftest import Bench

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "api-fields.md").read_text()
NAME = re.compile(r"`([a-z_]+)`")
ROW = re.compile(r"^\| (`[a-z_`, ]+`) \| (served|ignored|refused) \| ?(.*?) ?\|$", re.MULTILINE)
ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
VALUE = re.compile(r"`([^`]+)`")


def rows(heading: str) -> list[tuple[str, str, str]]:
    """Name, what becomes of it, and the rest, of the table under a heading."""
    text = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    return [(name, kind, rest) for names, kind, rest in ROW.findall(text) for name in NAME.findall(names)]


def test_every_field_has_one_row_and_it_is_true() -> None:
    table = rows("Completions and chat")
    assert max(Counter(name for name, _, _ in table).values()) == 1
    kinds = {kind: {name for name, its, _ in table if its == kind} for kind in ("served", "ignored", "refused")}
    assert kinds["served"] == set(CompletionBody.model_fields) | set(ChatBody.model_fields)
    assert kinds["ignored"] == IGNORED
    assert kinds["refused"] == set(REFUSED)


def test_a_refused_fields_row_has_its_neutral_values() -> None:
    for name, kind, rest in rows("Completions and chat"):
        if kind == "refused":
            told = [json.loads(value) for value in VALUE.findall(rest)]
            assert len(told) == len(REFUSED[name]), name
            assert all(is_neutral(value, REFUSED[name]) for value in told), name


def test_a_field_of_one_kind_of_body_says_so() -> None:
    completion, chat = set(CompletionBody.model_fields), set(ChatBody.model_fields)
    for name, kind, rest in rows("Completions and chat"):
        if kind == "served" and (name in completion) != (name in chat):
            assert rest.startswith("completions:" if name in completion else "chat:"), name


def test_a_response_has_rows_for_what_is_its_own() -> None:
    table = rows("Responses")
    assert max(Counter(name for name, _, _ in table).values()) == 1
    kinds = {kind: {name for name, its, _ in table if its == kind} for kind in ("served", "ignored", "refused")}
    shared = set(SamplingBody.model_fields) | set(TemplatedBody.model_fields)
    assert kinds["served"] == set(ResponsesBody.model_fields) - shared
    assert kinds["ignored"] == IGNORED_IN_RESPONSES - IGNORED
    assert kinds["refused"] == set(REFUSED_IN_RESPONSES) - set(REFUSED)
    for name, kind, rest in table:
        if kind == "refused":
            told = [json.loads(value) for value in VALUE.findall(rest)]
            assert len(told) == len(REFUSED_IN_RESPONSES[name]), name
            assert all(is_neutral(value, REFUSED_IN_RESPONSES[name]) for value in told), name


def test_messages_and_tokens() -> None:
    told = PAGE.split("In messages ")[1].split("\n\n")[0]
    assert set(NAME.findall(told)) == IGNORED_IN_MESSAGES | set(REFUSED_IN_MESSAGES)
    assert {name for name, _, _ in rows("Tokens")} == set(TokenizeBody.model_fields) | set(DetokenizeBody.model_fields)


def test_every_endpoint_is_listed(bench: Bench) -> None:
    listed = set(
        re.findall(
            r"`(?:GET|POST) (/[^`]*)`", (DOCS / "api.md").read_text().split("## Every endpoint\n")[1].split("\n## ")[0]
        )
    )
    served = {path.replace("{name:path}", "{name}") for path in bench.app.openapi()["paths"]}
    assert served <= listed
    assert listed - served == {"/openapi.json", "/ui", *ADAPTERS}
