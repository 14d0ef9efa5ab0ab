"""Rung 8: fewer key heads than query heads. An index, not a copy; and in the backward pass, a sum.

Run me: ``python s08_gqa.py`` compares with keys and values that were expanded first.
"""

from __future__ import annotations

import s05_fa2
import s06_backward
import torch
from torch import Tensor


# --8<-- [start:rung]
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (Hq, M, D), k and v (Hk, N, D): query head h reads key head h // group."""
    group = q.shape[0] // k.shape[0]
    return torch.stack([s05_fa2.attention(q[h], k[h // group], v[h // group])[0] for h in range(q.shape[0])])


def backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One program owns a block of a *key* head and loops over the group, so the sum needs no atomics."""
    group = q.shape[0] // k.shape[0]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for hk in range(k.shape[0]):
        for h in range(hk * group, (hk + 1) * group):
            dq[h], dk_h, dv_h = s06_backward.backward(q[h], k[hk], v[hk], do[h])
            dk[hk] += dk_h
            dv[hk] += dv_h
    return dq, dk, dv


# --8<-- [end:rung]


def example(heads_q: int = 4, heads_k: int = 2, m: int = 20, n: int = 36, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (Hq, M, D), k, v (Hk, N, D) in float64."""
    gen = torch.Generator().manual_seed(0)
    shapes = (heads_q, m, d), (heads_k, n, d), (heads_k, n, d)
    return tuple(torch.randn(*shape, generator=gen, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


if __name__ == "__main__":
    q, k, v = example()
    expanded = attention(q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0))
    print("indexed - expanded:", (attention(q, k, v) - expanded).abs().max().item())
