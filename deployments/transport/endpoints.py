"""Mixins that make a deployment class an end of links; its own code gives the machine, and nothing else.

Workers and ingress replicas dial every router that is listed; routers answer. So only routers have to be reachable,
and a worker or an ingress that drains, and is listed no more, keeps its links. So does a router, until every ingress
has moved to another router of its model or stopped. Deployments must be deployed with the options of
``deployments.transport.discovery``.

Keeping links up: who is dialled, and when again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import ray
from ray import serve

from deployments.transport.discovery import Discovery
from deployments.transport.host import DRAIN_POLL_S, Host, LoopHost, M, WorkerHost
from deployments.transport.link import Answerer, Dialer, PeerEvent, spawn
from deployments.transport.streams import StreamAnswerer, dial_stream
from deployments.transport.succession import Succession
from deployments.transport.wire import (
    FingerprintKind,
    Hello,
    HostFailedError,
    Identity,
    LinkTimes,
    OtherModelError,
    mismatch,
)
from specdec.core.types import UNKNOWN, Fingerprints

logger = logging.getLogger("ray.serve")

LOOP_TIMEOUT_S = 60.0
"""A machine on the event loop can only fail, or hang with the loop."""


class PeerLinks:
    """Dials every replica that is listed, and again when its link is lost.

    A replica that is listed no more is dialled no more, but a link that is up stays, unless it ``moves_on``: the
    replica may be draining, or the list may be wrong while Serve's controller recovers.

    Args:
        dial: Opens a link and runs it to its end (``Dialer.dial``).
        on_linked: Called when a link is up.
        on_lost: Called when a link that was up has ended, once for each ``on_linked``; and when a peer that was
            refused is listed no more.
        times: Pauses between attempts.
        on_refused: Called when a peer is found to be of another model.
        moves_on: Whether to drop links to unlisted replicas once there is a link to a listed one.
    """

    def __init__(
        self,
        dial: Callable[[str, Callable[[], None]], Awaitable[None]],
        on_linked: PeerEvent,
        on_lost: PeerEvent,
        times: LinkTimes,
        on_refused: PeerEvent | None = None,
        *,
        moves_on: bool = False,
    ) -> None:
        self._dial = dial
        self._moves_on = moves_on
        self._on_refused = on_refused
        self._on_linked = on_linked
        self._on_lost = on_lost
        self._times = times
        self._listed: frozenset[str] = frozenset()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._linked: set[str] = set()
        self._other_models: set[str] = set()

    @property
    def linked(self) -> frozenset[str]:
        """Peers whose link is up."""
        return frozenset(self._linked)

    def update(self, replica_ids: frozenset[str]) -> None:
        """Dial these replicas from now on, and no others."""
        self._listed = replica_ids
        for peer in self._tasks.keys() - replica_ids - self._linked:
            self._tasks.pop(peer).cancel()
        for peer in self._other_models - replica_ids:
            self._other_models.discard(peer)
            self._on_lost(peer)
        for peer in sorted(replica_ids - self._tasks.keys()):
            self._tasks[peer] = spawn(self._keep(peer))
        self._move_on_soon()

    def _move_on_soon(self) -> None:
        if self._moves_on:
            asyncio.get_running_loop().call_later(self._times.unlisted_s, self._move_on)

    def _move_on(self) -> None:
        if self._linked & self._listed:
            for peer in (self._linked & self._tasks.keys()) - self._listed:
                self._tasks.pop(peer).cancel()

    def close(self) -> None:
        """Cut all links."""
        self._listed = frozenset()
        while self._tasks:
            self._tasks.popitem()[1].cancel()

    async def _keep(self, peer: str) -> None:
        backoff_s, logged = self._times.first_backoff_s, ""
        while True:
            was_up, reason = await self._run(peer)
            if was_up:
                logger.warning("Lost the link to %s: %s", peer, reason)
            elif reason != logged:  # once, not at each attempt
                logger.warning("No link to %s; trying again: %s", peer, reason)
            logged = "" if was_up else reason
            if peer not in self._listed:
                self._tasks.pop(peer, None)
                return
            backoff_s = self._times.first_backoff_s if was_up else min(2 * backoff_s, self._times.max_backoff_s)
            await asyncio.sleep(backoff_s)

    async def _run(self, peer: str) -> tuple[bool, str]:
        """One link, from its opening to its end: whether it was up, and why it is not."""

        def up() -> None:
            self._linked.add(peer)
            self._other_models.discard(peer)
            logger.info("Linked to %s.", peer)
            self._on_linked(peer)
            self._move_on_soon()

        reason = "it ended"
        try:
            await self._dial(peer, up)
        except OtherModelError as error:
            reason = str(error)
            if peer in self._listed - self._other_models and self._on_refused is not None:
                self._other_models.add(peer)
                self._on_refused(peer)
        except Exception as error:
            reason = str(error) or repr(error)
        finally:
            was_up = peer in self._linked
            if was_up:
                self._linked.discard(peer)
                self._on_lost(peer)
        return was_up, reason


DEFAULT_TIMES = LinkTimes()


@dataclass(frozen=True)
class PeerGroup(Generic[M]):
    """A deployment that this one has links with, and what its machine does about them.

    Attributes:
        deployment: Name of the deployment.
        joined: Done with (machine, replica id, now_s) in the machine's turn when a link is up.
        lost: The same when it has ended.
        match: Which fingerprint both ends must have (rule 14).
        refused: Done where a peer that was dialled is of another model; ``lost`` follows when it is gone.
        application: Name of its application; None for the same.
    """

    deployment: str
    joined: Callable[[M, str, float], None]
    lost: Callable[[M, str, float], None]
    match: FingerprintKind = "decision"
    refused: Callable[[M, str, float], None] | None = None
    application: str | None = None


def replica_id() -> str:
    """Serve's id of the replica that this runs in; by this name its peers know it."""
    return str(serve.get_replica_context().replica_tag)


def node_id() -> str:
    """Ray's id of the node that this runs on."""
    return str(ray.get_runtime_context().get_node_id())


class Endpoint:
    """What all ends have in common: a host, and the links that it keeps."""

    _host: Host[Any] | None = None
    _closers: list[Callable[[], None]]

    def _open(self, host: Host[Any], step_timeout_s: float, times: LinkTimes, fingerprints: Fingerprints) -> None:
        self._host = host
        self._step_timeout_s = step_timeout_s
        self._times = times
        self._fingerprints = fingerprints
        self._me = replica_id()
        self._is_draining = False
        if not hasattr(self, "_closers"):
            self._closers = []
        host.start()

    def _dial_routers(
        self,
        routers: str,
        match: FingerprintKind,
        host: Host[Any],
        joined: PeerEvent,
        lost: PeerEvent,
        refused: PeerEvent | None = None,
        application: str | None = None,
        *,
        moves_on: bool = False,
    ) -> tuple[PeerLinks, Discovery]:
        """Keep a link to every live router of an application; None for the own one."""
        context = serve.get_replica_context()
        watch = Discovery(routers, application or context.app_name, lambda listed: links.update(listed))
        open_channel = partial(dial_stream, watch)
        own = self._me, context.deployment, context.app_name
        dialer = Dialer(*own, self._fingerprints, match, host, open_channel, self._times)
        links = PeerLinks(dialer.dial, joined, lost, self._times, refused, moves_on=moves_on)
        self._closers += [watch.close, links.close]
        return links, watch

    async def identity(self) -> Identity:
        """Where this replica runs, and what it can work with."""
        deployment = serve.get_replica_context().deployment
        return Identity(deployment, self._me, os.getpid(), node_id(), self._fingerprints, self._is_serving())

    def _is_serving(self) -> bool:
        """Whether it takes new sequences."""
        return not self._is_draining

    async def await_turn(self) -> None:
        """Return when this replica, which has started, may take the place of others (see ``succession``)."""

    async def check_health(self) -> None:
        """Serve's health check: the machine's progress, not the event loop's.

        Raises:
            HostFailedError: The machine has raised, or hangs.
        """
        if self._host is not None:
            self._host.check(self._step_timeout_s)

    async def drain(self) -> None:
        """Take nothing new, keep the links, and return when the machine has nothing left (rule 15)."""
        if self._host is not None:
            self._is_draining = True
            await self._host.drain()
            await asyncio.sleep(DRAIN_POLL_S)  # what it has said last goes out

    def close_transport(self) -> None:
        """End links, tasks and the machine's host; idempotent."""
        host, self._host = self._host, None
        if host is not None:
            for close in self._closers:
                close()
            host.stop()


class _DrainingEndpoint(Endpoint):
    """An end that drains when Serve stops its replica.

    Serve calls the destructor of a replica that is to stop when its requests have ended, and awaits it for as long as
    the deployment's grace period allows. A link is a request of Serve's at the router; so a router that is stopping
    closes its links to workers itself, once its last ingress has moved to another router or stopped.
    """

    _match: FingerprintKind = "decision"

    def _has_clients(self) -> bool:
        """Whether anybody is linked who asks for what this replica does."""
        raise NotImplementedError

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        return None if self._host is None else self._shut_down()

    async def _shut_down(self) -> None:
        if self._host is not None:
            with suppress(HostFailedError):  # a machine that has failed or hangs has nothing to finish
                self._host.check(self._step_timeout_s)
                if self._has_clients():
                    await Succession(await self.identity(), self._match).hand_over(self._has_clients)
                await self.drain()
        self.close_transport()


class WorkerEndpoint(_DrainingEndpoint):
    """For a deployment that works for routers: call ``start_worker`` at the end of ``__init__``."""

    def start_worker(
        self,
        machine: M,
        *,
        routers: str,
        step_timeout_s: float,
        times: LinkTimes = DEFAULT_TIMES,
        last_progress: Callable[[], float] | None = None,
        fingerprints: Fingerprints = UNKNOWN,
        match: FingerprintKind = "decision",
        applications: Sequence[str] = (),
    ) -> WorkerHost[Any]:
        """Run a machine on a thread of its own, for every router.

        Args:
            machine: The machine; its peers are routers, by replica id.
            routers: Name of the routers' deployment.
            step_timeout_s: Without a sign of progress for so long the replica is unhealthy.
            times: How patient links are.
            last_progress: Gives the monotonic time of the newest sign of progress within a running step, in seconds;
                without it the end of a step is the only one.
            fingerprints: What the worker's model is.
            match: Which of them a router's must equal.
            applications: Whose routers these are; they may come later, go, and come back. None: those of the own one.
        """
        host: WorkerHost[Any] = WorkerHost(machine, last_progress=last_progress)
        self._open(host, step_timeout_s, times, fingerprints)
        self._match, self._router_deployment = match, routers
        self._peer_links: dict[str | None, tuple[PeerLinks, Discovery]] = {}
        self.dial_routers_of(applications or (None,))
        return host

    def dial_routers_of(self, applications: Sequence[str | None]) -> None:
        """Keep links to the routers of these applications, and to no others."""
        for application in self._peer_links.keys() - set(applications):
            for closing in self._peer_links.pop(application):
                closing.close()
                self._closers.remove(closing.close)
        for application in applications:
            if application not in self._peer_links and self._host is not None:
                self._peer_links[application] = self._dial_routers(
                    self._router_deployment, self._match, self._host, _ignore, _ignore, application=application
                )

    def _has_clients(self) -> bool:
        return any(links.linked for links, _ in self._peer_links.values())


class RouterEndpoint(_DrainingEndpoint):
    """For a deployment that routes: call ``start_router`` at the end of ``__init__``.

    ``link`` and ``post`` are what peers call: they keep their names.
    """

    _was_listed = _is_leaving = False

    def start_router(
        self,
        machine: M,
        *,
        workers: Sequence[PeerGroup[Any]],
        times: LinkTimes = DEFAULT_TIMES,
        fingerprints: Fingerprints = UNKNOWN,
    ) -> LoopHost[Any]:
        """Run a machine on the event loop, with links from all live workers and ingress replicas.

        Args:
            machine: The machine; its peers are workers and ingress replicas, by replica id.
            workers: The workers' deployments.
            times: How patient links are.
            fingerprints: What the service's models are. Callers that belong to no group (ingress replicas) must have
                the same ``decision``.
        """
        host: LoopHost[Any] = LoopHost(machine)
        self._open(host, LOOP_TIMEOUT_S, times, fingerprints)
        self._application = serve.get_replica_context().app_name
        self._groups = {(group.application or self._application, group.deployment): group for group in workers}
        self._clients: set[str] = set()
        answerer = Answerer(self._me, fingerprints, host, self._refusal, self._joined, self._lost, times)
        self._streams = StreamAnswerer(answerer.answer)
        own_list = Discovery(serve.get_replica_context().deployment, self._application, self._listed)
        self._closers.append(own_list.close)
        return host

    def _listed(self, replica_ids: frozenset[str]) -> None:
        self._was_listed |= self._me in replica_ids
        self._is_leaving = self._was_listed and self._me not in replica_ids
        asyncio.get_running_loop().call_later(self._times.unlisted_s, self._end_links)

    def _end_links(self) -> None:
        if self._is_left:
            self._streams.close()

    @property
    def _is_left(self) -> bool:
        return self._is_leaving and not self._clients

    async def link(self, first: bytes) -> AsyncGenerator[bytes, None]:
        """What a caller reads."""
        async with aclosing(self._streams.link(first)) as frames:
            async for frame in frames:
                yield frame

    async def post(self, data: bytes) -> bytes:
        """What a caller sends; answers whether its link exists."""
        return self._streams.post(data)

    def _joined(self, hello: Hello) -> None:
        group = self._group_of(hello)
        if group is None:
            self._clients.add(hello.caller)
        elif self._host is not None:
            self._host.tell(lambda machine, now_s: group.joined(machine, hello.caller, now_s))

    def _lost(self, hello: Hello) -> None:
        group = self._group_of(hello)
        if group is None:
            self._clients.discard(hello.caller)
            self._end_links()
        elif self._host is not None:
            self._host.tell(lambda machine, now_s: group.lost(machine, hello.caller, now_s))

    def _group_of(self, hello: Hello) -> PeerGroup[Any] | None:
        return self._groups.get((hello.application, hello.deployment))

    def _has_clients(self) -> bool:
        return bool(self._clients)

    async def await_turn(self) -> None:
        """Return when this router may take the place of others: when a target serves that it can work with."""
        target = next(group.deployment for group in self._groups.values() if group.match == "decision")
        await Succession(await self.identity()).await_turn(target)

    def _refusal(self, hello: Hello) -> str:
        """Why a call is refused; empty if it is not."""
        if hello.callee != self._me:
            return f"the call is for {hello.callee}"
        if self._host is None or self._is_draining or self._is_left:
            return "the replica is draining"
        if self._host.failed:
            return "the replica has failed"
        group = self._group_of(hello)
        match = "decision" if group is None else group.match
        other_model = mismatch(self._fingerprints, hello.fingerprints, match, hello.wire)
        if group is None and hello.application != self._application and not other_model:
            return f"{hello.application} is an application of which this one wants no {hello.deployment}"
        return other_model


class IngressEndpoint(Endpoint):
    """For a deployment that takes requests: call ``start_ingress`` at the end of ``__init__``."""

    _routers: PeerLinks

    def start_ingress(
        self,
        machine: M,
        *,
        routers: PeerGroup[M],
        after: Callable[[M], None],
        times: LinkTimes = DEFAULT_TIMES,
        fingerprints: Fingerprints = UNKNOWN,
    ) -> LoopHost[M]:
        """Run a machine on the event loop, with links to all live routers.

        Args:
            machine: The machine; its peers are routers, by replica id.
            routers: The deployment to keep links to.
            after: Called with the machine after each of its turns, to take deliveries.
            times: How patient links are.
            fingerprints: What the service's models are.

        Returns:
            The host; requests are started and cancelled by its ``tell``, and its ``on_failed`` tells of its end.
        """
        host = LoopHost(machine, after=after)
        self._open(host, LOOP_TIMEOUT_S, times, fingerprints)

        def joined(peer: str) -> None:
            host.tell(lambda machine, now_s: routers.joined(machine, peer, now_s))

        def lost(peer: str) -> None:
            host.tell(lambda machine, now_s: routers.lost(machine, peer, now_s))

        def refused(peer: str) -> None:
            on_refused = routers.refused
            if on_refused is not None:
                host.tell(lambda machine, now_s: on_refused(machine, peer, now_s))

        events = joined, lost, refused
        self._routers, _ = self._dial_routers(routers.deployment, routers.match, host, *events, moves_on=True)
        self._router_deployment = routers.deployment
        return host

    async def await_turn(self) -> None:
        """Return when this ingress may take the place of others: when it is linked, and a router that fits serves."""
        await Succession(await self.identity()).await_turn(self._router_deployment, lambda: bool(self.linked_peers()))

    def linked_peers(self) -> frozenset[str]:
        """Replica ids of the routers whose link is up."""
        return self._routers.linked

    def __del__(self) -> None:
        self.close_transport()


def _ignore(_peer: str) -> None:
    """Workers' machines know their peers by their messages."""
