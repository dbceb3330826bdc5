"""Which share of the cluster each replica gets: a pure function of the configuration and of what the cluster has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.config.app import AppArgs
from cluster.config.base import validated
from cluster.config.models import ModelConfig, TargetConfig
from cluster.config.replicas import ActorOptions, most
from specdec.core.errors import InvalidParameterError
from specdec.engine.shares import equal_share

Role = str
"""``target`` or ``draft``."""


@dataclass(frozen=True, slots=True)
class Devices:
    """What a cluster has now, in use or not.

    Attributes:
        num_gpus: Whole GPUs of all nodes.
        num_cpus: CPU cores of all nodes.
        node_gpus: GPUs of each node; empty where all are on one node.
    """

    num_gpus: int
    num_cpus: float
    node_gpus: tuple[int, ...] = ()

    @property
    def gpus_per_node(self) -> int:
        """GPUs of the node that has the most."""
        return max(self.node_gpus, default=self.num_gpus)


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
    def num_gpus(self) -> float:
        """GPUs of the replica; a fraction shares one, 0 is none."""
        return float(self.ray_actor_options.get("num_gpus", 0.0))

    @property
    def gpu_share(self) -> float:
        """Part of its GPU that a replica has; 1 too where it has none or several."""
        return min(1.0, self.num_gpus or 1.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """The share of each deployment's replicas, and remarks for the log."""

    target: ActorShare
    draft: ActorShare
    router: ActorShare
    ingress: ActorShare
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuDemand:
    """What the configuration says of the GPUs of one replica.

    Attributes:
        num_gpus: How many; None where placement chooses: one, or a part of one.
        device: Where the model may run: ``any`` is a GPU where the cluster has one, else a CPU.
        is_spread: The model takes several GPUs where there are several; with ``num_gpus`` None.
    """

    num_gpus: float | None
    device: Literal["cpu", "gpu", "any"]
    is_spread: bool = False


def gpus_per_replica(role: Role, model: ModelConfig, options: ActorOptions) -> GpuDemand:
    """How many GPUs one replica takes, by ``device``, ``device_map``, tensor parallelism and ``actors.*.num_gpus``.

    Args:
        role: Whose keys they are, for messages.
        model: Where and how the model runs.
        options: What is asked of Ray for the replica.

    Raises:
        InvalidParameterError: Two of the keys contradict each other.
    """
    own = _of_model(role, model)
    asked, key = options.num_gpus, f"actors.{role}.num_gpus"
    if asked is None:
        return own
    if asked > 1 and asked != int(asked):
        raise InvalidParameterError(key, f"{key}: {asked:g}: Ray gives parts of one GPU, or whole ones: round it")
    says = _source_of(role, model)
    if not asked:
        if own.device == "gpu":
            raise InvalidParameterError(key, f"{key}: 0, but {says} needs a GPU: leave it out, or change {says}")
        return GpuDemand(0, "cpu")
    if own.device == "cpu":
        raise InvalidParameterError(key, f"{key}: {asked:g}, but {says} uses no GPU: set it to 0, or change {says}")
    needed = 1 if own.num_gpus is None else own.num_gpus
    if not own.is_spread and (asked > needed or 1 < needed != asked):
        how = "" if needed > 1 else f" ({_how_to_spread(role, model)})"
        raise InvalidParameterError(
            key, f"{key}: {asked:g}, but the model runs on {needed:g} by {says}: set both to one number{how}"
        )
    return GpuDemand(asked, "gpu")


def _of_model(role: Role, model: ModelConfig) -> GpuDemand:
    """What the model's own keys say."""
    if isinstance(model, TargetConfig) and model.engine == "vllm":
        size = model.engine_args.get("tensor_parallel_size", 1)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            key = f"{role}.engine_args"
            raise InvalidParameterError(key, f"{key}: tensor_parallel_size must be a whole number, at least 1")
        return GpuDemand(size if size > 1 else None, "any")
    if model.is_on_cpu:
        return GpuDemand(0, "cpu")
    if isinstance(model.device_map, dict):
        indices = {_gpu_index(device) for device in model.device_map.values()} - {None}
        return GpuDemand(1.0 + max(map(int, indices)), "gpu") if indices else GpuDemand(0, "cpu")  # type: ignore[arg-type]
    device = model.device if model.device_map is None else model.device_map
    if device in ("cpu", "disk"):
        return GpuDemand(0, "cpu")
    index = _gpu_index(device)
    if index is None:
        return GpuDemand(None, "any", is_spread=model.device_map is not None)
    if index:
        key = f"{role}.device" if model.device_map is None else f"{role}.device_map"
        raise InvalidParameterError(
            key,
            f"{key}: {device}: a replica sees its own GPU alone, as the first: say cuda; actors.{role} says where",
        )
    return GpuDemand(None, "gpu")


def _gpu_index(device: int | str) -> int | None:
    """The number of a GPU, of ``1``, ``cuda:1``, or ``cuda`` for the first; None for anything else."""
    if isinstance(device, int):
        return device
    name, _, index = device.partition(":")
    if name == "cuda":
        return int(index) if index.isdecimal() else 0
    return int(device) if device.isdecimal() else None


def _source_of(role: Role, model: ModelConfig) -> str:
    """The key that says how many GPUs the model runs on, with its value where that is short."""
    if isinstance(model, TargetConfig) and model.engine == "vllm":
        size = model.engine_args.get("tensor_parallel_size", 1)
        return f"{role}.engine_args.tensor_parallel_size: {size}"
    if model.device_map is not None:
        return f"{role}.device_map" + ("" if isinstance(model.device_map, dict) else f": {model.device_map}")
    return f"{role}.device: {model.device}"


def _how_to_spread(role: Role, model: ModelConfig) -> str:
    if isinstance(model, TargetConfig) and model.engine == "vllm":
        return "tensor_parallel_size spreads it"
    return f"{role}.device_map: auto spreads it"


def check_gpus(args: AppArgs) -> None:
    """Refuse keys of GPUs that contradict each other, whatever the cluster has.

    Raises:
        InvalidParameterError: They do.
    """
    gpus_per_replica("target", args.target, args.actors.target)
    if args.has_own_draft:
        gpus_per_replica("draft", args.draft, args.actors.draft)


def with_pair_placed(args: AppArgs, devices: Devices) -> AppArgs:
    """The configuration with ``draft.placement: auto`` decided, where no node can come.

    The draft model runs in the target's process where all replicas of both would have parts of one GPU: two processes
    take turns there by milliseconds. Anything that only a process of its own can do keeps it apart.

    Args:
        args: The configuration.
        devices: What there is.

    Raises:
        InvalidParameterError: As :func:`placement_of`.
    """
    if args.draft.placement != "auto" or not args.has_own_draft or devices.num_gpus != 1:
        return args
    placement = placement_of(args, devices, can_grow=False)
    shares = placement.target.num_gpus, placement.draft.num_gpus
    if not all(0 < share < 1 for share in shares):
        return args
    paired = args.model_dump(exclude_unset=True)
    paired["draft"] = {**paired.get("draft", {}), "placement": "same_process"}
    paired["draft"].pop("device", None)
    for section in ("actors", "replicas", "updates"):
        if section in paired:
            paired[section] = {name: value for name, value in paired[section].items() if name != "draft"}
    if args.actors.target.num_gpus is not None:
        # What all replicas of both had is what those of the target have.
        counts = most(args.replicas.target), most(args.replicas.draft)
        whole = (counts[0] * shares[0] + counts[1] * shares[1]) / counts[0]
        paired["actors"]["target"] = {**paired["actors"]["target"], "num_gpus": math.floor(1e4 * whole + 1e-6) / 1e4}
    try:
        return validated(type(args), paired, "")
    except InvalidParameterError:
        return args  # heads, another engine or another mode need a process of its own


def placement_of(args: AppArgs, devices: Devices, *, has_target: bool = True, can_grow: bool = True) -> Placement:
    """Share the devices out among the replicas of target and draft; router and ingress ask for no core unless told to.

    What ``actors`` says for a deployment counts. Of what is left, each model that may use a GPU gets a whole one where
    there are enough of them, else an equal part of one. A model spread by ``device_map: auto`` gets what the others
    leave of a node wherever they are. On a machine without a GPU each gets a core and a torch thread. Where the number
    of replicas is a range there is room for the most of them, as a share is fixed when its replica starts.

    A model that may use a GPU never gets a CPU unasked while there is a GPU or may come one.

    Args:
        args: The configuration.
        devices: What there is now.
        has_target: Whether targets are deployed; a draft's application has none.
        can_grow: Whether nodes may still come: then what is asked for and is not there is waited for. Else it is
            refused.

    Raises:
        InvalidParameterError: Keys contradict each other, or there is no room for a replica; names the key to set.
    """
    actors, replicas = args.actors, args.replicas
    workers: list[_Worker] = []
    if has_target:
        demand = gpus_per_replica("target", args.target, actors.target)
        workers.append(_Worker("target", most(replicas.target), demand, actors.target))
    if args.has_own_draft:
        demand = gpus_per_replica("draft", args.draft, actors.draft)
        workers.append(_Worker("draft", most(replicas.draft), demand, actors.draft))
    fronts = [(most(replicas.router), actors.router), (most(replicas.ingress), actors.ingress)]
    gpus = _gpus(workers, devices, can_grow)
    cpus = _cpus(workers, fronts, devices, can_grow)
    shares = {worker.role: _share(worker.options, gpus[worker.role], cpus) for worker in workers}
    none = ActorShare({"num_cpus": 0})
    return Placement(
        target=shares.get("target", none),
        draft=shares.get("target" if args.is_paired else "draft", none),
        router=_share(actors.router, 0, 0),
        ingress=_share(actors.ingress, 0, 0),
        remarks=tuple(_remarks(workers, shares, cpus, devices, args.is_paired)),
    )


def ray_devices() -> Devices:
    """What the Ray cluster that this process is connected to has now, in use or not."""
    import ray

    have = ray.cluster_resources()
    per_node = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
    return Devices(
        num_gpus=math.floor(have.get("GPU", 0)),
        num_cpus=float(have.get("CPU", 0)),
        node_gpus=tuple(math.floor(gpus) for gpus in per_node if gpus >= 1),
    )


@dataclass(frozen=True, slots=True)
class _Worker:
    """One deployment of a model: how many replicas there may be, and what one takes."""

    role: Role
    count: int
    gpus: GpuDemand
    options: ActorOptions


def _gpus(workers: Sequence[_Worker], devices: Devices, can_grow: bool) -> dict[Role, float]:
    """GPUs of one replica, by role."""
    if not devices.num_gpus:
        return _without_gpus(workers, devices, can_grow)
    said = [worker for worker in workers if worker.gpus.num_gpus is not None]
    to_choose = [worker for worker in workers if worker.gpus.num_gpus is None]
    gpus = {worker.role: worker.gpus.num_gpus or 0.0 for worker in said}
    free = devices.num_gpus - _num_taken([(worker.count, gpus[worker.role]) for worker in said])
    if free < 0 and not can_grow:
        most_wanted = max(said, key=lambda worker: worker.count * gpus[worker.role])
        raise _refused(
            most_wanted,
            f"{most_wanted.count} x {gpus[most_wanted.role]:g} GPUs are asked for, and there are {devices.num_gpus}: "
            f"ask for fewer, lower replicas.{most_wanted.role}, or add GPUs",
        )
    if not to_choose:
        return gpus
    if free < 1:
        raise _refused(
            to_choose[0],
            f"no GPU is left for the {to_choose[0].role}: the cluster has {devices.num_gpus}, and the others ask for "
            "all of them: set it to the GPUs of one replica (a part such as 0.2 where the other has a part of that GPU "
            "too), or to 0 to run it on a CPU",
        )
    share = equal_share(free, sum(worker.count for worker in to_choose))
    num_spread = sum(worker.count for worker in to_choose if worker.gpus.is_spread)
    num_others = sum(worker.count for worker in to_choose if not worker.gpus.is_spread)
    num_others += sum(worker.count * math.ceil(gpus[worker.role]) for worker in said)
    for worker in to_choose:
        gpus[worker.role] = share
        if worker.gpus.is_spread and share == 1:
            gpus[worker.role] = float(_spread_size(num_spread, num_others, devices))
    return gpus


def _spread_size(num_spread: int, num_others: int, devices: Devices) -> int:
    """The most GPUs of each of the spread replicas for which they find room, wherever Ray puts the others' GPUs.

    Ray places replicas as they come, and may put one of the others on every node.
    """
    nodes = devices.node_gpus or (devices.num_gpus,)
    for size in range(max(nodes), 1, -1):
        # GPUs that others must hold to cost the nodes one place of this size after the other, the cheapest first.
        costs = sorted(
            size if place else num_gpus % size + 1 for num_gpus in nodes for place in range(num_gpus // size)
        )
        if len(costs) >= num_spread and sum(costs[: len(costs) - num_spread + 1]) > num_others:
            return size
    return 1


def _without_gpus(workers: Sequence[_Worker], devices: Devices, can_grow: bool) -> dict[Role, float]:
    """The same where there is no GPU now: on CPUs, if none can come or the configuration says so."""
    waits = next((worker for worker in workers if worker.gpus.device == "gpu"), None)
    if waits is not None and not can_grow:
        raise _refused(waits, f"the {waits.role} is to have a GPU, and there is none: set it to 0, with device: cpu")
    gpus: dict[Role, float] = {}
    for worker in workers:
        if worker.gpus.device == "any" and can_grow:
            raise _refused(
                worker,
                f"no GPU is in the cluster, so whether the {worker.role} is to wait for one is not known: set it "
                "to the GPUs of one replica, or to 0 to run it on a CPU",
            )
        gpus[worker.role] = 0.0 if worker.gpus.device != "gpu" else worker.gpus.num_gpus or 1.0
    return gpus


def _num_taken(asked: Sequence[tuple[int, float]]) -> int:
    """Whole GPUs that so many replicas of so many GPUs each take; parts of a GPU share one where they fit."""
    bins: list[float] = []
    for part in sorted((part for count, part in asked for _ in range(count) if 0 < part < 1), reverse=True):
        at = next((i for i, room in enumerate(bins) if room >= part - 1e-9), None)
        if at is None:
            bins.append(1.0 - part)
        else:
            bins[at] -= part
    return len(bins) + sum(int(count * whole) for count, whole in asked if whole >= 1)


def _cpus(
    workers: Sequence[_Worker], fronts: Sequence[tuple[int, ActorOptions]], devices: Devices, can_grow: bool
) -> float:
    """Cores of a replica that does not say how many."""
    counts = [*((worker.count, worker.options) for worker in workers), *fronts]
    said = sum(count * (options.num_cpus or 0.0) for count, options in counts)
    to_choose = [worker for worker in workers if worker.options.num_cpus is None]
    share = equal_share(devices.num_cpus - said, sum(worker.count for worker in to_choose))
    # Where nodes are to come, a worker still asks for a core: it must not land on a head node that has none.
    if not can_grow and (said > devices.num_cpus or (to_choose and not share)):
        key = f"actors.{(to_choose or list(workers))[0].role}.num_cpus"
        raise InvalidParameterError(
            key, f"{key}: {said:g} cores are asked for by actors, and there are {devices.num_cpus:g}: ask for fewer"
        )
    return share or 1.0


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


def _remarks(
    workers: Sequence[_Worker], shares: Mapping[Role, ActorShare], cpus: float, devices: Devices, paired: bool
) -> Iterator[str]:
    shared = [f"{role} {share.gpu_share:g}" for role, share in shares.items() if share.gpu_share < 1]
    if paired:
        yield (
            "the draft model runs in the target's process (draft.placement): both are on one device, and draft and "
            "verify in turn without a message between"
        )
    elif shared:
        yield (
            f"parts of a GPU for a replica: {', '.join(shared)}. Processes on one GPU take turns, unless NVIDIA's MPS "
            "runs: drafting and verifying then no longer overlap, and each waits for the other's steps"
        )
    per_node = devices.gpus_per_node
    wanted = _num_taken([(worker.count, shares[worker.role].num_gpus) for worker in workers])
    if wanted > devices.num_gpus or any(share.num_gpus > per_node for share in shares.values()):
        largest = max(share.num_gpus for share in shares.values())
        yield (
            f"{wanted} GPUs are asked for, at most {largest:g} by one replica; the cluster has {devices.num_gpus}, a "
            f"node at most {per_node}: replicas wait until nodes come"
        )
    if cpus < 1:
        num_workers = sum(worker.count for worker in workers)
        yield f"{num_workers} workers share {devices.num_cpus:g} core(s): {cpus:g} of one each"


def _refused(worker: _Worker, text: str) -> InvalidParameterError:
    key = f"actors.{worker.role}.num_gpus"
    return InvalidParameterError(key, f"{key}: {text}")
