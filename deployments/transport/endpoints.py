"""Mixins that make a deployment class an end of links; its own code gives the machine, and nothing else.

The methods that peers call (``results``, ``feed``, ``events``, ``post``) are part of the wire: they keep their names.
Deployments must be deployed with the options of ``deployments.transport.options``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic

import ray
from ray import serve

from deployments.transport.discovery import Discovery
from deployments.transport.host import Host, LoopHost, M, WorkerHost
from deployments.transport.links import Dial, LinkKeeper
from deployments.transport.local import LocalAnswerer, LocalDialer
from deployments.transport.priority import GIVES_WAY, GOES_EARLY, shift_niceness
from deployments.transport.sharing import SharingHost, SteadyHost
from deployments.transport.streams import IngressAnswerer, RouterDialer, Stream, WorkerAnswerer, WorkerDialer, pinned
from deployments.transport.wire import Batch, Greeting, Hello, Identity, LinkTimes
from specdec.engine.trace import Recorder, WorkerTrace
from specdec.engine.traced import traced
from specdec.protocol.draft_worker import DraftWorkerMachine
from specdec.protocol.drafter import DRAFTER_LIGHT
from specdec.protocol.target import LIGHT, TargetMachine

DEFAULT_TIMES = LinkTimes()


@dataclass(frozen=True)
class PeerGroup(Generic[M]):
    """A deployment whose replicas this one keeps links to, and what its machine is told of them.

    Attributes:
        deployment: Name of the deployment, in the same application.
        joined: Done with (machine, replica id, now_s) in the machine's turn when a link is up.
        lost: The same when it has ended.
    """

    deployment: str
    joined: Callable[[M, str, float], None]
    lost: Callable[[M, str, float], None]


def replica_id() -> str:
    """Serve's id of the replica that this runs in; by this name its peers know it."""
    return str(serve.get_replica_context().replica_tag)


def node_id() -> str:
    """Ray's id of the node that this runs on."""
    return str(ray.get_runtime_context().get_node_id())


class _Endpoint:
    """What all ends have in common: a host, and the knowledge of whether this replica is shutting down.

    Serve tells a replica that it is to stop only after its last request has ended, and the streams of a link are
    requests that never end by themselves. But a replica that is to stop is not listed any more, and so it learns. Of
    links through sockets Serve knows nothing: a replica that has no others stops at once, which peers take as they take
    the end of a link.

    Attributes:
        within_machines: Whether links to peers on the same machine go through its sockets, where it has them.
    """

    within_machines = True
    _host: Host[Any] | None = None
    _local: LocalAnswerer | None = None
    _recorder: Recorder | None = None
    _closing = False

    def _open(self, host: Host[Any], stall_s: float, times: LinkTimes) -> None:
        self._host = host
        self._stall_s = stall_s
        self._times = times
        self._me = replica_id()
        self._reachable = True
        self._watches: list[Discovery] = []
        self._groups: list[tuple[Discovery, LinkKeeper]] = []
        self._current: dict[str, frozenset[str]] = {}
        host.start()

    def _answer_within(self, host: Host[Any]) -> None:
        """Answer peers on the same machine."""
        if self.within_machines:
            self._local = LocalAnswerer(self._me, node_id(), host, self._refusal, self._times)
            self._local.start()

    def _dial_within(self, host: Host[Any], elsewhere: Dial) -> Dial:
        """Dials that go through a socket where the peer is on the same machine."""
        if not self.within_machines:
            return elsewhere
        return LocalDialer(self._me, node_id(), host, elsewhere, self._times).dial

    async def identity(self) -> Identity:
        """Where this replica runs."""
        context = serve.get_replica_context()
        return Identity(context.deployment, self._me, os.getpid(), node_id())

    async def recorded(self) -> WorkerTrace | None:
        """What this replica's recorder holds; None where nothing is recorded."""
        return None if self._recorder is None else self._recorder.trace()

    def _open_traced(self, host: Host[Any], recorder: Recorder | None) -> None:
        """Record what comes in, where there is a recorder; before the host starts."""
        self._recorder = recorder
        host.on_arrival = None if recorder is None else recorder.arrived

    async def check_health(self) -> None:
        """Serve's health check: the machine's progress, not the event loop's.

        Raises:
            HostFailedError: The machine has raised, or hangs.
        """
        if self._host is not None:
            self._host.check(self._stall_s)

    def linked_peers(self) -> frozenset[str]:
        """Replica ids of the peers that this replica keeps links to, and whose link is up."""
        return frozenset().union(*(keeper.linked for _, keeper in self._groups))

    def close_transport(self) -> None:
        """End links, tasks and the machine's host; idempotent."""
        host, self._host = self._host, None
        if host is None:
            return
        self._closing = True
        for watch in self._watches:
            watch.close()
        for _, keeper in self._groups:
            keeper.close()
        if self._local is not None:
            self._local.close()
        host.stop()

    def __del__(self) -> None:
        self.close_transport()

    def _watch(self, deployment: str, on_change: Callable[[frozenset[str]], None]) -> Discovery:
        watch = Discovery(deployment, serve.get_replica_context().app_name, on_change)
        self._watches.append(watch)
        watch.start()
        return watch

    def _watch_self(self) -> None:
        self._reachable = False  # peers call back by replica id, which fails until this replica is listed
        self._watch(serve.get_replica_context().deployment, self._on_own_list)

    def _on_own_list(self, listed: frozenset[str]) -> None:
        was_reachable, self._reachable = self._reachable, self._me in listed
        self._closing = not self._reachable and (was_reachable or self._closing)
        self._update_groups()
        if self._closing and self._host is not None:
            self._host.unlink_all()

    def _keep_links(self, group: PeerGroup[M], host: Host[M], dialer: Callable[[Discovery], Dial]) -> None:
        """Keep links to all live replicas of a group."""

        def joined(peer: str) -> None:
            host.tell(lambda machine, now_s: group.joined(machine, peer, now_s))

        def lost(peer: str) -> None:
            host.tell(lambda machine, now_s: group.lost(machine, peer, now_s))

        def listed(replica_ids: frozenset[str]) -> None:
            self._current[group.deployment] = replica_ids
            self._update_groups()

        watch = self._watch(group.deployment, listed)
        self._groups.append((watch, LinkKeeper(dialer(watch), joined, lost, self._times)))

    def _update_groups(self) -> None:
        nobody: frozenset[str] = frozenset()
        for watch, keeper in self._groups:
            keeper.update(self._current.get(watch.deployment, nobody) if self._reachable else nobody)

    def _refusal(self, hello: Hello) -> str | None:
        """Why a call is refused, if it is."""
        if hello.callee != self._me:
            return f"the call is for {hello.callee}"
        if self._host is None or self._closing:
            return "the replica is shutting down"
        return "the machine has failed" if self._host.failed else None


class WorkerEndpoint(_Endpoint):
    """For a deployment that works for routers: call ``start_worker`` at the end of ``__init__``."""

    def start_worker(
        self,
        machine: M,
        *,
        routers: str,
        stall_s: float,
        times: LinkTimes = DEFAULT_TIMES,
        idle_wait_s: float = 0.005,
        recorder: Recorder | None = None,
    ) -> WorkerHost[Any]:
        """Run a machine on a thread of its own, for every router that asks for results.

        Args:
            machine: The machine; its peers are routers, by replica id.
            routers: Name of the routers' deployment, in the same application.
            stall_s: A step that takes longer makes the replica unhealthy.
            times: How patient links are.
            idle_wait_s: Precision of the machine's timers.
            recorder: Keeps the machine's messages and turns; None where nobody wants to see them.
        """
        host = _worker_host(machine, recorder, idle_wait_s)
        self._open_traced(host, recorder)
        self._open(host, stall_s, times)
        shift_niceness(GOES_EARLY, spared=host.thread_id)  # which sees to its own
        self._watch_self()
        self._answerer = WorkerAnswerer(self._me, host, self._watch(routers, _ignore), times)
        self._answer_within(host)
        return host

    async def results(self, hello: Hello) -> Stream:
        """What a router reads from this worker."""
        refusal = self._refusal(hello)
        if refusal is not None:
            yield Greeting(self._me, refusal)
            return
        async with aclosing(self._answerer.results(hello)) as stream:
            async for item in stream:
                yield item


class RouterEndpoint(_Endpoint):
    """For a deployment that routes: call ``start_router`` at the end of ``__init__``."""

    def start_router(
        self,
        machine: M,
        *,
        workers: Sequence[PeerGroup[Any]],
        stall_s: float = 60.0,
        times: LinkTimes = DEFAULT_TIMES,
        tick_s: float = 0.05,
        recorder: Recorder | None = None,
    ) -> LoopHost[Any]:
        """Run a machine on the event loop, with links to all live workers and from every ingress that asks.

        Args:
            machine: The machine; its peers are workers and ingress replicas, by replica id.
            workers: The deployments to keep links to; with a recorder, what they are told of is not ``machine`` itself.
            stall_s: As for workers; a machine on the loop can only fail, or hang with it.
            times: How patient links are.
            tick_s: Precision of the machine's timers.
            recorder: As for workers.
        """
        shift_niceness(GOES_EARLY)
        host = LoopHost(traced(machine, recorder), tick_s=tick_s)
        self._open_traced(host, recorder)
        self._open(host, stall_s, times)
        self._dialers: list[WorkerDialer] = []
        self._answerer = IngressAnswerer(self._me, host, times)
        for group in workers:
            self._keep_links(group, host, self._dial_workers)
        self._answer_within(host)
        self._watch_self()
        return host

    async def all_recorded(self) -> list[WorkerTrace]:
        """What this replica's recorder holds, and those of the workers that it has links to."""
        asked = [
            pinned(watch.handle, "recorded", peer, stream=False).remote()
            for watch, keeper in self._groups
            for peer in sorted(keeper.linked)
        ]
        found = await asyncio.gather(self.recorded(), *asked)
        return [trace for trace in found if trace is not None]

    def _dial_workers(self, workers: Discovery) -> Dial:
        assert self._host is not None
        dialer = WorkerDialer(self._me, self._host, workers, self._times)
        self._dialers.append(dialer)
        return self._dial_within(self._host, dialer.dial)

    async def feed(self, hello: Hello) -> Stream:
        """What a worker reads from this router."""
        refusal = self._refusal(hello)
        dialer = next((dialer for dialer in self._dialers if dialer.expects(hello)), None)
        if refusal is not None or dialer is None:
            yield Greeting(self._me, refusal or "there is no such link")
            return
        async with aclosing(dialer.feed(hello)) as stream:
            async for item in stream:
                yield item

    async def events(self, hello: Hello) -> Stream:
        """What an ingress reads from this router."""
        refusal = self._refusal(hello)
        if refusal is not None:
            yield Greeting(self._me, refusal)
            return
        async with aclosing(self._answerer.events(hello)) as stream:
            async for item in stream:
                yield item

    async def post(self, hello: Hello, batch: Batch) -> str | None:
        """What an ingress sends to this router; answers with why it was refused, if it was."""
        refusal = self._refusal(hello)
        if refusal is None:
            self._answerer.post(batch)
        return refusal


class IngressEndpoint(_Endpoint):
    """For a deployment that takes requests: call ``start_ingress`` at the end of ``__init__``."""

    def start_ingress(
        self,
        machine: M,
        *,
        routers: PeerGroup[M],
        after: Callable[[M], None],
        times: LinkTimes = DEFAULT_TIMES,
        tick_s: float = 0.05,
    ) -> LoopHost[M]:
        """Run a machine on the event loop, with links to all live routers.

        Args:
            machine: The machine; its peers are routers, by replica id.
            routers: The deployment to keep links to.
            after: Called with the machine after each of its turns, to take deliveries.
            times: How patient links are.
            tick_s: Precision of the machine's timers.

        Returns:
            The host; requests are started and cancelled by its ``tell``.
        """
        shift_niceness(GIVES_WAY)
        host = LoopHost(machine, tick_s=tick_s, after=after)
        self._open(host, stall_s=60.0, times=times)
        self._keep_links(
            routers, host, lambda watch: self._dial_within(host, RouterDialer(self._me, host, watch, times).dial)
        )
        return host


def _worker_host(machine: Any, recorder: Recorder | None, idle_wait_s: float) -> WorkerHost[Any]:
    driven = traced(machine, recorder)
    if isinstance(machine, TargetMachine):
        steady = SteadyHost(driven, LIGHT, idle_wait_s=idle_wait_s)
        machine.meanwhile = steady.meanwhile
        return steady
    if isinstance(machine, DraftWorkerMachine):
        sharing = SharingHost(driven, DRAFTER_LIGHT, idle_wait_s=idle_wait_s)
        machine.drafter.meanwhile = sharing.meanwhile
        return sharing
    return WorkerHost(driven, idle_wait_s=idle_wait_s)


def _ignore(_replica_ids: frozenset[str]) -> None:
    """A handle is all that is wanted."""
