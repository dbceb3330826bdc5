"""What fits on the nodes of the Ray cluster: a successor beside what is updated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config.replicas import Replicas, Updates, most
from cluster.launch.placement import ActorShare


@dataclass(frozen=True, slots=True)
class Node:
    """One node that is alive.

    Attributes:
        id: Ray's.
        free: Resources that nobody holds, by Ray's names.
        labels: Ray's labels of it.
    """

    id: str
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

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
        Node(node["NodeID"], free.get(node["NodeID"], {}), node.get("Labels", {}))
        for node in ray.nodes()
        if node["Alive"]
    )


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How many more replicas of each deployment may run during an update.

    Attributes:
        surge_percent: Of a deployment's replicas, by its name in the configuration; Serve's ``max_surge_percent``.
        remarks: What whoever applies an update should know, a sentence each.
    """

    surge_percent: Mapping[str, int]
    remarks: tuple[str, ...] = ()


def plan_updates(
    updates: Updates,
    replicas: Replicas,
    shares: Mapping[str, ActorShare],
    nodes: Sequence[Node],
) -> UpdatePlan:
    """Let a successor run beside each replica where it is to, or where there is room.

    Args:
        updates: What is wanted.
        replicas: How many there are of each.
        shares: What one replica of each deployment asks for; those that come first get the room first.
        nodes: Those of the cluster when the configuration is applied.
    """
    left, percents, remarks = [(node, dict(node.free)) for node in nodes], {}, []
    for part, share in shares.items():
        wanted, count = getattr(updates, part), most(getattr(replicas, part))
        num_placed = 0 if wanted == "replace" else _place(share, count, left)
        num_surge = count if wanted == "surge" else num_placed
        percents[part] = min(100, max(1, 100 * num_surge // count)) if num_surge else 0
        if wanted == "auto" and not num_surge:
            remarks.append(
                f"updates.{part}: no room for a second {part} beside the one that runs: an update stops that one "
                f"first{'' if part == 'draft' else ', and new requests wait until its successor is ready'}"
            )
    return UpdatePlan(percents, tuple(remarks))


def _place(share: ActorShare, count: int, left: Sequence[tuple[Node, dict[str, float]]]) -> int:
    """Find room for up to ``count`` more replicas, each on one node, and take it; gives for how many there is."""
    wanted = needs(share)
    if not wanted and not share.ray_actor_options.get("label_selector"):
        return count
    num_placed = 0
    for free in (free for node, free in left if node.matches(share)):
        while num_placed < count and all(free.get(name, 0.0) + 1e-6 >= amount for name, amount in wanted.items()):
            num_placed += 1
            for name, amount in wanted.items():
                free[name] -= amount
    return num_placed
