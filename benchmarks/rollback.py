"""What it costs to take drafts back from a recurrent state, by method: rounds per second, and memory per sequence."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.one_state import OneState
from benchmarks.rollback_costs import METHODS, RollbackCost, RollbackCosts, RollbackMethod, RollbackWork
from specdec.cache.blocks import CachedSequence
from specdec.cache.recurrent.pool import MIN_WINDOW_TOKENS, StatePool, bytes_per_slot, checked_window, state_bytes
from specdec.cache.recurrent.slots import Window
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, prepare_model


class _Batch:
    """The rows of one method that needs no second forward."""

    def __init__(self, loaded: LoadedModel, method: RollbackMethod, work: RollbackWork) -> None:
        self.method = method
        self.runner, self.bytes_per_sequence = self._make_runner(loaded, work)
        self.rows = [self.runner.new_sequence(None) for _ in range(work.num_rows)]

    def _make_runner(self, loaded: LoadedModel, work: RollbackWork) -> tuple[ModelRunner, int]:
        layers = loaded.recurrent_layers
        window = checked_window(work.num_draft_tokens + MIN_WINDOW_TOKENS)
        runner = ModelRunner(loaded, num_blocks=work.num_blocks, num_state_slots=work.num_rows, window=window)
        return runner, bytes_per_slot(layers, window)

    def read(
        self, rows: Sequence[CachedSequence], tokens: Sequence[Sequence[int]], wanted: bool = True
    ) -> torch.Tensor:
        """Read tokens of some rows; logits of all of them, where they are wanted."""
        for row, new in zip(rows, tokens, strict=True):
            if not self.runner.reserve(row, len(row) + len(new)):
                raise RuntimeError("too few cache blocks for the measurement")
        return self.runner.forward([RowInput(r, new, len(new) * wanted) for r, new in zip(rows, tokens, strict=True)])

    def round(self, tokens: Sequence[Sequence[int]], num_kept: Sequence[int]) -> None:
        """Verify ``tokens`` and keep the first ``num_kept`` of each row."""
        self.read(self.rows, tokens)
        for row, new, kept in zip(self.rows, tokens, num_kept, strict=True):
            self.runner.truncate(row, len(row) - len(new) + kept)


class _ReadTwice(_Batch):
    """The rows of the method that goes back to a copy, and reads what was accepted by a second forward.

    As good as it can be here: rows are scanned side by side, by the fastest scan there is; those that kept everything
    are not read again; a second reading asks for no logits; nothing is held but the state and one copy.
    """

    def _make_runner(self, loaded: LoadedModel, work: RollbackWork) -> tuple[ModelRunner, int]:
        layers, window = loaded.recurrent_layers, Window(1 + work.num_draft_tokens)
        states = StatePool(layers, 2 * work.num_rows, window, OneState)
        return ModelRunner(loaded, num_blocks=work.num_blocks, states=states), 2 * state_bytes(layers)

    def round(self, tokens: Sequence[Sequence[int]], num_kept: Sequence[int]) -> None:
        """Verify ``tokens``; go back to the copies, and read the first ``num_kept`` again."""
        copies = [self.runner.fork(row) for row in self.rows]
        self.read(self.rows, tokens)
        again: list[tuple[CachedSequence, Sequence[int]]] = []
        for index, (new, kept) in enumerate(zip(tokens, num_kept, strict=True)):
            if kept < len(new):
                self.rows[index], copies[index] = copies[index], self.rows[index]
                again.append((self.rows[index], new[:kept]))
        for copy in copies:
            self.runner.free(copy)
        if again:
            self.read([row for row, _ in again], [new for _, new in again], wanted=False)


def compare_rollback(
    loaded: LoadedModel, work: RollbackWork, clock: Callable[[], float] = time.perf_counter
) -> RollbackCosts:
    """Do the same rounds by every method, a round of each in turn, so that a machine's drift hits all alike.

    Args:
        loaded: A model with recurrent layers.
        work: What is done.
        clock: Seconds.
    """
    rng = random.Random(work.seed)
    batches = [(_ReadTwice if method == "second forward" else _Batch)(loaded, method, work) for method in METHODS]
    durations_s: dict[RollbackMethod, list[float]] = {method: [] for method in METHODS}
    vocab_size, num_tokens = loaded.vocab_size, 1 + work.num_draft_tokens

    def some_tokens(length: int) -> list[list[int]]:
        return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(work.num_rows)]

    prompts = some_tokens(work.prompt_length)
    for batch in batches:
        batch.read(batch.rows, prompts)
    for index in range(work.num_warmup_rounds + work.num_rounds):
        tokens, num_kept = some_tokens(num_tokens), [rng.randint(1, num_tokens) for _ in range(work.num_rows)]
        for batch in batches:
            started_s = clock()
            batch.round(tokens, num_kept)
            if loaded.device.type == "cuda":
                torch.cuda.synchronize(loaded.device)
            if index >= work.num_warmup_rounds:
                durations_s[batch.method].append(clock() - started_s)
    last = some_tokens(1)
    logits = [batch.read(batch.rows, last) for batch in batches]
    costs = tuple(
        _cost(batch, durations_s[batch.method], (own - logits[0]).abs().max().item())
        for batch, own in zip(batches, logits, strict=True)
    )
    return RollbackCosts(loaded.name, work, costs)


def _cost(batch: _Batch, durations_s: list[float], max_difference: float) -> RollbackCost:
    rates = sorted(1 / duration_s for duration_s in durations_s)
    tenth = len(rates) // 10
    spread = rates[tenth], rates[-1 - tenth]
    return RollbackCost(batch.method, statistics.median(rates), spread, batch.bytes_per_sequence, max_difference)


def delta_rule_model(
    num_heads: int = 32, head_dim: int = 128, hidden_size: int = 512, num_layers: int = 4, device: str = "cpu"
) -> LoadedModel:
    """A random model whose states are as large as those of a real one: three delta-rule layers to one of attention."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(num_layers)]
    config = Qwen3_5TextConfig(
        vocab_size=1024,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        layer_types=kinds,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=num_heads // 2,
        linear_num_value_heads=num_heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    num_recurrent = kinds.count("linear_attention")
    name = f"a random gated delta rule model, {num_recurrent} recurrent layers with {num_heads} heads of {head_dim}"
    return prepare_model(Qwen3_5ForCausalLM(config).to(device), name)


def main(argv: list[str] | None = None) -> None:
    """Print the table: ``python -m benchmarks.rollback [--device cuda]``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollback", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    print("\n".join(compare_rollback(delta_rule_model(device=arguments.device), RollbackWork()).markdown()))


if __name__ == "__main__":
    main()
