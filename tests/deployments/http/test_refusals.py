"""What a body must not hold: each row is refused by the name of its field, and no sequence is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .bodies import CALL
from .conftest import Bench
from .responses.responses_client import LOGPROBS

COMPLETIONS, CHAT, RESPONSES, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"
MESSAGES = [{"role": "user", "content": "x"}]
NEEDED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "demo", "prompt": "x"},
    CHAT: {"model": "demo", "messages": MESSAGES},
    RESPONSES: {"model": "demo", "input": "Add."},
}
UNSUPPORTED, INVALID = "unsupported_parameter", "invalid_value"
OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.5),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 1.5),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("logit_bias", {"4096": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": "2"}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", [1]),
    ("stop_token_ids", [4096]),
    ("min_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 2**80),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("n", 0),
    ("n", 129),
    ("seed", 2**64),
    ("num_speculative_tokens", -1),
    ("num_speculative_tokens", 65),
    ("exactness", "strict"),
    ("exactness", "bits"),
    ("stop", ["x"] * 17),
    ("stop", ["x" * 1025]),
    ("cache_salt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [4096]),
    ("prompt", [-1]),
    ("prompt", ["a", 1]),
    ("prompt", [1.0]),
    ("prompt", None),
    ("prompt", {"a": 1}),
]
OF_ANOTHER_TYPE: list[tuple[str, Any]] = [
    ("temperature", "1"),
    ("temperature", True),
    ("top_k", 1.5),
    ("max_tokens", "16"),
    ("max_tokens", 16.0),
    ("n", True),
    ("seed", "7"),
    ("echo", 1),
    ("stream", "true"),
    ("ignore_eos", 0),
    ("disable_spec_decode", 1),
    ("logprobs", True),
    ("prompt_logprobs", True),
    ("prompt_logprobs", "2"),
    ("model", 3),
]
FURTHER: list[tuple[str, Any]] = [
    ("allowed_token_ids", []),
    ("allowed_token_ids", [4096]),
    ("allowed_token_ids", [2**31]),
    ("allowed_token_ids", [1, "2"]),
    ("allowed_token_ids", [1] * 4097),
    ("stop_token_ids", [5, 5]),
    ("stop_token_ids", list(range(1025))),
    ("stop", ["x"] * 1025),
    ("prompt", ["x"] * 4097),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("guided_choice", ["x"] * 16385),
    ("response_format", {"type": "structural_tag", "x": [0] * 16384}),
    ("structured_outputs", {"json": json.loads("[" * 150 + "]" * 150)}),
    ("bad_words", "x"),
    ("bad_words", [""]),
    ("bad_words", ["x"] * 65),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("request_id", "a b"),
    ("request_id", ""),
    ("skip_special_tokens", 1),
    ("priority", 1.5),
]
UNSUPPORTED_IN_CHATS: list[tuple[str, Any]] = [
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("web_search_options", {}),
]
IN_MESSAGES: list[tuple[Any, str]] = [
    ({"role": "function", "content": "x"}, "messages[0].role"),
    ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
    ({"role": "tool", "tool_call_id": "1"}, "messages[0].content"),
    ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
    ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
    ({"role": "user", "content": "x", "refusal": "No."}, "messages[0].refusal"),
    ({"role": "assistant", "content": None, "refusal": 1}, "messages[0].refusal"),
    ({"role": "tool", "content": None, "tool_call_id": "1"}, "messages[0].content"),
    ({"role": "system", "content": None}, "messages[0].content"),
    ({"role": "assistant", "tool_calls": [CALL] * 129}, "messages[0].tool_calls"),
    (
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{"}}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "user", "content": []}, "messages[0].content"),
    ({"role": "user", "content": 7}, "messages[0].content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
    ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls[0].id"),
    ("x", "messages[0]"),
]
WITHOUT_EFFECT: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"model": "demo", "prompt": "x", "stream_options": {}}, "stream_options"),
    ("/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "stream_options": {}}, "stream_options"),
    ("/tokenize", {"prompt": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
    ("/tokenize", {"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
    (
        "/tokenize",
        {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
    ),
]
OF_RESPONSES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "string or a list"),
    ({"input": []}, "input", "at least 1"),
    ({"input": [7]}, "input[0]", "an object"),
    ({"input": [{"role": "user"}]}, "input[0].content", "required"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'user'"),
    ({"input": [{"role": "user", "content": 7}]}, "input[0].content", "input_text"),
    ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type", "item_reference is not supported"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type", "web_search_call is not supported"),
    ({"input": [{"type": 7, "role": "user", "content": "x"}]}, "input[0].type", "message"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "input_text",
    ),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "a message"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
    ({"max_output_tokens": 4000}, "max_output_tokens", "max_output_tokens is 4000"),
    ({"input": "x" * 2000, "instructions": "y"}, "input", "the prompt has"),
    ({"max_tokens": 5}, "max_tokens", "the field to send is max_output_tokens"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages", "the field to send is input"),
    ({"response_format": {"type": "json_object"}}, "response_format", "the field to send is text"),
    ({"n": 2}, "n", "only 1"),
    ({"store": True}, "store", "keeps no responses"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"background": True}, "background", "only false"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
    ({"truncation": "some"}, "truncation", "disabled"),
    ({"truncation": "auto", "input": "x" * 2000}, "input", "the prompt has"),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
    ({**LOGPROBS, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"include": ["everything"]}, "include[0]", "message.output_text.logprobs"),
    ({"stream_options": {}}, "stream_options", "stream"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a", "512"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
    ({"temperature": 3}, "temperature", "2"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "is needed"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "is needed"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "objec"}}}},
        "text.format.schema",
        "Invalid type: objec",
    ),
    (
        {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
        "guided_regex",
        "text.format and guided_regex exclude each other",
    ),
]
CODES = {
    ("exactness", "strict"): UNSUPPORTED,
    ("max_tokens", 2**80): "context_length_exceeded",
}


def code_of(field: str, value: Any) -> str:
    """Of a value out of range."""
    return INVALID if isinstance(value, (list, dict)) else CODES.get((field, value), INVALID)


ROWS: list[tuple[str, dict[str, Any], str, str, str]] = [
    *((COMPLETIONS, {field: value}, field, code_of(field, value), "") for field, value in OUT_OF_RANGE),
    *((COMPLETIONS, {field: value}, field, "", "") for field, value in (*OF_ANOTHER_TYPE, *FURTHER)),
    *((COMPLETIONS, {field: 2}, field, UNSUPPORTED, field) for field in ("best_of", "suffix", "moderation")),
    *(
        (path, {"acceptance": rule}, "acceptance", UNSUPPORTED, "acceptance is not supported; there is one rule")
        for path in (COMPLETIONS, CHAT)
        for rule in ("coupled", "rejection")
    ),
    *((CHAT, {field: value}, field, UNSUPPORTED, "") for field, value in UNSUPPORTED_IN_CHATS),
    *((CHAT, {"messages": [message]}, param, "", "") for message, param in IN_MESSAGES),
    *((path, body, param, "", "") for path, body, param in WITHOUT_EFFECT),
    *((RESPONSES, body, param, "", reason) for body, param, reason in OF_RESPONSES),
    (COMPLETIONS, {"receipt": True}, "receipt", UNSUPPORTED, "send its request again with the same seed"),
    (COMPLETIONS, {"logit_bias": {"4096": 1}}, "logit_bias", INVALID, "biases of token ids from 0 to 4095, not 4096"),
    (COMPLETIONS, {"priority": 2**31}, "priority", INVALID, "less than 2147483648"),
    (COMPLETIONS, {"priority": -(2**31) - 1}, "priority", INVALID, "greater than or equal to -2147483648"),
    (COMPLETIONS, {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "", ""),
    (COMPLETIONS, {"model": None}, "model", "", ""),
    (CHAT, {"messages": None}, "messages", "", ""),
    (CHAT, {"messages": []}, "messages", "", ""),
    (TOKENIZE, {}, "prompt", "", ""),
    ("/detokenize", {"tokens": [4096]}, "tokens", "", ""),
    ("/detokenize", {"tokens": ["1"]}, "tokens[0]", "", ""),
]


@pytest.mark.parametrize(("path", "body", "param", "code", "part"), ROWS)
async def test_it_is_refused_by_its_name(
    bench: Bench, refused: Callable[..., Any], path: str, body: dict[str, Any], param: str, code: str, part: str
) -> None:
    error = await refused(path, NEEDED.get(path, {}) | body)
    assert error["param"] == param or error["param"].startswith(f"{param}[")
    assert error["type"] == "invalid_request_error"
    assert error["code"] in (code or error["code"],)
    assert part in error["message"]
    if path == RESPONSES:
        assert param in error["message"] or param == "input"
        assert not any(name in error["message"] for name in ("max_completion_tokens", "json_schema.schema"))
    assert not bench.service.opened


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, body in NEEDED.items() for field in body])
async def test_a_field_that_is_missing_is_named(refused: Callable[..., Any], path: str, field: str) -> None:
    assert (await refused(path, {name: NEEDED[path][name] for name in NEEDED[path] if name != field}))["param"] == field
