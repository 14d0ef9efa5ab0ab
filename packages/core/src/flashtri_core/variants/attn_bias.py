"""Additive bias: ``s + attn_bias``, any float dtype, broadcastable to ``(B, Hq, Nq, Nk)``, with its gradient.

T5 and relative-position biases, pair biases, learned masks. Added to the scaled (and capped) score before the mask;
-inf entries hide their key. The gradient is summed over the axes that were broadcast, in a fixed order inside one
program per tile: deterministic, no atomics, never a tensor larger than the bias. Packed sequences index the bias by
(sequence, head, row, key), rows and keys counted inside their sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._jit import jit, tl

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@jit
def tile_pointers(z, h, i, j, args):
    """[BLOCK_M, BLOCK_N] pointers into a broadcastable 4-D tensor; args = :func:`pointer_args`."""
    rows = i
    if args[5] is not None:
        rows = i.to(tl.int64)
    start = z.to(tl.int64) * args[1] + h.to(tl.int64) * args[2]
    rows = rows * args[3]
    if args[6] is not None:
        start = tl.multiple_of(start, 8)
        rows = tl.multiple_of(rows, [8, 8])
    return args[0] + start + rows + j * args[4]


@jit
def in_memory(i, j, Nq, args, EDGE: tl.constexpr):
    """bool [BLOCK_M, BLOCK_N]: entries of rows below Nq. EDGE: the tile may reach past the last key, which is looked at.

    The limit is the tensor's own width, known to be a multiple of 8 where it is one: eight neighbours are there or not there
    together then, and are read or written in one go.
    """
    there = i < Nq
    if EDGE and args[6] is not None:
        there = there & (j < args[6] * 8)
    elif EDGE and args[7] is not None:
        there = there & (j < args[7])
    return there


@jit
def load_tile(z, h, i, j, Nq, args, EDGE: tl.constexpr):
    """The tile [BLOCK_M, BLOCK_N], 0 where it is not :func:`in_memory`."""
    return tl.load(tile_pointers(z, h, i, j, args), mask=in_memory(i, j, Nq, args, EDGE), other=0)


@jit
def add(s, z, h, i, j, Nq, Nk, args, EDGE: tl.constexpr):
    """``s`` in natural units."""
    return s + load_tile(z, h, i, j, Nq, args, EDGE).to(tl.float32)


def check(bias: object, name: str, shape: tuple[int, int, int, int], device: object, boolean: bool) -> None:
    """Validate ``attn_bias`` or ``attn_mask`` (``boolean``) against the score matrix's shape.

    Raises:
        TypeError: not a tensor of the right kind of dtype.
        ValueError: not broadcastable to (B, Hq, Nq, Nk), or on another device.
    """
    if not isinstance(bias, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(bias).__name__}")
    if boolean and str(bias.dtype) != "torch.bool":
        raise TypeError(f"{name} must be bool (True = visible), got {bias.dtype}; additive terms go to attn_bias")
    if not boolean and bias.dtype not in FLOATS:
        raise TypeError(
            f"{name} must be float16, bfloat16, float32 or float64, got {bias.dtype}; boolean masks go to attn_mask"
        )
    if bias.dim() > 4 or any(b not in (1, s) for b, s in zip(bias.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(f"{name} must broadcast to (B, Hq, Nq, Nk) = {shape}, got {tuple(bias.shape)}")
    if bias.device != device:
        raise ValueError(f"{name} must be on {device}, got {bias.device}")


def as_4d(bias: Tensor) -> Tensor:
    """A view with four axes; leading axes of size 1 are added, nothing is expanded."""
    return bias[(None,) * (4 - bias.dim())]


def broadcast_strides(bias: Tensor) -> tuple[int, ...]:
    """Strides of a 4-D tensor with 0 wherever its size is 1, so that any index reads the one entry."""
    return tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))


def eighths(x: Tensor) -> int | None:
    """Keys / 8 of a 4-D tensor whose rows are read in whole words: adjacent keys, rows a multiple of 8 long and apart.

    None for any other: it is read entry by entry.
    """
    z, h, m, n = broadcast_strides(x)
    return x.shape[3] // 8 if n == 1 and not (z | h | m | x.shape[3] | int(x.storage_offset())) & 7 else None


def pointer_args(x: Tensor) -> tuple[Any, ...]:
    """(tensor, its strides with 0 on broadcast axes, wide, eighths, keys) of a 4-D tensor.

    wide is None unless one head spans 2^31 elements; keys is the last axis, None where that is broadcast.
    """
    strides, keys = broadcast_strides(x), x.shape[3]
    wide = 1 if strides[2] * x.shape[2] >= 1 << 31 else None
    return (x, *strides, wide, eighths(x), None if keys == 1 else keys)
