"""Which keys a thread block of the fused backward owns, and in which order it walks over the query rows that see them."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..schedule import dense_tile, packed_tile, span_of
from .backward_ends import is_gentle


class Sizes(NamedTuple):
    """Run-time sizes that every partition needs; ``q_blocks`` counts blocks of BLOCK_M rows per head (or in all)."""

    heads: Any
    group: Any
    Nq: Any
    Nk: Any
    blocks: Any
    batch_heads: Any
    head_group: Any
    q_blocks: Any


class Tile(NamedTuple):
    """The key tile of this thread block and the query rows that see it: [lo, hi), of which [free_lo, free_hi) unmasked."""

    z: Any
    hk: Any
    start_n: Any
    q_row0: Any
    k_row0: Any
    Nq: Any
    k_rows: Any
    Nk: Any
    lo: Any
    free_lo: Any
    free_hi: Any
    hi: Any
    next_lo: Any  # ordered: the blocks of rows from here on see the key tile behind this one as well
    descends: Any  # both_ways: the walk goes from the last block of rows to the first
    mates: Any  # rotation: how many key tiles walk in rotation, this one among them
    place: Any  # rotation: its place among them, from 0 on
    begin: Any  # rotation: the block of rows that its walk begins with


@gluon.jit
def turns_of(sizes, C: gl.constexpr):
    """Key tiles that a thread block takes, one after the other."""
    turns = 1
    if C.whole_head:
        turns = sizes.blocks
    return turns


@gluon.jit
def rows_that_see(start_n, Nq, Nk, variant, args, C: gl.constexpr):
    """Blocks [lo, hi) of BLOCK_M query rows that see the key tile at start_n; rows [full_lo, full_hi) see all of it."""
    lo, full_lo, full_hi, hi = variant.q_range(start_n, gl.minimum(start_n + C.block_n, Nk), Nq, Nk, args.mask)
    hi = gl.where(start_n < Nk, hi, 0)
    return gl.minimum(lo, hi) // C.block_m, full_lo, full_hi, (hi + C.block_m - 1) // C.block_m


@gluon.jit
def rotation_of(tiles, blocks, most):
    """How many of a head's key tiles walk in rotation, each two blocks of rows or more behind the next one; ``most`` at most.

    The last ones may be fewer.
    """
    most = gl.minimum(most, gl.maximum(blocks // 2, 1))
    rotations = (tiles + most - 1) // most
    return (tiles + rotations - 1) // rotations


@gluon.jit
def rotating_tile(pid, sizes, most):
    """Head and key tile: a head's tiles in rotations of ``most``, the first one of each of ``head_group`` heads, and so on."""
    size = rotation_of(sizes.blocks, sizes.q_blocks, most)
    group = pid // (sizes.blocks * sizes.head_group)
    rank = pid - group * sizes.blocks * sizes.head_group
    heads_here = gl.minimum(sizes.head_group, sizes.batch_heads - group * sizes.head_group)
    first = rank // (size * heads_here) * size  # tile of these rotations
    here = gl.minimum(size, sizes.blocks - first)
    rank -= first * heads_here
    return group * sizes.head_group + rank // here, first + rank % here


@gluon.jit
def tile_of_either_way(pid, sizes):
    """Head, key tile, and whether it walks from the last rows to the first.

    The last ``head_group`` heads do, side by side, their longest tiles first; the others come one by one, their shortest first.
    """
    ahead = (sizes.batch_heads - sizes.head_group) * sizes.blocks
    rank = pid - ahead
    descends = rank >= 0
    zh = gl.where(descends, sizes.batch_heads - sizes.head_group + rank % sizes.head_group, pid // sizes.blocks)
    n = gl.where(descends, rank // sizes.head_group, sizes.blocks - 1 - pid % sizes.blocks)
    return zh, n, descends


@gluon.jit
def locate(turn, first, sizes, CU_Q, CU_K, USED_K, unit_log2, variant, args, C: gl.constexpr):
    """This turn's keys, and the steps of the walk over the rows that see them (:func:`place_of`).

    Thread blocks are numbered from ``first`` on where they come in several launches.
    """
    BLOCK_M: gl.constexpr = C.block_m
    pid = gl.program_id(0)
    descends = pid < 0
    if C.converts:
        pid += first
    if C.whole_head:
        z = pid // sizes.heads
        hk = pid % sizes.heads
        start_n = (sizes.blocks - 1 - turn) * C.block_n
    elif C.packed:
        hk, z, start_n = packed_tile(
            pid, sizes.blocks, sizes.heads, sizes.head_group, sizes.batch_heads, CU_K, C.block_n, C.ordered
        )
    else:
        if C.rotation > 0:
            zh, n = rotating_tile(pid, sizes, C.rotation)
            start_n = n * C.block_n
        elif C.both_ways:
            zh, n, descends = tile_of_either_way(pid, sizes)
            start_n = n * C.block_n
        else:
            zh, start_n = dense_tile(pid, sizes.blocks, sizes.batch_heads, sizes.head_group, C.block_n, C.ordered)
        z = zh // sizes.heads
        hk = zh % sizes.heads
    q_row0, Nq, _used = span_of(CU_Q, None, z, sizes.Nq)
    k_row0, k_rows, Nk = span_of(CU_K, USED_K, z, sizes.Nk)
    lo, full_lo, full_hi, hi = rows_that_see(start_n, Nq, Nk, variant, args, C)
    free_lo = gl.minimum((full_lo + BLOCK_M - 1) // BLOCK_M, hi)
    if C.edge_hi:
        free_hi = gl.maximum(gl.minimum(full_hi // BLOCK_M, hi), free_lo)
    else:
        free_hi = hi
    if C.ragged_keys:  # a tile that the keys do not fill masks every score
        free_lo = gl.where(start_n + C.block_n > Nk, hi, free_lo)
        free_hi = gl.maximum(free_hi, free_lo)
    if C.linear_bias:
        for g in range(sizes.group):
            slope = variant.slope(z, hk * sizes.group + g, args.alibi)
            free_lo = gl.where(is_gentle(slope, unit_log2), free_lo, hi)
        free_hi = gl.maximum(free_hi, free_lo)
    if C.both_ways:  # a descending tile masks every score: a masked loop behind the free one would cost all tiles registers
        free_lo = gl.where(descends, hi, free_lo)
    next_lo = hi
    if C.ordered:
        next_lo, _full_lo, _full_hi, next_hi = rows_that_see(start_n + C.block_n, Nq, Nk, variant, args, C)
        next_lo = gl.where(next_lo < next_hi, next_lo, hi)
    mates, place, begin = 1, 0, 0
    if C.rotation > 0:
        n = start_n // C.block_n
        most = rotation_of(sizes.blocks, sizes.q_blocks, C.rotation)
        place = n % most
        mates = gl.minimum(most, sizes.blocks - n + place)
        begin = (mates - 1 - place) * hi // mates
    return Tile(
        z, hk, start_n, q_row0, k_row0, Nq, k_rows, Nk, lo, free_lo, free_hi, hi, next_lo, descends, mates, place, begin
    )  # fmt: skip


@gluon.jit
def first_block(z, h, row0, heads, blocks, BLOCK: gl.constexpr, PACKED: gl.constexpr):
    """Number of the first BLOCK rows of head h among all blocks, ``blocks`` a head, of what the kernels share in fp32.

    Dense: heads one after another, each padded to whole blocks. Packed: sequence z starts at block row0 // BLOCK + z.
    """
    if PACKED:
        block = h * blocks + row0 // BLOCK + z
    else:
        block = (z * heads + h) * blocks
    return block


@gluon.jit
def first_query_block(z, h, q_row0, sizes, C: gl.constexpr):
    """:func:`first_block` of the statistics and of the dQ accumulator."""
    return first_block(z, h, q_row0, sizes.heads * sizes.group, sizes.q_blocks, C.block_m, C.packed)


@gluon.jit
def walks_of(sizes, C: gl.constexpr):
    """Walks over a tile's rows, and the heads that each takes, all of them for one block of rows before the next block."""
    walks, heads = sizes.group, 1
    if C.ordered:
        walks, heads = 1, sizes.group
    return walks, heads


@gluon.jit
def place_of(at, h, block0, t, sizes, C: gl.constexpr):
    """A walk's step ``at``: head, block of rows, and the block's number in the accumulator, where head h begins at block0."""
    m = at
    if C.ordered:
        m = at // sizes.group
        g = at - m * sizes.group
        h += g
        block0 += g * sizes.q_blocks
    if C.both_ways:
        m = gl.where(t.descends, t.lo + t.hi - 1 - m, m)
    if C.rotation > 0:
        m += t.begin
        m = gl.where(m < t.hi, m, m - t.hi)
    return h, m, block0 + m


@gluon.jit
def ring(count, STAGES: gl.constexpr):
    """Stage and phase of the count-th block."""
    return count % STAGES, (count // STAGES) & 1
