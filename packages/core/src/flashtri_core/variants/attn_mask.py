"""Boolean mask: True shows the key, False hides it; broadcastable to ``(B, Hq, Nq, Nk)``.

It combines with causal and window (a key must be visible to all). Tiles that the mask rules out completely are found in
a block summary, one flag per 128 x 128 block, and skipped before K and V are loaded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._jit import jit, tl
from .attn_bias import load_tile, pointer_args

SUMMARY_BLOCK = 128  # every tile of every kernel lies inside one block of the summary


@jit
def any_visible(z, h, m0, n0, args):
    """One flag: does the 128 x 128 block around tile (m0, n0) show anything? args = :func:`kernel_args`."""
    summary = args[1]
    base = summary[0] + z * summary[1] + h * summary[2]
    return tl.load(base + (m0 // 128) * summary[3] + (n0 // 128) * summary[4]) != 0


@jit
def visible(z, h, i, j, Nq, Nk, args, EDGE: tl.constexpr):
    """bool [BLOCK_M, BLOCK_N]: the mask's tile."""
    return load_tile(z, h, i, j, Nq, args[0], EDGE) != 0


def kernel_args(mask: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The mask's bytes and its block summary, each as :func:`~.attn_bias.pointer_args`."""
    return pointer_args(mask.view(torch.int8)), pointer_args(summarise(mask))


def summarise(mask: Tensor) -> Tensor:
    """int8 ``(b, h, rows / 128, keys / 128)``: 1 where the block shows anything; axes of size 1 stay 1."""
    rows, keys = mask.shape[-2:]
    if mask.is_meta:  # to compile for; torch's arithmetic without memory imports its compiler
        blocks = [1 if n == 1 else -(-n // SUMMARY_BLOCK) for n in (rows, keys)]
        return mask.new_empty((*mask.shape[:-2], *blocks), dtype=torch.int8)
    pad = [0 if n == 1 else -n % SUMMARY_BLOCK for n in (keys, rows)]
    flags = F.pad(mask, (0, pad[0], 0, pad[1])) if any(pad) else mask
    if keys != 1:
        flags = flags.unflatten(-1, (-1, SUMMARY_BLOCK)).any(-1)
    if rows != 1:
        flags = flags.unflatten(-2, (-1, SUMMARY_BLOCK)).any(-2)
    return flags.to(torch.int8)
