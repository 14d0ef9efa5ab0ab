"""What happens before and after the fused backward: delta and a zeroed accumulator, then fp32 -> 16 bits.

Both are plain Triton and bound by memory bandwidth; they leave most of their work to the fused kernel where that can do it
in passing (:mod:`.backward_prepare`, :mod:`.backward_convert`). Rows come in blocks, numbered as the fused kernel numbers them
(:func:`.backward_walk.first_block`). The last are taken first: the fused kernel begins with the first and ends with the last,
and what was touched last is found in L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...variants.alibi import slope as slope_of
from ..schedule import packed_tile, span_of
from ..softmax import pivot_of

GENTLE_LOG2 = tl.constexpr(2.0)  # 127 rows of a block make that less than 2^8, of which fp32 rounds 2^-17 away


@triton.jit
def block_of(number, heads, N, blocks, seqs, CU, BLOCK: tl.constexpr):
    """Block -> batch z of the tensors, sequence, head, first row in the tensor's batch, first row in the sequence, its rows."""
    if CU is None:
        zh = number // blocks
        start = number % blocks * BLOCK
        z, h, row0, rows = zh // heads, zh % heads, start, N
        s = z
    else:
        h, s, start = packed_tile(number, blocks, heads, 1, seqs, CU, BLOCK, False)
        first, rows, _used = span_of(CU, None, s, N)
        z, row0 = s * 0, first + start
    return z, s, h, row0, start, rows


@triton.jit
def heads_inner(number, heads, blocks, CU):
    """The blocks of a packed problem with the heads of a row, which lie side by side in memory, one after another."""
    if CU is not None:
        number = number % heads * blocks + number // heads
    return number


@triton.jit
def head_offset(z, h, stride):
    """Elements before head h of batch z, a multiple of 8 as TMA wants it.

    Triton looks for multiples of 16 by itself, and would move two bytes at a time for the strides that are none: heads of
    72 columns, and the 8 that stands for the stride of an axis of size 1.
    """
    return tl.multiple_of(z.to(tl.int64) * stride[0] + h.to(tl.int64) * stride[1], 8)


@triton.jit
def is_gentle(slope, unit_log2):
    """Whether the LSE of a head's rows carries their part of the bias; see the kernel before the main one.

    A steep slope would drown it. A negative one makes the scores of far keys large, and what forward and backward round
    differently then is lost from the gradients. The tiles of such heads mask every block instead, and add the bias as the
    forward does.
    """
    return (slope * unit_log2 >= 0) & (slope * unit_log2 <= GENTLE_LOG2)


@triton.jit
def keep_statistics(
    LSE, DLSE, LSE_LOG2, DELTA, DELTA_ROWS, ALIBI, unit_log2, stride_lse, stride_dlse, z, seq, h, row, in_block, place, seen,
    inside, products,
):  # fmt: skip
    """LSE * log2(e) and ``products`` - dLSE of rows of the tensors' batch, at ``place`` in the kernels' own memory.

    ``in_block``: a row's number in its block. Places that are not ``inside`` do not exist. z, seq and h are scalars, or there
    is one for each row.
    """
    at = h.to(tl.int64) * stride_lse[1] + z.to(tl.int64) * stride_lse[0] + row
    lse = tl.load(LSE + at, mask=seen, other=float("-inf"))
    delta = products
    if DLSE is not None:
        dlse = DLSE + z.to(tl.int64) * stride_dlse[0] + h.to(tl.int64) * stride_dlse[1]
        delta -= tl.load(dlse + row.to(tl.int64) * stride_dlse[2], mask=seen, other=0.0)
    pivot_log2 = pivot_of(lse)
    if ALIBI is not None:
        slope = slope_of(seq, h, ALIBI)
        pivot_log2 = tl.where(is_gentle(slope, unit_log2), pivot_log2 + slope * unit_log2 * (in_block & -7), pivot_log2)
    tl.store(LSE_LOG2 + place, pivot_log2, mask=inside)
    tl.store(DELTA + place, tl.where(lse == float("-inf"), 0.0, delta), mask=inside)
    if DELTA_ROWS is not None:
        tl.store(DELTA_ROWS + at, delta, mask=seen)


@triton.jit(do_not_specialize=["heads", "Nq", "q_blocks", "seqs", "prepared", "stat_blocks"])
def attn_bwd_before_kernel(
    O, DO, LSE, DLSE, LSE_LOG2, DELTA, DELTA_ROWS, DQ_ACC, SEMAPHORES, COUNTERS, CU_Q, ALIBI, unit_log2, stride_o, stride_do,
    stride_lse, stride_dlse, heads, Nq, q_blocks, seqs, prepared, stat_blocks, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) - dLSE and LSE * log2(e), padded to whole blocks; DQ_ACC = SEMAPHORES = COUNTERS = 0.

    Programs: one per block before ``prepared``, and one for every WIDE blocks of the rest, whose delta is -dLSE only and whose
    DQ_ACC is left alone (:mod:`.backward_prepare`).
    DELTA_ROWS, if given, receives delta once more in LSE's own layout (the sink's gradient wants it). With ALIBI, the arguments
    of the variant's slope, LSE_LOG2 takes a part of the bias from the main kernel (:func:`.common.biased_lse`).
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    if program >= prepared:
        first = prepared + (program - prepared) * WIDE
        offs = tl.arange(0, WIDE * BLOCK_M)
        in_block = offs % BLOCK_M
        block = first + offs // BLOCK_M
        inside = block < stat_blocks
        block = tl.minimum(block, stat_blocks - 1)  # the slope of some head is read for each
        zh = block // q_blocks
        z_of = zh // heads
        row = block % q_blocks * BLOCK_M + in_block
        keep_statistics(
            LSE, DLSE, LSE_LOG2, DELTA, DELTA_ROWS, ALIBI, unit_log2, stride_lse, stride_dlse, z_of, z_of, zh % heads, row,
            in_block, first.to(tl.int64) * BLOCK_M + offs, inside & (row < Nq), inside, tl.zeros([WIDE * BLOCK_M], tl.float32),
        )  # fmt: skip
        if SEMAPHORES is not None:
            tl.store(SEMAPHORES + block, 0.0, mask=inside & (in_block == 0))
        if COUNTERS is not None:
            tl.store(COUNTERS + block, 0.0, mask=inside & (in_block == 0))
    else:
        number = heads_inner(program, heads, q_blocks, CU_Q)
        z, seq, h, row0, start, rows = block_of(number, heads, Nq, q_blocks, seqs, CU_Q, BLOCK_M)
        pid = number.to(tl.int64)
        offs_m = tl.arange(0, BLOCK_M)
        seen = start + offs_m < rows
        line = (row0 + offs_m).to(tl.int64)[:, None]
        products = tl.zeros([BLOCK_M, 64], tl.float32)
        for panel in tl.static_range(BLOCK_D // 64):  # in the order of prepare_rows: delta does not depend on who takes it
            offs_d = panel * 64 + tl.arange(0, 64)[None, :]
            tile = seen[:, None] & (offs_d < HEAD_DIM_V)
            o = tl.load(
                O + head_offset(z, h, stride_o) + tl.multiple_of(line * stride_o[2], [1, 8]) + offs_d,
                mask=tile, other=0.0,
            )  # fmt: skip
            do = tl.load(
                DO + head_offset(z, h, stride_do) + tl.multiple_of(line * stride_do[2], [1, 8]) + offs_d,
                mask=tile, other=0.0,
            )  # fmt: skip
            products += o.to(tl.float32) * do.to(tl.float32)
        if DQ_ACC is not None:
            zeros = DQ_ACC + pid * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D)
            tl.store(zeros, tl.zeros([BLOCK_M * BLOCK_D], tl.float32))
        if SEMAPHORES is not None:
            tl.store(SEMAPHORES + pid, 0.0)
        if COUNTERS is not None:
            tl.store(COUNTERS + pid, 0.0)
        keep_statistics(
            LSE, DLSE, LSE_LOG2, DELTA, DELTA_ROWS, ALIBI, unit_log2, stride_lse, stride_dlse, z, seq, h, row0 + offs_m, offs_m,
            pid * BLOCK_M + offs_m, seen, True, tl.sum(products, 1),
        )  # fmt: skip


@triton.jit
def convert(
    ACC, X, CU, stride, scale, pid, heads, N, blocks, seqs, SHARES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The pid-th block of a gradient: scale * the accumulator, or the sum of the head's SHARES of it, in X's type and layout.

    An accumulator holds a block as 64 x 64 chunks (columns from D = 128 on, rows at D = 64), each as the 128 threads of a
    warpgroup hold a wgmma result: bit by bit, an offset reads (column group 3, warp 2, row 3, column pair 2, row + 8, column).
    """
    pid = heads_inner(pid, heads, blocks, CU)
    z, _seq, h, row0, start, rows = block_of(pid, heads, N, blocks, seqs, CU, BLOCK)
    SIZE: tl.constexpr = BLOCK * BLOCK_D
    at = pid
    if SHARES > 1:  # the shares of a head lie where heads of their own would
        at += pid // blocks * (SHARES - 1) * blocks
    place = ACC + at.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    flat = tl.load(place)
    for _ in range(1, SHARES):
        place += blocks.to(tl.int64) * SIZE
        flat += tl.load(place)
    x = tl.reshape(flat, [SIZE // 4096, 8, 4, 8, 4, 2, 2])
    if BLOCK == 64:
        x = tl.permute(x, [2, 5, 3, 0, 1, 4, 6])
    else:
        x = tl.permute(x, [0, 2, 5, 3, 1, 4, 6])
    x = tl.reshape(x, [BLOCK, BLOCK_D]) * scale
    offs = tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    line = (row0 + offs).to(tl.int64)[:, None]
    ptrs = X + head_offset(z, h, stride) + tl.multiple_of(line * stride[2], [1, 8]) + offs_d
    tl.store(ptrs, x.to(X.dtype.element_ty), mask=(start + offs < rows)[:, None] & (offs_d < WIDTH))


@triton.jit(do_not_specialize=["heads", "Nq", "q_blocks", "seqs", "heads_k", "Nk", "k_blocks", "key_programs", "converted"])
def attn_bwd_after_kernel(
    DQ_ACC, DQ, CU_Q, stride_dq, DK_SHARES, DV_SHARES, DK, DV, CU_K, stride_dk, stride_dv, softmax_scale, heads, Nq, q_blocks,
    seqs, heads_k, Nk, k_blocks, key_programs, converted, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """dQ from its accumulator and, where SHARES > 1 thread blocks share a group, dK and dV from theirs.

    The first ``key_programs`` programs convert blocks of 64 keys of dK, as many those of dV, the rest blocks of BLOCK_M
    rows of dQ, from block ``converted`` on (:mod:`.backward_convert` has done those before it). Shares are added in their
    order: the sum is the same in every run.
    """
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if SHARES == 1:
        pid += converted
        convert(DQ_ACC, DQ, CU_Q, stride_dq, softmax_scale, pid, heads, Nq, q_blocks, seqs, 1, HEAD_DIM, BLOCK_D, BLOCK_M)
    elif pid < key_programs:
        convert(
            DK_SHARES, DK, CU_K, stride_dk, softmax_scale, pid, heads_k, Nk, k_blocks, seqs, SHARES, HEAD_DIM, BLOCK_D, 64
        )
    elif pid < 2 * key_programs:
        pid -= key_programs
        convert(DV_SHARES, DV, CU_K, stride_dv, 1.0, pid, heads_k, Nk, k_blocks, seqs, SHARES, HEAD_DIM_V, BLOCK_D, 64)
    elif DQ_ACC is not None:
        pid -= 2 * key_programs - converted
        convert(DQ_ACC, DQ, CU_Q, stride_dq, softmax_scale, pid, heads, Nq, q_blocks, seqs, 1, HEAD_DIM, BLOCK_D, BLOCK_M)
