"""What fits on the nodes of the Ray cluster: a replica, a model on its GPUs, a successor beside what is updated."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config.app import AppArgs
from cluster.config.models import ModelConfig, mib
from cluster.config.replicas import Replicas, Updates, most
from cluster.launch.placement import ActorShare, Placement, actor_key
from cluster.models.sources import draft_source, target_source
from specdec.core.errors import InvalidParameterError
from specdec.models.loading import ModelSource
from specdec.models.memory import least_memory


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


_MIB = 1 << 20
_TIMEOUT_S = 10.0

GpuBytes = Callable[[Sequence[Node]], Sequence[Sequence[int]]]
"""Gives the memory of each GPU of each node; none of a node where that is not known."""


def check_memory(args: AppArgs, placement: Placement, nodes: Sequence[Node], gpu_bytes: GpuBytes) -> None:
    """Refuse a model whose weights, with the cache of one sequence of full length, cannot fit.

    Only lower bounds are compared, so that a model that passes may still fail to load. A target in vLLM, and a model
    whose files are not on this machine, are not looked at.

    Args:
        args: The configuration.
        placement: What one replica of each model gets.
        nodes: Those of the cluster. What counts is the largest GPU of those that can take the replica; where one of
            them does not tell, or none can take it yet, nothing is judged.
        gpu_bytes: Asked for those that can.

    Raises:
        InvalidParameterError: It cannot fit; names the key to change.
        ModelLoadError: A model's files cannot be read.
    """
    known: dict[str, Sequence[int]] = {}

    def asked_once(nodes: Sequence[Node]) -> Sequence[Sequence[int]]:
        new = [node for node in nodes if node.id not in known]
        known.update(zip((node.id for node in new), gpu_bytes(new), strict=True))
        return [known[node.id] for node in nodes]

    source = draft_source(args)
    if args.target.engine != "vllm":
        beside = source if args.is_paired else None
        _check("target", args, args.target, target_source(args), placement.target, nodes, asked_once, beside)
    if source is not None and not args.is_paired:
        _check("draft", args, args.draft, source, placement.draft, nodes, asked_once)


def gpu_bytes() -> tuple[int, ...]:
    """Memory of this machine's GPUs. No CUDA context is made, which would stay in this process."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    asked = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(asked, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
        return tuple(int(line) * _MIB for line in output.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def gpu_bytes_of(nodes: Sequence[Node]) -> list[tuple[int, ...]]:
    """The memory of nodes' GPUs, asked on each; none of a node that does not answer in time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    asked = {
        node.id: ray.remote(num_cpus=0, max_retries=0)(gpu_bytes)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))
        .remote()
        for node in nodes
        if node.id != here
    }
    answered, _ = ray.wait([*asked.values()], num_returns=len(asked), timeout=3 * _TIMEOUT_S) if asked else ([], [])

    def bytes_of(node: Node) -> tuple[int, ...]:
        if node.id == here:
            return gpu_bytes()
        try:
            return tuple(ray.get(asked[node.id])) if asked[node.id] in answered else ()
        except ray.exceptions.RayError:
            return ()

    return [bytes_of(node) for node in nodes]


def _check(
    role: str,
    args: AppArgs,
    model: ModelConfig,
    source: ModelSource,
    share: ActorShare,
    nodes: Sequence[Node],
    gpu_bytes: GpuBytes,
    beside: ModelSource | None = None,
) -> None:
    """Of one model; ``beside`` is a draft model in the same process."""
    least = least_memory(source, on_gpu=share.num_gpus > 0)
    length = min(args.max_model_len or least.max_model_len, least.max_model_len)
    sequence_bytes = least.bytes_per_token * length
    if isinstance(model.kv_cache_memory, int) and sequence_bytes > model.kv_cache_memory:
        raise InvalidParameterError(
            f"{role}.kv_cache_memory",
            f"{role}.kv_cache_memory: one sequence of {length} tokens takes {mib(sequence_bytes)} at least, and "
            f"{mib(model.kv_cache_memory)} are given: give more, or lower max_model_len",
        )
    if not share.num_gpus or isinstance(source.device_map, dict):
        return
    per_node = gpu_bytes([node for node in nodes if node.may_take(share)])
    if not per_node or not all(per_node):
        return
    room = int(max(map(max, per_node)) * share.num_gpus)
    if beside is not None:
        room -= least_memory(beside, on_gpu=True).weights_bytes
    if least.weights_bytes + sequence_bytes > room:
        raise InvalidParameterError(
            f"{role}.model",
            f"{role}.model: {source.path} takes {mib(least.weights_bytes)} of weights at least, and one sequence of "
            f"{length} tokens {mib(sequence_bytes)}; a replica has {share.num_gpus:g} GPU(s), {mib(room)} at most: "
            f"give it more with {actor_key(role)}.num_gpus, quantize it with {role}.quantization, or lower "
            "max_model_len",
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
