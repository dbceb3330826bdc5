"""From a model's name to a backend that verifies or drafts; the same for every process that holds a model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

from specdec.cache.recurrent.slots import DEFAULT_WINDOW_TOKENS
from specdec.checkpoint.compat import check_width
from specdec.checkpoint.fingerprint import optional_version
from specdec.core.drafts import MAX_TREE_TOKENS
from specdec.core.errors import MemoryPlanError, ModelLoadError, RecordedStepsError
from specdec.core.params import LogprobsMode
from specdec.core.types import Progress, Tokens
from specdec.drafting.heads import DraftHeads, HeadDrafter, HeadsOptions, load_heads
from specdec.engine.drafter import ModelDrafter, VocabularyMapper
from specdec.engine.recorded_check import check_decisions, check_recorded_chains, check_recorded_steps
from specdec.engine.sequences import SequenceStates
from specdec.engine.shares import on_one_gpu
from specdec.engine.target import ModelTarget
from specdec.engine.warmup import StepLimits, measure_step, process_bytes, warm_sampling
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.openvino.checks import BLOCK_SIZE
from specdec.executor.runner import ModelRunner
from specdec.executor.snapshot_runner import SnapshotRunner
from specdec.executor.unsplit import no_unsplit_reason, use_unsplit_products
from specdec.models.describe import describe_model, describe_pair
from specdec.models.loading import LoadedModel, ModelSource, allocation, load_model, load_tokenizer
from specdec.models.memory import (
    NUM_BRANCH_SLOTS,
    MemoryPlan,
    StepMemory,
    check_host_memory,
    free_unused,
    pair_shares,
    plan_memory,
    window_for,
)
from specdec.models.parity_check import (
    NUM_CHECKED_ROWS,
    NUM_CHECKED_TOKENS,
    AdmissionReport,
    check_admission,
    check_bits,
    no_strict_reason,
)
from specdec.sampling.pipeline import LogitsProcessor, Sampler
from specdec.structured.compiler import Grammars

logger = logging.getLogger(__name__)

B = TypeVar("B")

CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
"""Tokens of a forward pass that keep a device busy, and no more: others wait for no more than one chunk of a prompt."""

NUM_CHAINED_PASSES = 4
"""Draft tokens of a row in a step of recorded passes. What the target says meanwhile waits until its end."""
_NUM_GUESSES = 12
"""Other tokens that are ranked beside each in recorded chains: as many as branches are begun with, as a rule."""
CPU_KV_FRACTION = 0.25
"""Part of a machine's free memory that the cache may take: others need it too."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Built:
    """A model made ready, and what was found about it.

    Attributes:
        admission: None where the check was skipped.
        notes: What whoever runs the service should know of it, a sentence each.
        heads: On it; None for none.
        numeric: Hash of its logits (rule 17); empty if it is not strict.
    """

    loaded: LoadedModel
    runner: ModelRunner
    memory: MemoryPlan
    admission: AdmissionReport | None
    notes: tuple[str, ...] = ()
    heads: DraftHeads | None = None
    numeric: str = ""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How a model is run.

    Attributes:
        max_model_len: Longest sequence in tokens; None takes the model's own.
        vocab_size: Width of the tokenizer (its highest token id and one); logits beyond it are padding. None takes all.
        block_size: Tokens in a block of the paged cache.
        max_num_batched_tokens: Most tokens in one forward pass; None chooses by device.
        kv_cache_memory: Memory for cached keys and values: ``auto``, a fraction of what is free, or bytes.
        max_num_seqs: Most sequences in one forward pass; the cache need not hold more whole sequences.
        gpu_memory_utilization: Part of a GPU that may be used; allocators leave gaps. For ``auto`` memory.
        device_share: Part of a GPU that is this model's, where several models share it; for ``auto`` memory. None is
            all of it; a pair that :class:`specdec.engine.engine.SpeculativeEngine` loads onto one GPU has equal shares.
        rollback_tokens: How many tokens recurrent states can be brought back for sure without reading anew; a draft to
            be verified is no longer. A drafter that runs ahead of the target needs twice a draft's length and 1.
        skip_parity_check: Serve a model without comparing its cached forward with its plain one.
        num_step_tokens: Tokens that a draft model gives in one pass, at most; more than one where it was taught to:
            see :func:`specdec.checkpoint.parallel_drafting.step_tokens`.
        other_vocabulary: Whether a draft may have a vocabulary that is not its target's; shared tokens are drafted.
        logits_processors: Hooks that may change the logits of every position, drafted or not, before it is sampled.
        heads: Heads on a target, which draft for it; None for none.
        measures_step: Whether a step of the largest size is run at the start, so that the memory it takes is known.
        executor: ``graphs`` records steps as CUDA graphs (on a CPU it pads them likewise, to test with), ``eager``
            launches operators one by one, and ``auto`` records on a GPU. What is recorded is checked against operators:
            if it fails, or is wrong, ``auto`` loads the model anew and runs operators, and ``graphs`` raises.
        eager_reason: Why operators are run in place of recorded steps, for the model's notes.
        dependent_launches: See :class:`~specdec.executor.runner.ModelRunner`.
        max_draft_tokens: Most draft tokens of a sequence that recorded steps have room for.
        strict_tile_tokens: Run steps as passes of so many tokens, and see at the start that a token's logits then have
            the same bits in every step. With 0, on a GPU, a step is one pass whose products split nothing. None runs a
            step as one pass.
        logprobs_mode: vLLM's: which log probabilities of output tokens are reported.
    """

    max_model_len: int | None = None
    vocab_size: int | None = None
    block_size: int = 16
    max_num_batched_tokens: int | None = None
    kv_cache_memory: Literal["auto"] | float | int = "auto"
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    device_share: float | None = None
    rollback_tokens: int = DEFAULT_WINDOW_TOKENS
    skip_parity_check: bool = False
    num_step_tokens: int = 1
    other_vocabulary: bool = False
    logits_processors: tuple[LogitsProcessor, ...] = ()
    heads: HeadsOptions | None = None
    measures_step: bool = True
    executor: Literal["auto", "graphs", "eager"] = "auto"
    eager_reason: str = ""
    dependent_launches: bool = False
    max_draft_tokens: int = 0
    strict_tile_tokens: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"


def build_target(
    source: ModelSource, options: BackendOptions, progress: Progress | None = None
) -> tuple[ModelTarget, Built]:
    """Load a model and make a target of it.

    Raises:
        ModelLoadError: It cannot be loaded or served exactly.
        MemoryPlanError: Its cache cannot hold one sequence.
    """
    return _recorded_or_eager(lambda own: _build_target(source, own, progress), source, options)


def _recorded_or_eager(build: Callable[[BackendOptions], B], source: ModelSource, options: BackendOptions) -> B:
    """Build with recorded steps; where these are wrong, build anew without them, with a memory plan of its own."""
    try:
        return build(options)
    except RecordedStepsError as error:
        if options.executor == "graphs":
            raise
        reason = str(error)
    free_unused()  # out of the handler, which held the model
    logger.warning("%s runs operator by operator: %s", source.path, reason)
    return build(replace(options, executor="eager", eager_reason=reason))


def _build_target(source: ModelSource, options: BackendOptions, progress: Progress | None) -> tuple[ModelTarget, Built]:
    built = _build(source, options, options.max_model_len, progress)
    sampler = make_sampler(source, built.runner.vocab_size, built.loaded.eos_token_ids, options)
    heads, most_draft_tokens = None, options.max_draft_tokens
    if options.heads is not None:
        most_draft_tokens = max(most_draft_tokens, options.heads.tree_tokens)
    if built.heads is not None and options.heads is not None:
        most = options.heads.most_tokens
        heads = HeadDrafter(built.heads, built.runner, sampler, most, options.heads.tree_tokens)
    num_batched_tokens = _max_num_batched_tokens(built.loaded, options)
    limits = StepLimits(options.max_num_seqs, num_batched_tokens)
    warm_sampling(sampler, built.runner.no_logits, limits, most_draft_tokens)
    if built.runner.is_recorded:
        check_recorded_steps(built.runner)
        check_decisions(sampler, built.runner.output_device)
    backend = ModelTarget(
        built.runner,
        sampler,
        max_model_len=built.memory.max_model_len,
        max_num_batched_tokens=num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        heads=heads,
    )
    return backend, built


def pair_gpu_shares(target: ModelSource, draft: ModelSource, share: float = 1.0) -> tuple[float, float]:
    """Parts of a GPU for both models of a pair in this process, of what the process has of it.

    All of it for each where the two do not meet on a GPU.
    """
    if not torch.cuda.is_available() or not on_one_gpu(target, draft):
        return share, share
    return pair_shares(target, draft, torch.cuda.mem_get_info()[1], share)


def build_drafter(
    source: ModelSource,
    options: BackendOptions,
    target: ModelSource,
    progress: Progress | None = None,
    *,
    has_branches: bool = True,
) -> tuple[ModelDrafter, Built]:
    """Load a model and make a drafter of it.

    A draft model that reads less than ``options.max_model_len`` drafts as far as it reads; one that reads more than its
    target needs no cache for it. One that drafts no branches (``has_branches``) needs no room for them. Raises like
    :func:`build_target`, and:

    Raises:
        IncompatiblePairError: It cannot draft for the target.
    """
    return _recorded_or_eager(lambda own: _build_drafter(source, own, target, progress, has_branches), source, options)


def _build_drafter(
    source: ModelSource, options: BackendOptions, target: ModelSource, progress: Progress | None, has_branches: bool
) -> tuple[ModelDrafter, Built]:
    pair = describe_pair(
        target, source, other_vocabulary=options.other_vocabulary, num_step_tokens=options.num_step_tokens
    )
    if progress is not None:
        for note in pair.notes:
            progress(note)
    most_draft_tokens = options.max_draft_tokens
    options = replace(
        options,
        vocab_size=pair.draft_vocab_size,
        heads=None,
        num_step_tokens=pair.step_tokens.count,
        max_draft_tokens=pair.step_tokens.count,  # behind a draft that was kept whole a row reads two tokens
        strict_tile_tokens=None,  # whatever it drafts, the target decides
    )
    if options.max_model_len is None and pair.mapping is None:
        options = replace(options, max_model_len=describe_model(target).max_model_len)
    mapped = None if pair.mapping is None else pair.vocab_size
    num_branches = NUM_BRANCH_SLOTS if has_branches else 0
    is_parallel = options.num_step_tokens > 1
    # A draft model in its target's process waits for nothing meanwhile.
    num_passes = NUM_CHAINED_PASSES if has_branches else max(NUM_CHAINED_PASSES, most_draft_tokens)
    built = _build(
        source,
        options,
        None,
        progress,
        num_branches=num_branches,
        mapped_vocab_size=mapped,
        num_chained_passes=0 if mapped is not None else options.num_step_tokens if is_parallel else num_passes,
    )
    runner, states = built.runner, SequenceStates(built.runner)
    lengths: dict[str, Any] = {
        "max_model_len": built.memory.max_model_len,
        "max_num_batched_tokens": _max_num_batched_tokens(built.loaded, options),
    }
    if pair.mapping is None:
        mapper, sampler = None, make_sampler(source, built.runner.vocab_size, built.loaded.eos_token_ids, options)
    else:
        mapper = VocabularyMapper(pair.mapping)
        sampler = make_sampler(target, pair.vocab_size, describe_model(target).eos_token_ids, options)

    def no_logits(num_rows: int) -> torch.Tensor:
        logits = runner.no_logits(num_rows)
        return logits if mapper is None else mapper.logits(logits)

    limits = StepLimits(options.max_num_seqs + num_branches, lengths["max_num_batched_tokens"])
    warm_sampling(sampler, no_logits, limits, 0)
    drafter = ModelDrafter(
        runner,
        sampler,
        states=states,
        max_num_seqs=options.max_num_seqs + num_branches,
        mapper=mapper,
        mask_token_id=pair.step_tokens.mask_token_id,
        num_step_tokens=pair.step_tokens.count,
        num_chained_passes=num_passes if runner.is_recorded else 1,
        **lengths,
    )
    if runner.is_recorded:
        check_recorded_chains(drafter, runner, limits.max_num_seqs, check_recorded_steps(runner))
        check_decisions(sampler, runner.output_device)
    return drafter, built


def make_sampler(source: ModelSource, vocab_size: int, eos_token_ids: Tokens, options: BackendOptions) -> Sampler:
    """From logits to tokens; grammars are taken where the model has a tokenizer that can be compiled for."""
    try:
        grammars = Grammars(load_tokenizer(source), vocab_size, eos_token_ids)
    except (ModelLoadError, ValueError) as error:
        logger.info("%s takes no grammars: %s", source.path, error)
        grammars = None
    is_processed = options.logprobs_mode == "processed_logprobs"
    return Sampler(vocab_size, options.logits_processors, grammars=grammars, processed_logprobs=is_processed)


def _build(
    source: ModelSource,
    options: BackendOptions,
    max_model_len: int | None,
    progress: Progress | None,
    num_branches: int = 0,
    mapped_vocab_size: int | None = None,
    num_chained_passes: int = 0,
) -> Built:
    """Load and check a model; without a ``max_model_len`` of its own it reads what it can of the options'.

    A step has at most ``num_branches`` rows beside those of the sequences. A draft whose vocabulary is not the target's
    has logits in the target's as well, ``mapped_vocab_size`` wide.
    """
    is_openvino = source.engine == "openvino"
    if is_openvino:
        options = replace(options, block_size=BLOCK_SIZE, executor="eager", measures_step=False)
        optional_version("openvino")
    check_host_memory(source)
    loaded = load_model(source, progress)
    reason = "" if options.strict_tile_tokens is None else no_strict_reason(loaded)
    if options.strict_tile_tokens == 0:
        reason = reason or no_unsplit_reason(loaded)
    if reason:
        raise ModelLoadError(f"exactness: strict is not possible with {loaded.name}: {reason}")
    heads: DraftHeads | None = None
    if options.heads is not None:
        loaded, heads = load_heads(options.heads, loaded)
        num_chained_passes = min(options.heads.num_chained_tokens, heads.num_tokens or sys.maxsize)
    vocab_size = options.vocab_size or loaded.vocab_size
    check_width(loaded.name, loaded.vocab_size, vocab_size)
    length = max_model_len or min(options.max_model_len or loaded.max_model_len, loaded.max_model_len)
    limits = _executor_limits(loaded, length, options, num_branches, num_chained_passes)
    if options.strict_tile_tokens == 0:
        if limits is None:
            reason = options.eager_reason or "set executor: graphs"
            raise ModelLoadError(f"{loaded.name}: strict_tile_tokens: 0 needs recorded steps: {reason}")
        with allocation(MemoryPlanError, f"the products of {loaded.name} that are compared do not fit"):
            use_unsplit_products(loaded, limits.graph_sizes)
    copies = None
    if is_openvino:  # which has a copy of them, laid out for its products
        copied = {loaded.device: loaded.weights_bytes}
        copies = StepMemory(copied, process_bytes(loaded), copy_bytes=loaded.weights_bytes)
    num_rows = options.max_num_seqs + num_branches
    memory = _planned(loaded, length, vocab_size, heads, options, num_rows, mapped_vocab_size, limits, copies)
    if progress is not None and not options.skip_parity_check:
        progress(f"checking the cached forward of {loaded.name}")
    sizes = f"{loaded.weights_bytes / _MIB:,.1f} MiB of weights and {memory.cache_bytes / _MIB:,.1f} MiB of cache"
    with allocation(MemoryPlanError, f"{sizes} of {loaded.name} do not fit into the memory of {loaded.device}"):
        if is_openvino:
            runner, admission = _admitted_openvino(source, loaded, memory, vocab_size, options)
        else:
            runner, admission = _admitted(loaded, memory, vocab_size, options, limits)
        numeric = "" if options.strict_tile_tokens is None else check_bits(runner)
    notes = (*_notes(runner, options), *_memory_notes(loaded.name, memory))
    if progress is not None:
        for note in (*notes, f"memory of {loaded.name}: {memory.describe()}"):
            progress(note)
    return Built(loaded, runner, memory, admission, notes, heads, numeric)


def _planned(
    loaded: LoadedModel,
    length: int,
    vocab_size: int,
    heads: DraftHeads | None,
    options: BackendOptions,
    max_num_rows: int,
    mapped_vocab_size: int | None,
    graphs: ExecutorLimits | None,
    step: StepMemory | None,
) -> MemoryPlan:
    """Memory for weights, for the cache, and beside them for ``step``, or for a measured one and recorded steps."""
    window = window_for(loaded, options.rollback_tokens)
    if options.measures_step:
        limits = StepLimits(max_num_rows, _max_num_batched_tokens(loaded, options))
        what = f"{loaded.name} and a step of max_num_batched_tokens ({limits.max_num_batched_tokens})"
        with allocation(MemoryPlanError, f"{what} do not fit into the memory of {loaded.device}"):
            step = measure_step(
                loaded,
                limits,
                max_model_len=length,
                vocab_size=vocab_size,
                window=window,
                heads=heads,
                mapped_vocab_size=mapped_vocab_size,
                graphs=graphs,
                tile_tokens=options.strict_tile_tokens,
            )
    budget_bytes, fraction = _cache_room(loaded, options, step)
    try:
        return plan_memory(
            loaded,
            budget_bytes=budget_bytes,
            fraction=fraction,
            max_model_len=length,
            max_num_seqs=options.max_num_seqs,
            max_step_tokens=_max_num_batched_tokens(loaded, options),
            block_size=options.block_size,
            window=window,
            step=step,
            is_bounded=options.kv_cache_memory == "auto" and loaded.device.type == "cpu",
        )
    except MemoryPlanError as error:
        if options.kv_cache_memory != "auto" or loaded.device.type != "cuda" or options.device_share in (None, 1):
            raise
        raise MemoryPlanError(
            f"{error} (its share of the GPU is {options.device_share:g}; kv_cache_memory can name more)"
        ) from error


def _admitted(
    loaded: LoadedModel,
    memory: MemoryPlan,
    vocab_size: int,
    options: BackendOptions,
    graphs: ExecutorLimits | None,
) -> tuple[ModelRunner, AdmissionReport | None]:
    """A runner that gives what the plain model gives, the fastest there is; the check is of recorded steps."""
    slots = max(1, memory.num_state_slots)
    common: dict[str, Any] = {"num_blocks": memory.num_blocks, "block_size": memory.block_size}
    common |= {"vocab_size": vocab_size, "num_state_slots": slots}
    if loaded.opaque_state is None:
        runner = ModelRunner(
            loaded,
            window=memory.window,
            window_blocks=memory.window_blocks,
            tile_tokens=options.strict_tile_tokens,
            dependent_launches=options.dependent_launches,
            **common,
        )
        if graphs is not None:
            # Which kernels Inductor takes it finds out by timing them: another process may take others.
            is_compiled = loaded.device.type == "cuda" and not runner.is_strict
            runner.record_graphs(graphs, "inductor" if is_compiled else None)
            if runner.graphs_failure and runner.is_recordable:
                raise RecordedStepsError(f"{loaded.name}: {runner.graphs_failure}")
        return runner, None if options.skip_parity_check else check_admission(runner)
    if not options.skip_parity_check:
        with suppress(ModelLoadError):
            runner = SnapshotRunner(loaded, reads_many=True, window_tokens=options.rollback_tokens, **common)
            return runner, check_admission(runner)
    runner = SnapshotRunner(loaded, reads_many=False, window_tokens=options.rollback_tokens, **common)
    return runner, None if options.skip_parity_check else check_admission(runner)


def _admitted_openvino(
    source: ModelSource, loaded: LoadedModel, memory: MemoryPlan, vocab_size: int, options: BackendOptions
) -> tuple[ModelRunner, AdmissionReport | None]:
    """The same with OpenVINO."""
    try:
        from specdec.executor.openvino.runner import OpenVINORunner
    except ImportError as error:  # of another version
        what = f"engine: openvino does not run with OpenVINO {optional_version('openvino')}"
        raise ModelLoadError(f"{what}: pip install 'specdec-serve[openvino]' brings one that does: {error}") from error
    runner = OpenVINORunner(
        loaded, num_blocks=memory.num_blocks, vocab_size=vocab_size, quantization=source.quantization
    )
    return runner, None if options.skip_parity_check else check_admission(runner)


_SAMPLING_WORDS, _MOST_EXTRA_WORDS = 64, 1 << 20
"""What sampling needs to know of a row, in int32 words, as a rule; and what is sent along with a step, at most: steps
with more are sent it by themselves."""


def _executor_limits(
    loaded: LoadedModel, max_model_len: int, options: BackendOptions, num_branches: int, num_chained_passes: int
) -> ExecutorLimits | None:
    """The largest step, where steps are to be recorded; it holds those of the check, too."""
    if options.executor == "eager" or (options.executor == "auto" and loaded.device.type != "cuda"):
        return None
    if options.strict_tile_tokens:
        return None  # a step is several passes then
    tree_tokens = 0 if options.heads is None else options.heads.tree_tokens
    max_draft_tokens = max(options.max_draft_tokens, tree_tokens)
    max_rows = max(NUM_CHECKED_ROWS, options.max_num_seqs + num_branches)
    num_row_words = _SAMPLING_WORDS + -(-loaded.vocab_size // 32)  # with a mask of its grammar
    return ExecutorLimits(
        max_rows=max_rows,
        max_tokens=max(NUM_CHECKED_TOKENS, _max_num_batched_tokens(loaded, options)),
        max_length=max(NUM_CHECKED_TOKENS, max_model_len + MAX_TREE_TOKENS),  # a tree's tokens lie one after another
        max_draft_tokens=max_draft_tokens,
        has_trees=options.heads is not None,
        num_extra_words=min(_MOST_EXTRA_WORDS, max_rows * (1 + max_draft_tokens) * num_row_words),
        num_chained_passes=num_chained_passes,
        num_guesses=_NUM_GUESSES if num_branches else 0,
        is_parallel=options.num_step_tokens > 1,
    )


def _notes(runner: ModelRunner, options: BackendOptions) -> tuple[str, ...]:
    notes, name = [], runner.loaded.name
    if not runner.shares_prefixes:
        notes.append(f"{name}: prefixes are not shared, prompts that begin alike are read anew")
    if isinstance(runner, SnapshotRunner):
        notes.append(f"{name} keeps a state that can only be copied: its sequences are read one after another")
    if runner.no_speculation is not None:
        notes.append(f"{name} is right token by token only: as a target it runs without speculation")
    notes += [f"{name} is slow: {reason}" for reason in slow_reasons(runner.loaded)]
    notes += [f"{name}: {reason}" for reason in runner.slow_reasons]
    if no_graphs := runner.graphs_failure or options.eager_reason:
        notes.append(f"{name} runs without CUDA graphs: {no_graphs}")
    elif runner.compile_failure:
        notes.append(f"{name} runs without compiled layers: {runner.compile_failure}")
    if options.skip_parity_check:
        notes.append(f"{name} was not checked: nobody knows that its cached forward equals its plain one")
    return tuple(notes)


def slow_reasons(loaded: LoadedModel) -> Iterator[str]:
    """Why a model cannot be fast whichever way its steps are run."""
    if any(layer.is_latent for layer in loaded.attention_layers):
        yield "in every step each layer expands all that it caches"
    if len({parameter.device for parameter in loaded.model.parameters()}) > 1:
        yield "its devices compute one after another, at the speed of one"


def _memory_notes(name: str, memory: MemoryPlan) -> Iterator[str]:
    if memory.total_bytes > memory.available_bytes:
        yield (
            f"{name} may take more memory than there is: lower kv_cache_memory, max_model_len or max_num_batched_tokens"
        )


def _cache_room(
    loaded: LoadedModel, options: BackendOptions, step: StepMemory | None = None
) -> tuple[int | None, float]:
    """Bytes for the cache; None where they are the fraction beside it of what is free on each of its devices."""
    wanted, share = options.kv_cache_memory, options.device_share or 1.0
    if isinstance(wanted, int):
        return wanted, 1.0
    if isinstance(wanted, float):
        return None, wanted
    if loaded.device.type != "cuda":
        return None, CPU_KV_FRACTION
    if len({parameter.device for parameter in loaded.model.parameters()}) > 1:
        return None, options.gpu_memory_utilization * share
    free_bytes, total_bytes = torch.cuda.mem_get_info(loaded.device)
    step_bytes = 0 if step is None else step.activation_bytes.get(loaded.device, 0)
    held_bytes = loaded.weights_bytes + loaded.adapter_bytes + step_bytes
    return gpu_budget_bytes(
        total_bytes * share, free_bytes, held_bytes, step_bytes, options.gpu_memory_utilization
    ), 1.0


def gpu_budget_bytes(
    share_bytes: float, free_bytes: int, held_bytes: int, step_bytes: int = 0, utilization: float = 0.9
) -> int:
    """Bytes for a model's cache on a GPU: what its own weights and step leave of its share, as far as that is free.

    Whoever loads first must not take what the other models on the device were promised.

    Args:
        share_bytes: Of the GPU's memory what is this model's.
        free_bytes: Nobody's so far; weights are there already.
        held_bytes: Weights, adapters and a step.
        step_bytes: A step.
        utilization: Part of the memory that may be used.
    """
    return int(max(0.0, min(utilization * share_bytes - held_bytes, utilization * free_bytes - step_bytes)))


def _max_num_batched_tokens(loaded: LoadedModel, options: BackendOptions) -> int:
    return options.max_num_batched_tokens or CHUNK_TOKENS[loaded.device.type]
