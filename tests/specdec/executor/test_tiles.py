"""Steps as passes of one size: what a pass holds, and that a token's logits have the same bits in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.core.errors import ModelLoadError
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.executor.tiles import RowPart, tiles_of
from specdec.kernels import tiled
from specdec.kernels.scan import TokenByToken
from specdec.models.loading import LoadedModel, prepare_model
from specdec.models.parity_check import check_bits, no_strict_reason
from tests.specdec.models.families import randomize
from tests.specdec.models.recurrent_families import make_recurrent

VOCAB = 320


def test_rows_are_cut_where_tiles_end() -> None:
    first, second, third = tiles_of(np.array([3, 4, 2]), np.array([1, 0, 2]), 4)
    assert first[:3] == (0, 4, [RowPart(0, 0, 3, 0), RowPart(1, 3, 1, 0)])
    assert second[:3] == (4, 4, [RowPart(1, 0, 3, 1), RowPart(2, 3, 1, 0)])
    assert third[:3] == (8, 1, [RowPart(2, 0, 1, 1)])
    assert [tile.logits.tolist() for tile in (first, second, third)] == [[2], [3], [0]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    return prepare_model(randomize(LlamaForCausalLM(config), 0).to(torch.bfloat16), "wide")


TEXTS = [np.random.default_rng(i).integers(0, VOCAB, 270 + 7 * i).tolist() for i in range(4)]


def whole(runner: ModelRunner, text: list[int]) -> torch.Tensor:
    sequence = runner.new_sequence(None)
    assert runner.reserve(sequence, len(text))
    try:
        return runner.forward([RowInput(sequence, text, len(text))])
    finally:
        runner.free(sequence)


def in_pieces(runner: ModelRunner, texts: Sequence[list[int]], pieces: Sequence[int], keep: int) -> list[torch.Tensor]:
    """Side by side in pieces, of all but the first of which only ``keep`` tokens are kept, the others read again."""
    sequences = [runner.new_sequence(None) for _ in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    number = 0
    while any(len(s) < len(text) for s, text in zip(sequences, texts, strict=True)):
        rows = []
        for sequence, text in zip(sequences, texts, strict=True):
            new = text[len(sequence) :][: pieces[number % len(pieces)]]
            if new:
                assert runner.reserve(sequence, len(sequence) + len(new))
                rows.append((sequence, new))
        logits = runner.forward([RowInput(sequence, new, len(new)) for sequence, new in rows])
        for (sequence, new), values in zip(rows, logits.split([len(new) for _, new in rows]), strict=True):
            kept = len(new) if number == 0 else min(keep, len(new))
            runner.truncate(sequence, len(sequence) - len(new) + kept)
            found[sequences.index(sequence)].append(values[:kept])
        number += 1
    for sequence in sequences:
        runner.free(sequence)
    return [torch.cat(parts) for parts in found]


def num_different(make: Callable[[], ModelRunner]) -> int:
    """Of the positions of all texts those whose logits have other bits than alone, read at once."""
    alone = [whole(make(), text) for text in TEXTS]
    others = in_pieces(make(), TEXTS, (200, 1, 9), 5), in_pieces(make(), TEXTS[2:3], (33, 16, 64), 64)
    pairs = [*zip(alone, others[0], strict=True), (alone[2], others[1][0])]
    return sum(int((a != b).any(1).sum()) for a, b in pairs)


def strict(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, num_blocks=150, tile_tokens=16)


def library(monkeypatch: pytest.MonkeyPatch, num_parts: Callable[[int, int], int]) -> None:
    """Products of a library that sums a row in so many parts, by the number of rows and the row's place among them.

    It rounds what it sums, so that the bits of few tokens show which it was.
    """

    def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows, turned = inputs.flatten(0, -2).float(), weight.float().T
        every = {
            parts: sum(
                torch.matmul(*pair).bfloat16().float()
                for pair in zip(rows.chunk(parts, 1), turned.chunk(parts, 0), strict=True)
            )
            for parts in {num_parts(len(rows), place) for place in range(len(rows))}
        }
        chosen = torch.stack([every[num_parts(len(rows), place)][place] for place in range(len(rows))])
        return (chosen if bias is None else chosen + bias).to(inputs.dtype).view(*inputs.shape[:-1], -1)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)


def by_count(num_rows: int, place: int) -> int:
    """Splits where there are few rows, as libraries do."""
    return 1 if num_rows >= 16 else 3


def test_bits_of_a_position_do_not_depend_on_the_step(loaded: LoadedModel) -> None:
    assert num_different(lambda: strict(loaded)) == 0


def test_nor_with_a_library_that_splits_by_the_number_of_rows(loaded, monkeypatch) -> None:
    library(monkeypatch, by_count)
    assert num_different(lambda: strict(loaded)) == 0
    assert num_different(lambda: ModelRunner(loaded, num_blocks=150)) > 0


def refused(loaded: LoadedModel) -> None:
    with pytest.raises(ModelLoadError, match=r"strict is not possible .* bits of \d+ of \d+ tokens depend on the step"):
        check_bits(strict(loaded))


def test_another_library_gives_another_hash_and_the_same_gives_the_same(loaded, monkeypatch) -> None:
    """A library that sums the same products in other parts keeps every row's bits from step to step, but other bits."""
    named = [check_bits(strict(loaded)) for _ in range(2)]
    library(monkeypatch, lambda *_: 2)
    named += [check_bits(strict(loaded)) for _ in range(2)]
    assert [named.index(one) for one in named] == [0, 0, 2, 2]


def test_the_check_finds_attention_that_reads_as_far_as_the_step_does(loaded, monkeypatch) -> None:
    check_bits(strict(loaded))
    attend = tiled.TiledAttention.attend

    def as_far(self, queries, key_pool, value_pool, layer):
        monkeypatch.setattr(tiled, "NUM_KEYS", -(-self._lengths[0] // 3))
        return attend(self, queries, key_pool, value_pool, layer)

    monkeypatch.setattr(tiled.TiledAttention, "attend", as_far)
    refused(loaded)


def test_the_check_finds_a_pass_that_is_not_filled_up(loaded, monkeypatch) -> None:
    run = ModelRunner._run
    library(monkeypatch, by_count)
    check_bits(strict(loaded))
    monkeypatch.setattr(
        ModelRunner,
        "_run",
        lambda self, steps, step, tokens: run(
            self, steps, step.cut(0, int((step.attention[0].row >= 0).sum())), tokens
        ),
    )
    refused(loaded)


def test_the_check_finds_a_product_that_depends_on_the_place(loaded, monkeypatch) -> None:
    library(monkeypatch, lambda _, place: 1 + place % 2)
    refused(loaded)


def test_the_check_finds_a_scan_by_chunks_of_the_step(monkeypatch) -> None:
    model = make_recurrent("qwen3_next").to(torch.bfloat16)
    runner = ModelRunner(prepare_model(model, "hybrid"), num_blocks=150, tile_tokens=16)
    check_bits(runner)
    by_chunks = lambda self, *arguments: self._scan.whole(*arguments)  # noqa: E731
    monkeypatch.setattr(TokenByToken, "whole", by_chunks)
    with pytest.raises(ModelLoadError, match=r"bits of \d+ of \d+ tokens depend on the step"):
        check_bits(runner)


def test_no_tree_is_taken(loaded: LoadedModel) -> None:
    """Keys of other branches lie between those of a token's own path: in bfloat16 its logits have other bits."""
    assert ModelRunner(loaded, num_blocks=150).takes_trees
    assert not ModelRunner(loaded, num_blocks=150, tile_tokens=16).takes_trees


def test_what_is_known_not_to_be_strict_is_named(loaded: LoadedModel) -> None:
    other = replace(loaded, opaque_state=object())  # type: ignore[arg-type]
    assert no_strict_reason(loaded) == ""
    assert no_strict_reason(other) == "it keeps a state that can only be copied"
