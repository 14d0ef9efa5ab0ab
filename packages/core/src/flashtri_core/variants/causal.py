"""Causal attention, aligned bottom-right: the last query sees the last key.

Query i sees key j when ``j <= i + Nk - Nq``. With Nq = 2, Nk = 5 (a prompt chunk against a longer cache) and with
Nq = 5, Nk = 2, where the first three rows see nothing and give O = 0, LSE = -inf::

    1 1 1 1 0        0 0
    1 1 1 1 1        0 0
                     0 0
                     1 0
                     1 1

``is_causal=True`` of ``torch.nn.functional.scaled_dot_product_attention`` aligns top-left instead; the two agree when
Nq = Nk. The mask is applied on the tiles that the diagonal crosses and nowhere else.
"""

from __future__ import annotations

from torch import Tensor

from .._jit import jit, tl

KV_LEFT_EDGE = False  # do tiles before the free middle need the mask, in the loop over keys
Q_LEFT_EDGE, Q_RIGHT_EDGE = True, False  # the same for both ends of the loop over queries


@jit
def keep(i, j, Nq, Nk, args):
    return j <= i + (Nk - Nq)


@jit
def place(i, j, Nq, Nk, args):
    return i + (Nk - Nq), j, 0x7FFFFFFF


@jit
def kv_range(m0, m1, Nq, Nk, args):
    offset = Nk - Nq
    hi = tl.minimum(tl.maximum(m1 + offset, 0), Nk)
    full_hi = tl.minimum(tl.maximum(m0 + offset + 1, 0), hi)
    return 0, 0, full_hi, hi


@jit
def q_range(n0, n1, Nq, Nk, args):
    offset = Nk - Nq
    lo = tl.minimum(tl.maximum(n0 - offset, 0), Nq)
    full_lo = tl.minimum(tl.maximum(n1 - 1 - offset, lo), Nq)
    return lo, full_lo, Nq, Nq


def keep_eager(i: Tensor, j: Tensor, nq: int | Tensor, nk: int | Tensor, left: int, right: int) -> Tensor:
    """Eager twin of ``keep``."""
    return j <= i + (nk - nq)
