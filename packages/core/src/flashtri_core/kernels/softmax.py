"""Tile mathematics of attention: no loads, no stores, no addresses.

Scores arrive in multiples of a positive ``unit`` (the softmax scale, the softcap, or 1), and ``unit_log2`` is that unit
times log2(e). Folding it into the argument of exp2 makes scale, base change and subtraction of the maximum one
multiply-add per score. Names that end in ``_log2`` are base-2 quantities; LSE is a natural logarithm.
"""

from __future__ import annotations

from .._jit import jit, tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


# --8<-- [start:online-softmax]
@jit
def online_softmax_step(acc, m_i, l_i, s, unit_log2):
    """Fold one tile of scores into the running softmax: m the maximum so far, l the sum of exp(s - m), acc unnormalised.

    A larger maximum rescales what was accumulated by alpha = exp(m_old - m_new): the one correction that keeps tiling
    exact (Milakov and Gimelshein 2018; FlashAttention, algorithm 1). A row whose scores are all -inf keeps m = -inf;
    its pivot is taken as 0 so that exp2 sees -inf, never NaN.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1))  # [BLOCK_M]
    pivot_log2 = tl.where(m_new == float("-inf"), 0.0, m_new * unit_log2)  # [BLOCK_M]
    alpha = tl.math.exp2(m_i * unit_log2 - pivot_log2)  # [BLOCK_M]
    p = tl.math.exp2(s * unit_log2 - pivot_log2[:, None])  # [BLOCK_M, BLOCK_N]
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


# --8<-- [start:bwd-p-ds]
@jit
def p_from_lse(s, lse_log2, unit_log2):
    """Rebuild the probabilities from the saved log-sum-exp: no running maximum is needed the second time."""
    return tl.math.exp2(s * unit_log2 - lse_log2)  # [BLOCK_M, BLOCK_N] or transposed


@jit
def ds_from_p(p, dp, delta):
    """Gradient of the softmax: ds = p * (dp - delta), delta the row sum of dO * O less the gradient of LSE."""
    return p * (dp - delta)  # [BLOCK_M, BLOCK_N] or transposed


# --8<-- [end:bwd-p-ds]


@jit
def pivot_of(lse):
    """LSE of a row without keys is -inf; read as +inf it makes exp2(s - lse) zero for every score, -inf included."""
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
