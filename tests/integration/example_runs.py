"""An example's Serve configuration, run by ``serve deploy`` on as many Ray nodes on this machine as it names pods.

``python -m tests.integration.example_runs prod`` prints as JSON where replicas ran and what was answered. Its
configuration is changed: the demo pair in place of its models. Nodes offer what pods would;
GPUs are Ray's bookkeeping, and the models run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import yaml

from cluster.cli.render import kubernetes_yaml
from tests.integration.nodes import LocalCluster, is_ready, prepare
from tests.integration.running import eventually, free_port, serve_deploy
from tests.k8s.examples import EXAMPLES, NAMES, Object, groups, serve_text

START_TIMEOUT_S = 480
PROMPT = "def fibonacci(n):"


def with_demo_pair(example: str, folder: Path, key: str) -> Path:
    """Render an example with the demo pair for those who have an API key; gives the file's path."""
    (folder / "keys").write_text(f"tester: {key}\n")
    config = yaml.safe_load((EXAMPLES / example / "config.yaml").read_text())
    # A target of several GPUs is spread over them: the example's own is by vLLM.
    target = {"device_map": "auto"} if example == "prod-vllm" else {}
    keys = {"api_keys_file": str(folder / "keys")}
    placed = {name: config[name] for name in ("actors", "replicas") if name in config}
    changed = folder / "config.yaml"
    changed.write_text(yaml.safe_dump({"demo": "plain", "target": target, "access": keys, **placed}))
    rendered = folder / "rayservice.yaml"
    rendered.write_text(kubernetes_yaml(changed))
    return rendered


def node(group: Object) -> dict[str, Any]:
    """What a Ray node has that stands for a pod of a group."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return {
        "num_cpus": int(group["rayStartParams"].get("num-cpus", limits["cpu"])),
        "num_gpus": int(limits.get("nvidia.com/gpu", 0)),
        "resources": {name: float(amount) for name, amount in group.get("resources", {}).items()},
    }


@contextmanager
def nodes(file: Path) -> Iterator[tuple[LocalCluster, str, list[str]]]:
    """A node for each pod; gives the cluster, where its dashboard listens, and where each worker's proxy will."""
    head, workers = groups(file)["headgroup"], [one for one in groups(file).values() if "groupName" in one]
    port = free_port()
    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    cluster = LocalCluster({**node(head), **dashboard, "labels": head.get("labels", {})})
    try:
        added = [
            cluster.add(group["labels"]["role"], labels=group["labels"], **node(group))
            for group in workers
            for _ in range(group["replicas"])
        ]
        cluster.connect()
        yield cluster, f"http://127.0.0.1:{port}", [cluster.url(one) for one in added]
    finally:
        cluster.shutdown()


def applications(dashboard_address: str) -> dict[str, Any]:
    """What Serve's controller tells of each application."""
    headers = {"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
    answer = httpx2.get(f"{dashboard_address}/api/serve/applications/", headers=headers, timeout=30, trust_env=False)
    return dict(answer.json()["applications"])


def all_run(dashboard_address: str) -> bool:
    """Whether Serve's controller says that every application runs; a target may serve before that."""
    return all(one["status"] == "RUNNING" for one in applications(dashboard_address).values())


def placed(dashboard_address: str) -> dict[str, list[str]]:
    """The role of the node of each running replica, by deployment, as Serve's controller tells."""
    import ray

    roles = {one["NodeID"]: one["Labels"].get("role", "head") for one in ray.nodes()}
    found: dict[str, list[str]] = {}
    for application in applications(dashboard_address).values():
        for name, deployment in application["deployments"].items():
            running = [one for one in deployment["replicas"] if one["state"] == "RUNNING"]
            found[name] = sorted(roles[one["node_id"]] for one in running)
    return found


def answer(url: str, key: str) -> dict[str, Any]:
    """What a proxy answers to a request with an API key, and with which status to one without."""
    body = {"model": "specdec-demo", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    with httpx2.Client(base_url=url, timeout=120, trust_env=False) as client:
        taken = client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        refused = client.post("/v1/completions", json=body)
        assert taken.status_code == 200, taken.text
        return {"tokens": taken.json()["usage"]["completion_tokens"], "without_key": refused.status_code}


def run(example: str) -> dict[str, Any]:
    """Deploy an example, wait until it is ready, and ask through the head's proxy and a worker's."""
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as name:
        file = with_demo_pair(example, Path(name), key)
        config = yaml.safe_load(serve_text(file))
        with nodes(file) as (cluster, dashboard, workers):
            config["http_options"] = {"host": "127.0.0.1", "port": httpx2.URL(cluster.url()).port}
            serve_deploy(yaml.safe_dump(config), dashboard, Path(name))
            eventually(lambda: is_ready(cluster.url()), START_TIMEOUT_S, "the service is ready")
            eventually(lambda: all_run(dashboard), 120, "all applications run")
            eventually(lambda: is_ready(workers[0]), 60, "a worker's proxy has the service")
            return {
                "nodes": 1 + len(workers),
                "placed": placed(dashboard),
                "answers": [answer(url, key) for url in (cluster.url(), workers[0])],
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what became of an example, as JSON on the last line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("example", choices=NAMES)
    options = parser.parse_args(arguments)
    prepare()
    print(json.dumps(run(options.example)))


if __name__ == "__main__":
    main()
