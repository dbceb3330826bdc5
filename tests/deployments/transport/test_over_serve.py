"""The transport over a real Serve.

The tests share one application; those that kill replicas come last. Latencies are measured and reported as properties
of the tests (``pytest --log-cli-level=INFO`` shows them), and never asserted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from deployments.transport.priority import GOES_EARLY
from deployments.transport.wire import Greeting, Hello
from tests.deployments.transport.test_priority import possible

Service = Any
"""The fixture's application; see ``conftest``."""
Report = Callable[[str, list[float]], None]


def test_messages_travel_both_ways_once(service: Service, report: Report) -> None:
    for router in service.replicas("Router"):
        for worker in service.replicas("Worker"):
            pings = [("ping", router, number) for number in range(100)]
            pongs = service.call("Router", router, "exchange", worker, pings, len(pings), 0.01)
            assert [pong[:3] for pong in pongs] == [("pong", worker, number) for number in range(100)]
            report("one way, router to worker", [took_s for *_, took_s, _, _ in pongs])
            report("one way, worker to router", [got_s - sent_s for *_, sent_s, got_s in pongs])


def test_links_within_a_machine_go_through_sockets_unless_they_shall_not(service: Service) -> None:
    """Two routers to each worker, and an ingress to each router."""
    uses_sockets = service.within_machines and sys.platform == "linux"
    for kind, num_callers in (("Worker", 2), ("Router", 1)):
        for replica in service.replicas(kind):
            tasks = service.call(kind, replica, "num_tasks")
            assert tasks["LocalAnswerer._answer"] == uses_sockets * num_callers


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have their process' priority")
def test_a_workers_threads_go_early_and_not_its_machines_while_that_works(service: Service) -> None:
    for worker in service.replicas("Worker"):
        others, machine = service.call("Worker", worker, "niceness")
        assert others == {machine + possible(GOES_EARLY)}


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


def lost_and_replaced(events: list[tuple[str, str, float]], victim: str) -> tuple[float, float]:
    """When a peer was lost, and another linked in its place; nothing else happened."""
    (lost, lost_peer, lost_s), (joined, joined_peer, joined_s) = events
    assert (lost, lost_peer, joined) == ("lost", victim, "joined")
    assert joined_peer != victim
    return lost_s, joined_s


def test_a_worker_whose_machine_fails_is_lost_at_once_and_replaced(service: Service, report: Report) -> None:
    routers, victim = list(service.replicas("Router")), next(iter(service.replicas("Worker")))
    start_s = time.time()
    service.call("Router", routers[0], "exchange", victim, [("poison", routers[0], 0)], 0, 0.0)
    service.until(lambda: victim not in service.replicas("Worker") and service.is_linked(), "it is replaced")
    for router in routers:
        lost_s, joined_s = lost_and_replaced(service.events("Router", router, start_s), victim)
        report("failed machine, until it is told", [lost_s])
        report("failed machine, until another is linked", [joined_s])


def test_an_idle_link_stays_up(service: Service) -> None:
    start_s = time.time()
    time.sleep(1.5 * service.times.silence_s)
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
def test_a_replica_that_alone_is_stopped_ends_its_links(service: Service, report: Report, deployment: str) -> None:
    """Serve stops it gently, as in an update: it waits for the streams, and would kill it only after 300 s."""
    victim, pid = next(iter(service.replicas(deployment).items()))
    start_s = time.time()
    service.call(deployment, victim, "fall_sick")
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
