"""Backward: a pre-pass for delta, then two kernels that each own what they write (FlashAttention-2, section 3.2).

Both rebuild P from the saved log-sum-exp. One owns a tile of keys and loops over queries (dK, dV), the other owns a tile
of queries and loops over keys (dQ). That is seven matrix products per tile where a fused kernel needs five; in return no
program ever adds to memory that another one writes: no atomics, and bitwise equal results run to run.

    P = exp(S - LSE)    dP = dO V^T    dS = P * (dP - delta)    dV = P^T dO    dK = dS^T Q    dQ = dS K
"""

from __future__ import annotations

from .._jit import jit, tl
from ..variants.attn_bias import in_memory, load_tile, tile_pointers
from ..variants.attn_mask import any_visible
from .forward import masked_scores
from .schedule import block_bounds, dense_tile, packed_tile, span_of
from .softmax import p_from_lse, pivot_of
from .tiles import head_base, load_rows, store_rows


# --8<-- [start:bwd-delta]
@jit(do_not_specialize=["rows"])
def attn_bwd_delta_kernel(
    O, DO, DLSE, DELTA, stride_o, stride_do, stride_dlse, heads, rows,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) - dLSE, fp32, one per query row: what every dS of that row subtracts."""
    blocks = (rows + BLOCK_M - 1) // BLOCK_M
    zh = tl.program_id(0) // blocks
    z, h = zh // heads, zh % heads
    start_m = tl.program_id(0) % blocks * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    o = load_rows(head_base(O, stride_o, z, h, z * 0), stride_o, start_m, rows, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True)
    do = load_rows(head_base(DO, stride_do, z, h, z * 0), stride_do, start_m, rows, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [BLOCK_M]
    if DLSE is not None:
        dlse = DLSE + z.to(tl.int64) * stride_dlse[0] + h.to(tl.int64) * stride_dlse[1]
        delta -= tl.load(dlse + offs_m.to(tl.int64) * stride_dlse[2], mask=offs_m < rows, other=0.0)
    tl.store(DELTA + zh.to(tl.int64) * rows + offs_m, delta, mask=offs_m < rows)


# --8<-- [end:bwd-delta]


@jit
def p_and_ds(
    s_dot, dp_dot, lse_log2, delta, z, h, start_m, start_n, i, j, Nq, Nk, variant, args, mask, unit_log2, EDGE,
    RAGGED: tl.constexpr, HAS_MASK: tl.constexpr, SPARE: tl.constexpr = False,
):  # fmt: skip
    """From the products QK^T and dO V^T to (p for dV, dS, dqk), tile by tile, before ``rescale`` and softmax_scale.

    All tiles are [BLOCK_M, BLOCK_N]; lse and delta are columns.
    """
    raw = variant.score(s_dot, args.score)
    s = masked_scores(raw, z, h, i, j, Nq, Nk, variant, args, mask, EDGE, RAGGED, HAS_MASK)
    p = p_from_lse(s, lse_log2, unit_log2)
    kept = variant.drop(p, z, h, start_m, start_n, args.drop, SPARE)
    ds = variant.drop_grad(p, kept, dp_dot, delta, args.drop)
    return kept, ds, variant.score_grad(ds, raw, args.score)


# --8<-- [start:bwd-dkdv]
# (group is not specialised: where it is known to be 1, the ptxas of Triton 3.6 serialises the wgmma of sm_90)
@jit(do_not_specialize=["Nq", "Nk", "blocks", "batch_heads", "head_group", "group"])
def attn_bwd_dkdv_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV, stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv, stride_lse,
    CU_Q, CU_K, USED_K, variant, args, mask, unit_log2, softmax_scale, heads, group, Nq, Nk, blocks, batch_heads,
    head_group, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT_EDGE: tl.constexpr, RIGHT_EDGE: tl.constexpr,
    ONE_LOOP: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """``group`` None: one query head per key head. ONE_LOOP: a step asks whether it is in the only edge, on the left."""
    # which tile am I: batch z, key head hk, keys start_n .. start_n + BLOCK_N; ``heads`` counts key heads here
    if CU_K is None:
        zh, start_n = dense_tile(tl.program_id(0), blocks, batch_heads, head_group, BLOCK_N, False)
        z, hk = zh // heads, zh % heads
    else:
        hk, z, start_n = packed_tile(tl.program_id(0), blocks, heads, head_group, batch_heads, CU_K, BLOCK_N, False)
    q_row0, Nq, q_used = span_of(CU_Q, None, z, Nq)
    k_row0, k_rows, Nk = span_of(CU_K, USED_K, z, Nk)
    if start_n >= k_rows:
        return
    zb = z if CU_K is None else z * 0
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(head_base(K, stride_k, zb, hk, k_row0), stride_k, start_n, Nk, HEAD_DIM, BLOCK_N, BLOCK_D, True)
    v = load_rows(head_base(V, stride_v, zb, hk, k_row0), stride_v, start_n, Nk, HEAD_DIM_V, BLOCK_N, BLOCK_DV, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    lo, full_lo, full_hi, hi = variant.q_range(start_n, tl.minimum(start_n + BLOCK_N, Nk), Nq, Nk, args.mask)
    hi = tl.where(start_n < Nk, hi, 0)  # a tile of unused keys has no queries: its gradients are written as zeros
    # (rows past Nq need no mask on scores: their LSE reads as +inf, so their P is 0)
    SPARE: tl.constexpr = len(args.drop) > 0 and BLOCK_D + BLOCK_DV == 256  # with dropout, D = 128 is short of registers
    lo, full_lo, full_hi, hi = block_bounds(lo, full_lo, full_hi, hi, BLOCK_M)
    for g in range(0, 1 if group is None else group):  # every query head that reads this key head adds to dK and dV
        h = hk if group is None else hk * group + g
        q_base = head_base(Q, stride_q, zb, h, q_row0)
        do_base = head_base(DO, stride_do, zb, h, q_row0)
        row_base = zb.to(tl.int64) * stride_lse[0] + h.to(tl.int64) * stride_lse[1] + q_row0
        for span in tl.static_range(0 if LEFT_EDGE else 1, 3 if RIGHT_EDGE else 1 if ONE_LOOP else 2):
            first = lo if span == 0 else (full_lo if span == 1 else full_hi)
            last = hi if ONE_LOOP else full_lo if span == 0 else (full_hi if (span == 1 and RIGHT_EDGE) else hi)
            for start_m in range(first, last, BLOCK_M):
                if not HAS_MASK or any_visible(z, h, start_m, start_n, mask):
                    offs_m = start_m + tl.arange(0, BLOCK_M)
                    if SPARE:  # dO and dP first: ptxas spills less
                        do = load_rows(do_base, stride_do, start_m, Nq, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True)
                        q = load_rows(q_base, stride_q, start_m, Nq, HEAD_DIM, BLOCK_M, BLOCK_D, True)
                    else:
                        q = load_rows(q_base, stride_q, start_m, Nq, HEAD_DIM, BLOCK_M, BLOCK_D, True)
                        do = load_rows(do_base, stride_do, start_m, Nq, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True)
                    lse = tl.load(LSE + row_base + offs_m, mask=offs_m < Nq, other=float("inf"))
                    delta = tl.load(DELTA + row_base + offs_m, mask=offs_m < Nq, other=0.0)
                    if SPARE:
                        dp = tl.dot(do, tl.trans(v))
                        s = tl.dot(q, tl.trans(k))
                    else:
                        s = tl.dot(q, tl.trans(k))
                        dp = tl.dot(do, tl.trans(v))
                    p, ds, dqk = p_and_ds(
                        s, dp, pivot_of(lse)[:, None], delta[:, None],
                        z, h, start_m, start_n, offs_m[:, None], offs_n[None, :], Nq, Nk,
                        variant, args, mask, unit_log2, start_m < full_lo if ONE_LOOP else span != 1, True, HAS_MASK, SPARE,
                    )  # fmt: skip
                    dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv)
                    dk = tl.dot(tl.trans(dqk.to(q.dtype)), q, dk)

    used = (offs_n < Nk)[:, None]  # keys past seqused_k are in memory but in nobody's softmax
    dk = tl.where(used, variant.rescale(dk, args.drop) * softmax_scale, 0.0)
    dv = tl.where(used, variant.rescale(dv, args.drop), 0.0)
    store_rows(head_base(DK, stride_dk, zb, hk, k_row0), stride_dk, start_n, k_rows, dk, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_rows(head_base(DV, stride_dv, zb, hk, k_row0), stride_dv, start_n, k_rows, dv, HEAD_DIM_V, BLOCK_N, BLOCK_DV)


# --8<-- [end:bwd-dkdv]


# --8<-- [start:bwd-dq]
@jit(do_not_specialize=["Nq", "Nk", "blocks", "batch_heads", "head_group"])
def attn_bwd_dq_kernel(
    Q, K, V, DO, LSE, DELTA, DQ, dbias, stride_q, stride_k, stride_v, stride_do, stride_dq, stride_lse,
    CU_Q, CU_K, USED_K, variant, args, mask, unit_log2, softmax_scale, heads, group, Nq, Nk, blocks, batch_heads,
    head_group, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT_EDGE: tl.constexpr, SHARE: tl.constexpr,
    WITH_DBIAS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """dQ, and dBias (given as ``attn_bias.pointer_args``) where its tiles belong to this program's SHARE batch entries."""
    if CU_Q is None:
        zh, start_m = dense_tile(tl.program_id(0), blocks, batch_heads, head_group, BLOCK_M, True)
        z, h = zh // heads * SHARE, zh % heads
    else:
        h, z, start_m = packed_tile(tl.program_id(0), blocks, heads, head_group, batch_heads, CU_Q, BLOCK_M, True)
    q_row0, Nq, q_used = span_of(CU_Q, None, z, Nq)
    if start_m >= Nq:
        return
    offs_m = start_m + tl.arange(0, BLOCK_M)
    for part in tl.static_range(SHARE):
        zi = z + part
        zb = zi if CU_Q is None else zi * 0
        k_row0, k_rows, nk = span_of(CU_K, USED_K, zi, Nk)
        q = load_rows(head_base(Q, stride_q, zb, h, q_row0), stride_q, start_m, Nq, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        do = load_rows(head_base(DO, stride_do, zb, h, q_row0), stride_do, start_m, Nq, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True)
        rows = zb.to(tl.int64) * stride_lse[0] + h.to(tl.int64) * stride_lse[1] + q_row0 + offs_m
        lse_log2 = pivot_of(tl.load(LSE + rows, mask=offs_m < Nq, other=float("inf")))
        delta = tl.load(DELTA + rows, mask=offs_m < Nq, other=0.0)
        k_base = head_base(K, stride_k, zb, h // group, k_row0)
        v_base = head_base(V, stride_v, zb, h // group, k_row0)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

        lo, full_lo, full_hi, hi = variant.kv_range(start_m, tl.minimum(start_m + BLOCK_M, Nq), Nq, nk, args.mask)
        lo, full_lo, full_hi, hi = block_bounds(lo, full_lo, full_hi, hi, BLOCK_N)
        for span in tl.static_range(0 if LEFT_EDGE else 1, 3):
            first = lo if span == 0 else (full_lo if span == 1 else full_hi)
            last = full_lo if span == 0 else (full_hi if span == 1 else hi)
            for start_n in range(first, last, BLOCK_N):
                if not HAS_MASK or any_visible(zi, h, start_m, start_n, mask):
                    # said to be aligned: only then is a bias or mask read 16 bytes at a time
                    offs_n = tl.multiple_of(start_n + tl.arange(0, BLOCK_N), BLOCK_N)
                    i, j = offs_m[:, None], offs_n[None, :]
                    if part > 0:  # what the batch entries before this one gave, asked for before the products
                        before = load_tile(z // SHARE, h, i, j, Nq, dbias, span != 1)
                    k = load_rows(k_base, stride_k, start_n, nk, HEAD_DIM, BLOCK_N, BLOCK_D, span != 1)
                    v = load_rows(v_base, stride_v, start_n, nk, HEAD_DIM_V, BLOCK_N, BLOCK_DV, span != 1)
                    p, ds, dqk = p_and_ds(
                        tl.dot(q, tl.trans(k)), tl.dot(do, tl.trans(v)), lse_log2[:, None], delta[:, None],
                        zi, h, start_m, start_n, i, j, Nq, nk,
                        variant, args, mask, unit_log2, span != 1, span != 1, HAS_MASK,
                    )  # fmt: skip
                    dq = tl.dot(dqk.to(k.dtype), k, dq)
                    ds = variant.rescale(ds, args.drop)
                    if part > 0:
                        ds += before.to(tl.float32)
                    if WITH_DBIAS:
                        store_dbias(dbias, ds, z // SHARE, h, i, j, Nq, nk, span != 1)
        dq = variant.rescale(dq, args.drop) * softmax_scale
        store_rows(head_base(DQ, stride_dq, zb, h, q_row0), stride_dq, start_m, Nq, dq, HEAD_DIM, BLOCK_M, BLOCK_D)
        if SHARE > 1:
            tl.debug_barrier()  # what this program's threads stored of dBias is there before any of them adds to it


@jit
def store_dbias(dbias, ds, z, h, i, j, Nq, Nk, EDGE: tl.constexpr):
    """Write a tile of dBias; EDGE as in ``attn_bias.in_memory``, keys past ``Nk`` (seqused_k) get 0."""
    if EDGE:
        ds = tl.where(j < Nk, ds, 0.0)
    ptrs = tile_pointers(z, h, i, j, dbias)
    there = in_memory(i, j, Nq, dbias, EDGE)
    if dbias[7] is None:  # the only key, whose entry is the address of every column
        there = there & (j == 0)
    tl.store(ptrs, ds.to(dbias[0].dtype.element_ty), mask=there)


# --8<-- [end:bwd-dq]


@jit(do_not_specialize=["Nq", "Nk", "sum_z", "sum_h", "blocks_m", "blocks_n"])
def attn_bwd_dbias_kernel(
    Q, K, V, DO, LSE, DELTA, DBIAS, stride_q, stride_k, stride_v, stride_do, stride_lse, stride_db,
    CU_Q, CU_K, USED_K, variant, args, mask, unit_log2, group, Nq, Nk, bias_heads, sum_z, sum_h, blocks_m, blocks_n,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUM_M: tl.constexpr, SUM_N: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """dBias = dS summed over the axes along which the bias was broadcast, in a fixed order, one program per output tile.

    ``sum_z`` and ``sum_h`` count the batches and heads that share this entry (1 where the bias has its own); SUM_M and
    SUM_N say that the bias has one row, or one column, for all.
    """
    tiles_m = 1 if SUM_M else blocks_m
    tiles_n = 1 if SUM_N else blocks_n
    pid = tl.program_id(0)
    tile_n = pid % tiles_n
    tile_m = pid // tiles_n % tiles_m
    bzh = pid // (tiles_n * tiles_m)
    bz, bh = bzh // bias_heads, bzh % bias_heads
    db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for dz in range(0, sum_z):
        for dh in range(0, sum_h):
            z, h = bz + dz, bh + dh
            zb = z if CU_Q is None else z * 0
            q_row0, nq, q_used = span_of(CU_Q, None, z, Nq)
            k_row0, k_rows, nk = span_of(CU_K, USED_K, z, Nk)
            q_base = head_base(Q, stride_q, zb, h, q_row0)
            do_base = head_base(DO, stride_do, zb, h, q_row0)
            k_base = head_base(K, stride_k, zb, h // group, k_row0)
            v_base = head_base(V, stride_v, zb, h // group, k_row0)
            row_base = zb.to(tl.int64) * stride_lse[0] + h.to(tl.int64) * stride_lse[1] + q_row0
            for block_m in range(tile_m, blocks_m if SUM_M else tile_m + 1):
                start_m = block_m * BLOCK_M
                lo, full_lo, full_hi, hi = variant.kv_range(start_m, tl.minimum(start_m + BLOCK_M, nq), nq, nk, args.mask)
                hi = tl.where(start_m < nq, hi, 0)
                first = tl.maximum(tile_n * BLOCK_N, lo // BLOCK_N * BLOCK_N)
                last = hi if SUM_N else tl.minimum(hi, (tile_n + 1) * BLOCK_N)
                for start_n in range(first, last, BLOCK_N):
                    if not HAS_MASK or any_visible(z, h, start_m, start_n, mask):
                        offs_m = start_m + tl.arange(0, BLOCK_M)
                        offs_n = start_n + tl.arange(0, BLOCK_N)
                        q = load_rows(q_base, stride_q, start_m, nq, HEAD_DIM, BLOCK_M, BLOCK_D, True)
                        do = load_rows(do_base, stride_do, start_m, nq, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True)
                        k = load_rows(k_base, stride_k, start_n, nk, HEAD_DIM, BLOCK_N, BLOCK_D, True)
                        v = load_rows(v_base, stride_v, start_n, nk, HEAD_DIM_V, BLOCK_N, BLOCK_DV, True)
                        lse = tl.load(LSE + row_base + offs_m, mask=offs_m < nq, other=float("inf"))
                        delta = tl.load(DELTA + row_base + offs_m, mask=offs_m < nq, other=0.0)
                        p, ds, dqk = p_and_ds(
                            tl.dot(q, tl.trans(k)), tl.dot(do, tl.trans(v)), pivot_of(lse)[:, None], delta[:, None],
                            z, h, start_m, start_n, offs_m[:, None], offs_n[None, :], nq, nk,
                            variant, args, mask, unit_log2, True, True, HAS_MASK,
                        )  # fmt: skip
                        db += ds
    db = variant.rescale(db, args.drop)
    # the bias's own rows and columns: a broadcast axis was summed inside the tile as well
    base = DBIAS + bz.to(tl.int64) * stride_db[0] + bh.to(tl.int64) * stride_db[1]
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if SUM_M and SUM_N:
        tl.store(base, tl.sum(tl.sum(db, 1), 0).to(DBIAS.dtype.element_ty))
    elif SUM_M:
        tl.store(base + offs_n, tl.sum(db, 0).to(DBIAS.dtype.element_ty), mask=offs_n < Nk)
    elif SUM_N:
        tl.store(base + offs_m, tl.sum(db, 1).to(DBIAS.dtype.element_ty), mask=offs_m < Nq)
    else:
        ptrs = base + offs_m[:, None].to(tl.int64) * stride_db[2] + offs_n[None, :]
        mask_db = (offs_m[:, None] < Nq) & (offs_n[None, :] < Nk)
        tl.store(ptrs, db.to(DBIAS.dtype.element_ty), mask=mask_db)
