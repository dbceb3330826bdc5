"""A step's tokens may be a tree: each reads its own path, and one path stays in the cache."""

from __future__ import annotations

import pytest
import torch

from specdec.core.drafts import path_to
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from tests.specdec.models.families import SOME_FAMILIES, VOCAB_SIZE, make_model
from tests.specdec.operators import Operators

PARENTS = (-1, 0, 1, -1, 0, 3, 3, 5, 1, 2, 2)
"""Two tokens first; the deepest path has four."""
PATH = (3, 5, 7)
LENGTH = 21
TOLERANCE = 1e-4
MANY = tuple(i - 2 if i > 1 else -1 for i in range(20))
"""Two chains, of more tokens than are read in padded groups."""


def tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def runner_of(family: str) -> ModelRunner:
    return ModelRunner(prepare_model(make_model(family), "tiny"), num_blocks=80, block_size=4)


@pytest.mark.parametrize("family", SOME_FAMILIES)
@pytest.mark.parametrize("parents", [PARENTS, MANY])
def test_each_token_of_a_tree_is_answered_as_at_the_end_of_its_path(family: str, parents: tuple[int, ...]) -> None:
    """Beside a longer and a shorter row without trees; windows are shorter than the past."""
    runner, alone = runner_of(family), runner_of(family)
    assert runner.takes_trees
    log, tree, others = tokens(LENGTH, 1), tokens(len(parents), 2), [tokens(9, 3), tokens(3, 4)]
    sequence, *rest = [runner.new_sequence() for _ in range(3)]
    for one, length in zip((sequence, *rest), (LENGTH + len(parents), 9, 3), strict=True):
        runner.reserve(one, length)
    runner.forward([RowInput(sequence, log[:-1], 0), RowInput(rest[0], others[0][:-3], 0)])
    rows = [RowInput(rest[0], others[0][-3:], 3), RowInput(sequence, (log[-1], *tree), 1 + len(tree), parents)]
    logits = runner.forward([*rows, RowInput(rest[1], others[1], 1)])
    got = logits[3 : 4 + len(tree)]
    for node in range(-1, len(tree)):
        path = tuple(tree[at] for at in path_to(parents, node))
        torch.testing.assert_close(got[node + 1], last_logits(alone, log + path), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(logits[2], last_logits(alone, others[0]), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(logits[-1], last_logits(alone, others[1]), atol=TOLERANCE, rtol=TOLERANCE)


def last_logits(runner: ModelRunner, text: tuple[int, ...]) -> torch.Tensor:
    sequence = runner.new_sequence()
    runner.reserve(sequence, len(text))
    logits = runner.forward([RowInput(sequence, text, 1)])[0]
    runner.free(sequence)
    return logits


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("path", [PATH, PATH[:1], (), (0, 1)])
def test_what_follows_a_kept_path_reads_that_path_alone(family: str, path: tuple[int, ...]) -> None:
    runner, alone = runner_of(family), runner_of(family)
    log, tree = tokens(LENGTH, 1), tokens(len(PARENTS), 2)
    sequence = runner.new_sequence()
    runner.reserve(sequence, LENGTH + len(tree))
    runner.forward([RowInput(sequence, log[:-1], 0)])
    runner.forward([RowInput(sequence, (log[-1], *tree), 1 + len(tree), PARENTS)])
    runner.keep_paths([(sequence, LENGTH, path)])
    runner.truncate(sequence, LENGTH + len(path))
    kept = log + tuple(tree[node] for node in path)
    assert tuple(sequence.tokens) == kept
    more = tokens(4, 5)
    runner.reserve(sequence, len(kept) + len(more))
    got = runner.forward([RowInput(sequence, more, len(more))])
    for i, row in enumerate(got):
        want = last_logits(alone, kept + more[: i + 1])
        torch.testing.assert_close(row, want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_paths_of_all_rows_are_kept_by_one_copy_per_tensor(num_rows: int) -> None:
    runner = runner_of("llama")
    sequences = [runner.new_sequence() for _ in range(num_rows)]
    for sequence in sequences:
        runner.reserve(sequence, 1 + len(PARENTS))
    runner.forward(
        [RowInput(sequence, tokens(1 + len(PARENTS), 1), 1 + len(PARENTS), PARENTS) for sequence in sequences]
    )
    with Operators() as seen:
        runner.keep_paths([(sequence, 1, PATH) for sequence in sequences])
    assert seen.names.count("aten.index_copy_.default") == 2 * len(runner.loaded.attention_layers)
    assert seen.names.count("aten.copy_.default") == 1  # one upload of all positions
