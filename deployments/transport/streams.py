"""Links over Serve: long-lived streaming responses on its gRPC transport.

Router and worker: the router reads ``worker.results(hello)``; asked for them, the worker reads ``router.feed(hello)``.
Ingress and router: the ingress reads ``router.events(hello)`` and sends by ``router.post(hello, batch)``, one call at a
time. It is not called itself, so that an ingress that drains its last requests, and is not listed any more, can still
be linked. Either side's end, death or silence ends the whole link on both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.transport.discovery import Discovery
from deployments.transport.host import Host
from deployments.transport.links import new_hello, read_stream, spawn, until_first_ends
from deployments.transport.mailbox import Mailbox
from deployments.transport.wire import Batch, Greeting, Hello, LinkError, LinkRefusedError, LinkTimes

logger = logging.getLogger("ray.serve")

Stream = AsyncGenerator[Greeting | Batch, None]
"""A greeting, then batches; nothing but a greeting with a refusal where the link is refused."""


def pinned(handle: DeploymentHandle, method: str, replica: str, *, stream: bool) -> DeploymentHandle:
    """A handle to one method of one replica. ``_by_reference=False`` (of ``Discovery``) is what selects gRPC."""
    return handle.options(method_name=method, session_id=replica, stream=stream)


class _Opening:
    """A link of ``WorkerDialer`` that is being opened: up when both of its streams are."""

    def __init__(self, mailbox: Mailbox, on_up: Callable[[], None]) -> None:
        self.mailbox = mailbox
        self.fed = False
        self._read = False
        self._on_up = on_up
        self._feed_ended = asyncio.Event()

    def reading(self) -> None:
        """The worker has greeted us."""
        self._read = True
        if self.fed:
            self._on_up()

    def feeding(self) -> None:
        """The worker reads our feed."""
        self.fed = True
        if self._read:
            self._on_up()

    def feed_ended(self) -> None:
        """The worker reads our feed no longer."""
        self._feed_ended.set()

    async def until_feed_ends(self) -> None:
        """Return when the worker reads our feed no longer."""
        await self._feed_ended.wait()


class WorkerDialer:
    """A router's side of its links to the workers of one deployment.

    Args:
        me: Replica id of this router.
        host: Gets what the workers send.
        workers: The deployment.
        times: How patient to be.
    """

    def __init__(self, me: str, host: Host[Any], workers: Discovery, times: LinkTimes) -> None:
        self._me = me
        self._host = host
        self._workers = workers
        self._times = times
        self._links: dict[str, _Opening] = {}

    async def dial(self, peer: str, on_up: Callable[[], None]) -> None:
        """Run one link to a worker; see ``Dial``."""
        hello = new_hello(self._me, peer)
        mailbox = self._host.attach(peer)
        link = self._links[hello.link] = _Opening(mailbox, on_up)
        try:
            response = pinned(self._workers.handle, "results", peer, stream=True).remote(hello)
            await until_first_ends(
                read_stream(response, peer, self._times, self._host.post, link.reading), link.until_feed_ends()
            )
        finally:
            del self._links[hello.link]
            self._host.detach(peer, mailbox)

    def expects(self, hello: Hello) -> bool:
        """Whether a call for ``feed`` belongs to a link that this dialer has open."""
        link = self._links.get(hello.link)
        return link is not None and not link.fed

    async def feed(self, hello: Hello) -> Stream:
        """What a worker reads: the batches for it, until the link ends."""
        link = self._links[hello.link]
        try:
            link.feeding()
            yield Greeting(self._me)
            async with aclosing(link.mailbox.batches(self._times.heartbeat_s)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            link.feed_ended()


class WorkerAnswerer:
    """A worker's side of its links to routers.

    Args:
        me: Replica id of this worker.
        host: Gets what the routers send.
        routers: The deployment.
        times: How patient to be.
    """

    def __init__(self, me: str, host: Host[Any], routers: Discovery, times: LinkTimes) -> None:
        self._me = me
        self._host = host
        self._routers = routers
        self._times = times

    async def results(self, hello: Hello) -> Stream:
        """What a router reads: the batches for it, until the link ends."""
        mailbox = self._host.attach(hello.caller)
        reader = spawn(self._read_feed(hello, mailbox))
        try:
            yield Greeting(self._me)
            async with aclosing(mailbox.batches(self._times.heartbeat_s)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            reader.cancel()
            self._host.detach(hello.caller, mailbox)

    async def _read_feed(self, hello: Hello, mailbox: Mailbox) -> None:
        router = hello.caller
        try:
            response = pinned(self._routers.handle, "feed", router, stream=True).remote(
                Hello(self._me, router, hello.link)
            )
            await read_stream(response, router, self._times, self._host.post)
        except LinkError as error:
            logger.info("The feed from router %s ended: %s", router, error)
        finally:
            mailbox.close()


class RouterDialer:
    """An ingress's side of its links to routers.

    Args:
        me: Replica id of this ingress.
        host: Gets what the routers send.
        routers: The deployment.
        times: How patient to be.
    """

    def __init__(self, me: str, host: Host[Any], routers: Discovery, times: LinkTimes) -> None:
        self._me = me
        self._host = host
        self._routers = routers
        self._times = times

    async def dial(self, peer: str, on_up: Callable[[], None]) -> None:
        """Run one link to a router; see ``Dial``."""
        hello = new_hello(self._me, peer)
        mailbox = self._host.attach(peer)
        try:
            response = pinned(self._routers.handle, "events", peer, stream=True).remote(hello)
            await until_first_ends(
                read_stream(response, peer, self._times, self._host.post, on_up), self._post_all(hello, mailbox)
            )
        finally:
            self._host.detach(peer, mailbox)

    async def _post_all(self, hello: Hello, mailbox: Mailbox) -> None:
        post = pinned(self._routers.handle, "post", hello.callee, stream=False)
        async for batch in mailbox.batches(self._times.heartbeat_s):
            if not batch:
                continue
            try:
                async with asyncio.timeout(self._times.silence_s):
                    refusal = await post.remote(hello, batch)
            except Exception as error:
                raise LinkError(f"a call to {hello.callee} failed: {error!r}") from error
            if refusal is not None:
                raise LinkRefusedError(refusal)


class IngressAnswerer:
    """A router's side of its links to ingress replicas.

    Args:
        me: Replica id of this router.
        host: Gets what the ingress replicas send.
        times: How patient to be.
    """

    def __init__(self, me: str, host: Host[Any], times: LinkTimes) -> None:
        self._me = me
        self._host = host
        self._times = times

    async def events(self, hello: Hello) -> Stream:
        """What an ingress reads: the batches for it, until the link ends."""
        mailbox = self._host.attach(hello.caller)
        try:
            yield Greeting(self._me)
            async with aclosing(mailbox.batches(self._times.heartbeat_s)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self._host.detach(hello.caller, mailbox)

    def post(self, batch: Batch) -> None:
        """What an ingress sends."""
        self._host.post(batch)
