"""Backward on sm_90 for head dimensions above 128: one thread block owns 64 keys, its two warpgroups a gradient each.

The products and the pre- and post-pass are those of :mod:`.backward`; what differs is who does what. dK and dV of 64 keys
and up to 256 columns fill a warpgroup's registers each. So one warpgroup computes the scores and keeps dK; the other takes
P^T and dS^T from shared memory, keeps dV and adds up dQ, up to a step behind, while the first one is at its exponentials::

    producer warp                      shared memory               scores                        values
    -------------                      -------------               ------                        ------
    load K, V (once) ----------------> k, v             ---------> wait k_full, v_full
    wait q_empty[s], load Q, LSE ----> q[q_stages]      ---------> wait q_full[s]; S^T = K Q^T
    wait do_empty[s], load dO, delta > do[do_stages]    ---------> wait do_full[s]; dP^T = V dO^T
                                       p[2], ds[2]      <--------- P^T, dS^T; arrive at ds_full[b]
                                       p[b], ds[b]      -----------------------------------------> wait ds_full[b]
                       q_empty[s]   <-- S, dK in registers ------- dK += dS^T Q                  dQ = dS K, dV += P^T dO
                       do_empty[s]  <--------------------------------------------------------- dV in registers

``p`` and ``ds`` need no ``empty`` barrier: they have two buffers and dO two stages, and a step's dO is loaded when that of
the step before the last, and its P^T and dS^T with it, are done with.
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

from .backward import CLEARED, HALF, Bars, add_dq, only_used, opaque_zero, reinterpret, store_rows, store_share
from .backward_walk import Sizes, first_query_block, locate, ring
from .common import ANY, OR_ZERO, biased_lse, biased_scores, named_barrier_wait, select, tma_load
from .forward import barriers, clear_rows, tile_pair

MAIN = gl.constexpr(128)  # columns of the first part of a pair


class Tiles(NamedTuple):
    """Shared memory; k, v, q and do are pairs (first 128 columns, remaining columns or 0), k_panels are k by 64 columns."""

    k: Any
    v: Any
    q: Any
    do: Any
    lse: Any
    delta: Any
    p: Any
    ds: Any
    k_panels: Any


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
    q_descs, do_descs, k_descs, v_descs, lse_desc, delta_desc, CU_Q, CU_K, USED_K, unit_log2, sizes, variant, args, tiles,
    bars, C: gl.constexpr,
):  # fmt: skip
    """Loads K and V once and streams Q, dO and their statistics."""
    t = locate(0, 0, sizes, CU_Q, CU_K, USED_K, unit_log2, variant, args, C)
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
def zero_pair(TAIL: gl.constexpr):
    """[64, 128 + TAIL] in two parts, as all operands are."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    main = gl.zeros([HALF, MAIN], gl.float32, LAYOUT)
    if TAIL > 0:
        TAIL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
        result = (main, gl.zeros([HALF, TAIL], gl.float32, TAIL_LAYOUT))
    else:
        result = (main, 0)
    return result


@gluon.jit
def issue(acc, a, pair, stage, TAIL: gl.constexpr):
    """Issue acc += a [64, 64] x the 64 rows of a pair."""
    main = warpgroup_mma(a, pair[0].index(stage).reshape([HALF, MAIN]), acc[0], is_async=True)
    if TAIL > 0:
        result = (main, warpgroup_mma(a, pair[1].index(stage).reshape([HALF, TAIL]), acc[1], is_async=True))
    else:
        result = (main, 0)
    return result


@gluon.jit
def wait_pair(acc, TAIL: gl.constexpr):
    if TAIL > 0:
        result = warpgroup_mma_wait(0, deps=(acc[0], acc[1]))
    else:
        result = (warpgroup_mma_wait(0, deps=(acc[0],)), 0)
    return result


@gluon.jit
def issue_scores(keys, zero, rows, stage, TAIL: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Issue keys [64, D] x (rows [64, D])^T."""
    a = keys[0].index(zero).reshape([HALF, MAIN])
    b = rows[0].index(stage).reshape([HALF, MAIN])
    blank = gl.zeros([HALF, HALF], gl.float32, S_LAYOUT)
    s = warpgroup_mma(a, b.permute((1, 0)), blank, use_acc=False, is_async=True)
    if TAIL > 0:
        a_tail = keys[1].index(zero).reshape([HALF, TAIL])
        b_tail = rows[1].index(stage).reshape([HALF, TAIL])
        s = warpgroup_mma(a_tail, b_tail.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def clear_foreign_rows(first, first_stage, second, second_stage, valid, C: gl.constexpr):
    """Zero rows of Q and dO, or K and V, that are another sequence's or nobody's: 0 * NaN is NaN."""
    if valid < HALF:
        clear_rows(first[0].index(first_stage).reshape([HALF, MAIN]), valid, HALF, MAIN)
        clear_rows(second[0].index(second_stage).reshape([HALF, MAIN]), valid, HALF, MAIN)
        if C.tail > 0:
            clear_rows(first[1].index(first_stage).reshape([HALF, C.tail]), valid, HALF, C.tail)
        if C.v_tail > 0:
            clear_rows(second[1].index(second_stage).reshape([HALF, C.v_tail]), valid, HALF, C.v_tail)
        fence_async_shared()
        named_barrier_wait(CLEARED, 128, 128)


@gluon.jit
def step_of_scores(
    dk, count, h, m, slope, t, unit_log2, variant, args, tiles, bars, MASK: gl.constexpr, S_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """64 query rows of head h: P^T and dS^T for the other warpgroup, and dK."""
    dtype: gl.constexpr = tiles.k[0].dtype
    q_stage, q_phase = ring(count, C.q_stages)
    do_stage, do_phase = ring(count, C.do_stages)
    buffer, _phase = ring(count, 2)
    zero = opaque_zero()  # K's and V's operand descriptors are built anew in every step

    mbarrier.wait(bars.q_full.index(q_stage), q_phase)
    if C.packed:
        if t.Nq - m * HALF < HALF:
            mbarrier.wait(bars.do_full.index(do_stage), do_phase)
            clear_foreign_rows(tiles.q, q_stage, tiles.do, do_stage, t.Nq - m * HALF, C)
    s = issue_scores(tiles.k, zero, tiles.q, q_stage, C.tail, S_LAYOUT)
    mbarrier.wait(bars.do_full.index(do_stage), do_phase)
    dp = issue_scores(tiles.v, zero, tiles.do, do_stage, C.v_tail, S_LAYOUT)

    if C.v_tail > 0:
        s = warpgroup_mma_wait(2, deps=(s,))
    else:
        s = warpgroup_mma_wait(1, deps=(s,))
    lse_log2 = tiles.lse.index(q_stage).load(gl.SliceLayout(0, S_LAYOUT))
    i = (m * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, S_LAYOUT)))[None, :]
    j = (t.start_n + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_LAYOUT)))[:, None]
    raw = variant.score(s, args.score)
    lse_log2 = biased_lse(lse_log2[None, :], i, j, m * HALF, t.start_n, slope, t.Nq, t.Nk, unit_log2, variant, 0, MASK, C)
    p = gl.exp2(biased_scores(raw, i, j, t.start_n, slope, t.Nq, t.Nk, variant, 0, MASK, C) * unit_log2 - lse_log2)
    if MASK:
        a, b, width = variant.place(i, j, t.Nq, t.Nk, args.mask)
        p = select(p, a, b, width, OR_ZERO)
        if C.ragged_keys and C.past_end:
            p = select(p, t.Nk - 1, j, ANY, OR_ZERO)
    tiles.p.index(buffer).store(p.to(dtype))
    p = variant.score_grad(p, raw, args.score)  # linear in its first argument: applied here, no raw score stays alive
    # known to be satisfied: a branch, which keeps ptxas from hoisting the wait for dP above exp2
    mbarrier.wait(bars.do_full.index(do_stage), do_phase)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    delta = tiles.delta.index(do_stage).load(gl.SliceLayout(0, S_LAYOUT))
    ds = (p * (dp - delta[None, :])).to(dtype)
    tiles.ds.index(buffer).store(ds)
    fence_async_shared()
    mbarrier.arrive(bars.ds_full.index(buffer), count=1)
    dk = wait_pair(issue(dk, gl.convert_layout(ds, P_LAYOUT), tiles.q, q_stage, C.tail), C.tail)
    mbarrier.arrive(bars.q_empty.index(q_stage), count=1)
    return dk


@gluon.jit
def step_of_values(dv, count, block, DQ_ACC, tiles, bars, DQ_LAYOUT: gl.constexpr, C: gl.constexpr):
    """dV, and the dQ of the step's 64 rows, 64 columns at a time: each is added to memory under the next one's product."""
    do_stage, _phase = ring(count, C.do_stages)
    buffer, ds_phase = ring(count, 2)
    zero = opaque_zero()
    CHUNKS: gl.constexpr = 2 + C.tail // HALF
    mbarrier.wait(bars.ds_full.index(buffer), ds_phase)
    ds = tiles.ds.index(buffer).permute((1, 0))
    dq = gl.zeros([HALF, HALF], gl.float32, DQ_LAYOUT)
    for column in gl.static_range(CHUNKS):
        if column < 2:
            keys = tiles.k_panels[0].index(column + zero)
        else:
            keys = tiles.k_panels[1].index(column - 2 + zero)
        blank = gl.zeros([HALF, HALF], gl.float32, DQ_LAYOUT)
        product = warpgroup_mma(ds, keys, blank, use_acc=False, is_async=True)
        if column == CHUNKS - 1:
            dv = issue(dv, tiles.p.index(buffer), tiles.do, do_stage, C.v_tail)
        if column > 0:
            add_dq(dq, DQ_ACC, block * 4 + column - 1, True, HALF, DQ_LAYOUT, C)
            # A branch, on a barrier that cannot advance before this warpgroup does: the additions stay above the next wait.
            mbarrier.wait(bars.ds_full.index(buffer), ds_phase)
        if column < CHUNKS - 1:
            dq = warpgroup_mma_wait(0, deps=(product,))
        elif C.v_tail > 0:
            dq, dv_main, dv_tail = warpgroup_mma_wait(0, deps=(product, dv[0], dv[1]))
            dv = (dv_main, dv_tail)
        else:
            dq, dv_main = warpgroup_mma_wait(0, deps=(product, dv[0]))
            dv = (dv_main, 0)
    mbarrier.arrive(bars.do_empty.index(do_stage), count=1)
    add_dq(dq, DQ_ACC, block * 4 + CHUNKS - 1, True, HALF, DQ_LAYOUT, C)
    return dv


@gluon.jit
def store_pair(
    acc, tile, descs, X, stride, t, sizes, HEAD_DIM: gl.constexpr, TAIL: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """A gradient of the 64 keys leaves; with ``C.group_split > 1``, a share of it."""
    if TAIL > 0:
        acc = (only_used(acc[0], t.start_n, t, C), only_used(acc[1], t.start_n, t, C))
    else:
        acc = (only_used(acc[0], t.start_n, t, C), 0)
    if C.group_split > 1:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
        store_share(acc[0], X, t, t.start_n, 0, sizes, MAIN, LAYOUT, C)
        if TAIL > 0:
            TAIL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
            store_share(acc[1], X, t, t.start_n, MAIN, sizes, TAIL, TAIL_LAYOUT, C)
    else:
        zb = 0 if C.packed else t.z
        store_rows(acc[0], tile[0].index(0), descs[0], X, stride, zb, t.hk, t.start_n, t.k_row0, t.k_rows, HEAD_DIM, 0, MAIN, C)
        if TAIL > 0:
            store_rows(acc[1], tile[1].index(0), descs[1], X, stride, zb, t.hk, t.start_n, t.k_row0, t.k_rows, HEAD_DIM, MAIN,
                       TAIL, C)  # fmt: skip
        tma.store_wait(0)


@gluon.jit
def scores(
    dk_descs, DK, stride_dk, CU_Q, CU_K, USED_K, unit_log2, softmax_scale, sizes, variant, args, tiles, bars, C: gl.constexpr
):
    """The warpgroup that computes P and dS, and keeps dK."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, K_LAYOUT, 2)
    t = locate(0, 0, sizes, CU_Q, CU_K, USED_K, unit_log2, variant, args, C)
    dk = zero_pair(C.tail)
    count = 0
    mbarrier.wait(bars.k_full.index(0), 0)
    if t.lo < t.hi:
        mbarrier.wait(bars.v_full.index(0), 0)
        if C.packed or C.used:
            clear_foreign_rows(tiles.k, 0, tiles.v, 0, t.Nk - t.start_n, C)
    for g in range(sizes.group):
        h = t.hk * sizes.group + g
        slope = variant.slope(t.z, h, args.alibi)
        if C.edge_lo:
            for m in range(t.lo, t.free_lo):
                dk = step_of_scores(dk, count, h, m, slope, t, unit_log2, variant, args, tiles, bars, True, S_LAYOUT, P_LAYOUT,
                                    C)  # fmt: skip
                count += 1
        for m in range(gl.maximum(t.lo, t.free_lo), t.free_hi):
            dk = step_of_scores(dk, count, h, m, slope, t, unit_log2, variant, args, tiles, bars, False, S_LAYOUT, P_LAYOUT, C)
            count += 1
        if C.edge_hi:
            for m in range(t.free_hi, t.hi):
                dk = step_of_scores(dk, count, h, m, slope, t, unit_log2, variant, args, tiles, bars, True, S_LAYOUT, P_LAYOUT,
                                    C)  # fmt: skip
                count += 1
    mbarrier.wait(bars.k_done.index(0), 0)  # dK leaves through K's buffer, which the other one's dQ reads
    if C.group_split == 1:
        dk = (dk[0] * softmax_scale, dk[1] * softmax_scale)
    store_pair(dk, tiles.k, dk_descs, DK, stride_dk, t, sizes, C.head_dim, C.tail, C)


@gluon.jit
def values(
    dv_descs, DV, stride_dv, DQ_ACC, CU_Q, CU_K, USED_K, unit_log2, sizes, variant, args, tiles, bars, C: gl.constexpr
):  # fmt: skip
    """The warpgroup that keeps dV and adds up dQ."""
    t = locate(0, 0, sizes, CU_Q, CU_K, USED_K, unit_log2, variant, args, C)
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dv = zero_pair(C.v_tail)
    count = 0
    for g in range(sizes.group):
        block0 = first_query_block(t.z, t.hk * sizes.group + g, t.q_row0, sizes, C)
        for m in range(t.lo, t.hi):
            dv = step_of_values(dv, count, block0 + m, DQ_ACC, tiles, bars, DQ_LAYOUT, C)
            count += 1
    mbarrier.arrive(bars.k_done.index(0), count=1)
    store_pair(dv, tiles.v, dv_descs, DV, stride_dv, t, sizes, C.head_dim_v, C.v_tail, C)


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
    PANEL: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k = tile_pair(dtype, 1, HALF, k_desc, k_tail, MAIN, C.tail)
    k_panels = (reinterpret(k[0], dtype, [2, HALF, HALF], PANEL), 0)
    if C.tail > 0:
        k_panels = (k_panels[0], reinterpret(k[1], dtype, [C.tail // HALF, HALF, HALF], PANEL))
    tiles = Tiles(
        k,
        tile_pair(dtype, 1, HALF, v_desc, v_tail, MAIN, C.v_tail),
        tile_pair(dtype, C.q_stages, HALF, q_desc, q_tail, MAIN, C.tail),
        tile_pair(dtype, C.do_stages, HALF, do_desc, do_tail, MAIN, C.v_tail),
        gl.allocate_shared_memory(gl.float32, [C.q_stages, HALF], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [C.do_stages, HALF], delta_desc.layout),
        gl.allocate_shared_memory(dtype, [2, HALF, HALF], PANEL),
        gl.allocate_shared_memory(dtype, [2, HALF, HALF], PANEL),
        k_panels,
    )
    once = barriers(1, 1)
    bars = Bars(
        barriers(1, 1),
        barriers(1, 1),
        once,
        once,
        barriers(C.q_stages, 1),
        barriers(C.q_stages, 1),
        barriers(C.do_stages, 1),
        barriers(C.do_stages, 1),
        barriers(2, 1),
        None,
        None,
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
        (scores, (dk_descs, DK, stride_dk, CU_Q, CU_K, USED_K, unit_log2, softmax_scale, sizes, variant, args, tiles, bars, C)),
        (values, (dv_descs, DV, stride_dv, DQ_ACC, CU_Q, CU_K, USED_K, unit_log2, sizes, variant, args, tiles, bars, C)),
        (producer, (q_descs, do_descs, k_descs, v_descs, lse_desc, delta_desc, CU_Q, CU_K, USED_K, unit_log2, sizes, variant,
                    args, tiles, bars, C)),
    ], [4, 1], [C.consumer_regs, C.producer_regs])  # fmt: skip
