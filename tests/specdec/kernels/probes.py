"""Kernels that show what functions of kernels give; imported where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.triton import fixed


@triton.jit
def all_three(word, value, scaled, noise, logs, masses, SIZE: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.arange(0, SIZE)
    tl.store(noise + at, fixed.gumbel(tl.load(word + at).to(tl.uint32)))
    tl.store(logs + at, fixed.log(tl.load(value + at)))
    tl.store(masses + at, fixed.mass(tl.load(scaled + at)))


@triton.jit
def noise(out, seeds, positions, CALLS: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: N803
    start = tl.program_id(0) * 4 * CALLS
    words = fixed.words(tl.load(seeds), tl.load(positions), start, CALLS)
    tl.store(out + start + tl.arange(0, 4 * CALLS), fixed.gumbel(words))
