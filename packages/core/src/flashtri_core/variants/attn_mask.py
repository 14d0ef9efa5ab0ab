"""Boolean mask: True shows the key, False hides it; broadcastable to ``(B, Hq, Nq, Nk)``.

It combines with causal and window (a key must be visible to all). Tiles that the mask rules out completely are found in
a block summary, one flag per 128 x 128 block, and skipped before K and V are loaded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._jit import jit, tl

SUMMARY_BLOCK = 128  # every tile of every kernel lies inside one block of the summary


@jit
def any_visible(z, h, m0, n0, args):
    """One flag: does the 128 x 128 block around tile (m0, n0) show anything?

    args = (mask, 4 strides, summary, 4 strides).
    """
    base = args[5] + z * args[6] + h * args[7]
    return tl.load(base + (m0 // 128) * args[8] + (n0 // 128) * args[9]) != 0


@jit
def visible(z, h, i, j, Nq, Nk, args):
    """bool [BLOCK_M, BLOCK_N]: the mask's tile."""
    base = args[0] + z.to(tl.int64) * args[1] + h.to(tl.int64) * args[2]
    ptrs = base + i.to(tl.int64) * args[3] + j * args[4]
    return tl.load(ptrs, mask=(i < Nq) & (j < Nk), other=0) != 0


def summarise(mask: Tensor) -> Tensor:
    """int8 ``(b, h, rows / 128, keys / 128)``: 1 where the block shows anything; axes of size 1 stay 1."""
    rows, keys = mask.shape[-2:]
    pad = [0 if n == 1 else -n % SUMMARY_BLOCK for n in (keys, rows)]
    flags = F.pad(mask, (0, pad[0], 0, pad[1])) if any(pad) else mask
    if keys != 1:
        flags = flags.unflatten(-1, (-1, SUMMARY_BLOCK)).any(-1)
    if rows != 1:
        flags = flags.unflatten(-2, (-1, SUMMARY_BLOCK)).any(-2)
    return flags.to(torch.int8)
