"""Logarithm, exponential and Gumbel noise of fixed float32 operations: the same bits on every device.

Libraries round these functions differently by a unit in the last place. Here each is a polynomial, written as sums and
products that are rounded one by one, so that torch on a CPU, torch on a GPU and the kernels in
:mod:`specdec.kernels.triton.fixed`, which repeat them operation by operation, agree bit for bit. Relative errors are
below 1e-7. The polynomials are Chebyshev interpolations; arguments are reduced as Cody and Waite 1980, "Software manual
for the elementary functions", do it.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def log(values: Tensor) -> Tensor:
    """Natural logarithm of positive, normal float32 numbers: a new tensor."""
    bits = values.view(torch.int32)
    exponent = (bits - HALF_ROOT_BITS).bitwise_right_shift_(23)
    fraction = (bits - (exponent << 23)).view(torch.float32).sub_(1.0)
    return _log_of_parts(fraction, exponent.float())


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log(u)), where u = (word + 1/2) / 2**32.

    The winners are tokens with u next to 1, where float32 has steps of 2**-24. There -log(u) is taken of 1 - u, which
    the word's complement gives exactly.

    Args:
        words: int64, values of 32 bits.

    Returns:
        float32, of the same shape.
    """
    uniform = words.to(torch.float32).add_(0.5).mul_(2.0**-32)
    complement = (_LOW_32_BITS - words).to(torch.float32).add_(0.5).mul_(2.0**-32)
    is_near = complement < 0.25
    bits = uniform.view(torch.int32)
    exponent = (bits - HALF_ROOT_BITS).bitwise_right_shift_(23).masked_fill_(is_near, 0)
    fraction = (bits - (exponent << 23)).view(torch.float32).sub_(1.0)
    fraction = torch.where(is_near, complement.neg_(), fraction)
    return log(_log_of_parts(fraction, exponent.float()).neg_()).neg_()


def mass(scaled: Tensor) -> Tensor:
    """round_down(exp(x) * 2**40) for x <= 0: int64, whose sums have no order."""
    turns = (scaled * LOG2_E).add_(0.5).floor_().clamp_(min=-64.0)
    rest = scaled.clamp(min=-64.0).sub_(turns * LN2_HIGH).sub_(turns * LN2_LOW)
    total = torch.full_like(rest, EXP_TERMS[-1])
    for term in EXP_TERMS[-2::-1]:
        total.mul_(rest).add_(term)
    total.mul_(rest).mul_(rest).add_(rest).add_(1.0)
    power = (turns.to(torch.int32) + (127 + MASS_BITS)).bitwise_left_shift_(23).view(torch.float32)
    return total.mul_(power).to(torch.int64)


def _log_of_parts(fraction: Tensor, exponent: Tensor) -> Tensor:
    """log(2**exponent * (1 + fraction)): the first argument's memory, or new."""
    square = fraction * fraction
    total = torch.full_like(fraction, LOG_TERMS[-1])
    for term in LOG_TERMS[-2::-1]:
        total.mul_(fraction).add_(term)
    total.mul_(fraction).mul_(square).add_(exponent * LN2_LOW).sub_(square.mul_(0.5))
    return fraction.add_(total).add_(exponent.mul_(LN2_HIGH))
