"""Deaths under seeded streams on a Ray cluster of several nodes on this machine: of the GCS, the head, a node; a pause.

``python -m tests.integration.cluster_deaths gcs restart head pause node`` prints a row for each as JSON, with its
times; the suite asserts its counts and where replicas run. A node that died is not replaced: its death comes last. It
runs as a process of its own, as Ray reads its environment when it is imported. ``restart`` is the death of every
ingress and router, with no streams: where do the next ones run? In a ``pause`` all processes of a node stand still.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from cluster.config.names import INGRESS, ROUTER
from tests.integration.kills import Comparison, Stream, Streams
from tests.integration.nodes import (
    ROLE,
    LocalCluster,
    deploy,
    is_ready,
    is_running,
    is_served,
    kill_replicas,
    placement,
    prepare,
    redis,
)
from tests.integration.running import eventually

EVENTS = ("gcs", "restart", "head", "pause", "node")
APPLICATION, MODEL = "specdec", "specdec-demo"
DOWN_S = 3.0
"""How long the GCS or the head stays dead."""
PAUSE_S = 12.0
"""How long a node stands still: longer than leases last, shorter than until its replicas are replaced."""
TIMEOUT_S = 120.0

_ON_FRONT = {"label_selector": {ROLE: "front"}}
ARGS = {
    "num_speculative_tokens": 4,
    "replicas": {"target": 2, "draft": 2, "router": 2},
    "actors": {
        "target": {"num_cpus": 1, "num_gpus": 0, "resources": {"specdec_target": 1}},
        "draft": {"num_cpus": 1, "num_gpus": 0, "resources": {"specdec_draft": 1}},
        "router": _ON_FRONT,
        "ingress": _ON_FRONT,
    },
}


@dataclass
class Service:
    """The demo pair: ingress and routers on a node of their own, two nodes with a target and a draft each.

    Attributes:
        cluster: Its nodes; the head has Serve's controller and a proxy alone.
        front: The node of ingress and routers.
        models: Those of the models.
    """

    cluster: LocalCluster
    front: Any
    models: list[Any]

    @property
    def url(self) -> str:
        """Through the proxy of the front node."""
        return self.cluster.url(self.front)


@contextmanager
def service() -> Iterator[Service]:
    """A service that is ready."""
    cluster = LocalCluster({"num_cpus": 0})
    try:
        front = cluster.add("front", num_cpus=2)
        resources = {"specdec_target": 1.0, "specdec_draft": 1.0}
        models = [cluster.add("models", num_cpus=2, resources=resources) for _ in range(2)]
        cluster.connect()
        cluster.start_serve()
        deploy(ARGS)
        running = Service(cluster, front, models)
        eventually(lambda: is_ready(running.url), TIMEOUT_S, "the service is ready")
        yield running
    finally:
        cluster.shutdown()


def gcs_dies(running: Service) -> dict[str, float]:
    """End the GCS, leave it dead for a while, and start it again."""
    head = running.cluster.ray.head_node
    head.kill_gcs_server()
    unserved_s = until_served(running.url)
    time.sleep(DOWN_S)
    head.start_gcs_server()
    return {"unserved_s": unserved_s}


def head_dies(running: Service) -> dict[str, float]:
    """End all of the head, leave it dead for a while, and start another; gives when its proxy served again, too."""
    started_s = time.monotonic()
    running.cluster.kill_head()
    unserved_s = until_served(running.url)
    time.sleep(DOWN_S)
    running.cluster.start_head()
    running.cluster.connect()
    eventually(lambda: is_running(APPLICATION), TIMEOUT_S, "the controller has recovered")
    recovered_s = time.monotonic() - started_s
    until_served(running.cluster.url())
    return {"unserved_s": unserved_s, "recovered_s": recovered_s, "head_unserved_s": time.monotonic() - started_s}


def node_pauses(running: Service) -> dict[str, float]:
    """Every process of a node with a target and a draft stands still for a while, and goes on with old leases."""
    running.cluster.pause(running.models[0], PAUSE_S)
    return {"unserved_s": until_served(running.url)}


def node_dies(running: Service) -> dict[str, float]:
    """End a node with a target and a draft; nothing takes its place."""
    running.cluster.kill(running.models.pop())
    return {"unserved_s": until_served(running.url)}


def until_served(url: str) -> float:
    """Seconds until a new request is answered."""
    return eventually(lambda: is_served(url, MODEL), TIMEOUT_S, f"a new request is answered at {url}")


DEATHS = {"gcs": gcs_dies, "head": head_dies, "pause": node_pauses, "node": node_dies}


def under(event: str, running: Service, streams: Streams, undisturbed: Sequence[Stream]) -> dict[str, Any]:
    """Run streams under one death, and again after it; compare both, and say where replicas run."""
    row: dict[str, Any] = {"event": event}
    if event == "restart":
        kill_replicas(APPLICATION, INGRESS, ROUTER)
        eventually(lambda: is_ready(running.url), TIMEOUT_S, "the service is ready again")
    else:
        row |= under_death(event, running, streams, undisturbed)
    after = Comparison.of(run(streams), undisturbed)
    assert after.is_exact, after
    assert not after.broken, after
    return row | {"placement": placement(APPLICATION)}


def under_death(event: str, running: Service, streams: Streams, undisturbed: Sequence[Stream]) -> dict[str, Any]:
    """What became of streams that ran when it happened, and its times."""
    with streams.running() as wait:
        eventually(streams.have_begun, TIMEOUT_S, "all streams have begun")
        assert streams.are_running(), "they had ended before anything died"
        times = DEATHS[event](running)
        ended = wait()
    return asdict(Comparison.of(ended, undisturbed)) | times


def run(streams: Streams) -> list[Stream]:
    """All streams, undisturbed."""
    with streams.running() as wait:
        return wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what became of the streams, a row of JSON for each event."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("events", nargs="+", choices=EVENTS)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=400)
    options = parser.parse_args(arguments)
    prepare()
    with redis() as address:
        os.environ["RAY_REDIS_ADDRESS"] = address
        with service() as running:
            streams = Streams(running.url, MODEL, options.streams, options.max_tokens)
            undisturbed = run(streams)
            for event in options.events:
                print(json.dumps(under(event, running, streams, undisturbed)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
