"""Tile mathematics of attention: no loads, no stores, no addresses.

Scores arrive in multiples of a positive ``unit`` (the softmax scale, the softcap, or 1), and ``unit_log2`` is that unit
times log2(e). Folding it into the argument of exp2 makes scale, base change and subtraction of the maximum one
multiply-add per score. Names that end in ``_log2`` are base-2 quantities; LSE is a natural logarithm.
"""

from __future__ import annotations

from .._jit import jit, tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # stands for -inf where a difference must not be NaN
LARGE_LOG2 = tl.constexpr(2.0**28)  # fp32 numbers beyond are 32 apart or more; below, half a step is at most 8
BLURRED_LOG2 = tl.constexpr(2.0**24)  # fp32 numbers beyond are 2 apart or more


@jit
def power_of_two_from(x):
    """The smallest normal power of two that is at least x; x a positive fp32 scalar."""
    bits = tl.full((), x, tl.float32).to(tl.int32, bitcast=True) + 0x7FFFFF
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


# --8<-- [start:online-softmax]
@jit
def online_softmax_step(acc, m_i, l_i, s, unit_log2):
    """Fold one tile of scores into the running softmax: m the maximum so far, l the sum of exp(s - m), acc unnormalised.

    A larger maximum rescales what was accumulated by alpha = exp(m_old - m_new): the one correction that keeps tiling
    exact (Milakov and Gimelshein 2018; FlashAttention, algorithm 1). A row whose scores are all -inf keeps m = -inf;
    its pivot is finite so that exp2 sees -inf, never NaN.

    A GPU fuses multiplication and subtraction: s * unit is exact there, the pivot is rounded, and every p of the row
    bears the factor 2^e of that rounding. It cancels in acc / l, because alpha is the ratio of two rounded pivots: no
    compiler fuses through a maximum. Past LARGE_LOG2, where 2^e would soon leave fp16, the row's unit is the next power
    of two instead: both products are exact, so s = m gives p = 1, and any other fp32 score is at least 16 below m in base
    2 by either unit, so its p stays under 2^-16.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1))  # [BLOCK_M]
    unit = tl.where(tl.abs(m_new) * unit_log2 > LARGE_LOG2, power_of_two_from(unit_log2), unit_log2)  # [BLOCK_M]
    pivot_log2 = tl.maximum(m_new * unit, LOWEST)  # [BLOCK_M]
    alpha = tl.math.exp2(tl.maximum(m_i * unit, LOWEST) - pivot_log2)  # [BLOCK_M]
    p = tl.math.exp2(s * unit[:, None] - pivot_log2[:, None])  # [BLOCK_M, BLOCK_N]
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]  # [BLOCK_M, HEAD_DIM_V]
    return acc, m_new, l_i, p


# --8<-- [end:online-softmax]


# --8<-- [start:finalize]
@jit
def finalize(acc, m_i, l_i, unit_log2):
    """Divide once, after the last tile, and return (o, lse). A row that saw no key gives o = 0 and lse = -inf."""
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    o = acc / l_safe[:, None]  # [BLOCK_M, HEAD_DIM_V]
    lse = (m_i * unit_log2 + tl.math.log2(l_safe)) * LN2  # [BLOCK_M], natural logarithm
    return o, lse


# --8<-- [end:finalize]


# --8<-- [start:bwd-p]
@jit
def p_from_lse(s, lse_log2, unit_log2):
    """Rebuild the probabilities from the saved log-sum-exp: no running maximum is needed the second time."""
    return tl.math.exp2(s * unit_log2 - lse_log2)  # [BLOCK_M, BLOCK_N] or transposed


# --8<-- [end:bwd-p]


@jit
def pivot_of(lse):
    """What p_from_lse subtracts: lse * log2(e).

    LSE of a row without keys is -inf; read as +inf it makes exp2(s - lse) zero for every score, -inf included.

    An fp32 LSE past 2^24 in base 2 does not say how large p is, only where the scores lie. Such a row's pivot is raised by
    2^-16 of itself, far more than its rounding: p is then 0, and so are the row's gradients, where it would be anything up
    to infinity.
    """
    lse_log2 = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    size = tl.abs(lse_log2)
    return tl.where(size < BLURRED_LOG2, lse_log2, lse_log2 + size * 2.0**-16)
