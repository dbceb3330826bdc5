"""Ragged, cached, rolled back forwards against one whole forward of each row with transformers' own attention."""

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from specdec.cache.blocks import CachedSequence
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel
from tests.specdec.models.families import SOME_FAMILIES, VOCAB_SIZE

FIRST = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
OTHERS = tuple(family for family in SOME_FAMILIES if family not in FIRST)
TOLERANCE = 1e-4

Models = Callable[[str], tuple[LoadedModel, PreTrainedModel]]
Whole = Callable[[PreTrainedModel, list[int]], torch.Tensor]


class Batch:
    """Rows that are prefilled in chunks, drafted on, forked and rolled back; every logit is compared."""

    def __init__(self, runner: ModelRunner, stock: PreTrainedModel, whole: Whole, seed: int) -> None:
        self.runner, self.stock, self.whole = runner, stock, whole
        self.rng = random.Random(seed)
        self.rows: list[tuple[CachedSequence, list[int]]] = []
        self.difference = 0.0

    def tokens(self, length: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(length)]

    def forward(self, new: list[tuple[CachedSequence, list[int], list[int], int]]) -> None:
        """Run (sequence, what it has, new tokens, logits wanted) and compare."""
        inputs = []
        for sequence, past, tokens, num_logits in new:
            assert self.runner.reserve(sequence, len(past) + len(tokens) + self.rng.randrange(4))
            inputs.append(RowInput(sequence, tokens, num_logits))
        logits = self.runner.forward(inputs)
        assert logits.dtype == torch.float32
        assert logits.shape == (sum(row.num_logits for row in inputs), VOCAB_SIZE)
        parts = logits.split([row.num_logits for row in inputs])
        for (sequence, past, tokens, num_logits), part in zip(new, parts, strict=True):
            assert sequence.tokens == past + tokens
            if num_logits:
                expected = self.whole(self.stock, past + tokens)[-num_logits:]
                self.difference = max(self.difference, (part - expected).abs().max().item())

    def prefill(self, lengths: list[int], max_chunk: int) -> None:
        prompts = [self.tokens(length) for length in lengths]
        added = [(self.runner.new_sequence(), list[int]()) for _ in prompts]
        while any(len(have) < len(prompt) for (_, have), prompt in zip(added, prompts, strict=True)):
            new = []
            for (sequence, have), prompt in zip(added, prompts, strict=True):
                chunk = prompt[len(have) : len(have) + self.rng.randint(1, max_chunk)]
                if chunk:
                    new.append((sequence, list(have), chunk, self.rng.randint(0, len(chunk))))
                    have.extend(chunk)
            self.forward(new)
        self.rows.extend(added)

    def round(self, max_drafts: int) -> None:
        """Draft on some rows, keep a random part of each, drop the rest."""
        new = []
        for sequence, have in self.rng.sample(self.rows, self.rng.randint(max(1, len(self.rows) - 2), len(self.rows))):
            drafts = self.tokens(self.rng.randint(1, 1 + max_drafts))
            new.append((sequence, list(have), drafts, len(drafts)))
        self.forward(new)
        for sequence, past, drafts, _ in new:
            have = next(have for other, have in self.rows if other is sequence)
            have.extend(drafts[: self.rng.randint(0, len(drafts))])
            assert len(have) >= len(past)
            self.runner.truncate(sequence, len(have))

    def fork(self) -> None:
        sequence, have = self.rng.choice(self.rows)
        self.rows.append((self.runner.fork(sequence), list(have)))

    def drop(self) -> None:
        sequence, _ = self.rows.pop(self.rng.randrange(len(self.rows)))
        self.runner.free(sequence)

    def play(self, lengths: list[int], rounds: int) -> float:
        self.prefill(lengths, max_chunk=21)
        for step in range(rounds):
            self.round(max_drafts=8)
            if step % 2:
                self.fork()
            if step % 3 == 2:
                self.drop()
        while self.rows:
            self.drop()
        assert self.runner.pool.num_in_use == 0
        return self.difference


def make_batch(models: Models, whole: Whole, family: str, block_size: int, seed: int = 0) -> Batch:
    loaded, stock = models(family)
    runner = ModelRunner(loaded, num_blocks=1200 // block_size, block_size=block_size, lookahead_tokens=9)
    return Batch(runner, stock, whole, seed)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("family", FIRST)
def test_ragged_rounds_equal_whole_forwards(models: Models, whole_forward: Whole, family: str, block_size: int) -> None:
    batch = make_batch(models, whole_forward, family, block_size, seed=block_size)
    assert batch.play([9, 1, 23, 47, 64], rounds=9) <= TOLERANCE


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_pass_through_the_same_code(models: Models, whole_forward: Whole, family: str) -> None:
    batch = make_batch(models, whole_forward, family, block_size=5)
    assert batch.play([9, 1, 23, 47], rounds=6) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_prompts_longer_than_a_tile_and_long_chunks_after_a_past(
    models: Models, whole_forward: Whole, family: str
) -> None:
    batch = make_batch(models, whole_forward, family, block_size=16)
    sequence, prompt = batch.runner.new_sequence(), batch.tokens(640)
    batch.forward([(sequence, [], prompt[:530], 530)])
    other = batch.tokens(3)
    batch.forward([(sequence, prompt[:530], prompt[530:], 110), (batch.runner.new_sequence(), [], other, 3)])
    assert batch.difference <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_blocks_out_of_order_read_the_same(models: Models, whole_forward: Whole, family: str) -> None:
    batch = make_batch(models, whole_forward, family, block_size=4)
    fillers = [batch.runner.new_sequence() for _ in range(batch.runner.pool.groups[0].num_blocks)]
    for filler in fillers:
        assert batch.runner.reserve(filler, 1)
    for filler in fillers:
        if filler.tables[0][0] % 2:
            batch.runner.free(filler)
            filler.tables[0].clear()
    batch.prefill([200, 90, 31], max_chunk=70)
    assert all(block % 2 for sequence, _ in batch.rows for block in sequence.tables[0])
    for _ in range(4):
        batch.round(max_drafts=5)
    assert batch.difference <= TOLERANCE


@pytest.mark.parametrize("off_by", [1, -1])
def test_the_comparison_sees_a_truncation_off_by_one(models: Models, whole_forward: Whole, off_by: int) -> None:
    batch = make_batch(models, whole_forward, "llama", block_size=4)
    batch.prefill([30], max_chunk=21)
    sequence, have = batch.rows[0]
    drafts, following = batch.tokens(5), batch.tokens(3)
    batch.forward([(sequence, list(have), drafts, 5)])
    batch.runner.truncate(sequence, 32 + off_by)
    assert batch.runner.reserve(sequence, 40)
    logits = batch.runner.forward([RowInput(sequence, following, 3)])
    expected = whole_forward(batch.stock, have + drafts[:2] + following)[-3:]
    assert (logits - expected).abs().max() > 1e-2
    assert batch.difference <= TOLERANCE


def test_the_comparison_sees_a_missing_copy(
    models: Models, whole_forward: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(models, whole_forward, "llama", block_size=16)
    monkeypatch.setattr(batch.runner._cache, "copy_blocks", lambda group, waves: None)
    assert batch.play([9, 1, 23, 47], rounds=6) > 1e-2


def test_forks_of_one_past_diverge_without_disturbing_each_other(models: Models, whole_forward: Whole) -> None:
    batch = make_batch(models, whole_forward, "llama", block_size=16)
    batch.prefill([21], max_chunk=21)
    sequence, have = batch.rows[0]
    forks = [batch.runner.fork(sequence) for _ in range(6)]
    assert batch.runner.pool.num_in_use == 2
    for length in (1, 2, 12):
        batch.forward([(fork, list(fork.tokens), batch.tokens(length), length) for fork in (*forks, sequence)])
    assert batch.difference <= TOLERANCE
    for fork in forks:
        batch.runner.truncate(fork, 20)  # into what they once shared
    batch.forward([(fork, list(fork.tokens), batch.tokens(3), 3) for fork in forks])
    assert have == list(sequence.tokens)[:21]
    assert batch.difference <= TOLERANCE


def test_reused_prefixes_hold_the_right_state(models: Models, whole_forward: Whole) -> None:
    batch = make_batch(models, whole_forward, "gemma3", block_size=4)
    batch.prefill([37], max_chunk=10)
    first, prompt = batch.rows.pop()
    batch.runner.pool.keep_prefix(first, len(prompt))
    batch.runner.free(first)
    again = batch.runner.new_sequence()
    assert batch.runner.pool.reuse_prefix(again, prompt) == 36
    batch.forward([(again, prompt[:36], prompt[36:] + batch.tokens(5), 6)])
    assert batch.difference <= TOLERANCE


def test_a_row_without_wanted_logits_gives_none(models: Models) -> None:
    loaded, _ = models("llama")
    runner = ModelRunner(loaded, num_blocks=4)
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, 3)
    assert runner.forward([RowInput(sequence, [1, 2, 3], 0)]).shape == (0, VOCAB_SIZE)
    assert sequence.tokens == [1, 2, 3]


def test_padding_of_the_vocabulary_is_cut_or_masked(models: Models) -> None:
    loaded, _ = models("llama")
    logits = {}
    for padding in ("cut", "mask"):
        runner = ModelRunner(loaded, num_blocks=4, vocab_size=100, padding=padding)
        sequence = runner.new_sequence()
        assert runner.reserve(sequence, 2)
        logits[padding] = runner.forward([RowInput(sequence, [1, 2], 2)])
        assert logits[padding].shape == (2, runner.vocab_size)
    assert torch.equal(logits["cut"], logits["mask"][:, :100])
    assert torch.isneginf(logits["mask"][:, 100:]).all()
    with pytest.raises(ValueError, match=r"vocab_size must be in \[1, 128\]"):
        ModelRunner(loaded, num_blocks=4, vocab_size=129)


def test_bad_rows_are_refused_and_leave_nothing_behind(models: Models) -> None:
    loaded, _ = models("llama")
    runner = ModelRunner(loaded, num_blocks=2)
    sequence = runner.new_sequence()
    with pytest.raises(ValueError, match="no room is reserved for 2 tokens after position 0"):
        runner.forward([RowInput(sequence, [1, 2], 1)])
    assert runner.reserve(sequence, 2)
    for rows, message in (
        ([RowInput(sequence, [1, 2], 3)], r"num_logits must be in \[0, 2\]"),
        ([RowInput(sequence, [], 0)], "num_logits"),
        ([RowInput(sequence, [1, VOCAB_SIZE], 1)], r"tokens must be in \[0, 128\)"),
        ([RowInput(sequence, [1], 1), RowInput(sequence, [2], 1)], "twice"),
        ([], "empty"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.forward(rows)
    assert sequence.tokens == []


def test_a_block_shared_since_it_was_reserved_is_not_written(models: Models) -> None:
    loaded, _ = models("llama")
    runner = ModelRunner(loaded, num_blocks=4)
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, 8)
    runner.forward([RowInput(sequence, [1, 2, 3], 0)])
    runner.fork(sequence)
    with pytest.raises(ValueError, match="no room is reserved"):
        runner.forward([RowInput(sequence, [4], 1)])


@pytest.mark.parametrize("operation", ["copy_blocks", "clear"])
def test_blocks_are_prepared_by_the_next_step_where_memory_ran_out(
    operation: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork's last block is a copy, and one that held not-a-number before is cleared."""
    loaded, _ = models("llama")
    runner = ModelRunner(loaded, num_blocks=3, block_size=4)
    spoilt = runner.new_sequence()
    assert runner.reserve(spoilt, 12)
    for pools in runner._cache._pools.values():
        for pool in pools:
            pool[spoilt.tables[0]] = torch.nan
    runner.free(spoilt)
    first = runner.new_sequence()
    assert runner.reserve(first, 3)
    runner.forward([RowInput(first, [1, 2, 3], 0)])
    fork = runner.fork(first)
    assert runner.reserve(fork, 8)
    real = getattr(runner._cache, operation)

    def fail(group: int, blocks: object) -> None:
        monkeypatch.setattr(runner._cache, operation, real)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner._cache, operation, fail)
    with pytest.raises(torch.OutOfMemoryError):
        runner.forward([RowInput(fork, [4], 1)])
    logits = runner.forward([RowInput(fork, [4], 1)])
    assert all(pool[fork.tables[0]].isfinite().all() for pools in runner._cache._pools.values() for pool in pools)
    whole = ModelRunner(loaded, num_blocks=3, block_size=4)
    alone = whole.new_sequence()
    assert whole.reserve(alone, 4)
    assert (logits - whole.forward([RowInput(alone, [1, 2, 3, 4], 1)])).abs().max() < TOLERANCE
