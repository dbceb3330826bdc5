"""A rolling update under seeded streams: of a key that restarts every replica, of the model, or of its quantization.

``python -m tests.integration.updates same`` prints what became of the streams as JSON; the suite asserts its counts. It
runs as a process of its own, as Ray reads its environment when it is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2

from tests.integration import nodes
from tests.integration.kills import Comparison, Streams
from tests.integration.nodes import prepare, serve_alone
from tests.integration.running import eventually

UPDATES: dict[str, dict[str, Any]] = {
    "same": {"block_size": 32},
    "other": {"demo": "hybrid"},
    "quantized": {"target": {"quantization": "int8"}},
}
"""What an update changes: a key that decides no token but needs a restart; the target; its quantization."""
REPLICAS: dict[str, dict[str, Any]] = {"quantized": {"replicas": {"target": 2, "ingress": 2}}}
"""Replicas that are drained one after the other, by the update."""
ARGS: dict[str, Any] = {"num_speculative_tokens": 4, "drain_timeout_s": 600, "access": {"admin_keys": ["admin"]}}
HEADERS = {"Authorization": f"Bearer {secrets.token_hex(8)}"}
"""The old replicas have the time that their streams need while new ones load beside them."""
TIMEOUT_S = 200.0


def deploy(changes: dict[str, Any]) -> None:
    """Hand Serve the application with some keys changed, and wait until the new replicas run."""
    actors = {name: {"num_cpus": 1, "num_gpus": 0} for name in ("target", "draft")}
    nodes.deploy({**ARGS, "actors": actors, **changes})


def load_adapter(url: str, folder: str) -> None:
    """Load an adapter while the service runs: no update is to forget it."""
    from cluster.models.demos import demo_folder
    from specdec.models.describe import linear_shapes
    from specdec.models.loading import ModelSource
    from tests.specdec.adapters import write_adapter

    write_adapter(Path(folder) / "sql", linear_shapes(ModelSource(str(demo_folder("target")))), 4, 0)
    body = {"lora_name": "sql", "lora_path": "sql"}
    answer = httpx2.post(f"{url}/v1/load_lora_adapter", json=body, headers=HEADERS, timeout=TIMEOUT_S, trust_env=False)
    assert answer.status_code == 200, answer.text


def num_with_adapter(url: str) -> int:
    """How many of ten lists of models, which ingresses give in turn, have the adapter."""
    answers = [httpx2.get(f"{url}/v1/models", headers=HEADERS, timeout=TIMEOUT_S, trust_env=False) for _ in range(10)]
    return sum("sql" in [model["id"] for model in answer.json()["data"]] for answer in answers)


def fingerprint(url: str) -> str:
    """Return the ``system_fingerprint`` of new answers."""
    answer = short_request(url)
    assert answer is not None, "no request is answered"
    return str(answer.json()["system_fingerprint"])


def under_update(url: str, after: dict[str, Any], num_streams: int, max_tokens: int) -> dict[str, Any]:
    """Run streams undisturbed, then under an update, and compare; new requests are sent all the while."""
    eventually(lambda: status_of_a_request(url) == 200, 120, "requests are answered")
    streams = Streams(url, "specdec-demo", num_streams, max_tokens, headers=HEADERS)
    before = fingerprint(url)
    with streams.running() as wait:
        undisturbed = wait()
    statuses: list[int | None] = []
    with streams.running() as wait:
        eventually(streams.have_begun, 120, "all streams have begun")
        update = threading.Thread(target=deploy, args=(after,))
        update.start()
        while update.is_alive():
            statuses.append(status_of_a_request(url))
            time.sleep(0.2)
        has_outlived = streams.are_running()
        ended = wait()
    errors = sorted({stream.error for stream in ended if stream.error is not None})
    compared = asdict(Comparison.of(ended, undisturbed))
    compared |= {"statuses": statuses, "errors": errors, "chunks": list(streams.num_chunks.values())}
    compared["has_outlived"] = has_outlived
    return compared | {"is_other": fingerprint(url) != before, "num_with_adapter": num_with_adapter(url)}


def status_of_a_request(url: str) -> int | None:
    """Return the status of a short request, or None if no connection is taken, or it is cut."""
    answer = short_request(url)
    return None if answer is None else answer.status_code


def short_request(url: str) -> httpx2.Response | None:
    """Ask for one token; None if no connection is taken, or it is cut."""
    body = {"prompt": "x", "max_tokens": 1}
    try:
        options: dict[str, Any] = {"headers": HEADERS, "timeout": TIMEOUT_S, "trust_env": False}
        model = httpx2.get(f"{url}/v1/models", **options).json()["data"][0]["id"]
        return httpx2.post(f"{url}/v1/completions", json={"model": model, **body}, **options)
    except (httpx2.HTTPError, ValueError, KeyError):
        return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what became of the streams, as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("update", choices=UPDATES)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=400)
    options = parser.parse_args(arguments)
    prepare()
    os.environ["SPECDEC_API_KEYS"] = f"admin={HEADERS['Authorization'].removeprefix('Bearer ')}"
    with tempfile.TemporaryDirectory() as folder:
        lora = {"lora": {"folder": folder}}
        with serve_alone(num_cpus=8) as url:  # cores for old and new workers at once
            before = lora | REPLICAS.get(options.update, {})
            deploy(before)
            load_adapter(url, folder)
            outcome = under_update(url, before | UPDATES[options.update], options.streams, options.max_tokens)
    sys.stdout.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
