"""Steps of fixed sizes: on a GPU each is recorded once, as a CUDA graph, and launched whole from then on.

The sizes are numbers of tokens, whichever rows they belong to. A step takes the least size that holds it, and its
last tokens are padding. On a CPU nothing is recorded: the same padded step runs operator by operator, so that what a
graph would compute can be tested there.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from specdec.cache.recurrent.opaque import SnapshotPool
from specdec.cache.recurrent.pool import StatePool
from specdec.core.errors import reason_of
from specdec.executor.derive import DerivedStep
from specdec.models.loading import LoadedModel

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Output = TypeVar("Output")

_SIZES = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)
_SIZE_STEP = 128
"""Beyond those sizes. A large step takes time in proportion to its tokens, so that padding costs as much as tokens."""
_MAX_CHAIN_LENGTH = 8
"""Of chains that are recorded. The passes of a longer chain are those of several launches."""
_NUM_WARMUPS = 2
"""Runs before a size is recorded: kernels are compiled and libraries take their workspaces in them."""


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """The largest step, for which memory is allocated at the start and then stays where it is.

    Attributes:
        max_rows: Most rows.
        max_tokens: Most tokens of all rows.
        max_length: Most positions of a sequence.
        max_draft_tokens: Most draft tokens of a row.
        has_trees: Whether drafts may be trees.
        num_extra_words: Room for what goes to the device along with a step; see :meth:`ModelRunner.forward`.
        num_chained_passes: Most passes of a chain; see :mod:`specdec.executor.chains`. 0 records none.
        num_guesses: Most other tokens that are ranked beside each of a chain.
        is_parallel: Whether all tokens of a chain come of its first pass, as PARD's do: a logit for each is wanted.
    """

    max_rows: int
    max_tokens: int
    max_length: int
    max_draft_tokens: int = 0
    has_trees: bool = False
    num_extra_words: int = 0
    num_chained_passes: int = 0
    num_guesses: int = 0
    is_parallel: bool = False

    @property
    def chain_lengths(self) -> tuple[int, ...]:
        """Numbers of passes that chains are recorded with, ascending: powers of two."""
        lengths = (1 << i for i in range(_MAX_CHAIN_LENGTH.bit_length()))
        return tuple(length for length in lengths if length <= self.num_chained_passes)

    @property
    def chain_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that chains are recorded with, ascending.

        A draft model is small, so that its time hardly depends on padding, and chains are many graphs.
        """
        sizes = self.graph_sizes
        return tuple(size for size in sizes if size.bit_count() == 1 or size == sizes[-1])

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that steps are recorded with, ascending: up to one for all rows with full drafts."""
        largest = min(self.max_tokens, self.max_rows * (1 + self.max_draft_tokens))
        sizes = (*_SIZES, *range(_SIZES[-1] + _SIZE_STEP, largest + _SIZE_STEP, _SIZE_STEP))
        return tuple(size for i, size in enumerate(sizes) if not i or sizes[i - 1] < largest)


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass over N tokens gives; on the device. What a graph gives is good until the next one is launched.

    Attributes:
        step: What was made of the input.
        logits: [M, model's vocabulary], of the tokens whose logits are wanted: all N in a graph.
        finite_tokens: bool [N], whether each token's hidden state is finite.
        finite_logits: bool [M], whether each row's largest logit is.
        hidden: [N, hidden size] each, what is noted for heads that draft.
    """

    step: DerivedStep
    logits: Tensor
    finite_tokens: Tensor
    finite_logits: Tensor
    hidden: tuple[Tensor, ...] = ()


class Graphs(Generic[Key, Output]):
    """Functions without arguments that are recorded by what they are for, and launched.

    Args:
        run: Computes what a key names, of an input that is on the device; it may neither wait for the device nor copy
            to it.
        device: Where it runs.

    Attributes:
        num_bytes: Memory of the device that recording took; after a trial, about what it would take.
    """

    def __init__(self, run: Callable[[Key], Output], device: torch.device) -> None:
        self._run, self._device = run, device
        self.num_bytes = 0
        self._keys: tuple[Key, ...] = ()
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Output]] = {}

    def record(self, keys: Sequence[Key], is_trial: bool = False) -> str:
        """Record every key, the largest first: the others find their memory in its pool.

        Args:
            keys: What is recorded, the largest last.
            is_trial: Record the two largest alone and forget them, to see what memory all would take: the first takes
                what all share, and the second what each further one takes by itself.

        Returns:
            Why the model cannot be recorded, for example because it waits for the device; empty if it was.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # as a capture does: what that frees is not the graphs'
            before, _ = torch.cuda.mem_get_info(self._device)
            try:
                with torch.cuda.device(self._device), torch.inference_mode():
                    if is_trial:
                        self.num_bytes = self._try(keys)
                    else:
                        self._record(keys)
                        for graph, _ in self._graphs.values():
                            graph.replay()  # takes what memory it still needs, and shows that it can be launched
            except Exception as error:  # of the model's code, a library, or a compiler of kernels
                logger.info("A step cannot be recorded", exc_info=True)
                self._forget()
                return f"its step cannot be recorded: {reason_of(error)}"
            if is_trial:
                self._forget()
                return ""
            torch.cuda.synchronize(self._device)
            self.num_bytes = max(0, before - torch.cuda.mem_get_info(self._device)[0])
        self._keys = tuple(keys)
        return ""

    def _try(self, keys: Sequence[Key]) -> int:
        """Memory that all keys take, by that of the two largest."""
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        taken = list[int]()
        for key in reversed(keys[-2:]):
            before, _ = torch.cuda.mem_get_info(self._device)
            self._record([key], stream, pool)
            self._graphs[key][0].replay()
            torch.cuda.synchronize(self._device)
            taken.append(max(0, before - torch.cuda.mem_get_info(self._device)[0]))
        if len(taken) == 1:
            return taken[0]
        num_others = sum(map(self._num_passes, keys[:-1])) / self._num_passes(keys[-2])
        return taken[0] + round(num_others * taken[1])

    def _num_passes(self, key: Key) -> int:
        """Passes of the model in a graph, in proportion to which it takes memory of its own."""
        return 1

    def _forget(self) -> None:
        self._graphs.clear()
        self._forget_kept()
        torch.cuda.empty_cache()

    def _record(self, keys: Sequence[Key], stream: torch.cuda.Stream | None = None, pool: Any = None) -> None:
        stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        pool = pool or torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        for key in reversed(keys):
            with torch.cuda.stream(stream):
                for _ in range(_NUM_WARMUPS):
                    self._run(key)
            graph, failure = torch.cuda.CUDAGraph(), None
            try:
                # Other threads of the process may copy and allocate meanwhile.
                with (
                    _no_garbage_collection(),
                    torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
                ):
                    try:
                        output = self._keep(self._run(key))
                    except Exception as error:
                        failure = error
                        raise
            except Exception as error:
                # To end a capture that has failed fails too, which leaves its stream the current one.
                torch.cuda.set_stream(current)
                _end_allocation(pool)
                raise (failure or error) from None
            self._graphs[key] = graph, output
        current.wait_stream(stream)

    def _keep(self, output: Output) -> Output:
        """What stays of an output when the next key is recorded."""
        return output

    def _forget_kept(self) -> None:
        """Free what :meth:`_keep` has taken."""

    def launch(self, key: Key) -> Output:
        """Put what a key names in the device's queue.

        Args:
            key: One that is recorded.
        """
        if self._device.type != "cuda":
            return self._run(key)
        graph, output = self._graphs[key]
        graph.replay()
        return output


class StepGraphs(Graphs[int, PassOutput]):
    """The passes of each size, by their numbers of tokens. For arguments see :class:`Graphs`."""

    def __init__(self, run: Callable[[int], PassOutput], device: torch.device) -> None:
        super().__init__(run, device)
        self._kept: tuple[Tensor, ...] = ()

    def _keep(self, output: PassOutput) -> PassOutput:
        """Copy what is large into memory that all sizes share; what a graph has allocated is free for the next one."""
        large = (output.logits, *output.hidden)
        if not self._kept:
            self._kept = tuple(map(torch.empty_like, large))  # the first size is the largest
        kept = [to[: len(of)].copy_(of) for to, of in zip(self._kept, large, strict=True)]
        return replace(output, logits=kept[0], hidden=tuple(kept[1:]))

    def _forget_kept(self) -> None:
        self._kept = ()

    def size_for(self, num_tokens: int, num_logits: int) -> int | None:
        """The least size that holds a step.

        None where it is too large, or large and so much of it a prompt that the vocabulary head of all its tokens
        would cost more than launching its operators.

        Args:
            num_tokens: Of the step.
            num_logits: How many of them want logits.
        """
        if num_tokens > _SIZES[-1] and 2 * num_logits < num_tokens:
            return None
        return next((size for size in self._keys if size >= num_tokens), None)


def unrecordable(loaded: LoadedModel, kernel: str, states: StatePool | SnapshotPool | None) -> str:
    """What of a model cannot be in a graph; empty if nothing.

    Args:
        loaded: The model.
        kernel: How attention reads the cache.
        states: Its recurrent states.
    """
    if loaded.opaque_state is not None:
        return "its recurrent state can only be copied"
    if isinstance(states, StatePool) and states.kernels is None:
        return "its recurrent layers have kernels for a GPU and Triton only"
    if any(layer.is_latent for layer in loaded.attention_layers):
        return "it expands what it caches"
    if len({parameter.device for parameter in loaded.model.parameters()}) > 1:
        return "it is on several devices"
    if kernel == "gather" and loaded.device.type != "cpu":
        return "its attention kernel reads sizes back"
    return ""


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Within a capture no garbage is collected: to destroy another graph is a call that ends the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _end_allocation(pool: tuple[int, int]) -> None:
    """Tell the allocator that a capture is over which has failed: before torch 2.12 it is not told, and frees nothing.

    See github.com/pytorch/pytorch/pull/180395.
    """
    with suppress(RuntimeError):  # it knows
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
