"""Rung 4: a block of keys at a time, as the first FlashAttention does it: keys outside, queries inside.

Run me: ``python s04_tiled.py`` counts the numbers that cross the memory bus, next to rung 2's.
"""

from __future__ import annotations

import s03_online
import torch
from torch import Tensor


# --8<-- [start:rung]
def attention(q: Tensor, k: Tensor, v: Tensor, BLOCK_M: int = 16, BLOCK_N: int = 16) -> Tensor:
    """One [BLOCK_M, BLOCK_N] tile of S at a time. m, l and o wait in memory while other rows are served."""
    rows = q.shape[0]
    m = torch.full((rows,), -torch.inf, dtype=q.dtype)
    l = torch.zeros(rows, dtype=q.dtype)
    o = torch.zeros(rows, v.shape[1], dtype=q.dtype)
    for start_n in range(0, k.shape[0], BLOCK_N):
        kj, vj = k[start_n : start_n + BLOCK_N], v[start_n : start_n + BLOCK_N]
        for start_m in range(0, rows, BLOCK_M):
            i = slice(start_m, start_m + BLOCK_M)
            s = q[i] @ kj.T * q.shape[1] ** -0.5  # [BLOCK_M, BLOCK_N], the only scores there are
            m_new = torch.maximum(m[i], s.max(1).values)
            alpha = torch.exp(m[i] - m_new)
            p = torch.exp(s - m_new[:, None])
            l_new = l[i] * alpha + p.sum(1)
            o[i] = o[i] * (l[i] * alpha / l_new)[:, None] + p @ vj / l_new[:, None]
            m[i], l[i] = m_new, l_new
    return o


# --8<-- [end:rung]


# --8<-- [start:traffic]
def traffic(m: int, n: int, d: int, BLOCK_M: int, BLOCK_N: int) -> dict[str, int]:
    """Numbers moved between main memory and the chip, counted line by line, for rungs 2, 4 and 5."""
    blocks_m, blocks_n = -(-m // BLOCK_M), -(-n // BLOCK_N)
    inputs = (m + 2 * n) * d
    return {
        # q, k, v in; S out and in, P out and in; o out
        "ordinary": inputs + 4 * m * n + m * d,
        # k, v in once; q and o, m, l in and o, m, l out once per key block
        "keys outside": 2 * n * d + blocks_n * (m * d + 2 * (m * d + 2 * m)),
        # q in once, o and the log-sum-exp out once; k, v in once per query block
        "queries outside": m * d + blocks_m * 2 * n * d + m * d + m,
    }


# --8<-- [end:traffic]


if __name__ == "__main__":
    from s01_softmax import example

    q, k, v = example()
    print("rung 3 - rung 4:", (s03_online.attention(q, k, v) - attention(q, k, v)).abs().max().item())
    for name, count in traffic(8192, 8192, 64, 128, 64).items():
        print(f"{name:16} {count / 1e6:8.1f} million numbers moved per head at N = 8192, D = 64")
