"""Forward: one program per tile of queries, keys streamed past it, one division at the end (FlashAttention-2, section 3.1).

For each query tile the running maximum m, the running sum l and the unnormalised output acc stay in registers while the
loop walks over the keys. The score tile s and the probabilities p exist only inside one iteration. What is written at the
end is O and one log-sum-exp per row.
"""

from __future__ import annotations

from .._jit import jit, tl
from ..variants.attn_mask import any_visible, visible
from .schedule import block_bounds, dense_tile, packed_tile, span_of
from .softmax import LN2, LOG2E, finalize, online_softmax_step
from .tiles import head_base, load_rows, store_rows


@jit
def masked_scores(
    s, z, h, i, j, Nq, Nk, variant, args, mask, EDGE, RAGGED: tl.constexpr, HAS_MASK: tl.constexpr
):
    """Add the biases, hide what the mask hides: s [BLOCK_M, BLOCK_N] with -inf where the key is not visible.

    EDGE: the tile needs the positional mask; the compiler need not know. RAGGED: it may reach past Nk, where a bias has no
    entries to read.
    """
    s = variant.alibi(s, variant.slope(z, h, args.alibi), i, j, Nq, Nk)
    s = variant.bias(s, z, h, i, j, Nq, Nk, args.bias, RAGGED)
    if EDGE:
        s = tl.where(variant.keep(i, j, Nq, Nk, args.mask) & (j < Nk), s, float("-inf"))
    if HAS_MASK:
        s = tl.where(visible(z, h, i, j, Nq, Nk, mask, RAGGED), s, float("-inf"))
    return s


# --8<-- [start:fwd-kernel]
@jit(do_not_specialize=["Nq", "Nk", "blocks", "batch_heads", "head_group"])
def attn_fwd_kernel(
    Q, K, V, O, LSE, ROW_MAX, SINK, stride_q, stride_k, stride_v, stride_o, stride_lse, CU_Q, CU_K, USED_K,
    variant, args, mask, unit_log2, heads, group, Nq, Nk, blocks, batch_heads, head_group,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT_EDGE: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    # which tile am I: batch z, query head h, rows start_m .. start_m + BLOCK_M of that sequence
    if CU_Q is None:
        zh, start_m = dense_tile(tl.program_id(0), blocks, batch_heads, head_group, BLOCK_M, True)
        z, h = zh // heads, zh % heads
    else:
        h, z, start_m = packed_tile(tl.program_id(0), blocks, heads, head_group, batch_heads, CU_Q, BLOCK_M, True)
    q_row0, Nq, q_used = span_of(CU_Q, None, z, Nq)
    k_row0, k_rows, Nk = span_of(CU_K, USED_K, z, Nk)
    if start_m >= Nq:
        return
    zb = z if CU_Q is None else z * 0  # packed tensors have no batch axis
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q_base = head_base(Q, stride_q, zb, h, q_row0)
    k_base = head_base(K, stride_k, zb, h // group, k_row0)
    v_base = head_base(V, stride_v, zb, h // group, k_row0)

    # what stays: the queries and the state of the online softmax
    q = load_rows(q_base, stride_q, start_m, Nq, HEAD_DIM, BLOCK_M, BLOCK_D, True)  # [BLOCK_M, BLOCK_D]
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if SINK is not None:
        sink = tl.load(SINK + h).to(tl.float32)
        m_i = tl.zeros([BLOCK_M], tl.float32) + sink * (LOG2E / unit_log2)
        l_i += tl.where(sink != sink, float("nan"), 1.0)  # a maximum drops NaN, the sum keeps it

    # the loop over keys, in three spans: an edge that needs the mask, the free middle, the other edge
    lo, full_lo, full_hi, hi = variant.kv_range(start_m, tl.minimum(start_m + BLOCK_M, Nq), Nq, Nk, args.mask)
    lo, full_lo, full_hi, hi = block_bounds(lo, full_lo, full_hi, hi, BLOCK_N)
    for span in tl.static_range(0 if LEFT_EDGE else 1, 3):
        first = lo if span == 0 else (full_lo if span == 1 else full_hi)
        last = full_lo if span == 0 else (full_hi if span == 1 else hi)
        for start_n in range(first, last, BLOCK_N):
            if not HAS_MASK or any_visible(z, h, start_m, start_n, mask):
                # said to be aligned: only then is a bias or mask read 16 bytes at a time
                offs_n = tl.multiple_of(start_n + tl.arange(0, BLOCK_N), BLOCK_N)
                k = load_rows(k_base, stride_k, start_n, Nk, HEAD_DIM, BLOCK_N, BLOCK_D, span != 1)  # [BLOCK_N, BLOCK_D]
                s = variant.score(tl.dot(q, tl.trans(k)), args.score)  # [BLOCK_M, BLOCK_N]
                i, j = offs_m[:, None], offs_n[None, :]
                s = masked_scores(s, z, h, i, j, Nq, Nk, variant, args, mask, span != 1, span != 1, HAS_MASK)
                acc, m_i, l_i, p = online_softmax_step(acc, m_i, l_i, s, unit_log2)
                p = variant.drop(p, z, h, start_m, start_n, args.drop)
                v = load_rows(v_base, stride_v, start_n, Nk, HEAD_DIM_V, BLOCK_N, BLOCK_DV, span != 1)  # [BLOCK_N, BLOCK_DV]
                acc = tl.dot(p.to(v.dtype), v, acc)

    # once, after the loop
    o, lse = finalize(variant.rescale(acc, args.drop), m_i, l_i, unit_log2)
    store_rows(head_base(O, stride_o, zb, h, q_row0), stride_o, start_m, Nq, o, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
    rows = zb.to(tl.int64) * stride_lse[0] + h.to(tl.int64) * stride_lse[1] + q_row0 + offs_m
    tl.store(LSE + rows, lse, mask=offs_m < Nq)
    if ROW_MAX is not None:
        m = tl.where(l_i == l_i, m_i * (unit_log2 * LN2), float("nan"))  # a maximum drops NaN, the sum keeps it
        tl.store(ROW_MAX + rows, m, mask=offs_m < Nq)


# --8<-- [end:fwd-kernel]
