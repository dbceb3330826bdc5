"""A small application of the transport on a real Serve: two workers, two routers, an ingress, machines that echo."""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import pytest

from cluster.config.environment import prepare_for_ray

prepare_for_ray()

import ray  # noqa: E402
from fastapi import FastAPI  # noqa: E402
from ray import cloudpickle, serve  # noqa: E402
from ray.exceptions import RayError  # noqa: E402
from ray.serve.exceptions import RayServeException  # noqa: E402
from ray.serve.handle import DeploymentHandle  # noqa: E402

from deployments.transport.discovery import pinned_options  # noqa: E402
from deployments.transport.endpoints import (  # noqa: E402
    IngressEndpoint,
    PeerGroup,
    RouterEndpoint,
    WorkerEndpoint,
    replica_id,
)
from deployments.transport.host import Host  # noqa: E402
from deployments.transport.wire import Identity, LinkTimes  # noqa: E402
from specdec.core.messages import Alive  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # replicas cannot import it
logger = logging.getLogger(__name__)

APP = "transport"
TIMES = LinkTimes(heartbeat_s=0.3, peer_timeout_s=3.0)
WAIT_S = 60.0
INGRESS_OPTIONS: dict[str, Any] = {
    "health_check_period_s": 1.0,
    "graceful_shutdown_timeout_s": 300.0,
    "graceful_shutdown_wait_loop_s": 0.2,
    "ray_actor_options": {"num_cpus": 0.1},
}
OPTIONS: dict[str, Any] = {**INGRESS_OPTIONS, **pinned_options(300.0)}


class Sent(NamedTuple):
    """What a message of these tests says; it travels as an ``Alive``."""

    kind: str
    sender: str
    number: float
    sent_s: float
    then_s: float = 0.0

    def packed(self) -> Alive:
        return Alive(
            f"{self.kind} {self.sender}", {"number": self.number, "sent_s": self.sent_s, "then_s": self.then_s}
        )

    @staticmethod
    def unpacked(message: Alive) -> Sent:
        return Sent(*message.worker.split(), **message.metrics)


class Node:
    """A machine that keeps what it gets, and sends what it is told to."""

    def __init__(self) -> None:
        self.name = replica_id()
        self.got: list[tuple[Sent, float]] = []
        self.peers: set[str] = set()
        self.events: list[tuple[str, str, float]] = []
        self.is_drained = True
        self._outbox: dict[str, list[Alive]] = defaultdict(list)

    def joined(self, peer: str, now_s: float) -> None:
        self.peers.add(peer)
        self.events.append(("joined", peer, time.time()))

    def lost(self, peer: str, now_s: float) -> None:
        self.peers.discard(peer)
        self.events.append(("lost", peer, time.time()))

    def send(self, peer: str, kind: str, number: float, sender: str = "", then_s: float = 0.0) -> None:
        self._outbox[peer].append(Sent(kind, sender or self.name, number, time.time(), then_s).packed())

    def receive(self, message: Alive, now_s: float) -> None:
        self.take(Sent.unpacked(message))

    def take(self, sent: Sent) -> None:
        self.got.append((sent, time.time()))

    def step(self, now_s: float) -> bool:
        return False

    def take_outbox(self) -> dict[str, list[Alive]]:
        outbox, self._outbox = self._outbox, defaultdict(list)
        return outbox

    def drain(self, now_s: float) -> None:
        self.events.append(("drains", "", time.time()))


class EchoNode(Node):
    """Answers pings."""

    def take(self, sent: Sent) -> None:
        if sent.kind == "poison":
            raise ValueError("poisoned")
        if sent.kind == "release":
            self.is_drained = True
            return
        self.send(sent.sender, "pong", sent.number, then_s=time.time() - sent.sent_s)


class RelayNode(Node):
    """Sends what an ingress asks for to all workers, and what they answer to the ingress."""

    ingress = ""

    def take(self, sent: Sent) -> None:
        super().take(sent)
        if sent.kind == "ask":
            self.ingress = sent.sender
            for peer in self.peers:
                self.send(peer, "ping", sent.number)
        elif self.ingress:
            self.send(self.ingress, "told", sent.number, sent.sender)


class Debug:
    """What the tests ask of a replica beside its work."""

    def debug(self, node: Node, host: Host[Any]) -> None:
        self.node, self.host, self.num_batches = node, host, 0
        post = host.post

        def counting_post(batch: Any) -> None:
            self.num_batches += 1
            post(batch)

        host.post = counting_post
        self.is_sick = False

    async def fall_sick(self) -> None:
        self.is_sick = True

    async def check_health(self) -> None:
        if self.is_sick:
            raise RuntimeError("sick, though all links are up")
        await super().check_health()

    async def state(self) -> tuple[set[str], list[tuple[str, str, float]]]:
        return set(self.node.peers), list(self.node.events)

    async def num_tasks(self) -> Counter[str]:
        """Tasks of the transport on this loop, by what they run."""
        coroutines = [task.get_coro() for task in asyncio.all_tasks()]
        return Counter(
            c.__qualname__ for c in coroutines if "deployments/transport" in getattr(c.cr_code, "co_filename", "")
        )

    async def exchange(
        self, peer: str, kind: str, count: int, num_answers: int, gap_s: float
    ) -> list[tuple[Sent, float]]:
        """Send numbered messages to a peer, with a gap after each; all in one turn if it is 0. Returns what came."""
        self.node.got.clear()
        self.num_batches = 0
        for number in range(count):
            self.host.tell(lambda node, _now_s, number=number: node.send(peer, kind, number))
            if gap_s:
                await asyncio.sleep(gap_s)
        async with asyncio.timeout(20):
            while len(self.node.got) < num_answers:
                await asyncio.sleep(0.01)
        return list(self.node.got)

    async def batches(self) -> int:
        return self.num_batches

    async def begin_work(self) -> None:
        """Be drained no sooner than a peer says ``release``."""
        self.node.is_drained = False

    async def pid(self) -> int:
        return os.getpid()


@serve.deployment(num_replicas=2, **OPTIONS)
class Worker(Debug, WorkerEndpoint):
    def __init__(self) -> None:
        node = EchoNode()
        self.debug(node, self.start_worker(node, routers="Router", step_timeout_s=30.0, times=TIMES))


@serve.deployment(num_replicas=2, **OPTIONS)
class Router(Debug, RouterEndpoint):
    def __init__(self, worker: DeploymentHandle) -> None:
        node = RelayNode()
        group = PeerGroup("Worker", RelayNode.joined, RelayNode.lost)
        self.debug(node, self.start_router(node, workers=[group], times=TIMES))


@serve.deployment(**INGRESS_OPTIONS)
@serve.ingress(FastAPI())
class Ingress(Debug, IngressEndpoint):
    def __init__(self, router: DeploymentHandle) -> None:
        node = Node()
        group = PeerGroup("Router", Node.joined, Node.lost)
        self.debug(node, self.start_ingress(node, routers=group, after=lambda _node: None, times=TIMES))


class Service:
    """The application under test, from outside."""

    times = TIMES

    def __init__(self) -> None:
        self.handles = {name: serve.get_deployment_handle(name, APP) for name in ("Worker", "Router", "Ingress")}
        for handle in self.handles.values():
            handle._init(_run_router_in_separate_loop=True)  # tests call them outside of any event loop

    @staticmethod
    def until(condition: Callable[[], bool], what: str) -> None:
        """Wait for what takes seconds: a replica that is started anew, on a busy machine."""
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s, f"still not after {WAIT_S} s: {what}"
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop all replicas."""
        serve.delete(APP)

    def replicas(self, deployment: str) -> dict[str, int]:
        """Process ids of the live replicas, by replica id."""
        found = self.handles[deployment].broadcast("identity").results(timeout_s=10, return_exceptions=True)
        return {identity.replica: identity.pid for identity in found if isinstance(identity, Identity)}

    def call(self, deployment: str, replica: str, method: str, *args: Any) -> Any:
        handle = self.handles[deployment].options(session_id=replica, method_name=method)
        return handle.remote(*args).result(timeout_s=30)

    def is_linked(self) -> bool:
        """Whether there are two workers, two routers and an ingress, with all their links."""
        try:
            workers, routers, ingresses = (set(self.replicas(name)) for name in self.handles)
            return (
                (len(workers), len(routers), len(ingresses)) == (2, 2, 1)
                and all(self.call("Router", router, "state")[0] == workers for router in routers)
                and all(self.call("Ingress", ingress, "state")[0] == routers for ingress in ingresses)
            )
        except (RayServeException, RayError, TimeoutError):
            return False

    def events(self, deployment: str, replica: str, since_s: float) -> list[tuple[str, str, float]]:
        """Links that came and went since a wall-clock time, with the seconds since then."""
        _, events = self.call(deployment, replica, "state")
        return [(kind, peer, when_s - since_s) for kind, peer, when_s in events if when_s >= since_s]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        # To a sick replica Serve is as gentle here as in an update, so that one alone can be stopped.
        patch.setenv("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "0")
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            num_cpus=4,
            object_store_memory=100 << 20,
            _node_ip_address="127.0.0.1",
        )
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        ingress, router, worker = (cast(Any, one) for one in (Ingress, Router, Worker))
        application = ingress.bind(router.bind(worker.bind()))
        serve.run(application, name=APP, route_prefix=None)
        service = Service()
        service.until(service.is_linked, "all are linked")
        yield service
    finally:
        serve.shutdown()
        ray.shutdown()


Report = Callable[..., None]


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    def add(what: str, values_s: list[float]) -> None:
        p50, p90 = statistics.median(values_s), sorted(values_s)[int(0.9 * len(values_s))]
        text = f"p50 {p50 * 1e3:.2f} ms, p90 {p90 * 1e3:.2f} ms of {len(values_s)}"
        record_property(what, text)
        logger.info("%s: %s", what, text)

    return add
