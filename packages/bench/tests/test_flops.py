import itertools

import pytest
import torch

from flashtri_bench.cases import BY_ID, Case
from flashtri_bench.flops import flops, io_bytes, pairs, visible_pairs

MASKS = [(causal, window) for causal in (False, True) for window in (None, (3, 0), (0, 2), (-1, 1), (2, -1), (5, 4))]


def brute_force(nq, nk, causal, window):
    i = torch.arange(nq)[:, None] + nk - nq
    j = torch.arange(nk)[None, :]
    keep = torch.ones(nq, nk, dtype=torch.bool)
    if causal:
        keep &= j <= i
    left, right = window or (-1, -1)
    if left >= 0:
        keep &= j >= i - left
    if right >= 0:
        keep &= j <= i + right
    return int(keep.sum())


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_pairs_are_what_a_written_out_mask_leaves(causal, window):
    for nq in (1, 2, 5, 9, 16):
        for nk in (1, 2, 5, 9, 16):
            assert visible_pairs(nq, nk, causal, window) == brute_force(nq, nk, causal, window), (nq, nk)


def test_causal_work_is_not_counted_as_full_work():
    """Public report 137: causal counted as full work, so that rates passed the card's peak."""
    case = Case("x", "x", 1, 1, 1, 1024, 1024, 64, 64, causal=True)
    assert flops(case, "fwd") == 4 * 64 * 1024 * 1025 // 2
    full = Case("x", "x", 1, 1, 1, 1024, 1024, 64, 64)
    assert flops(case, "fwd") / flops(full, "fwd") == pytest.approx(0.5, rel=2e-3)
    assert flops(case, "bwd") == 2.5 * flops(case, "fwd")
    assert flops(case, "fwd_bwd") == 3.5 * flops(case, "fwd")


def test_packed_work_is_counted_by_sequence():
    """Public report 138: varlen FLOPs that use the longest length for every sequence."""
    case = Case("x", "x", 2, 3, 3, 1024, 1024, 64, 64, lengths=(1, 1024))
    assert flops(case, "fwd") == 4 * 64 * 3 * (1 + 1024**2)


def test_grouped_heads_do_the_work_of_all_query_heads():
    grouped, plain = BY_ID["gqa-h32-8-n8192"], BY_ID["gqa-h32-32-n8192"]
    assert pairs(grouped) == pairs(plain)
    assert io_bytes(grouped, "fwd", 2) < io_bytes(plain, "fwd", 2)


def test_unequal_head_dims_count_each_product_over_its_own():
    case = Case("x", "x", 1, 1, 1, 8, 8, 192, 128)
    assert flops(case, "fwd") == 2 * 64 * (192 + 128)
    assert flops(case, "bwd") == 2 * 64 * (3 * 192 + 2 * 128)


def test_window_time_grows_as_n():
    counts = [flops(BY_ID[f"window1024-n{n}"], "fwd") for n in (8192, 16384, 32768, 65536)]
    assert [b / a for a, b in itertools.pairwise(counts)] == pytest.approx([2.0] * 3, rel=0.08)


def test_bytes_are_each_tensor_once():
    case = Case("x", "x", 2, 4, 2, 16, 32, 64, 128)
    q, k, v, o, lse = 2 * 4 * 16 * 64, 2 * 2 * 32 * 64, 2 * 2 * 32 * 128, 2 * 4 * 16 * 128, 2 * 4 * 16
    assert io_bytes(case, "fwd", 2) == 2 * (q + k + v + o) + 4 * lse
    assert io_bytes(case, "bwd", 2) == 2 * (2 * (q + k + v) + 2 * o) + 4 * lse


def test_unknown_pass_is_named():
    with pytest.raises(ValueError, match="op: got 'both'"):
        flops(BY_ID["grid-d64-full-n512"], "both")
