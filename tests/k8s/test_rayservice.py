from __future__ import annotations

import copy
import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.config import AppArgs
from cluster.launch import APPLICATION, APPLICATION_NAME, STATUS, STATUS_PARTS
from cluster.live import reconfigured
from cluster.settings import RAY_SETTINGS
from deployments.names import DRAFT, INGRESS, ROUTER, TARGET
from tests.k8s.crd_schema import load_definition, load_schema, problems, schema_of

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "k8s" / "base"
CRDS = Path(__file__).parent / "crds"


@pytest.fixture(scope="module")
def manifest():
    return yaml.safe_load((BASE / "rayservice.yaml").read_text())


@pytest.fixture(scope="module")
def schema():
    return load_schema(CRDS / "ray.io_rayservices.yaml", "v1")


def serve_config(manifest):
    return yaml.safe_load(manifest["spec"]["serveConfigV2"])


def containers(manifest):
    cluster = manifest["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def test_valid_against_the_crd(manifest, schema):
    assert problems(schema, manifest) == []


def test_every_manifest_of_a_known_kind_is_valid_against_its_crd():
    definitions = [load_definition(path) for path in CRDS.glob("*.yaml")]
    crds = {(one["spec"]["group"], one["spec"]["names"]["kind"]): one for one in definitions}
    assert {kind for _, kind in crds} == {"RayService", "PodMonitor", "PrometheusRule"}
    documents = [
        document for path in (ROOT / "k8s").rglob("*.yaml") for document in yaml.safe_load_all(path.read_text())
    ]
    checked = []
    for document in documents:
        group, _, version = document["apiVersion"].rpartition("/")
        if (group, document["kind"]) in crds:
            assert problems(schema_of(crds[group, document["kind"]], version), document) == []
            checked.append(document["kind"])
    assert sorted(checked) == ["PodMonitor", "PrometheusRule", "RayService"]


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda spec: spec.update(serveConfigV3="x"), "serveConfigV3"),
        (lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"].update(container=[]), "container"),
        (lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas="one"), "replicas"),
        (lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].pop("groupName"), "groupName"),
        (lambda spec: spec["rayClusterConfig"]["authOptions"].update(mode="tokens"), "mode"),
    ],
)
def test_what_is_wrong_is_found(manifest, schema, break_it, named):
    broken = copy.deepcopy(manifest)
    break_it(broken["spec"])
    assert any(named in problem for problem in problems(schema, broken))


def test_serve_config_is_serves(manifest):
    from ray.serve.schema import ServeDeploySchema

    application, *status = ServeDeploySchema.model_validate(serve_config(manifest)).applications
    assert (application.import_path, application.name) == (APPLICATION, APPLICATION_NAME)
    assert [(one.route_prefix, one.import_path) for one in status] == [
        (f"/{part}", f"{STATUS}:build_{part}") for part in STATUS_PARTS
    ]
    assert all(one.args == {"application": APPLICATION_NAME} for one in status)


def test_arguments_are_the_builders(manifest):
    application, *_status = serve_config(manifest)["applications"]
    assert AppArgs.model_validate(application["args"]).is_demo


def test_keys_that_restart_nothing_reach_every_deployment(manifest):
    application = serve_config(manifest)["applications"][0]
    args = AppArgs.model_validate(application["args"])
    configs = {deployment["name"]: deployment["user_config"] for deployment in application["deployments"]}
    assert set(configs) == {INGRESS, ROUTER, TARGET, DRAFT}
    for user_config in configs.values():
        reconfigured(args, user_config)


def test_each_model_has_a_worker_group_with_what_its_actor_asks_for(manifest):
    application, *_status = serve_config(manifest)["applications"]
    args = AppArgs.model_validate(application["args"])
    groups = {group["groupName"]: group for group in manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    for name in ("target", "draft"):
        wanted = getattr(args.actors, name)
        offered = {key: float(value) for key, value in groups[name]["resources"].items()}
        assert wanted.resources == offered
        (container,) = groups[name]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == wanted.num_gpus
    assert manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_router_and_ingress_fit_on_the_head_and_nowhere_else(manifest):
    cluster = manifest["spec"]["rayClusterConfig"]
    args = AppArgs.model_validate(serve_config(manifest)["applications"][0]["args"])
    asked = [getattr(args.actors, name).resources for name in ("router", "ingress")]
    (front,) = {name for resources in asked for name in resources}
    offered = float(cluster["headGroupSpec"]["resources"][front])
    assert sum(resources[front] for resources in asked) <= offered
    assert not any(front in group["resources"] for group in cluster["workerGroupSpecs"])


def test_a_pod_stays_for_as_long_as_requests_may_run(manifest):
    args = AppArgs.model_validate(serve_config(manifest)["applications"][0]["args"])
    head = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    (container,) = head["containers"]
    _sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert args.drain_timeout_s <= float(seconds) < head["terminationGracePeriodSeconds"]
    assert manifest["spec"]["rayClusterDeletionDelaySeconds"] > args.drain_timeout_s


def test_pods_have_the_settings_of_the_local_service(manifest):
    for container in containers(manifest):
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        assert environment.items() <= RAY_SETTINGS.items()
        assert {name for name in RAY_SETTINGS if name.startswith("RAY_SERVE_")} <= environment.keys()


def test_versions_are_the_installed_ones(manifest):
    assert manifest["spec"]["rayClusterConfig"]["rayVersion"] == importlib.metadata.version("ray")
    (image,) = yaml.safe_load((BASE / "kustomization.yaml").read_text())["images"]
    assert image["newTag"] == importlib.metadata.version("specdec")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_it(manifest, schema):
    built = subprocess.run(["kubectl", "kustomize", str(BASE)], capture_output=True, text=True, check=True, timeout=60)
    (rendered,) = yaml.safe_load_all(built.stdout)
    assert problems(schema, rendered) == []
    assert {container["image"] for container in containers(rendered)} == {"specdec:0.1.0"}
    assert rendered["spec"]["serveConfigV2"] == manifest["spec"]["serveConfigV2"]
