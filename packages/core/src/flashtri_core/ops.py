"""torch.library operators: schema, fake tensors, autograd. Launchers are imported when an operator runs.

One forward and one backward operator serve dense and packed calls and all features, so that ``torch.compile`` sees two
opaque calls and no Python. Outputs follow their input's memory order: (B, N, H, D) storage gives (B, N, H, D) storage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import dispatch
from .problem import Extras, describe

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

    A packed (total, H, D) tensor is zeroed instead: rows behind the last sequence belong to no program.
    """
    if x.dim() == 3:
        return x.new_zeros(x.shape[0], x.shape[1], width)
    batch, heads, rows, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, rows, heads, width).transpose(1, 2)
    return x.new_empty(batch, heads, rows, width)


def _statistic(q: Tensor) -> Tensor:
    """Uninitialised LSE: (B, Hq, Nq), or (Hq, total) filled with -inf; float32, float64 for float64 inputs."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if q.dim() == 3:
        return q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=dtype)
    batch, heads, rows, _ = q.shape
    return q.new_empty(batch, heads, rows, dtype=dtype)


#: Launchers by everything their compiled code depends on: a repeated call costs one look-up. Exact shapes are part of
#: the key, so a workload of ever-new lengths starts over at the limit instead of growing.
_plans: dict[tuple[Any, ...], Any] = {}
_PLAN_LIMIT = 4096


def _plan_key(tensors: tuple[Tensor | None, ...], device: torch.device, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """What kernels depend on: the options, and each tensor's shape, strides, dtype, and address modulo 16 being 0."""
    layouts = [  # a list: quicker than a generator
        None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15 == 0)
        for x in (*tensors, *rest[:_N_EXTRAS])
    ]
    return (device, rest[_N_EXTRAS:], *layouts)


def _remember(key: tuple[Any, ...], plan: Any) -> Any:
    if len(_plans) >= _PLAN_LIMIT:
        _plans.clear()
    _plans[key] = plan
    return plan


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, row_max), row_max None where it is not asked for."""
    extras = Extras(*rest[:_N_EXTRAS])
    out, lse = like_layout(q, v.shape[-1]), _statistic(q)
    row_max = _statistic(q) if rest[-1] else None
    if q.numel() or out.numel():
        key = _plan_key((q, k, v), q.device, rest)
        plan = _plans.get(key)
        if plan is None:
            *numbers, deterministic, impl, _ = rest[_N_EXTRAS:]
            problem = describe(q, k, v, extras, *numbers)
            plan = _remember(key, dispatch.forward_plan(problem, impl, q, k, v, extras, out, lse))
        plan(q, k, v, extras, out, lse, row_max)
    return out, lse, row_max


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dq, dk, dv, dsink, dbias), None for what is not asked for."""
    extras = Extras(*rest[:_N_EXTRAS])
    dq, dk, dv, dsink, dbias = grads = _grad_buffers(q, k, v, extras, *rest[-4:])
    if do.stride(-1) != 1 and do.shape[-1] != 1:
        do = do.contiguous()  # e.g. the stride-0 gradient of sum()
    if q.numel() or k.numel():
        key = _plan_key((do, dlse, q, k, v, out, lse), q.device, rest)
        plan = _plans.get(key)
        if plan is None:
            *numbers, deterministic, impl = rest[_N_EXTRAS:-4]
            problem = describe(q, k, v, extras, *numbers)
            args = (do, dlse, q, k, v, out, lse, extras, dq, dk, dv, dbias)
            plan = _remember(key, dispatch.backward_plan(problem, impl, deterministic, *args))
        plan(do, dlse, q, k, v, out, lse, extras, dq, dk, dv, dsink, dbias)
    else:  # no row that a sink or a bias could have touched
        for grad in (dsink, dbias):
            if grad is not None:
                grad.zero_()
    return grads


def _fwd(q: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The forward operator: an operator returns tensors, empty ones for what is not asked for."""
    out, lse, row_max = _forward(q, *inputs)
    return out, lse, q.new_empty(0, dtype=lse.dtype) if row_max is None else row_max


def _bwd(do: Tensor, dlse: Tensor | None, q: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """The backward operator, likewise."""
    return tuple(q.new_empty(0) if g is None else g for g in _backward(do, dlse, q, *inputs))


def _grad_buffers(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, need_dq: bool, need_dkv: bool, need_dsink: bool, need_dbias: bool
) -> tuple[Tensor | None, ...]:
    sink, bias = extras.learnable_sink, extras.attn_bias
    return (
        like_layout(q, q.shape[-1]) if need_dq else None,
        like_layout(k, k.shape[-1]) if need_dkv else None,
        like_layout(v, v.shape[-1]) if need_dkv else None,
        torch.empty_like(sink, memory_format=torch.contiguous_format) if need_dsink and sink is not None else None,
        torch.empty_like(bias, memory_format=torch.contiguous_format) if need_dbias and bias is not None else None,
    )


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = _statistic(q)
    return like_layout(q, v.shape[-1]), lse, _statistic(q) if rest[-1] else q.new_empty(0, dtype=lse.dtype)


def _bwd_fake(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    grads = _grad_buffers(q, k, v, Extras(*rest[:_N_EXTRAS]), *rest[-4:])
    return tuple(q.new_empty(0) if g is None else g for g in grads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor | None]) -> None:
    q, k, v, *rest = inputs
    out, lse, row_max = output
    if row_max is not None:
        ctx.mark_non_differentiable(row_max)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *rest[:_N_EXTRAS])
    ctx.options = rest[_N_EXTRAS:-1]


def _gradients(bwd: Any, ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Gradients for all inputs of the forward, by the backward operator or by the function behind it."""
    q, k, v, out, lse, *extras = ctx.saved_tensors
    none = (None,) * (len(ctx.options) + 1)
    if do is None and dlse is None:
        return (None,) * (3 + _N_EXTRAS) + none
    do = torch.zeros_like(out) if do is None else do
    need = ctx.needs_input_grad
    need_sink, need_bias = need[4] and extras[1] is not None, need[5] and extras[2] is not None
    dq, dk, dv, dsink, dbias = bwd(
        do, dlse, q, k, v, out, lse, *extras, *ctx.options, need[0], need[1] or need[2], need_sink, need_bias
    )
    grads: list[Any] = [None] * _N_EXTRAS
    grads[1], grads[2] = dsink if need_sink else None, dbias if need_bias else None
    return dq if need[0] else None, dk if need[1] else None, dv if need[2] else None, *grads, *none


def _fwd_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _row_max: Tensor | None) -> tuple[Any, ...]:
    return _gradients(torch.ops.flashtri.bwd, ctx, do, dlse)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, which costs more than a small attention itself."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _row_max: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True: a second derivative would be asked of these gradients
            return _gradients(torch.ops.flashtri.bwd, ctx, do, dlse)
        return _gradients(_backward, ctx, do, dlse)


def looked_into(*tensors: Tensor) -> bool:
    """Does something look into operators here: torch.compile, export, fake tensors, subclasses, modes, functorch, tracing?"""
    return (
        torch.compiler.is_compiling()
        or any([type(x) is not Tensor and type(x) is not Parameter for x in tensors])  # noqa: C419  (a list is quicker)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def attention(*inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, row_max) of the forward operator's arguments, by the shortest road; row_max only where asked for.

    Plain tensors in eager mode go to the launcher directly; everybody else gets the operator.
    """
    q = inputs[0]
    if looked_into(*inputs[:3]) or q.device.type not in ("cuda", "cpu"):
        return torch.ops.flashtri.fwd(*inputs)  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in inputs[: 3 + _N_EXTRAS]]):  # noqa: C419
        return _Eager.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(*inputs)


def _no_double_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "flash attention has no double backward; for gradients of gradients compute attention with "
        "flashtri_core.reference.eager_attention or torch's MATH backend"
    )


for _name, _impl, _fake in (("fwd", _fwd, _fwd_fake), ("bwd", _bwd, _bwd_fake)):
    for _key in ("CPU", "CUDA"):
        _lib.impl(_name, _impl, _key)
    torch.library.register_fake(f"flashtri::{_name}", _fake, lib=_lib)
torch.library.register_autograd("flashtri::fwd", _fwd_backward, setup_context=_save, lib=_lib)
torch.library.register_autograd(
    "flashtri::bwd", _no_double_backward, setup_context=lambda ctx, inputs, output: None, lib=_lib
)
