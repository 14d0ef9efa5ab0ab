"""What a call means, on examples small enough to write down, and against torch's own attention."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from flashtri_core import flash_attn, flash_attn_varlen
from flashtri_core.testing.cases import CASES, exact, inputs
from flashtri_core.testing.plugin import REFERENCE, lanes

INF = float("inf")


def visible(nq, nk, **keywords):
    """The 0/1 matrix that a call shows: with equal scores a row's output on v = identity is its share of each key."""
    q, k = torch.zeros(1, 1, nq, 2, dtype=torch.float64), torch.zeros(1, 1, nk, 2, dtype=torch.float64)
    out = flash_attn(q, k, torch.eye(nk, dtype=torch.float64)[None, None], **keywords)[0, 0]
    assert torch.equal(out.sum(1).round(decimals=12), (out > 0).any(1).double())
    return (out > 0).int().tolist()


@pytest.mark.parametrize(
    ("nq", "nk", "keywords", "matrix"),
    [
        (2, 5, dict(causal=True), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        (5, 2, dict(causal=True), [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]),
        (2, 3, dict(), [[1, 1, 1], [1, 1, 1]]),
        (2, 3, dict(causal=True), [[1, 1, 0], [1, 1, 1]]),
        (3, 3, dict(window_size=(1, 0)), [[1, 0, 0], [1, 1, 0], [0, 1, 1]]),
        (3, 3, dict(window_size=(-1, 1)), [[1, 1, 0], [1, 1, 1], [1, 1, 1]]),
        (3, 3, dict(window_size=(0, -1)), [[1, 1, 1], [0, 1, 1], [0, 0, 1]]),
        (2, 4, dict(window_size=(1, 0)), [[0, 1, 1, 0], [0, 0, 1, 1]]),
        (4, 2, dict(window_size=(0, 0)), [[0, 0], [0, 0], [1, 0], [0, 1]]),
        (3, 3, dict(window_size=(1, 5), causal=True), [[1, 0, 0], [1, 1, 0], [0, 1, 1]]),
        (1, 10, dict(causal=True), [[1] * 10]),
    ],
)
def test_visible_keys(nq, nk, keywords, matrix):
    """Rows 33, 34, 145: causal and window are aligned bottom-right, also where Nq and Nk differ."""
    assert visible(nq, nk, **keywords) == matrix


@lanes()
def test_more_queries_than_keys(lane):
    """Row 34: rows that see nothing give 0 and -inf; row 3 sees key 0, row 4 keys 0 and 1; gradients are finite."""
    q, k, v = (lane.randn(1, 1, n, 16, seed=n + s).requires_grad_() for s, n in enumerate((5, 2, 2)))
    out, lse = flash_attn(q, k, v, causal=True, impl=lane.impl, return_lse=True)
    assert torch.equal(out[0, 0, :3], torch.zeros_like(out[0, 0, :3]))
    assert lse[0, 0, :3].tolist() == [-INF] * 3
    assert torch.equal(out[0, 0, 3], v[0, 0, 0])
    assert not torch.equal(out[0, 0, 4], v[0, 0, 0])
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert torch.equal(grads[0][0, 0, :4], torch.zeros_like(grads[0][0, 0, :4]))


@lanes()
def test_decode_row_sees_every_key(lane):
    """Row 33: one query under causal sees all keys, not the first alone."""
    q, k, v = lane.randn(1, 2, 1, 16), lane.randn(1, 2, 10, 16, seed=1), lane.randn(1, 2, 10, 16, seed=2)
    assert torch.equal(flash_attn(q, k, v, causal=True, impl=lane.impl), flash_attn(q, k, v, impl=lane.impl))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_sdpa(causal, scale):
    """Outputs and gradients are those of torch's attention where both mean the same (Nq = Nk)."""
    q, k, v = (torch.randn(2, 4, 33, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    do = torch.randn(2, 4, 33, 8, dtype=torch.float64)
    ours = flash_attn(q, k, v, causal=causal, softmax_scale=scale)
    torchs = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    torch.testing.assert_close(ours, torchs)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), do), torch.autograd.grad(torchs, (q, k, v), do), strict=True):
        torch.testing.assert_close(a, b)


def test_equals_sdpa_with_bias_and_groups():
    q = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 13, 8, dtype=torch.float64) for _ in range(2))
    bias, mask = torch.randn(2, 4, 9, 13, dtype=torch.float64), torch.rand(2, 1, 9, 13) < 0.7
    mask[..., 0] = True
    both = bias.masked_fill(~mask, -INF)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=both, enable_gqa=True)
    torch.testing.assert_close(flash_attn(q, k, v, attn_bias=bias, attn_mask=mask), want)
    torch.testing.assert_close(flash_attn(q, k, v, attn_bias=both), want)


def test_the_specification_equals_the_formulas_term_by_term():
    """The reference itself, against sums written as loops: scale, softcap, ALiBi, bias, mask, sink, in that order."""
    given = inputs(all_terms(), torch.float64)
    t, numbers = given.tensors, given.numbers
    right = exact(given, backward=False)
    q, k, v, slopes, sink = t["q"], t["k"], t["v"], t["alibi_slopes"], t["learnable_sink"]
    (hq, hk), nq, nk = given.case.heads, given.case.nq, given.case.nk
    for h in range(hq):
        for i in range(nq):
            weights, logits = [math.exp(sink[h])], [sink[h].item()]
            for j in range(nk):
                s = numbers["softmax_scale"] * (q[0, h, i] @ k[0, h // (hq // hk), j]).item()
                s = numbers["softcap"] * math.tanh(s / numbers["softcap"])
                s -= slopes[h].item() * abs(i + nk - nq - j)
                s += t["attn_bias"][0, h, i, j].item()
                shown = j <= i + nk - nq and t["attn_mask"][0, 0, i, j].item()
                weights.append(math.exp(s) if shown else 0.0)
                if shown:
                    logits.append(s)
            total = sum(weights)
            o = sum(w / total * v[0, h // (hq // hk), j] for j, w in enumerate(weights[1:]))
            torch.testing.assert_close(right["out"][0, h, i], o)
            assert right["lse"][0, h, i].item() == pytest.approx(math.log(total), rel=1e-12)


def all_terms():
    return replace(
        CASES["full"], nq=4, nk=6, d=3, dv=2, causal=True, scale=0.7, softcap=1.5, alibi="h", sink=True, bias="bhqk", mask="b1qk"
    )  # fmt: skip


@lanes()
def test_lse_is_natural_and_tight(lane):
    """Row 154: LSE is the natural logarithm with the scale in it, fp32, and exact to fp32."""
    given = lane.inputs(CASES["causal"])
    t = given.tensors
    group = t["q"].shape[1] // t["k"].shape[1]
    s = t["q"].double() @ t["k"].double().repeat_interleave(group, 1).transpose(-1, -2) * t["q"].shape[-1] ** -0.5
    n = s.shape[-1]
    s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=s.device).triu(1), -INF)
    _, lse = flash_attn(t["q"], t["k"], t["v"], causal=True, return_lse=True, impl=lane.impl)
    assert lse.dtype == (torch.float64 if lane.dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(lse.double(), torch.logsumexp(s, -1), atol=2e-6, rtol=2e-6)


@lanes()
def test_max_logits(lane):
    q, k, v = lane.randn(2, 2, 40, 16), lane.randn(2, 2, 50, 16, seed=1), lane.randn(2, 2, 50, 16, seed=2)
    _, most = flash_attn(q, k, v, softmax_scale=0.5, return_max_logits=True, impl=lane.impl)
    want = (q.double() @ k.double().transpose(-1, -2) * 0.5).amax((0, 2, 3))
    torch.testing.assert_close(most.double(), want, atol=1e-5, rtol=1e-6)


@lanes()
def test_heads_are_grouped_in_order(lane):
    """Row 47: query heads 0..3 read key heads 0, 0, 1, 1 and not 0, 1, 0, 1."""
    q, k = lane.randn(1, 4, 16, 16), lane.randn(1, 2, 16, 16, seed=1)
    v = torch.arange(2, device=lane.device, dtype=lane.dtype).view(1, 2, 1, 1).expand(1, 2, 16, 16)
    out = flash_attn(q, k, v, impl=lane.impl)
    assert out.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 1, 1], abs=1e-2)


@lanes()
def test_window_counts_keys_beside_the_query(lane):
    """Row 61: a window of (3, 0) holds four tokens, the query among them; (4, 0) holds five."""
    q, k = lane.randn(1, 1, 16, 16), lane.randn(1, 1, 16, 16, seed=1)
    v = torch.eye(16, device=lane.device, dtype=lane.dtype)[None, None]
    for left, first in ((3, 7), (4, 6)):
        out = flash_attn(q, k, v, causal=True, window_size=(left, 0), impl=lane.impl)
        assert (out[0, 0, 10] > 0).nonzero().flatten().tolist() == list(range(first, 11))


@lanes()
def test_window_longer_than_context_keeps_causality(lane):
    """Row 64: such a window changes nothing, causality included."""
    q, k, v = (lane.randn(1, 2, 64, 16, seed=s) for s in range(3))
    wide = flash_attn(q, k, v, causal=True, window_size=(4096, 0), impl=lane.impl)
    torch.testing.assert_close(wide, flash_attn(q, k, v, causal=True, impl=lane.impl), rtol=0, atol=2e-3)


@lanes()
@pytest.mark.parametrize("window", [(-1, -1), (None, None), [-1, -1], None])
def test_open_window_is_full_attention(lane, window):
    """Row 65: unbounded on both sides, however it is written, is plain attention and no NaN."""
    q, k, v = (lane.randn(1, 2, 40, 16, seed=s) for s in range(3))
    out = flash_attn(q, k, v, window_size=window, impl=lane.impl)
    assert torch.equal(out, flash_attn(q, k, v, impl=lane.impl))
    assert not out.isnan().any()


@lanes()
def test_alibi_of_a_decode_step_is_the_last_row(lane):
    """Row 68: distance counts from the bottom-right diagonal, so that a step equals the last row of the full run."""
    q, k, v = (lane.randn(1, 12, 20, 16, seed=s) for s in range(3))
    slopes = torch.rand(12, generator=torch.Generator().manual_seed(3)).to(lane.device)
    full = flash_attn(q, k, v, causal=True, alibi_slopes=slopes, impl=lane.impl)
    step = flash_attn(q[:, :, -1:], k, v, causal=True, alibi_slopes=slopes, impl=lane.impl)
    torch.testing.assert_close(step, full[:, :, -1:], rtol=2e-3, atol=2e-3)
    plain = flash_attn(q[:, :, -1:], k, v, causal=True, impl=lane.impl)
    assert (step - plain).abs().max() > 0.05


@lanes()
def test_softcap_caps(lane):
    """Row 72: softcap * tanh(s / softcap), not s * tanh(s): a huge score ends at the cap."""
    q = torch.full((1, 1, 1, 16), 8.0, device=lane.device, dtype=lane.dtype)
    k = torch.stack([torch.ones(16), -torch.ones(16)])[None, None].to(q) * 8
    _, lse = flash_attn(q, k, k, softmax_scale=1.0, softcap=3.0, return_lse=True, impl=lane.impl)
    assert lse.item() == pytest.approx(math.log(math.exp(3) + math.exp(-3)), abs=2e-3)


@lanes()
def test_second_half_of_a_head_counts(lane):
    """Row 20: head dimension 128 is not read as its first 64 columns."""
    q, k, v = (lane.randn(1, 2, 33, 128, seed=s) for s in range(3))
    out = flash_attn(q, k, v, impl=lane.impl)
    half = q.clone()
    half[..., 64:] = 0
    assert (flash_attn(half, k, v, impl=lane.impl) - out).abs().max() > 0.05
    want = torch.softmax(q.double() @ k.double().transpose(-1, -2) * 128**-0.5, -1) @ v.double()
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)


@lanes()
def test_group_limits_are_not_divided(lane):
    """Row 49: under GQA the causal limit of a row is its own, not that of a row of the packed group."""
    q, k, v = lane.randn(1, 8, 64, 16), lane.randn(1, 2, 64, 16, seed=1), lane.randn(1, 2, 64, 16, seed=2)
    out = flash_attn(q, k, v, causal=True, impl=lane.impl)
    every = flash_attn(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), causal=True, impl=lane.impl)
    torch.testing.assert_close(out, every, rtol=0, atol=4e-3 if lane.dtype == torch.bfloat16 else 1e-3)


@lanes(REFERENCE)
def test_cpu_tensors_work(lane):
    """Row 148: CPU tensors compute, through the chunked path, instead of a pointer error from the compiler."""
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    torch.testing.assert_close(flash_attn(q, k, v), F.scaled_dot_product_attention(q, k, v))


@lanes()
def test_a_packed_sequence_is_a_dense_batch(lane):
    """Sequences of a pack do not see each other, and each is what a dense call gives."""
    given = lane.inputs(CASES["packed_causal"])
    t = given.tensors
    cu_q, cu_k = t["cu_seqlens_q"].tolist(), t["cu_seqlens_k"].tolist()
    packed = flash_attn_varlen(
        t["q"], t["k"], t["v"], t["cu_seqlens_q"], t["cu_seqlens_k"], *given.case.longest, causal=True, impl=lane.impl
    )
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        q, k, v = (x.transpose(0, 1)[None] for x in (t["q"][a:b], t["k"][c:d], t["v"][c:d]))
        one = flash_attn(q, k, v, causal=True, impl=lane.impl)[0].transpose(0, 1)
        torch.testing.assert_close(packed[a:b], one, rtol=0, atol=4e-3 if lane.dtype == torch.bfloat16 else 1e-3)
