"""``specdec render``: one file for a laptop, a Ray cluster and Kubernetes."""

from __future__ import annotations

import pytest
import yaml
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema

from cluster.cli.main import main
from cluster.config.app import AppArgs, ServiceConfig
from cluster.config.environment import RAY_SETTINGS
from cluster.config.live import LIVE_KEYS, reconfigured
from cluster.config.models import DraftConfig
from cluster.config.names import DRAFT, INGRESS, ROUTER, TARGET
from cluster.launch.applications import draft_args
from cluster.launch.local import status_args
from cluster.launch.serve_config import laid_over, overlays, serve_config
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
    assert main(["render", *words]) == code
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


def test_traces_need_variables_on_every_node(service, tmp_path, capsys):
    config = service(demo="plain", tracing={"exporter": "otlp", "endpoint": "http://collector:4318"})
    assert main(["render", config, "--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "environment.env").read_text().splitlines()
    assert {f"{name}={value}" for name, value in RAY_SETTINGS.items()} < set(lines)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318" in lines
    assert "tracing" not in (tmp_path / "out" / "serve.yaml").read_text()


def test_this_machines_variables_have_no_say(service, capsys, monkeypatch):
    config = service(target="t")
    before = printed(capsys, config)
    monkeypatch.setenv("SPECDEC__TARGET__TOKEN", "secret")
    monkeypatch.setenv("SPECDEC__BLOCK_SIZE", "64")
    assert printed(capsys, config) == before


def test_an_overlay_says_where_and_the_file_what(service, capsys):
    config = service(target="t", draft="d", replicas={"target": 3})
    application = printed(capsys, config, "--overlay", "prod")["applications"][0]
    args = AppArgs.model_validate(application["args"])
    _ingress, router, target = application["deployments"]
    assert (args.target.model, target["num_replicas"], router["autoscaling_config"]["max_replicas"]) == ("t", 3, 4)
    assert args.actors.target.label_selector == {"role": "target"}
    assert printed(capsys, config)["applications"][0]["args"].keys() == {"target", "draft", "actors"}


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


def test_a_kustomization_of_ones_own_stays_as_it_is(service, tmp_path, capsys):
    config, out = service(demo="plain"), tmp_path / "mine"
    assert main(["render", config, "--overlay", str(overlays() / "dev"), "--out", str(out)]) == 0
    names = {"serve.yaml", "environment.env", "grace.yaml", "kustomization.yaml", "manifests"}
    assert {path.name for path in out.iterdir()} == names
    (out / "kustomization.yaml").write_text("mine")
    assert main(["render", config, "--overlay", "dev", "--out", str(out)]) == 0
    assert (out / "kustomization.yaml").read_text() == "mine"


def test_one_mapping_over_another():
    below = {"a": {"x": 1, "y": {"z": 2}}, "b": 3}
    assert laid_over(below, {"a": {"y": {"z": 4}}, "c": 5}) == {"a": {"x": 1, "y": {"z": 4}}, "b": 3, "c": 5}
    assert laid_over(below, {"a": "text"}) == {"a": "text", "b": 3}
