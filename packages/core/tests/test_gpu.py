"""What only a GPU shows: sizes past 2^31, memory, bits from run to run, graphs, streams, second devices."""

import os
import subprocess
import sys

import pytest
import torch

from flashtri_core import flash_attn, flash_attn_varlen, supports
from flashtri_core.testing import budget, cases
from flashtri_core.testing.cases import AXES, CASES, Case
from flashtri_core.testing.plugin import GPU_BFLOAT, GPU_HALF, lanes

pytestmark = pytest.mark.gpu

GPU = (GPU_HALF, GPU_BFLOAT)
DIMS = [(d, d) for d in (8, 25, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)]
DIMS += [(40, 24), (64, 25), (192, 128), (128, 256), (64, 128), (24, 96), (256, 8)]


def normal(*shape, seed=0, dtype=torch.bfloat16):
    """Drawn on the device: large tensors."""
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(seed))


def grads(q, k, v, do, impl="auto", **features):
    """out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attn(*leaves, impl=impl, **features)
    return out.detach(), *torch.autograd.grad(out, leaves, do)


def close(got, want, tolerance=2e-2):
    """Equal up to another order of summation."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@lanes(*GPU)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("d", "dv"), DIMS)
def test_head_dims(lane, d, dv, causal, poisoned):
    """Rows 22, 23, 24: every head dimension, V as wide as K or not (40 with 24 and 64 with 25 once came out wrong)."""
    lane.check(
        cases.inputs(Case("dims", batch=2, heads=(4, 2), nq=200, nk=264, d=d, dv=dv, causal=causal), lane.dtype, "cuda")
    )


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_large(impl, dtype, d, outliers, causal, poisoned):
    """Row 44: the reported size and larger, both dtypes, also with 0.1 % of entries ten times as large."""
    given = cases.inputs(
        Case("large", batch=2, heads=(4, 2), nq=2048, nk=2048, d=d, causal=causal, outliers=outliers), dtype, "cuda"
    )
    budget.check(cases.run(given, impl), cases.exact(given), cases.exact(given, dtype))


@lanes(*GPU)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_one_below_a_block_multiple(lane, causal):
    """Row 26: S = 4095, 4096, 4097 have the same level of error."""
    errors = []
    for n in (4095, 4096, 4097):
        given = cases.inputs(Case("edge", heads=(4, 4), nq=n, nk=n, d=64, causal=causal), lane.dtype, "cuda")
        errors.append(
            (lane.run(given, backward=False)["out"] - cases.exact(given, backward=False)["out"]).abs().max().item()
        )
    assert max(errors) < 2.5 * min(errors), errors


# ------------------------------------------------------------------------------------------------ past 2^31
@pytest.mark.alone
def test_huge_batch(roomy):
    """Row 1: scratch offsets past 2^31 at a batch of 15000; gradients are those of four slices."""
    roomy(60)
    q, k, v, do = (normal(15000, 16, 64, 128, seed=s, dtype=torch.float16) for s in range(4))
    whole = grads(q, k, v, do)
    for n in range(0, 15000, 3750):
        part = slice(n, n + 3750)
        for a, b in zip(whole, grads(q[part], k[part], v[part], do[part]), strict=True):
            assert torch.equal(a[part], b)


@pytest.mark.alone
@pytest.mark.parametrize("batch", [690, 700, 710])
def test_sequence_major_keys(batch, roomy):
    """Row 3: K and V stored sequence-major: row index times a row stride of 89600 passes 2^31."""
    roomy(30)
    q, do = normal(batch, 1, 256, 128, seed=1), normal(batch, 1, 256, 128, seed=2)
    k, v = (normal(24000, batch, 1, 128, seed=s).permute(1, 2, 0, 3) for s in (3, 4))
    out, dq, dk, dv = grads(q, k, v, do)
    for n in (0, batch - 1):
        one = [x[n : n + 1].contiguous() for x in (q, k, v, do)]
        close([x[n : n + 1] for x in (out, dq, dk, dv)], grads(*one))


@pytest.mark.alone
def test_fused_view_past_two_to_the_31(roomy):
    """Row 5: V a strided view into a fused buffer of 100480 rows: rows that read the last keys are right."""
    roomy(14)
    n, h, d = 100480, 56, 128
    buffer = normal(1, n, 3 * h * d)
    q, k, v = (x.unflatten(-1, (h, d)).transpose(1, 2) for x in buffer.split(h * d, -1))
    rows = slice(n - 128, n)
    out = flash_attn(q[:, :, rows], k, v, causal=True)
    want = flash_attn(q[:, :, rows].contiguous(), k.contiguous(), v.contiguous(), causal=True)
    close([out], [want], 1e-2)
    late = torch.zeros(1, 1, 1, n, dtype=torch.bool, device="cuda")
    late[..., 99968:] = True
    got = flash_attn(q[:, -1:, rows], k[:, -1:], v[:, -1:], attn_mask=late)
    close(
        [got],
        [flash_attn(q[:, -1:, rows].contiguous(), k[:, -1:, 99968:].contiguous(), v[:, -1:, 99968:].contiguous())],
    )


@pytest.mark.alone
def test_grouped_keys_past_two_to_the_31(roomy):
    """Row 6: keys expanded to query heads would pass 2^31 elements; gradients are those of single batches."""
    roomy(24)
    q, do = (normal(24, 16, 256, 128, seed=s) for s in (0, 1))
    k, v = (normal(24, 2, 49152, 128, seed=s) for s in (2, 3))
    whole = grads(q, k, v, do)
    for n in (0, 23):
        part = slice(n, n + 1)
        close([x[part] for x in whole], grads(q[part], k[part], v[part], do[part]), 1e-2)


def test_more_than_65535_heads():
    """Row 7: batch x heads past 65535."""
    q, k, v, do = (normal(10923, 6, 32, 16, seed=s, dtype=torch.float16) for s in range(4))
    whole, part = grads(q, k, v, do), grads(*(x[:10922] for x in (q, k, v, do)))
    for a, b in zip(whole, part, strict=True):
        assert torch.equal(a[:10922], b)
        assert a[10922].any()


# ------------------------------------------------------------------------------------------------ memory
def requested(which="current"):
    """Bytes asked of the allocator, which rounds large blocks up by as much as 1 MB."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


@pytest.mark.parametrize("impl", ["triton", "auto"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_memory_is_linear(impl, causal):
    """Beyond inputs, output and gradients: 12 bytes per query row and head, N = 1k..64k; 4 more per dQ element where the
    fused Hopper backward accumulates in float32."""
    heads, d = 2, 64
    for n in (1 << 10, 1 << 12, 1 << 14, 1 << 16):
        q, k, v, do = (normal(1, heads, n, d, seed=s) for s in range(4))
        grads(q, k, v, do, impl, causal=causal)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = requested()
        results = grads(q, k, v, do, impl, causal=causal)
        extra = requested("peak") - before - sum(x.numel() * x.element_size() for x in results)
        allowed = 12 * heads * n + (4 * q.numel() if impl == "auto" else 0)
        assert extra <= allowed + (1 << 16), f"N = {n}: {extra} bytes, {allowed} allowed"
        del results


def test_grouped_backward_makes_no_copies_of_keys():
    """Row 136: the backward of GQA holds nothing of size Hq x Nk x D beyond its outputs."""
    q, do = (normal(4, 16, 1024, 128, seed=s) for s in (0, 1))
    k, v = (normal(4, 2, 12288, 128, seed=s) for s in (2, 3))
    grads(q, k, v, do)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested()
    results = grads(q, k, v, do)
    extra = requested("peak") - before - sum(x.numel() * x.element_size() for x in results)
    assert extra <= 12 * 4 * 16 * 1024 + 4 * q.numel() + (1 << 20)


# ------------------------------------------------------------------------------------------------ determinism, races
REPEATED = [
    "causal", "gqa", "window", "softcap", "alibi", "sink", "bias_shared_by_heads", "mask", "seqused", "dropout",
    "packed_causal", "packed_bias_shared",
]  # fmt: skip


@lanes(*GPU)
@pytest.mark.parametrize("name", REPEATED)
def test_same_bits_every_time(lane, name):
    """Row 79: outputs and every gradient are bit-equal in 30 runs, for each feature."""
    given = lane.inputs(CASES[name])
    given.numbers["deterministic"] = True
    first = lane.run(given)
    for _ in range(29):
        again = lane.run(given)
        assert all(torch.equal(first[n], again[n]) for n in first)


@pytest.mark.parametrize("heads", [(16, 16), (16, 4)], ids=["mha", "gqa"])
def test_same_bits_at_the_reported_size(heads):
    """Row 79: (2, 2048, 16, 128) bfloat16, causal, 30 runs."""
    q, do = (normal(2, heads[0], 2048, 128, seed=s) for s in (0, 1))
    k, v = (normal(2, heads[1], 2048, 128, seed=s) for s in (2, 3))
    first = grads(q, k, v, do, causal=True, deterministic=True)
    for _ in range(29):
        assert all(
            torch.equal(a, b) for a, b in zip(first, grads(q, k, v, do, causal=True, deterministic=True), strict=True)
        )


def test_fifty_backwards_on_one_graph():
    """Row 81: a hidden race shows now and then: fifty backward calls on one graph agree."""
    leaves = [
        normal(300, 1, n, 128, seed=s, dtype=torch.float16).requires_grad_() for s, n in enumerate((2048, 128, 128))
    ]
    out = flash_attn(*leaves)
    do = torch.ones_like(out)
    first = torch.autograd.grad(out, leaves, do, retain_graph=True)
    for _ in range(49):
        close(torch.autograd.grad(out, leaves, do, retain_graph=True), first, 1e-3)


# ------------------------------------------------------------------------------------------------ graphs, streams
def captured(f, *inputs):
    """``f`` as a CUDA graph after a warm-up on a side stream; returns (graph, outputs)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            f(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = f(*inputs)
    return graph, outputs


@pytest.mark.parametrize(
    "features", [{}, dict(causal=True), dict(window_size=(100, 0)), dict(causal=True, softcap=10.0)], ids=str
)
def test_graph(features):
    """Row 88: captured after a warm-up and replayed on other numbers, forward and backward."""
    q, k, v, do = (normal(2, 4, 300, 64, seed=s) for s in range(4))
    graph, outputs = captured(lambda *t: grads(*t, **features), q, k, v, do)
    for seed in (10, 20):
        for n, x in enumerate((q, k, v, do)):
            x.copy_(normal(*x.shape, seed=seed + n))
        graph.replay()
        torch.cuda.synchronize()
        close(outputs, grads(q, k, v, do, **features), 1e-2)


def test_graph_packed():
    """A packed call is captured: nothing is read back; replayed with other lengths it follows them."""
    x = normal(600, 4, 64)
    cu = torch.tensor([0, 200, 600], dtype=torch.int32, device="cuda")
    f = lambda x, cu: flash_attn_varlen(x, x, x, cu, cu, 600, 600, causal=True)
    graph, out = captured(f, x, cu)
    cu.copy_(torch.tensor([0, 450, 600], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    close([out], [f(x, cu)], 1e-2)


def test_graph_dropout_draws_anew():
    """Each replay of a graph drops other entries, as torch's own dropout does."""
    q, k, v = (normal(1, 2, 256, 64, seed=s) for s in range(3))
    graph, out = captured(lambda *t: flash_attn(*t, dropout_p=0.5), q, k, v)
    seen = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        seen.append(out.clone())
    assert not torch.equal(*seen)
    assert seen[0].isfinite().all()


def test_graph_without_warm_up():
    """Row 88: a fresh process that captures at once works, or is told to warm up; it does not crash."""
    code = """
import torch
from flashtri_core import flash_attn
q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.half)
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        out = flash_attn(q, q, q)
except Exception as error:
    print("refused", "warm" in str(error))
else:
    graph.replay()
    torch.cuda.synchronize()
    print("right", torch.allclose(out, flash_attn(q, q, q), atol=1e-3))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.stdout.strip() in ("right True", "refused True"), done.stdout + done.stderr


def test_side_stream():
    """Row 87: kernels go to the current stream, behind what was queued there."""
    q, k, v = (normal(2, 4, 512, 64, seed=s) for s in range(3))
    want = flash_attn(q, k, v, causal=True)
    torch.cuda.synchronize()
    slow = torch.zeros_like(q)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        slow.copy_(q)
        out = flash_attn(slow, k, v, causal=True)
    side.synchronize()
    assert torch.equal(out, want)


# ------------------------------------------------------------------------------------------------ two GPUs
@pytest.mark.multi_gpu
def test_other_device_than_the_current_one():
    """Row 84: tensors on cuda:1 while the current device is 0, forward and backward."""
    q, k, v = (torch.ones(4, 32, 16, 64, device="cuda:1", dtype=torch.half, requires_grad=True) for _ in range(3))
    with torch.cuda.device(0):
        for _ in range(2):  # the second call takes the planned launch
            out = flash_attn(q, k, v)
            out.sum().backward()
            assert torch.cuda.current_device() == 0
    assert out.sum(dtype=torch.float32).item() == 131072
    assert v.grad.sum(dtype=torch.float32).item() == pytest.approx(2 * 131072, rel=1e-3)


@pytest.mark.multi_gpu
def test_two_devices_interleaved():
    """Row 86: calls on two devices in turn equal those on one."""
    q, k, v, do = (normal(2, 4, 300, 64, seed=s) for s in range(4))
    want = grads(q, k, v, do, causal=True)
    other = [x.to("cuda:1") for x in (q, k, v, do)]
    for _ in range(3):
        here, there = grads(q, k, v, do, causal=True), grads(*other, causal=True)
        close(here, want, 1e-3)
        close([x.to("cuda:0") for x in there], want, 1e-3)


# ------------------------------------------------------------------------------------------------ refusals
def test_float32_is_refused():
    """Row 46: float32 on a GPU is refused by name, instead of computed in TF32."""
    q = torch.randn(1, 2, 16, 32, device="cuda")
    with pytest.raises(NotImplementedError, match=r"float16 and bfloat16, got torch\.float32"):
        flash_attn(q, q, q)
    assert not supports(q, q, q)


def test_supports_is_true_for_every_option():
    """No feature and no pair of features is refused: the list of refusals is empty."""
    q = normal(2, 4, 64, 64)
    for entry in (e for entries in AXES.values() for e in entries):
        if "lengths" not in entry and "layouts" not in entry:
            given = cases.inputs(Case("s", batch=2, heads=(4, 4), nq=64, nk=64, d=64, **entry), torch.bfloat16, "cuda")
            rest = {n: t for n, t in given.tensors.items() if n not in "qkv"}
            assert supports(q, q, q, **rest, **given.numbers), entry
    x, cu = normal(128, 4, 64), torch.tensor([0, 60, 128], dtype=torch.int32, device="cuda")
    for impl in ("auto", "triton"):
        assert supports(
            x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=68, max_seqlen_k=68, causal=True, impl=impl
        )
    assert not supports(
        x.float(), x.float(), x.float(), cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=68, max_seqlen_k=68
    )


@pytest.mark.alone
def test_first_result_in_a_new_process_is_soon():
    """Row 123: no tuning on the first call: forward and backward in a new process, cold caches, within 60 seconds."""
    code = """
import time, torch
from flashtri_core import flash_attn
q = torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.cuda.synchronize()
start = time.time()
flash_attn(q, q, q, causal=True).sum().backward()
torch.cuda.synchronize()
print(time.time() - start)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert float(done.stdout) < 60
