"""The generator against Random123's published vectors, and the noise made of it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from scipy import stats

from specdec.sampling import noise as module
from specdec.sampling.noise import derive_seed, gumbel, philox

MASK = 0xFFFFFFFF
# Random123, tests/kat_vectors: philox4x32 10, counter, key, expected words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def python_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """One call, in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    answer = philox(tuple(torch.tensor([[value]]) for value in counter), torch.tensor(key).view(2, 1, 1))
    assert tuple(word.item() for word in answer) == words
    assert python_philox(counter, key) == words


def test_broadcast_counters_give_the_words_of_single_calls() -> None:
    rng = random.Random(1)
    indexes, positions = [rng.getrandbits(32) for _ in range(7)], [rng.getrandbits(32) for _ in range(3)]
    keys = [(rng.getrandbits(32), rng.getrandbits(32)) for _ in range(3)]
    counter = (torch.tensor([indexes]), torch.tensor(positions)[:, None], torch.tensor([[5]]), torch.tensor([[9]]))
    words = torch.stack(philox(counter, torch.tensor(keys).T.unsqueeze(2)), 2)
    for i, position in enumerate(positions):
        for j, index in enumerate(indexes):
            assert tuple(words[i, j].tolist()) == python_philox((index, position, 5, 9), keys[i])


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x299F31D0A4093822])
def test_a_token_takes_its_word_of_the_call_for_its_place(seed: int) -> None:
    noise = gumbel([seed], [77], 11, "cpu")[0]
    for token in range(11):
        word = python_philox((token // 4, 77, 0, 0), (seed & MASK, seed >> 32))[token % 4]
        expected = -math.log(-math.log((word + 0.5) / 2**32))
        assert noise[token].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_noise_of_a_row_depends_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = [5, 2**64 - 1, 5, 9], [0, 3, 4, 2**32 - 1]
    whole = gumbel(seeds, positions, 403, "cpu")
    for i in range(4):
        torch.testing.assert_close(gumbel(seeds[i : i + 1], positions[i : i + 1], 403, "cpu")[0], whole[i])
    torch.testing.assert_close(gumbel(seeds, positions, 398, "cpu"), whole[:, :398])
    monkeypatch.setattr(module, "_CPU_CALLS_PER_PASS", 40)
    torch.testing.assert_close(gumbel(seeds, positions, 403, "cpu"), whole)
    assert len(set(whole[:, 0].tolist())) == 4


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(range(1000), range(1000), 1000, "cpu").double()
    assert noise.shape == (1000, 1000)
    assert noise.mean().item() == pytest.approx(0.57721566, abs=5 * 1.2825 / 1e3)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert stats.kstest(noise.flatten()[::4].numpy(), "gumbel_r").pvalue > 1e-3
    # The far tail, 45 of a million.
    assert (noise > 10).sum().item() == pytest.approx(1e6 * -math.expm1(-math.exp(-10)), abs=5 * math.sqrt(45))


def test_neighbouring_tokens_positions_and_seeds_are_uncorrelated() -> None:
    noise = gumbel(range(300), [7] * 300, 1000, "cpu")
    later = gumbel(range(300), [8] * 300, 1000, "cpu")
    for left, right in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]), (noise, later)):
        correlation = torch.corrcoef(torch.stack((left.flatten(), right.flatten())))[0, 1]
        assert abs(correlation.item()) < 5 / math.sqrt(left.numel())


def test_extreme_words_stay_strictly_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = (0, MASK, 0, MASK)
    monkeypatch.setattr(module, "philox", lambda *_: tuple(torch.tensor([[word]]) for word in extremes))
    noise = gumbel([0], [0], 4, "cpu")[0].tolist()
    # The largest of 2**32 values: float32 uniforms would end at 16.6, or at infinity.
    assert noise == pytest.approx([-math.log(33 * math.log(2)), 33 * math.log(2)] * 2, rel=1e-6)


def test_derived_seeds_are_stable_distinct_and_64_bit() -> None:
    seeds = {derive_seed(seed, i, j) for seed in (0, 1, 2**64 - 1) for i in range(20) for j in range(20)}
    assert len(seeds) == 1200
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert any(seed >= 2**63 for seed in seeds)
    # Fixed for ever: a client's seed must give the same text after an upgrade.
    assert derive_seed(1234, 0, 0) == 0x110FCBFDB79187DD
