"""What happens before and after the fused backward: delta and a zeroed accumulator, then fp32 -> 16 bits.

Both are plain Triton and bound by memory bandwidth. Rows come in blocks of BLOCK_M, numbered as the fused kernel numbers
them (:func:`.backward.first_block`): here the program number itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..schedule import packed_tile, span_of
from ..softmax import pivot_of


@triton.jit
def block_of_program(heads, Nq, q_blocks, seqs, CU_Q, BLOCK_M: tl.constexpr):
    """Program -> (batch z of the tensors, head h, first row in the tensor's batch, first row in the sequence, its rows)."""
    pid = tl.program_id(0)
    if CU_Q is None:
        zh = pid // q_blocks
        start = pid % q_blocks * BLOCK_M
        z, h, row0, rows = zh // heads, zh % heads, start, Nq
    else:
        h, s, start = packed_tile(pid, q_blocks, heads, 1, seqs, CU_Q, BLOCK_M, False)
        first, rows, _used = span_of(CU_Q, None, s, Nq)
        z, row0 = s * 0, first + start
    return z, h, row0, start, rows


@triton.jit
def head_offset(z, h, stride):
    """Elements before head h of batch z, a multiple of 8 as TMA wants it.

    Triton looks for multiples of 16 by itself, and would move two bytes at a time for the strides that are none: heads of
    72 columns, and the 8 that stands for the stride of an axis of size 1.
    """
    return tl.multiple_of(z.to(tl.int64) * stride[0] + h.to(tl.int64) * stride[1], 8)


@triton.jit(do_not_specialize=["heads", "Nq", "q_blocks", "seqs"])
def attn_bwd_before_kernel(
    O, DO, LSE, DLSE, LSE_LOG2, DELTA, DELTA_ROWS, DQ_ACC, CU_Q, stride_o, stride_do, stride_lse, stride_dlse, heads, Nq,
    q_blocks, seqs, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) - dLSE and LSE * log2(e), padded to whole blocks; DQ_ACC = 0.

    DELTA_ROWS, if given, receives delta once more in LSE's own layout (the sink's gradient wants it).
    """
    z, h, row0, start, rows = block_of_program(heads, Nq, q_blocks, seqs, CU_Q, BLOCK_M)
    pid = tl.program_id(0).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    seen = start + offs_m < rows
    tile = seen[:, None] & (offs_d < HEAD_DIM_V)
    line = (row0 + offs_m).to(tl.int64)[:, None]
    o = tl.load(
        O + head_offset(z, h, stride_o) + tl.multiple_of(line * stride_o[2], [1, 8]) + offs_d,
        mask=tile, other=0.0,
    )  # fmt: skip
    do = tl.load(
        DO + head_offset(z, h, stride_do) + tl.multiple_of(line * stride_do[2], [1, 8]) + offs_d,
        mask=tile, other=0.0,
    )  # fmt: skip
    if DQ_ACC is not None:
        zeros = DQ_ACC + pid * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D)
        tl.store(zeros, tl.zeros([BLOCK_M * BLOCK_D], tl.float32))
    at = h.to(tl.int64) * stride_lse[1] + z.to(tl.int64) * stride_lse[0] + row0 + offs_m
    lse = tl.load(LSE + at, mask=seen, other=float("-inf"))
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE is not None:
        dlse = DLSE + z.to(tl.int64) * stride_dlse[0] + h.to(tl.int64) * stride_dlse[1]
        delta -= tl.load(dlse + (row0 + offs_m).to(tl.int64) * stride_dlse[2], mask=seen, other=0.0)
    tl.store(LSE_LOG2 + pid * BLOCK_M + offs_m, pivot_of(lse))
    tl.store(DELTA + pid * BLOCK_M + offs_m, tl.where(lse == float("-inf"), 0.0, delta))
    if DELTA_ROWS is not None:
        tl.store(DELTA_ROWS + at, delta, mask=seen)


@triton.jit(do_not_specialize=["heads", "Nq", "q_blocks", "seqs"])
def attn_bwd_after_kernel(
    DQ_ACC, DQ, CU_Q, stride_dq, softmax_scale, heads, Nq, q_blocks, seqs,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dQ = softmax_scale * accumulator, in DQ's own type and layout.

    The accumulator holds a block as 64 x 64 chunks (columns from D = 128 on, rows at D = 64), each as the 128 threads of a
    warpgroup hold a wgmma result: bit by bit, an offset reads (column group 3, warp 2, row 3, column pair 2, row + 8, column).
    """
    z, h, row0, start, rows = block_of_program(heads, Nq, q_blocks, seqs, CU_Q, BLOCK_M)
    pid = tl.program_id(0).to(tl.int64)
    CHUNKS: tl.constexpr = BLOCK_M * BLOCK_D // 4096
    flat = tl.load(DQ_ACC + pid * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D))
    x = tl.reshape(flat, [CHUNKS, 8, 4, 8, 4, 2, 2])
    if BLOCK_M == 64:
        x = tl.permute(x, [2, 5, 3, 0, 1, 4, 6])
    else:
        x = tl.permute(x, [0, 2, 5, 3, 1, 4, 6])
    dq = tl.reshape(x, [BLOCK_M, BLOCK_D]) * softmax_scale
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    line = (row0 + offs_m).to(tl.int64)[:, None]
    ptrs = DQ + head_offset(z, h, stride_dq) + tl.multiple_of(line * stride_dq[2], [1, 8]) + offs_d
    tl.store(ptrs, dq.to(DQ.dtype.element_ty), mask=(start + offs_m < rows)[:, None] & (offs_d < HEAD_DIM))
