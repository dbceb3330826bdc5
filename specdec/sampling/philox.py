"""Counter-based random numbers: the same on every device, for every batch, after every restart.

Philox 4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.2) maps a
64-bit key and a 128-bit counter to four 32-bit words. Key: the sequence's seed. Counter: (index, position, purpose, 0).
No generator has a state, so a token's noise is a function of (seed, position, token id) and of nothing else.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from specdec.kernels import fixed

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32_BITS = 0xFFFFFFFF
_NUM_ROUNDS = 10
_NUM_BROADCAST_ROUNDS = 3
_WORDS_PER_CALL = 4
# Calls per pass. A CPU core keeps the six buffers of a pass in its second-level cache; a GPU wants long kernels.
_CPU_CALLS_PER_PASS = 1 << 15
_GPU_CALLS_PER_PASS = 1 << 21


class Purpose(IntEnum):
    """What a random number is for; part of the counter, so that no two uses share numbers."""

    GUMBEL = 0
    """The noise both models share under the coupled rule."""
    DRAFT = 1
    """The drafter's draw from its truncated distribution, under the rejection rule."""
    TARGET = 2
    """The target's acceptance test and its own draw, under the rejection rule."""


def derive_seed(seed: int, prompt_index: int, sample_index: int) -> int:
    """The seed in [0, 2**64) of one sample of one prompt of a request; the same in every process and version."""
    mask = (1 << 64) - 1
    packed = struct.pack("<QQQ", seed & mask, prompt_index & mask, sample_index & mask)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"specdec-seed").digest(), "little")


def philox(counter: Words, key: Tensor) -> Words:
    """Philox 4x32-10.

    Args:
        counter: Four int64 tensors of 32-bit values, each of a shape that broadcasts to [N, C].
        key: int64 [2, N, 1], 32-bit values.

    Returns:
        Four int64 tensors [N, C] of 32-bit values; no two share memory.
    """
    steps = torch.tensor(_KEY_STEPS, device=key.device) * torch.arange(_NUM_ROUNDS, device=key.device).unsqueeze(1)
    keys = ((key + steps.view(_NUM_ROUNDS, 2, 1, 1)) & _LOW_32_BITS).unbind()
    c0, c1, c2, c3 = counter
    # As operands, zero-dimensional CPU tensors cost less than Python numbers do, and enter CUDA kernels as scalars.
    multiplier0, multiplier1 = (torch.tensor(value) for value in _MULTIPLIERS)
    mask, half = torch.tensor(_LOW_32_BITS), torch.tensor(32)
    # c1 and c3 carry garbage above bit 31, which is masked away where it would matter. The first rounds work on the
    # small shapes that the words still have, and leave all of them at [N, C].
    for key0, key1 in keys[:_NUM_BROADCAST_ROUNDS]:
        product0, product1 = c0 * multiplier0, c2 * multiplier1
        c0 = ((product1 >> half) ^ (c1 ^ key0)).bitwise_and_(mask)
        c2 = ((product0 >> half) ^ (c3 ^ key1)).bitwise_and_(mask)
        c1, c3 = product1, product0
    spare0, spare1 = torch.empty_like(c0), torch.empty_like(c2)
    for key0, key1 in keys[_NUM_BROADCAST_ROUNDS:]:
        torch.mul(c0, multiplier0, out=spare0)
        torch.mul(c2, multiplier1, out=spare1)
        torch.bitwise_right_shift(spare1, half, out=c0)
        c0.bitwise_xor_(c1.bitwise_xor_(key0)).bitwise_and_(mask)
        torch.bitwise_right_shift(spare0, half, out=c2)
        c2.bitwise_xor_(c3.bitwise_xor_(key1)).bitwise_and_(mask)
        c1, c3, spare0, spare1 = spare1, spare0, c3, c1
    return c0, c1.bitwise_and_(mask), c2, c3.bitwise_and_(mask)


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str) -> Tensor:
    """Standard Gumbel noise for every token of the vocabulary at one position per row.

    Token t takes word t % 4 of the call with counter (t // 4, position, GUMBEL, 0), so its noise does not depend on
    ``vocab_size``. See :func:`specdec.kernels.fixed.gumbel` for what is made of the word: the same bits on all devices.

    Args:
        seeds: 64-bit seeds in [0, 2**64), N of them.
        positions: Absolute positions of the tokens to be chosen, below 2**32, N of them.
        vocab_size: V.
        device: Where the noise is made.

    Returns:
        float32 [N, V].
    """
    num_calls = -(-vocab_size // _WORDS_PER_CALL)
    noise = torch.empty(len(seeds), vocab_size, device=device)
    indexes = torch.arange(num_calls, device=device).unsqueeze(0)
    calls_per_pass = _CPU_CALLS_PER_PASS if noise.device.type == "cpu" else _GPU_CALLS_PER_PASS
    rows_per_pass = max(1, calls_per_pass // num_calls)
    for start in range(0, len(seeds), rows_per_pass):
        rows = slice(start, start + rows_per_pass)
        words = _call(indexes, seeds[rows], positions[rows], Purpose.GUMBEL)
        noise[rows] = fixed.gumbel(torch.stack(words, 2)).flatten(1)[:, :vocab_size]
    return noise


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, device: torch.device | str, num_pairs: int = 1
) -> Tensor:
    """Pairs of independent uniforms, strictly inside (0, 1), for each (seed, position, purpose).

    Args:
        seeds: 64-bit seeds in [0, 2**64), N of them.
        positions: Absolute positions below 2**32, N of them.
        purpose: What the numbers are for.
        device: Where they are made.
        num_pairs: P.

    Returns:
        float64 [N, 2 * P], of 52 random bits each: the first ones of all pairs, then the second ones.
    """
    words = _call(torch.arange(num_pairs, device=device).unsqueeze(0), seeds, positions, purpose)
    high, low = torch.cat((words[0], words[2]), 1), torch.cat((words[1], words[3]), 1)
    bits = (high << 20) | (low >> 12)
    return bits.double().add_(0.5).mul_(2.0**-52)


def _call(indexes: Tensor, seeds: Sequence[int], positions: Sequence[int], purpose: Purpose) -> Words:
    """Philox at counters (indexes [1, C], positions, purpose, 0), as four int64 [N, C] of one row per seed."""
    device = indexes.device
    # The unsigned seeds' bits, read as the signed integers torch has.
    seed = torch.tensor(array("q", array("Q", seeds).tobytes()), dtype=torch.int64, device=device)
    position = torch.tensor(positions, dtype=torch.int64, device=device).unsqueeze(1)
    constant = torch.full((1, 1), int(purpose), dtype=torch.int64, device=device)
    key = torch.stack((seed, seed >> 32)).bitwise_and_(_LOW_32_BITS).unsqueeze(2)
    return philox((indexes, position, constant, torch.zeros_like(constant)), key)
