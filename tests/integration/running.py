"""The service as a user starts it, in processes of its own."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import psutil

if TYPE_CHECKING:
    from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240.0
ROLES = {"TargetServer": "target", "DraftServer": "drafter"}
STOP_TIMEOUT_S = 60.0


class RunningService:
    """``specdec serve`` in a process of its own.

    Args:
        flags: Of the command.
        environment: Variables beside those of this process.
        python: Whose ``specdec``.
        folder: Where it runs.

    Attributes:
        url: Where it listens.
        lines: What it printed.
        started_s: How long it took until it was ready.
    """

    def __init__(
        self,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        folder: Path | None = None,
    ) -> None:
        port = free_port()
        scheme = "https" if "--tls-ssl-certfile" in flags else "http"
        self.url = f"{scheme}://127.0.0.1:{port}"
        self.lines: list[str] = []
        self._children: list[psutil.Process] = []
        self._ready = threading.Event()
        started_s = time.monotonic()
        command = [python, "-m", "cluster.cli", "serve", "--port", str(port), *flags]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
            cwd=folder,
        )
        threading.Thread(target=self._read, daemon=True).start()
        while not self._ready.wait(0.2):
            ended = self._process.poll() is not None
            if ended or time.monotonic() > started_s + START_TIMEOUT_S:
                if not ended:
                    self.stop()
                raise AssertionError("the service did not start:\n" + "".join(self.lines))
        self.started_s = time.monotonic() - started_s

    def client(self) -> OpenAI:
        """The official client, pointed at the service."""
        from openai import OpenAI  # make demo runs without the tools for tests

        return OpenAI(base_url=f"{self.url}/v1", api_key="unused", timeout=120, max_retries=0)

    def children(self) -> list[psutil.Process]:
        """All processes below the service's own."""
        return psutil.Process(self._process.pid).children(recursive=True)

    @property
    def model(self) -> str:
        """The target's name in the API."""
        return str(self.client().models.list().data[0].id)

    def is_ready(self) -> bool:
        """Whether ``/health`` says so."""
        try:
            with urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def metrics(self) -> dict[str, float]:
        """Every sample of the metrics page by its name and labels, as they stand there."""
        with urlopen(f"{self.url}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        return {key: float(value) for key, _, value in (li.rpartition(" ") for li in lines if not li.startswith("#"))}

    def count(self, name: str, label: str = "") -> float:
        """A counter, summed over all its samples, or those with a label such as ``source="ngram"``."""
        samples = self.metrics().items()
        return sum(value for key, value in samples if key.startswith(f"specdec_{name}_total{{") and label in key)

    def worker_gauge(self, name: str) -> dict[str, float]:
        """A figure of target and drafter, summed over the replicas of each."""
        sums: dict[str, float] = {}
        for key, value in self.metrics().items():
            role = next((role for deployment, role in ROLES.items() if f'deployment="{deployment}"' in key), None)
            if role is not None and key.startswith((f"specdec_{name}{{", f"specdec_{name}_total{{")):
                sums[role] = sums.get(role, 0.0) + value
        return sums

    def signal(self, signum: signal.Signals) -> None:
        """Send it a signal, as a process manager does; its processes are remembered for :meth:`wait`."""
        if self._process.poll() is None:
            self._children = self.children()
        self._process.send_signal(signum)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for its end after a signal; gives its exit code. Nothing it started may be left."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"after {timeout_s:g} s it has not ended:\n" + "".join(self.lines)) from None
        left = [child for child in self._children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert not left, f"left behind: {left}"
        return code

    def stop(self) -> int:
        """Stop it as Ctrl-C does; gives its exit code."""
        self.signal(signal.SIGINT)
        return self.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if "Try it:" in line:
                self._ready.set()


@contextmanager
def serve_node(num_cpus: int) -> Iterator[str]:
    """A Ray node in this process; yields the address of its dashboard, to which ``serve deploy`` speaks."""
    from cluster.config.environment import prepare_for_ray

    before = dict(os.environ)
    prepare_for_ray()
    import ray

    try:
        context = ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=free_port(),
            object_store_memory=256 << 20,
            logging_level="error",
            log_to_driver=False,
        )
        yield f"http://{context.dashboard_url}"
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def serve_deploy(text: str, address: str, folder: Path) -> None:
    """Hand Serve's configuration to a Ray cluster, as ``serve deploy`` does.

    Args:
        text: YAML.
        address: Of Ray's dashboard.
        folder: For a file with the text.
    """
    config = folder / "serve.yaml"
    config.write_text(text)
    command = [str(Path(sys.executable).parent / "serve"), "deploy", str(config), "--address", address]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def free_port() -> int:
    """A port that nobody listens on, and that the kernel and Ray give to nobody before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port


def eventually(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Wait until a condition holds; gives the seconds it took."""
    started_s = time.monotonic()
    while time.monotonic() < started_s + timeout_s:
        if condition():
            return time.monotonic() - started_s
        time.sleep(0.05)
    raise AssertionError(f"after {timeout_s} s still not: {what}")


def nothing_held(service: RunningService) -> bool:
    """Whether no worker holds a sequence, a cache block or a recurrent state."""
    names = ("worker_sequences", "kv_blocks_in_use", "state_slots_in_use")
    gauges = [service.worker_gauge(name) for name in names]
    return set(gauges[0]) == {"target", "drafter"} and not any(value for gauge in gauges for value in gauge.values())
