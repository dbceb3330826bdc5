"""Counter-based random numbers: the same on every device, for every batch, after every restart.

Philox 4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.2) maps a
64-bit key and a 128-bit counter to four 32-bit words. Key: the sequence's seed. Counter: (index, position, 0, 0).
No generator has a state, so a token's noise is a function of (seed, position, token id) and of nothing else. It is kept
between steps: later rounds and other branches want a position's noise again.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels import fixed
from specdec.kernels.fixed import Array, module_of
from specdec.sampling.rows import on_device

Words = tuple[Array, Array, Array, Array]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32_BITS = 0xFFFFFFFF
_NUM_ROUNDS = 10
_WORDS_PER_CALL = 4
# Calls per pass. A CPU core keeps the buffers of a pass in its second-level cache; a GPU wants long kernels.
_CPU_CALLS_PER_PASS = 1 << 13
_GPU_CALLS_PER_PASS = 1 << 21


def derive_seed(seed: int, prompt_index: int, sample_index: int) -> int:
    """The seed in [0, 2**64) of one sample of one prompt of a request; the same in every process and version."""
    mask = (1 << 64) - 1
    packed = struct.pack("<QQQ", seed & mask, prompt_index & mask, sample_index & mask)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"specdec-seed").digest(), "little")


def philox(counter: Words[Array], key: Array) -> Words[Array]:
    """Philox 4x32-10.

    Args:
        counter: Four arrays of 32-bit values in 64-bit integers, each of a shape that broadcasts to [N, C].
        key: [2, N, 1], of the same type.

    Returns:
        Four arrays [N, C] of 32-bit values.
    """
    steps = module_of(key).asarray(_KEY_STEPS, dtype=key.dtype, device=key.device).reshape(2, 1, 1)
    c0, c1, c2, c3 = counter
    for _ in range(_NUM_ROUNDS):
        # c1 and c3 carry garbage above bit 31, which is masked away where it would matter.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ (c1 ^ key[0])) & _LOW_32_BITS
        c2 = ((product0 >> 32) ^ (c3 ^ key[1])) & _LOW_32_BITS
        c1, c3 = product1, product0
        key = (key + steps) & _LOW_32_BITS
    return c0, c1 & _LOW_32_BITS, c2, c3 & _LOW_32_BITS


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str) -> Tensor:
    """Standard Gumbel noise for every token of the vocabulary at one position per row.

    Token t takes word t % 4 of the call with counter (t // 4, position, 0, 0), so its noise does not depend on
    ``vocab_size``. See :func:`specdec.kernels.fixed.gumbel` for what is made of the word: the same bits on all devices.

    Args:
        seeds: 64-bit seeds in [0, 2**64), N of them.
        positions: Absolute positions of the tokens to be chosen, below 2**32, N of them.
        vocab_size: V.
        device: Where the noise is made.

    Returns:
        float32 [N, V].
    """
    device = torch.device(device)
    num_calls = -(-vocab_size // _WORDS_PER_CALL)
    noise = torch.empty(len(seeds), num_calls, _WORDS_PER_CALL, device=device)
    out = noise.numpy() if device.type == "cpu" else noise
    calls_per_pass = _CPU_CALLS_PER_PASS if device.type == "cpu" else _GPU_CALLS_PER_PASS
    rows_per_pass = max(1, calls_per_pass // num_calls)
    for start in range(0, len(seeds), rows_per_pass):
        rows = slice(start, start + rows_per_pass)
        for first in range(0, num_calls, calls_per_pass):
            calls = slice(first, min(first + calls_per_pass, num_calls))
            words = _call(calls, seeds[rows], positions[rows], device)
            out[rows, calls] = fixed.gumbel(module_of(out).stack(words, -1))
    return noise.flatten(1)[:, :vocab_size]


def _call(calls: slice, seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Words[Any]:
    """Philox at counters (calls, positions, 0, 0), as four arrays [N, C] of one row per seed.

    In numpy's uint64 on a CPU, else in torch's int64.
    """
    key = np.array(seeds, dtype=np.uint64)
    counters: list[NDArray[np.uint64]] = [
        np.arange(calls.start, calls.stop, dtype=np.uint64)[None],
        np.array(positions, dtype=np.uint64)[:, None],
        np.zeros((1, 1), dtype=np.uint64),
        np.zeros((1, 1), dtype=np.uint64),
        np.stack((key & _LOW_32_BITS, key >> 32))[:, :, None],
    ]
    if device.type == "cpu":
        c0, c1, c2, c3, keys = counters
        return philox((c0, c1, c2, c3), keys)
    t0, t1, t2, t3, tensor_keys = on_device(device, *(each.view(np.int64) for each in counters))
    return philox((t0, t1, t2, t3), tensor_keys)


_POSITIONS_PER_BLOCK = 8
_BYTES_PER_VALUE = 4

Block = tuple[int, int]
"""A seed, and a position divided by the positions per block."""


class NoiseCache:
    """The newest blocks of :func:`~specdec.sampling.noise.gumbel` noise, eight positions of one seed each.

    A round verifies positions that the round before has verified too, and a drafter's branches share theirs, so that
    most rows are made once and read several times; and a block of eight rows costs about three times one row. What
    comes out is exactly what ``gumbel`` gives. Not safe for several threads at once.

    Args:
        vocab_size: V.
        max_bytes: Memory for the blocks, taken at the first use; batches that would need more than half of it
            are served without keeping anything.
    """

    def __init__(self, vocab_size: int, max_bytes: int) -> None:
        self._vocab_size = vocab_size
        self._num_slots = max_bytes // (vocab_size * _POSITIONS_PER_BLOCK * _BYTES_PER_VALUE)
        self._slots: OrderedDict[Block, int] = OrderedDict()
        self._store: Tensor | None = None

    def rows(self, seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
        """Noise for N (seed, position) pairs: float32 [N, V] on ``device``, the caller's to change."""
        if self._num_slots < 2:
            return gumbel(seeds, positions, self._vocab_size, device)
        blocks = [(seed, position // _POSITIONS_PER_BLOCK) for seed, position in zip(seeds, positions, strict=True)]
        wanted = dict.fromkeys(blocks)
        if 2 * len(wanted) > self._num_slots:
            return gumbel(seeds, positions, self._vocab_size, device)
        store = self._stored(device)
        for block in wanted.keys() & self._slots.keys():
            self._slots.move_to_end(block)
        self._make([block for block in wanted if block not in self._slots], store)
        indexes = [
            self._slots[block] * _POSITIONS_PER_BLOCK + position % _POSITIONS_PER_BLOCK
            for block, position in zip(blocks, positions, strict=True)
        ]
        return store.index_select(0, torch.tensor(indexes, device=device))

    def _stored(self, device: torch.device) -> Tensor:
        """The blocks' rows, float32 [slots * 8, V]; emptied where the device has changed."""
        if self._store is None or self._store.device != device:
            self._slots.clear()
            self._store = torch.empty(self._num_slots * _POSITIONS_PER_BLOCK, self._vocab_size, device=device)
        return self._store

    def _make(self, missing: Sequence[Block], store: Tensor) -> None:
        """Compute blocks, in the places of those unused for longest."""
        if not missing:
            return
        offsets = range(_POSITIONS_PER_BLOCK)
        seeds = [seed for seed, _ in missing for _ in offsets]
        positions = [number * _POSITIONS_PER_BLOCK + offset for _, number in missing for offset in offsets]
        noise = gumbel(seeds, positions, self._vocab_size, store.device)
        for i, block in enumerate(missing):
            slot = len(self._slots)
            if slot == self._num_slots:
                _, slot = self._slots.popitem(last=False)
            self._slots[block] = slot
            store[slot * _POSITIONS_PER_BLOCK :][:_POSITIONS_PER_BLOCK] = noise[i * _POSITIONS_PER_BLOCK :][
                :_POSITIONS_PER_BLOCK
            ]
