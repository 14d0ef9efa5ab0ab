"""Rung 3: one key at a time. The row never exists as a whole; three running values stand for all of it.

Run me: ``python s03_online.py`` follows m, l and o of one row.
"""

from __future__ import annotations

import s02_safe
import torch
from torch import Tensor


# --8<-- [start:rung]
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One pass: after key j, ``o`` is exactly the attention over keys 0..j."""
    rows = q.shape[0]
    m = torch.full((rows,), -torch.inf, dtype=q.dtype)  # the largest score so far
    l = torch.zeros(rows, dtype=q.dtype)  # the sum of exp(s - m) so far
    o = torch.zeros(rows, v.shape[1], dtype=q.dtype)  # the answer so far
    for j in range(k.shape[0]):
        s = q @ k[j] * q.shape[1] ** -0.5  # [M]
        m_new = torch.maximum(m, s)
        alpha = torch.exp(m - m_new)  # 1 where the maximum stood, less where it moved
        p = torch.exp(s - m_new)
        l_new = l * alpha + p
        o = o * (l * alpha / l_new)[:, None] + (p / l_new)[:, None] * v[j]
        m, l = m_new, l_new
    return o


# --8<-- [end:rung]


if __name__ == "__main__":
    from s01_softmax import example

    q, k, v = example()
    print("rung 2 - rung 3:", (s02_safe.attention(q, k, v) - attention(q, k, v)).abs().max().item())
    for n in (1, 2, 4, 40):
        print(f"o of row 0 after {n:2} keys:", attention(q, k[:n], v[:n])[0, :3])
