"""What tensors of packed rows hold behind the last sequence, where no tile lies: 0, and -inf in statistics."""

from __future__ import annotations

from .._jit import jit, tl


@jit
def fill_behind(X, shape, CU, seqs, rows, value, BLOCK: tl.constexpr):
    """``value`` in what lies behind row CU[seqs] of X; ``shape`` = (row stride, head stride, heads, columns)."""
    if X is not None:
        first = tl.load(CU + seqs).to(tl.int64)
        size = shape[2] * shape[3]
        count = (rows - first) * size
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            place = (first + at // size) * shape[0] + at % size // shape[3] * shape[1] + at % shape[3]
            tl.store(X + place, tl.full([BLOCK], value, X.dtype.element_ty), mask=at < count)


@jit(do_not_specialize=["seqs", "rows", "keys"])
def attn_tail_kernel(
    X, DK, DV, LSE, ROW_MAX, shape_x, shape_dk, shape_dv, shape_lse, shape_row_max, CU_Q, CU_K, seqs, rows, keys,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """X is O or dQ; what is not there is None. Programs share the elements; nearly always there are none."""
    fill_behind(X, shape_x, CU_Q, seqs, rows, 0.0, BLOCK)
    fill_behind(DK, shape_dk, CU_K, seqs, keys, 0.0, BLOCK)
    fill_behind(DV, shape_dv, CU_K, seqs, keys, 0.0, BLOCK)
    fill_behind(LSE, shape_lse, CU_Q, seqs, rows, float("-inf"), BLOCK)
    fill_behind(ROW_MAX, shape_row_max, CU_Q, seqs, rows, float("-inf"), BLOCK)
