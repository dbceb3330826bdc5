"""Chains of passes, recorded whole: each reads the token that the one before has chosen, and the host sees them all.

The first pass is a step like others. In each further one a row has a part as long as its chain goes: rows with the
longest chains come first, so that those that are left are always the first ones. What the device derives from a step's
input it derives here from the chosen tokens, by the same code.

Chains are recorded by few numbers of passes. A chain of another number is one of those, and more graphs that go on
with it: how many passes there were, the device counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.cache.blocks import CachedSequence
from specdec.executor.derive import DerivedStep
from specdec.executor.graphs import ExecutorLimits, Graphs, PassOutput
from specdec.executor.staging import Field, Layout, Record, Tensors
from specdec.executor.steps import StepRows, Steps, unread

RunPass = Callable[[DerivedStep, Tensor | None], PassOutput]
"""Runs a pass for the logits of some of its tokens, or of all."""


class Chosen(NamedTuple):
    """What is chosen for N rows.

    Attributes:
        tokens: int32 [N], each a token that the model knows, of padding too.
        ranked: int32 [N, G + 1], the best tokens in order, -1 for none; None without guesses.
        scores: float32 [N, G + 1], by what they are ranked.
    """

    tokens: Tensor
    ranked: Tensor | None
    scores: Tensor | None


class TokenChooser(Protocol):
    """Chooses tokens on the device by an input that lies where it is."""

    @property
    def num_bytes(self) -> int:
        """Memory of the device that it holds."""
        ...

    def padding(self) -> list[NDArray[Any]]:
        """The input of no rows. All inputs have its shapes."""
        ...

    def begin(self, sent: Sequence[Tensor]) -> None:
        """Take the input, which will be changed in place."""
        ...

    def choose(self, logits: Tensor, number: Tensor) -> Chosen:
        """Tokens for the first rows.

        Args:
            logits: [N, model's vocabulary].
            number: int64 [], of the pass, which is how many tokens stand behind the input's.
        """
        ...


class ChainKey(NamedTuple):
    """What a graph of chains does.

    Attributes:
        size: Tokens of its first pass.
        length: Its passes.
        goes_on: Whether it goes on with the chains of the launch before: then each pass has ``size`` tokens.
    """

    size: int
    length: int
    goes_on: bool = False


class ChainsRead(NamedTuple):
    """What chains gave, on the host.

    Attributes:
        spoilt_rows: By index, rows of the first pass that read, or gave, what is not finite.
        is_finite: bool [passes, N], of each row that draws.
        tokens: int32 [passes, N]; of a pass that a row has no part in anything.
        ranked: int32 [passes, N, G + 1]; [.., 0] without guesses.
        scores: float32 [passes, N, G + 1].
    """

    spoilt_rows: frozenset[int]
    is_finite: NDArray[np.bool_]
    tokens: NDArray[np.int32]
    ranked: NDArray[np.int32]
    scores: NDArray[np.float32]


class ChainGraphs(Graphs[ChainKey, None]):
    """Chains by the size of the first pass, in tokens, and their number of passes.

    Args:
        steps: Whose largest step is ``limits``.
        run_pass: The model.
        chooser: Of each pass's tokens.
        limits: What there is to record.
        device: Where all of it is.
        goes_on: Whether a pass needs nothing of the pass before but its tokens: then a chain may be several graphs.
            Else it is recorded whole, by powers of two passes up to the longest.

    Attributes:
        is_parallel: As in the limits.
    """

    def __init__(
        self,
        steps: Steps,
        run_pass: RunPass,
        chooser: TokenChooser,
        limits: ExecutorLimits,
        device: torch.device,
        goes_on: bool = True,
    ) -> None:
        super().__init__(self._run_chains, device)
        self._steps, self._run_pass, self._chooser = steps, run_pass, chooser
        self.is_parallel = limits.is_parallel
        self._goes_on = goes_on and not limits.is_parallel
        sizes, lengths, most = limits.chain_sizes, limits.chain_lengths, limits.num_chained_passes
        if not self._goes_on:
            lengths = tuple(sorted({min(1 << i, most) for i in range(most.bit_length() + 1)}))
        self._num_rows = num_chain_rows(limits)
        shape = most, self._num_rows
        ranks = (*shape, 1 + limits.num_guesses if limits.num_guesses else 0)
        fields = (
            Field("finite_tokens", (sizes[-1],)),
            Field("finite", shape),
            Field("tokens", shape),
            Field("ranked", ranks),
            Field("scores", ranks, torch.float32),
        )
        self._record_of = Record(Layout(fields), device, depth=1)
        # The number of the pass that has chosen last.
        self._newest = torch.zeros((), dtype=torch.int64, device=device)
        self._most_passes = most
        self._all_keys = [ChainKey(size, length) for size in sizes for length in lengths]
        if self._goes_on:
            num_rows = sorted({min(size, self._num_rows) for size in sizes})
            further = (length for length in lengths if length < most)
            self._all_keys = [*(ChainKey(*key, True) for key in product(num_rows, further)), *self._all_keys]

    def record_all(self, is_trial: bool = False) -> str:
        """Record all sizes and lengths; see :meth:`record`."""
        padding = self._chooser.padding()
        sent = self._steps.upload_nothing(padding)
        self._chooser.begin(sent)
        return self.record(self._all_keys, is_trial)

    def _num_passes(self, key: ChainKey) -> int:
        return key.length

    def keys_for(self, num_tokens: int, num_passes: Sequence[int]) -> list[ChainKey]:
        """What holds chains whose first pass has so many tokens, in order of their launches; empty where nothing does.

        Args:
            num_tokens: Of the first pass.
            num_passes: Of each row that draws, the largest first.
        """
        keys, number, most = list[ChainKey](), 0, num_passes[0]
        while number < most:
            size = sum(passes > number for passes in num_passes) if keys else num_tokens
            found = [key for key in self._keys if key.goes_on == bool(keys) and key.size >= size]
            if self._goes_on:
                # Of the least size the longest that is not too long.
                fitting = [key for key in found if key.size == found[0].size and key.length <= most - number][-1:]
            else:
                fitting = [key for key in found if key.length >= most][:1]
            if not fitting:
                return []
            keys += fitting
            number += fitting[0].length
        return keys

    def launch_step(
        self,
        keys: Sequence[ChainKey],
        sequences: Sequence[CachedSequence],
        rows: StepRows,
        extra: Sequence[NDArray[Any]],
    ) -> None:
        """Put chains, and a copy of what they give, in the device's queue.

        Args:
            keys: As :meth:`keys_for` gives them.
            sequences: Of each row.
            rows: The first pass, and how many passes each row has a part in.
            extra: The chooser's input.
        """
        while self._record_of.num_under_way:
            self._record_of.collect()  # of a step that failed
        self._steps.upload(sequences, rows, None, extra)
        for key in keys:
            self.launch(key)
        self._record_of.download()

    def collect(self, rows: StepRows, num_passes: Sequence[int]) -> ChainsRead:
        """What the newest chains gave. Waits for them.

        Args:
            rows: As they were launched.
            num_passes: Of those that draw, the largest first.
        """
        arrays, drawing = self._record_of.collect(), (slice(num_passes[0]), slice(len(num_passes)))
        is_finite = arrays["finite"][drawing] != 0
        row_of_token = np.arange(len(rows.num_tokens)).repeat(rows.num_tokens)
        of_tokens = row_of_token[arrays["finite_tokens"][: len(row_of_token)] == 0]
        return ChainsRead(
            frozenset([*of_tokens.tolist(), *np.flatnonzero(~is_finite[0]).tolist()]),
            is_finite,
            *(arrays[name][drawing].copy() for name in ("tokens", "ranked", "scores")),
        )

    @property
    def tokens(self) -> Tensor:
        """Where chains write tokens: int32 [passes, N], until the next ones are launched."""
        return self._record_of.tensors["tokens"]

    def _run_chains(self, key: ChainKey) -> None:
        size = key.size
        if key.goes_on:
            self._go_on(size, key.length)
            return
        given: Tensors = self._steps.staging.tensors
        num_rows, record = min(size, self._num_rows), self._record_of.tensors
        self._newest.zero_()
        step = self._steps.derive(size)
        if self.is_parallel:
            output = self._run_pass(step, None)
            record["finite_tokens"][:size].copy_(output.finite_tokens)
            first = (step.token_end - given["num_logits"])[:num_rows]
            for number in range(key.length):  # of rows that draw fewer any token's logits will do
                if number:
                    self._count_pass()
                at = (first + number).clamp(min=0, max=size - 1)
                self._choose(output.logits.index_select(0, at), output.finite_logits.index_select(0, at))
            return
        # Rows that draw nothing are beyond those that do: for them any token's logits will do.
        wanted = self._steps.logit_tokens(step, num_rows).clamp(max=size - 1)
        output = self._run_pass(step, wanted)
        record["finite_tokens"][:size].copy_(output.finite_tokens)
        self._choose(output.logits, output.finite_logits)
        self._go_on(num_rows, key.length - 1)

    def _go_on(self, num_rows: int, num_passes: int) -> None:
        """Further passes, each over the tokens that the one before has chosen."""
        given, record = self._steps.staging.tensors, self._record_of.tensors
        for _ in range(num_passes):
            tokens = record["tokens"].index_select(0, self._newest).view(-1)
            self._count_pass()
            num_tokens = (given["num_passes"] > self._newest).int()
            of_pass = {**given, "num_tokens": num_tokens, "tokens": tokens}
            output = self._run_pass(self._steps.derive(num_rows, given=of_pass), None)
            self._choose(output.logits, output.finite_tokens & output.finite_logits)

    def _count_pass(self) -> None:
        self._newest.add_(1).clamp_(max=self._most_passes - 1)  # graphs that go on are recorded behind no chains

    def _choose(self, logits: Tensor, is_finite: Tensor) -> None:
        """Write the results of the newest pass."""
        chosen = self._chooser.choose(logits, self._newest)
        self._write("finite", is_finite)
        self._write("tokens", chosen.tokens)
        if chosen.ranked is not None and chosen.scores is not None:
            self._write("ranked", chosen.ranked)
            self._write("scores", chosen.scores)

    def _write(self, name: str, values: Tensor) -> None:
        to = self._record_of.tensors[name][:, : len(values)]
        to.index_copy_(0, self._newest.view(1), values.to(to.dtype).unsqueeze(0))


@dataclass(frozen=True, slots=True)
class LaunchedChains:
    """Chains under way.

    Attributes:
        rows: As they were launched.
        num_passes: Of those that draw, the largest first.
    """

    graphs: ChainGraphs
    rows: StepRows
    num_passes: Sequence[int]

    @property
    def tokens(self) -> Tensor:
        """What they draw, on the device: int32 [D], until the next ones are launched."""
        return self.graphs.tokens.view(-1)

    def unread(self, row: int) -> list[int]:
        """What stands for the tokens of a row in :attr:`tokens`; see :func:`specdec.executor.steps.unread`."""
        width = self.graphs.tokens.shape[1]
        return [unread(number * width + row) for number in range(self.num_passes[row])]

    def collect(self) -> ChainsRead:
        """What they gave. Waits for them."""
        return self.graphs.collect(self.rows, self.num_passes)


def num_chain_rows(limits: ExecutorLimits) -> int:
    """Tokens of each pass of chains but the first: as many as there may be rows, or as many as the first has."""
    step = limits.chain_sizes[0]
    return min(-(-limits.max_rows // step) * step, limits.chain_sizes[-1])
