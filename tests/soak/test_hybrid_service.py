"""The service on a target with recurrent layers, where state slots and blocks are short."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.models.demos import demo_folder
from tests.integration.mixed import SCARCE, check_mixed_requests
from tests.integration.running import RunningService, eventually, nothing_held

logger = logging.getLogger(__name__)

PROMPT = "def read_file(path):\n"


@pytest.fixture(scope="module")
def hybrid() -> Iterator[RunningService]:
    running = RunningService("--demo", "hybrid", "--num-speculative-tokens", "4", *SCARCE)
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(hybrid: RunningService) -> OpenAI:
    return hybrid.client()


def complete(client: OpenAI, prompt: str = PROMPT, num_tokens: int = 24, **options: Any) -> Any:
    """A completion, streamed or not: its text, and its last chunk or itself."""
    extra = {name: options.pop(name) for name in ("num_speculative_tokens", "cache_salt") if name in options}
    extra |= {"ignore_eos": True, "per_request_spec_decode_metrics": "summary"}
    body = {"model": "specdec-demo-hybrid", "prompt": prompt, "max_tokens": num_tokens, "extra_body": extra}
    return client.completions.create(**body, **options)


def text_of(answer: Any) -> str:
    """The text of an answer or of a stream."""
    pieces = [answer] if hasattr(answer, "choices") else list(answer)
    return "".join(piece.choices[0].text for piece in pieces if piece.choices)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_and_streams_change_no_token(client: OpenAI, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 5}
    own = text_of(complete(client, num_speculative_tokens=0, **options))
    assert len(own) > 24
    for num_speculative_tokens, stream in ((0, True), (1, False), (4, True), (4, False), (8, True)):
        answer = complete(client, num_speculative_tokens=num_speculative_tokens, stream=stream, **options)
        assert text_of(answer) == own


def test_the_most_likely_tokens_are_those_of_transformers(client: OpenAI) -> None:
    folder = demo_folder("hybrid")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    whole = model.generate(ids, do_sample=False, min_new_tokens=24, max_new_tokens=24)[0, ids.shape[1] :]
    assert text_of(complete(client, temperature=0)) == tokenizer.decode(whole)


def test_drafts_are_accepted_and_the_figures_say_so(hybrid: RunningService, client: OpenAI) -> None:
    # Where cores are few most drafts are late: of the few that a short answer has all may be right.
    figures = complete(client, num_tokens=256, temperature=1, seed=5).metrics["speculative_decoding"]
    assert 0 < figures["num_accepted_draft_tokens"] < figures["num_draft_tokens"]
    assert 0 < figures["draft_acceptance_rate"] < 1
    counts = {name: hybrid.count(f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted")}
    assert 0 < counts["accepted"] < counts["draft"]


def test_chat(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "a function that adds two numbers"}]
    options = {"model": "specdec-demo-hybrid", "messages": messages, "max_tokens": 24, "temperature": 0}
    own = client.chat.completions.create(**options, extra_body={"num_speculative_tokens": 0})
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == own.choices[0].message.content != ""


def test_many_at_once_are_each_what_they_are_alone(client: OpenAI) -> None:
    def ask(i: int, **options: int) -> str:
        options |= {"temperature": i % 2, "seed": i}
        return text_of(complete(client, f"class Thing{i}:\n", 8 + 2 * i, **options))

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(12)))
    assert together == [ask(i, num_speculative_tokens=0) for i in range(12)]


def test_a_prefix_that_was_read_is_not_read_again(hybrid: RunningService, client: OpenAI) -> None:
    prompt = "".join(f"name_{i} = {i}\n" for i in range(20))
    own = text_of(complete(client, prompt, temperature=0, cache_salt="another"))
    num_reused = hybrid.worker_gauge("reused_tokens")["target"]
    assert text_of(complete(client, prompt, temperature=0)) == own
    assert text_of(complete(client, prompt, temperature=0)) == own
    eventually(lambda: hybrid.worker_gauge("reused_tokens")["target"] >= num_reused + 64, 60, "tokens are reused")
    assert hybrid.worker_gauge("state_slots_reusable")["target"] > 0


def test_a_client_that_goes_away_leaves_nothing(hybrid: RunningService) -> None:
    body = {"model": "specdec-demo-hybrid", "prompt": PROMPT, "max_tokens": 300, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{hybrid.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: httpx2 hangs up when its iterator is collected
        next(lines)
        eventually(lambda: hybrid.worker_gauge("state_slots_in_use")["target"] > 0, 60, "a slot is held")
    eventually(lambda: nothing_held(hybrid), 60, "the sequence, its blocks and its slot are gone from both workers")


def test_after_mixed_requests_nothing_is_held(hybrid: RunningService) -> None:
    check_mixed_requests(hybrid, "specdec-demo-hybrid", 40)
