"""Which share of the machines each replica gets: a pure function over what there is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.config import ActorOptions, Actors, AppArgs
from cluster.replicas import Replicas, most
from specdec.engine.shares import equal_share


@dataclass(frozen=True, slots=True)
class Devices:
    """What a cluster offers: whole GPUs, and CPU cores."""

    num_gpus: int
    num_cpus: float


@dataclass(frozen=True, slots=True)
class ActorShare:
    """What one replica gets.

    Attributes:
        ray_actor_options: For Serve's deployment of the same name.
        num_torch_threads: Threads that torch may use in the replica.
    """

    ray_actor_options: dict[str, Any] = field(default_factory=dict)
    num_torch_threads: int = 1

    @property
    def gpu_share(self) -> float:
        """Part of its GPU that a replica has; 1 too where it has none or several."""
        return min(1.0, self.ray_actor_options.get("num_gpus") or 1.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """The share of each deployment's replicas, and remarks for the log where a device is shared."""

    target: ActorShare
    draft: ActorShare
    router: ActorShare
    ingress: ActorShare
    remarks: tuple[str, ...] = ()


def plan_placement(
    devices: Devices,
    replicas: Replicas | None = None,
    actors: Actors | None = None,
    *,
    has_target: bool = True,
    has_draft: bool = True,
    gpus_per_target: int = 1,
) -> Placement:
    """Share the devices out among the replicas of target and draft; router and ingress ask for no core unless told to.

    A whole GPU each where there are enough; equal fractions where there are fewer; without a GPU, a core and a torch
    thread each. What ``actors`` says for a deployment stands in place of that. Where the number of replicas is a range
    there is room for the most of them, as a share is fixed when its replica starts; a cluster whose nodes come as they
    are needed wants ``actors``.

    Args:
        devices: What there is now.
        replicas: Number of replicas of each deployment; one by default.
        actors: Explicit options by deployment.
        has_target: Whether targets are deployed.
        has_draft: Whether drafts are.
        gpus_per_target: GPUs that one target's model is spread over; several are each wholly its own.
    """
    replicas = replicas or Replicas()
    actors = actors or Actors()
    num_workers = most(replicas.target) * has_target + most(replicas.draft) * has_draft
    num_gpus = target_gpus = equal_share(devices.num_gpus, num_workers)
    if devices.num_gpus and gpus_per_target > 1 and has_target:
        target_gpus = gpus_per_target
        num_gpus = equal_share(devices.num_gpus - target_gpus * most(replicas.target), most(replicas.draft))
    # Where no node is up yet, a worker still asks for a core: it must not land on a head node that has none.
    num_cpus = equal_share(devices.num_cpus, num_workers) or 1.0
    none = ActorShare({"num_cpus": 0})
    target = _share(actors.target, target_gpus, num_cpus) if has_target else none
    draft = _share(actors.draft, num_gpus, num_cpus) if has_draft else none
    remarks = [*_gpu_remarks({"target": target, "draft": draft})]
    if num_cpus < 1:
        remarks.append(f"{num_workers} workers share {devices.num_cpus:g} core(s): {num_cpus:g} of one each")
    return Placement(
        target=target,
        draft=draft,
        router=_share(actors.router, 0, 0),
        ingress=_share(actors.ingress, 0, 0),
        remarks=tuple(remarks),
    )


def placement_of(args: AppArgs, devices: Devices) -> Placement:
    """What :func:`plan_placement` gives for a configuration."""
    gpus_per_target = args.target.num_gpus
    return plan_placement(
        devices, args.replicas, args.actors, has_draft=args.has_own_draft, gpus_per_target=gpus_per_target
    )


def ray_devices() -> Devices:
    """What the Ray cluster that this process is connected to has now, in use or not."""
    import ray

    have = ray.cluster_resources()
    return Devices(num_gpus=math.floor(have.get("GPU", 0)), num_cpus=float(have.get("CPU", 0)))


def _share(options: ActorOptions, num_gpus: float, num_cpus: float) -> ActorShare:
    gpus = num_gpus if options.num_gpus is None else options.num_gpus
    cpus = num_cpus if options.num_cpus is None else options.num_cpus
    ray_options: dict[str, Any] = {"num_cpus": cpus}
    if gpus:
        ray_options["num_gpus"] = gpus
    if options.resources:
        ray_options["resources"] = dict(options.resources)
    if options.label_selector:
        ray_options["label_selector"] = dict(options.label_selector)
    if options.accelerator_type:
        ray_options["accelerator_type"] = options.accelerator_type
    return ActorShare(ray_options, num_torch_threads=max(1, math.floor(cpus)))


def _gpu_remarks(shares: Mapping[str, ActorShare]) -> Iterator[str]:
    """What fractions of a GPU cost, where a replica has one."""
    shared = [f"{name} {share.gpu_share:g}" for name, share in shares.items() if share.gpu_share < 1]
    if shared:
        yield (
            f"parts of a GPU for a replica: {', '.join(shared)}. Processes on one GPU take turns, unless NVIDIA's MPS "
            "runs: drafting and verifying then no longer overlap, and each waits for the other's steps"
        )
