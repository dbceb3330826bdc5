"""SIGTERM to a node that ``ray start --block`` started, under seeded streams through its own proxy and another's.

``python -m tests.integration.node_drains`` prints as JSON what became of the streams, and when the node was free. It
runs as a process of its own, as Ray reads its environment when it is imported. The node has an ingress, a router, a
target and the drafter. A second node has the same without a drafter. A third comes later, with room for what leaves.
Steps are emulated, so that streams last.

Pods that sleep before SIGTERM and then have Ray's 30 s: ``--sleep-s 150 --node-drain-s 30 --grace-s 180``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil

from cluster.config.environment import DRAIN_VARIABLE
from cluster.config.names import APPLICATION_NAME, DEPLOYMENTS, DRAFT_APPLICATION_NAME
from cluster.launch.serve_config import node_drain_s, pod_grace_s
from tests.integration.kills import Comparison, Stream, Streams
from tests.integration.nodes import PROXY_PORT, ROLE, deploy, is_ready, prepare, replicas
from tests.integration.running import eventually, free_port

LEAVING, STAYING, SPARE = "leaving", "staying", "spare"
MODEL = "specdec-demo"
TIMEOUT_S = 240.0
STEP_MS = 300
TOKENS_PER_S = 5.0
"""Of the slowest stream of the demo pair with such steps, about."""
DRAIN_TIMEOUT_S = 300.0
"""Longer than any stream, on a slow machine too: the time of replacements before it is the same for any."""

_EACH = ("specdec_ingress", "specdec_router", "specdec_target")
OFFERED = {
    "head": {},
    LEAVING: dict.fromkeys((*_EACH, "specdec_draft"), 1),
    STAYING: dict.fromkeys(_EACH, 1),
    SPARE: dict.fromkeys((*_EACH, "specdec_draft"), 1),
}
"""What each node has: one replica of a deployment takes one."""


def _actor(role: str, num_cpus: int = 0) -> dict[str, Any]:
    return {"num_cpus": num_cpus, "num_gpus": 0, "resources": {f"specdec_{role}": 1}}


ARGS: dict[str, Any] = {
    "num_speculative_tokens": 4,
    "replicas": {"ingress": 2, "router": 2, "target": 2},
    "actors": {role: _actor(role) for role in ("target", "draft", "router", "ingress")},
    "backend": f"benchmarks.backends:stand_in:target={STEP_MS},draft=20",
    "drain_timeout_s": DRAIN_TIMEOUT_S,
}


class StartedNode:
    """A Ray node as a pod starts it, with all its processes in one session.

    Args:
        role: Its label, and what it has by :data:`OFFERED`.
        gcs_port: Of the head.
        node_drain_s: How long it drains after SIGTERM.
        folder: For its log, and for Ray's session if it is the head.

    Attributes:
        url: Where Serve's proxy on it listens, once there is one.
    """

    def __init__(self, role: str, gcs_port: int, node_drain_s: float, folder: Path) -> None:
        self.role, proxy_port = role, free_port()
        self.url = f"http://127.0.0.1:{proxy_port}"
        address = [f"--address=127.0.0.1:{gcs_port}", "--num-cpus=2"]
        if role == "head":
            address = ["--head", f"--port={gcs_port}", "--num-cpus=0", "--include-dashboard=false"]
            address += [f"--temp-dir={folder}", f"--ray-client-server-port={free_port()}"]
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", *address]
        command += [
            "--node-ip-address=127.0.0.1",
            f"--labels={ROLE}={role}",
            f"--resources={json.dumps(OFFERED[role])}",
        ]
        command += ["--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=150000000"]
        command += [f"--dashboard-agent-listen-port={free_port()}"]
        self._log = folder / f"{role}.log"
        with self._log.open("w") as log:
            environment = os.environ | {PROXY_PORT: str(proxy_port), DRAIN_VARIABLE: f"{node_drain_s:g}"}
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ask_to_end(self) -> None:
        """Send SIGTERM to ``ray start`` alone, as Kubernetes does to process 1."""
        self._process.send_signal(signal.SIGTERM)

    def is_gone(self) -> bool:
        """Whether it has ended with all its processes."""
        return self._process.poll() is not None and not self._processes()

    def kill(self) -> None:
        """End all its processes at once."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(30)

    def log(self) -> str:
        """What ``ray start`` printed."""
        return self._log.read_text()

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["status"]):
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self._process.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@contextmanager
def service(drain_s: float) -> Iterator[dict[str, StartedNode]]:
    """A service that is ready, with room to spare; gives its nodes by role."""
    import ray
    from ray import serve

    from deployments.operate.status import StatusArgs, build_metrics

    started: dict[str, StartedNode] = {}
    with tempfile.TemporaryDirectory(prefix="nd") as name:
        port = free_port()

        def start(role: str) -> None:
            """Start a node alone: two that start at once on one machine can wait for each other."""
            node = started[role] = StartedNode(role, port, drain_s, Path(name))
            eventually(lambda: "Ray runtime started" in node.log(), TIMEOUT_S, f"{role} runs")

        try:
            for role in ("head", LEAVING, STAYING):
                start(role)
            ray.init(address=f"127.0.0.1:{port}", log_to_driver=False, logging_level="error")
            serve.start(http_options={"host": "127.0.0.1", "port": int(started["head"].url.rpartition(":")[2])})
            deploy(ARGS)
            page = StatusArgs(application=APPLICATION_NAME, drafts=[DRAFT_APPLICATION_NAME])
            serve.run(build_metrics(page), name="metrics", route_prefix="/metrics")
            start(SPARE)
            for node in (started[LEAVING], started[STAYING]):
                eventually(partial(is_ready, node.url), TIMEOUT_S, f"{node.role} is ready")
            yield started
        finally:
            for node in started.values():
                node.kill()
            ray.shutdown()


def placed() -> dict[str, list[str]]:
    """The role of the node of each replica, by deployment."""
    return {name: sorted(of_pid.values()) for name, of_pid in replicas(APPLICATION_NAME).items()}


@dataclass(frozen=True)
class Drained:
    """What became of a node that was told to end under streams.

    Attributes:
        through_staying: The streams through the other node's proxy, against their undisturbed runs.
        through_leaving: The same through its own.
        requests: Statuses of short requests through the other node's proxy, from SIGTERM to the node's end.
        num_handed_over: Sequences that routers took from workers that drain.
        left_s: From SIGTERM until no replica of a deployment was on it, by deployment.
        streams_s: From SIGTERM until the last stream had ended.
        was_killed: Whether it had not ended by itself in time.
        free_s: From its notice until it had ended: the sleep before SIGTERM is in it.
        placement: The role of each replica's node afterwards, by deployment.
    """

    through_staying: Comparison
    through_leaving: Comparison
    requests: dict[str, int]
    num_handed_over: float
    left_s: dict[str, float]
    streams_s: float
    was_killed: bool
    free_s: float
    placement: dict[str, list[str]]


def under_drain(nodes: dict[str, StartedNode], stream_s: float, count: int, sleep_s: float, grace_s: float) -> Drained:
    """Run streams undisturbed, then under SIGTERM to a node, which is killed if it has not ended in time."""
    leaving, staying = nodes[LEAVING], nodes[STAYING]
    of_each = [Streams(node.url, MODEL, count, round(stream_s * TOKENS_PER_S)) for node in (staying, leaving)]
    noticed_s = time.monotonic()
    undisturbed = run(of_each)
    assert all(LEAVING in placed()[name] for name in DEPLOYMENTS), placed()
    time.sleep(max(0.0, noticed_s + sleep_s - time.monotonic()))
    statuses: Counter[str] = Counter()
    with of_each[0].running() as wait_staying, of_each[1].running() as wait_leaving:
        eventually(lambda: all(streams.have_begun() for streams in of_each), TIMEOUT_S, "all streams have begun")
        begun_s = time.monotonic()
        leaving.ask_to_end()
        with short_requests(staying.url, statuses):
            watch = Watch(leaving, begun_s, grace_s - sleep_s)
            ended = [wait_staying(), wait_leaving()]
            streams_s = time.monotonic() - begun_s
            watch.wait()
        handed_over = count_of(staying.url, "handed_over")
    compared = [Comparison.of(streams, before) for streams, before in zip(ended, undisturbed, strict=True)]
    for streams in ended:
        print([stream.error for stream in streams if stream.error], file=sys.stderr)
    return Drained(
        compared[0],
        compared[1],
        dict(statuses),
        handed_over,
        watch.left_s,
        streams_s,
        watch.was_killed,
        sleep_s + watch.free_s,
        placed(),
    )


def run(of_each: Sequence[Streams]) -> list[list[Stream]]:
    """All streams, undisturbed."""
    with of_each[0].running() as wait, of_each[1].running() as wait_too:
        return [wait(), wait_too()]


class Watch:
    """Sees when a node is free of replicas, and when it is gone; kills it when its time is over."""

    def __init__(self, node: StartedNode, begun_s: float, grace_s: float) -> None:
        self._node, self._begun_s, self._grace_s = node, begun_s, grace_s
        self.left_s: dict[str, float] = {}
        self.was_killed = False
        self.free_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the node is gone."""
        self._thread.join()
        assert self._node.is_gone(), "nobody looked any more"

    def _run(self) -> None:
        while not self._node.is_gone():
            passed_s = time.monotonic() - self._begun_s
            for name, roles in placed().items():
                if LEAVING not in roles:
                    self.left_s.setdefault(name, passed_s)
            if passed_s > self._grace_s and not self._node.is_gone():
                self.was_killed = True
                self._node.kill()
            time.sleep(0.2)
        self.free_s = time.monotonic() - self._begun_s


@contextmanager
def short_requests(url: str, statuses: Counter[str]) -> Iterator[None]:
    """Ask for one token now and then, and count what is answered."""
    is_over = threading.Event()

    def ask() -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        while not is_over.wait(0.5):
            try:
                answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
                statuses[str(answer.status_code)] += 1
            except httpx2.HTTPError as error:
                statuses[type(error).__name__] += 1

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def count_of(url: str, name: str) -> float:
    """A counter of the service's page of metrics, summed."""
    page = httpx2.get(f"{url}/metrics", timeout=30, trust_env=False).text
    lines = [line for line in page.splitlines() if line.startswith(f"specdec_{name}_total{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what became of the streams under a node's drain, as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--stream-s", type=float, default=60.0, help="how long a stream lasts, about")
    parser.add_argument("--streams", type=int, default=4, help="through each of two proxies")
    parser.add_argument("--sleep-s", type=float, default=0.0, help="from the node's notice to SIGTERM")
    parser.add_argument("--node-drain-s", type=float, default=node_drain_s(DRAIN_TIMEOUT_S), help="after SIGTERM")
    parser.add_argument("--grace-s", type=float, default=pod_grace_s(DRAIN_TIMEOUT_S), help="from notice to SIGKILL")
    options = parser.parse_args(arguments)
    prepare()
    with service(options.node_drain_s) as nodes:
        drained = under_drain(nodes, options.stream_s, options.streams, options.sleep_s, options.grace_s)
    print(json.dumps(asdict(drained)))


if __name__ == "__main__":
    main()
