"""Requests as ``vllm bench serve`` sends them, by its backends ``openai`` and ``openai-chat``; vLLM is not installed.

Bodies, headers and what counts as a success are those of its ``vllm/benchmarks/lib/endpoint_request_func.py``. It asks
for streams alone, so a text is that of one request and pieces are those of another; an object is asked for by its
``--extra-body``.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from asked import KEY, MOST_TOKENS, NUM_TOKENS, TEXT, Order, tell


class Completions:
    """``--backend openai``."""

    path = "completions"

    def __init__(self, base_url: str, model: str) -> None:
        self._url = f"{base_url}/{self.path}"
        self._model = model

    def text(self) -> str:
        """With a fixed number of tokens, as its random data set has it."""
        return "".join(self._stream({"ignore_eos": True, "temperature": 0.0}))

    def pieces(self) -> list[str]:
        """With all of its sampling flags."""
        flags = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
        return self._stream({"ignore_eos": True, "repetition_penalty": 1.0, "temperature": 0.0, **flags})

    def order(self) -> Order:
        extra = {"temperature": 0.0, "structured_outputs": {"json": Order.model_json_schema()}}
        return Order.model_validate_json("".join(self._stream(extra, MOST_TOKENS)))

    def _asked(self, num_tokens: int) -> dict[str, Any]:
        return {"prompt": TEXT, "repetition_penalty": 1.0, "max_tokens": num_tokens, "logprobs": None}

    def _content(self, choice: dict[str, Any]) -> str | None:
        return choice["text"]

    def _stream(self, extra: dict[str, Any], num_tokens: int = NUM_TOKENS) -> list[str]:
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return asyncio.run(self._send({"model": self._model} | self._asked(num_tokens) | streamed | extra))

    async def _send(self, body: dict[str, Any]) -> list[str]:
        """The pieces of an answer, if that program would call it a success."""
        headers = {"Authorization": f"Bearer {KEY}", "x-request-id": "bench-0"}
        pieces, usage, received = [], {}, b""
        async with aiohttp.ClientSession() as session, session.post(self._url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            async for received_now in answer.content.iter_any():
                received += received_now
        for message in received.decode().strip().split("\n\n"):
            data = message.removeprefix("data: ")
            if message.startswith(":") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if chunk["choices"]:
                pieces.append(self._content(chunk["choices"][0]) or "")
            else:
                usage = chunk["usage"]
        assert usage["prompt_tokens"] > 0
        assert not body.get("ignore_eos") or usage["completion_tokens"] == NUM_TOKENS
        return pieces


class Chat(Completions):
    """``--backend openai-chat``."""

    path = "chat/completions"

    def _asked(self, num_tokens: int) -> dict[str, Any]:
        said = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
        return {"messages": said, "max_completion_tokens": num_tokens}

    def _content(self, choice: dict[str, Any]) -> str | None:
        return choice["delta"].get("content")


tell(["aiohttp"], Completions, Chat)
