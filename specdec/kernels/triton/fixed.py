"""The functions of :mod:`specdec.kernels.fixed`, operation by operation, and the words they are taken of.

Kernels that use them are compiled with ``enable_fp_fusion=False``: no product and sum are contracted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels import fixed

_LN2_HIGH, _LN2_LOW = tl.constexpr(fixed.LN2_HIGH), tl.constexpr(fixed.LN2_LOW)
_LOG2_E, _HALF_ROOT_BITS = tl.constexpr(fixed.LOG2_E), tl.constexpr(fixed.HALF_ROOT_BITS)
_BIAS = tl.constexpr(127 + fixed.MASS_BITS)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (tl.constexpr(term) for term in fixed.LOG_TERMS)
_E0, _E1, _E2, _E3, _E4, _E5 = (tl.constexpr(term) for term in fixed.EXP_TERMS)


@triton.jit
def _log_of_parts(t, exponent):
    square = t * t
    total = ((((((((_L8 * t + _L7) * t + _L6) * t + _L5) * t + _L4) * t + _L3) * t + _L2) * t + _L1) * t + _L0) * t
    total = total * square + exponent * _LN2_LOW - square * 0.5
    return (t + total) + exponent * _LN2_HIGH


@triton.jit
def log(x):
    """See :func:`specdec.kernels.fixed.log`."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _HALF_ROOT_BITS) >> 23
    fraction = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return _log_of_parts(fraction, exponent.to(tl.float32))


@triton.jit
def gumbel(word):
    """See :func:`specdec.kernels.fixed.gumbel`; words are uint32."""
    uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    complement = ((4294967295 - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    is_near = complement < 0.25
    bits = uniform.to(tl.int32, bitcast=True)
    exponent = tl.where(is_near, 0, (bits - _HALF_ROOT_BITS) >> 23)
    fraction = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    fraction = tl.where(is_near, -complement, fraction)
    return -log(-_log_of_parts(fraction, exponent.to(tl.float32)))


@triton.jit
def mass(scaled):
    """See :func:`specdec.kernels.fixed.mass`."""
    turns = tl.maximum(tl.floor(scaled * _LOG2_E + 0.5), -64.0)
    rest = tl.maximum(scaled, -64.0) - turns * _LN2_HIGH - turns * _LN2_LOW
    total = (((((_E5 * rest + _E4) * rest + _E3) * rest + _E2) * rest + _E1) * rest + _E0) * rest * rest + rest + 1.0
    power = ((turns.to(tl.int32) + _BIAS) << 23).to(tl.float32, bitcast=True)
    return (total * power).to(tl.int64)


@triton.jit
def words(seed, position, start, CALLS: tl.constexpr):
    """The uint32 words of tokens ``start`` to ``start + 4 * CALLS``, as :mod:`specdec.sampling.noise` counts them."""
    call = (start // 4 + tl.arange(0, CALLS)).to(tl.uint32)
    zero = call * 0
    w0, w1, w2, w3 = tl.philox(seed, call, zero + position.to(tl.uint32), zero, zero)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
