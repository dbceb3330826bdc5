"""The transport over a real Serve on this machine: two workers, two routers, an ingress, machines that echo.

The tests share one application; those that kill replicas come last. Latencies are measured and reported as properties
of the tests (``pytest --log-cli-level=INFO`` shows them), and never asserted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
from ray import cloudpickle, serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.transport.endpoints import (
    IngressEndpoint,
    PeerGroup,
    RouterEndpoint,
    WorkerEndpoint,
    replica_id,
)
from deployments.transport.host import Host
from deployments.transport.options import pinned_options
from deployments.transport.wire import Greeting, Hello, Identity, LinkTimes

cloudpickle.register_pickle_by_value(sys.modules[__name__])
logger = logging.getLogger(__name__)

APP = "transport"
TIMES = LinkTimes(open_timeout_s=3.0, heartbeat_s=0.3, silence_s=2.0)
WAIT_S = 60.0
"""Longest wait for what takes seconds: a replica that is started anew, on a busy machine."""
INGRESS_OPTIONS: dict[str, Any] = {
    "health_check_period_s": 1.0,
    "graceful_shutdown_timeout_s": 300.0,
    "graceful_shutdown_wait_loop_s": 0.2,
    "ray_actor_options": {"num_cpus": 0.1},
}
OPTIONS: dict[str, Any] = {**pinned_options(), **INGRESS_OPTIONS}

Message = tuple[Any, ...]


class Node:
    """A machine that keeps what it gets, and sends what it is told to."""

    def __init__(self) -> None:
        self.name = replica_id()
        self.got: list[Message] = []
        self.peers: set[str] = set()
        self.events: list[tuple[str, str, float]] = []
        self._outbox: dict[str, list[Message]] = defaultdict(list)

    def joined(self, peer: str, now_s: float) -> None:
        self.peers.add(peer)
        self.events.append(("joined", peer, time.time()))

    def lost(self, peer: str, now_s: float) -> None:
        self.peers.discard(peer)
        self.events.append(("lost", peer, time.time()))

    def send(self, peer: str, *message: Any) -> None:
        self._outbox[peer].append((*message, time.time()))

    def receive(self, message: Message, now_s: float) -> None:
        self.got.append((*message, time.time()))

    def step(self, now_s: float) -> bool:
        return False

    def take_outbox(self) -> dict[str, list[Message]]:
        outbox, self._outbox = self._outbox, defaultdict(list)
        return outbox


class EchoNode(Node):
    """Answers pings."""

    def receive(self, message: Message, now_s: float) -> None:
        kind, sender, number, sent_s = message
        if kind == "poison":
            raise ValueError("poisoned")
        self.send(sender, "pong", self.name, number, time.time() - sent_s)


class RelayNode(Node):
    """Sends what an ingress asks for to all workers, and what they answer to whoever asked."""

    def receive(self, message: Message, now_s: float) -> None:
        super().receive(message, now_s)
        if message[0] == "ask":
            _, ingress, number, _ = message
            for peer in self.peers:
                self.send(peer, "ping", self.name, (ingress, number))
        elif message[0] == "pong" and isinstance(message[2], tuple):
            self.send(message[2][0], "told", message[1], message[2][1])


class Debug:
    """What the tests ask of a replica beside its work."""

    def debug(self, node: Node, host: Host[Any]) -> None:
        self.node, self.host, self.num_batches = node, host, 0
        post = host.post

        def counting_post(batch: Any) -> None:
            self.num_batches += 1
            post(batch)

        host.post = counting_post

    async def state(self) -> tuple[set[str], list[tuple[str, str, float]]]:
        return set(self.node.peers), list(self.node.events)

    async def num_tasks(self) -> Counter[str]:
        """Tasks of the transport on this loop, by what they run."""
        coroutines = [task.get_coro() for task in asyncio.all_tasks()]
        return Counter(c.__qualname__ for c in coroutines if "deployments/transport" in c.cr_code.co_filename)

    async def exchange(self, peer: str, messages: list[Message], num_answers: int, gap_s: float) -> list[Message]:
        """Send messages to a peer, with a gap after each; all in one turn if it is 0. Returns what came."""
        self.node.got.clear()
        self.num_batches = 0
        for message in messages:
            self.host.tell(lambda node, _now_s, message=message: node.send(peer, *message))
            if gap_s:
                await asyncio.sleep(gap_s)
        async with asyncio.timeout(20):
            while len(self.node.got) < num_answers:
                await asyncio.sleep(0.01)
        return list(self.node.got)

    async def batches(self) -> int:
        return self.num_batches

    async def pid(self) -> int:
        return os.getpid()


@serve.deployment(num_replicas=2, **OPTIONS)
class Worker(Debug, WorkerEndpoint):
    def __init__(self) -> None:
        node = EchoNode()
        self.debug(node, self.start_worker(node, routers="Router", stall_s=30.0, times=TIMES))


@serve.deployment(num_replicas=2, **OPTIONS)
class Router(Debug, RouterEndpoint):
    def __init__(self, worker: DeploymentHandle) -> None:
        node = RelayNode()
        group = PeerGroup("Worker", RelayNode.joined, RelayNode.lost)
        self.debug(node, self.start_router(node, workers=[group], times=TIMES))


@serve.deployment(**INGRESS_OPTIONS)
class Ingress(Debug, IngressEndpoint):
    def __init__(self, router: DeploymentHandle) -> None:
        node = Node()
        group = PeerGroup("Router", Node.joined, Node.lost)
        self.debug(node, self.start_ingress(node, routers=group, after=lambda _node: None, times=TIMES))


class Service:
    """The application under test, from outside."""

    def __init__(self) -> None:
        self.handles = {name: serve.get_deployment_handle(name, APP) for name in ("Worker", "Router", "Ingress")}

    def replicas(self, deployment: str) -> dict[str, int]:
        """Process ids of the live replicas, by replica id."""
        found = self.handles[deployment].broadcast("identity").results(timeout_s=10, return_exceptions=True)
        return {identity.replica: identity.pid for identity in found if isinstance(identity, Identity)}

    def call(self, deployment: str, replica: str, method: str, *args: Any) -> Any:
        handle = self.handles[deployment].options(session_id=replica, method_name=method, _by_reference=False)
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


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"still not after {WAIT_S} s: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
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
        serve.run(Ingress.bind(Router.bind(Worker.bind())), name=APP, route_prefix=None)
        service = Service()
        until(service.is_linked, "all are linked")
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


def test_messages_travel_both_ways_once(service: Service, report: Report) -> None:
    for router in service.replicas("Router"):
        for worker in service.replicas("Worker"):
            pings = [("ping", router, number) for number in range(100)]
            pongs = service.call("Router", router, "exchange", worker, pings, len(pings), 0.01)
            assert [pong[:3] for pong in pongs] == [("pong", worker, number) for number in range(100)]
            report("one way, router to worker", [took_s for *_, took_s, _, _ in pongs])
            report("one way, worker to router", [got_s - sent_s for *_, sent_s, got_s in pongs])


def test_messages_sent_at_once_arrive_as_few_items(service: Service) -> None:
    router, worker = next(iter(service.replicas("Router"))), next(iter(service.replicas("Worker")))
    pings = [("ping", router, number) for number in range(1000)]
    pongs = service.call("Router", router, "exchange", worker, pings, len(pings), 0.0)
    assert [pong[2] for pong in pongs] == list(range(1000))
    assert service.call("Worker", worker, "batches") > 0
    assert service.call("Router", router, "batches") <= 20


def test_an_ingress_reaches_the_workers_through_any_router(service: Service, report: Report) -> None:
    [ingress] = service.replicas("Ingress")
    for router in service.replicas("Router"):
        asks = [("ask", ingress, number) for number in range(50)]
        told = service.call("Ingress", ingress, "exchange", router, asks, 100, 0.01)
        assert Counter(message[:3] for message in told) == {
            ("told", worker, number): 1 for worker in service.replicas("Worker") for number in range(50)
        }
        report("one way, router to ingress", [got_s - sent_s for *_, sent_s, got_s in told])


def test_calls_reach_the_replica_they_are_pinned_to(service: Service) -> None:
    for deployment in ("Worker", "Router"):
        for replica, pid in service.replicas(deployment).items():
            assert {service.call(deployment, replica, "pid") for _ in range(20)} == {pid}
        assert {service.call(deployment, "", "pid") for _ in range(40)} == set(service.replicas(deployment).values())


def test_a_call_for_a_replica_that_is_gone_is_refused_by_another(service: Service) -> None:
    hello = Hello("me", "gone", "link")
    for deployment, method in (("Worker", "results"), ("Router", "feed"), ("Router", "events")):
        handle = service.handles[deployment].options(
            session_id="gone", stream=True, method_name=method, _by_reference=False
        )
        [greeting] = list(handle.remote(hello))
        assert isinstance(greeting, Greeting)
        assert greeting.refusal == "the call is for gone"
    assert service.call("Router", "gone", "post", hello, ()) == "the call is for gone"


def test_a_feed_is_given_only_for_a_link_that_is_being_opened(service: Service) -> None:
    router = next(iter(service.replicas("Router")))
    handle = service.handles["Router"].options(session_id=router, stream=True, _by_reference=False)
    [greeting] = list(handle.feed.remote(Hello("me", router, "link")))
    assert greeting.refusal == "there is no such link"


def test_a_machine_that_fails_is_lost_at_once_and_replaced(service: Service, report: Report) -> None:
    routers, victim = list(service.replicas("Router")), next(iter(service.replicas("Worker")))
    start_s = time.time()
    service.call("Router", routers[0], "exchange", victim, [("poison", routers[0], 0)], 0, 0.0)
    until(lambda: victim not in service.replicas("Worker") and service.is_linked(), "replaced")
    for router in routers:
        (lost, lost_peer, lost_s), (joined, _, joined_s) = service.events("Router", router, start_s)
        assert (lost, lost_peer, joined) == ("lost", victim, "joined")
        report("failed machine, until it is told", [lost_s])
        report("failed machine, until another is linked", [joined_s])


def test_killed_workers_are_told_replaced_and_linked(service: Service, report: Report) -> None:
    before = {router: service.call("Router", router, "num_tasks") for router in service.replicas("Router")}
    for victim, pid in service.replicas("Worker").items():
        start_s = time.time()
        os.kill(pid, signal.SIGKILL)
        until(lambda victim=victim: victim not in service.replicas("Worker") and service.is_linked(), "replaced")
        for router in before:
            (lost, lost_peer, lost_s), (joined, _, joined_s) = service.events("Router", router, start_s)
            assert (lost, lost_peer, joined) == ("lost", victim, "joined")
            report("killed worker, until it is told", [lost_s])
            report("killed worker, until another is linked", [joined_s])
    assert {router: service.call("Router", router, "num_tasks") for router in before} == before


def test_a_killed_router_is_told_replaced_and_linked(service: Service, report: Report) -> None:
    [ingress] = service.replicas("Ingress")
    victim, pid = next(iter(service.replicas("Router").items()))
    others = [("Ingress", ingress), *(("Worker", worker) for worker in service.replicas("Worker"))]
    before = [service.call(*other, "num_tasks") for other in others]
    start_s = time.time()
    os.kill(pid, signal.SIGKILL)
    until(lambda: victim not in service.replicas("Router") and service.is_linked(), "replaced")
    (lost, lost_peer, lost_s), (joined, _, joined_s) = service.events("Ingress", ingress, start_s)
    assert (lost, lost_peer, joined) == ("lost", victim, "joined")
    report("killed router, until its ingress is told", [lost_s])
    report("killed router, until another is linked", [joined_s])
    assert [service.call(*other, "num_tasks") for other in others] == before


def test_a_worker_that_hangs_is_lost_and_linked_again_when_it_goes_on(service: Service, report: Report) -> None:
    routers, (victim, pid) = list(service.replicas("Router")), next(iter(service.replicas("Worker").items()))
    start_s = time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: all(service.events("Router", router, start_s) for router in routers), "it is told")
    finally:
        os.kill(pid, signal.SIGCONT)
    until(service.is_linked, "linked again")
    for router in routers:
        (lost, lost_peer, lost_s), *_, (joined, joined_peer, _) = service.events("Router", router, start_s)
        assert (lost, lost_peer, joined, joined_peer) == ("lost", victim, "joined", victim)
        report("hanging worker, until it is told", [lost_s])


def test_replicas_stop_without_being_killed(service: Service, report: Report) -> None:
    """They would be killed after ``graceful_shutdown_timeout_s``, which is longer than this test may take."""
    pids = [pid for deployment in service.handles for pid in service.replicas(deployment).values()]
    start_s = time.time()
    serve.delete(APP)
    report("stopping all replicas", [time.time() - start_s])
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "all processes have ended")
