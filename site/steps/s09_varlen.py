"""Rung 9: sequences of different lengths in one packed tensor, no padding, one launch.

Run me: ``python s09_varlen.py`` compares with one call per sequence.
"""

from __future__ import annotations

from itertools import pairwise

import s05_fa2
import torch
from torch import Tensor


# --8<-- [start:rung]
def owner(t: int, cu: list[int], BLOCK_M: int) -> tuple[int, int]:
    """Tile number -> (sequence, first row in it): a binary search in cu_seqlens itself, so no table is built.

    Sequence s owns the numbers from cu[s] // BLOCK_M + s on. They never lie closer together than the tiles s needs.
    """
    lo, hi = 0, len(cu) - 1
    while hi - lo > 1:
        mid = (lo + hi) // 2
        lo, hi = (mid, hi) if cu[mid] // BLOCK_M + mid <= t else (lo, mid)
    return lo, (t - cu[lo] // BLOCK_M - lo) * BLOCK_M


def attention(q: Tensor, k: Tensor, v: Tensor, cu: list[int], BLOCK_M: int = 16, BLOCK_N: int = 16) -> Tensor:
    """q, k, v (total, D) and cu = [0, end of sequence 0, ..., total]. Each tile finds its own sequence."""
    o = torch.zeros(q.shape[0], v.shape[1], dtype=q.dtype)
    for t in range(cu[-1] // BLOCK_M + len(cu) - 1):  # the host knows the total and the count, not the lengths
        s, row = owner(t, cu, BLOCK_M)
        a, b = cu[s], cu[s + 1]
        if row < b - a:  # at most one number per sequence is a spare
            pid = row // BLOCK_M
            tile, _ = s05_fa2.program(pid, q[a:b], k[a:b], v[a:b], BLOCK_M, BLOCK_N)
            o[a + row : a + row + len(tile)] = tile
    return o


# --8<-- [end:rung]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, cu: list[int]) -> Tensor:
    """What varlen replaces: a launch per sequence."""
    return torch.cat([s05_fa2.attention(q[a:b], k[a:b], v[a:b])[0] for a, b in pairwise(cu) if a < b])


if __name__ == "__main__":
    from s01_softmax import example

    cu = [0, 5, 5, 38, 54, 87]
    q, k, v = example(87, 87)
    print("packed - one by one:", (attention(q, k, v, cu) - one_by_one(q, k, v, cu)).abs().max().item())
