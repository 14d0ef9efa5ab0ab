"""Rung 10: the same tiles, with each product with V put off by one step, so that it can run beside the next softmax.

Run me: ``python s10_pipelined.py`` prints what is issued together in each step of one program.
"""

from __future__ import annotations

import s05_fa2
import torch
from s05_fa2 import LOG2E, finalize
from torch import Tensor


# --8<-- [start:rung]
def program(
    pid: int, q: Tensor, k: Tensor, v: Tensor, BLOCK_M: int, BLOCK_N: int, log: list[str]
) -> tuple[Tensor, Tensor]:
    """Rung 5 in another order, last key block first. What ``log`` names together, no one has to wait for in between."""
    qi = q[pid * BLOCK_M : (pid + 1) * BLOCK_M]
    unit_log2 = q.shape[1] ** -0.5 * LOG2E
    acc = torch.zeros(qi.shape[0], v.shape[1], dtype=q.dtype)
    m_i = torch.full((qi.shape[0],), -torch.inf, dtype=q.dtype)
    l_i = torch.zeros(qi.shape[0], dtype=q.dtype)
    p, v_before = torch.zeros(qi.shape[0], 0, dtype=q.dtype), v[:0]  # nothing waits yet
    for j in range(-(-k.shape[0] // BLOCK_N) - 1, -1, -1):
        keys = slice(j * BLOCK_N, (j + 1) * BLOCK_N)
        log.append(f"QK{j}" + (f" + PV{j + 1}, softmax {j}" if p.shape[1] else f", softmax {j}"))
        s = qi @ k[keys].T  # these two products are in flight together,
        acc = acc + p @ v_before  # and the second goes on during the softmax of the first
        m_new = torch.maximum(m_i, s.max(1).values)
        alpha = torch.exp2((m_i - m_new) * unit_log2)
        p, v_before = torch.exp2((s - m_new[:, None]) * unit_log2), v[keys]
        l_i, m_i = l_i * alpha + p.sum(1), m_new
        acc = acc * alpha[:, None]  # after the product has landed: it was made under the old maximum
    log.append("PV0")
    return finalize(acc + p @ v_before, m_i, l_i, unit_log2)


# --8<-- [end:rung]


def attention(q: Tensor, k: Tensor, v: Tensor, BLOCK_M: int = 16, BLOCK_N: int = 16) -> tuple[Tensor, Tensor]:
    """Every program of the grid. Returns o (M, Dv) and the log-sum-exp (M,)."""
    done = [program(pid, q, k, v, BLOCK_M, BLOCK_N, []) for pid in range(-(-q.shape[0] // BLOCK_M))]
    return torch.cat([o for o, _ in done]), torch.cat([lse for _, lse in done])


if __name__ == "__main__":
    from s01_softmax import example

    q, k, v = example(16, 64)
    steps: list[str] = []
    program(0, q, k, v, 16, 16, steps)
    print("\n".join(steps))
    print("rung 5 - rung 10:", (s05_fa2.attention(q, k, v)[0] - attention(q, k, v)[0]).abs().max().item())
