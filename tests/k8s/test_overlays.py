"""Every object of every overlay against its schema, and what a schema does not say."""

from __future__ import annotations

import copy
import importlib.metadata
from collections import Counter
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

import specdec
from cluster.config.app import AppArgs
from cluster.config.environment import DRAIN_VARIABLE, RAY_SETTINGS
from cluster.config.files import load_config
from cluster.config.live import reconfigured
from cluster.config.names import (
    APPLICATION,
    APPLICATION_NAME,
    DRAFT,
    DRAFT_APPLICATION,
    DRAFT_APPLICATION_NAME,
    INGRESS,
    ROUTER,
    STATUS,
    STATUS_PARTS,
    TARGET,
)
from cluster.config.replicas import least, most
from cluster.models.vllm import runtime_env
from k8s.__main__ import files
from tests.k8s.crd_schema import load_definition, problems, schema_of
from tests.k8s.overlays import NAMES, OVERLAYS, built, groups, of_kind, pods, ray_service, selects, serve_text

K8S = Path(__file__).resolve().parents[2] / "k8s"
CRDS = {
    (one["spec"]["group"], one["spec"]["names"]["kind"]): one
    for one in map(load_definition, (Path(__file__).parent / "crds").glob("*.yaml"))
}
OLDEST_KUBERNETES = "1.32"
PROD_KINDS = {
    "ConfigMap": 2,
    "NetworkPolicy": 2,
    "PersistentVolumeClaim": 1,
    "PodDisruptionBudget": 2,
    "PodMonitor": 1,
    "PrometheusRule": 1,
    "RayService": 1,
    "Service": 2,
    "StatefulSet": 1,
}
PROD = ("prod", "prod-vllm")
overlays = pytest.mark.parametrize("overlay", NAMES)


def what_is_wrong(one):
    """Problems of an object by its own schema, unknown fields among them."""
    group, _, version = one["apiVersion"].rpartition("/")
    if (group, one["kind"]) in CRDS:
        return problems(schema_of(CRDS[group, one["kind"]], version), one)
    try:
        kubernetes_validate.validate(one, OLDEST_KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def serve_config(overlay):
    return yaml.safe_load(serve_text(overlay))


def app_args(overlay):
    """What both applications are told, in one."""
    service, draft, *_ = serve_config(overlay)["applications"]
    args, of_draft = service["args"], draft["args"]
    args |= {"draft": of_draft.get("draft", {}), "actors": args["actors"] | of_draft["actors"]}
    return reconfigured(AppArgs.model_validate(args), service["deployments"][0]["user_config"])


def container(pod):
    (found,) = pod["spec"]["containers"]
    return found


@overlays
def test_every_object_is_valid(overlay):
    assert [(one["kind"], what_is_wrong(one)) for one in built(overlay) if what_is_wrong(one)] == []
    kinds = Counter(one["kind"] for one in built(overlay))
    assert kinds == (PROD_KINDS if overlay in PROD else {"ConfigMap": 1, "RayService": 1})


@overlays
def test_every_pod_is_valid(overlay):
    assert [(name, what_is_wrong(pod)) for name, pod in pods(overlay) if what_is_wrong(pod)] == []


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
def test_what_is_wrong_with_a_ray_service_is_found(break_it, named):
    broken = copy.deepcopy(ray_service("prod"))
    break_it(broken["spec"])
    assert any(named in problem for problem in what_is_wrong(broken))


@overlays
def test_what_the_operator_checks_beyond_the_schema(overlay):
    spec = ray_service(overlay)["spec"]
    cluster = spec["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        assert 0 < group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in groups(overlay).values():
        assert not {"labels", "resources"} & set(group["rayStartParams"])
        assert group["template"]["spec"].get("restartPolicy", "Never") == "Never"
    upgrade = spec.get("upgradeStrategy", {})
    if upgrade.get("type") == "NewClusterWithIncrementalUpgrade":
        assert cluster["enableInTreeAutoscaling"]
        options = upgrade["clusterUpgradeOptions"]
        assert 0 < options["stepSizePercent"] <= options["maxSurgePercent"] <= 100
        assert "serveService" not in spec
    assert len(ray_service(overlay)["metadata"]["name"]) <= 41


def test_generated_files_are_up_to_date():
    assert [path for path, text in files().items() if path.read_text() != text] == [], "run: python -m k8s"


@overlays
def test_serves_configuration_is_serves(overlay):
    from ray.serve.schema import ServeDeploySchema

    application, draft, *status = ServeDeploySchema.model_validate(serve_config(overlay)).applications
    assert (application.import_path, application.name) == (APPLICATION, APPLICATION_NAME)
    assert (draft.import_path, draft.name, draft.route_prefix) == (DRAFT_APPLICATION, DRAFT_APPLICATION_NAME, None)
    deployments = [*application.deployments, *draft.deployments]
    assert [deployment.name for deployment in deployments] == [INGRESS, ROUTER, TARGET, DRAFT]
    assert [(one.route_prefix, one.import_path) for one in status] == [
        (f"/{part}", f"{STATUS}:build_{part}") for part in STATUS_PARTS
    ]
    assert app_args(overlay).is_demo == (overlay == "dev")


@overlays
def test_the_same_file_serves_on_a_laptop(overlay):
    config = load_config(OVERLAYS / overlay / "service.yaml")
    args = app_args(overlay)
    assert (config.target, config.draft, config.limits) == (args.target, args.draft, args.limits)
    assert {"actors", "replicas", "access"}.isdisjoint(config.model_fields_set)


@overlays
def test_pods_have_the_settings_of_the_local_service(overlay):
    (environment,) = [one for one in of_kind(built(overlay), "ConfigMap") if "RAY_worker_niceness" in one["data"]]
    assert environment["data"].keys() - RAY_SETTINGS.keys() == {DRAIN_VARIABLE}
    assert environment["data"].items() > RAY_SETTINGS.items()
    for _, pod in pods(overlay):
        assert container(pod)["envFrom"] == [{"configMapRef": {"name": environment["metadata"]["name"]}}]


@overlays
def test_versions_are_the_installed_ones(overlay):
    assert ray_service(overlay)["spec"]["rayClusterConfig"]["rayVersion"] == importlib.metadata.version("ray")
    for name, pod in pods(overlay):
        asks_for_gpu = "nvidia.com/gpu" in container(pod)["resources"]["limits"]
        has_vllm = overlay == "prod-vllm" and name == "target"
        variant = "-vllm" if has_vllm else "-cuda" if asks_for_gpu else ""
        assert container(pod)["image"] == f"specdec:{specdec.__version__}{variant}"


def test_a_target_in_vllm_has_the_gpus_of_its_pod_and_the_vllm_of_its_image():
    args, target = app_args("prod-vllm"), groups("prod-vllm")["target"]
    assert (args.target.engine, args.target.python) == ("vllm", None)
    size = args.target.engine_args["tensor_parallel_size"]
    assert size == args.actors.target.num_gpus == offered(target)["num_gpus"] == 4
    assert args.actors.target.num_cpus == offered(target)["num_cpus"]
    assert runtime_env(args) == {}


def test_the_target_alone_is_other_than_prods():
    for overlay, image in (("prod", "cuda"), ("prod-vllm", "vllm")):
        assert container(dict(pods(overlay))["target"])["image"].endswith(f"-{image}")
    plain, vllm = ({name: pod for name, pod in pods(overlay) if name != "target"} for overlay in PROD)
    assert plain == vllm
    plain, vllm = app_args("prod"), app_args("prod-vllm")
    assert (plain.replicas, plain.access, plain.draft) == (vllm.replicas, vllm.access, vllm.draft)
    for role in ("draft", "router", "ingress"):
        assert getattr(plain.actors, role) == getattr(vllm.actors, role)
    others = [
        [one for one in built(overlay) if one["kind"] not in ("RayService", "PersistentVolumeClaim")]
        for overlay in PROD
    ]
    assert others[0] == others[1]


@overlays
def test_replicas_fit_into_the_pods_that_they_are_meant_for(overlay):
    args = app_args(overlay)
    for role in ("target", "draft", "router", "ingress"):
        asked = getattr(args.actors, role)
        fitting = [
            group
            for group in groups(overlay).values()
            if asked.label_selector and asked.label_selector.items() <= group.get("labels", {}).items()
        ]
        assert len(fitting) == 1, role
        assert room(fitting[0], args, least, "minReplicas") >= 0, role
        assert room(fitting[0], args, most, "maxReplicas") >= 0, role


def room(group, args, bound, pods_key):
    """What is left of a group's scarcest resource when as many replicas as may be run in as many pods."""
    has = offered(group)
    asked = dict.fromkeys(has, 0.0)
    for role in ("target", "draft", "router", "ingress"):
        actor, count = getattr(args.actors, role), getattr(args.replicas, role)
        if actor.label_selector.items() <= group.get("labels", {}).items():
            for name, amount in wanted(actor).items():
                asked[name] += bound(count) * amount
    return min(group.get(pods_key, 1) * has[name] - asked[name] for name in has)


def offered(group):
    """What Ray counts in a pod of a group."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return {
        "num_cpus": float(group["rayStartParams"].get("num-cpus", limits["cpu"])),
        "num_gpus": float(limits.get("nvidia.com/gpu", 0)),
    } | {name: float(amount) for name, amount in group.get("resources", {}).items()}


def wanted(actor):
    """What one replica takes of it."""
    kind = {f"accelerator_type:{actor.accelerator_type}": 0.001} if actor.accelerator_type else {}
    return {"num_cpus": actor.num_cpus or 0.0, "num_gpus": actor.num_gpus or 0.0} | actor.resources | kind


@pytest.mark.parametrize("overlay", PROD)
def test_no_pod_of_prod_has_two_replicas_of_a_deployment(overlay):
    """A pod that goes, or is evicted, would take all of them."""
    args, by_name = app_args(overlay), groups(overlay)
    for role, name in (("target", "target"), ("draft", "draft"), ("router", "front"), ("ingress", "front")):
        has, takes = offered(by_name[name]), wanted(getattr(args.actors, role))
        assert any(has[resource] < 2 * amount for resource, amount in takes.items()), role


@pytest.mark.parametrize("overlay", PROD)
@pytest.mark.parametrize("role", ["router", "ingress"])
def test_an_update_has_a_pod_for_a_new_ingress_and_router(overlay, role):
    args, front = app_args(overlay), groups(overlay)["front"]
    has, takes = offered(front), wanted(getattr(args.actors, role))
    places = front["maxReplicas"] * min(has[resource] // amount for resource, amount in takes.items() if amount)
    assert places > most(getattr(args.replicas, role))


@overlays
def test_ingress_router_and_status_run_where_no_model_does(overlay):
    args = app_args(overlay)
    models = {args.actors.target.label_selector["role"], args.actors.draft.label_selector["role"]}
    assert args.actors.ingress.label_selector == args.actors.router.label_selector == {"role": "front"}
    assert "front" not in models
    for application in serve_config(overlay)["applications"][2:]:
        (deployment,) = application["deployments"]
        assert deployment["ray_actor_options"] == {"num_cpus": 0, "label_selector": {"role": "front"}}
    front = groups(overlay)["front" if overlay in PROD else "headgroup"]
    assert front["labels"] == {"role": "front"}
    assert "labels" not in groups("prod")["headgroup"]
    assert groups(overlay)["headgroup"]["rayStartParams"]["num-cpus"] == "0"


@overlays
def test_no_pod_goes_before_its_streams(overlay):
    args = app_args(overlay)
    assert ray_service(overlay)["spec"]["rayClusterDeletionDelaySeconds"] > args.drain_timeout_s
    assert args.limits.request_timeout_s is None
    (environment,) = [one for one in of_kind(built(overlay), "ConfigMap") if DRAIN_VARIABLE in one["data"]]
    for _, pod in pods(overlay):
        assert "lifecycle" not in container(pod)
        drain_s, grace_s = int(environment["data"][DRAIN_VARIABLE]), pod["spec"]["terminationGracePeriodSeconds"]
        assert (drain_s, grace_s) == (args.drain_timeout_s + 60, args.drain_timeout_s + 70)


@overlays
def test_the_heads_readiness_is_rays_and_workers_have_raylets_and_proxys(overlay):
    for name, pod in pods(overlay):
        probes = {key: probe["httpGet"]["path"] for key, probe in container(pod).items() if key.endswith("Probe")}
        worker = {"livenessProbe": "/api/local_raylet_healthz", "readinessProbe": "/-/healthz"}
        gate = {"startupProbe": "/health"} if name == "front" else {}
        if name != "headgroup":  # a pod that hangs does not first drain
            assert container(pod)["livenessProbe"]["terminationGracePeriodSeconds"] < 30
        assert probes == ({} if name == "headgroup" else worker | gate)
        assert {"name": "serve", "containerPort": 8000} in container(pod)["ports"]


@overlays
def test_pods_are_locked_down_and_write_only_where_it_is_said(overlay):
    for name, pod in pods(overlay):
        spec, main = pod["spec"], container(pod)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert main["securityContext"]["readOnlyRootFilesystem"] is True
        assert main["securityContext"]["allowPrivilegeEscalation"] is False
        assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in main["volumeMounts"] if not mount.get("readOnly")}
        assert mounts == {"/tmp": "tmp", "/home/specdec": "home", "/models": "models"}
        kinds = {volume["name"]: set(volume) - {"name"} for volume in spec["volumes"]}
        assert {mount["name"] for mount in main["volumeMounts"]} == set(kinds)
        assert kinds["tmp"] == kinds["home"] == {"emptyDir"}
        assert kinds["models"] == ({"persistentVolumeClaim"} if overlay in PROD else {"emptyDir"}), name
        # Only the head's autoscaler talks to the API server.
        assert spec["automountServiceAccountToken"] is (overlay in PROD and name == "headgroup")
    options = ray_service(overlay)["spec"]["rayClusterConfig"].get("autoscalerOptions")
    assert options is None or options["securityContext"] == main["securityContext"]


def test_selectors_of_prod_choose_pods():
    every = dict(pods("prod"))

    def chosen(selector):
        return {name for name, pod in every.items() if selects(selector, pod)}

    budgets = of_kind(built("prod"), "PodDisruptionBudget")
    assert [chosen(budget["spec"]["selector"]) for budget in budgets] == [{"front"}, {"target"}]
    # A budget of pods that no Deployment owns can say minAvailable alone, as a number.
    assert all(isinstance(budget["spec"]["minAvailable"], int) for budget in budgets)
    for budget, name in zip(budgets, ("front", "target"), strict=True):
        assert budget["spec"]["minAvailable"] < groups("prod")[name]["minReplicas"]
    policy, redis = of_kind(built("prod"), "NetworkPolicy")
    assert chosen(policy["spec"]["podSelector"]) == set(every)
    assert chosen(policy["spec"]["ingress"][0]["from"][0]["podSelector"]) == set(every)
    assert chosen(policy["spec"]["egress"][0]["to"][0]["podSelector"]) == set(every)
    assert chosen(redis["spec"]["ingress"][0]["from"][0]["podSelector"]) == {"headgroup"}
    (front,) = (one for one in of_kind(built("prod"), "Service") if one["metadata"]["name"] == "specdec-front")
    assert chosen({"matchLabels": front["spec"]["selector"]}) == {"front"}
    (monitor,) = of_kind(built("prod"), "PodMonitor")
    assert chosen(monitor["spec"]["selector"]) == set(every)
    for name in ("front", "target"):
        for spread in every[name]["spec"]["topologySpreadConstraints"]:
            assert chosen(spread["labelSelector"]) == {name}


def test_redis_is_the_one_that_the_head_is_told_of():
    options = ray_service("prod")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    (redis,) = of_kind(built("prod"), "StatefulSet")
    (service,) = (one for one in of_kind(built("prod"), "Service") if one["metadata"]["name"] == "specdec-redis")
    (port,) = service["spec"]["ports"]
    assert options["redisAddress"] == f"{service['metadata']['name']}:{port['port']}"
    template = redis["spec"]["template"]
    assert service["spec"]["selector"] == template["metadata"]["labels"] == redis["spec"]["selector"]["matchLabels"]
    (variable,) = template["spec"]["containers"][0]["env"]
    assert options["redisPassword"] == {"valueFrom": variable["valueFrom"]}


@overlays
def test_secrets_are_named_and_explained(overlay):
    named = set(_named(built(overlay), {"secretKeyRef": "name", "secret": "secretName"}))
    assert named == {"specdec-hub"} | ({"specdec-api-keys", "specdec-redis"} if overlay in PROD else set())
    text = (K8S.parent / "docs/deploy-kubernetes.md").read_text()
    assert all(f"secret generic {name}" in text for name in named)


def _named(value, keys):
    for key, part in (
        value.items() if isinstance(value, dict) else enumerate(value) if not isinstance(value, str) else ()
    ):
        if key in keys:
            yield part[keys[key]]
        elif isinstance(part, dict | list):
            yield from _named(part, keys)
