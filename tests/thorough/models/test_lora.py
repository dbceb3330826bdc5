"""Rows of one step with other adapters each give what PEFT gives with one at a time."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from specdec.core.errors import ModelLoadError
from specdec.core.types import Adapter
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, load_model, prepare_model
from specdec.models.lora.checkpoint import AdapterCheckpoint
from specdec.models.lora.slots import AdapterSlots, LoRAConfig, layer_shapes
from specdec.models.memory import plan_memory
from specdec.models.parity_check import TOLERANCES
from tests.sizes import some
from tests.specdec.adapters import RANKS, save_adapter, with_adapter
from tests.specdec.checkpoints import save_checkpoint
from tests.specdec.models.families import VOCAB_SIZE, make_model
from tests.specdec.models.recurrent_families import make_recurrent
from tests.thorough.models.test_recurrent import TOLERANCE


def make_adapters(folder: Path, family: str) -> list[Adapter]:
    """Of ranks 4 to 64; of a hybrid or a mixture all linear layers that can be adapted, in place of a llama's."""
    return [
        save_adapter(
            folder / name, make_hybrid_or_not(family), rank, seed, 0.2, target_modules=modules_of(family, modules)
        )
        for seed, (name, (rank, modules)) in enumerate(RANKS.items())
    ]


def modules_of(family: str, modules: Sequence[str]) -> list[str]:
    shapes = layer_shapes(make_hybrid_or_not(family))
    is_mixture = family in ("mixtral", "deepseek_v3")  # PEFT would adapt the experts under the names of their layers
    found = {name.rpartition(".")[2] for name in shapes if ".self_attn." in name or not is_mixture}
    return sorted(found & set(modules)) if family in ("llama", "qwen3", "gemma3") else sorted(found)


def make_rows(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def make_runner(family: str, adapters: Sequence[Adapter], dtype: torch.dtype = torch.float32) -> ModelRunner:
    """With the adapters in its slots, in order."""
    loaded = prepare_model(make_hybrid_or_not(family).to(dtype), "tiny")
    slots = AdapterSlots(loaded.model, LoRAConfig(len(adapters), 64))
    for slot, adapter in enumerate(adapters):
        slots.put(slot, AdapterCheckpoint(Path(adapter.path), slots.shapes, slots.room.max_rank).weights)
    return ModelRunner(replace(loaded, adapters=slots), num_blocks=100, block_size=4, num_state_slots=50)


def mixed_step(runner: ModelRunner, rows: list[list[int]], slots: Sequence[int | None]) -> list[torch.Tensor]:
    """All logits of each row, read in two steps."""
    sequences = [runner.new_sequence() for _ in rows]
    parts: list[list[torch.Tensor]] = [[] for _ in rows]
    for half in (0, 1):
        inputs = []
        for row, sequence, slot in zip(rows, sequences, slots, strict=True):
            tokens = row[len(row) // 2 :] if half else row[: len(row) // 2]
            assert runner.reserve(sequence, len(sequence) + len(tokens))
            inputs.append(RowInput(sequence, tokens, len(tokens), adapter=slot))
        for own, new in zip(parts, runner.forward(inputs).split([len(one.tokens) for one in inputs]), strict=True):
            own.append(new)
    for sequence in sequences:
        runner.free(sequence)
    return [torch.cat(own) for own in parts]


@torch.inference_mode()
def peft_logits(family: str, adapter: Adapter | None, row: list[int]) -> torch.Tensor:
    model = with_adapter(make_hybrid_or_not(family), adapter)
    return model(input_ids=torch.tensor([row]), use_cache=False).logits[0]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return (got - want).abs().max().item()


def check(path: str) -> None:
    AdapterCheckpoint(Path(path), layer_shapes(make_model("llama")), max_rank=64)


def make_hybrid_or_not(family: str) -> PreTrainedModel:
    return make_recurrent(family) if family == "qwen3_5" else make_model(family)


@pytest.mark.parametrize("family", some(["llama", "qwen3", "gemma3", "mixtral", "deepseek_v3", "qwen3_5"], 3))
def test_every_row_of_a_mixed_step_has_the_logits_of_peft(family: str, tmp_path: Path) -> None:
    """Seven rows: four adapters and none; one twice and apart, one twice side by side."""
    adapters = make_adapters(tmp_path, family)
    chosen = [0, None, 1, 2, 2, 3, 0]
    rows = make_rows(9, 4, 2, 14, 6, 11, 5)
    wanted = [peft_logits(family, None if i is None else adapters[i], row) for i, row in zip(chosen, rows, strict=True)]
    runner = make_runner(family, adapters)
    got = mixed_step(runner, rows, chosen)
    # A hybrid's scan in pieces differs more from its scan as a whole, without any adapter.
    assert max(map(distance, got, wanted)) < (TOLERANCE if family == "qwen3_5" else 1e-5)
    plain = mixed_step(runner, rows, [None] * 7)
    assert [distance(*pair) > 0.1 for pair in zip(plain, wanted, strict=True)] == [i is not None for i in chosen]
    swapped = mixed_step(runner, rows, [1, None, 0, 2, 2, 3, 0])
    assert [distance(*pair) > 0.1 for pair in zip(swapped, wanted, strict=True)] == [True, False, True, *[False] * 4]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_steps_of_fixed_sizes_have_the_logits_of_peft(family: str, tmp_path: Path) -> None:
    """Which tokens use which adapter only the device knows."""
    adapters = make_adapters(tmp_path, family)
    rows, chosen = make_rows(9, 4, 2, 14), [2, None, 0, 3]
    wanted = [peft_logits(family, None if i is None else adapters[i], row) for i, row in zip(chosen, rows, strict=True)]
    runner = make_runner(family, adapters)
    runner.record_graphs(ExecutorLimits(max_rows=4, max_tokens=64, max_length=40, max_draft_tokens=7))
    assert not runner.graphs_failure
    for _ in range(2):
        assert max(map(distance, mixed_step(runner, rows, chosen), wanted)) < 1e-5
        assert distance(mixed_step(runner, rows, [None] * 4)[0], wanted[0]) > 0.1


@pytest.mark.parametrize("lengths", [(8, 8, 8, 8), (8, 12, 6, 14), (2, 40, 8, 8)], ids=["one", "filled up", "apart"])
def test_neighbouring_slots_are_multiplied_together(lengths: tuple[int, ...], tmp_path: Path) -> None:
    """Of one length, filled up to one, or apart where that would be most of the work.

    Also where an adapter has nothing for a layer, or has taken the slot of a larger one.
    """
    adapters = make_adapters(tmp_path, "llama")
    runner = make_runner("llama", [adapters[3], *adapters[1:]])
    assert runner.loaded.adapters is not None
    shapes = runner.loaded.adapters.shapes
    runner.loaded.adapters.put(0, AdapterCheckpoint(Path(adapters[0].path), shapes, 64).weights)
    rows = make_rows(*lengths)
    wanted = [peft_logits("llama", adapter, row) for adapter, row in zip(adapters, rows, strict=True)]
    assert max(map(distance, mixed_step(runner, rows, [0, 1, 2, 3]), wanted)) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"lora_alpha": 3, "alpha_pattern": {"layers.1.self_attn.q_proj": 40, "down_proj": 1}},
        {"lora_alpha": 4, "rank_pattern": {"q_proj": 2, r"layers\.0\.mlp\..*": 16}},
        {"target_modules": r".*layers\.[12]\.self_attn\.(q|o)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["v_proj"], "layers_to_transform": [3]},
    ],
    ids=lambda options: ",".join(options),
)
def test_scales_ranks_and_layers_are_those_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "one", make_model("llama"), 8, strength=0.1, **options)
    (row,) = make_rows(12)
    (got,) = mixed_step(make_runner("llama", [adapter]), [row], [0])
    assert distance(got, peft_logits("llama", adapter, row)) < 1e-5


def test_adapters_in_bfloat16_are_those_of_peft_within_rounding(tmp_path: Path) -> None:
    adapters = make_adapters(tmp_path, "llama")
    (row,) = make_rows(12)
    runner = make_runner("llama", adapters, torch.bfloat16)
    for slot, adapter in enumerate(adapters):
        (got,) = mixed_step(runner, [row], [slot])
        exact = peft_logits("llama", adapter, row)
        error = (got - exact).square().mean().sqrt() / exact.std()
        assert error < TOLERANCES[torch.bfloat16]
        (plain,) = mixed_step(runner, [row], [None])
        assert (plain - exact).square().mean().sqrt() / exact.std() > 10 * error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_parameters": ["self_attn.q_proj.weight"], "target_modules": ["o_proj"]}, "target_parameters"),
        ({"r": 65}, "rank 65; at most 64"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.partition(" ")[0],
)
def test_what_cannot_be_served_is_refused_by_its_name(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "one", make_model("llama"), options.pop("r", 4), **options)
    with pytest.raises(ModelLoadError, match=says):
        check(adapter.path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("lora_bias", True),
        ("a_field_of_the_future", {"on": True}),
        ("lora_alpha", "much"),
        ("lora_alpha", float("nan")),
        pytest.param("lora_alpha", 10**400, id="lora_alpha-huge"),
        ("alpha_pattern", [1]),
        ("alpha_pattern", {"q_proj": 1e300}),
    ],
)
def test_fields_that_would_change_the_result_are_refused(field: str, value: object, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "one", make_model("llama"), 4)
    file = Path(adapter.path) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ModelLoadError, match=f"{field}|not all finite"):
        check(adapter.path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "7", "\udcff"], ids=["deep", "cut off", "a number", "no text"])
def test_a_configuration_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "one", make_model("llama"), 4)
    (Path(adapter.path) / "adapter_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json"):
        check(adapter.path)


SPOILT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of another model": lambda one: one[:, :-1].contiguous(),
    "a scalar": lambda one: torch.tensor(1.0),
    "rank 0": lambda one: one[:0],
    "integers": lambda one: one.to(torch.int8),
    "float8": lambda one: one.to(torch.float8_e4m3fn),
    "complex": lambda one: one.to(torch.complex64),
    "not a number": lambda one: one.index_fill(1, torch.tensor([3]), float("nan")),
    "infinite in float32": lambda one: one.double().fill_(1e300),
}


@pytest.mark.parametrize("spoil", [*SPOILT, "one half", "no weights", "not safetensors", "endless"])
def test_weights_that_do_not_fit_are_refused(spoil: str, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "one", make_model("llama"), 4)
    file = Path(adapter.path) / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    if spoil in SPOILT:
        tensors[first] = SPOILT[spoil](tensors[first])
    elif spoil == "one half":
        del tensors[first]
    elif spoil == "no weights":
        tensors = {}
    save_file(tensors, file)
    if spoil == "not safetensors":
        file.write_bytes(b"{}")
    elif spoil == "endless":
        os.truncate(file, 1 << 40)
    with pytest.raises(ModelLoadError, match=r"the adapter .* cannot be served"):
        check(adapter.path)


def test_of_several_layers_that_do_not_fit_the_first_by_name_is_told(tmp_path: Path) -> None:
    """Not another one each time."""
    adapter = save_adapter(tmp_path / "one", make_model("llama"), 4)
    file = Path(adapter.path) / "adapter_model.safetensors"
    save_file({key.replace("layers.", "layers.1"): tensor for key, tensor in load_file(file).items()}, file)
    first = re.escape(min(load_file(file)).removeprefix("base_model.model."))
    for _ in range(8):
        with pytest.raises(ModelLoadError, match=f"{first} belongs to no linear layer"):
            check(adapter.path)


def test_weights_without_a_first_product_have_no_rank(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "one", make_model("llama"), 4)
    tensors = load_file(Path(adapter.path) / "adapter_model.safetensors")
    name = next(key for key in tensors if key.endswith("lora_B.weight"))
    save_file({name: tensors[name][:, :0]}, Path(adapter.path) / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="are not those of a layer"):
        check(adapter.path)


def test_an_adapter_that_was_saved_in_bfloat16_is_scaled_as_peft_does(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "one", make_model("llama"), 8, strength=0.2, lora_alpha=11)
    file = Path(adapter.path) / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    (row,) = make_rows(12)
    (got,) = mixed_step(make_runner("llama", [adapter]), [row], [0])
    assert distance(got, peft_logits("llama", adapter, row)) < 1e-5


def test_a_file_that_is_cut_off_later_is_read_already(tmp_path: Path) -> None:
    """A mapped one would end the process."""
    adapter = save_adapter(tmp_path / "one", make_model("llama"), 8)
    checkpoint = AdapterCheckpoint(Path(adapter.path), layer_shapes(make_model("llama")), 8)
    os.truncate(Path(adapter.path) / "adapter_model.safetensors", 0)
    assert checkpoint.fingerprint == adapter.fingerprint
    assert all(down.abs().sum() > 0 for _, down, _ in checkpoint.weights)


def test_slots_are_counted_in_the_memory_plan() -> None:
    loaded = replace(prepare_model(make_model("llama"), "tiny"), adapters=None)
    before = plan_memory(loaded)
    slots = AdapterSlots(loaded.model, LoRAConfig(3, 5))
    after = plan_memory(replace(loaded, adapters=slots))
    assert slots.num_bytes == after.adapter_bytes == 3 * 5 * 4 * sum(map(sum, slots.shapes.values()))
    assert before.adapter_bytes == 0
    assert after.total_bytes == after.weights_bytes + after.cache_bytes + slots.num_bytes


def test_a_model_is_loaded_with_room(tmp_path: Path) -> None:
    source = ModelSource(str(save_checkpoint(tmp_path)), adapters=LoRAConfig(2, 8))
    slots = load_model(source).adapters
    assert slots is not None
    assert (slots.room.max_loras, len(slots.shapes)) == (2, 7)
