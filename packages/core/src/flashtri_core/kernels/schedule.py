"""Which tile does this program compute? Program id -> (batch, head, first row), and where its sequence lies.

The grid has one axis (its limit is 2^31 - 1, where y and z end at 65535). Dense problems count tiles; packed ones
(varlen) find their sequence by a binary search in ``cu_seqlens``, so that no table is built and no host waits.
"""

from __future__ import annotations

from .._jit import jit, tl


# --8<-- [start:schedule]
@jit
def dense_tile(pid, blocks, batch_heads, head_group, BLOCK: tl.constexpr, DESCENDING: tl.constexpr):
    """Tile order of a dense problem: returns (batch * heads index, first row).

    Heads come in groups of ``head_group`` whose K and V stay in the L2 cache together; inside a group the longest
    tiles come first (for a causal mask the last query blocks, the first key blocks), so that the tail is short.
    """
    per_group = blocks * head_group
    group = pid // per_group
    rank = pid % per_group
    heads_here = tl.minimum(head_group, batch_heads - group * head_group)
    block = rank // heads_here
    if DESCENDING:
        block = blocks - 1 - block
    return group * head_group + rank % heads_here, block * BLOCK


@jit
def packed_tile(
    pid, tiles, heads, head_group, seqs, CU, BLOCK: tl.constexpr, DESCENDING: tl.constexpr
):
    """Tile order of a packed problem: returns (head, sequence, first row); ``tiles`` = total // BLOCK + seqs per head.

    Heads come in groups as in ``dense_tile``: the last tiles of a launch, for which some processors wait, are then a
    few short ones, and not a whole head with a long sequence in it. Sequence s owns the tile numbers from cu[s] // BLOCK + s
    on: monotone in s, and never closer together than the tiles that s needs, so a search in ``cu`` itself finds the owner.
    At most one number per sequence stays unused.
    """
    h, t = dense_tile(pid, tiles, heads, head_group, 1, DESCENDING)
    lo = h * 0  # the owner lies in [lo, hi)
    hi = lo + seqs
    while hi - lo > 1:
        mid = (lo + hi) // 2
        if tl.load(CU + mid) // BLOCK + mid <= t:
            lo = mid
        else:
            hi = mid
    return h, lo, (t - tl.load(CU + lo) // BLOCK - lo) * BLOCK


# --8<-- [end:schedule]


@jit
def span_of(CU, USED, z, N):
    """(first row, rows present, rows in use) of sequence ``z``: dense (CU is None) or packed, USED caps the last."""
    row0 = z * 0
    rows = N
    if CU is not None:
        row0 = tl.load(CU + z)
        rows = tl.load(CU + z + 1) - row0
    used = rows
    if USED is not None:
        used = tl.minimum(rows, tl.load(USED + z))
    return row0, rows, used


@jit
def block_bounds(lo, full_lo, full_hi, hi, BLOCK: tl.constexpr):
    """Round the four bounds of a mask outwards to whole blocks, and the free middle inwards; the order is kept."""
    lo = lo // BLOCK * BLOCK
    full_lo = tl.minimum((full_lo + BLOCK - 1) // BLOCK * BLOCK, hi)
    full_hi = tl.maximum(full_lo, full_hi // BLOCK * BLOCK)
    return lo, full_lo, full_hi, hi
