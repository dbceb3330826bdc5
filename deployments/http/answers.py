"""Sending an answer, whole or as a stream, for as long as somebody listens."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from deployments.http.api import Api
from deployments.http.errors import ClientGoneError, api_error
from deployments.http.generation import Generation, JoinedDeltas, SampleDelta
from deployments.http.job import Job
from deployments.http.untaken import SlowClientError, Untaken
from deployments.http.writing import Event, Json, Writer, json_bytes

_logger = logging.getLogger("ray.serve")

QUEUE = "queue"
"""In a connection's state: what Serve holds of its answer."""
WARNING = "x-specdec-warning"
"""Header of an answer that is whole and right, and of which something else failed."""
_COMMENT = b": still here\n\n"
"""No event: what reads SSE skips it, and what stands between sees that the connection is alive."""
_T = TypeVar("_T")


async def answer(api: Api, job: Job, writer: Writer, request: Request) -> Response:
    """The answer to a job: a stream if it asks for one.

    Nothing is sent before one of its sequences has begun, but a stream's headers where that takes too long.
    """
    if job.body.stream:
        return StreamedAnswer(api, job, writer)
    return await while_connected(request.receive, _whole(api, job, writer))


@asynccontextmanager
async def _generating(api: Api, job: Job) -> AsyncIterator[Generation]:
    """A job's generation, from when it has its places and the first of its sequences has begun."""
    await api.admit(job.context, job.model, job.sequences)
    async with Generation(api, job) as generation:
        yield generation


async def _whole(api: Api, job: Job, writer: Writer) -> Response:
    """Generate everything, then write it down."""
    pieces = [JoinedDeltas() for _ in job.sequences]
    async with _generating(api, job) as generation:
        async for delta in generation:
            pieces[delta.index].append(delta)
            del delta
        choices = [choice.pop() for choice in pieces]
        num_tokens = [len(choice.token_ids) for choice in choices]
        held: list[Json] = []

        # Log probabilities of a long prompt are millions of objects: threads let go of them, not the event loop.
        def write() -> None:
            generation.forget_prompts()
            held.append(writer.whole(choices, generation))
            choices.clear()

        count = _num_prompt_ids(job) + sum(_num_entries(job, delta) for delta in choices)
        await api.write(count, write)
        warning = await writer.settle(generation)
        written = await api.write(count, lambda: json_bytes(held.pop()), writer.num_repeated)
        response = Response(written, media_type="application/json")
        if warning:
            response.headers[WARNING] = warning
        for index, num_delivered in enumerate(num_tokens):
            generation.delivered(index, num_delivered)
    return response


def _num_entries(job: Job, delta: SampleDelta) -> int:
    """How many log probabilities and tokens are to be written of a piece."""
    of_prompt = len(delta.prompt_logprobs or ()) * (1 + (job.body.num_prompt_logprobs or 0))
    of_outputs = len(delta.logprobs or ()) * (1 + (job.body.num_logprobs or 0)) + len(delta.token_ids)
    kept = delta.recording
    if kept is not None:
        lists = kept.prompt_token_ids, kept.output_token_ids, kept.prediction_token_ids
        of_outputs += sum(map(len, lists)) + len(kept.sampling.allowed_token_ids or ())
    return of_prompt + of_outputs


def _num_prompt_ids(job: Job) -> int:
    """How many token ids of prompts are to be written: each choice tells its own."""
    return job.num_prompt_tokens * job.num_samples * bool(job.body.return_token_ids)


class StreamedAnswer(Response):
    """Server-sent events, some per delta; cancelled as soon as the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, api: Api, job: Job, writer: Writer) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._api = api
        self._job = job
        self._writer = writer
        self._num_sent = 0
        self._sending = asyncio.Lock()
        self._has_begun = self._has_ended = False
        self._sent_s = 0.0
        self._untaken = Untaken(deque(), math.inf)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send."""
        queue = scope.get("state", {}).get(QUEUE, deque())
        self._untaken = Untaken(queue, self._api.settings.limits.slow_client_timeout_s)
        try:
            await while_connected(receive, self._stream(send))
        except SlowClientError as error:
            _logger.warning("The request %s ends: %s", self._job.context.label, error)
        except ClientGoneError:
            return

    async def _stream(self, send: Send) -> None:
        """Generate; send the headers though nothing has begun yet, and comments while there is nothing else to send.

        Errors before the headers are raised, and become an answer of their own; later ones become an event.
        """
        limits = self._api.settings.limits
        headers_by_s = self._job.context.clock_s + limits.stream_headers_after_s
        work = asyncio.ensure_future(self._generate(send))
        try:
            await asyncio.sleep(0)  # a refusal for want of room comes at once, and has a status of its own
            while not work.done():
                due_s = self._sent_s + limits.stream_comment_every_s if self._has_begun else headers_by_s
                rest_s = due_s - time.monotonic()
                if rest_s > 0:
                    await asyncio.wait({work}, timeout=min(rest_s, limits.stream_comment_every_s))
                else:
                    await self._send(send, _COMMENT)
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _generate(self, send: Send) -> None:
        try:
            async with _generating(self._api, self._job) as generation:
                try:
                    await self._events(send, generation)
                except Exception:
                    await self._untaken.until_taken()
                    raise
                finally:
                    self._untaken.count()  # what is not taken by now was generated in vain
        except ClientGoneError:
            raise
        except Exception as error:
            if not self._has_begun:
                raise
            failure = api_error(error, self._api.settings.limits.retry_after_s, self._job.context.label)
            await self._send(send, _encoded(self._writer.failed(failure)))
        await self._send(send, b"", is_end=True)

    async def _events(self, send: Send, generation: Generation) -> None:
        count = _num_prompt_ids(self._job) + sum(len(echo.text) for echo in self._job.echoes) * self._job.num_samples
        opening = partial(self._writer.opening, generation)
        begun = await self._api.write(count, lambda: _encoded(opening()), self._writer.num_repeated)
        await self._send(send, begun)
        async with aclosing(self._gathered(generation)) as deltas:
            async for delta in deltas:
                self._num_sent += len(delta.token_ids)
                count = _num_entries(self._job, delta)
                repeated = self._writer.num_repeated if delta.finish else 0
                written = partial(self._written, delta, generation)
                events = await self._api.write(count, written, repeated)
                await self._send(send, events, partial(generation.delivered, delta.index, len(delta.token_ids)))
        await self._writer.settle(generation)
        closing = partial(self._writer.closing, generation)
        ended = await self._api.write(0, lambda: _encoded(closing()), self._writer.num_repeated)
        await self._send(send, ended + self._writer.end_mark, is_end=True)
        await self._untaken.until_taken()

    async def _gathered(self, generation: Generation) -> AsyncGenerator[SampleDelta]:
        """What is worth an event: a choice's first news, then as many tokens as events shall hold, and its end."""
        held: dict[int, SampleDelta] = {}
        begun: set[int] = set()
        try:
            async for delta in generation:
                delta = held.pop(delta.index) + delta if delta.index in held else delta
                is_enough = delta.finish or len(delta.token_ids) >= self._api.settings.stream_interval
                if (delta.index in begun and not is_enough) or not self._is_news(delta):
                    held[delta.index] = delta
                else:
                    begun.add(delta.index)
                    yield delta
        except Exception:
            for delta in held.values():
                yield delta
            raise

    def _is_news(self, delta: SampleDelta) -> bool:
        """Whether there is anything to send yet."""
        extras = delta.logprobs or delta.prompt_logprobs or delta.notes is not None
        return bool(delta.text or delta.finish or extras or self._job.body.return_token_ids)

    def _written(self, delta: SampleDelta, generation: Generation) -> bytes:
        return _encoded(self._writer.news(delta, generation, self._num_sent))

    async def _send(
        self, send: Send, events: bytes, taken: Callable[[], None] = lambda: None, *, is_end: bool = False
    ) -> None:
        """Send events, after the headers where these were not sent; one message at a time, and none after the end."""
        try:
            async with self._sending:
                if not self._has_begun:
                    self._has_begun = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    self._untaken.sent(0, lambda: None)
                if (events or is_end) and not self._has_ended:
                    self._has_ended = is_end
                    await send({"type": "http.response.body", "body": events, "more_body": not is_end})
                    self._untaken.sent(len(events), taken)
                else:
                    taken()
                self._sent_s = time.monotonic()
        except OSError as error:
            raise ClientGoneError from error


def _encoded(events: Sequence[Event]) -> bytes:
    """Events as they are sent."""
    return b"".join(event.encoded() for event in events)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of some work, which is cancelled at once when the client goes away.

    Raises:
        ClientGoneError: It did.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
