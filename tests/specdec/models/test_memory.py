from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cluster.models.demos import demo_folder
from specdec.cache.blocks import BlockPool
from specdec.core.errors import InvalidParameterError, MemoryPlanError, ModelLoadError
from specdec.engine.build import BackendOptions, build_target
from specdec.executor.paged_cache import PagedCache
from specdec.models.host_memory import HostMemory
from specdec.models.loading import LoadedModel, ModelSource
from specdec.models.memory import (
    BOUND_BYTES,
    StepMemory,
    cache_bytes_per_token,
    check_host_memory,
    free_memory_bytes,
    least_memory,
    plan_memory,
)

Models = Callable[[str], tuple[LoadedModel, object]]


def test_the_plan_is_what_the_cache_takes(models: Models) -> None:
    loaded, _ = models("gemma3")
    plan = plan_memory(loaded, budget_bytes=10_000_000, block_size=8)
    full = [layer for layer in loaded.attention_layers if layer.window is None]
    assert plan.bytes_per_token == cache_bytes_per_token(full) == len(full) * 2 * 2 * 16 * 4
    pool = BlockPool(plan.num_blocks, 8, dict(plan.window_blocks))
    assert PagedCache(loaded.attention_layers, pool).num_bytes == plan.cache_bytes <= 10_000_000
    assert plan.cache_bytes + plan.bytes_per_block > 10_000_000
    assert plan.sequence_bytes == 1024 * plan.bytes_per_token + plan.window_bytes
    assert plan.num_full_sequences == plan.num_blocks // 128
    assert plan.total_bytes == plan.cache_bytes + loaded.weights_bytes


def test_half_the_width_takes_half_the_bytes(models: Models) -> None:
    layers = models("llama")[0].attention_layers
    narrow = [replace(layer, dtype=torch.bfloat16) for layer in layers]
    assert 2 * cache_bytes_per_token(narrow) == cache_bytes_per_token(layers)


def test_one_sequence_must_fit(models: Models) -> None:
    loaded, _ = models("llama")
    needed = (1024 // 16 + 1) * 16 * 1024
    assert plan_memory(loaded, budget_bytes=needed).num_full_sequences == 1
    with pytest.raises(MemoryPlanError, match=r"1024 tokens of llama takes 1\.0 MiB .*1024 bytes per token") as caught:
        plan_memory(loaded, budget_bytes=needed - 1)
    assert "lower max_model_len to 1008" in str(caught.value)
    assert plan_memory(loaded, budget_bytes=needed - 1, max_model_len=1008).num_blocks == 63


def test_no_more_blocks_than_can_be_used(models: Models) -> None:
    plan = plan_memory(models("llama")[0], budget_bytes=1 << 30, max_model_len=100, max_num_seqs=3)
    assert plan.num_blocks == 3 * 7


def test_a_fraction_of_what_is_free(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory_bytes(torch.device("cpu")) > 1 << 20
    monkeypatch.setattr("specdec.models.memory.free_memory_bytes", lambda device: 40_000_000)
    assert plan_memory(models("llama")[0], fraction=0.25).budget_bytes == 10_000_000


def test_a_step_is_left_its_memory(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = models("llama")
    monkeypatch.setattr("specdec.models.memory.free_memory_bytes", lambda device: 40_000_000)
    plan = plan_memory(loaded, fraction=0.5, step=StepMemory({torch.device("cpu"): 10_000_000}, 3_000_000))
    assert plan.budget_bytes == 15_000_000
    assert plan.total_bytes == loaded.weights_bytes + 10_000_000 + plan.cache_bytes + 3_000_000
    assert plan.available_bytes == loaded.weights_bytes + 40_000_000 + 3_000_000
    with pytest.raises(MemoryPlanError, match=r"only 0\.0 MiB may be used"):
        plan_memory(loaded, step=StepMemory({torch.device("cpu"): 50_000_000}))


def test_a_bounded_cache_is_as_large_as_is_of_use(models: Models) -> None:
    """Some sequences of full length, or so many bytes where one takes little; never more than all sequences can use."""
    loaded, _ = models("llama")
    options = {"budget_bytes": 4 << 30, "is_bounded": True}
    assert plan_memory(loaded, **options).num_blocks == BOUND_BYTES // (16 * 1024)
    assert plan_memory(loaded, **options, max_num_seqs=3).num_full_sequences == 3
    long = replace(loaded, max_model_len=1 << 16)
    assert plan_memory(long, **options).num_full_sequences == 16
    assert plan_memory(long, budget_bytes=1 << 27, is_bounded=True).num_full_sequences == 1


def test_the_device_with_the_least_room_for_its_share_decides(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = models("llama")
    other = torch.device("meta")
    layers = (*loaded.attention_layers[:3], replace(loaded.attention_layers[3], device=other))
    free = {other: 4_000_000, torch.device("cpu"): 90_000_000}
    monkeypatch.setattr("specdec.models.memory.free_memory_bytes", free.__getitem__)
    assert plan_memory(replace(loaded, attention_layers=layers), fraction=1).budget_bytes == 4 * 4_000_000


@pytest.mark.parametrize(
    ("options", "parameter"), [({"max_model_len": 1025}, "max_model_len"), ({"fraction": 0.0}, "fraction")]
)
def test_bad_options_are_named(models: Models, options: dict[str, float], parameter: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"{parameter} must be in") as caught:
        plan_memory(models("llama")[0], **options)
    assert caught.value.parameter == parameter


def test_the_bounds_are_what_a_loaded_model_takes() -> None:
    source = ModelSource(str(demo_folder("target")), device="cpu")
    least, memory = least_memory(source, on_gpu=False), build_target(source, BackendOptions())[1].memory
    assert least.bytes_per_token == memory.bytes_per_token
    assert 0.9 * memory.weights_bytes <= least.weights_bytes <= memory.weights_bytes
    assert least.max_model_len == memory.max_model_len


@pytest.mark.parametrize(("quantization", "num_bytes"), [("none", 4), ("int8", 1), ("int4", 0.5)])
def test_the_bound_counts_quantized_weights(quantization: str, num_bytes: float) -> None:
    source = ModelSource(str(demo_folder("target")), dtype="float32")
    whole, held = (
        least_memory(replace(source, quantization=name), on_gpu=True).weights_bytes for name in ("none", quantization)
    )
    assert held == whole * num_bytes / 4


def test_nothing_is_known_of_files_that_are_elsewhere() -> None:
    assert least_memory(ModelSource("nobody/nothing"), on_gpu=True).weights_bytes == 0


def test_weights_beyond_the_free_memory_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    source, lines = ModelSource(str(demo_folder("target")), device="cpu"), list[str]()
    needed = least_memory(source, on_gpu=False).weights_bytes
    free = HostMemory(1 << 40, needed - 1)
    monkeypatch.setattr("specdec.models.memory.host_memory", lambda: free)
    with pytest.raises(ModelLoadError, match=r"take [\d.]+ MiB at least, and [\d.]+ MiB of memory are free: give more"):
        build_target(source, BackendOptions(), lines.append)
    assert not lines
    free = HostMemory(1 << 40, needed)
    check_host_memory(source)


def test_a_gpu_refuses_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.models.memory.host_memory", lambda: HostMemory(1 << 40, 0))
    monkeypatch.setattr("specdec.models.memory.choose_device", torch.device)
    check_host_memory(ModelSource(str(demo_folder("target")), device="cuda"))
