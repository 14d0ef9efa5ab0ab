"""Backward on sm_90 for head dimensions above 128: one thread block owns 64 keys, and two warpgroups share its columns.

The products and the pre- and post-pass are those of :mod:`.backward`; what differs is who holds what. dK and dV of 64 keys
and up to 256 columns do not fit a warpgroup's registers, so each warpgroup owns a part of the columns of dK, dV and dQ:
128 and the rest (its ``OWN``). All columns are needed for S and dP: there the warpgroups share the 64 query rows of a
step, 32 each, and meet in shared memory::

    producer warp                      shared memory                  consumer warpgroup w
    -------------                      -------------                  --------------------
    load K, V (once) ----------------> k, v             ------------> wait k_full, v_full
    wait q_empty[s], load Q, LSE ----> q[q_stages]      ------------> wait q_full[s]; issue S^T = K Q^T for 32 queries
    wait do_empty[s], load dO, delta > do[do_stages]    ------------> wait do_full[s]; issue dP^T = V dO^T for 32 queries
                                       p[2], ds[2]      <------------ its 32 columns of P^T and dS^T; arrive at ds_full[b]
                                       p[b], ds[b] -----------------> wait ds_full[b]; issue dQ = dS K, dV += P^T dO,
                                                                      dK += dS^T Q, each for its own columns
                                                                      add dQ to memory under the other two
             do_empty[s], q_empty[s] <-- all three are in registers -

``p`` and ``ds`` have two buffers and no ``empty`` barrier, for the reason given in :mod:`.backward`. Both warpgroups read all
of K and V, so ``k_done`` counts both in before dV and dK leave through those buffers.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward import (
    CLEARED,
    HALF,
    Bars,
    Sizes,
    add_dq,
    first_query_block,
    locate,
    opaque_zero,
    ring,
    store_rows,
    store_share,
)
from .common import ANY, OR_ZERO, linear_exponents, named_barrier_wait, select, tma_load
from .forward import barriers, clear_rows, tile_pair

SHARE = gl.constexpr(32)  # query rows per warpgroup when scores are computed
MAIN = gl.constexpr(128)  # columns of warpgroup 0


class Tiles(NamedTuple):
    """Shared memory; k, v, q and do are pairs (first 128 columns, remaining columns or 0)."""

    k: Any
    v: Any
    q: Any
    do: Any
    lse: Any
    delta: Any
    p: Any
    ds: Any


@gluon.jit
def load_pair(descs, z, h, row, barrier, tiles, stage, TAIL: gl.constexpr):
    """64 rows, all columns."""
    tma_load(descs[0], [z, h, row, 0], barrier, tiles[0].index(stage))
    if TAIL > 0:
        tma_load(descs[1], [z, h, row, MAIN], barrier, tiles[1].index(stage))


@gluon.jit
def load_step(
    descs, stat, z, h, row, block, count, tile, stats, full, empty, STAGES: gl.constexpr, TAIL: gl.constexpr
):  # fmt: skip
    """A step's rows of Q and their LSE, or of dO and their delta."""
    stage, phase = ring(count, STAGES)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), HALF * (2 * (MAIN + TAIL) + 4))
    load_pair(descs, z, h, row, full.index(stage), tile, stage, TAIL)
    tma_load(stat, [block * HALF], full.index(stage), stats.index(stage))


@gluon.jit
def producer(
    q_descs, do_descs, k_descs, v_descs, lse_desc, delta_desc, CU_Q, CU_K, USED_K, sizes, variant, args, tiles, bars,
    C: gl.constexpr,
):  # fmt: skip
    """Loads K and V once and streams Q, dO and their statistics."""
    t = locate(0, sizes, CU_Q, CU_K, USED_K, variant, args, C)
    zb = 0 if C.packed else t.z  # packed tensors have no batch axis
    mbarrier.expect(bars.k_full.index(0), 2 * HALF * (MAIN + C.tail))
    load_pair(k_descs, zb, t.hk // C.group_split, t.k_row0 + t.start_n, bars.k_full.index(0), tiles.k, 0, C.tail)
    count = 0
    for g in range(sizes.group):
        h = t.hk * sizes.group + g
        block0 = first_query_block(t.z, h, t.q_row0, sizes, C)
        for m in range(t.lo, t.hi):
            row = t.q_row0 + m * HALF
            load_step(q_descs, lse_desc, zb, h, row, block0 + m, count, tiles.q, tiles.lse, bars.q_full, bars.q_empty,
                      C.q_stages, C.tail)  # fmt: skip
            if count == 0:
                mbarrier.expect(bars.v_full.index(0), 2 * HALF * (MAIN + C.v_tail))
                load_pair(v_descs, zb, t.hk // C.group_split, t.k_row0 + t.start_n, bars.v_full.index(0), tiles.v, 0, C.v_tail)
            load_step(do_descs, delta_desc, zb, h, row, block0 + m, count, tiles.do, tiles.delta, bars.do_full,
                      bars.do_empty, C.do_stages, C.v_tail)  # fmt: skip
            count += 1


# ------------------------------------------------------------------------------------------------------------- step
@gluon.jit
def dot_shared(keys, zero, rows, stage, WG: gl.constexpr, TAIL: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Issue keys [64, D] x (this warpgroup's 32 of the step's 64 rows)^T."""
    blank = gl.zeros([HALF, SHARE], gl.float32, S_LAYOUT)
    a = keys[0].index(zero).reshape([HALF, MAIN])
    b = rows[0].index(stage).reshape([HALF, MAIN]).slice(WG * SHARE, SHARE, 0)
    s = warpgroup_mma(a, b.permute((1, 0)), blank, use_acc=False, is_async=True)
    if TAIL > 0:
        a_tail = keys[1].index(zero).reshape([HALF, TAIL])
        b_tail = rows[1].index(stage).reshape([HALF, TAIL]).slice(WG * SHARE, SHARE, 0)
        s = warpgroup_mma(a_tail, b_tail.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def own(pair, stage, WG: gl.constexpr, OWN: gl.constexpr):
    """The [64, OWN] columns of warpgroup WG."""
    return pair[WG].index(stage).reshape([HALF, OWN])


@gluon.jit
def clear_foreign_rows(pair, stage, valid, TAIL: gl.constexpr):
    clear_rows(pair[0].index(stage).reshape([HALF, MAIN]), valid, HALF, MAIN)
    if TAIL > 0:
        clear_rows(pair[1].index(stage).reshape([HALF, TAIL]), valid, HALF, TAIL)


@gluon.jit
def step(
    dk, dv, count, h, m, block, t, unit_log2, variant, args, DQ_ACC, tiles, bars, WG: gl.constexpr, MASK: gl.constexpr,
    OWN: gl.constexpr, OWN_V: gl.constexpr, S_LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """64 query rows of head h: this warpgroup's columns of dK, dV and of the rows' dQ."""
    dtype: gl.constexpr = tiles.k[0].dtype
    q_stage, q_phase = ring(count, C.q_stages)
    do_stage, do_phase = ring(count, C.do_stages)
    buffer, ds_phase = ring(count, 2)
    zero = opaque_zero()  # K's and V's operand descriptors are built anew in every step

    mbarrier.wait(bars.q_full.index(q_stage), q_phase)
    if C.packed:
        if t.Nq - m * HALF < HALF:  # rows of the next sequence: their P and dS are zero, but 0 * NaN is NaN
            mbarrier.wait(bars.do_full.index(do_stage), do_phase)
            if WG == 0:
                clear_foreign_rows(tiles.q, q_stage, t.Nq - m * HALF, C.tail)
            else:
                clear_foreign_rows(tiles.do, do_stage, t.Nq - m * HALF, C.v_tail)
            fence_async_shared()
            named_barrier_wait(CLEARED, 128, 256)
    s = dot_shared(tiles.k, zero, tiles.q, q_stage, WG, C.tail, S_LAYOUT)
    mbarrier.wait(bars.do_full.index(do_stage), do_phase)
    dp = dot_shared(tiles.v, zero, tiles.do, do_stage, WG, C.v_tail, S_LAYOUT)

    if C.v_tail > 0:
        s = warpgroup_mma_wait(2, deps=(s,))
    else:
        s = warpgroup_mma_wait(1, deps=(s,))
    cols = WG * SHARE + gl.arange(0, SHARE, layout=gl.SliceLayout(0, S_LAYOUT))
    lse_log2 = tiles.lse.index(q_stage).slice(WG * SHARE, SHARE, 0).load(gl.SliceLayout(0, S_LAYOUT))
    i = (m * HALF + cols)[None, :]
    j = (t.start_n + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_LAYOUT)))[:, None]
    raw = variant.score(s, args.score)
    slope = variant.slope(t.z, h, args.alibi)
    if C.linear_bias and not MASK:
        p = gl.exp2(linear_exponents(raw, lse_log2[None, :], m * HALF + WG * SHARE, t.start_n, slope, t.Nq, t.Nk, unit_log2,
                                     variant, 0, S_LAYOUT))  # fmt: skip
    else:
        p = gl.exp2(variant.alibi(raw, slope, i, j, t.Nq, t.Nk) * unit_log2 - lse_log2[None, :])
    if MASK:
        a, b, width = variant.place(i, j, t.Nq, t.Nk, args.mask)
        p = select(p, a, b, width, OR_ZERO)
        if C.ragged_keys and C.past_end:
            p = select(p, t.Nk - 1, j, ANY, OR_ZERO)
    tiles.p.index(buffer).slice(WG * SHARE, SHARE, 1).store(p.to(dtype))
    p = variant.score_grad(p, raw, args.score)  # linear in its first argument
    # known to be satisfied: a branch, which keeps ptxas from hoisting the wait for dP above exp2
    mbarrier.wait(bars.do_full.index(do_stage), do_phase)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    delta = tiles.delta.index(do_stage).slice(WG * SHARE, SHARE, 0).load(gl.SliceLayout(0, S_LAYOUT))
    tiles.ds.index(buffer).slice(WG * SHARE, SHARE, 1).store((p * (dp - delta[None, :])).to(dtype))
    fence_async_shared()
    mbarrier.arrive(bars.ds_full.index(buffer), count=1)

    mbarrier.wait(bars.ds_full.index(buffer), ds_phase)
    ds = tiles.ds.index(buffer)
    dq = gl.zeros([HALF, OWN], gl.float32, DQ_LAYOUT)
    dq = warpgroup_mma(ds.permute((1, 0)), own(tiles.k, zero, WG, OWN), dq, use_acc=False, is_async=True)
    if OWN_V > 0:
        dv = warpgroup_mma(tiles.p.index(buffer), own(tiles.do, do_stage, WG, OWN_V), dv, is_async=True)
    dk = warpgroup_mma(ds, own(tiles.q, q_stage, WG, OWN), dk, is_async=True)
    if OWN_V > 0:
        dq = warpgroup_mma_wait(2, deps=(dq,))
    else:
        dq = warpgroup_mma_wait(1, deps=(dq,))
    # A branch again, on a barrier that cannot advance before this warpgroup does: the additions stay above the wait.
    mbarrier.wait(bars.ds_full.index(buffer), ds_phase)
    add_dq(dq, DQ_ACC, block * 4 + WG * 2, True, OWN, DQ_LAYOUT, C)
    if OWN_V > 0:
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    else:
        dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(bars.do_empty.index(do_stage), count=1)
    mbarrier.arrive(bars.q_empty.index(q_stage), count=1)
    return dk, dv


@gluon.jit
def consumer(
    dk_descs, dv_descs, DK, DV, stride_dk, stride_dv, DQ_ACC, CU_Q, CU_K, USED_K, unit_log2, softmax_scale, sizes, variant,
    args, tiles, bars, WG: gl.constexpr, OWN: gl.constexpr, OWN_V: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Warpgroup WG: OWN columns of dK and dQ, OWN_V columns of dV, beginning with column 128 WG."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHARE, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])
    V_COLUMNS: gl.constexpr = OWN_V if OWN_V > 0 else 8
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_COLUMNS, 16])
    t = locate(0, sizes, CU_Q, CU_K, USED_K, variant, args, C)
    dk = gl.zeros([HALF, OWN], gl.float32, DQ_LAYOUT)
    dv = gl.zeros([HALF, V_COLUMNS], gl.float32, V_LAYOUT)
    count = 0
    mbarrier.wait(bars.k_full.index(0), 0)
    if t.lo < t.hi:
        mbarrier.wait(bars.v_full.index(0), 0)
        if C.packed or C.used:  # rows past the keys in use are another sequence's, or nobody's
            if t.Nk - t.start_n < HALF:
                if WG == 0:
                    clear_foreign_rows(tiles.k, 0, t.Nk - t.start_n, C.tail)
                else:
                    clear_foreign_rows(tiles.v, 0, t.Nk - t.start_n, C.v_tail)
                fence_async_shared()
                named_barrier_wait(CLEARED, 128, 256)
    for g in range(sizes.group):
        h = t.hk * sizes.group + g
        block0 = first_query_block(t.z, h, t.q_row0, sizes, C)
        if C.edge_lo:
            for m in range(t.lo, t.free_lo):
                dk, dv = step(dk, dv, count, h, m, block0 + m, t, unit_log2, variant, args, DQ_ACC, tiles, bars, WG, True,
                              OWN, OWN_V, S_LAYOUT, DQ_LAYOUT, C)  # fmt: skip
                count += 1
        for m in range(gl.maximum(t.lo, t.free_lo), t.free_hi):
            dk, dv = step(dk, dv, count, h, m, block0 + m, t, unit_log2, variant, args, DQ_ACC, tiles, bars, WG, False,
                          OWN, OWN_V, S_LAYOUT, DQ_LAYOUT, C)  # fmt: skip
            count += 1
        if C.edge_hi:
            for m in range(t.free_hi, t.hi):
                dk, dv = step(dk, dv, count, h, m, block0 + m, t, unit_log2, variant, args, DQ_ACC, tiles, bars, WG, True,
                              OWN, OWN_V, S_LAYOUT, DQ_LAYOUT, C)  # fmt: skip
                count += 1
    zb = 0 if C.packed else t.z
    if C.group_split > 1:
        if OWN_V > 0:
            store_share(dv, DV, t, t.start_n, WG * MAIN, sizes, OWN_V, V_LAYOUT, C)
        store_share(dk, DK, t, t.start_n, WG * MAIN, sizes, OWN, DQ_LAYOUT, C)
    else:
        mbarrier.arrive(bars.k_done.index(0), count=1)
        mbarrier.wait(bars.k_done.index(0), 0)
        if OWN_V > 0:
            store_rows(dv, tiles.v[WG].index(0), dv_descs[WG], DV, stride_dv, zb, t.hk, t.start_n, t.k_row0, t.k_rows,
                       C.head_dim_v, WG * MAIN, OWN_V, C)  # fmt: skip
        dk = dk * softmax_scale
        store_rows(dk, tiles.k[WG].index(0), dk_descs[WG], DK, stride_dk, zb, t.hk, t.start_n, t.k_row0, t.k_rows,
                   C.head_dim, WG * MAIN, OWN, C)  # fmt: skip
        tma.store_wait(0)


# ------------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(
    do_not_specialize=["Nq", "Nk", "blocks", "batch_heads", "head_group", "heads", "q_blocks"],  # group = 1 is worth a kernel
    do_not_specialize_on_alignment=["CU_Q", "CU_K", "USED_K"],
)
def attn_bwd_wide_hopper(
    q_desc, q_tail, do_desc, do_tail, k_desc, k_tail, v_desc, v_tail, lse_desc, delta_desc, dk_desc, dk_tail, dv_desc,
    dv_tail, DK, DV, stride_dk, stride_dv, DQ_ACC, CU_Q, CU_K, USED_K, variant, args, unit_log2, softmax_scale, heads,
    group, Nq, Nk, blocks, batch_heads, head_group, q_blocks, C: gl.constexpr,
):  # fmt: skip
    """Grid: one thread block per 64 keys of a key head, or of a share. ``C``: a :class:`.BackwardConfig`.

    Statistics, ``DK``, ``DV`` and ``DQ_ACC`` as in :func:`.backward.attn_bwd_hopper`; the accumulator has 256 columns.
    """
    dtype: gl.constexpr = q_desc.dtype
    PANELS: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)  # 32 columns each, one panel per warpgroup
    tiles = Tiles(
        tile_pair(dtype, 1, HALF, k_desc, k_tail, MAIN, C.tail),
        tile_pair(dtype, 1, HALF, v_desc, v_tail, MAIN, C.v_tail),
        tile_pair(dtype, C.q_stages, HALF, q_desc, q_tail, MAIN, C.tail),
        tile_pair(dtype, C.do_stages, HALF, do_desc, do_tail, MAIN, C.v_tail),
        gl.allocate_shared_memory(gl.float32, [C.q_stages, HALF], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [C.do_stages, HALF], delta_desc.layout),
        gl.allocate_shared_memory(dtype, [2, HALF, HALF], PANELS),
        gl.allocate_shared_memory(dtype, [2, HALF, HALF], PANELS),
    )
    once = barriers(1, 1)
    bars = Bars(
        barriers(1, 1),
        barriers(1, 1),
        barriers(1, 2),
        once,
        barriers(C.q_stages, 1),
        barriers(C.q_stages, 2),
        barriers(C.do_stages, 1),
        barriers(C.do_stages, 2),
        barriers(2, 2),
    )
    fence_async_shared()
    sizes = Sizes(heads, group, Nq, Nk, blocks, batch_heads, head_group, q_blocks)
    q_descs = (q_desc, q_tail)
    do_descs = (do_desc, do_tail)
    k_descs = (k_desc, k_tail)
    v_descs = (v_desc, v_tail)
    dk_descs = (dk_desc, dk_tail)
    dv_descs = (dv_desc, dv_tail)
    gl.warp_specialize([
        (consumer, (dk_descs, dv_descs, DK, DV, stride_dk, stride_dv, DQ_ACC, CU_Q, CU_K, USED_K, unit_log2, softmax_scale,
                    sizes, variant, args, tiles, bars, 0, MAIN, MAIN, C)),
        (consumer, (dk_descs, dv_descs, DK, DV, stride_dk, stride_dv, DQ_ACC, CU_Q, CU_K, USED_K, unit_log2, softmax_scale,
                    sizes, variant, args, tiles, bars, 1, C.tail, C.v_tail, C)),
        (producer, (q_descs, do_descs, k_descs, v_descs, lse_desc, delta_desc, CU_Q, CU_K, USED_K, sizes, variant, args,
                    tiles, bars, C)),
    ], [4, 1], [C.consumer_regs, C.producer_regs])  # fmt: skip
