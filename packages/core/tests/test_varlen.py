"""Packed sequences: empty ones, tails, skewed lengths, and the forms that cu_seqlens comes in."""

import itertools

import pytest
import torch

from flashtri_core import flash_attn, flash_attn_varlen, reference
from flashtri_core.testing import budget, cases
from flashtri_core.testing.cases import Case, exact
from flashtri_core.testing.plugin import GPU_BFLOAT, GPU_HALF, REFERENCE, Lane, lanes

GPU = (GPU_HALF, GPU_BFLOAT)


def pairs(cu_q, cu_k):
    """Lengths of each sequence from two cu_seqlens lists."""
    steps = [[b - a for a, b in itertools.pairwise(cu)] for cu in (cu_q, cu_k)]
    return tuple(zip(*steps, strict=True))


def small(lane: Lane, full: int, little: int) -> int:
    """A size where computing is quick, another one for the interpreter and the CPU."""
    return full if lane.device == "cuda" else little


@lanes()
def test_empty_segments_at_both_ends(lane, poisoned):
    """Row 52: empty query sequences first and last, D = 256: no fault, and keys nobody reads get exactly 0."""
    n = small(lane, 1, 64)
    cu_q, cu_k = [0, 0, 1208 // n, 2048 // n, 2048 // n], [0, 2538 // n, 4280 // n, 5120 // n, 8192 // n]
    case = Case("row_52", heads=(4, 1), d=256 if lane.device == "cuda" else 32, lengths=pairs(cu_q, cu_k))
    given = cases.inputs(case, lane.dtype, lane.device)
    got = lane.check(given)
    for grad in (got["dk"], got["dv"]):
        assert not grad[: cu_k[1]].any() and not grad[cu_k[3] :].any()
        assert grad[cu_k[1] : cu_k[3]].any()


@lanes()
def test_fewer_tokens_than_sequences(lane, poisoned):
    """Row 54: one token in four sequences, under GQA: the output is v repeated to 21 heads."""
    q, k, v = lane.randn(1, 21, 120), lane.randn(1, 7, 120, seed=1), lane.randn(1, 7, 120, seed=2)
    cu = torch.tensor([0, 0, 0, 0, 1], dtype=torch.int32, device=lane.device)
    out = flash_attn_varlen(q, k, v, cu, cu, 1, 1, impl=lane.impl)
    assert torch.equal(out, v.repeat_interleave(3, 1))


@lanes()
def test_one_query_each_with_an_empty_sequence(lane, poisoned):
    """Row 55: max_seqlen_q = 1 with an empty sequence equals the same call with max_seqlen_q = 2."""
    case = Case("row_55", heads=(9, 3), d=64, causal=True, scale=1.0, lengths=((1, 3), (0, 0), (1, 5)))
    given = cases.inputs(case, lane.dtype, lane.device)
    lane.check(given)
    t = given.tensors
    one, two = (
        flash_attn_varlen(
            t["q"], t["k"], t["v"], t["cu_seqlens_q"], t["cu_seqlens_k"], n, 5, causal=True, softmax_scale=1.0, impl=lane.impl
        )
        for n in (1, 2)
    )  # fmt: skip
    assert torch.equal(one, two)


@lanes()
def test_tail_rows_are_zero(lane, poisoned):
    """Row 56: rows behind cu_seqlens[-1] give 0, LSE -inf and zero gradients, not what memory held."""
    n = small(lane, 1, 12)
    case = Case(
        "row_56",
        heads=(2, 2),
        d=64 if n == 1 else 16,
        lengths=tuple((x // n, x // n) for x in (144, 288, 512)),
        tail=(2, 2),
    )
    got = lane.check(cases.inputs(case, lane.dtype, lane.device))
    for name in ("out", "dq", "dk", "dv"):
        assert not got[name][-2:].any() and got[name][-3].any(), name
    assert (got["lse"][:, -2:] == float("-inf")).all()


@lanes()
def test_odd_starts(lane, poisoned):
    """Row 18: sequence starts and a head dimension that align to nothing."""
    n = small(lane, 1, 20)
    cu = [0, 15 // n, 100 // n, 300 // n, 1203 // n, 2000 // n]
    lane.check(cases.inputs(Case("row_18", heads=(3, 3), d=40, lengths=pairs(cu, cu)), lane.dtype, lane.device))


@lanes()
@pytest.mark.parametrize("form", ["int64", "every_second", "uint_view"])
def test_forms_of_cu_seqlens(lane, form):
    """Row 59: int64 is cast, a non-contiguous slice is read by its values, never by its bits."""
    x = lane.randn(30, 2, 16)
    cu = torch.tensor([0, 11, 30], dtype=torch.int32, device=lane.device)
    right = flash_attn_varlen(x, x, x, cu, cu, 19, 19, causal=True, impl=lane.impl)
    if form == "int64":
        other = cu.long()
    elif form == "every_second":
        other = torch.tensor([0, 5, 11, 20, 30], dtype=torch.int32, device=lane.device)[::2]
        assert not other.is_contiguous()
    else:
        other = torch.tensor([7, 0, 11, 30], dtype=torch.int32, device=lane.device)[1:]  # misaligned start
    assert torch.equal(flash_attn_varlen(x, x, x, other, other, 19, 19, causal=True, impl=lane.impl), right)


@lanes()
def test_max_seqlen_is_only_a_bound(lane):
    """A larger max_seqlen changes nothing: work follows the lengths themselves."""
    x = lane.randn(30, 2, 16)
    cu = torch.tensor([0, 11, 30], dtype=torch.int32, device=lane.device)
    near, far = (flash_attn_varlen(x, x, x, cu, cu, n, n, causal=True, impl=lane.impl) for n in (19, 5000))
    assert torch.equal(near, far)


@lanes()
def test_a_pack_in_one_call_and_in_two(lane):
    """Row 10: bit-equal; on a GPU with 2050 documents x 32 heads, more than 65535 programs along any one axis."""
    documents, heads, d = (2050, 32, 64) if lane.device == "cuda" else (6, 2, 16)
    lengths = torch.randint(16, 41, (documents,), generator=torch.Generator().manual_seed(3))
    half = documents // 2
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(lane.device, torch.int32)
    cut = int(cu[half])
    leaves = [lane.randn(int(cu[-1]), heads, d, seed=s).requires_grad_() for s in range(3)]
    do = lane.randn(*leaves[0].shape, seed=4)

    def results(rows, cu):
        part = [x.detach()[rows].requires_grad_() for x in leaves]
        out = flash_attn_varlen(*part, cu, cu, 40, 40, causal=True, impl=lane.impl)
        return out, *torch.autograd.grad(out, part, do[rows])

    whole = results(slice(None), cu)
    first, second = results(slice(0, cut), cu[: half + 1]), results(slice(cut, None), cu[half:] - cut)
    for a, b, c in zip(whole, first, second, strict=True):
        assert torch.equal(a, torch.cat([b, c]))


@lanes(REFERENCE, *GPU)
def test_memory_follows_tokens(lane):
    """Row 134: one long sequence among many short ones must not cost batch x longest."""
    longest, others, heads = (8192, 8191, 16) if lane.device == "cuda" else (512, 500, 2)
    tokens = longest + others
    x = lane.randn(tokens, heads, 16)
    cu = torch.tensor([0, *range(longest, tokens + 1)], dtype=torch.int32, device=lane.device)
    padded = (others + 1) * longest * heads * 4
    if lane.device == "cuda":
        flash_attn_varlen(x, x, x, cu, cu, longest, longest, causal=True, impl=lane.impl)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _, lse = flash_attn_varlen(x, x, x, cu, cu, longest, longest, causal=True, return_lse=True, impl=lane.impl)
        extra = torch.cuda.max_memory_allocated() - before
        assert extra <= x.numel() * x.element_size() + 8 * tokens * heads + (1 << 20)
        assert extra < padded / 10
    else:
        _, lse = flash_attn_varlen(x, x, x, cu, cu, longest, longest, causal=True, return_lse=True, impl=lane.impl)
    assert lse.shape == (heads, tokens) and lse.is_contiguous()


@lanes()
@pytest.mark.parametrize("sequences", [0, 1])
def test_nothing_at_all(lane, sequences):
    """No sequences, or one empty one: empty results, and backward works."""
    q, k, v = (lane.randn(0, 2, 16).requires_grad_() for _ in range(3))
    cu = torch.zeros(sequences + 1, dtype=torch.int32, device=lane.device)
    out, lse = flash_attn_varlen(q, k, v, cu, cu, 0, 0, return_lse=True, impl=lane.impl)
    assert (out.shape, lse.shape) == ((0, 2, 16), (2, 0))
    out.sum().backward()
    assert q.grad.shape == (0, 2, 16)


@lanes()
def test_no_sequences_but_rows(lane, poisoned):
    """All rows are tail: outputs and gradients are 0."""
    q, k, v = (lane.randn(9, 2, 16, seed=s).requires_grad_() for s in range(3))
    cu = torch.zeros(1, dtype=torch.int32, device=lane.device)
    out, lse = flash_attn_varlen(q, k, v, cu, cu, 0, 0, return_lse=True, impl=lane.impl)
    out.sum().backward()
    assert not out.any() and (lse == float("-inf")).all()
    assert not any(x.grad.any() for x in (q, k, v))


@lanes(REFERENCE)
def test_the_specification_of_a_pack(lane):
    """The packed reference itself, sequence by sequence through the dense one."""
    case = Case("pack", heads=(2, 1), lengths=((4, 6), (0, 3), (5, 0), (3, 3)), tail=(2, 1), causal=True, d=8)
    given = lane.inputs(case)
    right = exact(given, backward=False)
    t = given.tensors
    start_q = start_k = 0
    for nq, nk in case.lengths:
        q, k, v = (x.transpose(0, 1)[None] for x in (t["q"][start_q : start_q + nq], t["k"][start_k : start_k + nk], t["v"][start_k : start_k + nk]))  # fmt: skip
        budget.check(
            {"out": flash_attn(q, k, v, causal=True)[0].transpose(0, 1)},
            {"out": right["out"][start_q : start_q + nq]},
            None,
        )
        start_q, start_k = start_q + nq, start_k + nk


@lanes(REFERENCE)
def test_chunked_memory_is_linear(lane):
    """The CPU path never holds an N x N matrix, forward or backward: its chunks have a fixed number of scores."""
    n = 8192
    leaves = [torch.randn(n, 1, 8).requires_grad_() for _ in range(3)]
    cu = torch.tensor([0, n], dtype=torch.int32)
    with torch.profiler.profile(profile_memory=True) as profile:
        flash_attn_varlen(*leaves, cu, cu, n, n).sum().backward()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert n * n // 8 > reference.CHUNK_ELEMENTS
    assert 0 < peak < n * n * 4, f"{peak} bytes, as much as a score matrix"
