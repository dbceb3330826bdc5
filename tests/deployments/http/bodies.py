"""Bodies as clients send them: OpenAI's, vLLM's, llama.cpp's, LangChain's, guidellm's and others'."""

from __future__ import annotations

from typing import Any, NamedTuple

Json = dict[str, Any]

MESSAGES: list[Json] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Add."}]
PARTS: list[Json] = [{"role": "user", "content": [{"type": "text", "text": "Add."}, {"type": "text", "text": "Now."}]}]
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL: Json = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USAGE: Json = {"stream": True, "stream_options": {"include_usage": True}}
GUIDELLM: Json = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
LLAMA_DEFAULTS: Json = {
    "temperature": 0.8,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "n_predict": -1,
    "n_keep": 0,
    "n_probs": 0,
    "grammar": "",
    "cache_prompt": True,
    "timings_per_token": False,
    "samplers": [],
    "id_slot": -1,
}
VLLM_DEFAULTS: Json = {
    "best_of": None,
    "echo": False,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "logprobs": None,
    "max_tokens": 16,
    "n": 1,
    "presence_penalty": 0.0,
    "seed": None,
    "stop": [],
    "stream": False,
    "stream_options": None,
    "suffix": None,
    "temperature": None,
    "top_p": None,
    "user": None,
    "use_beam_search": False,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "length_penalty": 1.0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "allowed_token_ids": None,
    "prompt_logprobs": None,
    "add_special_tokens": True,
    "response_format": None,
    "structured_outputs": None,
    "guided_json": None,
    "priority": 0,
    "request_id": "cmpl-1",
    "logits_processors": None,
    "return_token_ids": None,
    "return_tokens_as_token_ids": None,
    "cache_salt": None,
    "kv_transfer_params": None,
    "vllm_xargs": None,
}


class Sent(NamedTuple):
    """A body, and what becomes of it.

    Attributes:
        body: Without ``model``, and without ``prompt`` or ``messages`` where those do not matter.
        param: The field it is refused for; None where it is served.
    """

    body: Json
    param: str | None = None


COMPLETIONS: dict[str, Sent] = {
    "openai: text": Sent({"prompt": "def add", "max_tokens": 7, "temperature": 0}),
    "openai: ids": Sent({"prompt": [5, 6, 7]}),
    "openai: several": Sent({"prompt": ["def", "class"], "n": 2}),
    "openai: lists of ids": Sent({"prompt": [[5, 6], [7]]}),
    "openai: logprobs and echo": Sent({"logprobs": 5, "echo": True, "max_tokens": 0}),
    "openai: penalties": Sent({"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"50": -100}}),
    "openai: stop": Sent({"stop": ["\n", "END"], "seed": 7, "user": "me"}),
    "openai: stream": Sent({**USAGE}),
    "openai: best_of": Sent({"best_of": 3}, "best_of"),
    "openai: best_of 1": Sent({"best_of": 1, "n": 1}),
    "openai: suffix": Sent({"suffix": "return"}, "suffix"),
    "langchain: OpenAI": Sent(
        {
            "prompt": ["def add"],
            "temperature": 0.7,
            "max_tokens": 20,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "n": 1,
            "logit_bias": {},
            "seed": None,
            "logprobs": None,
            "stop": ["\n\n"],
        }
    ),
    "langchain: VLLMOpenAI": Sent({"top_k": -1, "skip_special_tokens": True, "spaces_between_special_tokens": True}),
    "vllm: all at their default": Sent(VLLM_DEFAULTS),
    "vllm: beam search": Sent({"use_beam_search": True, "n": 2}, "use_beam_search"),
    "vllm: length penalty": Sent({"length_penalty": 0.8}, "length_penalty"),
    "vllm: bans": Sent({"allowed_token_ids": [5, 6], "bad_words": ["foo", "bar baz"]}),
    "vllm: scoring": Sent({"prompt_logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True, "logprobs": 1}),
    "vllm: ids out": Sent({"return_token_ids": True, "detokenize": True}),
    "vllm: benchmark": Sent({"ignore_eos": True, "temperature": 0.0, "repetition_penalty": 1.0, **USAGE}),
    "vllm: truncation": Sent({"truncate_prompt_tokens": 2, "add_special_tokens": False}),
    "vllm: guided choice": Sent({"guided_choice": ["yes", "no"]}),
    "vllm: guided regex": Sent({"guided_regex": "[a-z]+"}),
    "vllm: structured outputs": Sent({"structured_outputs": {"json": SCHEMA}}),
    "vllm: priority": Sent({"priority": 5}),
    "vllm: disaggregated": Sent({"kv_transfer_params": {"do_remote_decode": True}}),
    "sglang: defaults": Sent({"regex": "", "ebnf": "", "no_stop_trim": False, "rid": "1", "lora_path": None}),
    "sglang: regex": Sent({"regex": "a+"}, "regex"),
    "llama.cpp: all at their default": Sent(LLAMA_DEFAULTS),
    "llama.cpp: n_predict": Sent({"n_predict": 64}, "n_predict"),
    "text-generation-webui": Sent({"typical_p": 1, "tfs": 1, "top_a": 0, "mode": "instruct", "preset": None}),
    "guidellm": Sent({"max_tokens": 32, "ignore_eos": True, "stop": None, **GUIDELLM}),
    "lm-eval": Sent({"prompt": ["def add"], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234, "stop": None}),
    "litellm": Sent({"max_tokens": 9, "metadata": {"user_api_key": "x"}, "drop_params": True, "num_retries": 2}),
}

CHATS: dict[str, Sent] = {
    "openai: messages": Sent({}),
    "openai: parts": Sent({"messages": PARTS}),
    "openai: developer": Sent({"messages": [{"role": "developer", "content": "Be short."}, MESSAGES[1]]}),
    "openai: names": Sent({"messages": [{"role": "user", "content": "Add.", "name": "me"}]}),
    "openai: an answer sent back": Sent(
        {
            "messages": [
                MESSAGES[1],
                {"role": "assistant", "content": "ok", "refusal": None, "annotations": [], "tool_calls": None},
                MESSAGES[1],
            ]
        }
    ),
    "openai: everything it calls default": Sent(
        {
            "max_completion_tokens": 9,
            "n": 1,
            "temperature": 1,
            "top_p": 1,
            "logprobs": False,
            "store": False,
            "response_format": {"type": "text"},
            "service_tier": "auto",
            "parallel_tool_calls": True,
            "tools": [],
            "tool_choice": "none",
            "modalities": ["text"],
            "metadata": {},
            "verbosity": "medium",
            "user": "me",
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "reasoning_effort": None,
            "audio": None,
        }
    ),
    "openai: prediction": Sent({"prediction": {"type": "content", "content": "def add"}}),
    "openai: stream": Sent({**USAGE, "logprobs": True, "top_logprobs": 3}),
    "openai: obfuscation": Sent({"stream": True, "stream_options": {"include_obfuscation": False}}),
    "openai: tools": Sent({"tools": [TOOL], "tool_choice": "auto"}),
    "openai: strict tools": Sent(
        {"tools": [{"type": "function", "function": TOOL["function"] | {"strict": True}}], "parallel_tool_calls": False}
    ),
    "openai: a choice among no tools": Sent({"tool_choice": "required"}, "tool_choice"),
    "openai: allowed tools": Sent(
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}
    ),
    "openai: a tool of another kind": Sent({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    "openai: functions": Sent({"functions": [TOOL["function"]]}, "functions"),
    "openai: JSON mode": Sent({"response_format": {"type": "json_object"}}),
    "openai: JSON schema": Sent(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}}
    ),
    "openai: a call sent back": Sent(
        {"messages": [MESSAGES[1], {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
    ),
    "openai: a tool's answer": Sent(
        {
            "messages": [
                MESSAGES[1],
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "3", "tool_call_id": "1"},
            ],
            "tools": [TOOL],
        }
    ),
    "openai: an image": Sent(
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    "openai: reasoning": Sent({"reasoning_effort": "high"}),
    "openai: web search": Sent({"web_search_options": {}}, "web_search_options"),
    "openai: audio": Sent({"modalities": ["text", "audio"], "audio": {"voice": "x", "format": "wav"}}, "modalities"),
    "langchain: ChatOpenAI": Sent(
        {"temperature": 0.7, "n": 1, "stream": False, "max_completion_tokens": 20, "stop": None}
    ),
    "langchain: stream": Sent({**USAGE, "temperature": 0.7, "extra_headers": None}),
    "langchain: with_structured_output": Sent(
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    ),
    "llama-index": Sent({"temperature": 0.1, "max_tokens": None, "stream": False}),
    "vllm: all at their default": Sent(
        {key: value for key, value in VLLM_DEFAULTS.items() if key not in ("suffix", "add_special_tokens", "best_of")}
        | {"echo": False, "add_generation_prompt": True, "continue_final_message": False, "chat_template": None}
        | {"add_special_tokens": False, "documents": None, "chat_template_kwargs": None, "mm_processor_kwargs": None}
        | {"include_reasoning": True, "top_logprobs": 0, "logprobs": True, "tool_choice": "none"}
    ),
    "vllm: prefill": Sent(
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "def ad"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
    ),
    "vllm: thinking off": Sent({"chat_template_kwargs": {"enable_thinking": False}}),
    "vllm: guided JSON": Sent({"guided_json": SCHEMA}),
    "llama.cpp: the page in the browser": Sent({**LLAMA_DEFAULTS, "stream": True, "reasoning_format": "auto"}),
    "llama.cpp: grammar": Sent({"grammar": 'root ::= "a"'}, "grammar"),
    "guidellm": Sent({"max_completion_tokens": 32, "ignore_eos": True, "stop": None, **GUIDELLM}),
    "open-webui": Sent(
        {"stream": True, "session_id": "s", "chat_id": "c", "id": "i", "background_tasks": {}, "features": {}}
    ),
    "aider": Sent({"temperature": 0, "stream": True}),
    "openrouter": Sent(
        {
            "provider": {"order": ["x"]},
            "transforms": [],
            "route": "fallback",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}
            ],
        }
    ),
}

_ITEM: Json = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]}
_FUNCTION: Json = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True, "description": "Adds."}
_CALLED: list[Json] = [
    _ITEM,
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "x"},
    {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}", "status": "completed"},
    {"type": "function_call_output", "call_id": "1", "output": "3"},
]

RESPONSES: dict[str, Sent] = {
    "openai: text": Sent({"input": "Add.", "max_output_tokens": 20, "temperature": 0}),
    "openai: items": Sent({"input": [_ITEM], "instructions": "Be short.", "metadata": {"a": "b"}, "user": "me"}),
    "openai: stream": Sent({"stream": True, "stream_options": {"include_obfuscation": False}}),
    "openai: JSON schema": Sent(
        {"text": {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}}}
    ),
    "openai: tools": Sent({"tools": [_FUNCTION], "tool_choice": "auto", "parallel_tool_calls": False}),
    "openai: a tool's answer": Sent({"input": _CALLED, "tools": [_FUNCTION]}),
    "openai: web search": Sent({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "openai: stored": Sent({"store": True}, "store"),
    "openai: the next turn": Sent({"previous_response_id": "resp_1"}, "previous_response_id"),
    "openai: an image": Sent(
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    "openai: reasoning": Sent({"reasoning": {"effort": "high", "summary": "auto"}}),
    "codex": Sent(
        {
            "instructions": "You are an agent.",
            "input": _CALLED,
            "tools": [_FUNCTION],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": None,
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "text": {"verbosity": "medium"},
        }
    ),
    "openai-agents": Sent(
        {
            "input": [{"role": "user", "content": "Add."}],
            "include": [],
            "tools": [_FUNCTION],
            "metadata": None,
            "truncation": None,
            "previous_response_id": None,
            "conversation": None,
            "prompt": None,
            "top_logprobs": None,
            "text": None,
        }
    ),
    "langchain: ChatOpenAI(use_responses_api)": Sent(
        {"input": [{"role": "user", "content": "Add.", "type": "message"}], "temperature": 0.7, "stream": False}
    ),
    "vllm: extras": Sent({"top_k": 5, "repetition_penalty": 1.1, "seed": 3, "ignore_eos": False, "request_id": "r"}),
}
