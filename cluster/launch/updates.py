"""How a deployment goes over to another version: with its successor beside it, or in its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.config.replicas import Replicas, Updates, most
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
    free: Mapping[str, float],
    parts: Iterable[str] = PARTS,
) -> UpdatePlan:
    """Let a successor run beside each replica where it is to, or where there is room.

    Args:
        updates: What is wanted.
        replicas: How many there are of each.
        placement: What one replica of each asks for.
        free: Ray's resources that nobody has when the configuration is applied.
        parts: The deployments that there are, those first that get the room first.
    """
    left, percents, remarks = dict(free), {}, []
    for part in parts:
        wanted, count = getattr(updates, part), most(getattr(replicas, part))
        places = _places(getattr(placement, part), left)
        num_surge = {"surge": count, "replace": 0, "auto": max(0, min(places, count))}[wanted]
        percents[part] = min(100, max(1, 100 * num_surge // count)) if num_surge else 0
        for resource, amount in _needs(getattr(placement, part)).items():
            left[resource] = left.get(resource, 0.0) - amount * num_surge
        if wanted == "auto" and not num_surge:
            remarks.append(
                f"updates.{part}: no room for a second {part} beside the one that runs: an update stops that one "
                f"first{'' if part == 'draft' else ', and new requests wait until its successor is ready'}"
            )
    return UpdatePlan(percents, tuple(remarks))


def free_resources() -> dict[str, float]:
    """What nobody has now of the Ray cluster that this process is connected to."""
    import ray

    return dict(ray.available_resources())


def _places(share: ActorShare, free: Mapping[str, float]) -> int:
    """For how many more replicas there is room."""
    needs = _needs(share)
    return min((math.floor(free.get(name, 0.0) / amount + 1e-6) for name, amount in needs.items()), default=1 << 16)


def _needs(share: ActorShare) -> dict[str, float]:
    options: Mapping[str, Any] = share.ray_actor_options
    needs = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
    if "accelerator_type" in options:
        needs[f"accelerator_type:{options['accelerator_type']}"] = 0.001
    return {name: float(amount) for name, amount in needs.items() if amount}
