"""Chains of passes, recorded whole: each reads the token that the one before has chosen, and the host sees them all.

The first pass is a step like others. In each further one a row has a part as long as its chain goes: rows with the
longest chains come first, so that those that are left are always the first ones. What the device derives from a step's
input it derives here from the chosen tokens, by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    def choose(self, logits: Tensor, number: int) -> Chosen:
        """Tokens for the first rows.

        Args:
            logits: [N, model's vocabulary].
            number: Of the pass, which is how many tokens stand behind the input's.
        """
        ...


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


class ChainGraphs(Graphs[tuple[int, int], None]):
    """Chains by the size of the first pass, in tokens, and their number of passes.

    Args:
        steps: Whose largest step is ``limits``.
        run_pass: The model.
        chooser: Of each pass's tokens.
        limits: What there is to record.
        device: Where all of it is.

    Attributes:
        is_parallel: As in the limits.
    """

    def __init__(
        self, steps: Steps, run_pass: RunPass, chooser: TokenChooser, limits: ExecutorLimits, device: torch.device
    ) -> None:
        super().__init__(self._run_chains, device)
        self._steps, self._run_pass, self._chooser = steps, run_pass, chooser
        sizes = limits.graph_sizes
        self._lengths, self.is_parallel = limits.chain_lengths, limits.is_parallel
        self._num_rows = num_chain_rows(limits)
        shape = self._lengths[-1], self._num_rows
        ranks = (*shape, 1 + limits.num_guesses if limits.num_guesses else 0)
        fields = (
            Field("finite_tokens", (sizes[-1],)),
            Field("finite", shape),
            Field("tokens", shape),
            Field("ranked", ranks),
            Field("scores", ranks, torch.float32),
        )
        self._record_of = Record(Layout(fields), device, depth=1)
        self._all_keys = [(size, length) for size in sizes for length in self._lengths]

    def record_all(self) -> str:
        """Record all sizes and lengths; see :meth:`record`."""
        padding = self._chooser.padding()
        sent = self._steps.upload_nothing(padding)
        self._chooser.begin(sent)
        return self.record(self._all_keys)

    def key_for(self, num_tokens: int, num_passes: int) -> tuple[int, int] | None:
        """The least that holds chains whose first pass has so many tokens; None where none does.

        Args:
            num_tokens: Of the first pass.
            num_passes: Of the longest chain.
        """
        return next((key for key in self._keys if key[0] >= num_tokens and key[1] >= num_passes), None)

    def launch_step(
        self, key: tuple[int, int], sequences: Sequence[CachedSequence], rows: StepRows, extra: Sequence[NDArray[Any]]
    ) -> None:
        """Put chains, and a copy of what they give, in the device's queue.

        Args:
            key: As :meth:`key_for` gives it.
            sequences: Of each row.
            rows: The first pass, and how many passes each row has a part in.
            extra: The chooser's input.
        """
        while self._record_of.num_under_way:
            self._record_of.collect()  # of a step that failed
        self._steps.upload(sequences, rows, None, extra)
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

    def _run_chains(self, key: tuple[int, int]) -> None:
        size, num_passes = key
        given: Tensors = self._steps.staging.tensors
        num_rows, record = min(size, self._num_rows), self._record_of.tensors
        step = self._steps.derive(size)
        if self.is_parallel:
            output = self._run_pass(step, None)
            record["finite_tokens"][:size].copy_(output.finite_tokens)
            first = (step.token_end - given["num_logits"])[:num_rows]
            for number in range(num_passes):  # of rows that draw fewer any token's logits will do
                at = (first + number).clamp(min=0, max=size - 1)
                self._choose(output.logits.index_select(0, at), output.finite_logits.index_select(0, at), number)
            return
        # Rows that draw nothing are beyond those that do: for them any token's logits will do.
        wanted = self._steps.logit_tokens(step, num_rows).clamp(max=size - 1)
        output = self._run_pass(step, wanted)
        record["finite_tokens"][:size].copy_(output.finite_tokens)
        self._choose(output.logits, output.finite_logits, 0)
        for number in range(1, num_passes):
            num_tokens = (given["num_passes"] > number).int()
            given = {**given, "num_tokens": num_tokens, "tokens": record["tokens"][number - 1]}
            output = self._run_pass(self._steps.derive(num_rows, given=given), None)
            self._choose(output.logits, output.finite_tokens & output.finite_logits, number)

    def _choose(self, logits: Tensor, is_finite: Tensor, number: int) -> None:
        """Write a pass's results."""
        record, n = self._record_of.tensors, len(logits)
        chosen = self._chooser.choose(logits, number)
        record["finite"][number, :n].copy_(is_finite)
        record["tokens"][number, :n].copy_(chosen.tokens)
        if chosen.ranked is not None and chosen.scores is not None:
            record["ranked"][number, :n].copy_(chosen.ranked)
            record["scores"][number, :n].copy_(chosen.scores)


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
    step = limits.graph_sizes[0]
    return min(-(-limits.max_rows // step) * step, limits.graph_sizes[-1])
