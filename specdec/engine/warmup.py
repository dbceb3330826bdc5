"""What a step of the largest size takes beside weights and cache, found out by running one."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch

from specdec.cache.blocks import CachedSequence
from specdec.cache.recurrent.slots import SequenceState, Window
from specdec.core.errors import ModelLoadError, RecordedStepsError
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens, TokenBuffer
from specdec.core.validation import MAX_NUM_SPECULATIVE_TOKENS
from specdec.drafting.head_chains import HeadChains
from specdec.drafting.heads import DraftHeads
from specdec.engine.chained import recorded_chains
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.merged import merge_weights
from specdec.executor.rows import HeadInput, RowInput
from specdec.executor.runner import ModelRunner
from specdec.kernels.gather import max_group_numbers
from specdec.models.hidden import layers_of
from specdec.models.loading import LoadedModel
from specdec.models.memory import StepMemory
from specdec.sampling.acceptance import decide, rank_tokens
from specdec.sampling.pipeline import NOISE_CACHE_BYTES, RowGroup, Sampler
from specdec.sampling.rows import max_slice_rows

_BLOCK_SIZE = 16
_MAX_CPU_CHUNK_CONTEXT = 4096
"""On a CPU the chunk of a prompt comes after no more tokens than these: attention to more takes it minutes."""
_LARGEST_SAMPLING = SamplingParams(frequency_penalty=0.1, temperature=100.0, top_p=0.99, logprobs=1)
"""Takes the most memory per row: logits are edited, and top_p sorts the whole vocabulary where all is as likely."""
_GREEDY = SamplingParams(temperature=0.0)
_WAYS: tuple[tuple[Mapping[str, Any], ...], ...] = (
    ({}, {"temperature": 1.0}),
    ({}, {"top_p": 0.9}),
    ({}, {"frequency_penalty": 0.1}),
    ({}, {"allowed_token_ids": SharedTokens((0,))}),  # a mask, as grammars have
    ({}, {"logprobs": 1}),
)
"""What kernels leave out where nobody in a step uses it: they are compiled with each of them and without."""


_GROWTH_SHARE = 10
"""Under load a process on a CPU takes up to a tenth more: requests, their answers, gaps that the allocator leaves."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How large a step of a model may be.

    Attributes:
        max_num_seqs: Most rows.
        max_num_batched_tokens: Most tokens of all rows together, and so most rows of logits.
    """

    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def max_num_logits(self) -> int:
        """Most rows of logits: each sequence decides one token, and as many as are drafted for it."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * (1 + MAX_NUM_SPECULATIVE_TOKENS))


def measure_step(
    loaded: LoadedModel,
    limits: StepLimits,
    *,
    max_model_len: int,
    vocab_size: int,
    window: Window | None = None,
    heads: DraftHeads | None = None,
    mapped_vocab_size: int | None = None,
    graphs: ExecutorLimits | None = None,
    tile_tokens: int | None = None,
) -> StepMemory:
    """Run a step that reads as much of a prompt as a step may, and one that decides as many tokens, and measure both.

    They have a cache of their own, of a single block that stands for all blocks of all sequences: the tokens mean
    nothing, but every tensor has the size that it will have.

    Args:
        loaded: The model.
        limits: How large a step may be.
        max_model_len: Longest sequence, in tokens.
        vocab_size: Width of the tokenizer.
        window: How far back recurrent states reach, for a model that has any.
        heads: On it, if there are any.
        mapped_vocab_size: Width of the target's vocabulary, where the model is a draft of another one.
        graphs: The largest step, where steps are recorded: a few are recorded to see what all of them take.
        tile_tokens: See :class:`ModelRunner`.

    Raises:
        ModelLoadError: The model cannot run such a step.
        torch.OutOfMemoryError: The device has no room for it.
    """
    devices = {parameter.device for parameter in loaded.model.parameters()} | {loaded.device}
    beside_bytes = process_bytes(loaded)
    with _measured(devices) as peaks:
        try:
            if loaded.opaque_state is not None:
                _run_whole(loaded, limits, max_model_len, vocab_size)
            else:
                runner = ModelRunner(
                    loaded,
                    num_blocks=1,
                    block_size=_BLOCK_SIZE,
                    vocab_size=vocab_size,
                    num_state_slots=1,
                    window=window,
                    tile_tokens=tile_tokens,
                )
                _run_steps(runner, limits, max_model_len, heads, mapped_vocab_size)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise ModelLoadError(f"{loaded.name} cannot run a step of the largest size: {reason}") from error
    graphs_bytes = 0 if graphs is None else _graphs_bytes(loaded, graphs, vocab_size, heads)
    num_samplers = 1 if mapped_vocab_size is None else 2
    peaks[loaded.device] = peaks.get(loaded.device, 0) + num_samplers * NOISE_CACHE_BYTES + graphs_bytes
    return StepMemory(peaks, beside_bytes, graphs_bytes)


def process_bytes(loaded: LoadedModel) -> int:
    """What this process takes and may come to take beside a model on a CPU; 0 where nothing tells, and on a GPU."""
    held_bytes = resident_bytes()
    if held_bytes is None or loaded.device.type != "cpu":
        return 0
    beside = max(0, held_bytes - loaded.weights_bytes - loaded.adapter_bytes)
    return beside + beside // _GROWTH_SHARE


def _run_steps(
    runner: ModelRunner,
    limits: StepLimits,
    max_model_len: int,
    heads: DraftHeads | None,
    mapped_vocab_size: int | None,
) -> None:
    """The chunk of a prompt, then rows that decide, of which as many are long as attention reads at once."""
    num_tokens = min(limits.max_num_batched_tokens, max_model_len)
    context = max_model_len - num_tokens
    if runner.loaded.device.type == "cpu":
        context = min(context, _MAX_CPU_CHUNK_CONTEXT)
    chunk = _row(runner, context, num_tokens, 1)
    runner.forward([chunk])
    if heads is not None:
        _draft(heads, runner, [chunk])
    num_rows = min(limits.max_num_seqs, limits.max_num_logits)
    num_logits = limits.max_num_logits
    counts = [num_logits // num_rows + (1 if i < num_logits % num_rows else 0) for i in range(num_rows)]
    counts = [min(count, max_model_len) for count in counts]
    num_long = _num_long_rows(runner, max_model_len)
    rows = [_row(runner, max_model_len - count if i < num_long else 0, count, count) for i, count in enumerate(counts)]
    logits = runner.forward(rows)
    _sample(logits, counts, runner.vocab_size)
    if mapped_vocab_size is not None:
        mapped = torch.zeros(num_rows, mapped_vocab_size, dtype=torch.float32, device=logits.device)
        _sample(mapped, [1] * num_rows, mapped_vocab_size)
    if heads is not None:
        _draft(heads, runner, rows)


def _graphs_bytes(loaded: LoadedModel, limits: ExecutorLimits, vocab_size: int, heads: DraftHeads | None) -> int:
    """What steps and chains take that are recorded, by a few; 0 for models of kinds that are not, and on a CPU.

    Raises:
        RecordedStepsError: Recording fails.
    """
    if loaded.device.type != "cuda" or loaded.opaque_state is not None:
        return 0
    if loaded.adapters is None:
        with suppress(ValueError):  # layers that are not found are not compiled
            merge_weights(layers_of(loaded.model))  # moves them, which may cost memory that the cache cannot have
    runner = ModelRunner(loaded, num_blocks=1, block_size=_BLOCK_SIZE, vocab_size=vocab_size, num_state_slots=1)
    runner.record_graphs(limits, is_trial=True)
    if runner.graphs_failure and runner.is_recordable:
        raise RecordedStepsError(runner.graphs_failure)
    if heads is None:
        recorded_chains(runner, Sampler(vocab_size))
    else:
        HeadChains.recorded(heads, runner, Sampler(vocab_size))
    runner.forget_graphs()
    num_bytes = runner.graphs_bytes
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return num_bytes


@torch.inference_mode()
def _draft(heads: DraftHeads, runner: ModelRunner, rows: list[RowInput]) -> None:
    """What heads make of a step, as far as their first logits."""
    ends = [end - 1 for end in accumulate(len(row.tokens) for row in rows)]
    if heads.cache_layers:
        inputs = [HeadInput(row.sequence, len(row.sequence) - len(row.tokens), row.tokens) for row in rows]
        features = runner.forward_heads(heads.forward, inputs, heads.fuse(runner.hidden))[ends]
    else:
        features = heads.fuse([state[ends] for state in runner.hidden])
    heads.logits(features, 0)


def _row(runner: ModelRunner, context: int, num_tokens: int, num_logits: int) -> RowInput:
    """New tokens after at most ``context`` tokens that seem to be cached, all of them in the cache's only block."""
    context -= context % _BLOCK_SIZE
    blocks = [0] * runner.pool.blocks_for(context + num_tokens)
    tables = tuple(list(blocks) for _ in runner.pool.groups)
    sequence = CachedSequence(TokenBuffer([0] * context), tables, salt=None, room=context + num_tokens)
    if runner.states is not None:
        sequence.state = SequenceState(0, max(0, context - runner.states.window.num_tokens), context)
    return RowInput(sequence, [0] * num_tokens, num_logits)


def _num_long_rows(runner: ModelRunner, max_model_len: int) -> int:
    """Rows of the longest context that fill what attention gathers at once; one more would change nothing."""
    layers = runner.loaded.attention_layers
    per_token = max((layer.num_key_heads * max(layer.key_dim, layer.value_dim) for layer in layers), default=1)
    return 1 + max_group_numbers(runner.loaded.device) // (per_token * max_model_len)


@torch.inference_mode()
def _run_whole(loaded: LoadedModel, limits: StepLimits, max_model_len: int, vocab_size: int) -> None:
    """The same of a model that keeps its own states: one row, read at once."""
    num_tokens = min(limits.max_num_batched_tokens, max_model_len)
    tokens = torch.zeros(1, num_tokens, dtype=torch.long, device=loaded.device)
    logits = loaded.model(input_ids=tokens, use_cache=False).logits[0, :, :vocab_size].float()
    _sample(logits, [1] * num_tokens, vocab_size)


@torch.inference_mode()
def warm_sampling(
    sampler: Sampler, no_logits: Callable[[int], torch.Tensor], limits: StepLimits, num_draft_tokens: int
) -> None:
    """Sample once in each way that has kernels of its own, in buffers of the largest size: none is compiled later.

    Args:
        sampler: Where it needs no kernels, nothing is done.
        no_logits: Gives logits of so many rows, laid out as those of steps.
        limits: The largest step.
        num_draft_tokens: Most draft tokens of a row.
    """
    logits = no_logits(2)
    if sampler.kernels(logits.device) is None:
        return
    num_rows = min(limits.max_num_logits, max_slice_rows(sampler.vocab_size))
    num_logits = 1 + num_draft_tokens
    for counts in ([num_logits] * max(1, num_rows // num_logits), [1] * min(num_rows, limits.max_num_seqs)):
        decide(sampler, no_logits(sum(counts)), _groups(_GREEDY, counts))
    for parts in product(*_WAYS):
        params = replace(_GREEDY, **{name: value for part in parts for name, value in part.items()})
        decide(sampler, logits, _groups(params, [2]))
        for num_guesses in 0, 1:
            rank_tokens(sampler, logits, _groups(params, [1, 1]), num_guesses)
    sampler.take_failures()


def _groups(params: SamplingParams, counts: list[int]) -> list[RowGroup]:
    """Sequences with so many rows each."""
    return [RowGroup(SequenceSpec(params, seed, 1, 1), (0,), (0,) * (n - 1)) for seed, n in enumerate(counts)]


def _sample(logits: torch.Tensor, counts: list[int], vocab_size: int) -> None:
    """Decide all rows, and report of them, as a step does for requests that ask for the most."""
    sampler = Sampler(vocab_size, noise_cache_bytes=0)
    groups = _groups(_LARGEST_SAMPLING, counts)
    decide(sampler, logits, groups)
    sampler.take_failures()  # random weights may well give NaNs


@contextmanager
def _measured(devices: set[torch.device]) -> Iterator[dict[torch.device, int]]:
    """By device, the most bytes that were held at once within, beyond those held before; there when it has ended."""
    peaks: dict[torch.device, int] = {}
    watches: list[tuple[torch.device, Callable[[], int]]] = [
        (device, _watch_cuda(device) if device.type == "cuda" else _watch_process())
        for device in devices
        if device.type in ("cuda", "cpu")
    ]
    yield peaks
    for device, growth in watches:
        peaks[device] = growth()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _watch_cuda(device: torch.device) -> Callable[[], int]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)

    def growth() -> int:
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    return growth


def _watch_process() -> Callable[[], int]:
    """How far the process's memory grows. Where its peak cannot be reset, only growth beyond an older peak is seen."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # see proc_pid_clear_refs(5)
    before = peak_resident_bytes()
    return lambda: max(0, peak_resident_bytes() - before)


def peak_resident_bytes() -> int:
    """Most memory that this process has held: since its start, or since its peak was reset."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes() -> int | None:
    """Memory that this process holds now; None where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return None
