"""The cache gives what the generator gives, whatever it has kept, and makes a row once."""

from __future__ import annotations

import random

import pytest
import torch

from specdec.sampling import noise as module
from specdec.sampling.noise import NoiseCache, gumbel

CPU = torch.device("cpu")
VOCAB = 24
BLOCK_BYTES = 8 * VOCAB * 4


@pytest.mark.parametrize("num_blocks", [0, 1, 3, 8, 100])
def test_rows_are_the_generators_whatever_is_kept(num_blocks: int) -> None:
    cache, rng = NoiseCache(VOCAB, num_blocks * BLOCK_BYTES), random.Random(num_blocks)
    for _ in range(60):
        seeds = [rng.choice((1, 2, 2**64 - 1)) for _ in range(rng.randrange(1, 6))]
        positions = [rng.randrange(40) for _ in seeds]
        rows = cache.rows(seeds, positions, CPU)
        torch.testing.assert_close(rows, gumbel(seeds, positions, VOCAB, "cpu"))
        rows.zero_()  # the caller's to change


def test_a_block_is_made_once_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    def recording(seeds: list[int], positions: list[int], *rest: object) -> torch.Tensor:
        made.extend(zip(seeds, positions, strict=True))
        return gumbel(seeds, positions, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "gumbel", recording)
    cache = NoiseCache(VOCAB, 8 * BLOCK_BYTES)
    for start in range(20):
        cache.rows([7] * 10, [*range(start, start + 5)] * 2, CPU)
    assert sorted(made) == [(7, position) for position in range(24)]


def test_the_block_unused_for_longest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NoiseCache(VOCAB, 2 * BLOCK_BYTES)
    for seed in (1, 2, 1, 3):
        cache.rows([seed], [0], CPU)
    made: list[int] = []
    monkeypatch.setattr(module, "gumbel", lambda seeds, *rest: made.extend(seeds) or gumbel(seeds, *rest))
    cache.rows([1], [7], CPU)
    cache.rows([3], [7], CPU)
    assert not made
    cache.rows([2], [7], CPU)
    assert set(made) == {2}
