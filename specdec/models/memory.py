"""How many cache blocks fit into the memory there is."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specdec.cache.blocks import LOOKAHEAD_TOKENS
from specdec.cache.recurrent.opaque import NUM_COPIES
from specdec.cache.recurrent.pool import bytes_per_slot, checked_window, state_bytes
from specdec.cache.recurrent.slots import DEFAULT_WINDOW_TOKENS, Window
from specdec.checkpoint.configuration import max_model_len
from specdec.checkpoint.weight_files import local_folder, tensor_bytes, weight_files
from specdec.core.errors import InvalidParameterError, MemoryPlanError, ModelLoadError
from specdec.executor.paged_cache import group_window
from specdec.models.host_memory import host_memory
from specdec.models.loading import LoadedModel, ModelSource, choose_device, load_config
from specdec.models.probe import AttentionLayer

_MIB = 1 << 20
MAX_STATE_SLOTS = 1024
"""State slots where nobody says how many sequences there are at most."""
NUM_BRANCH_SLOTS = 64
"""State slots beyond one per sequence: a drafter's branches have states of their own."""
BOUND_SEQUENCES = 16
"""A bounded cache holds no more sequences of full length than these. Most sequences are far shorter."""
BOUND_BYTES = 192 << 20
"""A bounded cache may have as much as this in any case."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What a model takes beside its weights and its cache.

    Attributes:
        activation_bytes: Of a step of the largest size, by device: the most that is held at once while it runs, and
            what recorded steps hold all the time.
        process_bytes: Of the process on a CPU beside the model: the interpreter, libraries, other models.
        graphs_bytes: Of steps recorded as CUDA graphs; part of ``activation_bytes``.
        copy_bytes: Of weights that another engine is to lay out anew; part of ``activation_bytes``.
    """

    activation_bytes: Mapping[torch.device, int] = field(default_factory=dict)
    process_bytes: int = 0
    graphs_bytes: int = 0
    copy_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory for one model's weights and cache.

    Attributes:
        num_blocks: Blocks of the cache.
        block_size: Positions per block.
        max_model_len: Longest sequence, in tokens.
        bytes_per_token: Of one position's keys and values in all layers that keep every position.
        bytes_per_block: Of one block in those layers.
        sequence_bytes: Of one sequence of ``max_model_len``, its recurrent state and way back included.
        cache_bytes: Of all blocks, of the one more that padding is written to, and of all state slots.
        weights_bytes: Of the weights, which are there already.
        budget_bytes: What the cache was allowed to take.
        adapter_bytes: Of the slots for adapters, which are there already.
        activation_bytes: Of a step of the largest size and of recorded steps, measured, and of copies of weights.
        graphs_bytes: Of these what recorded steps take.
        copy_bytes: Of these what copies of weights take.
        process_bytes: Of the process on a CPU beside the model.
        available_bytes: What the plan has to fit into: free memory and what the process holds already.
        num_state_slots: Sequences and branches whose recurrent states are held at once; 0 without recurrent layers.
        state_bytes: Of one sequence's recurrent state.
        checkpoint_bytes: Of what is kept beside it so that it can be rolled back.
        window_blocks: Blocks of the layers with each length of sliding window.
        window_bytes: Of one sequence in those layers, however long it is.
        rollback_tokens: Most tokens that can be taken back for sure; None where it is any number.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    bytes_per_token: int
    bytes_per_block: int
    sequence_bytes: int
    cache_bytes: int
    weights_bytes: int
    budget_bytes: int
    adapter_bytes: int = 0
    activation_bytes: int = 0
    graphs_bytes: int = 0
    copy_bytes: int = 0
    process_bytes: int = 0
    available_bytes: int = 0
    num_state_slots: int = 0
    state_bytes: int = 0
    checkpoint_bytes: int = 0
    rollback_tokens: int | None = None
    window_blocks: Mapping[int, int] = field(default_factory=dict)
    window_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The most that is held at once: weights, slots for adapters, a step, the cache, the rest of the process."""
        model_bytes = self.weights_bytes + self.adapter_bytes + self.activation_bytes + self.cache_bytes
        return model_bytes + self.process_bytes

    def describe(self) -> str:
        """The plan in a line."""
        parts = [f"weights {_mib(self.weights_bytes)}"]
        parts += [f"adapters {_mib(self.adapter_bytes)}"] if self.adapter_bytes else []
        parts += [f"their copy {_mib(self.copy_bytes)}"] if self.copy_bytes else []
        step_bytes = self.activation_bytes - self.graphs_bytes - self.copy_bytes
        parts += [f"a step {_mib(step_bytes)} (measured)"] if step_bytes else []
        parts += [f"CUDA graphs {_mib(self.graphs_bytes)} (measured)"] if self.graphs_bytes else []
        parts += [f"cache {_mib(self.cache_bytes)}"]
        parts += [f"the rest of the process {_mib(self.process_bytes)}"] if self.process_bytes else []
        return f"{_mib(self.total_bytes)} planned of {_mib(self.available_bytes)}: {', '.join(parts)}"

    @property
    def num_full_sequences(self) -> int:
        """Sequences of ``max_model_len`` that fit at once."""
        num_by_blocks = self.num_blocks // -(-self.max_model_len // self.block_size)
        return min(num_by_blocks, self.num_state_slots) if self.num_state_slots else num_by_blocks

    @property
    def window(self) -> Window | None:
        """How far back recurrent states reach; None where there are none."""
        return None if self.rollback_tokens is None else Window(self.rollback_tokens)


def cache_bytes_per_token(layers: Iterable[AttentionLayer]) -> int:
    """Bytes of one position's keys and values in all layers."""
    return sum(layer.bytes_per_token for layer in layers)


def window_for(loaded: LoadedModel, num_tokens: int) -> Window | None:
    """How far back the recurrent states of a model reach; None where it has none. Raises as checked_window."""
    if loaded.opaque_state is not None:
        return Window(num_tokens)
    return checked_window(num_tokens) if loaded.recurrent_layers else None


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can be taken on a device now without pushing anything out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_memory().free_bytes


def free_unused() -> None:
    """Give back the memory of models that nothing holds any more, on GPUs too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def plan_memory(
    loaded: LoadedModel,
    *,
    budget_bytes: int | None = None,
    fraction: float = 0.8,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    block_size: int = 16,
    window: Window | None = None,
    step: StepMemory | None = None,
    is_bounded: bool = False,
    max_step_tokens: int | None = None,
) -> MemoryPlan:
    """Size the cache of a loaded model.

    Recurrent states and windows take at most half of what one sequence leaves over: blocks are not short where
    sequences are long.

    Args:
        loaded: Its weights are in memory, so what is free is free for the cache.
        budget_bytes: For the cache; by default ``fraction`` of what is free and no step takes, on the device with the
            least room for its share.
        fraction: In (0, 1]; of what is free.
        max_model_len: Longest sequence wanted, in tokens; by default the model's own, which it may not exceed.
        max_num_seqs: Take no more blocks than this many sequences of ``max_model_len`` can use.
        block_size: Positions per block.
        window: How far back recurrent states reach, for a model that has any.
        step: What the model takes beside its weights and its cache.
        max_step_tokens: Most tokens of a sequence in one step, for which windows have room; None for any number.
        is_bounded: Take blocks for no more than :data:`BOUND_SEQUENCES` such sequences, or :data:`BOUND_BYTES` of them.

    Raises:
        MemoryPlanError: the budget does not hold one sequence of ``max_model_len``.
        InvalidParameterError: ``max_model_len`` or ``fraction`` is out of range.
    """
    length = _checked_length(loaded, max_model_len)
    needs = _Needs(loaded, length, block_size, window or window_for(loaded, DEFAULT_WINDOW_TOKENS), max_step_tokens)
    step = step or StepMemory()
    budget = _budget(needs, fraction, step) if budget_bytes is None else budget_bytes
    if needs.sequence_bytes + needs.padding_bytes > budget:
        raise MemoryPlanError(_refusal(needs, budget))
    num_slots = _num_slots(needs, budget, max_num_seqs)
    num_blocks = _num_blocks(needs, budget, num_slots, max_num_seqs, is_bounded)
    return _plan(needs, step, budget, num_slots, num_blocks)


def _plan(needs: _Needs, step: StepMemory, budget: int, num_slots: int, num_blocks: int) -> MemoryPlan:
    loaded = needs.loaded
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=needs.block_size,
        max_model_len=needs.length,
        bytes_per_token=needs.bytes_per_token,
        bytes_per_block=needs.block_bytes,
        sequence_bytes=needs.sequence_bytes,
        cache_bytes=num_blocks * needs.block_bytes + needs.padding_bytes + needs.fixed_bytes(num_slots),
        weights_bytes=loaded.weights_bytes,
        budget_bytes=budget,
        adapter_bytes=loaded.adapter_bytes,
        activation_bytes=sum(step.activation_bytes.values()),
        graphs_bytes=step.graphs_bytes,
        copy_bytes=step.copy_bytes,
        process_bytes=step.process_bytes,
        available_bytes=_available(loaded, step),
        num_state_slots=num_slots if needs.slot_bytes else 0,
        state_bytes=needs.state_bytes,
        checkpoint_bytes=needs.slot_bytes - needs.state_bytes,
        rollback_tokens=needs.window.num_tokens if needs.window else None,
        window_blocks={window: needs.num_window_blocks(window, num_slots) for window in needs.windows},
        window_bytes=needs.window_bytes(1),
    )


def _checked_length(loaded: LoadedModel, max_model_len: int | None) -> int:
    length = loaded.max_model_len if max_model_len is None else max_model_len
    if not 1 <= length <= loaded.max_model_len:
        message = f"max_model_len must be in [1, {loaded.max_model_len}] for {loaded.name}, got {length}"
        raise InvalidParameterError("max_model_len", message)
    return length


class _Needs:
    """What one sequence of ``length`` tokens takes."""

    def __init__(
        self, loaded: LoadedModel, length: int, block_size: int, window: Window | None, max_step_tokens: int | None
    ) -> None:
        self.loaded, self.length, self.block_size, self.window = loaded, length, block_size, window
        self.num_blocks = -(-length // block_size)
        self._step_tokens = length if max_step_tokens is None else max_step_tokens
        layers = loaded.attention_layers if loaded.opaque_state is None else ()
        self.bytes_per_token = cache_bytes_per_token(layer for layer in layers if group_window(layer) is None)
        self.windows: dict[int, int] = {}  # bytes of a position in the layers with each window
        for layer in layers:
            size = group_window(layer)
            if size is not None:
                self.windows[size] = self.windows.get(size, 0) + layer.bytes_per_token
        self.state_bytes = state_bytes(loaded.recurrent_layers)
        self.slot_bytes = bytes_per_slot(loaded.recurrent_layers, window) if window else 0
        if loaded.opaque_state is not None:
            self.bytes_per_token = NUM_COPIES * loaded.opaque_state.bytes_per_token
            self.state_bytes = loaded.opaque_state.bytes_per_sequence
            self.slot_bytes = NUM_COPIES * self.state_bytes
        self.block_bytes = self.bytes_per_token * block_size
        self.padding_bytes = self.block_bytes + block_size * sum(self.windows.values())
        self.sequence_bytes = self.num_blocks * self.block_bytes + self.fixed_bytes(1)

    def num_window_blocks(self, window: int, num_sequences: int) -> int:
        """Blocks for the layers with one window: what each sequence holds, and a step's tokens of one of them."""
        held = min(self.num_blocks, -(-(window + LOOKAHEAD_TOKENS) // self.block_size) + 1)
        step = min(self.num_blocks - held, -(-self._step_tokens // self.block_size))
        return num_sequences * held + step

    def window_bytes(self, num_sequences: int) -> int:
        """Bytes of all layers with windows."""
        blocks = ((self.num_window_blocks(window, num_sequences), size) for window, size in self.windows.items())
        return sum(count * size * self.block_size for count, size in blocks)

    def fixed_bytes(self, num_sequences: int) -> int:
        """Bytes of what does not grow with sequences' length."""
        return num_sequences * self.slot_bytes + self.window_bytes(num_sequences)

    def by_device(self) -> dict[torch.device, int]:
        """The same, by where the layers are."""
        if self.loaded.opaque_state is not None:
            return {self.loaded.device: self.sequence_bytes}
        shares: dict[torch.device, int] = {}
        for layer in self.loaded.attention_layers:
            size = group_window(layer)
            length = self.length if size is None else self.num_window_blocks(size, 1) * self.block_size
            shares[layer.device] = shares.get(layer.device, 0) + layer.bytes_per_token * length
        for kept in self.loaded.recurrent_layers:
            assert self.window is not None
            shares[kept.device] = shares.get(kept.device, 0) + bytes_per_slot([kept], self.window)
        return shares


def _num_slots(needs: _Needs, budget: int, max_num_seqs: int | None) -> int:
    """Sequences and branches for whose recurrent states and windows there is room; 0 where there are none."""
    slot_bytes = needs.fixed_bytes(2) - needs.fixed_bytes(1)
    if not slot_bytes:
        return 0
    spare = budget - needs.sequence_bytes - needs.padding_bytes
    most = MAX_STATE_SLOTS if max_num_seqs is None else max(1, max_num_seqs) + NUM_BRANCH_SLOTS
    return min(most, 1 + (spare // 2 if needs.block_bytes else spare) // slot_bytes)


def _num_blocks(needs: _Needs, budget: int, num_slots: int, max_num_seqs: int | None, is_bounded: bool) -> int:
    if not needs.block_bytes:
        return num_slots * needs.num_blocks
    most = [(budget - needs.fixed_bytes(num_slots) - needs.padding_bytes) // needs.block_bytes]
    if max_num_seqs is not None:
        most.append(max(1, max_num_seqs) * needs.num_blocks)
    if is_bounded:
        most.append(max(BOUND_SEQUENCES * needs.num_blocks, BOUND_BYTES // needs.block_bytes))
    return min(most)


def _refusal(needs: _Needs, budget: int) -> str:
    """One sequence does not fit: what it takes, what there is, and what would help."""
    per_token = f"{needs.bytes_per_token} bytes per token"
    text = f"one sequence of {needs.length} tokens of {needs.loaded.name} takes "
    text += f"{_mib(needs.sequence_bytes + needs.block_bytes)} of cache ({per_token}"
    if needs.window is not None:
        text += f", {_mib(needs.state_bytes)} of recurrent state and {_mib(needs.slot_bytes - needs.state_bytes)}"
        text += f" to roll it back by {needs.window.num_tokens} tokens"
    text += f"), but only {_mib(budget)} may be used; "
    left = budget - needs.fixed_bytes(1) - needs.padding_bytes
    num_blocks = left // needs.block_bytes if needs.block_bytes else 0
    if num_blocks > 0 or not needs.fixed_bytes(1):
        text += f"lower max_model_len to {max(num_blocks, 0) * needs.block_size} or "
    return text + "give more memory"


def _budget(needs: _Needs, fraction: float, step: StepMemory) -> int:
    """Bytes for all layers such that each device holds its layers' share beside a step."""
    if not 0 < fraction <= 1:
        raise InvalidParameterError("fraction", f"fraction must be in (0, 1], got {fraction}")
    shares = needs.by_device()
    total = sum(shares.values())
    rooms = {device: free_memory_bytes(device) - step.activation_bytes.get(device, 0) for device in shares}
    return min(int(max(0, rooms[device]) * fraction) * total // share for device, share in shares.items())


def _available(loaded: LoadedModel, step: StepMemory) -> int:
    held_bytes = loaded.weights_bytes + loaded.adapter_bytes + step.process_bytes
    devices = {loaded.device, *step.activation_bytes}
    return held_bytes + sum(free_memory_bytes(device) for device in devices if device.type in ("cpu", "cuda"))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"


_BITS = {"none": 0, "int8": 8, "int4": 4, "fp8": 8}
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """Lower bounds; 0 where the files do not tell.

    Attributes:
        weights_bytes: Of the weights as they are held.
        bytes_per_token: Of one position's keys and values in all layers.
        max_model_len: The model's longest sequence, in tokens.
    """

    weights_bytes: int = 0
    bytes_per_token: int = 0
    max_model_len: int = 0


def least_memory(source: ModelSource, *, on_gpu: bool) -> LeastMemory:
    """Bounds from a model's ``config.json`` and the headers of its weights, where its files are on this machine.

    Args:
        source: The model.
        on_gpu: Whether it runs on a GPU: dtype ``auto`` is float32 elsewhere.

    Raises:
        ModelLoadError: The configuration or a file of weights cannot be read.
    """
    folder = local_folder(source.path, source.revision)
    if folder is None:
        return LeastMemory()
    try:
        return _least_memory(replace(source, path=str(folder), revision=None), folder, on_gpu)
    except ModelLoadError:
        if Path(source.path).expanduser().is_dir():
            raise
        return LeastMemory()  # the hub's cache may have a part of the files


def check_host_memory(source: ModelSource) -> None:
    """Refuse a model on a CPU whose weights do not fit into the memory that is free.

    Without this check the kernel kills the process as it loads. A full GPU raises an error, so it is not looked at. The
    bound is a lower one: a model that passes may still not fit.

    Raises:
        ModelLoadError: The weights do not fit, or a file cannot be read.
    """
    if isinstance(source.device_map, dict) or choose_device(source.device).type != "cpu":
        return
    needed, free = least_memory(source, on_gpu=False).weights_bytes, host_memory().free_bytes
    if needed > free:
        raise ModelLoadError(
            f"the weights of {source.path} take {_mib(needed)} at least, and {_mib(free)} of memory are free: "
            "give more memory, quantize the model, or take a smaller one"
        )


def pair_shares(target: ModelSource, draft: ModelSource, total_bytes: int, share: float = 1.0) -> tuple[float, float]:
    """Parts of one GPU for a target and a draft model in one process: weights, and caches for as many tokens each.

    Where the files do not tell, the two get equal parts.

    Args:
        target: The model that decides.
        draft: The model that proposes.
        total_bytes: Memory of the GPU.
        share: Part of it that both have together.
    """
    both = [least_memory(source, on_gpu=True) for source in (target, draft)]
    left = share * total_bytes - sum(one.weights_bytes for one in both)
    growths = [one.bytes_per_token for one in both]
    if not all(growths):
        growths = [one.weights_bytes for one in both]  # layers that keep less than attention, or another amount
    if left <= 0 or not all(one.weights_bytes for one in both):
        return share / 2, share / 2
    of_target, of_draft = (
        (one.weights_bytes + left * growth / sum(growths)) / total_bytes
        for one, growth in zip(both, growths, strict=True)
    )
    return of_target, of_draft


def _least_memory(source: ModelSource, folder: Path, on_gpu: bool) -> LeastMemory:
    text = load_config(source).get_text_config(decoder=True)
    stored = getattr(text, "dtype", None)
    stored_bytes = stored.itemsize if isinstance(stored, torch.dtype) else 0
    held_bytes = _SIZES.get(source.dtype, stored_bytes if on_gpu else _SIZES["float32"])
    parameter_bytes = _BITS[source.quantization] / 8 or held_bytes
    weights_bytes = 0
    if stored_bytes and getattr(text, "quantization_config", None) is None:
        file_bytes = sum(sum(tensor_bytes(file).values()) for file in weight_files(folder))
        weights_bytes = int(file_bytes * parameter_bytes / stored_bytes)
    return LeastMemory(weights_bytes, _token_bytes(text, held_bytes), max_model_len(text, source.path))


def _token_bytes(text: Any, itemsize: int) -> int:
    """Of one position's keys and values where all layers are plain attention, else 0: then less may be kept."""
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    heads = getattr(text, "num_attention_heads", None)
    if kinds != {"full_attention"} or not heads or getattr(text, "kv_lora_rank", None):
        return 0
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return int(2 * text.num_hidden_layers * kv_heads * head_dim * itemsize)
