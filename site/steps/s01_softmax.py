"""Rung 1: attention as the formula says it, for one head. Every later rung must return the same numbers.

Run me: ``python s01_softmax.py`` shows where the formula, taken literally, breaks.
"""

from __future__ import annotations

import torch
from torch import Tensor


# --8<-- [start:rung]
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (M, D), k (N, D), v (N, Dv) -> o (M, Dv). Writes S and P, M x N numbers each, to memory."""
    s = q @ k.T * q.shape[1] ** -0.5  # [M, N]
    e = torch.exp(s)  # [M, N]
    p = e / e.sum(1, keepdim=True)  # [M, N]
    return p @ v  # [M, Dv]


# --8<-- [end:rung]


def example(m: int = 24, n: int = 40, d: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v in float64: rungs are compared as algebra, so rounding should not blur the comparison."""
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, d, generator=gen, dtype=torch.float64) for rows in (m, n, n))  # type: ignore[return-value]


if __name__ == "__main__":
    q, k, v = example()
    print("ordinary scores:      ", attention(q, k, v)[0, :3])
    print("scores of about 1000: ", attention(1000 * q.float(), k.float(), v.float())[0, :3], "exp overflowed")
