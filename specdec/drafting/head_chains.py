"""Drafts of heads in one launch: their passes, and what is drawn between these, are recorded as a model's chains are.

A head that caches nothing reads no token of its draft: each of its passes gives the next place's logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.tokens import as_list
from specdec.executor.chains import Chosen, num_chain_rows
from specdec.executor.derive import DerivedStep
from specdec.executor.graphs import ExecutorLimits, PassOutput
from specdec.executor.rows import HeadInput, lay_out_heads
from specdec.executor.runner import ModelRunner
from specdec.sampling.chains import ChainSampler
from specdec.sampling.pipeline import RowGroup, Sampler

if TYPE_CHECKING:
    from specdec.drafting.heads import DraftHeads, HeadRow


class HeadChains:
    """Heads' passes and their :class:`specdec.executor.chains.TokenChooser`; :meth:`recorded` makes them.

    Args:
        heads: Give logits for the places.
        runner: Of the target that they are on, whose steps are recorded.
        sampler: Of the target.
        chooser: Draws in a recorded chain.
        limits: The runner's.
    """

    def __init__(
        self, heads: DraftHeads, runner: ModelRunner, sampler: Sampler, chooser: ChainSampler, limits: ExecutorLimits
    ) -> None:
        self._heads, self._runner, self._sampler, self._chooser = heads, runner, sampler, chooser
        self._most_tokens = limits.graph_sizes[-1]
        loaded, shape = runner.loaded, (self._most_tokens, runner.loaded.config.hidden_size)
        self._states = [torch.zeros(shape, dtype=loaded.dtype, device=loaded.device) for _ in heads.hidden_layers]
        self._numbers = self._features = torch.empty(0)
        self._place = 0

    @classmethod
    def recorded(cls, heads: DraftHeads, runner: ModelRunner, sampler: Sampler) -> HeadChains | None:
        """Record chains as the limits of the runner's recorded steps say; None where there are none."""
        kernels = sampler.kernels(runner.output_device)
        if kernels is None:
            return None

        def make(limits: ExecutorLimits) -> HeadChains:
            return cls(heads, runner, sampler, ChainSampler(kernels, num_chain_rows(limits), 0), limits)

        return runner.record_chains("Drafts of the heads", make, lambda chains: chains.run_pass)

    @property
    def num_bytes(self) -> int:
        """Memory of the device that it holds."""
        return self._chooser.num_bytes + sum(state.nbytes for state in self._states)

    def padding(self) -> list[NDArray[Any]]:
        """The input of no rows: numbers of states, and what draws."""
        return self._input([], self._chooser.padding())

    def _input(self, numbers: Sequence[int], drawing: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        padded = np.zeros(self._most_tokens, np.int32)
        padded[: len(numbers)] = numbers
        return [padded, *drawing]

    def begin(self, sent: Sequence[Tensor]) -> None:
        """Take the input, which will be changed in place."""
        self._numbers = sent[0]
        self._chooser.begin(sent[1:])

    def choose(self, logits: Tensor, number: Tensor) -> Chosen:
        """Tokens for the first rows."""
        return self._chooser.choose(logits, number)

    def run_pass(self, step: DerivedStep, wanted: Tensor | None) -> PassOutput:
        """A pass for the logits of some tokens; without them, of what the pass before has made.

        Heads that overflow draft badly, and no more: whatever they give is taken for finite.
        """
        heads, size = self._heads, len(step.tokens)
        if wanted is None:
            # Chains are recorded in powers of two passes: nobody reads what follows the last place.
            self._place = self._place + 1 if heads.num_tokens is None else min(self._place + 1, heads.num_tokens - 1)
            if heads.cache_layers:
                self._features = self._runner.run_heads(heads.forward, step, self._features)
        else:
            self._place, numbers = 0, self._numbers[:size]
            if heads.cache_layers:
                fused = heads.fuse([state.index_select(0, numbers) for state in self._states])
                self._features = self._runner.run_heads(heads.forward, step, fused).index_select(0, wanted)
            else:
                numbers = numbers.index_select(0, wanted)
                self._features = heads.fuse([state.index_select(0, numbers) for state in self._states])
        logits = heads.logits(self._features, self._place).nan_to_num(0.0)
        is_finite = torch.ones(max(size, len(logits)), dtype=torch.bool, device=logits.device)
        return PassOutput(step, logits, is_finite[:size], is_finite[: len(logits)])

    @torch.inference_mode()
    def draw(
        self, states: Sequence[Tensor], rows: Sequence[HeadRow], counts: Sequence[int]
    ) -> dict[int, list[int]] | None:
        """Have the heads read rows, and draft.

        Args:
            states: As for :meth:`specdec.drafting.heads.HeadDrafter.drafts`.
            rows: As there.
            counts: Tokens of each row's draft, for all but the last of which the heads' cache has room.

        Returns:
            The tokens of each row that drafts; None, with nothing done, where such a step is not recorded.
        """
        order = sorted(range(len(rows)), key=lambda i: -counts[i])
        drawing = [i for i in order if counts[i] > 0]
        reads = bool(self._heads.cache_layers)
        order = order if reads else drawing
        if not drawing or len(states[0]) > self._most_tokens or not all(self._is_plain(rows[i]) for i in drawing):
            return None
        laid_out = self._sampler.lay_out([RowGroup(rows[i].spec, rows[i].text) for i in drawing], states[0].device)
        if laid_out is None:
            return None
        inputs, numbers = list[HeadInput](), list[int]()
        for i in order:
            row, skipped = rows[i], 0 if reads else len(rows[i].states) - 1
            numbers += row.states[skipped:]
            inputs.append(HeadInput(row.sequence, row.start + skipped, as_list(row.tokens)[skipped:]))
        if len(numbers) > self._most_tokens:
            return None
        for kept, state in zip(self._states, states, strict=True):
            kept[: len(state)].copy_(state)
        given = self._input(numbers, self._chooser.arrays(laid_out))
        lengths = [counts[i] for i in drawing]
        passes = np.ones(len(inputs), np.int64)
        if reads:
            passes[: len(lengths)] = lengths
        own = lay_out_heads(inputs, passes, len(lengths))
        launched = self._runner.launch_laid_out([one.sequence for one in inputs], own, lengths, given)
        if launched is None:
            return None
        found = launched.collect()
        return {i: found.tokens[: counts[i], k].tolist() for k, i in enumerate(drawing)}

    def _is_plain(self, row: HeadRow) -> bool:
        return not self._sampler.depends_on_tokens(row.spec.sampling)
