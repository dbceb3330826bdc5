"""``specdec render``: one file for a laptop, a Ray cluster and Kubernetes."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema

from cluster.cli.main import main
from cluster.config.app import AppArgs, ServiceConfig
from cluster.config.environment import DRAIN_VARIABLE, PROXY_VARIABLE, RAY_SETTINGS
from cluster.config.live import LIVE_KEYS, reconfigured
from cluster.config.models import DraftConfig
from cluster.config.names import DRAFT, INGRESS, ROUTER, TARGET
from cluster.launch.applications import draft_args
from cluster.launch.local import status_args
from cluster.launch.serve_config import laid_over, serve_config
from deployments.operate.status import StatusArgs
from tests.cluster.cli.test_flags import EXAMPLES, as_yaml

NOT_ON_A_CLUSTER = ("target.token", "draft.token", "draft.application")


@pytest.fixture
def service(tmp_path):
    """Writes a configuration; gives its path."""

    def write(**keys):
        path = tmp_path / "service.yaml"
        path.write_text(yaml.safe_dump(keys))
        return str(path)

    return write


def printed(capsys, *words, code=0):
    assert main(["render", "--serve", *words]) == code
    captured = capsys.readouterr()
    return yaml.safe_load(captured.out) if code == 0 else captured.err


def test_what_serve_is_told_is_what_the_file_says(service, capsys):
    rendered = printed(
        capsys, service(target="t", draft="d", block_size=32, limits={"retry_after_s": 7}, speculation_mode="overlap")
    )
    application, draft, *_ = rendered["applications"]
    default = {"num_gpus": 1.0, "num_cpus": 1.0}
    assert application["args"] == {
        "target": {"model": "t"},
        "draft": {"application": "specdec-draft"},
        "block_size": 32,
        "actors": {"target": default},
    }
    assert draft["args"] == {"draft": {"model": "d"}, "block_size": 32, "actors": {"draft": default}}
    live = {"limits": {"retry_after_s": 7}, "speculation_mode": "overlap"}
    assert {one["name"]: one["user_config"] for one in (*application["deployments"], *draft["deployments"])} == {
        **dict.fromkeys((INGRESS, ROUTER, TARGET), live),
        DRAFT: {"applications": ["specdec"], "target": {"model": "t"}},
    }
    assert rendered["http_options"] == {"host": "0.0.0.0", "port": 8000}


def test_no_key_is_lost(tmp_path):
    examples = {key: value for key, value in EXAMPLES.items() if key not in NOT_ON_A_CLUSTER}
    path = as_yaml(examples | {"target.device": "cuda", "host": "0.0.0.0", "port": 9000}, tmp_path / "service.yaml")
    config = ServiceConfig.model_validate(yaml.safe_load(path.read_text()))
    rendered = serve_config(config)
    application, draft, *status = rendered["applications"]
    args = AppArgs.model_validate(application["args"])
    assert not set(LIVE_KEYS) - {"replicas"} & args.model_fields_set
    assert "updates" not in application["args"]
    service = reconfigured(args, application["deployments"][0]["user_config"])
    drafter, applications = draft_args(draft["args"], draft["deployments"][0]["user_config"])
    assert applications == ("specdec",)
    given, lost = config.app_args().model_dump(exclude_unset=True), []
    for key, value in given.items():
        parts = [one.model_dump(exclude_unset=True).get(key) for one in (service, drafter)]
        both = {**(parts[0] or {}), **(parts[1] or {})} if isinstance(value, dict) else parts[0]
        lost += [key] if (value | both if isinstance(value, dict) else value) != both and key != "updates" else []
    assert [key for key in lost if key not in ("draft", "target")] == []
    assert drafter.draft.model_dump(exclude=DraftConfig.of_application) == config.draft.model_dump(
        exclude=DraftConfig.of_application
    )
    assert (service.target, service.draft.method) == (config.target, config.draft.method)
    surge = {one["name"]: one.get("max_surge_percent") for one in (*application["deployments"], *draft["deployments"])}
    assert surge == {"OpenAIIngress": 0, "SpeculationRouter": 0, "TargetServer": 100, "DraftServer": 0}
    assert rendered["http_options"] == {"host": "0.0.0.0", "port": 9000, **config.tls.http_options()}
    assert rendered["logging_config"]["encoding"] == config.log_format.upper()
    for one in status:
        status_keys = StatusArgs.model_validate(one["args"])
        assert status_keys.api_keys_file == config.access.api_keys_file
        assert status_keys.update_timeout_s == config.update_timeout_s


def test_a_draftless_service_has_no_deployment_of_drafts(service, capsys):
    application = printed(capsys, service(target="t"))["applications"][0]
    assert [one["name"] for one in application["deployments"]] == ["OpenAIIngress", "SpeculationRouter", "TargetServer"]


APART = {
    "target": {"model": "t", "revision": "1"},
    "draft": {"model": "d", "method": "ngram+model"},
    "limits": {"retry_after_s": 7},
    "replicas": {"draft": 2},
    "actors": {"target": {"num_gpus": 1}, "draft": {"num_gpus": 0.5, "num_cpus": 1}},
    "updates": {"draft": "replace"},
}


def test_the_draft_is_an_application_whose_arguments_have_nothing_of_the_target(service, capsys):
    main, draft, *status = printed(capsys, service(**APART))["applications"]
    assert main["args"] == {
        "target": {"model": "t", "revision": "1"},
        "draft": {"method": "ngram+model", "application": "specdec-draft"},
        "actors": {"target": {"num_gpus": 1.0, "num_cpus": 1.0}},
    }
    assert [one["name"] for one in main["deployments"]] == ["OpenAIIngress", "SpeculationRouter", "TargetServer"]
    assert draft == {
        "name": "specdec-draft",
        "route_prefix": None,
        "import_path": "deployments.app:build_draft",
        "args": {"draft": {"model": "d"}, "actors": {"draft": {"num_gpus": 0.5, "num_cpus": 1.0}}},
        "deployments": [
            {"name": "DraftServer", "num_replicas": 2, "max_surge_percent": 0}
            | {"user_config": {"applications": ["specdec"], "target": {"model": "t", "revision": "1"}}}
        ],
    }
    assert [one["args"]["drafts"] for one in status] == [["specdec-draft"]] * 2


@pytest.mark.parametrize(
    ("keys", "changed"),
    [
        ({"draft": APART["draft"] | {"revision": "2"}}, [1]),
        ({"target": APART["target"] | {"revision": "2"}}, [0]),
        ({"limits": {"retry_after_s": 8}}, []),
        ({"log_level": "debug"}, []),
        ({"replicas": {"target": 2, "draft": 1}}, []),
        ({"chat_template": "x"}, [0]),
    ],
)
def test_a_change_restarts_the_application_that_it_is_of(service, capsys, keys, changed):
    def versions(further):
        applications = printed(capsys, service(**APART | further))["applications"]
        return [get_app_code_version(ServeApplicationSchema.model_validate(one)) for one in applications]

    found = zip(versions({}), versions(keys), strict=True)
    assert [i for i, (old, new) in enumerate(found) if old != new] == changed


@pytest.mark.parametrize(("role", "changed"), [("draft", [1]), ("target", [0])])
def test_a_model_quantized_anew_is_an_update_of_its_own_application_alone(service, capsys, role, changed):
    def versions(keys):
        applications = printed(capsys, service(**keys))["applications"]
        return [get_app_code_version(ServeApplicationSchema.model_validate(one)) for one in applications]

    after = versions(APART | {role: APART[role] | {"quantization": "int8"}})
    assert [i for i, (old, new) in enumerate(zip(versions(APART), after, strict=True)) if old != new] == changed


def test_status_replicas_are_where_the_ingress_is(service, capsys):
    labels = {"role": "front"}
    rendered = printed(capsys, service(demo="plain", actors={"ingress": {"label_selector": labels}}))
    assert [one["deployments"][0]["ray_actor_options"] for one in rendered["applications"][2:]] == [
        {"num_cpus": 0, "label_selector": labels}
    ] * 2
    assert "deployments" not in printed(capsys, service(demo="plain"))["applications"][2]


def test_status_applications_have_the_same_arguments_on_a_laptop():
    config = AppArgs.model_validate({"access": {"api_keys_file": "keys", "metrics_need_key": False}})
    assert status_args(config) == {"application": "specdec", "api_keys_file": "keys", "metrics_need_key": False}
    assert StatusArgs(**status_args(AppArgs())) == StatusArgs()


def test_traces_need_variables_on_every_node(service, capsys):
    traced = {"exporter": "otlp", "endpoint": "http://collector:4318", "trust_traceparent": False}
    config = service(demo="plain", tracing=traced)
    assert main(["render", config, "--environment"]) == 0
    lines = capsys.readouterr().out.splitlines()
    settings = RAY_SETTINGS | {PROXY_VARIABLE: "deployments.proxy:own_traces_only"}
    assert {f"{name}={value}" for name, value in settings.items()} < set(lines)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318" in lines
    assert "tracing" not in str(printed(capsys, config))
    spec, _ = rendered(capsys, config)
    (head,) = spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"} in head["env"]


def test_this_machines_variables_have_no_say(service, capsys, monkeypatch):
    config = service(target="t")
    before = printed(capsys, config)
    monkeypatch.setenv("SPECDEC__TARGET__TOKEN", "secret")
    monkeypatch.setenv("SPECDEC__BLOCK_SIZE", "64")
    assert printed(capsys, config) == before


def rendered(capsys, config):
    """The RayService of a configuration, and how many objects of each kind are beside it."""
    assert main(["render", config]) == 0
    service, *others = yaml.safe_load_all(capsys.readouterr().out)
    return service["spec"], Counter(one["kind"] for one in others)


def workers(spec):
    return {group["groupName"]: group for group in spec["rayClusterConfig"]["workerGroupSpecs"]}


def limits(group):
    return group["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_pods_of_a_plain_file(service, capsys):
    spec, others = rendered(capsys, service(target="t", draft="d"))
    assert others == {"NetworkPolicy": 1, "Service": 1}
    assert {name: limits(group) for name, group in workers(spec).items()} == {
        "front": {"cpu": "4", "memory": "8Gi"},
        "target": {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": 1},
        "draft": {"cpu": "2", "memory": "32Gi", "nvidia.com/gpu": 1},
    }
    actors = yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"]["actors"]
    assert actors["target"] == {"num_gpus": 1.0, "num_cpus": 4.0, "label_selector": {"role": "target"}}
    assert actors["router"] == actors["ingress"] == {"num_cpus": 0.0, "label_selector": {"role": "front"}}
    assert not {"gcsFaultToleranceOptions", "enableInTreeAutoscaling"} & spec["rayClusterConfig"].keys()


def test_a_draftless_service_has_no_pods_of_drafts(service, capsys):
    assert list(workers(rendered(capsys, service(target="t"))[0])) == ["front", "target"]


FLEET = {"NetworkPolicy": 2, "Service": 2, "PersistentVolumeClaim": 1, "StatefulSet": 1, "PodDisruptionBudget": 1}


@pytest.mark.parametrize(
    ("replicas", "is_fleet", "grows", "most"),
    [
        ({}, False, False, {"front": 1, "target": 1}),
        ({"target": 2}, True, False, {"front": 1, "target": 2}),
        ({"target": {"min": 1, "max": 3}}, False, True, {"front": 1, "target": 3}),
        ({"ingress": {"min": 2, "max": 3}, "router": 1}, True, True, {"front": 4, "target": 1}),
    ],
)
def test_replicas_say_what_a_service_has(service, capsys, replicas, is_fleet, grows, most):
    spec, others = rendered(capsys, service(target="t", replicas=replicas))
    assert others == (FLEET if is_fleet else {"NetworkPolicy": 1, "Service": 1})
    assert ("gcsFaultToleranceOptions" in spec["rayClusterConfig"]) == is_fleet
    assert spec["rayClusterConfig"].get("enableInTreeAutoscaling", False) == grows
    assert {name: group["maxReplicas"] for name, group in workers(spec).items()} == most


def test_labels_beside_the_role_are_those_of_kubernetes_nodes(service, capsys):
    labels = {"nvidia.com/gpu.product": "A100"}
    actors = {"target": {"label_selector": labels, "accelerator_type": "A100", "resources": {"fast": 2}}}
    target = workers(rendered(capsys, service(target="t", actors=actors))[0])["target"]
    assert target["labels"] == {"role": "target", **labels}
    assert target["template"]["spec"]["nodeSelector"] == labels
    assert target["resources"] == {"fast": "2", "accelerator_type:A100": "1"}


def test_pods_that_replicas_share_have_room_for_one_of_each(service, capsys):
    shared = {
        name: {"num_gpus": 0.5, "num_cpus": 3, "label_selector": {"role": "both"}} for name in ("target", "draft")
    }
    both = workers(rendered(capsys, service(target="t", draft="d", actors=shared))[0])["both"]
    assert (limits(both)["cpu"], limits(both)["nvidia.com/gpu"]) == ("6", 1)


def test_keys_are_a_secret_where_clients_are_answered(service, capsys):
    keys = {"api_keys_file": "/etc/mine/keys"}
    spec, _ = rendered(capsys, service(target="t", access=keys))
    mounted = {
        name: [mount["mountPath"] for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]]
        for name, group in workers(spec).items()
    }
    assert ("/etc/mine" in mounted["front"], "/etc/mine" in mounted["target"]) == (True, False)


def test_pods_have_the_time_that_their_streams_have(service, capsys):
    for drain_timeout_s, expected in ((0, ("60", 70)), (1800.5, ("1861", 1871))):
        spec, _ = rendered(capsys, service(demo="plain", drain_timeout_s=drain_timeout_s))
        assert spec["rayClusterDeletionDelaySeconds"] == expected[1]
        for group in (spec["rayClusterConfig"]["headGroupSpec"], *workers(spec).values()):
            pod = group["template"]["spec"]
            variables = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
            assert (variables[DRAIN_VARIABLE], pod["terminationGracePeriodSeconds"]) == expected


PLACED = {name: {"num_gpus": 1, "num_cpus": 4} for name in ("target", "draft")}


def version_of(keys):
    """What Serve compares to tell whether replicas are to be started again."""
    return [
        (
            get_app_code_version(ServeApplicationSchema.model_validate(application)),
            {one["name"]: one.get("ray_actor_options") for one in application["deployments"]},
        )
        for application in serve_config(ServiceConfig.model_validate(keys))["applications"][:2]
    ]


@pytest.mark.parametrize(
    ("keys", "restarts"),
    [
        ({"limits": {"max_sequences": 2}}, False),
        ({"log_level": "debug"}, False),
        ({"access": {"admin_keys": ["a"], "api_keys_file": "keys", "allowed_origins": ["*"]}}, False),
        ({"replicas": {"target": 3, "ingress": 2}}, False),
        ({"lora": {"adapters": [{"name": "b", "path": "b"}]}}, False),
        ({"updates": {"target": "replace"}, "update_timeout_s": 7}, False),
        ({"block_size": 32}, True),
        ({"access": {"metrics_need_key": False}}, True),
        ({"lora": {"adapters": [{"name": "a", "path": "a", "draft": "d"}]}}, True),  # the draft has no room for it
    ],
)
def test_what_decides_no_token_restarts_nothing(keys, restarts):
    before = {"target": "t", "draft": "d", "actors": PLACED, "lora": {"adapters": [{"name": "a", "path": "a"}]}}
    assert (version_of(before | keys) != version_of(before)) is restarts


def test_a_range_grows_without_a_restart():
    grown = [
        {"target": "t", "draft": "d", "actors": PLACED, "replicas": {"target": {"min": 1, "max": most}}}
        for most in (4, 8)
    ]
    assert version_of(grown[0]) == version_of(grown[1])


def test_one_mapping_over_another():
    below = {"a": {"x": 1, "y": {"z": 2}}, "b": 3}
    assert laid_over(below, {"a": {"y": {"z": 4}}, "c": 5}) == {"a": {"x": 1, "y": {"z": 4}}, "b": 3, "c": 5}
    assert laid_over(below, {"a": "text"}) == {"a": "text", "b": 3}
