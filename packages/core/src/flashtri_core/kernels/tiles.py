"""Addressing: the only masked loads and stores of the big tensors. Any size and any stride works.

A tensor argument is a base pointer and ``stride`` = (batch, head, row, wide, even) in elements, the last axis having
unit stride. Batch and head offsets are int64 always; row offsets are int32, which is cheaper, unless the rows of one head
span 2^31 elements or more (``wide`` is None otherwise). ``even`` says that every stride is a multiple of 8 elements, so
that aligned tensors are read 16 bytes at a time; None where that is not so.
``HEAD_DIM`` is the true width, ``BLOCK_D`` the power of two that holds it: the padding exists in the tile only.
"""

from __future__ import annotations

from .._jit import jit, tl


@jit
def head_base(X, stride, z, h, row0):
    """Pointer to row ``row0`` of head ``h`` in batch ``z``; row0 is the start of a packed sequence, or 0."""
    offset = z.to(tl.int64) * stride[0] + h.to(tl.int64) * stride[1] + row0.to(tl.int64) * stride[2]
    if stride[4] is not None:
        offset = tl.multiple_of(offset, 8)
    return X + offset


@jit
def tile_pointers(base, stride, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK, BLOCK_D] pointers to rows start .. start + BLOCK."""
    rows = start + tl.arange(0, BLOCK)[:, None]
    if stride[3] is not None:
        rows = rows.to(tl.int64)
    offsets = rows * stride[2]
    if stride[4] is not None:
        offsets = tl.multiple_of(offsets, [8, 8])
    return base + offsets + tl.arange(0, BLOCK_D)[None, :]


@jit
def load_rows(
    base, stride, start, length, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """[BLOCK, BLOCK_D] tile from row ``start``; rows at or past ``length`` (looked at when RAGGED) and padding are 0."""
    ptrs = tile_pointers(base, stride, start, BLOCK, BLOCK_D)
    rows = start + tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    if RAGGED and BLOCK_D != HEAD_DIM:
        tile = tl.load(ptrs, mask=(rows < length) & (cols < HEAD_DIM), other=0.0)
    elif RAGGED:
        tile = tl.load(ptrs, mask=rows < length, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        tile = tl.load(ptrs, mask=cols < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@jit
def store_rows(base, stride, start, length, tile, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write ``tile`` [BLOCK, BLOCK_D] in the tensor's own dtype, rows below ``length`` and columns below HEAD_DIM."""
    rows = start + tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    ptrs = tile_pointers(base, stride, start, BLOCK, BLOCK_D)
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=(rows < length) & (cols < HEAD_DIM))
