"""What ``specdec render`` writes for the demo pair, run by ``serve deploy`` on a local Ray node."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import yaml

from cluster.cli.render import serve_yaml
from cluster.config.limits import ResponsesStore
from cluster.launch.local import check_port
from cluster.models.demos import demo_folder
from specdec import ModelSource
from specdec.models.describe import linear_shapes
from tests.integration.kills import Comparison, Streams
from tests.integration.running import eventually, serve_deploy, serve_node
from tests.specdec.adapters import write_adapter

SERVICE = {"demo": "plain"}
DEPLOY_TIMEOUT_S = 180
STATUS_DEPLOYMENTS = {"Health", "Metrics"}
"""What answers ``/health`` and ``/metrics``; an update of the models leaves it alone."""


@pytest.fixture(scope="module")
def node():
    """The address of a Ray node's dashboard."""
    with serve_node(num_cpus=2) as address:
        yield address


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter of the demo target, in the folder from which the service may load."""
    path = tmp_path_factory.mktemp("adapters") / "sql"
    return write_adapter(path, linear_shapes(ModelSource(str(demo_folder("target")))), 4, 0)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """The configuration's file."""
    file = tmp_path_factory.mktemp("service") / "service.yaml"
    file.write_text(yaml.safe_dump(SERVICE))
    return file


@pytest.fixture(scope="module")
def rendered(adapter, service):
    """Serve's configuration; it listens on this machine alone, and not on the port that a pod would have to itself."""
    text = serve_yaml(service)
    assert "host: 0.0.0.0\n  port: 8000" in text
    port = check_port("127.0.0.1", 0)
    config = yaml.safe_load(text.replace("host: 0.0.0.0\n  port: 8000", f"host: 127.0.0.1\n  port: {port}"))
    for application, part in zip(config["applications"], ("target", "draft"), strict=False):
        application["args"]["actors"] = {part: {"num_gpus": 0, "num_cpus": 1}}
    kept = {"responses_store": {"enabled": True}, "lora": {"folder": str(Path(adapter.path).parent)}}
    config["applications"][0]["args"] |= kept
    return yaml.safe_dump(config)


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
def deployed(rendered, node, tmp_path_factory):
    """The service, running; yields where it listens."""
    serve_deploy(rendered, node, tmp_path_factory.mktemp("serve"))
    deadline_s = time.monotonic() + DEPLOY_TIMEOUT_S
    status, messages = application_status()
    while status not in ("RUNNING", "DEPLOY_FAILED") and time.monotonic() < deadline_s:
        time.sleep(0.5)
        status, messages = application_status()
    assert status == "RUNNING", messages
    return f"http://127.0.0.1:{yaml.safe_load(rendered)['http_options']['port']}"


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


def status_of(url, body):
    """The status that a completion request is answered with."""
    try:
        get(f"{url}/v1/completions", body)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def test_limits_and_numbers_of_replicas_change_without_a_restart(rendered, service, node, deployed, tmp_path):
    """As ``render`` writes them."""
    before = replicas()
    body = {"model": "specdec-demo", "prompt": "x", "max_tokens": 1, "n": 3}
    assert status_of(deployed, body) == 200
    changes = {"limits": {"max_sequences": 2}, "replicas": {"router": 2}}
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(SERVICE | changes))
    limited = yaml.safe_load(rendered)
    change, unchanged = (yaml.safe_load(serve_yaml(path))["applications"][0] for path in (file, service))
    assert change["args"] == unchanged["args"]
    limited["applications"][0]["deployments"] = change["deployments"]
    for changed, status, num_more in ((yaml.safe_dump(limited), 400, 1), (rendered, 200, 0)):
        serve_deploy(changed, node, tmp_path)
        eventually(lambda status=status: status_of(deployed, body) == status, 60, "the limit has changed")
        eventually(lambda more=num_more: len(replicas()) == len(before) + more, 120, "the router has as many replicas")
        assert before.items() <= replicas().items()
    eventually(lambda: application_status()[0] == "RUNNING", DEPLOY_TIMEOUT_S, "the update is done")
    assert before


SERVICES = {"OpenAIIngress", "SpeculationRouter", "TargetServer"}
UPDATES = (
    ("the draft", 1, {"args": {"draft": {"kv_cache_memory": "64MiB"}}}, {"DraftServer"}),
    ("a limit", 0, {"user_config": {"limits": {"max_reopens": 5}}}, set()),
    ("log level", 1, {"user_config": {"log_level": "debug"}}, set()),
    ("a draft that cannot be loaded", 1, {"args": {"draft": {"kv_cache_memory": "1KiB"}}}, {"DraftServer"}),
    ("the draft of before", 1, {"args": {"draft": None}}, {"DraftServer"}),
    ("the target", 0, {"args": {"block_size": 32}}, SERVICES),
)
"""What an update changes, the application that it is of, how (None takes a key away), and the deployments whose
replicas are others then."""


@pytest.mark.timeout(1800)
def test_an_update_of_either_application_breaks_no_stream_refuses_nobody_and_restarts_nothing_of_the_other(
    rendered, node, deployed, tmp_path
):
    short = {"model": "specdec-demo", "prompt": "x", "max_tokens": 1}
    streams = Streams(deployed, "specdec-demo", count=16, max_tokens=300)
    with streams.running() as wait:
        undisturbed = wait()
    config = yaml.safe_load(rendered)
    for what, index, changes, others in UPDATES:
        before, application = replicas(), config["applications"][index]
        args = application["args"] | changes.get("args", {})
        application["args"] = {key: value for key, value in args.items() if value is not None}
        for deployment in application["deployments"]:
            deployment["user_config"] |= changes.get("user_config", {})
        with streams.running() as wait:
            eventually(streams.have_begun, 120, "all streams have begun")
            serve_deploy(yaml.safe_dump(config), node, tmp_path)
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
            eventually(lambda: "1KiB" in get(f"{deployed}/health") or "memory" in get(f"{deployed}/health"), 30, what)
            assert "specdec_draft_failed" in get(f"{deployed}/metrics")


def load_adapter(adapter):
    """Load it as some ingress would: over HTTP that takes an API key."""
    from deployments.operate.stores import RayStore

    store = RayStore("store:specdec", ResponsesStore())
    loaded = msgspec.json.encode(("another model's", adapter, None))
    asyncio.run(store.assign("sql", loaded))


def test_an_update_that_restarts_every_replica_breaks_no_stream_and_loses_nothing_stored(
    rendered, node, deployed, adapter, tmp_path
):
    load_adapter(adapter)
    stored = json.loads(
        get(f"{deployed}/v1/responses", {"model": "specdec-demo", "input": "x", "max_output_tokens": 4})
    )
    assert stored["store"]
    assert status_of(deployed, {"model": "sql", "prompt": "x", "max_tokens": 1}) == 200
    streams = Streams(deployed, "specdec-demo", count=4, max_tokens=1200)
    with streams.running() as wait:
        undisturbed = wait()
    before = replicas()
    with streams.running() as wait:
        eventually(streams.have_begun, 60, "all streams have begun")
        changed = yaml.safe_load(rendered)
        changed["applications"][0]["args"]["block_size"] = 64
        serve_deploy(yaml.safe_dump(changed), node, tmp_path)
        eventually(lambda: application_status()[0] == "DEPLOYING", 60, "the update has begun")
        assert streams.are_running(), "they had ended before the update began"
        ended = wait()
    compared = Comparison.of(ended, undisturbed)
    assert not compared.broken, [stream.error for stream in ended]
    assert compared.is_exact

    def unchanged():
        return {before[pid] for pid in before.keys() & replicas().keys()}

    kept = STATUS_DEPLOYMENTS | {"DraftServer"}
    with suppress(AssertionError):
        eventually(lambda: unchanged() <= kept, 120, "every replica is another")
    assert unchanged() == kept, application_status()
    eventually(lambda: application_status()[0] == "RUNNING", DEPLOY_TIMEOUT_S, "the update is done")
    assert json.loads(get(f"{deployed}/v1/responses/{stored['id']}")) == stored
    follow = {"model": "sql", "input": "y", "max_output_tokens": 1, "previous_response_id": stored["id"]}
    assert json.loads(get(f"{deployed}/v1/responses", follow))["model"] == "sql"
