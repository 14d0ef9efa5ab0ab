"""The deterministic way to dQ on sm_90: a thread block owns 128 query rows, two warpgroups own 64 of them each.

Together with the fused kernel run without dQ (``C.dq = False``) this is the split backward: seven products instead of
five, no atomics, every value of every gradient has one owner, and results are bitwise equal from run to run.

    S = Q K^T    P = exp(S - LSE)    dP = dO V^T    dS = P * (dP - delta)    dQ += dS K

dS goes straight from registers into its product with K, which runs one key block late, beside the next block's S and dP::

    producer warp                      shared memory                  consumer warpgroup w (rows 64 w .. 64 w + 63)
    -------------                      -------------                  ---------------------------------------------
    load Q, dO (once) ---------------> q[w], do[w]      ------------> wait q_full
    wait k_empty[s], load K_j -------> k[k_stages]      ------------> wait k_full[s]; issue S_j = Q K_j^T
    wait v_empty[s], load V_j -------> v[v_stages]      ------------> wait v_full[s]; issue dP_j = dO V_j^T
                                                                      issue dQ += dS K of the block before
                          v_empty[s] <-- dP_j is in registers ------- exp2 of S_j; wait for dP_j; dS_j
                          k_empty    <-- dQ is in registers --------- (of the block before)
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

from ..schedule import dense_tile, packed_tile, span_of
from .backward import CLEARED, HALF, store_rows
from .backward_ends import is_gentle
from .backward_walk import first_block, ring
from .common import (
    ANY,
    OR_ZERO,
    biased_lse,
    biased_scores,
    in_16_bits,
    left_operand,
    named_barrier_wait,
    select,
    tma_load,
)
from .forward import barriers, clear_rows, key_blocks

# A predicated no-op that reads every P. Without it ptxas sinks all exp2 below the wait for dP, where they overlap with
# nothing. P >= 0, so the OR of the words never has its sign bit set. 32 values a call; $0-$7 are results nobody reads.
_OR = "".join(f"mov.b32 u, ${9 + i};\nor.b32 t, t, u;\n" for i in range(31))
_NO_OP = "setp.lt.s32 q, t, 0;\n@q nanosleep.u32 1;\n" + "".join(f"mov.u32 ${i}, 0;\n" for i in range(8))
PIN = gl.constexpr("{\n.reg .pred q;\n.reg .b32 t, u;\nmov.b32 t, $8;\n" + _OR + _NO_OP + "}")
PIN_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + ["f"] * 32))


class Tiles(NamedTuple):
    """Shared memory."""

    q: Any
    do: Any
    k: Any
    v: Any


class Bars(NamedTuple):
    """mbarriers; see the diagram above."""

    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Sizes(NamedTuple):
    """Run-time sizes that every partition needs; ``heads`` counts query heads."""

    heads: Any
    heads_per_key: Any
    Nq: Any
    Nk: Any
    blocks: Any
    batch_heads: Any
    head_group: Any
    q_blocks: Any


@gluon.jit
def locate(sizes, CU_Q, CU_K, USED_K, C: gl.constexpr):
    """Which query rows this thread block owns, and their sequence."""
    pid = gl.program_id(0)
    if C.packed:
        h, z, start_m = packed_tile(
            pid, sizes.blocks, sizes.heads, sizes.head_group, sizes.batch_heads, CU_Q, C.block_m, True
        )
    else:
        zh, start_m = dense_tile(pid, sizes.blocks, sizes.batch_heads, sizes.head_group, C.block_m, True)
        z = zh // sizes.heads
        h = zh % sizes.heads
    q_row0, Nq, _used = span_of(CU_Q, None, z, sizes.Nq)
    k_row0, _rows, Nk = span_of(CU_K, USED_K, z, sizes.Nk)
    return z, h, start_m, q_row0, k_row0, Nq, Nk


@gluon.jit
def load_block(desc, z, h, row, count, full, empty, tile, STAGES: gl.constexpr, C: gl.constexpr):
    stage, phase = ring(count, STAGES)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), C.block_n * C.d * 2)
    tma_load(desc, [z, h, row, 0], full.index(stage), tile.index(stage))


@gluon.jit
def producer(
    q_desc, do_desc, k_desc, v_desc, CU_Q, CU_K, USED_K, sizes, variant, args, tiles, bars, C: gl.constexpr
):  # fmt: skip
    """Loads Q and dO once and streams K and V, the last block first."""
    z, h, start_m, q_row0, k_row0, Nq, Nk = locate(sizes, CU_Q, CU_K, USED_K, C)
    first, _lo, _hi, last = key_blocks(start_m, C.block_m, Nq, Nk, variant, args, C)
    zb = 0 if C.packed else z  # packed tensors have no batch axis
    hk = h // sizes.heads_per_key
    mbarrier.expect(bars.q_full.index(0), 4 * HALF * C.d * 2)
    for w in gl.static_range(2):
        row = q_row0 + start_m + w * HALF
        tma_load(q_desc, [zb, h, row, 0], bars.q_full.index(0), tiles.q.index(w))
        tma_load(do_desc, [zb, h, row, 0], bars.q_full.index(0), tiles.do.index(w))
    count = 0
    for block in range(last - 1, first - 1, -1):
        row = k_row0 + block * C.block_n
        load_block(k_desc, zb, hk, row, count, bars.k_full, bars.k_empty, tiles.k, C.k_stages, C)
        load_block(v_desc, zb, hk, row, count, bars.v_full, bars.v_empty, tiles.v, C.v_stages, C)
        count += 1


# ------------------------------------------------------------------------------------------------------------- step
@gluon.jit
def issue_scores(count, tiles, bars, WG: gl.constexpr, S_LAYOUT: gl.constexpr, C: gl.constexpr):
    """Issue S = Q K^T and dP = dO V^T [64, BLOCK_N] of the count-th key block."""
    k_stage, k_phase = ring(count, C.k_stages)
    v_stage, v_phase = ring(count, C.v_stages)
    blank = gl.zeros([HALF, C.block_n], gl.float32, S_LAYOUT)
    k = tiles.k.index(k_stage).reshape([C.block_n, C.d])
    v = tiles.v.index(v_stage).reshape([C.block_n, C.d])
    mbarrier.wait(bars.k_full.index(k_stage), k_phase)
    s = warpgroup_mma(tiles.q.index(WG).reshape([HALF, C.d]), k.permute((1, 0)), blank, use_acc=False, is_async=True)
    mbarrier.wait(bars.v_full.index(v_stage), v_phase)
    dp = warpgroup_mma(tiles.do.index(WG).reshape([HALF, C.d]), v.permute((1, 0)), blank, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def ds_of(
    s, dp, count, block, row0, lse_log2, delta, slope, Nq, Nk, unit_log2, variant, args, tiles, bars, BEHIND: gl.constexpr,
    MASK: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """dS [64, BLOCK_N] in 16 bits, dQ's left operand; ``BEHIND`` products may stay in flight behind S and dP."""
    k_stage, k_phase = ring(count, C.k_stages)
    v_stage, _phase = ring(count, C.v_stages)
    s = warpgroup_mma_wait(1 + BEHIND, deps=(s,))
    i = (row0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_LAYOUT)))[:, None]
    j = (block * C.block_n + gl.arange(0, C.block_n, layout=gl.SliceLayout(0, S_LAYOUT)))[None, :]
    raw = variant.score(s, args.score)
    block_m = row0 // C.block_stat * C.block_stat
    start_n = block * C.block_n
    lse_log2 = biased_lse(lse_log2[:, None], i, j, block_m, start_n, slope, Nq, Nk, unit_log2, variant, 1, MASK, C)
    p = gl.exp2(biased_scores(raw, i, j, start_n, slope, Nq, Nk, variant, 1, MASK, C) * unit_log2 - lse_log2)
    if MASK:
        a, b, width = variant.place(i, j, Nq, Nk, args.mask)
        p = select(p, a, b, width, OR_ZERO)
        if C.past_end:
            p = select(p, Nk - 1, j, ANY, OR_ZERO)
    factor = variant.score_grad(p, raw, args.score)  # linear in its first argument: applied here, no raw score stays alive
    gl.inline_asm_elementwise(PIN, PIN_OPERANDS, [p], dtype=gl.int8, is_pure=False, pack=32)
    mbarrier.wait(bars.k_full.index(k_stage), k_phase)  # known to be satisfied: a branch that keeps the wait below exp2
    dp = warpgroup_mma_wait(BEHIND, deps=(dp,))
    mbarrier.arrive(bars.v_empty.index(v_stage), count=1)
    ds = factor * (dp - delta[:, None])
    if MASK and (C.packed or C.used):
        ds = select(ds, Nk - 1, j, ANY, OR_ZERO)  # V of a foreign key may be NaN
    return in_16_bits(ds, tiles.k.dtype, P_LAYOUT, C.words)


@gluon.jit
def step(
    dq, ds, count, block, row0, lse_log2, delta, slope, Nq, Nk, unit_log2, variant, args, tiles, bars, WG: gl.constexpr,
    MASK: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One key block: its dS, under the previous block's product with K."""
    before, _phase = ring(count - 1, C.k_stages)
    s, dp = issue_scores(count, tiles, bars, WG, S_LAYOUT, C)
    ds = left_operand(ds, tiles.k.dtype, P_LAYOUT, C.words)
    dq = warpgroup_mma(ds, tiles.k.index(before).reshape([C.block_n, C.d]), dq, is_async=True)
    ds = ds_of(s, dp, count, block, row0, lse_log2, delta, slope, Nq, Nk, unit_log2, variant, args, tiles, bars, 1, MASK,
               S_LAYOUT, P_LAYOUT, C)  # fmt: skip
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(bars.k_empty.index(before), count=1)
    return dq, ds


@gluon.jit
def consumer(
    dq_desc, DQ, stride_dq, LSE_LOG2, DELTA, CU_Q, CU_K, USED_K, unit_log2, softmax_scale, sizes, variant, args, tiles,
    bars, WG: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Warpgroup WG: rows start_m + 64 WG and the 63 that follow."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_n, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.d, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DQ_LAYOUT, 2)
    z, h, start_m, q_row0, k_row0, Nq, Nk = locate(sizes, CU_Q, CU_K, USED_K, C)
    first, free_lo, free_hi, last = key_blocks(start_m, C.block_m, Nq, Nk, variant, args, C)
    row0 = start_m + WG * HALF
    row = row0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_LAYOUT))
    # statistics come in blocks of block_stat rows, numbered as the dK, dV kernel numbers them; a padded row reads +inf
    at = first_block(z, h, q_row0, sizes.heads, sizes.q_blocks, C.block_stat, C.packed).to(gl.int64) * C.block_stat + row
    lse_log2 = gl.load(LSE_LOG2 + at, mask=row < Nq, other=float("inf"))
    delta = gl.load(DELTA + at, mask=row < Nq, other=0.0)
    slope = variant.slope(z, h, args.alibi)
    dq = gl.zeros([HALF, C.d], gl.float32, DQ_LAYOUT)
    mbarrier.wait(bars.q_full.index(0), 0)
    s, dp = issue_scores(0, tiles, bars, WG, S_LAYOUT, C)
    ds = ds_of(s, dp, 0, last - 1, row0, lse_log2, delta, slope, Nq, Nk, unit_log2, variant, args, tiles, bars, 0,
               C.mask_last, S_LAYOUT, P_LAYOUT, C)  # fmt: skip
    if C.packed or C.used:  # dS is zero for keys past the end, but 0 * NaN is NaN
        valid = Nk - (last - 1) * C.block_n
        if valid < C.block_n:
            named_barrier_wait(CLEARED, 128, 256)  # both warpgroups have taken S from these rows
            if WG == 0:
                clear_rows(tiles.k.index(0).reshape([C.block_n, C.d]), valid, C.block_n, C.d)
                fence_async_shared()
            named_barrier_wait(CLEARED, 128, 256)
    count = 1
    if C.linear_bias:
        gentle = is_gentle(slope, unit_log2)
        free_lo = gl.where(gentle, free_lo, first)
        free_hi = gl.where(gentle, free_hi, first)
    if C.right_edge:
        for block in range(last - 2, gl.maximum(free_hi, first) - 1, -1):
            dq, ds = step(dq, ds, count, block, row0, lse_log2, delta, slope, Nq, Nk, unit_log2, variant, args, tiles, bars,
                          WG, True, S_LAYOUT, P_LAYOUT, C)  # fmt: skip
            count += 1
    for block in range(gl.minimum(last - 1, free_hi) - 1, gl.maximum(free_lo, first) - 1, -1):
        dq, ds = step(dq, ds, count, block, row0, lse_log2, delta, slope, Nq, Nk, unit_log2, variant, args, tiles, bars, WG,
                      False, S_LAYOUT, P_LAYOUT, C)  # fmt: skip
        count += 1
    if C.left_edge:
        for block in range(gl.minimum(last - 1, free_lo) - 1, first - 1, -1):
            dq, ds = step(dq, ds, count, block, row0, lse_log2, delta, slope, Nq, Nk, unit_log2, variant, args, tiles, bars,
                          WG, True, S_LAYOUT, P_LAYOUT, C)  # fmt: skip
            count += 1
    before, _phase = ring(count - 1, C.k_stages)
    ds = left_operand(ds, tiles.k.dtype, P_LAYOUT, C.words)
    dq = warpgroup_mma(ds, tiles.k.index(before).reshape([C.block_n, C.d]), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,)) * softmax_scale
    store_rows(dq, tiles.q.index(WG), dq_desc, DQ, stride_dq, 0 if C.packed else z, h, row0, q_row0, Nq, C.head_dim, 0, C.d, C)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["Nq", "Nk", "blocks", "batch_heads", "head_group", "heads", "heads_per_key", "q_blocks"],
    do_not_specialize_on_alignment=["LSE_LOG2", "DELTA", "CU_Q", "CU_K", "USED_K"],
)
def attn_bwd_dq_hopper(
    q_desc, do_desc, k_desc, v_desc, dq_desc, DQ, stride_dq, LSE_LOG2, DELTA, CU_Q, CU_K, USED_K, variant, args, unit_log2,
    softmax_scale, heads, heads_per_key, Nq, Nk, blocks, batch_heads, head_group, q_blocks, C: gl.constexpr,
):  # fmt: skip
    """Grid: one thread block per 128 query rows of a head. ``C`` is a :class:`.DqConfig`."""
    dtype: gl.constexpr = q_desc.dtype
    tiles = Tiles(
        gl.allocate_shared_memory(dtype, [2, 1, 1, HALF, C.d], q_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, HALF, C.d], do_desc.layout),
        gl.allocate_shared_memory(dtype, [C.k_stages, 1, 1, C.block_n, C.d], k_desc.layout),
        gl.allocate_shared_memory(dtype, [C.v_stages, 1, 1, C.block_n, C.d], v_desc.layout),
    )
    bars = Bars(
        barriers(1, 1),
        barriers(C.k_stages, 1),
        barriers(C.k_stages, 2),
        barriers(C.v_stages, 1),
        barriers(C.v_stages, 2),
    )
    fence_async_shared()
    sizes = Sizes(heads, heads_per_key, Nq, Nk, blocks, batch_heads, head_group, q_blocks)
    gl.warp_specialize([
        (consumer, (dq_desc, DQ, stride_dq, LSE_LOG2, DELTA, CU_Q, CU_K, USED_K, unit_log2, softmax_scale, sizes, variant,
                    args, tiles, bars, 0, C)),
        (consumer, (dq_desc, DQ, stride_dq, LSE_LOG2, DELTA, CU_Q, CU_K, USED_K, unit_log2, softmax_scale, sizes, variant,
                    args, tiles, bars, 1, C)),
        (producer, (q_desc, do_desc, k_desc, v_desc, CU_Q, CU_K, USED_K, sizes, variant, args, tiles, bars, C)),
    ], [4, 1], [C.consumer_regs, C.producer_regs])  # fmt: skip
