"""The ends of every range: no rows, few rows, huge scores, hidden rows, odd memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flashtri_core import flash_attn, flash_attn_varlen, pack, unpack
from flashtri_core.interface import FLOAT_TINY
from flashtri_core.testing import budget, cases
from flashtri_core.testing.cases import Case, laid_out
from flashtri_core.testing.plugin import GPU_BFLOAT, GPU_HALF, INTERPRETER, REFERENCE, lanes
from flashtri_core.variants import MASKS

INF = float("inf")


@lanes()
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "nq", "nk"), [(0, 9, 4), (1, 9, 0), (1, 0, 9), (0, 0, 0)])
def test_empty(lane, batch, nq, nk, causal, poisoned):
    """Rows 30, 31: no batch, no keys, no queries: forward and backward, no error."""
    q = lane.randn(batch, 4, nq, 16).requires_grad_()
    k, v = (lane.randn(batch, 2, nk, 16, seed=s).requires_grad_() for s in (1, 2))
    out, lse, most = flash_attn(q, k, v, causal=causal, return_lse=True, return_max_logits=True, impl=lane.impl)
    assert (out.shape, lse.shape, most.shape) == ((batch, 4, nq, 16), (batch, 4, nq), (4,))
    grads = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v), (torch.ones_like(out.sum()),) * 2)
    assert not out.any() and (lse == -INF).all()
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert not any(g.any() for g in grads)


@lanes()
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "nq", "nk"), [(0, 9, 4), (1, 9, 0), (1, 0, 9), (0, 0, 0)])
@pytest.mark.parametrize("packed", [False, True])
def test_empty_gradients_of_sink_and_bias(lane, batch, nq, nk, causal, packed, poisoned):
    """Rows 30, 31: what a sink and a shared bias get from no batch, no keys or no queries is zero, not what lay in memory."""
    q, k = lane.randn(batch, 4, nq, 16), lane.randn(batch, 2, nk, 16, seed=1)
    sink, bias = torch.zeros(4, device=q.device, requires_grad=True), lane.randn(1, 4, 1, 1).requires_grad_()
    features = {"causal": causal, "learnable_sink": sink, "attn_bias": bias, "impl": lane.impl}
    if packed:
        q, k = (x.transpose(1, 2).flatten(0, 1) for x in (q, k))
        cu_q, cu_k = (torch.arange(batch + 1, dtype=torch.int32, device=q.device) * n for n in (nq, nk))
        out = flash_attn_varlen(q, k, k, cu_q, cu_k, nq, nk, **features)
    else:
        out = flash_attn(q, k, k, **features)
    for grad in torch.autograd.grad(out, (sink, bias), torch.ones_like(out)):
        assert torch.equal(grad, torch.zeros_like(grad))


@lanes()
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 16, 17])
def test_short(lane, n, poisoned):
    """Row 28: lengths below the smallest tile of a dot; row 125: and below every config's tile."""
    case = Case("short", heads=(1, 1), nq=n, nk=n, d=16, causal=n % 2 == 0)
    lane.check(cases.inputs(case, lane.dtype, lane.device))


@lanes()
@pytest.mark.parametrize("causal", [False, True])
def test_one_below_and_above_a_block(lane, causal):
    """Row 26: the error of a length beside a block multiple is that of the multiple."""
    block = 4096 if lane.device == "cuda" else 64
    if lane.device == "cuda" and lane.dtype == torch.float16:
        block = 2048
    errors = []
    for n in (block - 1, block, block + 1):
        given = cases.inputs(Case("edge", heads=(1, 1), nq=n, nk=n, d=16, causal=causal), lane.dtype, lane.device)
        got, right = lane.run(given), cases.exact(given)
        errors.append(max((got[x] - right[x]).abs().max().item() for x in ("out", "dq", "dk", "dv")))
    assert max(errors) <= 3 * min(errors) + 1e-12, errors


@lanes()
def test_a_hidden_row_does_not_spoil_shared_weights(lane):
    """Row 37: rows that see nothing do not turn the gradient of a shared weight into NaN."""
    torch.manual_seed(0)
    linear = nn.Linear(16, 48).to(lane.device, lane.dtype)
    x = lane.randn(1, 8, 16)

    def gradient(impl, keep):
        linear.zero_grad()
        q, k, v = linear(x).unflatten(-1, (3, 1, 16)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q[:, keep:] if keep else q, k[:, :4], v[:, :4]))
        out = flash_attn(q, k, v, causal=True, impl=impl)
        out[:, :, 4 - keep :].sum().backward()
        return linear.weight.grad.clone()

    whole, dropped = gradient(lane.impl, 0), gradient(lane.impl, 4)
    assert whole.isfinite().all()
    torch.testing.assert_close(whole, dropped, rtol=1e-2, atol=1e-2)


@lanes()
@pytest.mark.parametrize("scale", [0.0, -0.5, -0.0, 1e-39, 1e-46, -1e-46, 1.2e-38])
def test_scales_that_are_not_positive(lane, scale):
    """Row 40: a hidden score times zero or a negative number is not NaN; scale 0 gives the mean of the visible v.

    What float32 cannot hold, or a GPU flushes, is zero.
    """
    q, k, v = (lane.randn(1, 2, 64, 64, seed=s).requires_grad_() for s in range(3))
    out = flash_attn(q, k, v, softmax_scale=scale, causal=True, impl=lane.impl)
    if abs(scale) < 1e-30:
        mean = v.double().cumsum(2) / torch.arange(1, 65, device=v.device)[:, None]
        torch.testing.assert_close(out.double(), mean, rtol=1e-2, atol=1e-2)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in (out, *grads))
    case = Case("scale", heads=(2, 2), nq=64, nk=64, d=64, scale=scale, causal=True)
    given = cases.inputs(case, lane.dtype, lane.device)
    meant = replace(given, case=replace(case, scale=scale if abs(scale) >= FLOAT_TINY else 0.0))
    eager = None if lane.dtype == torch.float64 else cases.exact(meant, lane.dtype)
    budget.check(lane.run(given), cases.exact(meant), eager)


@lanes(REFERENCE, GPU_BFLOAT)
def test_huge_equal_inputs(lane):
    """Row 41: q = k = v = 133120: one key, so the output is v exactly."""
    x = torch.full((1, 1, 1, 64), 133120.0, device=lane.device, dtype=torch.bfloat16).requires_grad_()
    out = flash_attn(x, x, x, impl=lane.impl)
    assert (out == 133120.0).all()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert not grad.isnan().any()


@lanes()
def test_all_scores_very_low(lane):
    """Row 42: the running maximum has no finite floor: rows whose scores are all huge and negative are a mean."""
    q = torch.full((1, 1, 64, 128), 48.0, device=lane.device, dtype=lane.dtype)
    k, v = torch.full_like(q, -40.0), lane.randn(1, 1, 64, 128)
    out, lse = flash_attn(q, k, v, return_lse=True, impl=lane.impl)
    torch.testing.assert_close(out.double(), v.double().mean(2, keepdim=True).expand_as(out), rtol=1e-2, atol=2e-3)
    right = -245760.0 * 128**-0.5 + torch.log(torch.tensor(64.0)).item()
    torch.testing.assert_close(lse.double(), torch.full_like(lse.double(), right), rtol=2e-6, atol=0)


@lanes()
def test_minus_infinity_in_a_bias(lane, poisoned):
    """A bias of -inf hides its key; a row of nothing else gives 0 and zero gradients, never NaN."""
    given = lane.inputs(Case("inf", bias="hqk", nq=40, nk=50))
    bias = given.tensors["attn_bias"]
    bias[:, 3] = -INF
    bias[:, :, 5:20] = -INF
    got = lane.check(given)
    assert (got["lse"][0, :, 3] == -INF).all() and not got["out"][0, :, 3].any()
    assert not got["dk"][0, :, 5:20].any() and not got["dbias"][:, :, 5:20].any()


@lanes()
@pytest.mark.parametrize("where", ["q", "k", "attn_bias", "alibi_slopes"])
@pytest.mark.parametrize("hide", ["nothing", "causal", "window", "mask"])
def test_nan_reaches_the_rows_that_see_it(lane, where, hide):
    """A NaN score makes its row NaN, as in SDPA, and no other row; one that a mask hides makes none."""
    hidden = {"nothing": {}, "causal": {"causal": True}, "window": {"window": (9, 4)}, "mask": {"mask": "hqk"}}[hide]
    added = {"attn_bias": {"bias": "bhqk"}, "alibi_slopes": {"alibi": "h"}}.get(where, {})
    given = lane.inputs(Case("nan", heads=(4, 2), **hidden, **added))
    key = 7 + given.case.nk - given.case.nq  # on the diagonal, which a window shows at any size
    if hide == "mask":
        given.tensors["attn_mask"][1, 7, key] = True
    clean = lane.run(given, backward=False)
    entry, scores = {  # what is NaN, and which scores (batch, head, row, key) are
        "q": ((0, 1, 7), (0, 1, 7)),
        "k": ((0, 0, key), (0, slice(0, 2), slice(None), key)),
        "attn_bias": ((0, 1, 7, key), (0, 1, 7, key)),
        "alibi_slopes": (2, (0, 2)),
    }[where]
    given.tensors[where][entry] = float("nan")
    problem, extras = cases.problem_of(given)
    i, j = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_k)[None]
    seen = (
        MASKS[problem.mask_kind].keep_eager(i, j, problem.seqlen_q, problem.seqlen_k, *problem.window).to(lane.device)
    )
    seen = seen.expand(1, 4, -1, -1) if extras.attn_mask is None else seen & extras.attn_mask
    spoilt = torch.zeros_like(seen)
    spoilt[scores] = seen[scores]
    rows = spoilt.any(-1)
    got, exact = lane.run(given), cases.exact(given)
    assert rows.any()
    for name in ("out", "lse"):
        nan = got[name].isnan()
        assert torch.equal(nan, rows[..., None].expand_as(nan) if name == "out" else rows), name
        assert torch.equal(exact[name].isnan(), nan), name
        assert torch.equal(got[name][~rows], clean[name][~rows]), name
    assert got["dq"][rows].isnan().all() and got["dv"].isnan().any()
    assert torch.equal(got["max"].isnan(), rows.any(-1).any(0)) and torch.equal(
        exact["max"].isnan(), got["max"].isnan()
    )


USED = Case("used", batch=2, heads=(4, 2), used=(17, 50), alibi="h", bias="bhqk")


@lanes()
@pytest.mark.parametrize("name", ["k", "v", "attn_bias"])
def test_what_lies_behind_the_keys_in_use(lane, name):
    """A cache may hold anything there. On a CPU it was weighted with 0, and NaN came out."""
    given = lane.inputs(USED)
    behind = given.case.used[0]
    x = given.tensors[name]
    (x[0, :, :, behind:] if name == "attn_bias" else x[0, :, behind:]).fill_(float("nan"))
    got = lane.check(given)
    assert not any(x.isnan().any() for x in got.values())
    assert not (
        got["dk"][0, :, behind:].any() or got["dv"][0, :, behind:].any() or got["dbias"][0, :, :, behind:].any()
    )


@lanes(REFERENCE, INTERPRETER, GPU_HALF)  # the Hopper kernels make some of them NaN, see NOTES_backward.md
@pytest.mark.parametrize("name", ["q", "v", "alibi_slopes", "do"])
def test_keys_behind_those_in_use_get_no_gradient_of_nan(lane, name):
    """Where it belongs to their head; nobody sees them."""
    given = lane.inputs(USED)
    behind = given.case.used[0]
    (given.do if name == "do" else given.tensors[name])[0].fill_(float("nan"))
    for got in (lane.run(given), cases.exact(given)):
        assert got["dk"].isnan().any() and got["dbias"].isnan().any()
        assert not (
            got["dk"][0, :, behind:].any() or got["dv"][0, :, behind:].any() or got["dbias"][0, :, :, behind:].any()
        )


@lanes()
@pytest.mark.parametrize("name", ["sink", "sink_dead_rows", "packed_sink"])
def test_nan_in_a_sink_reaches_its_head(lane, name):
    """Rows of a head whose sink is NaN are NaN, those that see no key too; a sink of -inf is none."""
    given = lane.inputs(cases.CASES[name])
    given.tensors["learnable_sink"][:] = torch.tensor([float("nan"), -INF])
    got, exact = lane.run(given), cases.exact(given)
    for result in (got, exact):
        for x, axis in ((result["lse"], result["lse"].dim() - 2), (result["out"], 1)):
            spoilt, clean = x.unbind(axis)
            assert spoilt.isnan().all() and not clean.isnan().any()
    assert got["dsink"][0].isnan() and got["dsink"][1] == 0


@lanes(INTERPRETER, GPU_HALF, GPU_BFLOAT)
@pytest.mark.parametrize("name", ["full", "causal", "gqa"])
def test_outliers(lane, name):
    """Row 44: within the error budget on inputs with 0.1 % of entries ten times as large, too."""
    lane.check(lane.inputs(replace(cases.CASES[name], outliers=True)))


@lanes()
@pytest.mark.parametrize("nk", [33, 65, 97, 129, 34])
def test_broadcast_heads_at_odd_lengths(lane, nk):
    """Row 14: heads expanded with stride 0, key lengths one above a multiple of 32."""
    q = lane.randn(1, 8 if lane.device == "cuda" else 2, 5, 64)
    k, v = (lane.randn(1, 1, nk, 64, seed=s).expand(-1, q.shape[1], -1, -1) for s in (1, 2))
    out = flash_attn(q, k, v, impl=lane.impl)
    assert torch.equal(out, flash_attn(q, k.contiguous(), v.contiguous(), impl=lane.impl))


@lanes()
@pytest.mark.parametrize("layout", ["offset", "padded"])
@pytest.mark.parametrize("which", ["inputs", "gradient"])
def test_misaligned(lane, layout, which):
    """Row 16: an address or a row stride that 16 bytes do not divide, for inputs and for dO."""
    plain = [lane.randn(1, 2, 33, 64, seed=s) for s in range(4)]
    odd = [laid_out(x, layout) if (s == 3) == (which == "gradient") else x for s, x in enumerate(plain)]

    def results(q, k, v, do):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn(*leaves, causal=True, impl=lane.impl)
        return out, *torch.autograd.grad(out, leaves, do)

    for a, b in zip(results(*odd), results(*plain), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3 if lane.dtype == torch.float16 else 1e-2)


@lanes()
def test_views_of_a_fused_projection(lane):
    """Row 17: q, k, v split out of one packed projection, at storage offsets of their own, without a copy."""
    n, h, d = 40, 2, 24
    for odd in (0, 3):
        buffer = lane.randn(1, n, 3 * h * d + odd)[..., odd:]
        q, k, v = (x.unflatten(-1, (h, d)).transpose(1, 2) for x in buffer.split(h * d, -1))
        assert q.data_ptr() == buffer.data_ptr() and not q.is_contiguous()
        want = flash_attn(*(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)), impl=lane.impl)
        torch.testing.assert_close(flash_attn(q, k, v, impl=lane.impl), want, rtol=0, atol=1e-2)


@lanes()
def test_transposed_gradient(lane):
    """Row 11: the incoming gradient is a transposed view."""
    leaves = [lane.randn(2, 40, 2, 16, seed=s).transpose(1, 2).requires_grad_() for s in range(3)]
    g = lane.randn(2, 2, 40, 16, seed=5)
    odd = torch.empty(2, 40, 2, 16, device=g.device, dtype=g.dtype).transpose(1, 2).copy_(g)
    results = [torch.autograd.grad(flash_attn(*leaves, impl=lane.impl), leaves, x) for x in (g, odd)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@lanes()
@pytest.mark.parametrize(("name", "shape"), [("alibi_slopes", (2,)), ("learnable_sink", (2,)), ("attn_bias", (5, 7))])
def test_a_sign_in_a_flag(lane, name, shape):
    """torch keeps the sign of a conjugate's imaginary part in a flag, which a kernel that gets an address does not see."""
    q, k, v = (lane.randn(1, 2, n, 16, seed=s) for s, n in enumerate((5, 7, 7)))
    numbers = torch.complex(torch.zeros(shape), torch.rand(shape) + 1.0).to(lane.device).conj().imag
    assert numbers.is_neg() and numbers.lt(0).all()
    got, want = (flash_attn(q, k, v, **{name: x}, impl=lane.impl) for x in (numbers, numbers.resolve_neg()))
    assert torch.equal(got, want)


def signless(x):
    """x with its signs turned in memory and a flag that says so, as torch gives the imaginary part of a conjugate."""
    return torch._neg_view(-x.detach()).requires_grad_(x.requires_grad)


@lanes()
@pytest.mark.parametrize(
    ("packed", "name"),
    [(packed, name) for packed in (False, True) for name in ("q", "k", "v", "do", "dlse", "seqused_k")]
    + [(True, "cu_seqlens")],
)
def test_a_sign_in_a_flag_of_any_tensor(lane, name, packed):
    """The plain tensors' call comes first: what is kept for it, by address and layout, is not for these."""
    shapes = ((9, 2, 16), (2, 9)) if packed else ((2, 2, 9, 16), (2, 2, 9))
    plain = {key: lane.randn(*shapes[0], seed=s) for s, key in enumerate(("q", "k", "v", "do"))}
    plain["dlse"] = lane.randn(*shapes[1]).to(torch.float64 if lane.dtype == torch.float64 else torch.float32)
    for key, numbers in (("cu_seqlens", [0, 4, 9]), ("seqused_k", [3, 5])):
        plain[key] = torch.tensor(numbers, dtype=torch.int32, device=lane.device)

    def results(t):
        leaves = [t[key].detach().requires_grad_() for key in "qkv"]
        options = dict(seqused_k=t["seqused_k"], return_lse=True, impl=lane.impl)
        if name != "seqused_k":
            options.pop("seqused_k")
        if packed:
            found = flash_attn_varlen(*leaves, t["cu_seqlens"], t["cu_seqlens"], 5, 5, **options)
        else:
            found = flash_attn(*leaves, **options)
        return *found, *torch.autograd.grad(found, leaves, (t["do"], t["dlse"]))

    want = results(plain)
    odd = plain | {name: signless(plain[name])}
    assert odd[name].is_neg() and odd[name].equal(plain[name])
    for got, right in zip(results(odd), want, strict=True):
        assert not got.is_neg()
        assert torch.equal(got, right)


def test_packing_with_signs_in_a_flag():
    """Values, lengths and starts; and gradients on the way back."""
    x, lengths = (
        torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True),
        torch.tensor([3, 1]),
    )
    want, got = pack(x, lengths), pack(signless(x), signless(lengths))
    assert got.values.equal(want.values) and got.cu_seqlens.equal(want.cu_seqlens) and got.max_seqlen == 3
    padded = unpack(signless(want.values), signless(want.cu_seqlens), 4)
    assert padded.equal(unpack(want.values, want.cu_seqlens, 4))
    grads = [torch.autograd.grad(pack(x, lengths).values, x, do)[0] for do in (want.values, signless(want.values))]
    assert grads[0].equal(grads[1])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_an_operator_gets_signs_in_memory(packed):
    """Under torch.compile; the dispatcher sees to it."""
    q, k, v = (torch.randn(*((7, 2, 8) if packed else (1, 2, 7, 8))) for _ in range(3))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    call = (lambda *qkv: flash_attn_varlen(*qkv, cu, cu, 4, 4)) if packed else flash_attn
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert compiled(signless(q), signless(k), signless(v)).equal(call(q, k, v))


STEEP = [
    (slope, causal, nq, nk) for slope in (1e38, 3e38, -3e38) for causal, nq, nk in ((True, 40, 50), (False, 50, 40))
]


def check_steep_slope(lane, slope, causal, nq, nk, d=16, **options):
    """Out and dV against the key that has all the weight: the nearest one, or the farthest; the first slope is 0.25."""
    q, k, v, do = (lane.randn(1, 2, n, d, seed=s).requires_grad_() for s, n in enumerate((nq, nk, nk, nq)))
    slopes = torch.tensor([0.25, slope], device=lane.device)
    out, lse = flash_attn(q, k, v, causal=causal, alibi_slopes=slopes, return_lse=True, impl=lane.impl, **options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    place = torch.arange(nq, device=lane.device) + nk - nq
    first, last = (place - 0).abs(), (place - (nk - 1)).abs()
    key = place.clamp(0, nk - 1) if slope > 0 else (last > first).long() * (nk - 1) * (not causal)
    assert torch.equal(out[:, 1], v[:, 1, key])
    assert lse.isfinite().all() and all(x.isfinite().all() for x in (out, dq, dk, dv))
    if slope > 0 and causal:  # LSE is that of one key near 0: fp32 resolves it, and gradients are not left out
        right = torch.zeros_like(v[:, 1]).index_add_(1, key, do.detach()[:, 1])
        torch.testing.assert_close(dv[:, 1], right, rtol=1e-3, atol=1e-3)
        assert dq[:, 1].abs().max() < 1e-2 and dk[:, 1].abs().max() < 1e-2
    tame = flash_attn(q[:, :1], k[:, :1], v[:, :1], causal=causal, alibi_slopes=slopes[:1], impl=lane.impl, **options)
    assert torch.equal(out[:, :1], tame)


@lanes(REFERENCE, replace(REFERENCE, name="reference_fp16", dtype=torch.float16), INTERPRETER, GPU_HALF, GPU_BFLOAT)
@pytest.mark.parametrize("options", [{}, {"softmax_scale": 1e-3}, {"softmax_scale": 1e-8}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize(("slope", "causal", "nq", "nk"), STEEP)
def test_alibi_so_steep_that_float32_would_overflow(lane, slope, causal, nq, nk, options):
    """Divided by the scale, or times a distance, the slope was infinite, and the output NaN."""
    check_steep_slope(lane, slope, causal, nq, nk, **options)


@lanes()
def test_gradient_of_a_sum(lane):
    """Row 12: sum().backward() sends one number expanded with strides 0."""
    leaves = [lane.randn(1, 2, 5, 8, seed=s).requires_grad_() for s in range(3)]
    y = flash_attn(*leaves, causal=True, impl=lane.impl)
    by_sum = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    by_ones = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for a, b in zip(by_sum, by_ones, strict=True):
        assert torch.equal(a, b)


@lanes()
def test_inputs_are_left_alone(lane):
    """Nothing is written into q, k, v, dO or the features' tensors."""
    given = lane.inputs(cases.CASES["bias_shared_by_heads"])
    before = {n: t.clone() for n, t in given.tensors.items()}
    do = given.do.clone()
    lane.run(given)
    assert all(torch.equal(before[n], t) for n, t in given.tensors.items())
    assert torch.equal(do, given.do)
