"""Rung 2: subtract the row's maximum first. Same value, and exp never sees a positive number.

Run me: ``python s02_safe.py`` shows the scores that broke rung 1.
"""

from __future__ import annotations

import s01_softmax
import torch
from torch import Tensor


# --8<-- [start:rung]
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As rung 1, in three passes over S: one for m, one for l, one for the product with V."""
    s = q @ k.T * q.shape[1] ** -0.5  # [M, N]
    m = s.max(1, keepdim=True).values  # [M, 1]
    e = torch.exp(s - m)  # [M, N], every entry in (0, 1]
    l = e.sum(1, keepdim=True)  # [M, 1], at least 1
    return (e / l) @ v  # [M, Dv]


# --8<-- [end:rung]


if __name__ == "__main__":
    q, k, v = s01_softmax.example()
    print("rung 1 - rung 2:      ", (s01_softmax.attention(q, k, v) - attention(q, k, v)).abs().max().item())
    print("scores of about 1000: ", attention(1000 * q.float(), k.float(), v.float())[0, :3])
