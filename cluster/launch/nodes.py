"""The nodes of the Ray cluster: what each has, what of it is free, and which replicas it can take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.launch.placement import ActorShare


@dataclass(frozen=True, slots=True)
class Node:
    """One node that is alive.

    Attributes:
        id: Ray's.
        resources: What it has, by Ray's names.
        free: What nobody has of that.
        labels: Ray's labels of it.
    """

    id: str
    resources: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def may_take(self, share: ActorShare) -> bool:
        """Whether a replica can ever run there."""
        has_room = all(self.resources.get(name, 0.0) + 1e-6 >= amount for name, amount in needs(share).items())
        return has_room and self.matches(share)

    def matches(self, share: ActorShare) -> bool:
        """Whether its labels are those that a replica asks for."""
        selector: Mapping[str, str] = share.ray_actor_options.get("label_selector") or {}
        return all(_selects(wanted, self.labels.get(name)) for name, wanted in selector.items())


def needs(share: ActorShare) -> dict[str, float]:
    """What a replica takes of its node, by Ray's names."""
    options: Mapping[str, Any] = share.ray_actor_options
    found = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
    if "accelerator_type" in options:
        found[f"accelerator_type:{options['accelerator_type']}"] = 0.001
    return {name: float(amount) for name, amount in found.items() if amount}


def _selects(wanted: str, label: str | None) -> bool:
    """Ray's label selectors: ``a``, ``!a``, ``in(a, b)`` and ``!in(a, b)``; an absent label is none of them."""
    is_wanted = not wanted.startswith("!")
    text = wanted.removeprefix("!")
    values = text[3:-1].split(",") if text.startswith("in(") and text.endswith(")") else [text]
    return (label in {value.strip() for value in values}) == is_wanted


def ray_nodes() -> tuple[Node, ...]:
    """The nodes of the cluster that this process is connected to."""
    import ray
    from ray._private.state import available_resources_per_node  # ray.available_resources is the sum of it

    free = available_resources_per_node()
    return tuple(
        Node(node["NodeID"], node["Resources"], free.get(node["NodeID"], {}), node.get("Labels", {}))
        for node in ray.nodes()
        if node["Alive"]
    )
