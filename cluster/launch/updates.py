"""How a deployment goes over to another version: with its successor beside it, or in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.config.replicas import Replicas, Updates, most
from cluster.launch.nodes import Node, needs
from cluster.launch.placement import ActorShare, Placement


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How many more replicas of each deployment may run during an update.

    Attributes:
        surge_percent: Of a deployment's replicas, by its name in the configuration; Serve's ``max_surge_percent``.
        remarks: What whoever applies an update should know, a sentence each.
    """

    surge_percent: Mapping[str, int]
    remarks: tuple[str, ...] = ()


PARTS = ("target", "draft", "router", "ingress")


def plan_updates(
    updates: Updates,
    replicas: Replicas,
    placement: Placement,
    nodes: Sequence[Node],
    parts: Iterable[str] = PARTS,
) -> UpdatePlan:
    """Let a successor run beside each replica where it is to, or where there is room.

    Args:
        updates: What is wanted.
        replicas: How many there are of each.
        placement: What one replica of each asks for.
        nodes: Those of the cluster when the configuration is applied.
        parts: The deployments that there are, those first that get the room first.
    """
    left, percents, remarks = [(node, dict(node.free)) for node in nodes], {}, []
    for part in parts:
        wanted, count = getattr(updates, part), most(getattr(replicas, part))
        num_placed = 0 if wanted == "replace" else _place(getattr(placement, part), count, left)
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
