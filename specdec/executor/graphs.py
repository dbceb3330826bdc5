"""Steps of fixed sizes: on a GPU each is recorded once, as a CUDA graph, and launched whole from then on.

The sizes are numbers of tokens, whichever rows they belong to. A step takes the least size that holds it, and its
last tokens are padding. On a CPU nothing is recorded: the same padded step runs operator by operator, so that what a
graph would compute can be tested there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.core.errors import reason_of
from specdec.executor.derive import DerivedStep

logger = logging.getLogger(__name__)

_SIZES = (16, 32, 64, 128, 256, 512)
_SIZE_STEP = 256
"""Beyond those sizes: so that at most a third of a step is padding, in as few graphs as that takes."""
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
    """

    max_rows: int
    max_tokens: int
    max_length: int
    max_draft_tokens: int = 0
    has_trees: bool = False
    num_extra_words: int = 0

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


class StepGraphs:
    """The passes of each size.

    Args:
        run: Runs a pass over so many tokens, whose input is on the device; it may neither wait for the device nor
            copy to it.
        device: Where it runs.

    Attributes:
        num_bytes: Memory of the device that recording took.
    """

    def __init__(self, run: Callable[[int], PassOutput], device: torch.device) -> None:
        self._run, self._device = run, device
        self.num_bytes = 0
        self._sizes: tuple[int, ...] = ()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, PassOutput]] = {}
        self._kept: tuple[Tensor, ...] = ()

    def record(self, sizes: Sequence[int]) -> str:
        """Record every size, the largest first: the others find their memory in its pool.

        Args:
            sizes: Numbers of tokens, ascending.

        Returns:
            Why the model cannot be recorded, for example because it waits for the device; empty if it was.
        """
        if self._device.type == "cuda":
            before, _ = torch.cuda.mem_get_info(self._device)
            try:
                with torch.cuda.device(self._device), torch.inference_mode():
                    self._record(sizes)
                    for graph, _ in self._graphs.values():
                        graph.replay()  # takes what memory it still needs, and shows that it can be launched
            except Exception as error:  # of the model's code, a library, or a compiler of kernels
                logger.info("A step cannot be recorded", exc_info=True)
                self._graphs.clear()
                self._kept = ()
                torch.cuda.empty_cache()
                return f"its step cannot be recorded: {reason_of(error)}"
            torch.cuda.synchronize(self._device)
            self.num_bytes = max(0, before - torch.cuda.mem_get_info(self._device)[0])
        self._sizes = tuple(sizes)
        return ""

    def _record(self, sizes: Sequence[int]) -> None:
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        for size in reversed(sizes):
            with torch.cuda.stream(stream):
                for _ in range(_NUM_WARMUPS):
                    self._run(size)
            graph, failure = torch.cuda.CUDAGraph(), None
            try:
                # Other threads of the process may copy and allocate meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    try:
                        output = self._keep(self._run(size))
                    except Exception as error:
                        failure = error
                        raise
            except Exception as error:
                # To end a capture that has failed fails too, which leaves its stream the current one.
                torch.cuda.set_stream(current)
                raise (failure or error) from None
            self._graphs[size] = graph, output
        current.wait_stream(stream)

    def _keep(self, output: PassOutput) -> PassOutput:
        """Copy what is large into memory that all sizes share; what a graph has allocated is free for the next one."""
        large = (output.logits, *output.hidden)
        if not self._kept:
            self._kept = tuple(map(torch.empty_like, large))  # the first size is the largest
        kept = [to[: len(of)].copy_(of) for to, of in zip(self._kept, large, strict=True)]
        return replace(output, logits=kept[0], hidden=tuple(kept[1:]))

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
        return next((size for size in self._sizes if size >= num_tokens), None)

    def launch(self, size: int) -> PassOutput:
        """Put a pass in the device's queue.

        Args:
            size: As :meth:`size_for` gives it.
        """
        if self._device.type != "cuda":
            return self._run(size)
        graph, output = self._graphs[size]
        graph.replay()
        return output
