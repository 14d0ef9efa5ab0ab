"""torch.library operators: schema, fake tensors, autograd. Launchers are imported when an operator runs.

One forward and one backward operator serve dense and packed calls and all features, so that ``torch.compile`` sees two
opaque calls and no Python. Outputs follow their input's memory order: (B, N, H, D) storage gives (B, N, H, D) storage.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _python_dispatch

from . import ahead, dispatch
from .problem import NO_EXTRAS, Extras, Problem, describe
from .target import empty_like, maker

_FEATURES = (
    "Tensor? alibi_slopes, Tensor? learnable_sink, Tensor? attn_bias, Tensor? attn_mask, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? rng, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float softmax_scale, bool causal, int window_left, int window_right, float softcap, float dropout_p, "
    "bool deterministic, str impl"
)
_N_EXTRAS = 8

_lib = torch.library.Library("flashtri", "DEF")
_lib.define(f"fwd(Tensor q, Tensor k, Tensor v, {_FEATURES}, bool return_max) -> (Tensor, Tensor, Tensor)")
_lib.define(
    f"bwd(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_FEATURES}, "
    "bool need_dq, bool need_dkv, bool need_dsink, bool need_dbias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def like_layout(x: Tensor, width: int) -> Tensor:
    """Uninitialised tensor of x's shape but ``width`` columns, rows-before-heads in memory where x has them so.

    That of a packed (total, H, D) tensor is contiguous.
    """
    if x.dim() == 3:
        return x.new_empty(x.shape[0], x.shape[1], width)
    batch, heads, rows, columns = x.shape
    if columns == width and (x.is_contiguous() or x.transpose(1, 2).is_contiguous()):
        return empty_like(x)  # the cheapest of these calls
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, rows, heads, width).transpose(1, 2)
    return x.new_empty(batch, heads, rows, width)


def _statistic_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _statistic(q: Tensor) -> Tensor:
    """Uninitialised LSE: (B, Hq, Nq) or (Hq, total); float32, float64 for float64 inputs."""
    dtype = _statistic_dtype(q)
    if q.dim() == 3:
        return q.new_empty(q.shape[1], q.shape[0], dtype=dtype)
    batch, heads, rows, _ = q.shape
    return q.new_empty(batch, heads, rows, dtype=dtype)


#: What fills the outputs of a call, and what makes each of them.
Plan = tuple[Callable[..., Any], ...]


class Likely(NamedTuple):
    """The plan of the first call with its options, and whether tensors are like that call's, but for their addresses."""

    is_like: Callable[..., bool]
    plan: Plan


#: By everything that compiled code and layouts depend on: a repeated call costs one look-up. Exact shapes are part of
#: the key, so a workload of ever-new lengths starts over at the limit instead of growing. By options alone: a likely one.
_plans: dict[tuple[Any, ...], Any] = {}
_PLAN_LIMIT = 4096


def _aligned(*tensors: Tensor | None) -> tuple[bool, ...]:
    return tuple([x is None or x.data_ptr() & 15 == 0 for x in tensors])


def _forward_key(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: tuple[Any, ...], return_max: bool
) -> tuple[Any, ...]:
    """What kernels depend on: the options, and each tensor's shape, strides, dtype, device, and address modulo 16 being 0.

    Whatever the public functions check about q, k, v is in it as well, so that what has a plan has been checked.
    """
    all_aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0  # nearly always
    return (
        options, return_max, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, all_aligned or _aligned(q, k, v), extras is NO_EXTRAS or _layouts(extras),
    )  # fmt: skip


def _backward_key(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, extras: Extras,
    options: tuple[Any, ...], need: tuple[bool, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """The same for a backward; saved tensors may come back from hooks with other dtypes, strides and addresses."""
    all_aligned = 15 & (
        do.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | lse.data_ptr()
    ) == 0  # fmt: skip
    return (
        options, need, q.shape, k.shape, v.shape, do.stride(), q.stride(), k.stride(), v.stride(), out.stride(),
        lse.stride(), do.dtype, q.dtype, k.dtype, v.dtype, out.dtype, q.device,
        all_aligned or _aligned(do, q, k, v, out, lse),
        dlse is None or (dlse.stride(), _aligned(dlse)), extras is NO_EXTRAS or _layouts(extras),
    )  # fmt: skip


def _layouts(extras: Extras) -> tuple[tuple[Any, ...] | None, ...]:
    return tuple([None if x is None else _layout(x) for x in extras])


def _layout(x: Tensor) -> tuple[Any, ...]:
    """The offset decides whether rows of a bias or mask are read in whole words, see ``attn_bias.eighths``.

    The device is in it because what has a plan counts as checked, see :func:`known`.
    """
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15 == 0, x.storage_offset() & 7 == 0


def known(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: tuple[Any, ...], return_max: bool) -> Plan | None:
    """The plan of a call of :func:`_simple` tensors, if one like it has run before, which has then been checked too."""
    tensors = (q, k, v) if extras is NO_EXTRAS else (q, k, v, *(_simple(extras) or ()))
    likely = options, return_max, q.requires_grad, len(tensors)
    plan = _likely_plan(likely, *tensors)
    if plan is None:
        try:
            if any(x.is_neg() for x in tensors):
                return None
            plan = _plans.get(_forward_key(q, k, v, extras, options, return_max))
        except RuntimeError:  # nested and sparse tensors have no strides, wrapped ones no address
            return None
        if plan is not None:
            _expect_again(likely, plan, *tensors)
    return plan


def _simple(extras: Extras) -> tuple[Any, ...] | None:
    """What a call has beside q, k and v, each tensor once: nothing, or what packed calls have; None where there is more."""
    if extras is NO_EXTRAS:
        return ()
    slopes, sink, bias, mask, cu_q, cu_k, used, rng = extras
    if not slopes is sink is bias is mask is used is rng is None:
        return None
    return () if cu_q is None else (cu_q,) if cu_q is cu_k else (cu_q, cu_k)


def resolved(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors with their sign in memory: torch has that of a conjugate's imaginary part in a flag, no part of the address.

    Operators get theirs from the dispatcher like that.
    """
    return tuple([None if x is None else x.resolve_neg() for x in tensors])


def _remember(key: tuple[Any, ...], plan: Plan) -> Plan:
    if len(_plans) >= _PLAN_LIMIT:
        _plans.clear()
    _plans[key] = plan
    return plan


def _likely_plan(options: tuple[Any, ...], *tensors: Tensor) -> Plan | None:
    """The plan of a call, if it is the likely one of those with such options: in a third of the time that a key takes."""
    likely: Likely | None = _plans.get(options)
    if likely is None or not likely.is_like(*tensors):
        return None
    for x in tensors:
        if x.data_ptr() & 15:
            return None
    return likely.plan


def _expect_again(options: tuple[Any, ...], plan: Plan, *tensors: Tensor) -> None:
    """Make this the likely plan, unless there is one. The guards, torch.compile's, want every tensor to be another one."""
    free = options not in _plans and len(_plans) < _PLAN_LIMIT
    if free and all(_aligned(*tensors)) and len({*map(id, tensors)}) == len(tensors):
        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        with suppress(AttributeError, TypeError):  # torch's own affair: in one that has changed them, keys serve alone
            torchs: Any = torch._C._dynamo.guards
            guards = torchs.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            _plans[options] = Likely(guards.check, plan)


def _is_elsewhere(x: Tensor) -> bool:
    """On a GPU that is not the current one, where kernels would be launched?"""
    return x.is_cuda and x.get_device() != torch.accelerator.current_device_index()  # torch.cuda's takes four calls


def _forward(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: tuple[Any, ...], return_max: bool,
    plan: Plan | None = None, need: tuple[bool, ...] = (),
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(out, lse, row_max), row_max None where it is not asked for; ``options`` are the schema's after the tensors.

    ``need`` says of q, k, v, sink and bias which will need a gradient, empty where none will.
    """
    if _is_elsewhere(q):
        with torch.cuda.device(q.device):
            return _forward(q, k, v, extras, options, return_max, plan, need)
    fill, new_out, new_lse = plan or _forward_plan(q, k, v, extras, options, return_max, need)
    out, lse, row_max = new_out(), new_lse(), new_lse() if return_max else None
    fill(q, k, v, extras, out, lse, row_max)
    return out, lse, row_max


def _forward_plan(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: tuple[Any, ...], return_max: bool,
    need: tuple[bool, ...] = (),
) -> Plan:  # fmt: skip
    key = _forward_key(q, k, v, extras, options, return_max)
    plan: Plan | None = _plans.get(key)
    if plan is not None:
        return plan
    out, lse = like_layout(q, v.shape[-1]), _statistic(q)
    if not (q.numel() or out.numel()):
        return lambda *tensors: None, maker(out), maker(lse)
    *numbers, deterministic, impl = options
    problem = describe(q, k, v, extras, *numbers)
    fill, *makers = _remember(
        key, (dispatch.forward_plan(problem, impl, q, k, v, extras, out, lse), maker(out), maker(lse))
    )
    ahead.wait_for_hash()
    compiles = need and impl != "reference" and all(_aligned(q, k, v, *extras))  # outlines are aligned
    if compiles and ahead.due(problem, q.device, impl, deterministic, need):
        fill = partial(_fill_beside_backward, fill, problem, impl, deterministic, need)
    return fill, *makers


def _fill_beside_backward(
    fill: Callable[..., Any], problem: Problem, impl: str, deterministic: bool, need: tuple[bool, ...], q: Tensor, k: Tensor,
    v: Tensor, extras: Extras, out: Tensor, lse: Tensor, row_max: Tensor | None,
) -> None:  # fmt: skip
    """The first forward of a kind: a thread compiles the backward of a gradient that is laid out like ``out``."""

    def compile_backward() -> None:
        do, q_like, k_like, v_like, out_like, lse_like = map(ahead.outline, (out, q, k, v, out, lse))
        features = Extras(*(None if x is None else ahead.outline(x) for x in extras))
        need_q, need_k, need_v, need_sink, need_bias = need
        grads = _grad_buffers(q_like, k_like, v_like, features, need_q, need_k or need_v, need_sink, need_bias)
        dq, dk, dv, _dsink, dbias = grads
        plan = dispatch.backward_plan(
            problem, impl, deterministic, do, None, q, k, v, out_like, lse_like, features, dq, dk, dv, dbias
        )  # of the device that q, k and v are on
        plan(do, None, q_like, k_like, v_like, out_like, lse_like, features, *grads)

    with ahead.beside(compile_backward, q.get_device()):
        fill(q, k, v, extras, out, lse, row_max)


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, extras: Extras,
    options: tuple[Any, ...], need: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dq, dk, dv, dsink, dbias), None for what is not asked for: ``need`` is (dq, dk and dv, dsink, dbias)."""
    if _is_elsewhere(q):
        with torch.cuda.device(q.device):
            return _backward(do, dlse, q, k, v, out, lse, extras, options, need)
    others = _simple(extras) if dlse is None else None
    tensors = (do, q, k, v, out, lse, *(others or ()))
    likely = options, need, q.requires_grad, len(tensors)
    plan = None if others is None else _likely_plan(likely, *tensors)
    if plan is None:
        given = tensors if others is not None else [x for x in (do, dlse, q, k, v, out, lse, *extras) if x is not None]
        if any(map(Tensor.is_neg, given)):  # the gradients, or what a hook gave back
            do, dlse, q, k, v, out, lse = resolved(do, dlse, q, k, v, out, lse)
            extras = extras if extras is NO_EXTRAS else Extras(*resolved(*extras))
            return _backward(do, dlse, q, k, v, out, lse, extras, options, need)
        if do.stride(-1) != 1 and do.shape[-1] != 1:
            do = do.contiguous()  # e.g. the stride-0 gradient of sum()
        if lse.dtype is not _statistic_dtype(q):
            lse = lse.to(_statistic_dtype(q))  # a hook's; kernels read what they wrote
        inputs = (do, dlse, q, k, v, out, lse, extras)
        key = _backward_key(*inputs, options, need)
        plan = _plans.get(key) or _backward_plan(key, *inputs, options, need)
        if others is not None:
            _expect_again(likely, plan, do, q, k, v, out, lse, *others)
    fill, new_dq, new_dk, new_dv, new_dsink, new_dbias = plan
    grads = new_dq(), new_dk(), new_dv(), new_dsink(), new_dbias()
    fill(do, dlse, q, k, v, out, lse, extras, *grads)
    return grads


def _backward_plan(
    key: tuple[Any, ...], do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    extras: Extras, options: tuple[Any, ...], need: tuple[bool, ...],
) -> Plan:  # fmt: skip
    rows = [x for x in (q, k, v, out, *extras[4:]) if x is not None]
    if not lse.is_contiguous() or any(x.stride(-1) != 1 and x.shape[-1] != 1 for x in rows):  # a hook's
        q, k, v, out, lse, extras = _in_rows(q, k, v, out, lse, extras)
        fill, *makers = _backward_plan(key, do, dlse, q, k, v, out, lse, extras, options, need)
        return _remember(key, (partial(_fill_from_rows, fill), *makers))
    dq, dk, dv, dsink, dbias = grads = _grad_buffers(q, k, v, extras, *need)
    makers = [type(None) if x is None else maker(x) for x in grads]
    if not (q.numel() or k.numel()):
        return _fill_zeros, *makers
    *numbers, deterministic, impl = options
    problem = describe(q, k, v, extras, *numbers)
    inputs = (do, dlse, q, k, v, out, lse, extras)
    return _remember(key, (dispatch.backward_plan(problem, impl, deterministic, *inputs, dq, dk, dv, dbias), *makers))


def _in_rows(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, extras: Extras) -> tuple[Any, ...]:
    """The same with rows that kernels can read, cu_seqlens, seqused_k and rng as well, and LSE laid out as delta will be."""
    if extras is not NO_EXTRAS:
        extras = Extras(*extras[:4], *(None if x is None else x.contiguous() for x in extras[4:]))
    return *(x.contiguous() for x in (q, k, v, out, lse)), extras


def _fill_from_rows(fill: Callable[..., Any], do: Tensor, dlse: Tensor | None, *tensors: Any) -> None:
    """The backward of saved tensors that came back with other strides."""
    fill(do, dlse, *_in_rows(*tensors[:6]), *tensors[6:])


def _fill_zeros(*tensors: Any) -> None:
    """The backward without a row that a sink or a bias could have touched."""
    for grad in tensors[-2:]:
        if grad is not None:
            grad.zero_()


def _fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The forward operator: an operator returns tensors, empty ones for what is not asked for."""
    out, lse, row_max = _forward(q, k, v, Extras(*rest[:_N_EXTRAS]), rest[_N_EXTRAS:-1], rest[-1])
    return out, lse, q.new_empty(0, dtype=lse.dtype) if row_max is None else row_max


def _bwd(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """The backward operator, likewise."""
    grads = _backward(do, dlse, q, k, v, out, lse, Extras(*rest[:_N_EXTRAS]), rest[_N_EXTRAS:-4], rest[-4:])
    return tuple(q.new_empty(0) if g is None else g for g in grads)


def _grad_buffers(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, need_dq: bool, need_dkv: bool, need_dsink: bool, need_dbias: bool
) -> tuple[Tensor | None, ...]:
    sink, bias = extras.learnable_sink, extras.attn_bias
    return (
        like_layout(q, q.shape[-1]) if need_dq else None,
        like_layout(k, k.shape[-1]) if need_dkv else None,
        like_layout(v, v.shape[-1]) if need_dkv else None,
        sink.new_empty(sink.shape) if need_dsink and sink is not None else None,
        bias.new_empty(bias.shape) if need_dbias and bias is not None else None,
    )


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = _statistic(q)
    return like_layout(q, v.shape[-1]), lse, _statistic(q) if rest[-1] else q.new_empty(0, dtype=lse.dtype)


def _bwd_fake(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    grads = _grad_buffers(q, k, v, Extras(*rest[:_N_EXTRAS]), *rest[-4:])
    return tuple(q.new_empty(0) if g is None else g for g in grads)


def _save(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: tuple[Any, ...],
    output: tuple[Tensor, Tensor, Tensor | None],
) -> None:  # fmt: skip
    out, lse, row_max = output
    if row_max is not None:
        ctx.mark_non_differentiable(row_max)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *(() if extras is NO_EXTRAS else extras))
    ctx.options = options


def _gradients(
    ctx: Any,
    bwd: Callable[..., tuple[Tensor | None, ...]],
    do: Tensor | None,
    dlse: Tensor | None,
    need: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of (q, k, v, sink, bias) by ``bwd``, which takes what ``_backward`` takes; None where not ``need``-ed."""
    if do is None and dlse is None:
        return (None,) * 5
    q, k, v, out, lse, *extras = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    need_q, need_k, need_v, need_sink, need_bias = need
    wanted = need_q, need_k or need_v, need_sink, need_bias
    return bwd(do, dlse, q, k, v, out, lse, Extras(*extras) if extras else NO_EXTRAS, ctx.options, wanted)


def _save_for_bwd(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, *rest = inputs
    _save(ctx, q, k, v, Extras(*rest[:_N_EXTRAS]), tuple(rest[_N_EXTRAS:-1]), output)


def _by_operator(*inputs: Any) -> tuple[Tensor | None, ...]:
    """``_backward`` by the operator, which returns an empty tensor for what is not asked for."""
    *tensors, extras, options, need = inputs
    grads = torch.ops.flashtri.bwd(*tensors, *extras, *options, *need)
    need_dq, need_dkv, need_dsink, need_dbias = need
    needed = need_dq, need_dkv, need_dkv, need_dsink, need_dbias
    return tuple(x if wanted else None for x, wanted in zip(grads, needed, strict=True))


def _fwd_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _row_max: Tensor | None) -> tuple[Any, ...]:
    need_q, need_k, need_v, _, need_sink, need_bias, *others = ctx.needs_input_grad
    need = need_q, need_k, need_v, need_sink, need_bias
    dq, dk, dv, dsink, dbias = _gradients(ctx, _by_operator, do, dlse, need)
    return dq, dk, dv, None, dsink, dbias, *(None for _ in others)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, which costs more than a small attention itself.

    Every argument and every output costs time as well: what has no gradient is packed, and O comes alone where nothing
    else is asked for.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, _sink: Tensor | None, _bias: Tensor | None, rest: tuple[Any, ...]
    ) -> Any:
        extras, options, return_lse, return_max, plan = rest
        need = ctx.needs_input_grad[:5] if plan is None else ()
        out, lse, row_max = output = _forward(q, k, v, extras, options, return_max, plan, need)
        _save(ctx, q, k, v, extras, options, output)
        return (out, lse if return_lse else None, row_max) if return_lse or return_max else out

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, dlse: Tensor | None = None, _row_max: Tensor | None = None
    ) -> tuple[Any, ...]:
        # create_graph=True: a second derivative would be asked of these gradients; a mode: FlopCounterMode counts operators,
        # and its flag takes no call as ``watched`` does
        bwd = _by_operator if torch.is_grad_enabled() or _python_dispatch._is_in_torch_dispatch_mode else _backward
        need = ctx.needs_input_grad[:5]
        try:
            return *_gradients(ctx, bwd, do, dlse, need), None
        except RuntimeError:  # is_grads_batched=True: what stands for a batch has no address; to ask first takes time
            grad = dlse if do is None else do
            if grad is None or not torch._C._functorch.is_legacy_batchedtensor(grad):
                raise
            return *_gradients(ctx, _by_operator, do, dlse, need), None


if hasattr(_Eager, "_backward_cls"):  # a node's call, without torch's search for the function that it is
    _Eager._backward_cls.apply = _Eager.backward  # type: ignore[attr-defined]
#: ``_Eager.apply`` without the search for functorch that ``watched`` makes as well, and for less.
_eager: Callable[..., Any] = super(torch.autograd.Function, _Eager).apply
_PLAIN = {Tensor, Parameter}


def watched(*tensors: Tensor) -> bool:
    """Does something look into operators here: torch.compile, export, fake tensors, subclasses, modes, functorch, tracing?"""
    return (
        torch.compiler.is_compiling()
        or not _PLAIN.issuperset(map(type, tensors))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def looked_into(*tensors: Tensor) -> bool:
    """The same, or is a tensor wrapped, left over from a transform that is done? It has no address, and so no plan."""
    return watched(*tensors) or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def attention(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: tuple[Any, ...], return_lse: bool, return_max: bool,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(out, lse, row_max), None or anything for what is not asked for; ``options`` are the operators' after the tensors.

    Plain tensors in eager mode go to the launcher directly; everybody else gets the operator. ``plan`` is from
    :func:`known`, whose caller has asked :func:`watched`.
    """
    if plan is None:
        if looked_into(q, k, v) or not (q.is_cuda or q.is_cpu):
            return torch.ops.flashtri.fwd(q, k, v, *extras, *options, return_max)  # type: ignore[no-any-return]
        if q.is_neg() or k.is_neg() or v.is_neg():
            q, k, v = resolved(q, k, v)
    sink, bias = extras.learnable_sink, extras.attn_bias
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
        or (sink is not None and sink.requires_grad) or (bias is not None and bias.requires_grad)
    ):  # fmt: skip
        found = _eager(q, k, v, sink, bias, (extras, options, return_lse, return_max, plan))
        return found if return_lse or return_max else (found, None, None)
    return _forward(q, k, v, extras, options, return_max, plan)


def _no_double_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "flash attention has no double backward; for gradients of gradients compute attention with "
        "flashtri_core.reference.eager_attention or torch's MATH backend"
    )


for _name, _impl, _fake in (("fwd", _fwd, _fwd_fake), ("bwd", _bwd, _bwd_fake)):
    for _key in ("CPU", "CUDA"):
        _lib.impl(_name, _impl, _key)
    torch.library.register_fake(f"flashtri::{_name}", _fake, lib=_lib)
torch.library.register_autograd("flashtri::fwd", _fwd_backward, setup_context=_save_for_bwd, lib=_lib)
torch.library.register_autograd(
    "flashtri::bwd", _no_double_backward, setup_context=lambda ctx, inputs, output: None, lib=_lib
)
