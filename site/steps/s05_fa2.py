"""Rung 5: FlashAttention-2's three changes. Queries outside, one division at the end, one program per query block.

Run me: ``python s05_fa2.py`` runs the programs in random order: they do not know of each other.
"""

from __future__ import annotations

import math

import s04_tiled
import torch
from torch import Tensor

LOG2E = math.log2(math.e)


# --8<-- [start:rung]
def step(acc: Tensor, m_i: Tensor, l_i: Tensor, s: Tensor, v: Tensor, unit_log2: float) -> tuple[Tensor, ...]:
    """Fold one tile into the state. ``acc`` is not divided; scale and log2(e) ride inside the argument of exp2."""
    m_new = torch.maximum(m_i, s.max(1).values)  # [BLOCK_M]
    pivot = torch.where(m_new == -torch.inf, 0.0, m_new * unit_log2)  # a row without keys yet must not give inf - inf
    alpha = torch.exp2(m_i * unit_log2 - pivot)
    p = torch.exp2(s * unit_log2 - pivot[:, None])  # [BLOCK_M, BLOCK_N]
    return acc * alpha[:, None] + p @ v, m_new, l_i * alpha + p.sum(1)


def finalize(acc: Tensor, m_i: Tensor, l_i: Tensor, unit_log2: float) -> tuple[Tensor, Tensor]:
    """The one division, and the one number per row that the backward pass will need."""
    l_safe = torch.where(l_i == 0, 1.0, l_i)
    return acc / l_safe[:, None], (m_i * unit_log2 + torch.log2(l_safe)) / LOG2E


def program(pid: int, q: Tensor, k: Tensor, v: Tensor, BLOCK_M: int, BLOCK_N: int) -> tuple[Tensor, Tensor]:
    """What one program of the grid does: its own rows, every key, and nothing that another program needs."""
    qi = q[pid * BLOCK_M : (pid + 1) * BLOCK_M]  # loaded once, stays
    unit_log2 = q.shape[1] ** -0.5 * LOG2E
    acc = torch.zeros(qi.shape[0], v.shape[1], dtype=q.dtype)
    m_i = torch.full((qi.shape[0],), -torch.inf, dtype=q.dtype)
    l_i = torch.zeros(qi.shape[0], dtype=q.dtype)
    for start_n in range(0, k.shape[0], BLOCK_N):
        j = slice(start_n, start_n + BLOCK_N)
        acc, m_i, l_i = step(acc, m_i, l_i, qi @ k[j].T, v[j], unit_log2)
    return finalize(acc, m_i, l_i, unit_log2)


# --8<-- [end:rung]


def attention(q: Tensor, k: Tensor, v: Tensor, BLOCK_M: int = 16, BLOCK_N: int = 16) -> tuple[Tensor, Tensor]:
    """Launch the grid, in an order no program may depend on. Returns o (M, Dv) and the log-sum-exp (M,)."""
    blocks = -(-q.shape[0] // BLOCK_M)
    done = {pid: program(pid, q, k, v, BLOCK_M, BLOCK_N) for pid in torch.randperm(blocks).tolist()}
    return torch.cat([done[pid][0] for pid in range(blocks)]), torch.cat([done[pid][1] for pid in range(blocks)])


if __name__ == "__main__":
    from s01_softmax import example

    q, k, v = example()
    print("rung 4 - rung 5:", (s04_tiled.attention(q, k, v) - attention(q, k, v)[0]).abs().max().item())
