from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, InternalServerError

from cluster.config.limits import Limits
from deployments.http.app import create_app
from deployments.http.job import make_echo
from deployments.http.service import ApiSettings, SequenceRequest
from specdec.core.types import PromptLogprobs, TokenLogprobs
from specdec.protocol.ingress import TokenDelta
from specdec.text.detokenizer import TokenTexts
from tests.deployments.http.scripted import Step, rounds

from .conftest import MAX_MODEL_LEN, TEXT, Bench

PROMPT = "def f():\n    return 🙂"
OTHER = 7


def logprobs_of(prompt: tuple[int, ...]) -> PromptLogprobs:
    """Made-up entries, different at every place: the prompt's token is the third, behind two that are fixed."""
    entries = [
        TokenLogprobs(-0.01 * len(prompt) - i, 3, ((OTHER, -0.001 * i), (OTHER + 1, -0.002 * i), (token, -math.inf)))
        for i, token in enumerate(prompt)
    ]
    return (None, *entries[1:])


def scored(bench: Bench, text: str, size: int = 1) -> None:
    """Say a text with log probabilities, and tell of every prompt."""
    ids = [*bench.tokenizer.encode(text), 0]
    entries = [TokenLogprobs(-0.5 - i, 1, ((token, -0.5 - i), (OTHER, -9.0))) for i, token in enumerate(ids)]

    def script(request: SequenceRequest) -> list[Step]:
        own = ids[: request.spec.max_tokens]
        logprobs = None if request.spec.sampling.logprobs is None else entries
        finish = "stop" if own == ids else "length"
        return rounds(own, size, finish, logprobs, logprobs_of(tuple(request.prompt)))

    bench.script = script


async def choices_of(answer: Any, stream: bool) -> dict[int, list[Any]]:
    """The choices of an answer or of a stream's chunks, by index."""
    parts: dict[int, list[Any]] = {}
    for part in [chunk async for chunk in answer] if stream else [answer]:
        for choice in part.choices:
            parts.setdefault(choice.index, []).append(choice)
    return parts


def only(pieces: list[Any], stream: bool) -> Any:
    """The one piece that tells of the prompt: the first that has output."""
    telling = [piece for piece in pieces if getattr(piece, "prompt_logprobs", None) is not None]
    assert len(telling) == 1
    if stream:
        with_output = [piece for piece in pieces if piece.token_ids]
        assert telling[0] is with_output[0]
    return telling[0].prompt_logprobs


def expected(bench: Bench, prompt: tuple[int, ...], num_top: int) -> list[Any]:
    texts = TokenTexts(bench.tokenizer)
    wanted: list[Any] = [None]
    for token, entry in list(zip(prompt, logprobs_of(prompt), strict=True))[1:]:
        assert entry is not None
        ranked = {token: (entry.logprob, 3)}
        ranked |= {other: (entry.top[i][1], i + 1) for i, other in enumerate((OTHER, OTHER + 1)) if i < num_top}
        wanted.append(
            {
                str(one): {"logprob": logprob, "rank": rank, "decoded_token": texts.text(one)}
                for one, (logprob, rank) in ranked.items()
            }
        )
    return wanted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", [0, 1, 2, 3])
async def test_every_choice_tells_of_its_own_prompt(
    bench: Bench, client: AsyncOpenAI, num_top: int, stream: bool
) -> None:
    scored(bench, "ok then", 2)
    prompts = [(40, 41, 42), (50,)]
    extra = {"prompt_logprobs": num_top, "return_token_ids": True}
    answer = await client.completions.create(
        model="demo", prompt=[list(one) for one in prompts], n=2, stream=stream, extra_body=extra
    )
    pieces = await choices_of(answer, stream)
    assert sorted(pieces) == [0, 1, 2, 3]
    for index, own in pieces.items():
        assert only(own, stream) == expected(bench, prompts[index // 2], num_top)
        assert "".join(piece.text for piece in own) == "ok then"
    asked = [request.spec.sampling.prompt_logprobs for request in bench.service.opened]
    assert asked == [num_top, None, num_top, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_tells_of_its_prompt(bench: Bench, client: AsyncOpenAI, stream: bool) -> None:
    scored(bench, "ok then", 2)
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    messages = [{"role": "user", "content": "x"}]
    answer = await client.chat.completions.create(model="demo", messages=messages, n=2, stream=stream, extra_body=extra)
    prompt = tuple(bench.service.opened[0].prompt)
    parts = [chunk async for chunk in answer] if stream else [answer]
    assert not any(hasattr(choice, "prompt_logprobs") for part in parts for choice in part.choices)
    assert [part.prompt_logprobs for part in parts if hasattr(part, "prompt_logprobs")] == [expected(bench, prompt, 2)]
    assert [part.prompt_token_ids for part in parts if hasattr(part, "prompt_token_ids")] == [list(prompt)]


async def test_without_being_asked_nothing_is_told(bench: Bench, client: AsyncOpenAI) -> None:
    scored(bench, "ok")
    answer = await client.completions.create(model="demo", prompt="x", logprobs=1)
    assert not hasattr(answer.choices[0], "prompt_logprobs")
    assert bench.service.opened[0].spec.sampling.prompt_logprobs is None


async def test_a_sample_waits_for_the_one_that_is_told(bench: Bench, client: AsyncOpenAI) -> None:
    scored(bench, "ok")
    tell, gate = bench.script, asyncio.Event()

    def script(request: SequenceRequest) -> Iterator[Step]:
        """Both are taken in at once, but the first sample's tokens come after the second's."""
        yield TokenDelta()
        if request.seq.endswith("-0"):
            yield gate
        gate.set()
        yield from tell(request)

    bench.script = script
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    answer = await client.completions.create(model="demo", prompt=[5, 6], n=2, stream=True, extra_body=extra)
    pieces = await choices_of(answer, True)
    for own in pieces.values():
        assert only(own, True) == expected(bench, (5, 6), 1)


async def test_a_service_that_leaves_it_out_fails_rather_than_hangs(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("ok")
    with pytest.raises(InternalServerError):
        await client.completions.create(model="demo", prompt="x", n=3, extra_body={"prompt_logprobs": 1})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("num_top", "beside"), [(0, None), (1, None), (1, 2), (2, 1)])
async def test_echoed_logprobs_begin_with_those_of_the_prompt(
    bench: Bench, client: AsyncOpenAI, num_top: int, beside: int | None, stream: bool
) -> None:
    scored(bench, TEXT, 3)
    prompt, output = bench.tokenizer.encode(PROMPT), [*bench.tokenizer.encode(TEXT), 0]
    limits = {"max_tokens": len(output), "extra_body": {} if beside is None else {"prompt_logprobs": beside}}
    answer = await client.completions.create(
        model="demo", prompt=[PROMPT, PROMPT], n=2, echo=True, logprobs=num_top, stream=stream, **limits
    )
    pieces = await choices_of(answer, stream)
    assert bench.service.opened[0].spec.sampling.prompt_logprobs == max(num_top, beside or 0)
    assert sorted(pieces) == [0, 1, 2, 3]
    for own in pieces.values():
        assert "".join(piece.text for piece in own) == PROMPT + TEXT
        assert len(prompt) + len(output) == sum(len(piece.logprobs.tokens) for piece in own)
        assert own[0].text.startswith(PROMPT)
        logprobs = [value for piece in own for value in piece.logprobs.token_logprobs]
        of_prompt = [entry and entry.logprob for entry in logprobs_of(tuple(prompt))]
        assert logprobs == of_prompt + [-0.5 - i for i in range(len(output))]
        tops = [top for piece in own for top in piece.logprobs.top_logprobs or ()]
        num_listed = [0] + [1 + num_top] * (len(prompt) - 1) if num_top else []
        assert [len(top or ()) for top in tops[: len(prompt)]] == num_listed
        tokens = [token for piece in own for token in piece.logprobs.tokens]
        offsets = [offset for piece in own for offset in piece.logprobs.text_offset]
        for offset, token in zip(offsets, tokens, strict=True):
            assert token.startswith(("bytes:", "<|")) or (PROMPT + TEXT)[offset:].startswith(token)
        assert offsets == sorted(offsets)
        if beside is not None:
            (told_of,) = [piece.prompt_logprobs for piece in own if hasattr(piece, "prompt_logprobs")]
            assert told_of[1:] == expected(bench, tuple(prompt), beside)[1:]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "o"])
async def test_no_output_scores_the_prompt(bench: Bench, client: AsyncOpenAI, stream: bool, stop: str | None) -> None:
    scored(bench, "ok")
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    extra = {"return_token_ids": True}
    answer = await client.completions.create(
        model="demo",
        prompt=[PROMPT, [5]],
        echo=True,
        max_tokens=0,
        logprobs=1,
        stop=stop,
        stream=stream,
        extra_body=extra,
        **options,
    )
    parts = [chunk async for chunk in answer] if stream else [answer]
    choices = [choice for part in parts for choice in part.choices]
    for index, text in ((0, PROMPT), (1, bench.tokenizer.decode([5]))):
        own = [choice for choice in choices if choice.index == index]
        num_tokens = len(bench.service.opened[index].prompt)
        assert "".join(choice.text for choice in own) == text
        assert (own[-1].finish_reason, own[-1].stop_reason) == ("length", None)
        assert [len(choice.logprobs.tokens) for choice in own if choice.logprobs] == [num_tokens]
        assert [choice.token_ids for choice in own] == [[]] * len(own)
    num_prompt = sum(len(request.prompt) for request in bench.service.opened)
    usage = parts[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (num_prompt, 0, num_prompt)
    assert bench.metric("generation_tokens_total") == 0
    assert bench.metric("discarded_tokens_total") == 2
    assert [request.spec.max_tokens for request in bench.service.opened] == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_output_and_no_logprobs_is_the_prompt(bench: Bench, client: AsyncOpenAI, stream: bool) -> None:
    scored(bench, "ok")
    answer = await client.completions.create(model="demo", prompt="x y", echo=True, max_tokens=0, stream=stream)
    (own,) = (await choices_of(answer, stream)).values()
    assert "".join(choice.text for choice in own) == "x y"
    assert own[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"echo": False}, "max_tokens"),
        ({"echo": None, "logprobs": 1}, "max_tokens"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
async def test_what_scoring_cannot_honour_is_refused(
    refused: Callable[..., Any], change: dict[str, Any], param: str
) -> None:
    body = {"model": "demo", "prompt": [5, 6], "echo": True, "max_tokens": 0}
    assert (await refused("/v1/completions", body | change))["param"] == param


async def test_a_chat_has_no_output_limit_of_zero(refused: Callable[..., Any]) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    assert (await refused("/v1/chat/completions", body | {"max_tokens": 0}))["param"] == "max_tokens"
    assert (await refused("/v1/chat/completions", body | {"prompt_logprobs": 21}))["param"] == "prompt_logprobs"


def test_tokens_added_before_a_text_lie_at_its_beginning(bench: Bench) -> None:
    ids = bench.tokenizer.encode("a 🙂 b")
    plain = make_echo(bench.tokenizer, "a 🙂 b", ids, True)
    assert make_echo(bench.tokenizer, "a 🙂 b", [0, *ids], True).offsets == (0, *plain.offsets)
    written = make_echo(bench.tokenizer, [0, *ids], [0, *ids], True)
    mark = len(written.text) - len("a 🙂 b")
    assert mark > 0
    assert written.offsets == (0, *(mark + offset for offset in plain.offsets))


async def test_many_log_probabilities_are_written_all_the_same(bench: Bench, client: AsyncOpenAI) -> None:
    scored(bench, "ok")
    prompt = [5 + i for i in range(100)]
    extra = {"prompt_logprobs": 20, "return_token_ids": True}
    for stream in (False, True):
        answer = await client.completions.create(model="demo", prompt=prompt, n=8, stream=stream, extra_body=extra)
        pieces = await choices_of(answer, stream)
        assert all(len(only(own, stream)) == 100 for own in pieces.values())


async def test_a_prompt_is_told_of_even_where_no_text_is_ready(bench: Bench, client: AsyncOpenAI) -> None:
    scored(bench, "🙂")
    answer = await client.completions.create(
        model="demo", prompt=[5, 6], stream=True, extra_body={"prompt_logprobs": 0}
    )
    first, *_ = (await choices_of(answer, True))[0]
    assert (first.text, first.prompt_logprobs) == ("", expected(bench, (5, 6), 0))


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"logprobs": 4}, "logprobs", "at most 3 (limits.max_logprobs)"),
        ({"prompt_logprobs": 4}, "prompt_logprobs", "at most 3 (limits.max_logprobs)"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "at most 8 prompt tokens"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "(limits.max_prompt_logprobs_tokens), and its prompts have 9"),
        ({"echo": True, "logprobs": 1}, "logprobs", "at most 8 prompt tokens"),
        ({"logprobs": 3}, None, ""),
        ({"prompt": [[1] * 8], "prompt_logprobs": 3}, None, ""),
    ],
)
async def test_log_probabilities_are_bounded_by_the_configuration(
    bench: Bench, fields: dict[str, Any], param: str | None, says: str
) -> None:
    scored(bench, TEXT)
    settings = ApiSettings(limits=Limits(max_logprobs=3, max_prompt_logprobs_tokens=8))
    app = create_app(bench.service, settings, bench.tokenizer, bench.observer)
    body = {"model": "demo", "prompt": [[1] * 4, [2] * 5], "max_tokens": 2} | fields
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api") as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == (200 if param is None else 400), answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param
        assert says in answer.json()["error"]["message"]
