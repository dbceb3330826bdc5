"""A node's death and the GCS' under seeded streams, on a Ray cluster of several nodes on this machine.

``python -m tests.integration.cluster_deaths node`` prints a row as JSON; the suite asserts its counts. It runs as a
process of its own, as Ray reads its environment when it is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from urllib.request import ProxyHandler, build_opener

import psutil

from cluster.settings import prepare_for_ray
from tests.integration.kills import Comparison, Stream, Streams
from tests.integration.running import eventually, free_port

EVENTS = ("node", "gcs")
WORKERS_ON_A_NODE = {"specdec_target": 1.0, "specdec_draft": 1.0}
GCS_DOWN_S = 3.0


@contextmanager
def redis() -> Iterator[str]:
    """A Redis server of our own, which keeps what the GCS must not forget; gives its address."""
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("redis-server is not installed (Debian: apt install redis-server)")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", folder, "--save", ""]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(10)


@contextmanager
def service() -> Iterator[tuple[Any, Any, str]]:
    """The demo pair on a head node and two worker nodes, each with a target and a draft; gives cluster, node, URL."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from cluster.config import AppArgs
    from deployments.app import build_app

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"text": 8.0}})
    nodes = [cluster.add_node(num_cpus=2, resources=WORKERS_ON_A_NODE) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        args = AppArgs.model_validate(
            {
                "num_speculative_tokens": 4,
                "replicas": {"target": 2, "draft": 2, "router": 2},
                "actors": {
                    "target": {"num_cpus": 1, "resources": {"specdec_target": 1}},
                    "draft": {"num_cpus": 1, "resources": {"specdec_draft": 1}},
                    "router": {"resources": {"text": 1}},
                    "ingress": {"resources": {"text": 1}},
                },
            }
        )
        serve.run(build_app(args), name="specdec")
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: is_ready(url), 120, "the service is ready")
        yield cluster, nodes[1], url
    finally:
        ray.shutdown()
        cluster.shutdown()


def is_ready(url: str) -> bool:
    """Whether ``/health`` says so."""
    try:
        with build_opener(ProxyHandler({})).open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def kill_node(cluster: Any, node: Any) -> None:
    """End every process of a node at once, as a power cut would."""
    raylet = next(info.process for info in node.all_processes["raylet"])
    processes = psutil.Process(raylet.pid).children(recursive=True)
    for process in [psutil.Process(raylet.pid), *processes]:
        if process.is_running():
            process.kill()
    cluster.remove_node(node, allow_graceful=False)


def kill_gcs(cluster: Any) -> None:
    """End the GCS, leave it dead for a while, and start it again."""
    cluster.head_node.kill_gcs_server()
    time.sleep(GCS_DOWN_S)
    cluster.head_node.start_gcs_server()


def under(event: str, num_streams: int, max_tokens: int) -> Comparison:
    """Run streams undisturbed, then under one death, and compare."""
    with service() as (cluster, node, url):
        streams = Streams(url, "specdec-demo", num_streams, max_tokens)
        undisturbed = run(streams)
        with streams.running() as wait:
            eventually(streams.have_begun, 120, "all streams have begun")
            if event == "node":
                kill_node(cluster, node)
            else:
                kill_gcs(cluster)
            ended = wait()
        after = Comparison.of(run(streams), undisturbed)
        assert after.is_exact, after
        assert not after.broken, after
        return Comparison.of(ended, undisturbed)


def run(streams: Streams) -> list[Stream]:
    """All streams, undisturbed."""
    with streams.running() as wait:
        return wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what became of the streams, as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("event", choices=EVENTS)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=400)
    options = parser.parse_args(arguments)
    prepare_for_ray()
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    with redis() as address:
        os.environ["RAY_REDIS_ADDRESS"] = address
        compared = under(options.event, options.streams, options.max_tokens)
    sys.stdout.write(json.dumps(asdict(compared)) + "\n")


if __name__ == "__main__":
    main()
