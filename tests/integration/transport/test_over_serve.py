"""The transport over a real Serve.

The tests share one application; those that kill replicas come last. Latencies are measured and reported as properties
of the tests (``pytest --log-cli-level=INFO`` shows them), and never asserted.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from deployments.transport.wire import Greeting, Hello, decode, encode

Service = Any
"""The fixture's application; see ``conftest``."""
Report = Callable[[str, list[float]], None]


def test_messages_travel_both_ways_once(service: Service, report: Report) -> None:
    for router in service.replicas("Router"):
        for worker in service.replicas("Worker"):
            pongs = service.call("Router", router, "exchange", worker, "ping", 100, 100, 0.01)
            assert [pong[:3] for pong, _ in pongs] == [("pong", worker, number) for number in range(100)]
            report("one way, router to worker", [pong.then_s for pong, _ in pongs])
            report("one way, worker to router", [got_s - pong.sent_s for pong, got_s in pongs])


def test_messages_sent_at_once_arrive_as_few_items(service: Service) -> None:
    router, worker = next(iter(service.replicas("Router"))), next(iter(service.replicas("Worker")))
    pongs = service.call("Router", router, "exchange", worker, "ping", 1000, 1000, 0.0)
    assert [pong.number for pong, _ in pongs] == list(range(1000))
    assert service.call("Worker", worker, "batches") > 0
    assert service.call("Router", router, "batches") <= 20


def test_an_ingress_reaches_the_workers_through_any_router(service: Service, report: Report) -> None:
    [ingress] = service.replicas("Ingress")
    for router in service.replicas("Router"):
        told = service.call("Ingress", ingress, "exchange", router, "ask", 50, 100, 0.01)
        assert Counter(sent[:3] for sent, _ in told) == {
            ("told", worker, number): 1 for worker in service.replicas("Worker") for number in range(50)
        }
        report("one way, router to ingress", [got_s - sent.sent_s for sent, got_s in told])


def test_calls_reach_the_replica_they_are_pinned_to(service: Service) -> None:
    for deployment in ("Worker", "Router"):
        for replica, pid in service.replicas(deployment).items():
            assert {service.call(deployment, replica, "pid") for _ in range(20)} == {pid}
        assert {service.call(deployment, "", "pid") for _ in range(40)} == set(service.replicas(deployment).values())


def test_a_call_for_a_replica_that_is_gone_is_refused_by_another(service: Service) -> None:
    handle = service.handles["Router"].options(session_id="gone", response_serialization="noop")
    [greeting] = list(handle.options(stream=True).link.remote(bytes(16) + encode(Hello("me", "gone", "Worker"))))
    assert decode(greeting, Greeting).refusal == "the call is for gone"
    assert handle.post.remote(bytes(16)).result(timeout_s=30) == b"\x00", "there is no such link"


def test_a_call_that_is_no_hello_ends(service: Service) -> None:
    handle = service.handles["Router"].options(stream=True, response_serialization="noop")
    assert list(handle.link.remote(bytes(16) + b"garbage")) == []


def lost_and_replaced(events: list[tuple[str, str, float]], victim: str) -> tuple[float, float]:
    """When a peer was lost, and another linked in its place; nothing else happened."""
    (lost, lost_peer, lost_s), (joined, joined_peer, joined_s) = events
    assert (lost, lost_peer, joined) == ("lost", victim, "joined")
    assert joined_peer != victim
    return lost_s, joined_s


def test_a_worker_whose_machine_fails_is_lost_at_once_and_replaced(service: Service, report: Report) -> None:
    routers, victim = list(service.replicas("Router")), next(iter(service.replicas("Worker")))
    start_s = time.time()
    service.call("Router", routers[0], "exchange", victim, "poison", 1, 0, 0.0)
    service.until(lambda: victim not in service.replicas("Worker") and service.is_linked(), "it is replaced")
    for router in routers:
        lost_s, joined_s = lost_and_replaced(service.events("Router", router, start_s), victim)
        report("failed machine, until it is told", [lost_s])
        report("failed machine, until another is linked", [joined_s])


def test_an_idle_link_stays_up(service: Service) -> None:
    start_s = time.time()
    time.sleep(1.5 * service.times.peer_timeout_s)
    for router in service.replicas("Router"):
        assert service.events("Router", router, start_s) == []
    for ingress in service.replicas("Ingress"):
        assert service.events("Ingress", ingress, start_s) == []


def test_a_killed_worker_is_told_replaced_and_linked(service: Service, report: Report) -> None:
    before = {router: service.call("Router", router, "num_tasks") for router in service.replicas("Router")}
    victim, pid = next(iter(service.replicas("Worker").items()))
    start_s = time.time()
    os.kill(pid, signal.SIGKILL)
    service.until(lambda: victim not in service.replicas("Worker") and service.is_linked(), "it is replaced")
    for router in before:
        lost_s, joined_s = lost_and_replaced(service.events("Router", router, start_s), victim)
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
    service.until(lambda: victim not in service.replicas("Router") and service.is_linked(), "it is replaced")
    lost_s, joined_s = lost_and_replaced(service.events("Ingress", ingress, start_s), victim)
    report("killed router, until its ingress is told", [lost_s])
    report("killed router, until another is linked", [joined_s])
    assert [service.call(*other, "num_tasks") for other in others] == before


def test_a_worker_that_hangs_is_lost_and_linked_again_when_it_goes_on(service: Service, report: Report) -> None:
    routers, (victim, pid) = list(service.replicas("Router")), next(iter(service.replicas("Worker").items()))
    start_s = time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        service.until(lambda: all(service.events("Router", router, start_s) for router in routers), "it is told")
    finally:
        os.kill(pid, signal.SIGCONT)
    service.until(service.is_linked, "it is linked again")
    for router in routers:
        events = service.events("Router", router, start_s)
        assert {peer for _, peer, _ in events} == {victim}
        assert [kind for kind, _, _ in events] == ["lost", "joined"]
        report("hanging worker, until it is told", [events[0][2]])


@pytest.mark.parametrize("deployment", ["Worker", "Router"])
def test_a_replica_that_alone_is_stopped_drains_and_then_ends(
    service: Service, report: Report, deployment: str
) -> None:
    """Serve stops it gently, as in an update: it waits for the machine, and would kill it only after 300 s."""
    victim, pid = next(iter(service.replicas(deployment).items()))
    others = service.replicas("Worker" if deployment == "Router" else "Router")
    if deployment == "Worker":
        service.call(deployment, victim, "begin_work")
    start_s = time.time()
    service.call(deployment, victim, "fall_sick")
    service.until(lambda: victim not in service.replicas(deployment), "it is listed no more")
    if deployment == "Worker":
        time.sleep(2 * service.times.peer_timeout_s)
        assert os.path.exists(f"/proc/{pid}")
        for router in others:
            events = service.events("Router", router, start_s)
            assert ("lost", victim) not in {event[:2] for event in events}, "it keeps its links while it drains"
            router_says = service.call("Router", router, "exchange", victim, "ping", 3, 3, 0.01)
            assert {pong.sender for pong, _ in router_says} == {victim}
        service.call("Router", router, "exchange", victim, "release", 1, 0, 0.0)
    service.until(lambda: not os.path.exists(f"/proc/{pid}"), "its process has ended")
    report(f"sick {deployment}, until its process has ended", [time.time() - start_s])
    service.until(service.is_linked, "another is linked")


@pytest.mark.timeout(100)
def test_replicas_stop_without_being_killed(service: Service, report: Report) -> None:
    """They would be killed after ``graceful_shutdown_timeout_s``, which is longer than this test may take."""
    pids = [pid for deployment in service.handles for pid in service.replicas(deployment).values()]
    start_s = time.time()
    service.stop()
    report("stopping all replicas", [time.time() - start_s])
    service.until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "all processes have ended")
