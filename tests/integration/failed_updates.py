"""Updates that cannot succeed, under streams and new requests: of a model that cannot be loaded, or without a place.

``python -m tests.integration.failed_updates unloadable surge`` prints what became of all requests as JSON; the suite
asserts its counts. A process of its own, as Ray reads its environment when it is imported.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.integration.kills import Comparison, Streams
from tests.integration.nodes import deploy, prepare, serve_alone
from tests.integration.running import eventually

ARGS: dict[str, Any] = {
    "num_speculative_tokens": 4,
    "drain_timeout_s": 300,
    "limits": {"queue_timeout_s": 5},
    "actors": {name: {"num_cpus": 3, "num_gpus": 0} for name in ("target", "draft")},
}
CORES = {"surge": 16, "replace": 6}
"""Room for both versions, or for one."""
LATE_S = 10.0
TIMEOUT_S = 240.0


@dataclass
class Probes:
    """Short requests, one every ``period_s`` whatever became of those before.

    Attributes:
        found: When each was sent, its status (None: refused or cut), whether it had Retry-After, and its seconds.
    """

    url: str
    period_s: float = 0.25
    found: list[tuple[float, int | None, bool, float]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send them meanwhile."""
        ended = threading.Event()

        def send() -> None:
            with ThreadPoolExecutor(64) as pool:
                while not ended.wait(self.period_s):
                    pool.submit(self.send)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            yield
        finally:
            ended.set()
            sender.join()

    def send(self) -> int | None:
        """Send one; gives its status."""
        sent_s, status, may_retry = time.monotonic(), None, False
        try:
            options: dict[str, Any] = {"timeout": TIMEOUT_S, "trust_env": False}
            body = {"model": "m", "prompt": "x", "max_tokens": 1}
            answer = httpx2.post(f"{self.url}/v1/completions", json=body, **options)
            status, may_retry = answer.status_code, "retry-after" in answer.headers
        except httpx2.HTTPError:
            pass
        self.found.append((sent_s, status, may_retry, time.monotonic() - sent_s))
        return status

    def summary(self) -> dict[str, Any]:
        """Counts, and how long there was no answer with 200."""
        bad = [sent_s for sent_s, status, _, _ in self.found if status != 200]
        good = [sent_s for sent_s, status, _, _ in self.found if status == 200]
        after = [sent_s for sent_s in good if bad and sent_s > bad[-1]]
        return {
            "num_requests": len(self.found),
            "num_answered": len(good),
            "num_refused": sum(status is not None and status != 200 for _, status, _, _ in self.found),
            "num_broken": sum(status is None for _, status, _, _ in self.found),
            "statuses": sorted({str(status) for _, status, _, _ in self.found}),
            "all_may_retry": all(may_retry for _, status, may_retry, _ in self.found if status != 200),
            "seconds_refused": round(min(after) - bad[0], 1) if after else 0.0,
            "longest_s": round(max(seconds for *_, seconds in self.found), 2),
        }


@contextmanager
def service(args: dict[str, Any], num_cpus: int) -> Iterator[str]:
    """The demo pair on a node with so many cores to give; gives its URL."""
    from ray import serve

    from deployments.operate.status import StatusArgs, build_health

    with serve_alone(num_cpus) as url:
        serve.run(build_health(StatusArgs(update_timeout_s=LATE_S)), name="specdec-health", route_prefix="/health")
        apply(args)
        eventually(lambda: application() == "RUNNING", TIMEOUT_S, "it runs")
        yield url


def apply(args: dict[str, Any]) -> None:
    """Hand Serve the application, and do not wait."""
    deploy(args, waits=False)


def application() -> str:
    """Serve's word for the state of the application."""
    from ray import serve

    return str(serve.status().applications["specdec"].status.value)


def health(url: str) -> tuple[int, dict[str, Any]]:
    """What ``/health`` says."""
    answer = httpx2.get(f"{url}/health", timeout=30, trust_env=False)
    return answer.status_code, dict(answer.json())


def unloadable(folder: Path) -> dict[str, Any]:
    """A target whose files all are there and can be read, and do not fit each other."""
    from cluster.models.demos import demo_folder

    shutil.copytree(demo_folder("target"), folder / "target")
    config = json.loads((folder / "target" / "config.json").read_text())
    config["intermediate_size"] += 8
    (folder / "target" / "config.json").write_text(json.dumps(config))
    return {"target": str(folder / "target"), "draft": str(demo_folder("draft"))}


def updated(what: str, mode: str, folder: Path, num_streams: int, max_tokens: int) -> dict[str, Any]:
    """Apply what cannot succeed under streams and requests, go back, and tell what became of them."""
    before = ARGS | {"updates": {"target": mode, "draft": mode}, "served_model_name": "m"}
    after = before | (unloadable(folder) if what == "unloadable" else {"block_size": 32})
    num_cpus = CORES[mode] if what != "no_place" else CORES["replace"]
    ended_as, state = ("DEPLOY_FAILED", "failed") if what == "unloadable" else ("DEPLOYING", "late")
    with service(before, num_cpus) as url:
        streams, probes = Streams(url, "m", num_streams, max_tokens), Probes(url)
        eventually(lambda: probes.send() == 200, TIMEOUT_S, "requests are answered")
        with streams.running() as wait:
            undisturbed = wait()
        probes.found.clear()
        with probes.running(), streams.running() as wait:
            eventually(streams.have_begun, 120, "all streams have begun")
            apply(after)
            eventually(lambda: (health(url)[1].get("update") or {}).get("status") == state, TIMEOUT_S, f"it is {state}")
            told, status = health(url), application()
            ended = wait()
            time.sleep(3)
            began_s = time.monotonic()
            if what == "unloadable":  # without a place, another version of the same would have none either
                apply(before)
                eventually(lambda: application() == "RUNNING", TIMEOUT_S, "the version before runs again")
            back_s = time.monotonic() - began_s
            time.sleep(1)
        probes_after = probes.send()
    compared = asdict(Comparison.of(ended, undisturbed))
    errors = sorted({stream.error for stream in ended if stream.error is not None})
    return (
        compared
        | probes.summary()
        | {
            "health": told,
            "is_as_expected": status == ended_as,
            "back_s": round(back_s, 1),
            "after": probes_after,
            "errors": errors,
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what became of streams and requests, as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("what", choices=("unloadable", "no_place"))
    parser.add_argument("mode", choices=CORES)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=400)
    options = parser.parse_args(arguments)
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        outcome = updated(options.what, options.mode, Path(folder), options.streams, options.max_tokens)
    sys.stdout.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
