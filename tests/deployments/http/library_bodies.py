"""Bodies as libraries were seen to send them, at the versions that ``tests/clients`` runs.

What is sent back of an earlier answer is what most of them add fields to.
"""

from __future__ import annotations

from .bodies import MESSAGES, USAGE, Json

SCHEMA: Json = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"], "title": "City", "type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Json = {"name": "Weather", "description": "Of a city.", "parameters": SCHEMA}
TOOL: Json = {"type": "function", "function": FUNCTION | {"strict": True}}
NAMED: Json = {"type": "function", "function": {"name": "Weather"}}
FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "Weather", "schema": SCHEMA, "strict": True}}
ARGUMENTS = '{"city": "Rome"}'
CALL: Json = {"id": "call_1", "type": "function", "function": {"name": "Weather", "arguments": ARGUMENTS}}
RESULT: Json = {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}
PARSED: Json = {"name": "Weather", "arguments": ARGUMENTS, "parsed_arguments": {"city": "Rome"}}
DUMPED: Json = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "role": "assistant"}
BENCH: Json = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}

LIBRARY_COMPLETIONS: dict[str, Json] = {
    "langchain-openai 1.7: OpenAI": {
        "prompt": ["def add"],
        "frequency_penalty": 0,
        "logprobs": None,
        "max_tokens": 24,
        "n": 1,
        "presence_penalty": 0,
        "seed": None,
        "temperature": 0.0,
        "top_p": 1,
    },
    "llama-index-llms-openai-like 0.8": {"prompt": "def add", "max_tokens": 24, "stream": False, "temperature": 0.0},
    "vllm bench serve: openai": {"repetition_penalty": 1.0, "max_tokens": 24, "logprobs": None, **USAGE},
    "vllm bench serve: openai, all flags": {
        "max_tokens": 24,
        "logprobs": None,
        "ignore_eos": True,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        **BENCH,
        **USAGE,
    },
    "vllm bench serve: extra body": {"max_tokens": 24, "structured_outputs": {"json": SCHEMA}, **USAGE},
}

LIBRARY_CHATS: dict[str, Json] = {
    "openai 3.57: a call of parse, sent back": {
        "messages": [
            *MESSAGES,
            {"content": None, "tool_calls": [CALL | {"function": PARSED}], "parsed": None, **DUMPED},
            RESULT,
        ],
        "tools": [TOOL],
        "tool_choice": "none",
    },
    "openai 3.57: a call of a stream, sent back": {
        "messages": [
            *MESSAGES,
            {"content": None, "tool_calls": [CALL | {"index": 0}], "parsed": None, **DUMPED},
            RESULT,
        ],
        "tools": [TOOL],
    },
    "openai 3.57: an object of parse, sent back": {
        "messages": [
            *MESSAGES,
            {"content": ARGUMENTS, "tool_calls": None, "parsed": {"city": "Rome"}, **DUMPED},
            MESSAGES[1],
        ]
    },
    "langchain-openai 1.7: a call sent back": {
        "messages": [*MESSAGES, {"content": None, "role": "assistant", "tool_calls": [CALL]}, RESULT],
        "max_completion_tokens": 24,
        "parallel_tool_calls": False,
        "stream": False,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "none",
    },
    "langchain-openai 1.7: function calling": {
        "max_completion_tokens": 24,
        "parallel_tool_calls": False,
        "stream": True,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": NAMED,
    },
    "pydantic-ai 2.68: an output tool": {
        "max_completion_tokens": 24,
        "parallel_tool_calls": False,
        "tool_choice": "required",
        "tools": [TOOL],
        **USAGE,
    },
    "litellm 1.110: a call sent back": {
        "messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}, RESULT],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "none",
        "parallel_tool_calls": False,
    },
    "llama-index-llms-openai-like 0.8: chat_with_tools": {
        "parallel_tool_calls": False,
        "stream": False,
        "tool_choice": "required",
        "tools": [{"type": "function", "function": FUNCTION | {"strict": False}}],
    },
    "instructor 1.17: a retry": {
        "messages": [
            *MESSAGES,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {**RESULT, "name": "Weather", "content": "Validation Error found: no rain."},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": NAMED,
    },
    "instructor 1.17: JSON_SCHEMA": {"response_format": FORMAT, "stream": True},
    "vllm bench serve: openai-chat": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Add."}]}],
        "max_completion_tokens": 24,
        "ignore_eos": True,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        **BENCH,
        **USAGE,
    },
}

_SAID: Json = {"role": "user", "content": "Add."}
_CALLED: Json = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "Weather", "arguments": ARGUMENTS}
_GAVE: Json = {"type": "function_call_output", "call_id": "call_1", "output": "Rain."}
_FUNCTION: Json = {"type": "function", **FUNCTION}
_NULLS: Json = {"caller": None, "namespace": None, "status": "completed"}

LIBRARY_RESPONSES: dict[str, Json] = {
    "openai 3.57: a call of parse, as its own object dumps it": {
        "input": [_SAID, {**_CALLED, **_NULLS, "async_": None, "parsed_arguments": {"city": "Rome"}}, _GAVE],
        "tools": [_FUNCTION | {"strict": True}],
    },
    "openai 3.57: an object of parse, sent back": {
        "input": [
            _SAID,
            {
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "type": "message",
                "phase": None,
                "content": [
                    {
                        "annotations": [],
                        "text": ARGUMENTS,
                        "type": "output_text",
                        "logprobs": None,
                        "parsed": {"city": "Rome"},
                    }
                ],
            },
            _SAID,
        ]
    },
    "openai 3.57: all fields of a call and its result": {
        "input": [
            _SAID,
            {**_CALLED, "async": False, "caller": {"type": "direct"}},
            {**_GAVE, "id": None, "name": "Weather", **_NULLS},
        ]
    },
    "litellm 1.110: a call sent back": {"input": [_SAID, {**_CALLED, **_NULLS}, _GAVE], "tool_choice": "none"},
    "llama-index-llms-openai-like 0.8": {
        "include": None,
        "input": "Add.",
        "instructions": None,
        "max_output_tokens": 24,
        "metadata": None,
        "previous_response_id": None,
        "store": False,
        "stream": False,
        "temperature": 0.0,
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    },
    "instructor 1.17: RESPONSES_TOOLS": {
        "input": [_SAID],
        "text": {"format": {"type": "json_schema", "name": "Weather", "strict": True, "schema": SCHEMA}},
        "tool_choice": {"type": "function", "name": "Weather"},
        "tools": [_FUNCTION],
    },
    "pydantic-ai 2.68: a call sent back": {
        "input": [_SAID, {name: value for name, value in _CALLED.items() if name != "id"}, _GAVE],
        "max_output_tokens": 24,
        "parallel_tool_calls": False,
        "stream": False,
        "tool_choice": "none",
        "tools": [_FUNCTION | {"strict": True}],
    },
}
