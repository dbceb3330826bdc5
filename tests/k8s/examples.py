"""The examples of rendered files, and their pods as KubeRay makes them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "k8s" / "examples"
NAMES = sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir())

Object = dict[str, Any]


@functools.cache
def built(name: Path | str) -> tuple[Object, ...]:
    """The objects of an example, by its name, or of a file; not to be changed."""
    path = name if isinstance(name, Path) else EXAMPLES / name / "rayservice.yaml"
    return tuple(yaml.load_all(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def ray_service(name: Path | str) -> Object:
    """The one RayService."""
    (found,) = of_kind(built(name), "RayService")
    return found


def serve_text(name: Path | str) -> str:
    """What is handed to Serve."""
    return str(ray_service(name)["spec"]["serveConfigV2"])


def groups(name: Path | str) -> dict[str, Object]:
    """The head's group, called ``headgroup`` as KubeRay does, and the workers' groups."""
    cluster = ray_service(name)["spec"]["rayClusterConfig"]
    return {"headgroup": cluster["headGroupSpec"]} | {
        group["groupName"]: group for group in cluster["workerGroupSpecs"]
    }


def pods(name: Path | str) -> Iterator[tuple[str, Object]]:
    """A pod of each group, with the labels that KubeRay adds."""
    for group_name, group in groups(name).items():
        template = group["template"]
        labels = template["metadata"].get("labels", {}) | group.get("labels", {})
        labels |= {
            "app.kubernetes.io/name": "kuberay",
            "ray.io/cluster": "specdec-abcde",
            "ray.io/group": group_name,
            "ray.io/is-ray-node": "yes",
            "ray.io/node-type": "head" if group_name == "headgroup" else "worker",
        }
        metadata = {"name": f"specdec-{group_name}", "namespace": "specdec", "labels": labels}
        yield group_name, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def variables(pod: Object) -> dict[str, str]:
    """The variables that a pod is given, but for secret ones."""
    (container,) = pod["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def selects(selector: Object, pod: Object) -> bool:
    """Whether a label selector of ``matchLabels`` alone chooses a pod."""
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= pod["metadata"]["labels"].items()
