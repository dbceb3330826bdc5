"""Rows that are prefilled in chunks, drafted on, forked and rolled back on a model with recurrent layers."""

import random
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from specdec.cache.blocks import CachedSequence
from specdec.cache.recurrent.pool import checked_window
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, prepare_model
from tests.specdec.models.recurrent_families import VOCAB_SIZE, make_recurrent

WINDOW = 18
_made: dict[str, tuple[LoadedModel, PreTrainedModel]] = {}


def pair(family: str) -> tuple[LoadedModel, PreTrainedModel]:
    """A family's model as loaded, and a twin with transformers' own functions; made once."""
    if family not in _made:
        stock = make_recurrent(family)
        if stock._can_set_attn_implementation():
            stock.set_attn_implementation("eager")
        _made[family] = (prepare_model(make_recurrent(family), family), stock)
    return _made[family]


def make_runner(
    loaded: LoadedModel, window: int = WINDOW, num_state_slots: int = 8, num_blocks: int = 300
) -> ModelRunner:
    """A runner with small blocks and few slots."""
    return ModelRunner(
        loaded,
        num_blocks=num_blocks,
        block_size=4,
        num_state_slots=num_state_slots,
        window=checked_window(window),
    )


@torch.inference_mode()
def whole_forwards(stock: PreTrainedModel, rows: Sequence[list[int]]) -> list[torch.Tensor]:
    """Logits of every row, [length, vocabulary], from one forward without a cache.

    Shorter rows are followed by padding, which a causal model's earlier positions do not see.
    """
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [3] * (longest - len(row)) for row in rows])
    logits = stock(input_ids=tokens, use_cache=False).logits.float()
    return [values[: len(row)] for values, row in zip(logits, rows, strict=True)]


class Rounds:
    """Keeps rows and what they should hold; every logit is compared with a whole forward."""

    def __init__(self, runner: ModelRunner, stock: PreTrainedModel, seed: int) -> None:
        self.runner, self.stock = runner, stock
        self.rng = random.Random(seed)
        self.rows: list[tuple[CachedSequence, list[int]]] = []
        self.difference = 0.0

    def tokens(self, length: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB_SIZE) for _ in range(length)]

    def forward(self, new: Sequence[tuple[CachedSequence, list[int], list[int]]]) -> None:
        """Run (sequence, what it has, new tokens) and compare all logits of the new tokens."""
        parts = self.read(new)
        self.compare([past + tokens for _, past, tokens in new], parts)

    def read(self, new: Sequence[tuple[CachedSequence, list[int], list[int]]]) -> Sequence[torch.Tensor]:
        """Run (sequence, what it has, new tokens): the logits of each one's new tokens."""
        for sequence, past, tokens in new:
            assert self.runner.reserve(sequence, len(past) + len(tokens))
            assert sequence.tokens == past
        inputs = [RowInput(sequence, tokens, len(tokens)) for sequence, _, tokens in new]
        return self.runner.forward(inputs).split([len(tokens) for _, _, tokens in new])

    def compare(self, rows: Sequence[list[int]], parts: Sequence[torch.Tensor]) -> None:
        """Compare logits of the last tokens of rows with those of whole forwards."""
        for part, logits in zip(parts, whole_forwards(self.stock, rows), strict=True):
            self.difference = max(self.difference, (part - logits[-len(part) :]).abs().max().item())

    def prefill(self, lengths: Sequence[int], max_chunk: int) -> None:
        """Rows of these lengths, read in chunks of random size, side by side."""
        prompts = [self.tokens(length) for length in lengths]
        added = [(self.runner.new_sequence(), list[int]()) for _ in prompts]
        while any(len(have) < len(prompt) for (_, have), prompt in zip(added, prompts, strict=True)):
            new = []
            for (sequence, have), prompt in zip(added, prompts, strict=True):
                chunk = prompt[len(have) : len(have) + self.rng.randint(1, max_chunk)]
                if chunk:
                    new.append((sequence, list(have), chunk))
                    have.extend(chunk)
            self.forward(new)
        self.rows.extend(added)

    def verify(self, num_draft_tokens: int) -> None:
        """Read a token and 0 to K drafts on every row, and keep a random number of the drafts of each."""
        new = []
        for sequence, have in self.rows:
            num_drafts = self.rng.choice((num_draft_tokens, self.rng.randint(0, num_draft_tokens)))
            new.append((sequence, list(have), self.tokens(1 + num_drafts)))
        self.forward(new)
        for (sequence, have), (_, _, tokens) in zip(self.rows, new, strict=True):
            have.extend(tokens[: 1 + self.rng.randint(0, len(tokens) - 1)])
            self.runner.truncate(sequence, len(have))

    def draft(self, num_draft_tokens: int) -> None:
        """Read token by token as a drafter does that runs ahead, then take back any number of the last tokens."""
        steps = []
        for _ in range(2 * num_draft_tokens + 1):
            steps.append(self.read([(sequence, list(sequence.tokens), self.tokens(1)) for sequence, _ in self.rows]))
        parts = [torch.cat(step) for step in zip(*steps, strict=True)]
        self.compare([list(sequence.tokens) for sequence, _ in self.rows], parts)
        for sequence, have in self.rows:
            have[:] = list(sequence.tokens)[: len(have) + self.rng.randint(0, 2 * num_draft_tokens + 1)]
            self.runner.truncate(sequence, len(have))

    def drop_all(self) -> None:
        for sequence, _ in self.rows:
            self.runner.free(sequence)
        self.rows.clear()


def play(family: str, rounds: Callable[[Rounds], None], seed: int = 0) -> float:
    """Prefill four rows, play rounds, and see that everything was given back: the largest difference of a logit."""
    loaded, stock = pair(family)
    game = Rounds(make_runner(loaded), stock, seed)
    game.prefill([9, 4, 1, 44], max_chunk=25)
    rounds(game)
    game.drop_all()
    assert game.runner.pool.num_in_use == 0
    assert game.runner.states is not None
    assert game.runner.states.num_in_use == 0
    return game.difference
