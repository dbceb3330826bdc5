"""A runner for models whose recurrent state can only be copied as a whole: row by row, with transformers' own cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from numpy.typing import NDArray

from specdec.cache.recurrent.opaque import SnapshotPool, run_opaque
from specdec.cache.recurrent.slots import Window
from specdec.core.errors import ModelLoadError
from specdec.executor.rows import RowInput, lay_out_rows
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel


class SnapshotRunner(ModelRunner):
    """A model and its states, each the model's own object. Slow: rows are read one after another.

    Args:
        loaded: The model, with transformers' own attention.
        num_blocks: Blocks by which tokens are counted; nothing is cached in them.
        block_size: Positions per block.
        vocab_size: As for :class:`ModelRunner`.
        padding: As for :class:`ModelRunner`.
        num_state_slots: Sequences and branches at once.
        window_tokens: How many tokens can be taken back for sure without reading all anew.
        reads_many: Whether the model goes on right from a state with several tokens at once.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        vocab_size: int | None = None,
        padding: Literal["cut", "mask"] = "cut",
        num_state_slots: int = 16,
        window_tokens: int = 18,
        reads_many: bool = False,
    ) -> None:
        super().__init__(loaded, num_blocks=num_blocks, block_size=block_size, vocab_size=vocab_size, padding=padding)
        self._snapshots = SnapshotPool(num_state_slots, Window(window_tokens), reads_many)
        self.states = self._snapshots
        parameters = inspect.signature(loaded.model.forward).parameters
        if loaded.opaque_state is None:
            raise ModelLoadError(f"{loaded.name} does not give its state away")
        self._opaque = loaded.opaque_state
        self._takes_positions = "position_ids" in parameters
        self._reads_many = reads_many

    @property
    def no_speculation(self) -> str | None:
        """Reading a draft token by token takes as long as decoding it."""
        return None if self._reads_many else "reads_single_tokens"

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[RowInput], drawn: torch.Tensor | None = None, extra: Sequence[NDArray[Any]] = ()
    ) -> torch.Tensor:
        """As :meth:`ModelRunner.forward`; all tokens are known, and nothing comes along."""
        assert drawn is None
        own = lay_out_rows(rows, self.loaded.vocab_size, self.pool, self.states is not None)
        for group in self.pool.groups:  # blocks are only counted here: there is nothing to copy or to clear
            group.prepare(lambda _: None, lambda _: None)
        wanted, finite_tokens, finite_logits = [], [], []
        for row in rows:
            sequence, new = row.sequence, list(row.tokens)
            assert sequence.state is not None, "no state is reserved"
            before, sequence.state.oldest = sequence.state.oldest, len(sequence.tokens) + 1
            logits = self._snapshots.read(sequence.state, sequence.tokens.array, new, self._read)
            assert sequence.state.oldest >= before
            sequence.tokens.extend(new)
            wanted.append(logits[len(new) - row.num_logits :])
            finite_tokens.append(logits.amax(1).isfinite())
            finite_logits.append(finite_tokens[-1][len(new) - row.num_logits :])
        self._note_finite(own, torch.cat(finite_tokens), torch.cat(finite_logits))
        return self._finish(torch.cat(wanted))

    def _read(self, tokens: list[int], position: int, state: Any) -> tuple[torch.Tensor, Any]:
        device = self.loaded.device
        arguments = {"input_ids": torch.tensor([tokens], device=device)}
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(position, position + len(tokens), device=device).unsqueeze(0)
        output, state = run_opaque(self.loaded.model, self._opaque, state, arguments)
        self.progress.advance(device)  # its layers are not ours to count: one for each piece that is read
        return output.logits[0], state
