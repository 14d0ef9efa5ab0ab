"""Backward on sm_90: one thread block owns 128 keys, two warpgroups own 64 of them each, one warp loads.

The five products of FlashAttention-2's backward (algorithm 2), transposed so that keys are rows, because then P^T and
dS^T stay in registers as the left operands of dV and dK::

    S^T = K Q^T    P^T = exp(S^T - LSE)    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)
    dV += P^T dO            dK += dS^T Q            dQ += dS K

dV and dK belong to this block. dQ does not: every key block adds to it, so it is gathered in an fp32 accumulator in memory
by ``red.global.add``, zeroed before and converted to 16 bits afterwards (:mod:`.backward_ends`; with ``C.prepares`` thread
blocks zero what later ones add to, and take their delta: :mod:`.backward_prepare`; with ``C.converts`` they convert what
earlier ones have added to: :mod:`.backward_convert`). The order of
those additions varies from run to run, but with ``C.ordered`` (:mod:`.backward_order`); with ``C.dq = False`` the kernel leaves
dQ out, and :mod:`.backward_split` computes it without sharing.

With ``C.whole_head`` one block walks over all key tiles of a head, from the last to the first. Then dQ has one writer: a row's
first addition is a store, so nothing needs zeroing, the order is fixed, and the block itself converts dQ at the end. It takes
heads enough for every multiprocessor, and short ones: their dQ has to stay in L2.

One step takes BLOCK_M query rows of one head; the heads of a GQA group follow one another, so that dK and dV are summed
in registers. With ``C.group_split > 1`` a group is shared out: each share of its heads has a thread block per key tile,
which stores its dK and dV in fp32, and the conversion pass adds the shares up in a fixed order. Everything here takes
shares for key heads then: ``hk`` counts them, ``sizes.heads`` and ``sizes.group`` are their number and their query heads.
dQ's product needs dS of all 128 keys: each warpgroup writes its dS^T to shared memory, waits for the other's
and computes one 64 x 64 half of the dQ tile (half the columns at D = 128, half the rows at D = 64).

Barriers (``full``: the bytes are there; ``empty``: all readers are done)::

    producer warp                      shared memory                  consumer warpgroup w (keys 64 w .. 64 w + 63)
    -------------                      -------------                  ---------------------------------------------
    load K, V (once) ----------------> k[w], v[w]       ------------> wait k_full, v_full
    wait q_empty[s], load Q, LSE ----> q[q_stages]      ------------> wait q_full[s]; issue S^T = K Q^T
    wait do_empty[s], load dO, delta > do[do_stages]    ------------> wait do_full[s]; issue dP^T = V dO^T
                                       ds[2, w]         <------------ dS^T; arrive at ds_full[b]; issue dV += P^T dO
                                       ds[2, 0], ds[2, 1] ----------> wait ds_full[b]; issue dQ = dS K, dK += dS^T Q
                       do_empty[s] <-- dV, dQ are in registers ------ add dQ to memory
                       q_empty[s]  <-- dK is in registers -----------
    next tile: wait kv_empty           k[w], v[w]       <------------ dK, dV leave through them

With ``C.ordered`` a consumer adds dQ between two more barriers of the warp that keeps the order: it waits for ``turn[b]`` and
arrives at ``added[b]``. With ``C.dk_last`` dK is issued when dQ is there: the additions, whose registers dP^T needs next, leave
beneath it.
``ds`` has two buffers and no ``empty`` barrier: a warpgroup that writes buffer b again has waited, one step before, for
both warpgroups to fill the other buffer, and each of them did that after its last read of b. K's rows are read by both
warpgroups (dQ), so ``k_done`` counts both in before dK leaves through K's buffer; V's rows are private.
:mod:`...testing.gluon_cpu` runs all of this on CPU tensors, in random order.
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

from .backward_convert import Piece, Sums, work_for_others
from .backward_order import keep_order
from .backward_prepare import Slots, await_rows, read_rows
from .backward_walk import Sizes, first_block, first_query_block, locate, place_of, ring, turns_of, walks_of
from .common import ANY, OR_ZERO, biased_lse, biased_scores, named_barrier_wait, select, tma_load, tma_store
from .forward import barriers, clear_rows

_SharedMemory = gl.shared_memory_descriptor  # a method that lost its underscore after Triton 3.6
reinterpret = _SharedMemory.reinterpret if hasattr(_SharedMemory, "reinterpret") else _SharedMemory._reinterpret

CLEARED = gl.constexpr(8)  # named barrier: both warpgroups have cleared their share of foreign rows
HALF = gl.constexpr(64)  # keys per warpgroup, and the side of a dQ half
CHUNK_BYTES = gl.constexpr(64 * 64 * 4)  # one dQ half in the accumulator

# 32 accumulators of a thread -> 8 coalesced 16-byte reductions. Operands: $0-$7 results nobody reads (the builtin wants
# an output per input: 32 x int8), $8-$39 values, $40-$71 the thread's address 32 times.
_RED = "".join(
    f"red.relaxed.gpu.global.add.v4.f32 [$40+{2048 * i}], {{${8 + 4 * i},${9 + 4 * i},${10 + 4 * i},${11 + 4 * i}}};\n"
    for i in range(8)
)
RED_V4 = gl.constexpr("{\n" + _RED + "".join(f"mov.u32 ${i}, 0;\n" for i in range(8)) + "}")
RED_V4_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + ["f"] * 32 + ["l"] * 32))

STORE_V4 = gl.constexpr(RED_V4.value.replace("red.relaxed.gpu.global.add", "st.relaxed.gpu.global"))

# The same where the first writer stores: $72-$103 say 32 times whether this is it.
_FIRST = "".join(
    f"@p st.relaxed.gpu.global.v4.f32 [$40+{2048 * i}], {{${8 + 4 * i},${9 + 4 * i},${10 + 4 * i},${11 + 4 * i}}};\n"
    f"@!p red.relaxed.gpu.global.add.v4.f32 [$40+{2048 * i}], {{${8 + 4 * i},${9 + 4 * i},${10 + 4 * i},${11 + 4 * i}}};\n"
    for i in range(8)
)
FIRST_V4 = gl.constexpr(
    "{\n.reg .pred p;\nsetp.ne.s32 p, $72, 0;\n" + _FIRST + "".join(f"mov.u32 ${i}, 0;\n" for i in range(8)) + "}"
)
FIRST_V4_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + ["f"] * 32 + ["l"] * 32 + ["r"] * 32))

# And back: $0-$31 what the thread's eight pieces hold, $32-$63 its address.
_LOAD = "".join(
    f"ld.relaxed.gpu.global.v4.f32 {{${4 * i},${1 + 4 * i},${2 + 4 * i},${3 + 4 * i}}}, [$32+{2048 * i}];\n" for i in range(8)
)
LOAD_V4 = gl.constexpr("{\n" + _LOAD + "}")
LOAD_V4_OPERANDS = gl.constexpr(",".join(["=f"] * 32 + ["l"] * 32))


class Tiles(NamedTuple):
    """Shared memory. ``k_panels`` and ``ds_panels`` are K and dS^T seen as 64 x 64 panels, dQ's operands."""

    k: Any
    v: Any
    q: Any
    do: Any
    lse: Any
    delta: Any
    ds: Any
    k_panels: Any
    ds_panels: Any


class Bars(NamedTuple):
    """mbarriers; see the diagram above."""

    k_full: Any
    v_full: Any
    k_done: Any
    kv_empty: Any
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    ds_full: Any
    turn: Any
    added: Any


@gluon.jit
def opaque_zero():
    """0 that ptxas cannot see through, to keep it from hoisting what depends on it out of a loop and spilling it there."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


# ---------------------------------------------------------------------------------------------------------- producer
@gluon.jit
def load_half(desc, z, h, row, barrier, tile):
    tma_load(desc, [z, h, row, 0], barrier, tile.index(0))
    tma_load(desc, [z, h, row + HALF, 0], barrier, tile.index(1))


@gluon.jit
def load_q(desc, lse_desc, z, h, row, block, count, tiles, bars, C: gl.constexpr):
    stage, phase = ring(count, C.q_stages)
    mbarrier.wait(bars.q_empty.index(stage), phase ^ 1)
    mbarrier.expect(bars.q_full.index(stage), C.block_m * (2 * C.d + 4))
    tma_load(desc, [z, h, row, 0], bars.q_full.index(stage), tiles.q.index(stage))
    tma_load(lse_desc, [block * C.block_m], bars.q_full.index(stage), tiles.lse.index(stage))


@gluon.jit
def load_do(
    desc, delta_desc, z, h, row, block, count, rows, unit, ready, prepared, sizes, tiles, bars, first, C: gl.constexpr
):  # fmt: skip
    """In a tile's first step, delta waits for the thread blocks that prepare the rows of the tile's key head ``unit``."""
    stage, phase = ring(count, C.do_stages)
    mbarrier.wait(bars.do_empty.index(stage), phase ^ 1)
    tma_load(desc, [z, h, row, 0], bars.do_full.index(stage), tiles.do.index(stage))
    if C.prepares:
        if first:
            await_rows(rows.READY, unit, ready, prepared, sizes)
    mbarrier.expect(bars.do_full.index(stage), C.block_m * (2 * C.d + 4))
    tma_load(delta_desc, [block * C.block_m], bars.do_full.index(stage), tiles.delta.index(stage))


@gluon.jit
def producer(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, rows, prepared, first, CU_Q, CU_K, USED_K, unit_log2, sizes,
    variant, args, tiles, bars, C: gl.constexpr,
):  # fmt: skip
    """Loads a tile's K and V once and streams Q, dO and their statistics."""
    count = 0
    for turn in range(turns_of(sizes, C)):
        t = locate(turn, first, sizes, CU_Q, CU_K, USED_K, unit_log2, variant, args, C)
        zb = 0 if C.packed else t.z  # packed tensors have no batch axis
        unit = t.z * sizes.heads + t.hk
        ready = 0
        if C.prepares:
            ready = read_rows(rows.READY, unit)
        if C.whole_head:
            mbarrier.wait(bars.kv_empty.index(0), (turn & 1) ^ 1)
        mbarrier.expect(bars.k_full.index(0), 4 * HALF * C.d)
        load_half(k_desc, zb, t.hk // C.group_split, t.k_row0 + t.start_n, bars.k_full.index(0), tiles.k)
        before = count
        walks, heads = walks_of(sizes, C)
        for g in range(walks):
            h0 = t.hk * sizes.group + g
            block0 = first_query_block(t.z, h0, t.q_row0, sizes, C)
            for at in range(t.lo * heads, t.hi * heads):
                h, m, block = place_of(at, h0, block0, t, sizes, C)
                row = t.q_row0 + m * C.block_m
                load_q(q_desc, lse_desc, zb, h, row, block, count, tiles, bars, C)
                if count == before:
                    mbarrier.expect(bars.v_full.index(0), 4 * HALF * C.d)
                    load_half(v_desc, zb, t.hk // C.group_split, t.k_row0 + t.start_n, bars.v_full.index(0), tiles.v)
                load_do(do_desc, delta_desc, zb, h, row, block, count, rows, unit, ready, prepared, sizes, tiles, bars,
                        count == before, C)  # fmt: skip
                count += 1


# ------------------------------------------------------------------------------------------------------------- step
@gluon.jit
def issue_dq(tiles, buffer, zero, WG: gl.constexpr, DQ_LAYOUT: gl.constexpr, C: gl.constexpr):
    """Issue this warpgroup's half of dQ = dS K [64, 64] over all 128 keys of the tile."""
    acc = gl.zeros([HALF, HALF], gl.float32, DQ_LAYOUT)
    if C.d == 128:  # all 64 rows, 64 of 128 columns
        ds0 = tiles.ds_panels.index(buffer * 2)
        ds1 = tiles.ds_panels.index(buffer * 2 + 1)
        k0 = tiles.k_panels.index(WG + zero)
        k1 = tiles.k_panels.index(2 + WG + zero)
    else:  # 64 of 128 rows, all 64 columns
        ds0 = tiles.ds_panels.index(buffer * 4 + WG)
        ds1 = tiles.ds_panels.index(buffer * 4 + 2 + WG)
        k0 = tiles.k_panels.index(zero)
        k1 = tiles.k_panels.index(1 + zero)
    acc = warpgroup_mma(ds0.permute((1, 0)), k0, acc, use_acc=False, is_async=True)
    return warpgroup_mma(ds1.permute((1, 0)), k1, acc, is_async=True)


@gluon.jit
def dq_address(DQ_ACC, chunk, COLS: gl.constexpr, DQ_LAYOUT: gl.constexpr):
    """Where the accumulator holds this thread's part of a [64, COLS] tile, which fills whole chunks of 64 columns.

    In a chunk that is 8 x 16 bytes, 2048 bytes apart.

    The thread's number is written with row and column: %tid.x inside the assembly would make ptxas lose uniformity for
    the whole function (vote loops around every descriptor, 500 bytes of spills).
    """
    row = gl.arange(0, HALF, layout=gl.SliceLayout(1, DQ_LAYOUT))
    col = gl.arange(0, COLS, layout=gl.SliceLayout(0, DQ_LAYOUT))
    thread = ((row >> 4) * 32 + (row & 7) * 4)[:, None] + (((col & 7) >> 1) + (col >> 6) * (CHUNK_BYTES // 16))[None, :]
    return DQ_ACC.to(gl.int64) + chunk.to(gl.int64) * CHUNK_BYTES + (thread * 16).to(gl.int64)


@gluon.jit
def add_dq(dq, DQ_ACC, chunk, yes, COLS: gl.constexpr, DQ_LAYOUT: gl.constexpr, C: gl.constexpr):
    """Add a [64, COLS] tile to the accumulator; with ``C.whole_head``, if ``yes``, put it there."""
    address = dq_address(DQ_ACC, chunk, COLS, DQ_LAYOUT)
    if C.whole_head:
        yes = gl.full([HALF, COLS], 0, gl.int32, DQ_LAYOUT) + yes.to(gl.int32)
        gl.inline_asm_elementwise(
            FIRST_V4, FIRST_V4_OPERANDS, [dq, address, yes], dtype=gl.int8, is_pure=False, pack=32
        )
    else:
        gl.inline_asm_elementwise(RED_V4, RED_V4_OPERANDS, [dq, address], dtype=gl.int8, is_pure=False, pack=32)


@gluon.jit
def store_dq(x, DQ, stride, z, h, m, Nq, scale, WG: gl.constexpr, DQ_LAYOUT: gl.constexpr, C: gl.constexpr):
    """This warpgroup's [64, 64] half of the m-th block's dQ, scaled, to its place in memory."""
    row = m * C.block_m + gl.arange(0, HALF, layout=gl.SliceLayout(1, DQ_LAYOUT))
    col = gl.arange(0, HALF, layout=gl.SliceLayout(0, DQ_LAYOUT))
    if C.d == 128:
        col += WG * HALF
    else:
        row += WG * HALF
    base = DQ + gl.multiple_of(z.to(gl.int64) * stride[0] + h.to(gl.int64) * stride[1], 8)
    ptrs = base + gl.multiple_of(row.to(gl.int64) * stride[2], 8)[:, None] + col[None, :]
    gl.store(ptrs, (x * scale).to(DQ.dtype.element_ty), mask=(row < Nq)[:, None] & (col < C.head_dim)[None, :])


@gluon.jit
def convert_dq(
    DQ, stride, DQ_ACC, z, hk, sizes, scale, WG: gl.constexpr, DQ_LAYOUT: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """fp32 accumulator -> dQ for all heads of the group. Each thread reads what it wrote: nobody waits for anybody.

    Four blocks at a time are on their way, because one would leave the memory idle; the last blocks may come twice.
    """
    last = sizes.q_blocks - 1
    for g in range(sizes.group):
        h = hk * sizes.group + g
        block0 = first_query_block(z, h, 0, sizes, C)
        for m in range(0, sizes.q_blocks, 4):
            x0 = load_dq(DQ_ACC, block0 + m, WG, DQ_LAYOUT)
            x1 = load_dq(DQ_ACC, block0 + gl.minimum(m + 1, last), WG, DQ_LAYOUT)
            x2 = load_dq(DQ_ACC, block0 + gl.minimum(m + 2, last), WG, DQ_LAYOUT)
            x3 = load_dq(DQ_ACC, block0 + gl.minimum(m + 3, last), WG, DQ_LAYOUT)
            store_dq(x0, DQ, stride, z, h, m, sizes.Nq, scale, WG, DQ_LAYOUT, C)
            store_dq(x1, DQ, stride, z, h, gl.minimum(m + 1, last), sizes.Nq, scale, WG, DQ_LAYOUT, C)
            store_dq(x2, DQ, stride, z, h, gl.minimum(m + 2, last), sizes.Nq, scale, WG, DQ_LAYOUT, C)
            store_dq(x3, DQ, stride, z, h, gl.minimum(m + 3, last), sizes.Nq, scale, WG, DQ_LAYOUT, C)


@gluon.jit
def load_dq(DQ_ACC, block, WG: gl.constexpr, DQ_LAYOUT: gl.constexpr):
    address = dq_address(DQ_ACC, block * 2 + WG, HALF, DQ_LAYOUT)
    return gl.inline_asm_elementwise(LOAD_V4, LOAD_V4_OPERANDS, [address], dtype=gl.float32, is_pure=False, pack=32)


@gluon.jit
def clear_foreign_queries(tiles, bars, q_stage, do_stage, do_phase, valid, WG: gl.constexpr, C: gl.constexpr):
    """Zero the rows of Q and dO that belong to the next sequence: their P and dS are zero, but 0 * NaN is NaN."""
    if valid < C.block_m:
        mbarrier.wait(bars.do_full.index(do_stage), do_phase)
        if WG == 0:
            clear_rows(tiles.q.index(q_stage).reshape([C.block_m, C.d]), valid, C.block_m, C.d)
        else:
            clear_rows(tiles.do.index(do_stage).reshape([C.block_m, C.d]), valid, C.block_m, C.d)
        fence_async_shared()
        named_barrier_wait(CLEARED, 128, 256)


@gluon.jit
def step(
    dk, dv, count, at, h, slope, block0, t, seen, sizes, unit_log2, variant, args, DQ_ACC, tiles, bars,
    WG: gl.constexpr, MASK: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """BLOCK_M query rows of a head: dK, dV of this warpgroup's keys, and this warpgroup's half of the rows' dQ.

    Blocks from ``seen`` on have met an earlier key tile of this thread block. With ``C.late_dk`` a step's dK += dS^T Q is
    issued in the next step, under whose exp2 it runs; dS^T waits in shared memory. With ``C.early_statistics`` LSE and delta
    are in registers before the products that they are needed after: beside a wgmma, loads from shared memory take hundreds of
    clocks.
    """
    BLOCK_M: gl.constexpr = C.block_m
    h, m, block = place_of(at, h, block0, t, sizes, C)
    dtype: gl.constexpr = tiles.k.dtype
    q_stage, q_phase = ring(count, C.q_stages)
    do_stage, do_phase = ring(count, C.do_stages)
    buffer, ds_phase = ring(count, 2)
    zero = opaque_zero()  # K's and V's operand descriptors are built anew in every step
    k = tiles.k.index(WG + zero).reshape([HALF, C.d])
    v = tiles.v.index(WG + zero).reshape([HALF, C.d])
    q = tiles.q.index(q_stage).reshape([BLOCK_M, C.d])
    do = tiles.do.index(do_stage).reshape([BLOCK_M, C.d])

    if C.ordered:  # the walk takes the heads of a group in turn
        slope = variant.slope(t.z, h, args.alibi)
    mbarrier.wait(bars.q_full.index(q_stage), q_phase)
    if C.packed:
        clear_foreign_queries(tiles, bars, q_stage, do_stage, do_phase, t.Nq - m * BLOCK_M, WG, C)
    blank = gl.zeros([HALF, BLOCK_M], gl.float32, S_LAYOUT)
    s = warpgroup_mma(k, q.permute((1, 0)), blank, use_acc=False, is_async=True)
    if C.early_statistics:
        lse_log2 = tiles.lse.index(q_stage).load(gl.SliceLayout(0, S_LAYOUT))[None, :]
    mbarrier.wait(bars.do_full.index(do_stage), do_phase)
    dp = warpgroup_mma(v, do.permute((1, 0)), blank, use_acc=False, is_async=True)
    i = (m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT)))[None, :]
    j = (t.start_n + WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_LAYOUT)))[:, None]
    if C.early_statistics:
        if C.linear_bias and not MASK:
            # known to be satisfied: a branch, behind which the bias stays: the products shall not wait for the LSE
            mbarrier.wait(bars.do_full.index(do_stage), do_phase)
        lse_log2 = biased_lse(lse_log2, i, j, m * BLOCK_M, t.start_n, slope, t.Nq, t.Nk, unit_log2, variant, 0, MASK, C)

    if C.late_dk:
        q_last, _phase = ring(gl.maximum(count - 1, 0), C.q_stages)  # in the first step dS^T is zero, and any Q will do
        q_before = tiles.q.index(q_last).reshape([BLOCK_M, C.d])
        dk = warpgroup_mma(tiles.ds.index((buffer ^ 1) * 2 + WG), q_before, dk, is_async=True)
        s = warpgroup_mma_wait(2, deps=(s,))
    else:
        s = warpgroup_mma_wait(1, deps=(s,))
    if not C.early_statistics:
        lse_log2 = tiles.lse.index(q_stage).load(gl.SliceLayout(0, S_LAYOUT))[None, :]
        lse_log2 = biased_lse(lse_log2, i, j, m * BLOCK_M, t.start_n, slope, t.Nq, t.Nk, unit_log2, variant, 0, MASK, C)
    raw = variant.score(s, args.score)
    p = gl.exp2(biased_scores(raw, i, j, t.start_n, slope, t.Nq, t.Nk, variant, 0, MASK, C) * unit_log2 - lse_log2)
    if MASK:
        a, b, width = variant.place(i, j, t.Nq, t.Nk, args.mask)
        p = select(p, a, b, width, OR_ZERO)
        if C.ragged_keys and C.past_end:
            p = select(p, t.Nk - 1, j, ANY, OR_ZERO)
    if C.early_statistics:
        delta = tiles.delta.index(do_stage).load(gl.SliceLayout(0, S_LAYOUT))
    p16 = gl.convert_layout(p.to(dtype), P_LAYOUT)
    p = variant.score_grad(p, raw, args.score)  # linear in its first argument: applied here, no raw score stays alive
    if C.early_dv:
        dv = warpgroup_mma(p16, do, dv, is_async=True)
    else:
        # known to be satisfied: a branch, which keeps ptxas from hoisting the wait for dP above exp2
        mbarrier.wait(bars.do_full.index(do_stage), do_phase)
    BEHIND: gl.constexpr = (1 if C.early_dv else 0) + (1 if C.late_dk else 0)  # products that stay in flight
    dp = warpgroup_mma_wait(BEHIND, deps=(dp,))
    if not C.early_statistics:
        delta = tiles.delta.index(do_stage).load(gl.SliceLayout(0, S_LAYOUT))
    ds = (p * (dp - delta[None, :])).to(dtype)
    if C.dq or C.late_dk:
        tiles.ds.index(buffer * 2 + WG).store(ds)
        fence_async_shared()
    ds16 = gl.convert_layout(ds, P_LAYOUT)
    if C.dq:
        mbarrier.arrive(bars.ds_full.index(buffer), count=1)
    if not C.early_dv:
        dv = warpgroup_mma(p16, do, dv, is_async=True)
    if C.dq:
        mbarrier.wait(bars.ds_full.index(buffer), ds_phase)
        dq = issue_dq(tiles, buffer, zero, WG, DQ_LAYOUT, C)
        if not C.dk_last:
            dk = warpgroup_mma(ds16, q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(0 if C.dk_last else 1, deps=(dv, dq))
        mbarrier.arrive(bars.do_empty.index(do_stage), count=1)
        # A branch again, on a barrier that cannot advance before this warpgroup does: the additions stay above the wait.
        if C.ordered:
            mbarrier.wait(bars.turn.index(buffer), ds_phase)
        else:
            mbarrier.wait(bars.ds_full.index(buffer), ds_phase)
        add_dq(dq, DQ_ACC, block * 2 + WG, m < seen, HALF, DQ_LAYOUT, C)
        if C.ordered:
            mbarrier.arrive(bars.added.index(buffer), count=1)
        if C.dk_last:
            dk = warpgroup_mma(ds16, q, dk, is_async=True)
    elif not C.late_dk:
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=(dv,))
        mbarrier.arrive(bars.do_empty.index(do_stage), count=1)
    if C.late_dk:
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        mbarrier.arrive(bars.do_empty.index(do_stage), count=1)
        mbarrier.arrive(bars.q_empty.index(q_last), count=1, pred=count > 0)
    else:
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(bars.q_empty.index(q_stage), count=1)
    return dk, dv


# ---------------------------------------------------------------------------------------------------------- epilogue
@gluon.jit
def only_used(x, row, t, C: gl.constexpr):
    """A gradient of 64 keys from ``row`` on, zero behind those in use: where a query or dO has NaN, P and dS were not."""
    if C.used:
        keys = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, x.type.layout))
        x = gl.where((keys < t.Nk)[:, None], x, 0.0)
    return x


@gluon.jit
def store_rows(
    x, tile, desc, X, stride, z, h, row, row0, rows, HEAD_DIM: gl.constexpr, FIRST: gl.constexpr, COLS: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """64 rows and COLS columns of a gradient leave through ``tile``, the buffer of the operand that they belong to.

    TMA drops rows past the tensor's end. In a packed tensor, rows past the sequence's end are the next one's: where there are
    some, the others are stored one by one.
    """
    stage = tile.reshape([HALF, COLS])
    stage.store(x.to(tile.dtype))
    if C.packed and row + HALF > rows:
        PER_ROW: gl.constexpr = COLS // 8
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // PER_ROW, PER_ROW], [4, 1], [1, 0])
        offs = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        cols = FIRST + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
        # strides are multiples of 8 elements (the host has checked), which the compiler needs for 16-byte stores
        head = gl.multiple_of(h.to(gl.int64) * stride[1], 8)
        line = gl.multiple_of((row0 + offs).to(gl.int64) * stride[2], 8)
        ptrs = X + head + line[:, None] + cols[None, :]
        gl.store(ptrs, stage.load(LAYOUT), mask=(offs < rows)[:, None] & (cols < HEAD_DIM)[None, :])
    else:
        fence_async_shared()
        tma_store(desc, [z, h, row0 + row, FIRST], tile)


@gluon.jit
def store_share(x, SHARES, t, row, FIRST: gl.constexpr, sizes, COLS: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """64 rows of a share's dK or dV from ``row`` on, COLS columns from FIRST on: fp32, blocks of 64 keys laid out like dQ's.

    Packed, a block past the sequence's keys may be the next sequence's, and is left alone.
    """
    if row < t.k_rows:
        blocks = sizes.blocks * (C.block_n // HALF)
        block = first_block(t.z, t.hk, t.k_row0, sizes.heads, blocks, HALF, C.packed) + row // HALF
        address = dq_address(SHARES, block * (C.d // HALF) + FIRST // HALF, COLS, LAYOUT)
        gl.inline_asm_elementwise(STORE_V4, RED_V4_OPERANDS, [x, address], dtype=gl.int8, is_pure=False, pack=32)


@gluon.jit
def consumer(
    dk_desc, dv_desc, DK, DV, stride_dk, stride_dv, DQ, stride_dq, DQ_ACC, first, CU_Q, CU_K, USED_K, unit_log2,
    softmax_scale, sizes, variant, args, tiles, bars, WG: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Warpgroup WG: keys start_n + 64 WG and the 63 that follow."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_m, 16])
    KV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.d, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, KV_LAYOUT, 2)
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    count = 0
    seen = sizes.q_blocks
    if C.late_dk:
        tiles.ds.index(2 + WG).store(gl.zeros([HALF, C.block_m], tiles.k.dtype, S_LAYOUT))
        fence_async_shared()
    for turn in range(turns_of(sizes, C)):
        t = locate(turn, first, sizes, CU_Q, CU_K, USED_K, unit_log2, variant, args, C)
        dk = gl.zeros([HALF, C.d], gl.float32, KV_LAYOUT)
        dv = gl.zeros([HALF, C.d], gl.float32, KV_LAYOUT)
        mbarrier.wait(bars.k_full.index(0), turn & 1)
        if t.lo < t.hi:
            mbarrier.wait(bars.v_full.index(0), turn & 1)  # (with whole_head, every tile has queries)
            if C.packed or C.used:  # rows past the keys in use are another sequence's, or nobody's
                valid = t.Nk - t.start_n - WG * HALF
                if t.Nk - t.start_n < C.block_n:
                    clear_rows(tiles.k.index(WG).reshape([HALF, C.d]), valid, HALF, C.d)
                    clear_rows(tiles.v.index(WG).reshape([HALF, C.d]), valid, HALF, C.d)
                    fence_async_shared()
                    named_barrier_wait(CLEARED, 128, 256)
        walks, heads = walks_of(sizes, C)
        for g in range(walks):
            h = t.hk * sizes.group + g
            slope = variant.slope(t.z, h, args.alibi)
            block0 = first_query_block(t.z, h, t.q_row0, sizes, C)
            if C.edge_lo:
                for at in range(t.lo * heads, t.free_lo * heads):
                    dk, dv = step(dk, dv, count, at, h, slope, block0, t, seen, sizes, unit_log2, variant, args, DQ_ACC,
                                  tiles, bars, WG, True, S_LAYOUT, P_LAYOUT, DQ_LAYOUT, C)  # fmt: skip
                    count += 1
            for at in range(gl.maximum(t.lo, t.free_lo) * heads, t.free_hi * heads):
                dk, dv = step(dk, dv, count, at, h, slope, block0, t, seen, sizes, unit_log2, variant, args, DQ_ACC,
                              tiles, bars, WG, False, S_LAYOUT, P_LAYOUT, DQ_LAYOUT, C)  # fmt: skip
                count += 1
            if C.edge_hi:
                for at in range(t.free_hi * heads, t.hi * heads):
                    dk, dv = step(dk, dv, count, at, h, slope, block0, t, seen, sizes, unit_log2, variant, args, DQ_ACC,
                                  tiles, bars, WG, True, S_LAYOUT, P_LAYOUT, DQ_LAYOUT, C)  # fmt: skip
                    count += 1
        if C.late_dk:
            if count > 0:
                stage, _phase = ring(count - 1, C.q_stages)
                last = tiles.ds.index(((count - 1) & 1) * 2 + WG)
                dk = warpgroup_mma(last, tiles.q.index(stage).reshape([C.block_m, C.d]), dk, is_async=True)
                dk = warpgroup_mma_wait(0, deps=(dk,))
        zb = 0 if C.packed else t.z
        row = t.start_n + WG * HALF
        dk = only_used(dk, row, t, C)
        dv = only_used(dv, row, t, C)
        if C.group_split > 1:
            store_share(dv, DV, t, row, 0, sizes, C.d, KV_LAYOUT, C)
            store_share(dk, DK, t, row, 0, sizes, C.d, KV_LAYOUT, C)
        else:
            if C.dq:
                mbarrier.arrive(bars.k_done.index(0), count=1)
            store_rows(dv, tiles.v.index(WG), dv_desc, DV, stride_dv, zb, t.hk, row, t.k_row0, t.k_rows, C.head_dim_v, 0,
                       C.d, C)  # fmt: skip
            if C.dq:
                mbarrier.wait(bars.k_done.index(0), turn & 1)
            dk = dk * softmax_scale
            store_rows(dk, tiles.k.index(WG), dk_desc, DK, stride_dk, zb, t.hk, row, t.k_row0, t.k_rows, C.head_dim, 0,
                       C.d, C)  # fmt: skip
            tma.store_wait(0)
        if C.whole_head:
            mbarrier.arrive(bars.kv_empty.index(0), count=1)
            seen = gl.minimum(seen, t.lo)
    if C.whole_head:
        z = gl.program_id(0) // sizes.heads
        convert_dq(DQ, stride_dq, DQ_ACC, z, gl.program_id(0) % sizes.heads, sizes, softmax_scale, WG, DQ_LAYOUT, C)


# ------------------------------------------------------------------------------------------------------------ kernel
@gluon.jit(
    # group = 1 is worth a kernel
    do_not_specialize=["Nq", "Nk", "blocks", "batch_heads", "head_group", "heads", "q_blocks", "prepared", "each", "first",
                       "convert_begin", "convert_end", "convert_each"],
    do_not_specialize_on_alignment=["CU_Q", "CU_K", "USED_K"],
)
def attn_bwd_hopper(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dk_desc, dv_desc, DK, DV, stride_dk, stride_dv, DQ, stride_dq,
    DQ_SEMAPHORE, DQ_ACC, o_desc, rows, prepared, each, acc_desc, dq_desc, first, convert_begin, convert_end, convert_each,
    CU_Q, CU_K, USED_K, variant, args, unit_log2, softmax_scale, heads, group, Nq, Nk, blocks, batch_heads, head_group,
    q_blocks, C: gl.constexpr,
):  # fmt: skip
    """Grid: one thread block per 128 keys, or per head. ``C``: a :class:`.BackwardConfig`; ``heads`` counts key heads (shares).

    ``DK``, ``DV``: with ``C.packed`` the gradients; with ``C.group_split > 1`` the shares' fp32 ones (:func:`store_share`).
    ``lse_desc``, ``delta_desc``: fp32, blocks of BLOCK_M rows as :func:`first_block` numbers them, LSE in base 2 and +inf on
    rows that are not there. ``DQ_ACC``: fp32, BLOCK_M * D per block, zeros unless ``C.whole_head``, which alone fills ``DQ``.
    ``DQ_SEMAPHORE``: with ``C.ordered``, an int32 per block, zeros. With ``C.prepares``: O as dO's descriptor has dO, the
    :class:`.backward_prepare.Rows`, the number of blocks prepared before, and how many ``each`` thread block prepares. With
    ``C.converts``: DQ_ACC once more in units (:mod:`.backward_convert`), dQ as Q's descriptor has Q, and a ``Piece``.
    """
    dtype: gl.constexpr = q_desc.dtype
    PANEL: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k = gl.allocate_shared_memory(dtype, [2, 1, 1, HALF, C.d], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [2, 1, 1, HALF, C.d], v_desc.layout)
    q = gl.allocate_shared_memory(dtype, [C.q_stages, 1, 1, C.block_m, C.d], q_desc.layout)
    do = gl.allocate_shared_memory(dtype, [C.do_stages, 1, 1, C.block_m, C.d], do_desc.layout)
    lse = gl.allocate_shared_memory(gl.float32, [C.q_stages, C.block_m], lse_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [C.do_stages, C.block_m], delta_desc.layout)
    if C.dq or C.late_dk:
        ds = gl.allocate_shared_memory(dtype, [4, HALF, C.block_m], PANEL)  # [buffer * 2 + warpgroup]
        ds_panels = reinterpret(ds, dtype, [4 * (C.block_m // 64), 64, 64], PANEL)
        k_panels = reinterpret(k, dtype, [2 * (C.d // 64), 64, 64], PANEL)
    else:
        ds = k
        ds_panels = k
        k_panels = k
    tiles = Tiles(k, v, q, do, lse, delta, ds, k_panels, ds_panels)
    bars = Bars(
        barriers(1, 1),
        barriers(1, 1),
        barriers(1, 2) if C.dq and C.group_split == 1 else None,
        barriers(1, 2) if C.whole_head else None,
        barriers(C.q_stages, 1),
        barriers(C.q_stages, 2),
        barriers(C.do_stages, 1),
        barriers(C.do_stages, 2),
        barriers(2, 2) if C.dq else None,
        barriers(2, 1) if C.ordered else None,
        barriers(2, 2) if C.ordered else None,
    )
    fence_async_shared()
    sizes = Sizes(heads, group, Nq, Nk, blocks, batch_heads, head_group, q_blocks)
    slots, sums = Slots(None, None, None, None, None), Sums(None, None, None, None)
    if C.prepares:
        SLOTS: gl.constexpr = C.block_n // C.block_m
        o = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, C.block_m, C.d], o_desc.layout)
        later_do = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, C.block_m, C.d], do_desc.layout)
        o_groups = reinterpret(o, dtype, [SLOTS * C.block_m * C.d // 512, 8, 64], PANEL)
        do_groups = reinterpret(later_do, dtype, [SLOTS * C.block_m * C.d // 512, 8, 64], PANEL)
        slots = Slots(o, later_do, o_groups, do_groups, barriers(SLOTS, 1))
        if C.converts:
            units = reinterpret(later_do, gl.float32, [C.block_n * C.d // 2048, 8, 1, 4, 32], acc_desc.layout)
            sums = Sums(units, reinterpret(o, dtype, [SLOTS * 8, 16, 64], PANEL), o, barriers(2, 1))
        fence_async_shared()
    piece = Piece(first, convert_begin, convert_end, convert_each)
    gl.warp_specialize([
        (consumer, (dk_desc, dv_desc, DK, DV, stride_dk, stride_dv, DQ, stride_dq, DQ_ACC, first, CU_Q, CU_K, USED_K,
                    unit_log2, softmax_scale, sizes, variant, args, tiles, bars, 0, C)),
        (consumer, (dk_desc, dv_desc, DK, DV, stride_dk, stride_dv, DQ, stride_dq, DQ_ACC, first, CU_Q, CU_K, USED_K,
                    unit_log2, softmax_scale, sizes, variant, args, tiles, bars, 1, C)),
        (producer, (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, rows, prepared, first, CU_Q, CU_K, USED_K,
                    unit_log2, sizes, variant, args, tiles, bars, C)),
        (work_for_others, (o_desc, do_desc, rows, DQ_ACC, prepared, each, acc_desc, dq_desc, piece, softmax_scale, slots, sums,
                           bars.k_full, sizes, C)),
        (keep_order, (DQ_SEMAPHORE, first, CU_Q, CU_K, USED_K, unit_log2, sizes, variant, args, bars.turn, bars.added, C)),
    ], [4, 1, 2, 1], [C.consumer_regs, C.producer_regs, C.producer_regs, C.producer_regs])  # fmt: skip
