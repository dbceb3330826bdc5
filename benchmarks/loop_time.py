"""CPU time of the callbacks of an ingress' and a router's event loop while one request asks for much.

    python -m benchmarks.loop_time [n-samples prompt-logprobs grammars adapters tokenize chunked responses]

The ingress' real HTTP application, a router and a scripted target run in one process, joined by real links. The time of
a callback is that of its thread (``time.thread_time``): what other processes and threads do is not in it. How late a
timer of the loop was by the wall clock stands beside it; that depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import threading
import time
from asyncio import Handle
from asyncio.events import TimerHandle
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple

import pytest
from fastapi import FastAPI
from transformers import AutoTokenizer

from benchmarks.modes.report import processor_name
from benchmarks.scripted import ScriptedTarget
from cluster.config.limits import Limits, ResponsesStore
from cluster.models.demos import demo_folder
from deployments.http.app import create_app
from deployments.http.keys import ApiKeys
from deployments.http.service import ApiSettings
from deployments.http.store import MemoryStore
from deployments.transport.host import LoopHost
from specdec.core.backends import Verification, VerifyJob
from specdec.core.types import Adapter, TokenLogprobs
from tests.deployments.transport.line import SCRIPT, Line
from tests.waiting import eventually

KEYS = {"a": "sk-a-0123456789abcdef", "b": "sk-b-0123456789abcdef"}
MAX_MODEL_LEN = 140_000
TICK_S = 0.005
PIECE_BYTES = 1 << 16


class LoopTimes:
    """Times every callback of this thread's event loop while it is entered.

    Attributes:
        longest_s: CPU time of the longest one.
        longest: What that was.
        num_long: Callbacks of more than 10 ms.
        lag_s: How late a timer was at most, by the wall clock.
        collecting_s: CPU time of the longest collection of garbage in this thread, which is part of some callback's.
    """

    def __init__(self) -> None:
        self.longest_s = self.lag_s = self.collecting_s = self._collecting_from_s = 0.0
        self._thread = threading.get_ident()
        self.longest = ""
        self.num_long = 0
        self._run = Handle._run  # type: ignore[attr-defined]

    def __enter__(self) -> LoopTimes:
        gc.collect()
        gc.freeze()  # a service of many hours has its modules' objects where no collection looks at them
        gc.callbacks.append(self._collected)

        def timed(handle: Handle) -> None:
            began_s = time.thread_time()
            self._run(handle)
            self._note(handle, time.thread_time() - began_s)

        Handle._run = TimerHandle._run = timed  # type: ignore[attr-defined]
        self._ticker = asyncio.create_task(self._tick())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        Handle._run = TimerHandle._run = self._run  # type: ignore[attr-defined]
        self._ticker.cancel()
        gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting_from_s = time.thread_time()
        else:
            self.collecting_s = max(self.collecting_s, time.thread_time() - self._collecting_from_s)

    def _note(self, handle: Any, spent_s: float) -> None:
        self.num_long += spent_s > 0.010
        if spent_s > self.longest_s:
            self.longest_s, self.longest = spent_s, _name(handle._callback)

    async def _tick(self) -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.lag_s = max(self.lag_s, time.monotonic() - began_s - TICK_S)


def _name(callback: Any) -> str:
    """A callback in words; of a task, its coroutine and where that waits now."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, LoopHost):
        return f"a turn of {type(task._machine).__name__}"
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    coroutine: Any = task.get_coro()
    names = []
    while coroutine is not None and hasattr(coroutine, "__qualname__"):
        names.append(coroutine.__qualname__)
        coroutine = getattr(coroutine, "cr_await", None)
    return " > ".join((names[0], *names[-2:])) if len(names) > 3 else " > ".join(names)


class TellingTarget(ScriptedTarget):
    """A scripted target that tells of each token as many alternatives as were asked for."""

    def _verify(self, job: VerifyJob) -> Verification:
        found, num_top = super()._verify(job), job.spec.sampling.logprobs
        if num_top:
            entry = TokenLogprobs(-1.5, 3, tuple((i, -0.1 * i) for i in range(num_top)))
            found = replace(found, logprobs=(entry,) * len(found.run))
        num_top = job.spec.sampling.prompt_logprobs
        if num_top is None or len(job.log) > job.spec.output_start:
            return found
        entries = (
            TokenLogprobs(-1.5, 3, tuple((i, -0.1 * i) for i in range(num_top))) for _ in range(len(job.log) - 1)
        )
        return replace(found, prompt_logprobs=(None, *entries))


class Answer(NamedTuple):
    """What came of a request; the body is read when it is asked for."""

    status: int
    content: list[bytes]

    async def json(self) -> Any:
        """The body, read in another thread: no client shares the service's loop."""
        return await asyncio.to_thread(lambda: json.loads(b"".join(self.content)))


@dataclass(slots=True)
class Scene:
    """The service in one process."""

    line: Line
    app: FastAPI

    async def post(self, path: str, key: str = "a", **fields: Any) -> Answer:
        """Send a body, written in another thread, in the pieces that a server reads."""
        body: bytes = await asyncio.to_thread(lambda: json.dumps({"model": "demo", **fields}).encode())
        pieces = [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]
        return await self.ask("POST", path, key, pieces, len(body))

    async def get(self, path: str) -> Answer:
        """Ask for something."""
        return await self.ask("GET", path, "a", [b""], 0)

    def ask(
        self, method: str, path: str, key: str, body: Iterable[bytes | asyncio.Event], num_bytes: int | None
    ) -> asyncio.Task[Answer]:
        """A request in a task of its own, which is all service.

        Args:
            method: Of HTTP.
            path: What is asked for.
            key: Name of the API key.
            body: Its pieces, and events to wait for between them.
            num_bytes: Content-Length; None for a chunked body.
        """
        headers = {"authorization": f"Bearer {KEYS[key]}", "content-type": "application/json"}
        headers |= {"transfer-encoding": "chunked"} if num_bytes is None else {"content-length": str(num_bytes)}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "query_string": b"",
            "state": {},
        }
        statuses: list[int] = []
        pieces = iter(body)
        written: list[bytes] = []

        async def receive() -> dict[str, Any]:
            for piece in pieces:
                if isinstance(piece, bytes):
                    await asyncio.sleep(0)
                    return {"type": "http.request", "body": piece, "more_body": True}
                await piece.wait()
            if not statuses and not ended.is_set():
                ended.set()
                return {"type": "http.request", "body": b"", "more_body": False}
            return await asyncio.Future()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            else:
                written.append(message.get("body", b""))

        async def served() -> Answer:
            await self.app(scope, receive, send)
            return Answer(statuses[0], written)

        ended = asyncio.Event()
        return asyncio.create_task(served())


async def n_samples(scene: Scene) -> Awaitable[str]:
    """128 samples of a prompt of 100,000 tokens."""
    prompt = [5 + i % 1000 for i in range(100_000)]
    answer = await scene.post("/v1/completions", prompt=prompt, n=128, max_tokens=1)
    return _said(answer, lambda body: f"{len(body['choices'])} choices")


async def prompt_logprobs(scene: Scene) -> Awaitable[str]:
    """20 log probabilities for each of 131,072 prompt tokens."""
    prompt = [5 + i % 1000 for i in range(131_072)]
    answer = await scene.post("/v1/completions", prompt=prompt, prompt_logprobs=20, max_tokens=1)
    return _said(answer, lambda body: f"{len(body['choices'][0]['prompt_logprobs'])} entries")


async def grammars(scene: Scene) -> str:
    """64 heavy grammars of one key, and a light one of another."""

    def heavy(number: int) -> Awaitable[Answer]:
        schema = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 99_999_989 + 2 * number}}}
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return scene.post("/v1/completions", prompt="x", max_tokens=1, response_format=asked)

    many = [asyncio.ensure_future(heavy(number)) for number in range(64)]
    await asyncio.sleep(0.5)
    began_s = time.monotonic()
    light = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    try:
        async with asyncio.timeout(40):
            answer = await scene.post("/v1/completions", key="b", prompt="x", max_tokens=1, response_format=light)
        waited = f"{answer.status} after {time.monotonic() - began_s:.1f} s"
    except TimeoutError:
        waited = "no answer within 40 s"
    num_done = sum(one.done() for one in many)
    for one in many:
        one.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    return f"the other key's light one: {waited}; {num_done} of 64 heavy ones had ended"


async def adapters(scene: Scene) -> str:
    """1,000 adapters that an ingress learns of when it starts, a request for one of them, and the list of all."""
    base = scene.line.tokens.model_info().target
    for number in range(1000):
        name = f"team-{number}"
        model = replace(base, name=name, parent=base.name, adapter=Adapter(name, f"/adapters/{name}", "f" * 16))
        scene.line.tokens.set_adapter(name, model)
    answer = await scene.post("/v1/completions", prompt="x", max_tokens=1, model="team-999")
    listed = (await (await scene.get("/v1/models")).json())["data"]
    return await _said(answer, lambda body: f"answered by {body['model']}; {len(listed)} models listed")


async def tokenize(scene: Scene) -> str:
    """A text of nearly 4 MiB, beside 20 small requests of another key."""
    text = "def add(a, b): return a + b\n" * (((4 << 20) - 1024) // 29)
    long = asyncio.ensure_future(scene.post("/tokenize", prompt=text))
    small = []
    for _ in range(20):
        began_s = time.monotonic()
        answer = await scene.post("/v1/completions", key="b", prompt="def f(): " * 300, max_tokens=1)
        assert answer.status == 200, answer.content
        small.append(time.monotonic() - began_s)
    return await _said(
        await long, lambda body: f"{body['count']} tokens; the other key waited {max(small):.2f} s at most"
    )


async def chunked(scene: Scene) -> str:
    """16 bodies without a declared length, and which are slow; then a request as any other."""
    may_end = asyncio.Event()
    body = [b'{"model": "demo", "prompt": "x", ', may_end, b'"max_tokens": 1}']
    slow = [scene.ask("POST", "/v1/completions", "a", body, None) for _ in range(16)]
    await asyncio.sleep(0.2)
    others = [await scene.post("/v1/completions", key=key, prompt="x", max_tokens=1) for key in KEYS]
    may_end.set()
    ended = [(await one).status for one in slow]
    return f"the 17th: {[other.status for other in others]}; the 16: {sorted(set(ended))}"


async def responses(scene: Scene) -> Awaitable[str]:
    """A stream of 4,000 tokens with 20 log probabilities each, which is kept, goes on, and whose items are listed."""
    text = "def add(a, b): return a + b\n" * 3000
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "stream": True}
    answer = await scene.post("/v1/responses", input=text, max_output_tokens=4000, ignore_eos=True, **asked)
    assert answer.status == 200, answer.content
    name = await asyncio.to_thread(lambda: json.loads(answer.content[-2].rpartition(b"data: ")[2])["response"]["id"])
    later = await scene.post("/v1/responses", input="x", previous_response_id=name, max_output_tokens=1)
    assert later.status == 200, later.content
    listed = await scene.get(f"/v1/responses/{name}/input_items")
    size = sum(map(len, answer.content)) >> 20
    return _said(listed, lambda body: f"{size} MiB of events; {len(body['data'])} item")


SCENES: dict[str, Callable[[Scene], Awaitable[str | Awaitable[str]]]] = {
    "n-samples": n_samples,
    "prompt-logprobs": prompt_logprobs,
    "grammars": grammars,
    "adapters": adapters,
    "tokenize": tokenize,
    "chunked": chunked,
    "responses": responses,
}


async def _said(answer: Answer, summary: Callable[[Any], str]) -> str:
    if answer.status != 200:
        return f"{answer.status}: {b''.join(answer.content).decode()}"
    return summary(await answer.json())


def _limits() -> Limits:
    """The defaults, but for bounds that would refuse a scene."""
    larger = {"max_prompt_logprobs_tokens": 1 << 18, "max_share_per_key": 0.5, "queue_timeout_s": 100.0}
    return Limits.model_validate({name: value for name, value in larger.items() if name in Limits.model_fields})


async def play(name: str, patch: pytest.MonkeyPatch) -> str:
    """Play a scene in a service of its own; a row of the table."""
    tokenizer = AutoTokenizer.from_pretrained(demo_folder("target"))
    line = Line(patch, max_model_len=MAX_MODEL_LEN, backend=TellingTarget(SCRIPT, MAX_MODEL_LEN))
    await eventually(lambda: bool(line.ingress.linked_peers()) and bool(line.routers.worker_metrics()))
    app = create_app(
        line.tokens, ApiSettings(limits=_limits()), tokenizer, keys=ApiKeys(KEYS), store=MemoryStore(ResponsesStore())
    )
    scene = Scene(line, app)
    for path in ("/v1/completions", "/tokenize"):  # what a route does once is done
        await scene.post(path, prompt="x", max_tokens=1)
    await scene.post("/v1/responses", input="x", max_output_tokens=16)
    await scene.get("/v1/models")
    with LoopTimes() as times:
        await asyncio.sleep(0)  # what runs now is not timed
        result = await SCENES[name](scene)
    came_of_it = (
        result if isinstance(result, str) else await result
    )  # the answer is read when nothing is timed any more
    with suppress(TimeoutError):
        await line.close()
    spent = f"{1e3 * times.longest_s:.1f}", times.num_long, f"{1e3 * times.collecting_s:.1f}"
    row = (name, *spent, f"{1e3 * times.lag_s:.0f}", times.longest, came_of_it)
    return f"| {' | '.join(map(str, row))} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Play scenes and print their table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop_time", description=__doc__)
    parser.add_argument("scenes", nargs="*", default=[*SCENES], metavar="SCENE", help=", ".join(SCENES))
    given = parser.parse_args(argv)
    print(processor_name())
    titles = "scene", "longest callback, CPU ms", "over 10 ms", "longest collection of garbage, CPU ms"
    print(f"| {' | '.join(titles)} | timer late, wall ms | which | came of it |")
    print("|---|---|---|---|---|---|---|")
    logging.disable(logging.INFO)
    for name in given.scenes:
        with pytest.MonkeyPatch.context() as patch:
            print(asyncio.run(play(name, patch)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
