"""Addressing: the only masked loads and stores of the big tensors. Offsets are int64, so any size and stride works.

A tensor argument is a base pointer, a ``stride`` triple (batch, head, row) in elements, and a unit stride along the
head dimension. ``HEAD_DIM`` is the true width, ``BLOCK_D`` the power of two that holds it: the padding exists in the
tile only, never in memory.
"""

from __future__ import annotations

from .._jit import jit, tl


@jit
def head_base(X, stride, z, h, row0):
    """Pointer to row ``row0`` of head ``h`` in batch ``z``; row0 is the start of a packed sequence, or 0."""
    return X + z.to(tl.int64) * stride[0] + h.to(tl.int64) * stride[1] + row0.to(tl.int64) * stride[2]


@jit
def load_rows(base, stride, rows, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, RAGGED: tl.constexpr):
    """[BLOCK, BLOCK_D] tile of ``rows``; rows at or past ``length`` (looked at when RAGGED) and padding read as 0."""
    cols = tl.arange(0, BLOCK_D)
    ptrs = base + rows[:, None].to(tl.int64) * stride[2] + cols[None, :]
    if RAGGED and BLOCK_D != HEAD_DIM:
        tile = tl.load(ptrs, mask=(rows[:, None] < length) & (cols[None, :] < HEAD_DIM), other=0.0)
    elif RAGGED:
        tile = tl.load(ptrs, mask=rows[:, None] < length, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        tile = tl.load(ptrs, mask=cols[None, :] < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@jit
def store_rows(base, stride, rows, length, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write ``tile`` [BLOCK, BLOCK_D] in the tensor's own dtype, rows below ``length`` and columns below HEAD_DIM."""
    cols = tl.arange(0, BLOCK_D)
    ptrs = base + rows[:, None].to(tl.int64) * stride[2] + cols[None, :]
    mask = (rows[:, None] < length) & (cols[None, :] < HEAD_DIM)
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=mask)
