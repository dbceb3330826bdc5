"""What ``specdec render`` writes, on the examples: every object against its schema, and what a schema does not say."""

from __future__ import annotations

import copy
import importlib.metadata
from collections import Counter
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

import specdec
from cluster.cli.render import kubernetes_yaml
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
from tests.k8s.crd_schema import load_definition, problems, schema_of
from tests.k8s.examples import (
    EXAMPLES,
    NAMES,
    built,
    groups,
    of_kind,
    pods,
    ray_service,
    selects,
    serve_text,
    variables,
)

K8S = Path(__file__).resolve().parents[2] / "k8s"
CRDS = {
    (one["spec"]["group"], one["spec"]["names"]["kind"]): one
    for one in map(load_definition, (Path(__file__).parent / "crds").glob("*.yaml"))
}
OLDEST_KUBERNETES = "1.32"
PROD_KINDS = {
    "NetworkPolicy": 2,
    "PersistentVolumeClaim": 1,
    "PodDisruptionBudget": 2,
    "RayService": 1,
    "Service": 2,
    "StatefulSet": 1,
}
PROD = ("prod", "prod-vllm")
examples = pytest.mark.parametrize("example", NAMES)


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


def serve_config(example):
    return yaml.safe_load(serve_text(example))


def app_args(example):
    """What both applications are told, in one."""
    service, draft, *_ = serve_config(example)["applications"]
    args, of_draft = service["args"], draft["args"]
    args |= {"draft": of_draft.get("draft", {}), "actors": args["actors"] | of_draft["actors"]}
    return reconfigured(AppArgs.model_validate(args), service["deployments"][0]["user_config"])


def container(pod):
    (found,) = pod["spec"]["containers"]
    return found


@examples
def test_every_object_is_valid(example):
    assert [(one["kind"], what_is_wrong(one)) for one in built(example) if what_is_wrong(one)] == []
    kinds = Counter(one["kind"] for one in built(example))
    assert kinds == (PROD_KINDS if example in PROD else {"NetworkPolicy": 1, "RayService": 1})


@examples
def test_every_pod_is_valid(example):
    assert [(name, what_is_wrong(pod)) for name, pod in pods(example) if what_is_wrong(pod)] == []


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


@examples
def test_what_the_operator_checks_beyond_the_schema(example):
    spec = ray_service(example)["spec"]
    cluster = spec["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        assert 0 < group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in groups(example).values():
        assert not {"labels", "resources"} & set(group["rayStartParams"])
        assert group["template"]["spec"].get("restartPolicy", "Never") == "Never"
    upgrade = spec.get("upgradeStrategy", {})
    if upgrade.get("type") == "NewClusterWithIncrementalUpgrade":
        assert cluster["enableInTreeAutoscaling"]
        options = upgrade["clusterUpgradeOptions"]
        assert 0 < options["stepSizePercent"] <= options["maxSurgePercent"] <= 100
        assert "serveService" not in spec
    assert len(ray_service(example)["metadata"]["name"]) <= 41


@examples
def test_an_example_is_what_render_writes(example):
    text = (EXAMPLES / example / "rayservice.yaml").read_text()
    assert text == kubernetes_yaml(EXAMPLES / example / "config.yaml"), "run: make examples"


@examples
def test_serves_configuration_is_serves(example):
    from ray.serve.schema import ServeDeploySchema

    application, draft, *status = ServeDeploySchema.model_validate(serve_config(example)).applications
    assert (application.import_path, application.name) == (APPLICATION, APPLICATION_NAME)
    assert (draft.import_path, draft.name, draft.route_prefix) == (DRAFT_APPLICATION, DRAFT_APPLICATION_NAME, None)
    deployments = [*application.deployments, *draft.deployments]
    assert [deployment.name for deployment in deployments] == [INGRESS, ROUTER, TARGET, DRAFT]
    assert [(one.route_prefix, one.import_path) for one in status] == [
        (f"/{part}", f"{STATUS}:build_{part}") for part in STATUS_PARTS
    ]
    assert app_args(example).is_demo == (example == "dev")


@examples
def test_nothing_of_the_configuration_is_lost(example):
    config = load_config(EXAMPLES / example / "config.yaml")
    args = app_args(example)
    assert (config.target, config.draft, config.limits, config.access) == (
        args.target,
        args.draft,
        args.limits,
        args.access,
    )
    assert config.replicas == args.replicas


@examples
def test_pods_have_the_settings_of_the_local_service(example):
    for _, pod in pods(example):
        assert variables(pod).keys() - RAY_SETTINGS.keys() == {DRAIN_VARIABLE}
        assert variables(pod).items() > RAY_SETTINGS.items()


@examples
def test_versions_are_the_installed_ones(example):
    assert ray_service(example)["spec"]["rayClusterConfig"]["rayVersion"] == importlib.metadata.version("ray")
    for name, pod in pods(example):
        asks_for_gpu = "nvidia.com/gpu" in container(pod)["resources"]["limits"]
        has_vllm = example == "prod-vllm" and name == "target"
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
    for example, image in (("prod", "cuda"), ("prod-vllm", "vllm")):
        assert container(dict(pods(example))["target"])["image"].endswith(f"-{image}")
    plain, vllm = ({name: pod for name, pod in pods(example) if name != "target"} for example in PROD)
    assert plain == vllm
    plain, vllm = app_args("prod"), app_args("prod-vllm")
    assert (plain.replicas, plain.access, plain.draft) == (vllm.replicas, vllm.access, vllm.draft)
    for role in ("draft", "router", "ingress"):
        assert getattr(plain.actors, role) == getattr(vllm.actors, role)
    others = [[one for one in built(example) if one["kind"] != "RayService"] for example in PROD]
    assert others[0] == others[1]


@examples
def test_replicas_fit_into_the_pods_that_they_are_meant_for(example):
    args = app_args(example)
    for role in ("target", "draft", "router", "ingress"):
        asked = getattr(args.actors, role)
        fitting = [
            group
            for group in groups(example).values()
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


@pytest.mark.parametrize("example", PROD)
def test_no_pod_of_prod_has_two_replicas_of_a_deployment(example):
    """A pod that goes, or is evicted, would take all of them."""
    args, by_name = app_args(example), groups(example)
    for role, name in (("target", "target"), ("draft", "draft"), ("router", "front"), ("ingress", "front")):
        has, takes = offered(by_name[name]), wanted(getattr(args.actors, role))
        assert any(has[resource] < 2 * amount for resource, amount in takes.items()), role


@pytest.mark.parametrize("example", PROD)
@pytest.mark.parametrize("role", ["router", "ingress"])
def test_an_update_has_a_pod_for_a_new_ingress_and_router(example, role):
    args, front = app_args(example), groups(example)["front"]
    has, takes = offered(front), wanted(getattr(args.actors, role))
    places = front["maxReplicas"] * min(has[resource] // amount for resource, amount in takes.items() if amount)
    assert places > most(getattr(args.replicas, role))


@examples
def test_ingress_router_and_status_run_where_no_model_does(example):
    args = app_args(example)
    models = {args.actors.target.label_selector["role"], args.actors.draft.label_selector["role"]}
    role = "front" if example in PROD else "head"
    assert args.actors.ingress.label_selector == args.actors.router.label_selector == {"role": role}
    assert role not in models
    for application in serve_config(example)["applications"][2:]:
        (deployment,) = application["deployments"]
        assert deployment["ray_actor_options"] == {"num_cpus": 0, "label_selector": {"role": role}}
    front = groups(example)["front" if example in PROD else "headgroup"]
    assert front["labels"] == {"role": role}
    assert groups(example)["headgroup"]["rayStartParams"]["num-cpus"] == "0"
    assert ray_service(example)["spec"].get("excludeHeadPodFromServeSvc", False) == (example in PROD)


@examples
def test_no_pod_goes_before_its_streams(example):
    args = app_args(example)
    assert ray_service(example)["spec"]["rayClusterDeletionDelaySeconds"] > args.drain_timeout_s
    assert args.limits.request_timeout_s is None
    for _, pod in pods(example):
        assert "lifecycle" not in container(pod)
        drain_s, grace_s = int(variables(pod)[DRAIN_VARIABLE]), pod["spec"]["terminationGracePeriodSeconds"]
        assert (drain_s, grace_s) == (args.drain_timeout_s + 60, args.drain_timeout_s + 70)


@examples
def test_the_heads_readiness_is_rays_and_workers_have_raylets_and_proxys(example):
    for name, pod in pods(example):
        probes = {key: probe["httpGet"]["path"] for key, probe in container(pod).items() if key.endswith("Probe")}
        worker = {"livenessProbe": "/api/local_raylet_healthz", "readinessProbe": "/-/healthz"}
        gate = {"startupProbe": "/health"} if name == "front" else {}
        if name != "headgroup":  # a pod that hangs does not first drain
            assert container(pod)["livenessProbe"]["terminationGracePeriodSeconds"] < 30
        assert probes == ({} if name == "headgroup" else worker | gate)
        assert {"name": "serve", "containerPort": 8000} in container(pod)["ports"]


@examples
def test_pods_are_locked_down_and_write_only_where_it_is_said(example):
    for name, pod in pods(example):
        spec, main = pod["spec"], container(pod)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert main["securityContext"]["readOnlyRootFilesystem"] is True
        assert main["securityContext"]["allowPrivilegeEscalation"] is False
        assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in main["volumeMounts"] if not mount.get("readOnly")}
        assert mounts == {"/tmp": "tmp", "/home/specdec": "home", "/models": "models"}
        assert ("/run/specdec" in [mount["mountPath"] for mount in main["volumeMounts"]]) == (name == "front")
        kinds = {volume["name"]: set(volume) - {"name"} for volume in spec["volumes"]}
        assert {mount["name"] for mount in main["volumeMounts"]} == set(kinds)
        assert kinds["tmp"] == kinds["home"] == {"emptyDir"}
        assert kinds["models"] == ({"persistentVolumeClaim"} if example in PROD else {"emptyDir"}), name
        # Only the head's autoscaler talks to the API server.
        assert spec["automountServiceAccountToken"] is (example in PROD and name == "headgroup")
    options = ray_service(example)["spec"]["rayClusterConfig"].get("autoscalerOptions")
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
    (front,) = (one for one in of_kind(built("prod"), "Service") if one["metadata"]["name"] == "specdec-front")
    assert chosen({"matchLabels": front["spec"]["selector"]}) == {"front"}
    for name in ("front", "target"):
        for spread in every[name]["spec"]["topologySpreadConstraints"]:
            assert chosen(spread["labelSelector"]) == {name}


def stranger(namespace, **labels):
    return {"metadata": {"namespace": namespace, "labels": labels}}


def every_peer():
    """Pods of prod, and others that may want to speak to them."""
    peers = dict(pods("prod"))
    (redis,) = of_kind(built("prod"), "StatefulSet")
    return peers | {
        "redis": {"metadata": {"namespace": "specdec", **redis["spec"]["template"]["metadata"]}},
        "cleanup": stranger("specdec", **{"ray.io/node-type": "redis-cleanup"}),
        "neighbour": stranger("specdec", app="x"),
        "gateway": stranger("istio-system", app="gateway"),
        "operator": stranger("kuberay", **{"app.kubernetes.io/name": "kuberay-operator"}),
        "prometheus": stranger("monitoring", **{"app.kubernetes.io/name": "prometheus"}),
        "dns": stranger("kube-system", **{"k8s-app": "kube-dns"}),
        "elsewhere": stranger("elsewhere", app="x"),
    }


def admits(rule, key, pod, port):
    """Whether a rule of a policy in the namespace specdec lets a pod, as the other end, use a port."""
    if "ports" in rule and port not in {one["port"] for one in rule["ports"]}:
        return False
    return key not in rule or any(
        ("namespaceSelector" in peer or pod["metadata"]["namespace"] == "specdec")
        and peer.get("namespaceSelector", {}).get("matchLabels", {}).items()
        <= {"kubernetes.io/metadata.name": pod["metadata"]["namespace"]}.items()
        and selects(peer.get("podSelector", {}), pod)
        for peer in rule[key]
    )


def may(source, target, port):
    """Whether a pod may connect to a port of another, by all policies."""
    for kind, key, own, other in (("Egress", "to", source, target), ("Ingress", "from", target, source)):
        policies = [
            policy["spec"]
            for policy in of_kind(built("prod"), "NetworkPolicy")
            if kind in policy["spec"]["policyTypes"]
            and own["metadata"]["namespace"] == "specdec"
            and selects(policy["spec"]["podSelector"], own)
        ]
        rules = [rule for policy in policies for rule in policy.get(kind.lower(), [])]
        if policies and not any(admits(rule, key, other, port) for rule in rules):
            return False
    return True


RAY = ("headgroup", "front", "target", "draft")
PORTS = {"requests": 8000, "dashboard": 8265, "exporters": 8080, "redis": 6379, "workers": 10002, "DNS": 53}
ALLOWED = {
    **{(source, target): set(PORTS) for source in RAY for target in RAY},
    **{(source, "dns"): {"DNS"} for source in RAY},
    ("headgroup", "redis"): {"redis"},
    ("cleanup", "redis"): {"redis"},
    **{("operator", target): {"dashboard", "requests"} for target in RAY},
    **{("prometheus", target): {"exporters"} for target in RAY},
    **{(source, target): {"requests"} for source in ("gateway", "neighbour", "cleanup") for target in RAY},
}
"""Who may speak to Ray's pods, to Redis and to DNS, and by which ports; nobody else, and Redis to nobody."""


def test_who_may_speak_to_whom():
    peers = every_peer()
    sources = [name for name in peers if name != "dns"]
    found = {
        (source, target): {name for name, port in PORTS.items() if may(peers[source], peers[target], port)}
        for source in sources
        for target in (*RAY, "redis", "dns")
        if target != "dns" or source in (*RAY, "redis")
    }
    assert {pair: ports for pair, ports in found.items() if ports} == ALLOWED
    hub = {name for name in (*RAY, "redis") if may(peers[name], stranger("internet"), 443)}
    assert hub == set(RAY)


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


@examples
def test_secrets_are_named_and_explained(example):
    named = set(_named(built(example), {"secretKeyRef": "name", "secret": "secretName"}))
    assert named == {"specdec-hub"} | ({"specdec-api-keys", "specdec-redis"} if example in PROD else set())
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
