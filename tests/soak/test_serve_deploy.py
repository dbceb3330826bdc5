"""What ``specdec render`` writes for a pair of the hub, run by ``serve deploy`` on a local Ray node."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from cluster.cli.render import serve_yaml
from cluster.config.limits import ResponsesStore
from cluster.launch.local import check_port
from cluster.launch.serve_config import laid_over
from cluster.models.demos import demo_folder
from specdec import ModelSource
from specdec.models.describe import linear_shapes
from tests.integration.kills import Comparison, Streams
from tests.integration.running import eventually, serve_deploy, serve_node
from tests.specdec.adapters import write_adapter

OLD, NEW, NEWER, NOWHERE = (letter * 40 for letter in "abcd")
"""Commits of both models on the hub, with other weights and the same tokenizer; the last is not there."""
DEPLOY_TIMEOUT_S = 180
STATUS_DEPLOYMENTS = {"Health", "Metrics"}
"""What answers ``/health`` and ``/metrics``; an update of the models leaves it alone."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The folder in which this machine keeps models of the hub, with their commits."""
    cache, generator = tmp_path_factory.mktemp("hub"), torch.Generator().manual_seed(0)
    for role in ("target", "draft"):
        weights = load_file(demo_folder(role) / "model.safetensors")
        for commit in (OLD, NEW, NEWER):
            folder = cache / f"models--specdec--{role}" / "snapshots" / commit
            shutil.copytree(demo_folder(role), folder)
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
            for weight in weights.values():
                weight *= 1 + 0.1 * torch.randn(weight.shape, generator=generator)
    return cache


@pytest.fixture(scope="module")
def node(hub):
    """The address of a Ray node's dashboard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(hub))
        patch.setenv("HF_HUB_OFFLINE", "1")
        with serve_node(num_cpus=4) as address:
            yield address


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter of the demo target, in the folder from which the service may load."""
    path = tmp_path_factory.mktemp("adapters") / "sql"
    return write_adapter(path, linear_shapes(ModelSource(str(demo_folder("target")))), 4, 0)


@pytest.fixture(scope="module")
def render(adapter, tmp_path_factory):
    """A function that gives Serve's configuration of the service with changes; it listens on this machine alone."""
    file = tmp_path_factory.mktemp("service") / "service.yaml"
    base = {
        "served_model_name": "specdec-demo",
        "target": {"model": "specdec/target", "revision": OLD, "dtype": "float32"},
        "draft": {"model": "specdec/draft", "revision": OLD, "dtype": "float32"},
        "actors": {part: {"num_gpus": 0, "num_cpus": 1} for part in ("target", "draft")},
        "port": check_port("127.0.0.1", 0),
        "responses_store": {"enabled": True},
        "lora": {"folder": str(Path(adapter.path).parent)},
    }

    def rendered(changes=None):
        file.write_text(yaml.safe_dump(laid_over(base, changes or {})))
        text = serve_yaml(file)
        assert "host: 0.0.0.0\n" in text
        return text.replace("host: 0.0.0.0\n", "host: 127.0.0.1\n")

    return rendered


def get(url, body=None, timeout_s=60):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return answer.read().decode()


def replicas():
    """This node's replicas: process ids, and the deployment that each is of."""
    import ray
    from ray.util.state import list_actors

    found, node = {}, ray.get_runtime_context().gcs_address
    for actor in list_actors(node, filters=[("state", "=", "ALIVE")]):
        kind, _, name = actor.class_name.partition(":")
        if kind == "ServeReplica":
            found[actor.pid] = name.split(":")[1]
    return found


def application_status(name="specdec"):
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None:
        return "absent", ""
    messages = [application.message, *(deployment.message for deployment in application.deployments.values())]
    return str(application.status.value), "\n".join(messages)


@pytest.fixture(scope="module")
def deployed(render, node, tmp_path_factory):
    """The service, running; yields where it listens."""
    serve_deploy(render(), node, tmp_path_factory.mktemp("serve"))
    deadline_s = time.monotonic() + DEPLOY_TIMEOUT_S
    status, messages = application_status()
    while status not in ("RUNNING", "DEPLOY_FAILED") and time.monotonic() < deadline_s:
        time.sleep(0.5)
        status, messages = application_status()
    assert status == "RUNNING", messages
    return f"http://127.0.0.1:{yaml.safe_load(render())['http_options']['port']}"


def test_ray_asks_for_a_token(node):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"{node}/api/serve/applications/")
    assert caught.value.code == 401


def test_it_answers_a_completion_request(deployed):
    (model,) = [entry["id"] for entry in json.loads(get(f"{deployed}/v1/models"))["data"]]
    body = {"model": model, "prompt": "def fibonacci(n):", "max_tokens": 16, "temperature": 0}
    answer = json.loads(get(f"{deployed}/v1/completions", body))
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"]


def fingerprint(url):
    """Return the ``system_fingerprint`` of new answers."""
    return json.loads(get(f"{url}/v1/completions", {"model": "specdec-demo", "prompt": "x", "max_tokens": 1}))[
        "system_fingerprint"
    ]


def status_of(url, body):
    """The status that a completion request is answered with."""
    try:
        get(f"{url}/v1/completions", body)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def test_limits_and_numbers_of_replicas_change_without_a_restart(render, node, deployed, tmp_path):
    before = replicas()
    body = {"model": "specdec-demo", "prompt": "x", "max_tokens": 1, "n": 3}
    assert status_of(deployed, body) == 200
    changed = {"limits": {"max_sequences": 2}, "replicas": {"router": 2}}
    for changes, status, num_more in ((changed, 400, 1), ({}, 200, 0)):
        serve_deploy(render(changes), node, tmp_path)
        eventually(lambda status=status: status_of(deployed, body) == status, 60, "the limit has changed")
        eventually(lambda more=num_more: len(replicas()) == len(before) + more, 120, "the router has as many replicas")
        assert before.items() <= replicas().items()
    eventually(lambda: application_status()[0] == "RUNNING", DEPLOY_TIMEOUT_S, "the update is done")
    assert before


SERVICES = {"OpenAIIngress", "SpeculationRouter", "TargetServer"}
UPDATES = (
    ("the draft's revision", {"draft": {"revision": NEW}}, {"DraftServer"}),
    ("a limit", {"limits": {"max_reopens": 5}}, set()),
    ("log level", {"log_level": "debug"}, set()),
    ("more replicas", {"replicas": {"target": 2, "router": 2}}, {"TargetServer", "SpeculationRouter"}),
    ("fewer replicas", {"replicas": {"target": 1, "router": 1}}, {"TargetServer", "SpeculationRouter"}),
    ("a draft that cannot be loaded", {"draft": {"revision": NOWHERE}}, {"DraftServer"}),
    ("the draft of before", {"draft": {"revision": OLD}}, {"DraftServer"}),
    ("the target's revision", {"target": {"revision": NEW}}, SERVICES),
)
"""What an update changes, how, and the deployments that have replicas then which they had not, or no longer."""


@pytest.mark.timeout(1800)
def test_an_update_breaks_no_stream_refuses_nobody_and_restarts_nothing_that_it_does_not_change(
    render, node, deployed, tmp_path
):
    short = {"model": "specdec-demo", "prompt": "x", "max_tokens": 1}
    streams = Streams(deployed, "specdec-demo", count=16, max_tokens=300)
    with streams.running() as wait:
        undisturbed = wait()
    all_changes = {}
    for what, changes, others in UPDATES:
        before, all_changes = replicas(), laid_over(all_changes, changes)
        with streams.running() as wait:
            eventually(streams.have_begun, 120, "all streams have begun")
            serve_deploy(render(all_changes), node, tmp_path)
            ended = wait()
        compared = Comparison.of(ended, undisturbed)
        assert not compared.broken, (what, [stream.error for stream in ended])
        assert compared.is_exact, what

        statuses = set()

        def restarted(before=before, statuses=statuses):
            statuses.add(status_of(deployed, short))
            after = replicas()
            return {before[pid] for pid in before.keys() - after.keys()} | {
                after[pid] for pid in after.keys() - before.keys()
            }

        with suppress(AssertionError):
            eventually(lambda others=others: restarted() == others, DEPLOY_TIMEOUT_S, "all replicas are others")
        assert restarted() == others, what
        assert statuses == {200}, what
        for name in ("specdec", "specdec-draft"):
            eventually(
                lambda name=name: application_status(name)[0] == "RUNNING",
                DEPLOY_TIMEOUT_S,
                f"{name} runs after {what}",
            )
        if "cannot" in what:
            eventually(lambda: NOWHERE in get(f"{deployed}/health"), 30, what)
            assert "specdec_draft_failed" in get(f"{deployed}/metrics")
    with streams.running() as wait:
        assert not Comparison.of(wait(), undisturbed).is_exact, "the new target's weights are others"


def load_adapter(adapter):
    """Load it as some ingress would: over HTTP that takes an API key."""
    from deployments.operate.stores import RayStore

    store = RayStore("store:specdec", ResponsesStore())
    loaded = msgspec.json.encode(("another model's", adapter, None))
    asyncio.run(store.assign("sql", loaded))


def test_an_update_of_the_target_breaks_no_stream_and_loses_nothing_stored(render, node, deployed, adapter, tmp_path):
    load_adapter(adapter)
    stored = json.loads(
        get(f"{deployed}/v1/responses", {"model": "specdec-demo", "input": "x", "max_output_tokens": 4})
    )
    assert stored["store"]
    assert status_of(deployed, {"model": "sql", "prompt": "x", "max_tokens": 1}) == 200
    streams = Streams(deployed, "specdec-demo", count=4, max_tokens=1200)
    with streams.running() as wait:
        undisturbed = wait()
    before, model = replicas(), fingerprint(deployed)
    with streams.running() as wait:
        eventually(streams.have_begun, 60, "all streams have begun")
        serve_deploy(render({"target": {"revision": NEWER}}), node, tmp_path)
        eventually(lambda: fingerprint(deployed) != model, DEPLOY_TIMEOUT_S, "the new target answers")
        assert streams.are_running(), "they had ended before the new target served"
        ended = wait()
    compared = Comparison.of(ended, undisturbed)
    assert not compared.broken, [stream.error for stream in ended]
    assert compared.is_exact

    def unchanged():
        return {before[pid] for pid in before.keys() & replicas().keys()}

    kept = STATUS_DEPLOYMENTS | {"DraftServer"}
    with suppress(AssertionError):
        eventually(lambda: unchanged() <= kept, 120, "every replica of the target's application is another")
    assert unchanged() == kept, application_status()
    eventually(lambda: application_status()[0] == "RUNNING", DEPLOY_TIMEOUT_S, "the update is done")
    assert json.loads(get(f"{deployed}/v1/responses/{stored['id']}")) == stored
    follow = {"model": "sql", "input": "y", "max_output_tokens": 1, "previous_response_id": stored["id"]}
    assert json.loads(get(f"{deployed}/v1/responses", follow))["model"] == "sql"
