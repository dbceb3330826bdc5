"""Ray clusters of several nodes on this machine, for tests that are marked ``cluster``.

A process that makes one calls ``prepare`` first: Ray reads its environment when it is imported.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import httpx2
import psutil

from cluster.config.environment import prepare_for_ray
from cluster.config.names import DEPLOYMENTS
from tests.integration.running import eventually, free_port

ROLE = "role"
"""Label of each node."""
PROXY_PORT = "RAY_SERVE_WORKER_PROXY_HTTP_PORT"
REPLICA = "SERVE_REPLICA::"

NodeArgs = Mapping[str, Any]
"""What ``ray.cluster_utils.Cluster.add_node`` takes."""


def prepare() -> None:
    """Set this process up for Ray; token authentication stays on."""
    prepare_for_ray()
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}


@contextmanager
def serve_alone(num_cpus: int) -> Iterator[str]:
    """Ray and Serve in this process, on a node with so many cores to give; gives the URL of its proxy."""
    import ray
    from ray import serve

    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        ray.shutdown()


@contextmanager
def redis() -> Iterator[str]:
    """A Redis server of our own, which keeps what the GCS must not forget; gives its address.

    Raises:
        RuntimeError: There is no such program.
    """
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


class LocalCluster:
    """Ray nodes on this machine: a head, and others that are added. Serve's proxy has a port of its own on each.

    Args:
        head: Arguments of the head node.

    Attributes:
        ray: Ray's own cluster.
    """

    def __init__(self, head: NodeArgs) -> None:
        from ray.cluster_utils import Cluster

        self._head = {"gcs_server_port": free_port(), "include_dashboard": False, **head}
        self._head_port = free_port()
        self._ports: dict[str, int] = {}
        self.ray = Cluster(initialize_head=True, head_node_args=dict(self._head))

    def add(self, role: str, labels: Mapping[str, str] = MappingProxyType({}), **node: Any) -> Any:
        """Add a node with a role, and further labels; gives Ray's node."""
        port = free_port()
        os.environ[PROXY_PORT] = str(port)  # its processes have it from here
        try:
            added = self.ray.add_node(labels={ROLE: role, **labels}, **node)
        finally:
            del os.environ[PROXY_PORT]
        self._ports[added.node_id] = port
        return added

    def url(self, node: Any = None) -> str:
        """Where Serve's proxy on a node listens; on the head where none is given."""
        return f"http://127.0.0.1:{self._head_port if node is None else self._ports[node.node_id]}"

    def connect(self) -> None:
        """Be a driver, on the head node."""
        import ray

        ray.init(address=self.ray.address, log_to_driver=False, logging_level="error")

    def start_serve(self, **options: Any) -> None:
        """Start Serve, with a proxy on every node that has replicas unless told otherwise."""
        from ray import serve

        serve.start(http_options={"host": "127.0.0.1", "port": self._head_port}, **options)

    def kill(self, node: Any) -> None:
        """End every process of a node at once, as a power cut would."""
        self.signal(node, signal.SIGKILL)
        self.ray.remove_node(node, allow_graceful=False)

    def pause(self, node: Any, for_s: float) -> None:
        """Stop every process of a node, and let all go on, as a machine that is moved or put to sleep."""
        self.signal(node, signal.SIGSTOP)
        try:
            time.sleep(for_s)
        finally:
            self.signal(node, signal.SIGCONT)

    def signal(self, node: Any, signum: signal.Signals) -> None:
        """Send a signal to every process of a node."""
        for info in [info for infos in node.all_processes.values() for info in infos]:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(info.process.pid)
                for one in [process, *process.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        one.send_signal(signum)

    def kill_head(self) -> None:
        """End all of the head. Nobody can be a driver there: this process is none from now on."""
        import ray

        ray.shutdown()
        self.kill(self.ray.head_node)

    def start_head(self) -> None:
        """Start a head in place of the one that died, at the same address; Redis tells it what was."""
        self.ray.add_node(**self._head)

    def shutdown(self) -> None:
        """End all nodes."""
        import ray

        ray.shutdown()
        self.ray.shutdown()


def deploy(args: Mapping[str, Any], *, waits: bool = True) -> None:
    """Hand Serve a service and its draft model, as ``specdec render`` has them, and wait until both run."""
    from ray import serve

    from cluster.config.app import AppArgs
    from cluster.config.names import APPLICATION_NAME, DRAFT_APPLICATION_NAME
    from cluster.launch.applications import of_draft, of_service
    from deployments.app import build_app, drafts_for

    parsed = AppArgs.model_validate(args)
    fixed, user_config = of_draft(parsed)
    draft = drafts_for(fixed, user_config)
    targets = [
        serve.RunTarget(target=build_app(of_service(parsed)), name=APPLICATION_NAME, route_prefix="/"),
        serve.RunTarget(target=draft, name=DRAFT_APPLICATION_NAME, route_prefix=None),
    ]
    serve.run_many(targets, wait_for_ingress_deployment_creation=waits, wait_for_applications_running=waits)


def replicas(application: str) -> dict[str, dict[int, str]]:
    """The live replicas of an application, its draft model's among them: by deployment, the role of each pid's node."""
    import ray
    from ray._private.state import actors

    roles = {node["NodeID"]: node["Labels"].get(ROLE, "head") for node in ray.nodes()}
    found: dict[str, dict[int, str]] = {name: {} for name in DEPLOYMENTS}
    for actor in actors(actor_state_name="ALIVE").values():
        owner, _, rest = actor["Name"].removeprefix(REPLICA).partition("#")
        if actor["Name"].startswith(REPLICA) and owner in (application, f"{application}-draft"):
            found[rest.partition("#")[0]][actor["Pid"]] = roles[actor["Address"]["NodeID"]]
    return found


def placement(application: str) -> dict[str, list[str]]:
    """The roles of the nodes on which each deployment has replicas."""
    return {name: sorted(set(found.values())) for name, found in replicas(application).items()}


def is_running(application: str) -> bool:
    """Whether Serve's controller answers, and says that the application runs."""
    from ray import serve

    try:
        found = serve.status().applications.get(application)
    except Exception:  # whatever it is: the controller is not there yet
        return False
    return found is not None and found.status == "RUNNING"


def kill_replicas(application: str, *deployments: str) -> None:
    """End all replicas of some deployments as a crash would, and wait until as many others run."""
    before = {name: replicas(application)[name] for name in deployments}
    for pid in [pid for found in before.values() for pid in found]:
        psutil.Process(pid).kill()

    def replaced() -> bool:
        now = replicas(application)
        return all(len(now[name].keys() - before[name].keys()) == len(before[name]) for name in deployments)

    eventually(replaced, 120, f"{', '.join(deployments)} of {application} are replaced")


def is_served(url: str, model: str) -> bool:
    """Whether a new request is answered."""
    body = {"model": model, "prompt": "x", "max_tokens": 1}
    try:
        return httpx2.post(f"{url}/v1/completions", json=body, timeout=10, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


def is_ready(url: str) -> bool:
    """Whether ``/health`` says so."""
    try:
        return httpx2.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


def rows_of(module: str, *arguments: str) -> list[dict[str, Any]]:
    """What a module of these tests prints, which makes a cluster of its own."""
    command = [sys.executable, "-m", f"tests.integration.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
