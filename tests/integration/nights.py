"""Nights on a running service, over HTTP: record, train, try, deploy if better. Prints a table of what came of them.

``python -m tests.integration.nights changed --work FOLDER --out NEW``, and the same with ``shipped``. FOLDER is that of
``python -m benchmarks.better_draft``, whose targets and prompts are taken. The changed target's draft is trained while
seeded streams run; the shipped pair has six nights, each with another plan. A part of what was recorded is generated
again, in one process: it must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import yaml

from benchmarks.better_draft import shuffled
from specdec.audition.recording import Sample, read_recording, write_recording
from specdec.audition.training import split
from tests.integration.kills import Comparison, Streams
from tests.integration.running import ROOT, eventually, free_port, serve_node

LENGTH = 5
"""Draft tokens of a round."""
_METRICS = {"per_request_spec_decode_metrics": "summary"}
LEARNED = "--batch-tokens 1024 --learning-rate 0.001"
OWN = tuple(
    f"--batch-tokens 1024 {further}"
    for further in (
        "--learning-rate 0.00001",
        "--learning-rate 0.0001",
        "--learning-rate 0.001",
        "--learning-rate 0.0001 --epochs 2",
        "--learning-rate 0.001 --lora-rank 8",
        "--learning-rate 0.005 --lora-rank 8",
    )
)


def post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=300) as answer:
        return json.load(answer)


def body_of(sample: Sample) -> dict[str, Any]:
    """A request with the sample's prompt, seed and sampling."""
    return {
        "model": "default",
        "prompt": list(sample.prompt_token_ids),
        "temperature": sample.sampling.temperature,
        "seed": sample.seed,
        "max_tokens": sample.max_tokens,
        "ignore_eos": True,
    }


class Service:
    """A pair on a Ray node, deployed by its configuration.

    Args:
        folder: For the configuration, recordings, and drafts.
        target: The target's checkpoint.
        draft: The draft's.
        node: Address of the node's dashboard.
    """

    def __init__(self, folder: Path, target: Path, draft: Path, node: str) -> None:
        folder.mkdir(parents=True)
        self.folder, port = folder, free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.config = folder / "service.yaml"
        actors = {part: {"num_gpus": 0, "num_cpus": 1} for part in ("target", "draft")}
        service = {
            "target": str(target),
            "draft": {"model": str(draft)},
            "served_model_name": "default",
            "num_speculative_tokens": LENGTH,
            "max_model_len": 256,
            "actors": actors,
        }
        self.config.write_text(yaml.safe_dump(service, sort_keys=False))
        self.deploy = folder / "deploy"
        self.deploy.write_text(
            "#!/bin/sh\n"
            f"sed -i 's/host: 0.0.0.0/host: 127.0.0.1/; s/port: 8000/port: {port}/' \"$1\"\n"
            f'exec {_program("serve")} deploy "$1" --address {node}\n'
        )
        self.deploy.chmod(0o755)
        rendered = self.specdec("render", str(self.config), "--serve")
        file = folder / "first.yaml"
        file.write_text(rendered)
        subprocess.run([self.deploy, file], check=True, capture_output=True)
        eventually(lambda: self.drafter != "", 180, "the draft has loaded")

    def specdec(self, *flags: str) -> str:
        """Run a command to its end; returns what it printed."""
        done = subprocess.run([_program("specdec"), *flags], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def drafter(self) -> str:
        """The one replica that drafts; empty while there are none, two, or one that loads."""
        from ray.serve.context import _get_global_client

        found = _get_global_client().get_serve_details()["applications"]
        if len(found) < 2 or any(one["status"] != "RUNNING" for one in found.values()):
            return ""
        (deployment,) = found["specdec-draft"]["deployments"].values()
        replicas = [one["replica_id"] for one in deployment["replicas"]]
        body = {"model": "default", "prompt": "import os", "max_tokens": 16, "ignore_eos": True}
        metrics = post(self.url, body | _METRICS)["metrics"]["speculative_decoding"]
        return replicas[0] if len(replicas) == 1 and metrics["num_spec_steps"] else ""

    def record(self, samples: Sequence[Sample], name: str) -> Path:
        """Have answers to the samples' prompts recorded."""
        bodies, folder = self.folder / f"{name}.bodies.jsonl", self.folder / name
        bodies.write_text("".join(json.dumps(body_of(one)) + "\n" for one in samples))
        folder.mkdir()
        self.specdec("record", str(bodies), "--out", str(folder / "recording.jsonl"), "--url", self.url)
        return folder

    def record_nights(self, samples: Sequence[Sample]) -> tuple[Path, Path]:
        """Have three quarters recorded as of this night, and the others as of earlier ones."""
        num_older = len(samples) // 4
        new, older = self.record(samples[num_older:], "new"), self.record(samples[:num_older], "older")
        print(self.specdec("replay", str(older / "recording.jsonl"), "--config", str(self.config)), end="", flush=True)
        return new, older

    def night(self, new: Path, older: Path, training: str, name: str) -> subprocess.Popen[str]:
        """Start the nightly script."""
        drafts = self.folder / name
        drafts.mkdir()
        return subprocess.Popen(
            [ROOT / "examples/nightly_draft.sh", self.config, new, older, drafts],
            env=os.environ
            | {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "DEPLOY": str(self.deploy),
                "TRAINING": training,
            },
            stdout=subprocess.PIPE,
            stderr=(drafts / "log").open("w"),
            text=True,
        )

    def tokens_per_round(self, samples: Sequence[Sample]) -> float:
        """Of the target's rounds that verified a draft, by what answers say of themselves."""
        rounds = accepted = 0
        for one in samples:
            found = post(self.url, body_of(one) | _METRICS)["metrics"]
            rounds += found["speculative_decoding"]["num_spec_steps"]
            accepted += found["speculative_decoding"]["num_accepted_draft_tokens"]
        return 1 + accepted / rounds


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def changed_target(service: Service, samples: Sequence[Sample]) -> None:
    """A night after the target has changed, under streams."""
    held_out = split(samples)[1][:48]
    before = service.tokens_per_round(held_out)
    new, older = service.record_nights(samples)
    in_another_order = service.folder / "in_another_order"
    in_another_order.mkdir()
    write_recording(in_another_order / "recording.jsonl", shuffled(list(read_recording(new))))
    refused = service.night(in_another_order, older, LEARNED, "drafts_of_another_order").communicate()[0]
    print(refused, flush=True)
    assert refused.endswith(" stays\n"), refused
    streams = Streams(service.url, "default", count=8, max_tokens=200)
    with streams.running() as wait:
        undisturbed = wait()
    drafter, begun_s = service.drafter, time.monotonic()
    night, num_streams, ends = service.night(new, older, LEARNED, "drafts"), 0, False
    while not ends:
        ends = night.poll() is not None and service.drafter not in ("", drafter)  # the last run begins after it
        with streams.running() as wait:
            compared = Comparison.of(wait(), undisturbed)
        assert not compared.broken, compared
        assert compared.is_exact, compared
        num_streams += streams.count
        assert night.poll() in (None, 0)
    assert night.stdout is not None
    print(night.stdout.read())
    after = service.tokens_per_round(held_out)
    print(
        f"changed target: {before:.2f} tokens a round before, {after:.2f} after, {after / before:.2f} times; "
        f"{time.monotonic() - begun_s:.0f} s under {num_streams} streams, none broken, none changed",
        flush=True,
    )


def own_traffic(service: Service, samples: Sequence[Sample]) -> None:
    """Six nights of the shipped pair."""
    new, older = service.record_nights(samples)
    for number, plan in enumerate(OWN):
        begun_s = time.monotonic()
        night = service.night(new, older, plan, f"drafts{number}")
        printed, _ = night.communicate()
        print(f"own traffic, {plan}: {printed.splitlines()[-1]}, {time.monotonic() - begun_s:.0f} s", flush=True)
        assert night.returncode == 0


def main() -> None:
    """Run the nights of one target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=("changed", "shipped"))
    parser.add_argument("--work", type=Path, required=True, help="the folder of benchmarks.better_draft")
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there, for what the nights make")
    parser.add_argument("--num-samples", type=int, default=700, help="recorded answers")
    options = parser.parse_args()
    import specdec.demo

    demo = Path(specdec.demo.__path__[0])
    target, run = {"changed": (options.work / "target", changed_target), "shipped": (demo / "target", own_traffic)}[
        options.target
    ]
    samples = list(read_recording(options.work / f"of_{options.target}"))[: options.num_samples]
    with serve_node(num_cpus=4) as node:
        run(Service(options.out.resolve(), target.resolve(), demo / "draft", node), samples)


if __name__ == "__main__":
    main()
