"""What takes long, or may, is done in a thread: other requests' tokens go on meanwhile."""

from __future__ import annotations

import functools
import threading
from typing import Any

import httpx2
import pytest

from specdec.text.detokenizer import TokenTexts

from .conftest import MAX_MODEL_LEN, Bench

MANY_TURNS = [{"role": "user", "content": ""}] * 2000
ONE_TURN = MANY_TURNS[:1]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("work", "path", "body"),
    [
        ("decode", "/detokenize", {"tokens": [5] * 2000}),
        ("text", "/tokenize", {"prompt": "a b " * 1000, "return_token_strs": True}),
        ("apply_chat_template", "/tokenize", {"messages": MANY_TURNS}),
        ("apply_chat_template", "/tokenize", {"messages": ONE_TURN, "chat_template_kwargs": {"a": [1]}}),
        ("apply_chat_template", "/tokenize", {"messages": ONE_TURN, "tools": [TOOL]}),
        ("apply_chat_template", "/tokenize", {"messages": ONE_TURN, "chat_template_kwargs": {"a": "x" * 20_000}}),
    ],
)
async def test_long_work_keeps_no_loop(
    bench: Bench, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, work: str, path: str, body: dict[str, Any]
) -> None:
    on_loop = []
    owner: Any = TokenTexts if work == "text" else bench.tokenizer
    real = getattr(owner, work)

    @functools.wraps(real)
    def noted(*args: Any, **options: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return real(*args, **options)

    monkeypatch.setattr(owner, work, noted)
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert on_loop
    assert not any(on_loop)
    assert MAX_MODEL_LEN < 2000
