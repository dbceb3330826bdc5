"""What cannot fit is refused by arithmetic, before anything that runs is stopped for it."""

from __future__ import annotations

import json
import shutil

import pytest

from cluster.config.app import AppArgs
from cluster.launch.capacity import Node, check_memory
from cluster.launch.placement import ActorShare, Placement
from cluster.models.demos import demo_folder
from cluster.models.sources import target_source
from specdec.core.errors import InvalidParameterError, MemoryPlanError, ModelLoadError
from specdec.engine.build import BackendOptions, build_target
from specdec.models.loading import ModelSource
from specdec.models.memory import least_memory

CPU, GPU = ActorShare({"num_cpus": 1}), ActorShare({"num_gpus": 1})


def check(keys, *gpu_bytes, share=CPU):
    """On nodes with these GPUs: a node with one of 0 bytes is of another pool, and one that tells none is unknown."""
    args = AppArgs.model_validate(keys)
    nodes = [
        Node(str(i), {"GPU": len(gpus) or 1}, {}, {"pool": str(0 not in gpus)}) for i, gpus in enumerate(gpu_bytes)
    ]
    placement = Placement(target=share, draft=share, router=CPU, ingress=CPU)
    check_memory(args, placement, nodes, lambda asked: [gpu_bytes[int(node.id)] for node in asked])


def test_the_bounds_are_what_a_loaded_model_takes():
    source = target_source(AppArgs())
    least, memory = least_memory(source, on_gpu=False), build_target(source, BackendOptions())[1].memory
    assert least.bytes_per_token == memory.bytes_per_token
    assert 0.9 * memory.weights_bytes <= least.weights_bytes <= memory.weights_bytes
    assert least.max_model_len == memory.max_model_len


@pytest.mark.parametrize(("kv_cache_memory", "fits"), [("1MiB", False), ("auto", True), ("2GiB", True)])
def test_a_cache_too_small_for_one_sequence_is_refused(kv_cache_memory, fits):
    """As the replica itself would refuse it, after it had loaded the weights."""
    keys = {"target": {"kv_cache_memory": kv_cache_memory}, "draft": {"kv_cache_memory": kv_cache_memory}}
    if fits:
        check(keys)
        return
    with pytest.raises(
        InvalidParameterError, match=r"target.kv_cache_memory: one sequence of \d+ tokens takes .* 1.0 MiB"
    ):
        check(keys)
    with pytest.raises(MemoryPlanError):
        build_target(target_source(AppArgs.model_validate(keys)), BackendOptions(kv_cache_memory=1 << 20))
    check(keys | {"max_model_len": 16})


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_weights_that_no_gpu_holds_are_refused(quantization):
    keys = {"target": {"quantization": quantization}}
    weights = least_memory(target_source(AppArgs.model_validate(keys)), on_gpu=True).weights_bytes
    whole = least_memory(target_source(AppArgs()), on_gpu=True).weights_bytes
    assert weights == whole * {"none": 4, "int8": 1, "int4": 0.5}[quantization] / 4
    check(keys, (whole * 100, 1 << 20), share=GPU)
    check(keys, share=GPU)
    with pytest.raises(InvalidParameterError, match=r"actors\.target\.num_gpus"):
        check(keys, (weights // 2,), share=GPU)
    with pytest.raises(InvalidParameterError, match=r"target.model: .* a replica has 0.01 GPU"):
        check(keys, (weights * 2,), share=ActorShare({"num_gpus": 0.01}))


def test_what_counts_is_the_node_where_the_replica_can_land():
    small, large = (1 << 10,), (1 << 40,)
    for nodes in ((small, large), (small, ()), ((), small), ()):
        check({}, *nodes, share=GPU)
    refused = [((small,), GPU), ((small, small), GPU)]
    refused += [((small, (*large, 0)), ActorShare({"num_gpus": 1, "label_selector": {"pool": "True"}}))]
    refused += [(((small * 4), large), ActorShare({"num_gpus": 2}))]
    for nodes, share in refused:
        with pytest.raises(InvalidParameterError, match=r"target\.model: "):
            check({}, *nodes, share=share)


def test_a_shard_that_is_missing_or_cut_off_is_refused(tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(demo_folder("target"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelLoadError, match="cut off"):
        check({"target": str(folder), "num_speculative_tokens": 0})
    weights.unlink()
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"model-1.safetensors"):
        check({"target": str(folder), "num_speculative_tokens": 0})


def test_what_is_not_here_is_not_judged():
    assert least_memory(ModelSource("nobody/nothing"), on_gpu=True).weights_bytes == 0
    check(
        {"target": {"model": "nobody/nothing", "kv_cache_memory": "1MiB"}, "num_speculative_tokens": 0}, (1,), share=GPU
    )
