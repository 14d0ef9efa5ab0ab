"""Rung 6: the backward pass from L alone. Each tile of P is computed a second time and thrown away a second time.

Run me: ``python s06_backward.py`` compares the gradients with those that autograd finds for rung 2.
"""

from __future__ import annotations

import s02_safe
import s05_fa2
import torch
from torch import Tensor


# --8<-- [start:dense]
def backward_dense(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The formulas with P in memory: what the tiled version below must reproduce."""
    scale = q.shape[1] ** -0.5
    p = torch.softmax(q @ k.T * scale, 1)  # [M, N]
    dp = do @ v.T  # [M, N]
    ds = p * (dp - (p * dp).sum(1, keepdim=True))  # [M, N]
    return scale * ds @ k, scale * ds.T @ q, p.T @ do


# --8<-- [end:dense]


# --8<-- [start:rung]
def tile(q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, scale: float):
    """P and dS of one tile, from the saved log-sum-exp: no maximum, no sum, no order."""
    p = torch.exp(q @ k.T * scale - lse[:, None])  # [BLOCK_M, BLOCK_N], already normalised
    dp = do @ v.T
    return p, p * (dp - delta[:, None])


def dkdv_program(pid, q, k, v, do, lse, delta, BLOCK_M: int, BLOCK_N: int) -> tuple[Tensor, Tensor]:
    """One block of keys stays; the queries stream past. No other program adds to these rows of dK and dV."""
    kj, vj = k[pid * BLOCK_N : (pid + 1) * BLOCK_N], v[pid * BLOCK_N : (pid + 1) * BLOCK_N]
    scale = q.shape[1] ** -0.5
    dk, dv = torch.zeros_like(kj), torch.zeros_like(vj)
    for start_m in range(0, q.shape[0], BLOCK_M):
        i = slice(start_m, start_m + BLOCK_M)
        p, ds = tile(q[i], kj, vj, do[i], lse[i], delta[i], scale)
        dv += p.T @ do[i]
        dk += ds.T @ q[i]
    return dk * scale, dv


def dq_program(pid, q, k, v, do, lse, delta, BLOCK_M: int, BLOCK_N: int) -> Tensor:
    """One block of queries stays; the keys stream past, as in the forward pass."""
    i = slice(pid * BLOCK_M, (pid + 1) * BLOCK_M)
    scale = q.shape[1] ** -0.5
    dq = torch.zeros_like(q[i])
    for start_n in range(0, k.shape[0], BLOCK_N):
        j = slice(start_n, start_n + BLOCK_N)
        dq += tile(q[i], k[j], v[j], do[i], lse[i], delta[i], scale)[1] @ k[j]
    return dq * scale


# --8<-- [end:rung]


def backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, BLOCK_M: int = 16, BLOCK_N: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward for (o, L), the delta pre-pass, then the two grids."""
    o, lse = s05_fa2.attention(q, k, v, BLOCK_M, BLOCK_N)
    delta = (do * o).sum(1)  # [M], equal to the row sum of P * dP, which would need the whole row
    state = (q, k, v, do, lse, delta, BLOCK_M, BLOCK_N)
    dkdv = [dkdv_program(pid, *state) for pid in range(-(-k.shape[0] // BLOCK_N))]
    dq = torch.cat([dq_program(pid, *state) for pid in range(-(-q.shape[0] // BLOCK_M))])
    return dq, torch.cat([dk for dk, _ in dkdv]), torch.cat([dv for _, dv in dkdv])


if __name__ == "__main__":
    from s01_softmax import example

    q, k, v = (x.requires_grad_() for x in example())
    o = s02_safe.attention(q, k, v)
    do = torch.randn_like(o)
    expected = torch.autograd.grad(o, (q, k, v), do)
    with torch.no_grad():
        for name, want, got in zip(("dq", "dk", "dv"), expected, backward(q, k, v, do), strict=True):
            print(name, "differs from autograd by", (want - got).abs().max().item())
