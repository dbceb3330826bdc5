"""Whether a model can fit into its replica's memory, by arithmetic: before anything that runs is stopped for it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence

from cluster.config.app import AppArgs
from cluster.config.models import ModelConfig
from cluster.launch.nodes import Node
from cluster.launch.placement import ActorShare, Placement
from cluster.models.sources import draft_source, target_source
from specdec.core.errors import InvalidParameterError
from specdec.models.estimate import least_memory
from specdec.models.loading import ModelSource

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
    told: dict[str, Sequence[int]] = {}

    def asked_once(nodes: Sequence[Node]) -> Sequence[Sequence[int]]:
        new = [node for node in nodes if node.id not in told]
        told.update(zip((node.id for node in new), gpu_bytes(new), strict=True))
        return [told[node.id] for node in nodes]

    if args.target.engine != "vllm":
        _check("target", args, args.target, target_source(args), placement.target, nodes, asked_once)
    source = draft_source(args)
    if source is not None:
        _check("draft", args, args.draft, source, placement.draft, nodes, asked_once)


def gpu_bytes() -> tuple[int, ...]:
    """Memory of this machine's GPUs. No CUDA context is made, which would stay in this process."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    asked = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
        return tuple(int(line) * _MIB for line in told.split())
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

    def told(node: Node) -> tuple[int, ...]:
        if node.id == here:
            return gpu_bytes()
        try:
            return tuple(ray.get(asked[node.id])) if asked[node.id] in answered else ()
        except ray.exceptions.RayError:
            return ()

    return [told(node) for node in nodes]


def _check(
    role: str,
    args: AppArgs,
    model: ModelConfig,
    source: ModelSource,
    share: ActorShare,
    nodes: Sequence[Node],
    gpu_bytes: GpuBytes,
) -> None:
    least = least_memory(source, on_gpu=share.num_gpus > 0)
    length = min(args.max_model_len or least.max_model_len, least.max_model_len)
    sequence_bytes = least.bytes_per_token * length
    if isinstance(model.kv_cache_memory, int) and sequence_bytes > model.kv_cache_memory:
        raise InvalidParameterError(
            f"{role}.kv_cache_memory",
            f"{role}.kv_cache_memory: one sequence of {length} tokens takes {_mib(sequence_bytes)} at least, and "
            f"{_mib(model.kv_cache_memory)} are given: give more, or lower max_model_len",
        )
    if not share.num_gpus or isinstance(source.device_map, dict):
        return
    per_node = gpu_bytes([node for node in nodes if node.may_take(share)])
    if not per_node or not all(per_node):
        return
    room = int(max(map(max, per_node)) * share.num_gpus)
    if least.weights_bytes + sequence_bytes > room:
        raise InvalidParameterError(
            f"{role}.model",
            f"{role}.model: {source.path} takes {_mib(least.weights_bytes)} of weights at least, and one sequence of "
            f"{length} tokens {_mib(sequence_bytes)}; a replica has {share.num_gpus:g} GPU(s), {_mib(room)} at most: "
            f"give it more with actors.{role}.num_gpus, quantize it with {role}.quantization, or lower max_model_len",
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"
