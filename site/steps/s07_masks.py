"""Rung 7: masks as bounds. Tiles outside are not visited, tiles inside carry no mask; the edge is tested per score.

Run me: ``python s07_masks.py`` counts the tiles of each kind.
"""

from __future__ import annotations

from collections import Counter

import torch
from s05_fa2 import LOG2E, finalize, step
from torch import Tensor


# --8<-- [start:rung]
def keep(i: Tensor, j: Tensor, Nq: int, Nk: int, left: int, right: int) -> Tensor:
    """May query i see key j? Causal is (-1, 0). The last query sits on the last key: bottom-right alignment."""
    diagonal = i + Nk - Nq
    visible = torch.ones(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool)
    if left >= 0:
        visible &= j >= diagonal - left
    if right >= 0:
        visible &= j <= diagonal + right
    return visible


def kv_range(m0: int, m1: int, Nq: int, Nk: int, left: int, right: int) -> tuple[int, int, int, int]:
    """Keys that rows [m0, m1) need: none outside [lo, hi), and in [full_lo, full_hi) every row sees every key."""
    shift = Nk - Nq

    def into(x: int) -> int:
        return min(max(x, 0), Nk)

    lo = into(m0 + shift - left) if left >= 0 else 0  # the first row looks furthest back
    hi = into(m1 + shift + right) if right >= 0 else Nk  # the last row looks furthest ahead
    lo = min(lo, hi)
    full_lo = into(m1 - 1 + shift - left) if left >= 0 else 0
    full_hi = into(m0 + shift + right + 1) if right >= 0 else Nk
    full_lo = min(max(full_lo, lo), hi)
    return lo, full_lo, min(max(full_hi, full_lo), hi), hi


def program(pid, q, k, v, left: int, right: int, BLOCK_M: int, BLOCK_N: int, seen: Counter) -> tuple[Tensor, Tensor]:
    """Rung 5 with three spans: masked, free, masked. ``seen`` counts the tiles for the test."""
    (Nq, D), Nk = q.shape, k.shape[0]
    m0, m1 = pid * BLOCK_M, min((pid + 1) * BLOCK_M, Nq)
    i = torch.arange(m0, m1)[:, None]
    lo, full_lo, full_hi, hi = kv_range(m0, m1, Nq, Nk, left, right)
    acc = torch.zeros(m1 - m0, v.shape[1], dtype=q.dtype)
    m_i = torch.full((m1 - m0,), -torch.inf, dtype=q.dtype)
    l_i = torch.zeros(m1 - m0, dtype=q.dtype)
    for start_n in range(lo // BLOCK_N * BLOCK_N, hi, BLOCK_N):
        j = torch.arange(start_n, min(start_n + BLOCK_N, Nk))[None, :]
        s = q[m0:m1] @ k[j[0]].T
        free = full_lo <= start_n and start_n + BLOCK_N <= full_hi
        if not free:
            s = torch.where(keep(i, j, Nq, Nk, left, right), s, -torch.inf)
        seen["free" if free else "masked"] += 1
        acc, m_i, l_i = step(acc, m_i, l_i, s, v[j[0]], D**-0.5 * LOG2E)
    return finalize(acc, m_i, l_i, D**-0.5 * LOG2E)


# --8<-- [end:rung]


def attention(
    q: Tensor, k: Tensor, v: Tensor, left: int = -1, right: int = -1, BLOCK_M: int = 16, BLOCK_N: int = 16
) -> tuple[Tensor, Tensor, Counter]:
    """Returns o (M, Dv), lse (M,) and the count of tiles of each kind."""
    seen: Counter = Counter()
    blocks = range(-(-q.shape[0] // BLOCK_M))
    done = [program(pid, q, k, v, left, right, BLOCK_M, BLOCK_N, seen) for pid in blocks]
    return torch.cat([o for o, _ in done]), torch.cat([lse for _, lse in done]), seen


def attention_dense(q: Tensor, k: Tensor, v: Tensor, left: int, right: int) -> Tensor:
    """The same mask on the whole score matrix. A row that sees no key returns 0."""
    i, j = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])[None, :]
    visible = keep(i, j, q.shape[0], k.shape[0], left, right)
    s = torch.where(visible, q @ k.T * q.shape[1] ** -0.5, -torch.inf)
    return torch.nan_to_num(torch.softmax(s, 1)) @ v


if __name__ == "__main__":
    from s01_softmax import example

    q, k, v = example(256, 256)
    for name, window in {"full": (-1, -1), "causal": (-1, 0), "window (64, 0)": (64, 0)}.items():
        seen = attention(q, k, v, *window)[2]
        print(f"{name:15} {seen['free']:4} tiles without a mask, {seen['masked']:3} with one, of {16 * 16}")
