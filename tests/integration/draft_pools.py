"""One pool of drafters under two applications, on two Ray nodes.

``python -m tests.integration.draft_pools`` prints a row of JSON for each step: whether streams differ from those
without drafts, and how many draft tokens each application has taken. It runs as a process of its own, as Ray reads its
environment when it is imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import psutil

from cluster.config.names import DRAFT
from tests.integration.kills import Comparison, Stream, Streams
from tests.integration.nodes import LocalCluster, is_ready, placement, prepare, replicas
from tests.integration.running import eventually

POOL = "drafts"
MODELS = {"plain": "specdec-demo", "hybrid": "specdec-demo-hybrid"}
"""The model of each application, which has the name of its demo target."""
TIMEOUT_S = 120.0
NUM_STREAMS, MAX_TOKENS = 4, 200
_COMMON = {"num_speculative_tokens": 4}


@contextmanager
def two_nodes() -> Iterator[LocalCluster]:
    """A head for all but the drafters, and a node for these."""
    cluster = LocalCluster({"num_cpus": 4, "resources": {"targets": 8.0}})
    try:
        cluster.add("drafts", num_cpus=1, resources={"drafts": 1.0})
        cluster.connect()
        cluster.start_serve(proxy_location="HeadOnly")
        yield cluster
    finally:
        cluster.shutdown()


def deploy(name: str) -> None:
    """Deploy an application that draws on the pool, and a page of its metrics; returns when it runs."""
    from ray import serve

    from cluster.config.app import AppArgs
    from deployments.app import build_app
    from deployments.operate.status import StatusArgs, build_metrics

    here = {"resources": {"targets": 1}}
    actors = {"target": {"num_cpus": 1, "num_gpus": 0, **here}, "router": here, "ingress": here}
    args = AppArgs.model_validate({**_COMMON, "demo": name, "draft": {"application": POOL}, "actors": actors})
    serve.run(build_app(args), name=name, route_prefix=f"/{name}")
    page = StatusArgs(application=name, drafts=(POOL,))
    serve.run(build_metrics(page), name=f"{name}-metrics", route_prefix=f"/{name}/metrics")


def deploy_pool() -> None:
    """Deploy a drafter for all of them."""
    from ray import serve

    from deployments.app import drafts_for

    actors = {"draft": {"num_cpus": 1, "num_gpus": 0, "resources": {"drafts": 1}}}
    app = drafts_for({**_COMMON, "demo": "plain", "actors": actors}, {"applications": list(MODELS)})
    serve.run(app, name=POOL, route_prefix=None)


class Line:
    """Streams on each application at once, compared with their first run.

    Args:
        url: Of Serve's proxy.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._streams = {
            name: Streams(f"{url}/{name}", model, NUM_STREAMS, MAX_TOKENS) for name, model in MODELS.items()
        }
        self._undisturbed: dict[str, list[Stream]] = {}

    def run(self, step: str, disturb: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Run all streams, and do something to the service once they have begun.

        Returns:
            For each application how many streams broke or differ, and how many draft tokens it has taken meanwhile.
        """
        before = {name: self.num_accepted(name) for name in MODELS}
        with ExitStack() as stack:
            waits = {name: stack.enter_context(streams.running()) for name, streams in self._streams.items()}
            for streams in self._streams.values():
                eventually(streams.have_begun, TIMEOUT_S, "all streams have begun")
            disturb()
            ended = {name: wait() for name, wait in waits.items()}
        self._undisturbed = self._undisturbed or ended
        compared = {name: Comparison.of(ended[name], self._undisturbed[name]) for name in MODELS}
        return {
            "step": step,
            "broken": {name: len(one.broken) for name, one in compared.items()},
            "exact": {name: one.is_exact for name, one in compared.items()},
            "accepted": {name: self.num_accepted(name) - before[name] for name in MODELS},
            "pause_s": {name: one.longest_pause_s for name, one in compared.items()},
        }

    def num_accepted(self, name: str) -> float:
        """Draft tokens of the pool that an application's target has taken, by its page of metrics."""
        return self.sample(name, "specdec_accepted_tokens_by_source_total", 'source="model"')

    def num_drafters(self, name: str) -> float:
        """Drafters of the pool with which an application's router has a link."""
        return self.sample(name, "specdec_router_workers", 'kind="drafter"')

    def sample(self, name: str, metric: str, label: str) -> float:
        """A metric of an application's page, summed over the samples that have a label."""
        page = httpx2.get(f"{self._url}/{name}/metrics", timeout=30, trust_env=False).text
        return sum(map(float, re.findall(rf"^{metric}{{.*{label}.*}} (\S+)$", page, flags=re.MULTILINE)))

    def is_linked(self) -> bool:
        """Whether every application has a drafter."""
        return all(self.num_drafters(name) == 1 for name in MODELS)

    def are_ready(self) -> bool:
        """Whether ``/health`` of every application says so."""
        return all(is_ready(f"{self._url}/{name}") for name in MODELS)


def kill_drafter() -> None:
    """End the pool's drafter as a crash would."""
    (pid,) = replicas(POOL)[DRAFT]
    psutil.Process(pid).kill()


def rows() -> Iterator[dict[str, Any]]:
    """Steps in the life of a pool and its applications."""
    from ray import serve

    with two_nodes() as cluster:
        line = Line(cluster.url())
        for name in MODELS:
            deploy(name)
        eventually(line.are_ready, TIMEOUT_S, "both are ready")
        yield line.run("no pool")
        deploy_pool()
        eventually(line.is_linked, TIMEOUT_S, "the pool is linked with both")
        yield line.run("a pool") | {"placement": {name: placement(name) for name in (*MODELS, POOL)}}
        yield line.run("its drafter dies", kill_drafter) | {"ready": line.are_ready()}
        eventually(line.is_linked, TIMEOUT_S, "another drafter is linked with both")
        serve.delete("hybrid")
        deploy("hybrid")
        eventually(lambda: line.are_ready() and line.is_linked(), TIMEOUT_S, "the application is back, and linked")
        yield line.run("an application went and came back")
        yield line.run("the pool goes", lambda: serve.delete(POOL)) | {"ready": line.are_ready()}


def main() -> None:
    """Print a row of JSON for each step."""
    prepare()
    for row in rows():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
