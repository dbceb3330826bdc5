"""Logarithm, exponential and Gumbel noise of fixed float32 operations: the same bits on every device.

Libraries round these functions differently by a unit in the last place. Here each is a polynomial, written as sums and
products that are rounded one by one, so that numpy, torch on a CPU or a GPU, and the kernels in
:mod:`specdec.kernels.triton.fixed`, which repeat them operation by operation, agree bit for bit. Relative errors are
below 1e-7. The polynomials are Chebyshev interpolations; arguments are reduced as Cody and Waite 1980, "Software manual
for the elementary functions", do it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array", Tensor, NDArray[Any])
"""A tensor, or an array: on a CPU numpy's operations cost less, and there are many small ones."""

LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""Their sum is log 2, and a small integer times the first one is exact."""
LOG2_E = 1.44269504
HALF_ROOT_BITS = 0x3F3504F3
"""The float32 sqrt(1/2) as an integer: mantissas are taken from there to twice that."""
LOG_TERMS = (
    0.3333333134651184,
    -0.24999989569187164,
    0.20000708103179932,
    -0.1666848063468933,
    0.14249937236309052,
    -0.12411050498485565,
    0.11661510914564133,
    -0.115712009370327,
    0.07149753719568253,
)
"""Of (log(1 + t) - t + t**2 / 2) / t**3, the constant first."""
EXP_TERMS = (
    0.5,
    0.1666666716337204,
    0.04166645556688309,
    0.008333297446370125,
    0.0013934544986113906,
    0.00019900444021914154,
)
"""Of (exp(t) - 1 - t) / t**2, the constant first."""
MASS_BITS = 40
"""The mass of a row's most likely token is 2**40."""
_LOW_32_BITS = 0xFFFFFFFF


def log(values: Array) -> Array:
    """Natural logarithm of positive, normal float32 numbers: a new array."""
    fraction, exponent = _parts(values)
    return _log_of_parts(fraction, exponent)


def gumbel(words: Array) -> Array:
    """Standard Gumbel noise -log(-log(u)), where u = (word + 1/2) / 2**32.

    The winners are tokens with u next to 1, where float32 has steps of 2**-24. There -log(u) is taken of 1 - u, which
    the word's complement gives exactly.

    Args:
        words: Integers of 64 bits, values of 32.

    Returns:
        float32, of the same shape.
    """
    xp = module_of(words)
    uniform = _as_float(words)
    uniform += 0.5
    uniform *= 2.0**-32
    complement = _as_float(_LOW_32_BITS - words)
    complement += 0.5
    complement *= 2.0**-32
    fraction, exponent = _parts(uniform)
    is_near = complement < 0.25
    fraction = xp.where(is_near, -complement, fraction)
    exponent *= ~is_near
    noise: Array = -log(-_log_of_parts(fraction, exponent))
    return noise


def mass(scaled: Array) -> Array:
    """round_down(exp(x) * 2**40) for x <= 0: int64, whose sums have no order."""
    xp = module_of(scaled)
    turns = scaled * LOG2_E
    turns += 0.5
    turns = xp.clip(xp.floor(turns), -64.0, None)
    rest = xp.clip(scaled, -64.0, None)
    rest -= turns * LN2_HIGH
    rest -= turns * LN2_LOW
    total = rest * EXP_TERMS[-1]
    for term in EXP_TERMS[-2::-1]:
        total += term
        total *= rest
    total *= rest
    total += rest
    total += 1.0
    power = (xp.asarray(turns, dtype=xp.int32) + (127 + MASS_BITS)) << 23
    total *= power.view(xp.float32)
    whole: Array = xp.asarray(total, dtype=xp.int64)
    return whole


def module_of(values: Tensor | NDArray[Any]) -> Any:
    """The module whose functions take these values: torch or numpy, which have those used here in common."""
    module: ModuleType = torch if isinstance(values, Tensor) else np
    return module


def _as_float(values: Array) -> Array:
    xp = module_of(values)
    floats: Array = xp.asarray(values, dtype=xp.float32)
    return floats


def _parts(values: Array) -> tuple[Array, Array]:
    """Of 2**exponent * (1 + fraction), which are positive and normal: fraction and exponent, float32 and new."""
    xp = module_of(values)
    bits = values.view(xp.int32)
    exponent = (bits - HALF_ROOT_BITS) >> 23
    fraction = (bits - (exponent << 23)).view(xp.float32)
    fraction -= 1.0
    return fraction, _as_float(exponent)


def _log_of_parts(fraction: Array, exponent: Array) -> Array:
    """log(2**exponent * (1 + fraction)); both are changed."""
    square = fraction * fraction
    total = fraction * LOG_TERMS[-1]
    for term in LOG_TERMS[-2::-1]:
        total += term
        total *= fraction
    total *= square
    total += exponent * LN2_LOW
    square *= 0.5
    total -= square
    fraction += total
    exponent *= LN2_HIGH
    fraction += exponent
    return fraction
