"""What autograd, checkpointing and the operator registry may rely on."""

import contextlib
import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch.utils.checkpoint import checkpoint

from flashtri_core import ahead, dispatch, flash_attn, flash_attn_varlen, ops, target
from flashtri_core.problem import NO_EXTRAS
from flashtri_core.testing.cases import CASES, SAVED, Case, inputs, problem_of, run_with_hook
from flashtri_core.testing.plugin import REFERENCE, lanes


def three(lane, nq=20, nk=20, d=16, heads=2):
    shapes = ((2, heads, nq, d), (2, heads, nk, d), (2, heads, nk, d))
    return [lane.randn(*shape, seed=s).requires_grad_() for s, shape in enumerate(shapes)]


@lanes()
@pytest.mark.parametrize("pattern", [p for p in itertools.product([True, False], repeat=3) if any(p)], ids=str)
def test_some_inputs_require_grad(lane, pattern):
    """Row 102: for every pattern of requires_grad the right gradients, and None for the others."""
    whole = three(lane)
    out = flash_attn(*whole, causal=True, impl=lane.impl)
    do = lane.randn(*out.shape, seed=5)
    right = torch.autograd.grad(out, whole, do)
    some = [x.detach().requires_grad_(on) for x, on in zip(whole, pattern, strict=True)]
    flash_attn(*some, causal=True, impl=lane.impl).backward(do)
    for x, on, want in zip(some, pattern, right, strict=True):
        assert (x.grad is not None) == on
        assert x.grad is None or torch.equal(x.grad, want)


@lanes()
def test_the_key_pass_is_skipped_when_nobody_wants_it(lane, monkeypatch):
    """Row 102: with only q requiring a gradient the operator is not asked for dK and dV, and the reverse."""
    asked = []
    plan = dispatch.backward_plan
    monkeypatch.setattr(ahead, "due", lambda *kind: False)  # the compilation beside a forward plans as well
    monkeypatch.setattr(
        dispatch, "backward_plan", lambda *a: asked.append([x is not None for x in a[-4:-1]]) or plan(*a)
    )
    for on in ((True, False, False), (False, True, False), (True, True, True)):
        q, k, v = (x.detach().requires_grad_(r) for x, r in zip(three(lane, nq=19 + sum(on) + on[1]), on, strict=True))
        flash_attn(q, k, v, impl=lane.impl).sum().backward()
    assert asked == [[True, False, False], [False, True, True], [True, True, True]]


@lanes()
def test_gradient_through_lse(lane):
    """Row 99: a loss on LSE alone gives dq and dk (softmax averages) and dv = 0, not silent zeros."""
    q, k, v = three(lane)
    _, lse = flash_attn(q, k, v, causal=True, return_lse=True, impl=lane.impl)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    high = [x.detach().double().requires_grad_() for x in (q, k)]
    s = high[0] @ high[1].transpose(-1, -2) * 16**-0.5
    s = s.masked_fill(torch.ones(20, 20, dtype=torch.bool, device=s.device).triu(1), float("-inf"))
    right = torch.autograd.grad(torch.logsumexp(s, -1).sum(), high)
    assert not dv.any()
    for a, b in zip((dq, dk), right, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-2, atol=1e-2)
        assert a.abs().max() > 0.1


@lanes()
def test_a_batch_of_output_gradients(lane):
    """is_grads_batched runs the backward under vmap, where a tensor has no address: it was an error."""
    leaves = [lane.randn(1, 2, 9, 16, seed=s).requires_grad_() for s in range(3)]
    out = flash_attn(*leaves, causal=True, impl=lane.impl)
    batch = lane.randn(3, 1, 2, 9, 16, seed=4)
    got = torch.autograd.grad(out, leaves, batch, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(out, leaves, do, retain_graph=True) for do in batch]
    for n, grads in enumerate(want):
        for a, b in zip(got, grads, strict=True):
            assert torch.equal(a[n], b)


@lanes()
def test_max_logits_has_no_gradient(lane):
    q, k, v = three(lane)
    _, most = flash_attn(q, k, v, return_max_logits=True, impl=lane.impl)
    assert not most.requires_grad


@lanes(REFERENCE)
@pytest.mark.parametrize(
    "name", ["causal_dead_rows", "gqa", "window_causal", "softcap_bias", "alibi_causal", "sink", "packed_empty"]
)
def test_gradcheck(lane, name):
    """The hand-written gradient of the chunked path against finite differences, in float64."""
    case = replace(CASES[name], nq=7, nk=5 if name == "causal_dead_rows" else 9, d=3, dv=2)
    if case.lengths:
        case = replace(case, lengths=((0, 0), (0, 2), (3, 0), (4, 5), (0, 0)))
    given = inputs(case, torch.float64)
    names = given.differentiable
    rest = {n: t for n, t in given.tensors.items() if n not in names}

    def attention(*leaves):
        both = rest | dict(zip(names, leaves, strict=True))
        q, k, v = (both.pop(n) for n in "qkv")
        if case.lengths:
            cu = both.pop("cu_seqlens_q"), both.pop("cu_seqlens_k")
            out, lse = flash_attn_varlen(q, k, v, *cu, *case.longest, **both, **given.numbers, return_lse=True)
        else:
            out, lse = flash_attn(q, k, v, **both, **given.numbers, return_lse=True)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    assert torch.autograd.gradcheck(attention, [given.tensors[n].requires_grad_() for n in names])


@lanes()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_come_back(lane, dtype):
    """Rows 106, 107: outputs and gradients have the inputs' dtype, statistics are float32."""
    if lane.name == "interpreter" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly; the call refuses it")
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in three(lane))
    out, lse, most = flash_attn(q, k, v, return_lse=True, return_max_logits=True, impl=lane.impl)
    assert (out.dtype, lse.dtype, most.dtype) == (dtype, torch.float32, torch.float32)
    out.sum().backward()
    assert {x.grad.dtype for x in (q, k, v)} == {dtype}


def test_the_interpreter_refuses_bfloat16(monkeypatch):
    """bfloat16 through the interpreter's dot is silently wrong, so it is refused by name."""
    monkeypatch.setattr(target, "INTERPRETED", True)
    monkeypatch.setattr(target, "HAS_TRITON", True)
    assert "use float16" in target.triton_ready(torch.device("cpu"), torch.bfloat16)


@lanes()
def test_no_double_backward(lane):
    """A second derivative is refused by name instead of being zero or wrong."""
    q, k, v = three(lane)
    (dq,) = torch.autograd.grad(flash_attn(q, k, v, impl=lane.impl).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        torch.autograd.grad(dq.sum(), k)


@lanes()
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_checkpointing(lane, reentrant, dropout_p):
    """Row 108: both kinds of checkpointing give the gradients of the plain call, dropout's bits included."""
    x = lane.randn(40, 3, 2, 16).requires_grad_()
    cu = torch.tensor([0, 15, 40], dtype=torch.int32, device=lane.device)

    def block(x):
        q, k, v = x.unbind(1)
        return flash_attn_varlen(q, k, v, cu, cu, 25, 25, causal=True, dropout_p=dropout_p, impl=lane.impl)

    torch.manual_seed(1)
    out = block(x)
    do = lane.randn(*out.shape, seed=2)
    (right,) = torch.autograd.grad(out, x, do)
    torch.manual_seed(1)
    again = checkpoint(block, x, use_reentrant=reentrant)
    assert torch.equal(again, out)
    again.backward(do)
    assert torch.equal(x.grad, right)


def alive():
    """Bytes of tensors on the device, or tensors in this process: what a leak makes grow."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return sum(1 for x in gc.get_objects() if issubclass(type(x), torch.Tensor))


@lanes()
def test_checkpointed_last_op_does_not_leak(lane):
    """Row 109: attention as the last operation of a checkpointed region leaves nothing behind."""
    leaves = three(lane)
    sizes = []
    for _ in range(4):
        checkpoint(lambda *a: flash_attn(*a, impl=lane.impl), *leaves, use_reentrant=False).sum().backward()
        gc.collect()
        sizes.append(alive())
    assert sizes[1] == sizes[-1], sizes


@lanes()
def test_dropped_results_free_their_memory(lane):
    """Row 104: saved tensors die with the result when backward never runs, without a garbage collection."""
    q, k, v = three(lane)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        for _ in range(5):
            out, lse = flash_attn(q, k, v, return_lse=True, impl=lane.impl)
            watched = weakref.ref(out.grad_fn)
        assert watched() is not None
        del out, lse
        assert watched() is None, "something keeps the graph alive"
        assert alive() == before
    finally:
        gc.enable()


@lanes()
def test_saved_tensors_are_freed_by_backward(lane):
    """After backward the graph holds nothing, even while the output is alive; a second backward says so."""
    q, k, v = three(lane)
    out = flash_attn(q, k, v, impl=lane.impl)
    loss = out.sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("changed", range(4), ids=["q", "k", "v", "out"])
def test_a_plan_is_for_the_dtypes_that_hooks_return(changed, monkeypatch):
    """A backward remembered for one dtype does not serve saved tensors that come back in another."""
    made, plan = [], ops._backward_plan
    monkeypatch.setattr(ops, "_backward_plan", lambda *call: made.append(call) or plan(*call))
    monkeypatch.setattr(ops, "_plans", {})

    def backward(dtype):
        q, k, v = leaves = [torch.randn(1, 1, n, 8, requires_grad=True) for n in (5, 6, 6)]
        saved = itertools.count()

        def unpack(x):
            return x.to(dtype) if x.dim() == 4 and next(saved) == changed else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = flash_attn(q, k, v)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    backward(torch.float32)
    backward(torch.float32)
    assert len(made) == 1
    backward(torch.float64)
    assert len(made) == 2


@lanes()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_lse_comes_back_from_hooks_in_another_dtype(lane, dtype):
    """Kernels read it as they wrote it, also by a plan that such a call, or one without a hook, has made."""

    def grads(unpack):
        leaves = three(lane)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = flash_attn(*leaves, causal=True, impl=lane.impl)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    def convert(x):
        return x.to(dtype) if x.dim() == 3 else x

    rounded = grads(lambda x: convert(x).to(x.dtype))
    for unpack, right in ((convert, rounded), (lambda x: x, grads(lambda x: x)), (convert, rounded)):
        for a, b in zip(grads(unpack), right, strict=True):
            assert torch.equal(a, b)


UNLIKE = {
    "batch": lambda x: torch.zeros(2, *x.shape[1:]),
    "heads": lambda x: x.new_zeros(1, 4, *x.shape[2:]),
    "strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": lambda x: x.half(),
    "device": lambda x: x.to("meta"),
    "address": lambda x: torch.zeros(x.numel() + 1)[1:].view(x.shape),
    "sign": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("way", UNLIKE)
@pytest.mark.parametrize("changed", range(3), ids="qkv")
def test_a_likely_plan_is_for_tensors_that_are_like_those_before(way, changed, monkeypatch):
    monkeypatch.setattr(ops, "_plans", {})
    options = 6, 6, 1.0, False, -1, -1, 0.0, 0.0, False, "auto"
    tensors = [torch.zeros(1, 2, 6, 8) for _ in range(3)]
    for _ in range(2):  # the second call finds the plan by its key, and expects more of its kind
        flash_attn(*tensors, softmax_scale=1.0)
    assert ops.known(*tensors, NO_EXTRAS, options, False) is not None
    assert any(type(plan) is ops.Likely for plan in ops._plans.values())
    tensors[changed] = UNLIKE[way](tensors[changed])
    assert ops.known(*tensors, NO_EXTRAS, options, False) is None


HOOKED = {
    "dense": (Case("dense", batch=2, nq=20, nk=30, causal=True), SAVED[:5]),
    "packed": (Case("packed", lengths=((5, 5), (9, 12)), tail=(2, 3), causal=True), ("cu_seqlens_q", "cu_seqlens_k")),
    "features": (
        Case(
            "features",
            batch=2,
            nq=20,
            nk=30,
            alibi="bh",
            sink=True,
            bias="bhqk",
            mask="qk",
            used=(7, 30),
            dropout_p=0.2,
        ),
        ("alibi_slopes", "learnable_sink", "attn_bias", "attn_mask", "seqused_k", "rng"),
    ),
}


CHANGES = {
    "sign in a flag": lambda x: torch._neg_view(-x),
    "columns": lambda x: torch.stack((x, torch.ones_like(x)), -1)[..., 0],
    "rows apart": lambda x: torch.cat((x, torch.ones_like(x)), -1)[..., : x.shape[-1]],
}


@lanes()
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in HOOKED for name in HOOKED[kind][1]])
def test_saved_tensors_come_back_from_hooks_with_the_same_values(lane, kind, name):
    """Kernels took the wrong sign, or the numbers beside; with rows of LSE apart they wrote where nothing of theirs is."""
    given = inputs(HOOKED[kind][0], lane.dtype, lane.device)

    def check(way, change):
        got = run_with_hook(given, lane.impl, name, change, deterministic=True)
        assert all(map(torch.equal, got, want)), way

    want = run_with_hook(given, lane.impl, name, lambda x: x, deterministic=True)
    for way, change in CHANGES.items():
        if name != "attn_mask" or way != "sign in a flag":  # a bool has none
            check(way, change)
            check(f"{way}, by that plan", change)
    check("as it was", lambda x: x)


@lanes()
def test_saved_tensors_modified_in_place_are_noticed(lane):
    q, k, v = three(lane)
    out = flash_attn(q, k, v, impl=lane.impl)
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@lanes()
@pytest.mark.parametrize("grad", [True, False], ids=["requires_grad", "plain"])
@pytest.mark.parametrize("name", ["q", "k", "v", "attn_bias"])
def test_forward_mode_is_refused(lane, name, grad):
    """Forward-mode differentiation is an error, not a tangent of zero."""
    given = dict(zip("qkv", three(lane), strict=True)) | {"attn_bias": lane.randn(1, 2, 20, 20)}
    given = {key: x.detach().requires_grad_(grad) for key, x in given.items()}
    with fwad.dual_level():
        given[name] = fwad.make_dual(given[name].detach(), torch.ones_like(given[name]))
        with pytest.raises(NotImplementedError, match=f"^{name} carries a tangent"):
            flash_attn(**given, impl=lane.impl)


@lanes()
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "jacrev", "grad"])
def test_transforms_of_torch_func_are_refused(lane, transform):
    """They gave zeros, or an error from deep inside torch."""
    q, k, v = (x.detach() for x in three(lane))

    def f(q):
        return flash_attn(q, k, v, impl=lane.impl)

    def run():
        if transform == "jvp":
            return torch.func.jvp(f, (q,), (torch.ones_like(q),))
        if transform == "grad":
            return torch.func.grad(lambda x: f(x).sum())(q)
        return getattr(torch.func, transform)(f)(q)

    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        run()


@pytest.mark.parametrize("grad", [True, False])
def test_a_tensor_left_over_from_a_transform(grad):
    """torch.func.grad hands its function a wrapper, which outlives it here and has no address of its own."""
    q, kept = torch.randn(1, 2, 5, 8), []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(q)
    with torch.set_grad_enabled(grad):
        out = flash_attn(kept[0], q, q)
    assert torch.equal(out, flash_attn(q, q, q))


@pytest.mark.parametrize("default", [True, False])
def test_deterministic_default(default, monkeypatch):
    """deterministic=None follows torch.are_deterministic_algorithms_enabled(); an explicit choice does not."""
    seen = []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: default)
    real = ops.attention

    def spy(q, k, v, extras, options, *flags):
        *_, deterministic, _impl = options
        seen.append(deterministic)
        return real(q, k, v, extras, options, *flags)

    monkeypatch.setattr(ops, "attention", spy)
    q = torch.randn(1, 1, 3, 8)
    flash_attn(q, q, q)
    flash_attn(q, q, q, deterministic=not default)
    assert seen == [default, not default]


def test_the_tensors_device_is_current_while_plans_are_made_and_run(monkeypatch):
    """Kernels are launched on the current device; in both passes it is looked at once, for all launches together."""
    current, seen = ["another"], []

    @contextlib.contextmanager
    def entered(device):
        current.append(str(device))
        yield
        current.pop()

    def watched(make):
        def plan(*arguments):
            seen.append(current[-1])
            run = make(*arguments)
            return lambda *tensors: (seen.append(current[-1]), run(*tensors))

        return plan

    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(ops, "_is_elsewhere", lambda x: current[-1] != str(x.device))
    monkeypatch.setattr(torch.cuda, "device", entered)
    for name in ("forward_plan", "backward_plan"):
        monkeypatch.setattr(dispatch, name, watched(getattr(dispatch, name)))
    q = torch.randn(1, 1, 3, 8, requires_grad=True)
    flash_attn(q, q, q).sum().backward()
    assert seen == ["cpu"] * 4
    assert current == ["another"]


@lanes()
@pytest.mark.parametrize("name", ["causal", "gqa", "packed_tail", "bias_shared_by_heads", "sink", "seqused", "mask"])
def test_opcheck(lane, name):
    """Rows 92, 93, 114: schema, fake kernel (shapes, strides, dtypes) and autograd registration of both operators."""
    given = lane.inputs(CASES[name])
    problem, extras = problem_of(given)
    t = given.tensors
    numbers = (
        *given.case.longest, problem.softmax_scale, problem.causal, problem.window_left, problem.window_right,
        problem.softcap, problem.dropout_p, False, lane.impl,
    )  # fmt: skip
    leaves = [x.detach().requires_grad_() for x in (t["q"], t["k"], t["v"])]
    if name == "gqa":  # memory order follows each input on its own
        leaves[0] = leaves[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(torch.ops.flashtri.fwd.default, (*leaves, *extras, *numbers, True))
    q, k, v = (x.detach() for x in leaves)
    out, lse, _ = torch.ops.flashtri.fwd(q, k, v, *extras, *numbers, False)
    do, dlse = given.do.contiguous(), given.dlse
    flags = (True, True, "learnable_sink" in t, "attn_bias" in t)
    torch.library.opcheck(
        torch.ops.flashtri.bwd.default, (do, dlse, q, k, v, out, lse, *extras, *numbers, *flags),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


def test_schema_is_stable():
    """Exported programs hold these schemas: a change is a break, and belongs into the changelog."""
    features = (
        "Tensor? alibi_slopes, Tensor? learnable_sink, Tensor? attn_bias, Tensor? attn_mask, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? rng, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "float softmax_scale, bool causal, int window_left, int window_right, float softcap, float dropout_p, "
        "bool deterministic, str impl"
    )
    assert str(torch.ops.flashtri.fwd.default._schema) == (
        f"flashtri::fwd(Tensor q, Tensor k, Tensor v, {features}, bool return_max) -> (Tensor, Tensor, Tensor)"
    )
    assert str(torch.ops.flashtri.bwd.default._schema) == (
        f"flashtri::bwd(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {features}, "
        "bool need_dq, bool need_dkv, bool need_dsink, bool need_dbias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
