"""torch.compile, export, fake tensors and autocast."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode

from flashtri_core import flash_attn, flash_attn_varlen
from flashtri_core.testing.cases import CASES, LAYOUTS, laid_out
from flashtri_core.testing.plugin import GPU_BFLOAT, INTERPRETER, REFERENCE, Lane, lanes

# Compiling costs seconds: the interpreter's turn adds nothing that the chunked path does not show.
WHERE = (REFERENCE, GPU_BFLOAT)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def backend(lane: Lane) -> str:
    return "inductor" if lane.device == "cuda" else "aot_eager"


class Block(nn.Module):
    """Linear -> attention -> Linear."""

    def __init__(self, lane, packed=False, **features):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.to(lane.device, lane.dtype)
        self.packed, self.features = packed, features | {"impl": lane.impl}

    def forward(self, x, cu=None, longest=0):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        if self.packed:
            o = flash_attn_varlen(q, k, v, cu, cu, longest, longest, **self.features)
        else:
            o = flash_attn(*(t.transpose(1, 2) for t in (q, k, v)), **self.features).transpose(1, 2)
        return self.out(o.flatten(-2))


def same(a, b, lane):
    tolerance = dict(rtol=1e-9, atol=1e-9) if lane.dtype == torch.float64 else dict(rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(a, b, **tolerance)


def compare(lane, block, *arguments, dynamic=None):
    """Compiled without a graph break, outputs and weight gradients are those of the plain module.

    Inductor draws by a generator of its own unless it falls back; dropout then has the plain module's seed.
    """
    compiled = torch.compile(block, fullgraph=True, backend=backend(lane), dynamic=dynamic)
    results = []
    for run in (block, compiled):
        block.zero_grad()
        torch.manual_seed(1)
        with inductor_config.patch(fallback_random=True):
            out = run(*arguments)
            out.float().square().sum().backward()
        results.append((out.detach(), block.qkv.weight.grad.clone()))
    for a, b in zip(*results, strict=True):
        same(a, b, lane)


@lanes(*WHERE)
@pytest.mark.parametrize(
    "features", [{}, dict(causal=True), dict(window_size=(7, 0), softcap=5.0), dict(dropout_p=0.2)], ids=str
)
def test_no_graph_break(lane, features):
    """Row 91: fullgraph compiles forward and backward around the dense call."""
    compare(lane, Block(lane, **features), lane.randn(2, 24, 32))


@lanes(*WHERE)
def test_one_dropout_mask_per_compiled_call(lane):
    """By whichever generator the seed is drawn: backward drops what forward dropped, and the next call something else.

    With v and dO the identity, the output is P after dropout and dV is its transpose.
    """
    compiled = torch.compile(
        lambda q, k, v: flash_attn(q, k, v, dropout_p=0.5, impl=lane.impl), fullgraph=True, backend=backend(lane)
    )
    q, k = (lane.randn(1, 2, 32, 32, seed=s) for s in range(2))
    eye = torch.eye(32, device=lane.device, dtype=lane.dtype).expand(1, 2, 32, 32)
    outs = []
    for _ in range(2):
        v = eye.clone().requires_grad_()
        outs.append(compiled(q, k, v))
        (dv,) = torch.autograd.grad(outs[-1], v, eye)
        assert torch.equal(outs[-1] == 0, dv.mT == 0)
        same(outs[-1], dv.mT, lane)
        assert 0.4 < (dv == 0).double().mean() < 0.6
    assert not torch.equal(*(out == 0 for out in outs))


@lanes(*WHERE)
def test_no_graph_break_packed(lane):
    """Row 91: and around the packed one, with integer max_seqlen."""
    cu = torch.tensor([0, 10, 10, 24], dtype=torch.int32, device=lane.device)
    compare(lane, Block(lane, packed=True, causal=True), lane.randn(24, 32), cu, 14)


@lanes(*WHERE)
def test_no_graph_break_with_tensors(lane):
    """Features that come as tensors are inputs of the graph; the gradients of bias and sink flow."""
    bias, sink = lane.randn(1, 2, 24, 24).requires_grad_(), lane.randn(2, seed=3).requires_grad_()
    slopes = torch.rand(2, device=lane.device)
    q, k, v = (lane.randn(2, 2, 24, 16, seed=s) for s in range(3))

    def f(q, k, v, bias, sink):
        out, lse = flash_attn(
            q,
            k,
            v,
            attn_bias=bias,
            learnable_sink=sink,
            alibi_slopes=slopes,
            causal=True,
            return_lse=True,
            impl=lane.impl,
        )
        return out.sum() + lse.sum()

    compiled = torch.compile(f, fullgraph=True, backend=backend(lane))
    for a, b in zip(*(torch.autograd.grad(g(q, k, v, bias, sink), (bias, sink)) for g in (f, compiled)), strict=True):
        same(a, b, lane)


@lanes(*WHERE)
def test_no_recompile_per_length(lane):
    """Row 95: lengths after the second are served by the dynamic graph."""
    counter = CompileCounterWithBackend(backend(lane))
    compiled = torch.compile(
        lambda q, k, v: flash_attn(q, k, v, causal=True, impl=lane.impl), fullgraph=True, backend=counter
    )
    for n in (320, 256, 192, 128, 100, 77):
        q, k, v = (lane.randn(1, 2, n, 16, seed=s).requires_grad_() for s in range(3))
        out = compiled(q, k, v)
        out.sum().backward()
        same(out, flash_attn(q, k, v, causal=True, impl=lane.impl), lane)
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations for six lengths"


@lanes(*WHERE)
def test_marked_dynamic_stays_dynamic(lane):
    """Row 95: a length marked dynamic is not specialised on, forward and backward."""
    counter = CompileCounterWithBackend(backend(lane))
    compiled = torch.compile(lambda q: flash_attn(q, q, q, impl=lane.impl), fullgraph=True, backend=counter)
    for n in (64, 48, 33):
        q = lane.randn(1, 2, n, 16).requires_grad_()
        torch._dynamo.mark_dynamic(q, 2)
        compiled(q).sum().backward()
    assert counter.frame_count == 1


@lanes(*WHERE)
def test_no_recompile_per_pack(lane):
    """Row 95 for packs: another total and another longest sequence do not compile again and again."""
    counter = CompileCounterWithBackend(backend(lane))

    def f(x, cu, longest):
        return flash_attn_varlen(x, x, x, cu, cu, longest, longest, causal=True, impl=lane.impl)

    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for lengths in ((10, 20), (7, 9), (30, 31), (5, 50), (11, 13)):
        cu = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=lane.device)
        x = lane.randn(sum(lengths), 2, 16).requires_grad_()
        out = compiled(x, cu, max(lengths))
        out.sum().backward()
        same(out, f(x, cu, max(lengths)), lane)
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations for five packs"


def layouts_of(*tensors):
    return [(x.shape, x.dtype, x.stride()) for x in tensors]


@lanes(REFERENCE, INTERPRETER, GPU_BFLOAT)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "ones"])
@pytest.mark.parametrize("other", ["plain", "rows_first"])
def test_fake_strides_are_the_real_ones(lane, layout, other):
    """Rows 92, 93: what the fake kernels promise for outputs and gradients is what the real ones return."""
    real = [laid_out(lane.randn(2, 4, 17, 16, seed=s), layout if s == 0 else other) for s in range(3)]

    def results(tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse, most = flash_attn(*leaves, causal=True, return_lse=True, return_max_logits=True, impl=lane.impl)
        grads = torch.autograd.grad((out.sum() + lse.sum()), leaves)
        return layouts_of(out, lse, most, *grads)

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in real]
        promised = results(fakes)
    assert results(real) == promised


@lanes(REFERENCE)
def test_compiled_strides_with_mixed_layouts(lane):
    """Row 93: q transposed from (B, N, H, D), k and v contiguous; the compiled backward agrees with the plain one."""
    q = lane.randn(2, 33, 4, 16).transpose(1, 2).requires_grad_()
    k, v = (lane.randn(2, 4, 33, 16, seed=s).requires_grad_() for s in (1, 2))
    do = lane.randn(2, 33, 4, 16, seed=3).transpose(1, 2)
    f = lambda q, k, v: flash_attn(q, k, v, causal=True, impl=lane.impl)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(g(q, k, v), (q, k, v), do) for g in (f, compiled)), strict=True):
        assert a.stride() == b.stride()
        same(a, b, lane)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fake_tensors_need_no_device(dtype, device):
    """Row 114: shapes, dtypes and strides under FakeTensorMode, of a GPU that is not there too."""
    with FakeTensorMode():
        q = torch.empty(2, 9, 4, 16, dtype=dtype, device=device).transpose(1, 2)
        k, v = (
            torch.empty(2, 2, 7, 16, dtype=dtype, device=device),
            torch.empty(2, 2, 7, 24, dtype=dtype, device=device),
        )
        out, lse = flash_attn(q, k, v, causal=True, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == ((2, 4, 9, 24), dtype, device)
    assert out.transpose(1, 2).is_contiguous()
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 9), torch.float32, True)


def test_meta_tensors():
    """Row 114: and on device="meta", dense and packed."""
    q = torch.empty(2, 4, 9, 16, device="meta", requires_grad=True)
    k = torch.empty(2, 2, 7, 16, device="meta", requires_grad=True)
    out, lse, most = flash_attn(q, k, k, return_lse=True, return_max_logits=True)
    assert (out.shape, lse.shape, most.shape) == ((2, 4, 9, 16), (2, 4, 9), (4,))
    out.sum().backward()
    assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)
    x, cu = torch.empty(20, 4, 16, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
    out, lse = flash_attn_varlen(x, x, x, cu, cu, 9, 9, return_lse=True)
    assert (out.shape, lse.shape) == ((20, 4, 16), (4, 20))


@lanes(*WHERE)
def test_export_with_dynamic_sizes(lane):
    """Row 113: exported with dynamic batch and length, it runs at two other sizes."""
    block = Block(lane, causal=True)
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(
        block, (lane.randn(2, 24, 32),), dynamic_shapes=({0: batch, 1: length}, None, None)[:1]
    )
    for shape in ((3, 40, 32), (5, 7, 32)):
        x = lane.randn(*shape, seed=9)
        same(program.module()(x), block(x), lane)


@lanes(REFERENCE, GPU_BFLOAT)
def test_autocast(lane):
    """Row 111: float32 weights under autocast run in the autocast dtype, and their gradients are float32."""
    block = Block(lane, causal=True).float()
    x = lane.randn(2, 24, 32).float()
    with torch.autocast(lane.device, torch.bfloat16):
        out = block(x)
        q = torch.randn(1, 2, 5, 16, device=lane.device)
        assert flash_attn(q, q, q, impl=lane.impl).dtype == torch.bfloat16
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert block.qkv.weight.grad.dtype == torch.float32
    assert block.qkv.weight.grad.abs().max() > 0


@lanes(REFERENCE)
def test_autocast_leaves_float64_alone(lane):
    q = lane.randn(1, 2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attn(q, q, q).dtype == torch.float64


@lanes(*WHERE)
def test_per_step_max_seqlen_does_not_rebuild(lane):
    """Row 97: twenty steps with integer max_seqlen compile once; a tensor is refused (test_errors)."""
    counter = CompileCounterWithBackend(backend(lane))
    compiled = torch.compile(Block(lane, packed=True), fullgraph=True, backend=counter)
    cu = torch.tensor([0, 10, 24], dtype=torch.int32, device=lane.device)
    for step in range(20):
        compiled(lane.randn(24, 32, seed=step), cu, 14).sum().backward()
    assert counter.frame_count == 1


@lanes(REFERENCE)
@pytest.mark.parametrize("name", ["causal", "packed_causal"])
def test_vmap(lane, name):
    """No batching rule is registered: torch loops over the batch, and its result is that of a loop."""
    given = lane.inputs(CASES[name])
    if given.case.lengths:
        cu = given.tensors["cu_seqlens_q"], given.tensors["cu_seqlens_k"]
        f = lambda q, k, v: flash_attn_varlen(q, k, v, *cu, *given.case.longest, causal=True)
    else:
        f = lambda q, k, v: flash_attn(q, k, v, causal=True)
    one = [given.tensors[n] for n in "qkv"]
    two = [torch.stack([x, -x]) for x in one]
    want = torch.stack([f(*(x[n] for x in two)) for n in (0, 1)])
    torch.testing.assert_close(torch.vmap(f)(*two), want)
