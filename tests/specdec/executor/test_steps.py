"""A runner's steps: slots and tables of sequences that come and go, and what a step brings to the device."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torchao.quantization import quantize_

from specdec.cache.blocks import CachedSequence
from specdec.executor.derive import Deriver
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.paged_cache import write_by_operators
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.kernels.attention import AttentionContext
from specdec.kernels.segmented import AttentionLayer, AttentionShape, AttentionStep
from specdec.models.loading import LoadedModel, prepare_model
from specdec.models.quantization import Quantization, _weight_config, is_quantized
from tests.specdec.executor.test_derive import BREAKS
from tests.specdec.kernels.interpreter import interpreted
from tests.specdec.models.families import VOCAB_SIZE, make_model
from tests.specdec.operators import DeviceOnly

META, CPU = torch.device("meta"), torch.device("cpu")


class Nothing:
    """A kernel that launches something and reads nothing back, as one in a graph must."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._value_dim = shape.value_dim

    def prepare(self, step: AttentionStep) -> None:
        pass

    def attend(self, queries: Tensor, key_pool: Tensor, value_pool: Tensor, layer: AttentionLayer) -> Tensor:
        return queries.new_zeros(*queries.shape[:2], self._value_dim)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("nothing")
    module.Nothing = Nothing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nothing", module)


def on(device: torch.device, family: str) -> LoadedModel:
    loaded = prepare_model(make_model(family), "tiny")
    layers = tuple(replace(layer, device=device) for layer in loaded.attention_layers)
    loaded.model.to(device)
    return replace(loaded, device=device, attention_layers=layers)


def runner_of(loaded: LoadedModel, kernel: str = "nothing:Nothing") -> ModelRunner:
    return ModelRunner(loaded, num_blocks=80, block_size=4, kernel=kernel)


def rows_of(runner: ModelRunner, sequences: list[CachedSequence], counts: list[int], logits: list[int]) -> list:
    for sequence, count in zip(sequences, counts, strict=True):
        assert runner.reserve(sequence, len(sequence) + count)
    parts = zip(sequences, counts, logits, strict=True)
    return [RowInput(sequence, [(7 * count + i) % VOCAB_SIZE for i in range(count)], n) for sequence, count, n in parts]


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("device", [CPU, META], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral"])
@torch.no_grad()
def test_a_whole_pass_uploads_once_and_waits_for_nothing(family: str, device: torch.device, is_padded: bool) -> None:
    """What is read back after it: whether all is finite, until sampling has it in its record.

    In inference mode operators that wait would not be seen: they are dispatched whole.
    """
    runner = runner_of(on(device, family))
    if is_padded:
        runner.record_graphs(ExecutorLimits(max_rows=4, max_tokens=20, max_length=40, max_draft_tokens=7))
    sequences = [runner.new_sequence() for _ in range(3)]
    rows = rows_of(runner, sequences, [9, 1, 4], [9, 1, 4])
    runner._launch(rows)  # memory for steps is made
    # Where a part of a prompt is among the rows, transformers indexes by a tensor, which is not told from a list here.
    for counts in [1, 5, 1], [3, 2, 8]:
        rows = rows_of(runner, sequences, counts, counts)
        with DeviceOnly(runner._steps.staging.words) as seen:
            runner._launch(rows)
        assert seen.num_uploads == 1


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
@torch.no_grad()
def test_a_padded_pass_of_quantized_layers_uploads_once_and_waits_for_nothing(
    quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchao asks for the first where it packs int4, and torch 2.13 for the other where such weights are on meta.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(Tensor, "fake_device", META, raising=False)
    loaded = on(META, "llama")
    quantize_(loaded.model.base_model.bfloat16(), _weight_config(quantization, META))
    runner = runner_of(replace(loaded, model=loaded.model.bfloat16(), dtype=torch.bfloat16))
    runner.record_graphs(ExecutorLimits(max_rows=4, max_tokens=20, max_length=40, max_draft_tokens=7))
    assert not runner.graphs_failure
    sequences = [runner.new_sequence() for _ in range(2)]
    runner._launch(rows_of(runner, sequences, [5, 5], [5, 5]))
    rows = rows_of(runner, sequences, [2, 3], [2, 3])
    with DeviceOnly(runner._steps.staging.words) as seen:
        runner._launch(rows)
    assert seen.num_uploads == 1
    assert is_quantized(runner.loaded.model.model.layers[0].mlp.up_proj)


@torch.no_grad()
def test_blocks_that_are_forked_and_paths_of_trees_take_one_upload_each() -> None:
    cache = runner_of(on(META, "gemma3"))._cache
    cache.copy_blocks(0, [(0, 1), (2, 3)])
    staging = cache._uploads[META].staging
    assert staging is not None
    with DeviceOnly(staging.words) as seen:
        cache.copy_blocks(0, [(2, 3), (0, 4)])
        cache.move_slots(1, [(1, 2)])
    assert seen.num_uploads == 2


@pytest.mark.parametrize("device", [CPU, META], ids=str)
@pytest.mark.parametrize("name", BREAKS)
@torch.no_grad()
def test_a_layer_that_waits_or_copies_is_seen(name: str, device: torch.device) -> None:
    loaded = on(device, "llama")
    runner = runner_of(loaded)
    sequence = runner.new_sequence()
    runner._launch(rows_of(runner, [sequence], [3], [1]))

    def broken(_: object, inputs: tuple[Tensor, ...]) -> None:
        BREAKS[name](inputs[0][0, 0, :3])

    loaded.model.model.layers[1].register_forward_pre_hook(broken)
    rows = rows_of(runner, [sequence], [2], [1])
    with DeviceOnly(runner._steps.staging.words), pytest.raises(AssertionError, match="waits for the device or copies"):
        runner._launch(rows)


def test_kernels_run_while_their_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, and a model may be on another one."""
    current: list[Tensor] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    class OnItsDevice(Nothing):
        def attend(self, queries: Tensor, *rest: Any) -> Tensor:
            assert current[-1] is queries
            return super().attend(queries, *rest)

    def write(keys: Tensor, *rest: Tensor) -> None:
        assert current[-1] is keys
        write_by_operators(keys, *rest)
        written.append(len(keys))

    written: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    runner = runner_of(on(CPU, "llama"))
    runner._attention = AttentionContext(OnItsDevice)
    runner._cache._write = write
    runner.forward(rows_of(runner, [runner.new_sequence()], [3], [1]))
    assert written == [3] * runner.loaded.config.num_hidden_layers


@interpreted
def test_a_model_s_passes_through_triton_give_what_gathering_gives() -> None:
    outputs = []
    for kernel in ("gather", "triton"):
        runner = ModelRunner(on(CPU, "llama"), num_blocks=80, block_size=4, kernel=kernel)
        if kernel == "triton":  # reads nothing that was not written, so nothing need be cleared
            for pool in chain(*runner._cache._pools.values()):
                pool.fill_(torch.nan)
            runner._cache.clear(0, range(80))
            assert pool.isnan().all()
        sequences = [runner.new_sequence() for _ in range(3)]
        for counts in [9, 1, 4], [1, 5, 1], [2, 3, 6]:
            outputs.append(runner.forward(rows_of(runner, sequences, counts, counts)))
    for got, want in zip(outputs[3:], outputs[:3], strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_tables_on_the_device_are_those_of_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over sequences that come, fork, are cut back, reuse prefixes and go, and steps that fail on their way there.

    Steps and slots grow meanwhile.
    """
    rng = random.Random(3)
    failing = dict.fromkeys(("apply_updates", "derive", "advance_all"), 0)

    def failing_method(name: str) -> Callable[..., Any]:
        real = getattr(Deriver, name)

        def method(*args: Any, **options: Any) -> Any:
            if failing[name]:
                failing[name] -= 1
                raise torch.OutOfMemoryError(name)
            return real(*args, **options)

        return method

    for name in failing:
        monkeypatch.setattr(Deriver, name, failing_method(name))
    runner = runner_of(on(CPU, "mistral"))
    kept: list[CachedSequence] = []
    for _ in range(150):
        kind = rng.randrange(6)
        if kind == 0 or not kept:
            kept.append(runner.new_sequence())
            runner.reuse_prefix(kept[-1], [i % VOCAB_SIZE for i in range(30)])
        elif kind == 1:
            kept.append(runner.fork(rng.choice(kept)))
        elif kind == 2:
            one = rng.choice(kept)
            runner.truncate(one, rng.randrange(max(0, len(one) - 6), len(one) + 1))
        elif kind == 3 and len(kept) > 3:
            runner.free(kept.pop(rng.randrange(len(kept))))
        chosen = rng.sample(kept, rng.randrange(1, len(kept) + 1))
        rows = []
        for one in chosen:
            new = [(len(one) + i) % VOCAB_SIZE for i in range(rng.randrange(1, 9))]
            if runner.reserve(one, len(one) + len(new), len(new)):
                rows.append(RowInput(one, new, 0))
        if not rows:
            runner.free(kept.pop(rng.randrange(len(kept))))
            continue
        before = [len(row.sequence) for row in rows]
        if rng.random() < 0.3:
            failing[rng.choice(list(failing))] += 1
        while True:
            with suppress(torch.OutOfMemoryError):
                runner.forward(rows)
                break
        state = runner._steps._state
        for row, past in zip(rows, before, strict=True):
            slot, end = runner._steps._slots[row.sequence], past + len(row.tokens)
            assert int(state.tensors["num_computed_tokens"][slot]) == end
            for group, (own, table) in enumerate(zip(runner.pool.groups, row.sequence.tables, strict=True)):
                sent = state.tensors[f"block_table_{group}"][slot].tolist()
                first = own.first_read(past) // 4
                assert sent[first : -(-end // 4)] == table[first : -(-end // 4)]
        for row in rows:
            if rng.random() < 0.3:
                runner.keep_prefix(row.sequence, len(row.sequence))
    for one in kept:
        runner.free(one)
    assert len(runner._steps._slots) == 0


def test_a_sequence_that_is_empty_has_no_slot() -> None:
    runner = runner_of(on(CPU, "llama"))
    one = runner.new_sequence()
    runner.forward(rows_of(runner, [one], [5], [1]))
    assert len(runner._steps._slots) == 1
    runner.truncate(one, 0)
    assert len(runner._steps._slots) == 0
