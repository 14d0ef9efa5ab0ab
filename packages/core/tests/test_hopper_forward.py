"""The Hopper forward: what it takes, that it compiles well without a GPU, and that it is right on one."""

import dataclasses
import types
import weakref

import pytest
import torch

from flashtri_core.problem import Extras
from flashtri_core.reference import eager_attention
from flashtri_core.testing import aot
from flashtri_core.testing.cases import problem

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")
from flashtri_core.kernels.hopper import common  # noqa: E402  (behind the check for Triton)
from flashtri_core.kernels.hopper import launch_forward as hopper  # noqa: E402  (behind the check for Triton)

HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]


# ------------------------------------------------------------------------------------------------------ no kernel
def dense(d=128, dv=None, n=256, heads=(4, 2), dtype=torch.float16, device="cpu"):
    shapes = ((2, heads[0], n, d), (2, heads[1], n, d), (2, heads[1], n, dv or d))
    return tuple(torch.empty(s, dtype=dtype, device=device) for s in shapes)


@pytest.fixture
def on_hopper(monkeypatch):
    """Answers as if tensors were on a Hopper GPU and Triton were one that is supported."""
    monkeypatch.setattr(hopper, "target_of", lambda device: types.SimpleNamespace(capability=90, multiprocessors=132))
    monkeypatch.setattr(hopper, "triton_version", lambda: (3, 6))
    return types.SimpleNamespace(type="cuda", index=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(dropout_p=0.1), "dropout_p"),
        (dict(bias=True), "attn_bias"),
        (dict(mask=True), "attn_mask"),
        (dict(head_dim=100), "multiples of 8"),
        (dict(head_dim=264), "outside 1..256"),
        (dict(head_dim=64, head_dim_v=128), "no common tile"),
        (dict(dtype=torch.float32), "float16 and bfloat16"),
        (dict(seqlen_k=0), "empty"),
        (dict(softmax_scale=1e9), "softmax_scale beyond 10000"),
    ],
)
def test_reason_names_what_is_missing(on_hopper, change, words):
    q, k, v = dense()
    fine = problem(q, k, v)
    assert hopper.problem_reason(fine, on_hopper) == ""
    assert words in hopper.problem_reason(dataclasses.replace(fine, **change), on_hopper)


def test_a_feature_that_is_not_listed_is_refused(on_hopper, monkeypatch):
    """Whoever adds a feature to the plain kernels has not added it here."""
    p = dataclasses.replace(problem(*dense()), sink=True, causal=True)
    assert hopper.problem_reason(p, on_hopper) == ""
    monkeypatch.setattr(hopper, "TAKEN", hopper.TAKEN - {"sink"})
    assert hopper.problem_reason(p, on_hopper) == "sink is not in the Hopper kernels"


def test_reason_on_another_device_and_triton(on_hopper, monkeypatch):
    p = problem(*dense())
    assert "compute capability 9.0" in hopper.problem_reason(p, torch.device("cpu"))
    monkeypatch.setattr(hopper, "triton_version", lambda: (3, 10))
    assert "found (3, 10)" in hopper.problem_reason(p, on_hopper)


def test_tma_reasons():
    x = torch.empty(2, 4, 64, 72, dtype=torch.float16)
    assert common.tma_reason("q", x) == ""
    assert common.tma_reason("q", x[..., :64]) == ""
    assert "stride 72" not in common.tma_reason("q", x)
    assert "16 bytes" in common.tma_reason("q", x[..., 4:68])
    assert "multiples of 16 bytes" in common.tma_reason("q", torch.empty(2, 4, 64, 68, dtype=torch.float16)[..., :64])
    assert "head dimension" in common.tma_reason("q", x.transpose(-1, -2))
    assert "float32" in common.tma_reason("q", x.float())
    assert common.tma_reason("q", torch.empty(1, 1, 1, 64, dtype=torch.float16).expand(2, 4, 64, 64)) == ""


def test_axes_of_size_one_get_strides_that_tma_accepts():
    x = torch.empty(1, 3, 1, 64, dtype=torch.float16).as_strided((1, 3, 1, 64), (7, 64, 3, 1))
    assert common.tma_strides(x) == (8, 64, 8, 1)
    assert common.tma_reason("q", x) == ""


def test_constants_compare_by_value():
    config = hopper.ForwardConfig()
    same, other = common.Constants(hopper.ForwardConfig()), common.Constants(dataclasses.replace(config, block_n=64))
    assert common.Constants(config) == same
    assert hash(common.Constants(config)) == hash(same)
    assert repr(same) != repr(other)
    assert same != other


def test_a_stream_has_one_counter_and_a_captured_graph_its_own(monkeypatch):
    """A graph may be replayed on any stream: a counter that it shared would be claimed from twice at a time."""
    now = types.SimpleNamespace(stream=0, capturing=False)
    monkeypatch.setattr(hopper, "_counters", {})
    active = types.SimpleNamespace(get_current_stream=lambda device: now.stream)
    monkeypatch.setattr(hopper, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    default = hopper._counter(torch.device("cpu"))
    assert hopper._counter(torch.device("cpu")) is default
    now.stream = 7
    side = hopper._counter(torch.device("cpu"))
    assert side is not default and hopper._counter(torch.device("cpu")) is side
    now.capturing = True
    one, two = (hopper._counter(torch.device("cpu")) for _ in range(2))
    assert len({id(x) for x in (default, side, one, two)}) == 4


def test_named_release_serves_two_stages():
    """With four, the barriers ran past the sixteen that there are: an illegal instruction on the GPU."""
    assert hopper.ForwardConfig(named_release=True, kv_stages=2)
    assert hopper.ForwardConfig(kv_stages=4)
    with pytest.raises(ValueError, match="named_release: got True with kv_stages=3"):
        dataclasses.replace(hopper.ForwardConfig(named_release=True), kv_stages=3)


# ------------------------------------------------------------------------------------------------ ahead of time
def compile_for(problem_, extras, tensors, config=None):
    """The kernel that a problem launches, compiled."""
    plan = hopper.plan(problem_, config, 132)
    q, k, v = tensors
    out = torch.empty(q.shape[:-1] + v.shape[-1:], dtype=q.dtype)
    lse = torch.empty(q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0]))
    counter = torch.zeros(2, dtype=torch.int32) if plan.config.order == "dynamic" else None
    arguments = hopper.pack(plan, problem_, q, k, v, extras, out, lse, None, counter)
    kernel = hopper.attn_fwd_hopper.warmup(
        *common.for_triton(arguments), num_warps=4, maxnreg=plan.registers, grid=(1,)
    )
    return aot.resources(kernel, 90, disassemble=True)


#: Kernels with a mask on both sides, another score, or packed sequences keep more scalars of a tile (where it lies, how
#: long its sequence is) than registers are left; a few words of them wait in local memory across the tile. The
#: accumulators never do: that would be hundreds of bytes.
FEW_WORDS = 32

SHARED_OF_A_MULTIPROCESSOR, RESERVED = 228 << 10, 1 << 10  # bytes; the second of every thread block


def assert_good(kernel, spill_bytes=0):
    aot.check_hopper(kernel, spill_bytes)
    if spill_bytes == 0:
        assert "STL" not in kernel.sass  # no store to local memory, whatever the reason


@pytest.mark.aot
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_three_warpgroups_compile(sm90, causal):
    """160 registers each: nothing spills in full attention with Triton 3.6, else some scalars of a tile do."""
    tensors = dense(64, n=8192, heads=(1, 1))
    p = problem(*tensors, causal=causal)
    assert hopper.tiles(p) == hopper.THREE_WARPGROUPS
    old = triton.__version__ < "3.7"
    bytes_ = (5 * FEW_WORDS if old else 6 * FEW_WORDS) if causal else (0 if old else 4 * FEW_WORDS)
    assert_good(compile_for(p, Extras(), tensors), spill_bytes=bytes_)


@pytest.mark.aot
def test_short_causal_compiles(sm90):
    """Two blocks share a multiprocessor: half of its shared memory and registers each."""
    tensors = dense(128, n=1024)
    p = problem(*tensors, causal=True)
    assert hopper.tiles(p) == hopper.TWO_BLOCKS
    kernel = compile_for(p, Extras(), tensors)
    assert_good(kernel)
    assert 2 * (kernel.shared + RESERVED) <= SHARED_OF_A_MULTIPROCESSOR


@pytest.mark.aot
def test_three_blocks_share_a_multiprocessor(sm90):
    """The tiles of D <= 64 count on a third of shared memory and registers."""
    tensors = dense(64)
    p = problem(*tensors, causal=True)
    assert hopper.tiles(p) == hopper.THREE_BLOCKS
    kernel = compile_for(p, Extras(), tensors)
    assert_good(kernel)
    assert 3 * (kernel.shared + RESERVED) <= SHARED_OF_A_MULTIPROCESSOR
    assert 3 * 256 * kernel.registers <= 65536


def delays(sass):
    """How many instructions after the wait for O V's buffer is released, in each loop over key blocks."""
    found = []
    for loop in aot.main_loops(sass):
        waits = [n for n, text in enumerate(loop) if "WARPGROUP.DEPBAR" in text]
        if len(waits) == 2 and "gsb0, 0x0" not in loop[waits[0]]:  # the wait for S leaves products with V in flight
            found += [n for n, text in enumerate(loop[waits[-1] :]) if "BAR.ARV" in text][:1] or [len(loop)]
    return found


@pytest.mark.aot
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS, ids=str)
def test_shipped_tiles_compile(sm90, d, dv, mask):
    tensors = dense(d, dv, dtype=torch.bfloat16)
    kw = {"full": {}, "causal": dict(causal=True), "window": dict(window_left=100, window_right=0)}[mask]
    kernel = compile_for(problem(*tensors, **kw), Extras(), tensors)
    few = mask == "window" or (
        mask == "causal" and d in (96, 256) and triton.__version__ >= "3.7"
    )  # 4, 16 bytes with 3.9
    assert_good(kernel, spill_bytes=FEW_WORDS if few else 0)
    assert "UTMASTG" in kernel.sass
    if hopper.tiles(problem(*tensors, **kw)).named_release:
        assert max(delays(kernel.sass)) <= 16
    assert not any("PRMT" in text for loop in aot.main_loops(kernel.sass) for text in loop)  # see common.in_16_bits


FEATURES = {
    "ragged": (dict(seqlen_k=250), {}),
    "softcap": (dict(causal=True, softcap=30.0), {}),
    "sink": (dict(causal=True), dict(learnable_sink=torch.zeros(4))),
    "alibi": (dict(causal=True), dict(alibi_slopes=torch.zeros(4))),
    "softcap, alibi": (dict(causal=True, softcap=30.0), dict(alibi_slopes=torch.zeros(4))),
    "negative scale": (dict(softmax_scale=-0.1), {}),
    "seqused": (dict(causal=True), dict(seqused_k=torch.zeros(2, dtype=torch.int32))),
}


@pytest.mark.aot
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_features_compile(sm90, name, d):
    kw, extra = FEATURES[name]
    kw = dict(kw)
    tensors, extras = dense(d), Extras(**extra)
    p = dataclasses.replace(problem(*tensors, extras, softmax_scale=kw.pop("softmax_scale", 0.1)), **kw)
    assert_good(compile_for(p, extras, tensors), spill_bytes=FEW_WORDS)


@pytest.mark.aot
def test_alibi_costs_a_multiply_add_per_score(sm90):
    """64 scores a thread and 16 instructions for two rows, where no mask is needed and no key lies right of the diagonal."""
    tensors, slopes = dense(128, n=4096), Extras(alibi_slopes=torch.zeros(4))
    plain, biased = (
        min(len(loop) for loop in aot.main_loops(compile_for(problem(*tensors, x, causal=True), x, tensors).sass))
        for x in (Extras(), slopes)
    )
    assert 0 < biased - plain <= 64 + 16


@pytest.mark.aot
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_packed_kernels_compile(sm90, d, causal):
    cu = torch.zeros(4, dtype=torch.int32)
    tensors = tuple(torch.empty(512, heads, d, dtype=torch.float16) for heads in (4, 2, 2))
    extras = Extras(cu_seqlens_q=cu, cu_seqlens_k=cu)
    kernel = compile_for(problem(*tensors, extras, 256, 256, causal=causal), extras, tensors)
    assert_good(kernel, spill_bytes=FEW_WORDS)
    assert "STG.E.128" in kernel.sass  # rows leave in 16-byte pieces


# ---------------------------------------------------------------------------------------------------------- GPU
def budget(found, exact, eager):
    """The project's error budget against same-dtype eager attention, both measured against fp64."""
    err, base = (found.double() - exact).abs(), (eager.double() - exact).abs()
    assert torch.isfinite(found).all()
    assert err.max() <= 2 * base.max() + 1e-3, (err.max(), base.max())
    assert err.mean() <= 1.2 * base.mean() + 1e-4, (err.mean(), base.mean())


def run(p, q, k, v, extras=Extras(), **kw):
    out = torch.full(q.shape[:-1] + v.shape[-1:], float("nan"), dtype=q.dtype, device=q.device)
    if q.dim() == 4 and q.stride(1) < q.stride(2):
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.full(q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0]), float("nan"), device=q.device)
    row_max = torch.full_like(lse, float("nan"))
    ok, reason = hopper.supports(p, q, k, v, out)
    assert ok, reason
    plan_for(p, q, k, v, extras, out, lse, **kw)(q, k, v, extras, out, lse, row_max)
    return out, lse, row_max


PLANS = {}


def plan_for(p, q, k, v, extras, out, lse, **kw):
    """Plans are kept, as the operators keep them, so that most calls here take the quick path."""
    layouts = tuple((x.stride(), x.data_ptr() & 15) for x in (q, k, v, out))
    key = (p, layouts, tuple(x is None for x in extras), tuple(kw.values()))
    if key not in PLANS:
        PLANS[key] = hopper.Forward(p, q, k, v, extras, out, lse, **kw)
    return PLANS[key]


def check(p, q, k, v, extras=Extras(), **kw):
    out, lse, row_max = run(p, q, k, v, extras, **kw)
    wide = Extras(*(x.double() if x is not None and x.is_floating_point() else x for x in extras))
    exact, exact_lse, exact_max = eager_attention(q.double(), k.double(), v.double(), p, wide)
    eager = eager_attention(q, k, v, p, extras)[0]
    budget(out, exact, eager)
    seen = exact_lse > float("-inf")
    tolerance = 2e-3 if p.softcap == 0 else 2e-2  # tanh.approx: relative error 2^-11 on scores up to softcap
    assert torch.equal(seen, lse > float("-inf"))
    torch.testing.assert_close(lse[seen].double(), exact_lse[seen], atol=tolerance, rtol=1e-4)
    seen_max = exact_max > float("-inf")
    torch.testing.assert_close(row_max[seen_max].double(), exact_max[seen_max], atol=tolerance, rtol=1e-3)
    assert not out.transpose(1, 2)[(~seen).transpose(1, 2)].any()


def randn(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def qkv(d, dv=None, nq=333, nk=517, heads=(4, 2), dtype=torch.bfloat16, rows_first=False):
    def make(h, n, width, seed):
        if rows_first:
            return randn(2, n, h, width, dtype=dtype, seed=seed).transpose(1, 2)
        return randn(2, h, n, width, dtype=dtype, seed=seed)

    return make(heads[0], nq, d, 1), make(heads[1], nk, d, 2), make(heads[1], nk, dv or d, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv"), [*HEAD_DIMS, (32, 32), (80, 80), (168, 168)], ids=str)
def test_head_dims(d, dv, causal, dtype):
    q, k, v = qkv(d, dv, dtype=dtype, rows_first=causal)
    check(problem(q, k, v, causal=causal), q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 700), (128, 128), (129, 127), (700, 64), (512, 512), (300, 5)])
def test_lengths(nq, nk, causal):
    q, k, v = qkv(128, nq=nq, nk=nk)
    check(problem(q, k, v, causal=causal), q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(0, 0), (100, 0), (100, 30), (-1, 20), (50, -1), (300, 0), (7, 3)])
@pytest.mark.parametrize("d", [64, 128])
def test_windows(window, d):
    for nq, nk in ((600, 600), (300, 700), (700, 300)):
        q, k, v = qkv(d, nq=nq, nk=nk)
        check(problem(q, k, v, window_left=window[0], window_right=window[1]), q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", ["softcap", "sink", "alibi", "softcap, alibi", "all", "negative scale", "zero scale"])
def test_features(name, d):
    q, k, v = qkv(d)
    slopes = torch.tensor([0.5, 0.25, 0.01, 2.0], device="cuda") if "alibi" in name or name == "all" else None
    sink = torch.tensor([0.0, 3.0, -2.0, 8.0], device="cuda") if name in ("sink", "all") else None
    extras = Extras(alibi_slopes=slopes, learnable_sink=sink)
    scale = {"negative scale": -0.1, "zero scale": 0.0}.get(name, d**-0.5)
    capped = 5.0 if "softcap" in name or name == "all" else 0.0
    left = 150 if name == "all" else -1
    p = problem(q, k, v, extras, causal=True, softcap=capped, softmax_scale=scale, window_left=left)
    check(p, q, k, v, extras)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_seqused_ignores_what_lies_behind(d, causal):
    q, k, v = qkv(d, nq=260, nk=517)
    used = torch.tensor([517, 139], dtype=torch.int32, device="cuda")
    extras = Extras(seqused_k=used)
    p = problem(q, k, v, extras, causal=causal)
    clean = run(p, q, k, v, extras)
    for z in range(2):
        short = [x[z : z + 1, :, : int(used[z])] for x in (k, v)]
        alone = run(problem(q[z : z + 1], *short, causal=causal), q[z : z + 1], *short)
        assert torch.equal(alone[0], clean[0][z : z + 1])
        assert torch.equal(alone[1], clean[1][z : z + 1])
        k[z, :, int(used[z]) :] = float("nan")
        v[z, :, int(used[z]) :] = float("nan")
    poisoned = run(p, q, k, v, extras)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_packed_equals_one_by_one(d, causal):
    lengths_q, lengths_k = [1, 128, 300, 0, 77, 513], [5, 128, 260, 3, 0, 700]
    cu_q, cu_k = (torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (lengths_q, lengths_k))
    q, k, v = (randn(sum(n), h, d, seed=i) for i, (n, h) in enumerate(((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))))
    for x in (k, v):  # NaN in sequences 1 and 2, right behind the keys of sequences 0 and 1, stays there
        x[cu_k[1:3].long()] = float("nan")
    extras = Extras(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    p = problem(q, k, v, extras, max(lengths_q), max(lengths_k), causal=causal)
    out, lse, _max = run(p, q, k, v, extras)
    for s, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows = slice(int(cu_q[s]), int(cu_q[s]) + nq)
        keys = slice(int(cu_k[s]), int(cu_k[s]) + nk)
        if nk == 0:
            assert not out[rows].any()
            assert (lse[:, rows] == float("-inf")).all()
        elif nq:
            parts = [x[span].transpose(0, 1)[None] for x, span in ((q, rows), (k, keys), (v, keys))]
            alone, alone_lse, _max = run(problem(*parts, causal=causal), *parts, config=hopper.tiles(p))
            torch.testing.assert_close(out[rows], alone[0].transpose(0, 1), atol=0, rtol=0, equal_nan=True)
            torch.testing.assert_close(lse[:, rows], alone_lse[0], atol=0, rtol=0, equal_nan=True)
            assert s in (1, 2) or torch.isfinite(out[rows]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_equal_huge_scores_weigh_the_same(d):
    """Blocks of keys are brought to a common maximum without an error: here it would be per cents for each block."""
    n = 4096
    q, k = (
        torch.full((1, 1, 200, d), 480.0, device="cuda", dtype=torch.float16),
        torch.full((1, 1, n, d), -400.0, device="cuda", dtype=torch.float16),
    )
    v = torch.linspace(0, 1, n, device="cuda", dtype=torch.float16)[None, None, :, None].expand(1, 1, n, d).contiguous()
    out, _lse, _max = run(problem(q, k, v), q, k, v)
    torch.testing.assert_close(out.float(), torch.full_like(out.float(), 0.5), atol=2e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_scores_too_large_for_a_multiply_add(d):
    """Exact in one block of keys, NaN in more: never a weight that is silently wrong."""
    x = torch.full((1, 1, 300, d), 133120.0, device="cuda", dtype=torch.bfloat16)
    k = x[:, :, :50].contiguous()
    out, _lse, _max = run(problem(x, k, k), x, k, k)
    assert (out == 133120.0).all()
    out, _lse, _max = run(problem(x, x, x), x, x, x)
    assert (out.isnan() | (out == 133120.0)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["single", "static", "dynamic"])
def test_orders_agree(order):
    q, k, v = qkv(128, nq=1100, nk=1100, heads=(16, 4))
    p = problem(q, k, v, causal=True)
    want = run(p, q, k, v)
    for _ in range(3):  # the dynamic order's counter must be zero again
        got = run(p, q, k, v, config=dataclasses.replace(hopper.tiles(p), order=order))
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "causal"), [(64, True), (128, True), (128, False), (256, True)])
def test_a_thousand_runs_are_bitwise_equal(d, causal):
    q, k, v = qkv(d, nq=1000, nk=1000, heads=(16, 4))
    p = problem(q, k, v, causal=causal)
    want = run(p, q, k, v)
    load = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    for i in range(1000):
        if i % 10 == 0:
            with torch.cuda.stream(side):  # other work on the machine shifts the timing
                load @ load
        got = run(p, q, k, v)
        assert torch.equal(want[0], got[0]), i
        assert torch.equal(want[1], got[1]), i


@pytest.mark.gpu
def test_cuda_graph_replays():
    q, k, v = qkv(128, nq=512, nk=512)
    p = problem(q, k, v, causal=True)
    want = run(p, q, k, v)[0]
    out, lse = torch.zeros_like(want), torch.zeros(q.shape[:3], device="cuda")
    forward = hopper.Forward(p, q, k, v, Extras(), out, lse)
    forward(q, k, v, Extras(), out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(q, k, v, Extras(), out, lse)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.gpu
def test_repeated_calls_take_the_quick_path_and_keep_no_tensor(monkeypatch):
    q, k, v = qkv(128)
    p = problem(q, k, v)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    forward = hopper.Forward(p, q, k, v, Extras(), out, lse)
    monkeypatch.setattr(common.Launches, "run_slowly", None)
    for _ in range(3):
        forward(q, k, v, Extras(), out, lse)
    kept = [weakref.ref(x) for x in (q, k, v, out, lse)]
    del q, k, v, out, lse
    assert not any(x() is not None for x in kept)
