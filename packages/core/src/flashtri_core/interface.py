"""The public functions: documentation, validation, and the call into the operator. No Triton here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch, ops
from .dispatch import IMPLS, Support
from .packing import check_values
from .problem import NO_EXTRAS, Extras, describe
from .variants import alibi, attn_bias, dropout, sink, softcap, window

MAX_HEAD_DIM = 256
FLAGS = ("return_lse", "return_max_logits", "validate")
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
FLOAT_MAX = torch.finfo(torch.float32).max  # the kernels count in float32
FLOAT_TINY = torch.finfo(torch.float32).tiny  # and a GPU reads what is smaller as 0
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seqused_k: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    impl: str = "auto",
    validate: bool = False,
) -> Any:
    """Exact attention, ``softmax(softmax_scale * q k^T) v``, whose score matrix never reaches GPU main memory.

    The order on a score is: scale, softcap, ALiBi, bias, masks. A row that sees no key gives O = 0, LSE = -inf and zero
    gradients. Under autocast, q, k and v are cast as ``scaled_dot_product_attention`` casts them. Forward results, and
    gradients of the split backward, are bitwise equal from run to run.

    Args:
        q: (B, Hq, Nq, D). Any strides with a unit last one; a (B, N, H, D) tensor passes ``.transpose(1, 2)``, no copy.
        k: (B, Hk, Nk, D), Hq a multiple of Hk: head h reads key head ``h // (Hq / Hk)`` (GQA, MQA).
        v: (B, Hk, Nk, Dv). D and Dv at most 256 each, any value.
        causal: query i sees key j when ``j <= i + Nk - Nq`` (bottom-right aligned; SDPA's is_causal is top-left).
        softmax_scale: any finite float; default ``D ** -0.5``. Below float32's smallest normal number, 1.2e-38, it is 0.
        window_size: (left, right) keys beside the diagonal, inclusive; -1 = unbounded.
        softcap: ``softcap * tanh(s / softcap)`` on the scaled score; 0 = off.
        alibi_slopes: fp32 (Hq,) or (B, Hq); adds ``-slope * |i + Nk - Nq - j|``.
        learnable_sink: (Hq,), one extra logit per head without a value; LSE includes it. Differentiable.
        attn_bias: float tensor, broadcastable to (B, Hq, Nq, Nk), added to the score. Differentiable.
        attn_mask: bool tensor, broadcastable to (B, Hq, Nq, Nk), True = visible.
        dropout_p: probability of dropping a probability, applied whenever it is > 0 (a module knows about eval mode).
        seqused_k: int32 (B,), keys in use per batch, 0 to Nk; keys behind it are invisible and "Nk" means this number.
        deterministic: None follows ``torch.are_deterministic_algorithms_enabled()``.
        return_lse: also return the log-sum-exp (B, Hq, Nq), natural logarithm, fp32, differentiable.
        return_max_logits: also return the largest visible score (or sink) per head, (Hq,) fp32, without gradient.
        impl: "auto", "triton", "hopper" or "reference"; an explicit choice never falls back.
        validate: check the values of seqused_k on a GPU too, which waits for the device; on a CPU they are checked
            anyway, but not under ``torch.compile``.

    Returns:
        out (B, Hq, Nq, Dv) in q's dtype and memory order; with ``return_lse`` and ``return_max_logits`` a tuple.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes, devices or values that do not fit together.
        NotImplementedError: nothing installed here can run it; says what is supported.

    Example:
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> tuple(flash_attn(q, k, v, causal=True).shape)
        (1, 2, 5, 8)

    Source: Dao, FlashAttention-2 (2023), algorithms 1 and 2.
    """
    plain = not ops.watched(q, k, v)
    if not plain or torch._C._is_any_autocast_enabled() or forward_ad._current_level >= 0:
        q, k, v = _cast(q, k, v)
    if not (type(return_lse) is type(return_max_logits) is type(validate) is bool):  # for less than a call
        _check_bools(FLAGS, return_lse, return_max_logits, validate)  # type: ignore[unreachable]
    if (  # a call without optional tensors: has one like it been checked and run before?
        plain and alibi_slopes is learnable_sink is attn_bias is attn_mask is seqused_k is None
    ):  # fmt: skip
        try:
            (_, _, rows, width), (_, _, keys, _) = q.shape, k.shape
        except (RuntimeError, ValueError):  # nested tensors have no shape, others not four sizes
            width = 0
        if width > 0:
            options = _options(
                rows, keys, width, causal, softmax_scale, window_size, softcap, dropout_p, deterministic, impl
            )
            plan = ops.known(q, k, v, NO_EXTRAS, options, return_max_logits)
            if plan is not None:
                found = ops.attention(q, k, v, NO_EXTRAS, options, return_lse, return_max_logits, plan)
                return _results(*found, return_lse, return_max_logits)
    shape = _check_tensors(q, k, v, 4)
    extras, options = _check_features(
        q, k, shape, causal, softmax_scale, window_size, softcap, alibi_slopes,
        learnable_sink, attn_bias, attn_mask, dropout_p, seqused_k, deterministic, impl, validate,
    )  # fmt: skip
    return _call(q, k, v, extras, options, return_lse, return_max_logits)


def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seqused_k: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    impl: str = "auto",
    validate: bool = False,
) -> Any:
    """Attention over packed sequences of different lengths; see :func:`flash_attn` for what is not listed here.

    Sequence s owns query rows ``cu_seqlens_q[s] : cu_seqlens_q[s + 1]`` and key rows likewise. Sequences may be empty,
    and their query and key lengths differ (causal is bottom-right aligned inside each). Rows behind the last sequence
    give 0, LSE -inf, and zero gradients. Nothing is read back to the host, so a CUDA graph can capture the call.

    Args:
        q: (total_q, Hq, D).
        k: (total_k, Hk, D).
        v: (total_k, Hk, Dv).
        cu_seqlens_q: int32 (sequences + 1,), starts at 0, never decreases; int64 is cast.
        cu_seqlens_k: likewise, for k and v.
        max_seqlen_q: an upper bound of the query lengths, a Python int.
        max_seqlen_k: likewise for keys.
        attn_bias: broadcastable to (sequences, Hq, max_seqlen_q, max_seqlen_k), indexed inside each sequence.
        attn_mask: likewise.
        alibi_slopes: (Hq,) or (sequences, Hq).
        seqused_k: int32 (sequences,), keys in use in each sequence's rows.
        validate: check the values of cu_seqlens and seqused_k, and the longest lengths, on a GPU too, which waits for the
            device; on a CPU they are checked anyway, but not under ``torch.compile``.

    Returns:
        out (total_q, Hq, Dv); lse (Hq, total_q); max_logits (Hq,).

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flash_attn`.

    Example:
        >>> q = k = v = torch.randn(7, 2, 8)
        >>> cu = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> tuple(flash_attn_varlen(q, k, v, cu, cu, 4, 4, causal=True).shape)
        (7, 2, 8)
    """
    plain = not ops.watched(q, k, v, cu_seqlens_q, cu_seqlens_k)
    if not plain or torch._C._is_any_autocast_enabled() or forward_ad._current_level >= 0:
        q, k, v = _cast(q, k, v)
    if not (type(return_lse) is type(return_max_logits) is type(validate) is bool):
        _check_bools(FLAGS, return_lse, return_max_logits, validate)  # type: ignore[unreachable]
    if (  # as in flash_attn, where no values are to be checked
        plain and alibi_slopes is learnable_sink is attn_bias is attn_mask is seqused_k is None
        and type(max_seqlen_q) is type(max_seqlen_k) is int
        and not (_host_reads(cu_seqlens_q, validate) or _host_reads(cu_seqlens_k, validate))
    ):  # fmt: skip
        try:
            _, _, width = q.shape
        except (RuntimeError, ValueError):
            width = 0
        if width > 0:
            options = _options(
                max_seqlen_q, max_seqlen_k, width, causal, softmax_scale, window_size, softcap, dropout_p, deterministic, impl
            )  # fmt: skip
            extras = Extras(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
            plan = ops.known(q, k, v, extras, options, return_max_logits)
            if plan is not None:
                found = ops.attention(q, k, v, extras, options, return_lse, return_max_logits, plan)
                return _results(*found, return_lse, return_max_logits)
    extras, options = _check_packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size, softcap,
        alibi_slopes, learnable_sink, attn_bias, attn_mask, dropout_p, seqused_k, deterministic, impl, validate,
    )  # fmt: skip
    return _call(q, k, v, extras, options, return_lse, return_max_logits)


def supports(q: Tensor, k: Tensor, v: Tensor, *, impl: str = "auto", **features: Any) -> Support:
    """Would :func:`flash_attn`, or :func:`flash_attn_varlen`, run this call here, by which implementation? If not, why not?

    Nothing is launched. Of the tensors only shapes, dtypes and devices are looked at, and on a CPU, or with ``validate``,
    the values that the call itself reads (cu_seqlens, seqused_k). On the meta device nothing is computed: a call whose
    arguments fit together runs there with every ``impl``, and the answer names "reference".

    Args:
        q, k, v: as for the call.
        impl: the implementation asked for.
        **features: keywords of :func:`flash_attn`. A packed call is one with ``cu_seqlens_q``, ``cu_seqlens_k``,
            ``max_seqlen_q`` and ``max_seqlen_k``.

    Returns:
        A :class:`Support`: true when the call would run; ``reason`` names the argument otherwise.

    Example:
        >>> x, cu = torch.randn(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> supports(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4).impl
        'reference'
    """
    try:
        values: dict[str, Any] = {
            "causal": False, "softmax_scale": None, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None,
            "learnable_sink": None, "attn_bias": None, "attn_mask": None, "dropout_p": 0.0, "seqused_k": None,
            "deterministic": None,
        }  # fmt: skip
        flags = [features.pop(name, False) for name in FLAGS]
        packed = {name: features.pop(name) for name in PACKED if name in features}
        unknown = set(features) - set(values)
        if unknown:
            raise TypeError(f"unknown keyword {sorted(unknown)[0]!r}")
        values.update(features)
        q, k, v = _cast(q, k, v)
        _check_bools(FLAGS, *flags)
        rest = *values.values(), impl, flags[2]
        if packed:
            if missing := set(PACKED) - set(packed):
                raise TypeError(f"{min(missing)} must be given too: a packed call has {', '.join(PACKED)}")
            extras, options = _check_packed(q, k, v, *(packed[name] for name in PACKED), *rest)
        else:
            extras, options = _check_features(q, k, _check_tensors(q, k, v, 4), *rest)
        *numbers, deterministic, impl = options
        return dispatch.choose(describe(q, k, v, extras, *numbers), q.device, impl, deterministic)
    except (TypeError, ValueError, NotImplementedError) as error:
        return Support(False, str(error), "")


def dropout_mask(rng: Tensor, shape: tuple[int, int, int, int], dropout_p: float) -> Tensor:
    """The mask a call draws: bool (B, Hq, Nq, Nk), True = kept. For tests and for checking a result by hand.

    Args:
        rng: int64 (2,), what the call drew; ``torch.manual_seed(s)`` followed by :func:`draw_rng` repeats it.
        shape: (B, Hq, Nq, Nk).
        dropout_p: as in the call; the kept share is rounded to a multiple of 1/256.

    Raises:
        TypeError, ValueError: rng is not what draw_rng returns, shape not four sizes, or dropout_p no probability.
    """
    dropout.check(dropout_p)
    if not isinstance(rng, Tensor) or rng.dtype != torch.int64 or rng.shape != (2,):
        raise ValueError(f"rng must be an int64 tensor of shape (2,), as draw_rng returns it, got {rng!r}")
    if not isinstance(shape, Sequence) or len(shape) != 4 or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"shape must be (B, Hq, Nq, Nk), none negative, got {shape}")
    axes = [
        torch.arange(n, device=rng.device).view([-1 if a == axis else 1 for a in range(4)])
        for axis, n in enumerate(shape)
    ]
    return dropout.keep_eager(rng, axes[0], axes[1], axes[2], axes[3], dropout_p)


def draw_rng(device: torch.device | str = "cpu") -> Tensor:
    """The int64 (2,) words that the next call with dropout on ``device`` would draw; advances the generator likewise.

    Raises:
        ValueError: torch knows no such device, or sees no CUDA GPU.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be one that torch knows, got {device!r}") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be one that is here, got {str(place)!r}, and torch sees no CUDA GPU")
    return dropout.draw(place)


def _cast(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Autocast as SDPA: float tensors other than float64 become the autocast dtype."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        name, x = next((name, x) for name, x in zip("qkv", (q, k, v), strict=True) if not isinstance(x, Tensor))
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        _refuse_transforms(q=q, k=k, v=v)
    if torch._C._is_any_autocast_enabled():
        kind = q.device.type
        if kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            kept = dtype, torch.float64  # a cast to the same dtype takes time too
            q, k, v = (x if x.dtype in kept or not x.is_floating_point() else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _refuse_transforms(**tensors: Tensor | None) -> None:
    """Derivatives that the operators have no rule for, and that would come out as zeros without a word; vmap has one.

    Raises:
        NotImplementedError: inside torch.func's grad or jvp, or a tensor carries a forward-mode tangent.
    """
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    for name in (str(x.key()).rpartition(".")[2] for x in transforms):
        if name in ("Grad", "Jvp"):
            raise NotImplementedError(
                f"{', '.join(tensors)}: no rule for torch.func's {name.lower()}; torch.autograd.grad differentiates this call"
            )
    for name, x in tensors.items():
        if forward_ad._current_level >= 0 and x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name} carries a tangent of forward-mode differentiation, which has no rule here"
            )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, dim: int) -> tuple[int, int, int, int]:
    """(batch, query heads, query rows, key rows); packed tensors, ``dim`` 3, are a single batch."""
    if (  # what all three must share, asked in one go
        q.is_nested or k.is_nested or v.is_nested
        or not (q.layout is k.layout is v.layout is torch.strided)
        or not (q.dim() == k.dim() == v.dim() == dim)
        or not (q.dtype is k.dtype is v.dtype and q.dtype in DTYPES)
        or not (q.device == k.device == v.device)
    ):  # fmt: skip
        _refuse_tensors(q, k, v, dim)
    if dim == 4:
        (batch, hq, nq, d), (k_batch, hk, nk, d_k), (v_batch, hv, nv, d_v) = q.shape, k.shape, v.shape
        if not batch == k_batch == v_batch:
            raise ValueError(f"k and v must have q's batch size {batch}, got {k_batch} and {v_batch}")
    else:
        batch, (nq, hq, d), (nk, hk, d_k), (nv, hv, d_v) = 1, q.shape, k.shape, v.shape
    if nv != nk:
        raise ValueError(f"v must have k's {'length' if dim == 4 else 'rows'} {nk}, got {nv}")
    if not (1 <= d <= MAX_HEAD_DIM and 1 <= d_k <= MAX_HEAD_DIM and 1 <= d_v <= MAX_HEAD_DIM):
        name, n = next((name, n) for name, n in zip("qkv", (d, d_k, d_v), strict=True) if not 1 <= n <= MAX_HEAD_DIM)
        raise ValueError(f"{name}: head dimension must be 1 to {MAX_HEAD_DIM}, got {n}")
    if d_k != d:
        raise ValueError(f"k must have q's head dimension {d}, got {d_k} (v may differ)")
    if hv != hk:
        raise ValueError(f"v must have k's heads {hk}, got {hv}")
    if hk < 1 or hq < 1 or hq % hk:
        raise ValueError(f"q's heads must be a positive multiple of k's, got {hq} and {hk}")
    return batch, hq, nq, nk


def _check_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    *features: Any,
) -> tuple[Extras, tuple[Any, ...]]:  # fmt: skip
    """:func:`_check_features` of a packed call, of which ``features`` are the arguments after the shape."""
    _, heads, total_q, total_k = _check_tensors(q, k, v, 3)
    max_q, max_k = _check_max("max_seqlen_q", max_seqlen_q), _check_max("max_seqlen_k", max_seqlen_k)
    validate = features[-1]
    cu_q, starts_q = _check_cu("cu_seqlens_q", cu_seqlens_q, q, validate)
    same = cu_seqlens_k is cu_seqlens_q  # in self-attention
    cu_k, starts_k = (cu_q, starts_q) if same else _check_cu("cu_seqlens_k", cu_seqlens_k, q, validate)
    if cu_q.shape[0] != cu_k.shape[0]:
        raise ValueError(
            f"cu_seqlens_k must have as many entries as cu_seqlens_q ({cu_q.shape[0]}), got {cu_k.shape[0]}"
        )
    lengths = None
    if starts_q is not None and starts_k is not None:
        _check_starts("cu_seqlens_q", starts_q, total_q, max_q)
        lengths = _check_starts("cu_seqlens_k", starts_k, total_k, max_k)
    extras, options = _check_features(q, k, (cu_q.shape[0] - 1, heads, max_q, max_k), *features, lengths)  # type: ignore[call-arg]
    return extras._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), options


def _refuse_tensors(q: Tensor, k: Tensor, v: Tensor, dim: int) -> None:
    """Say which of the three is not a dense tensor, has other dimensions, or differs from q."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        _check_layout(name, x)  # first of all: a nested tensor has no shape to look at
    for name, x in zip("qkv", (q, k, v), strict=True):
        if x.dim() != dim:
            layout = "(B, H, N, D)" if dim == 4 else "(total, H, D)"
            raise ValueError(f"{name} must have {dim} dimensions {layout}, got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def _check_features(
    q: Tensor,
    k: Tensor,
    shape: tuple[int, int, int, int],
    causal: bool,
    softmax_scale: float | None,
    window_size: Any,
    cap: float,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
    seqused_k: Tensor | None,
    deterministic: bool | None,
    impl: str,
    validate: bool,
    key_lengths: list[int] | None = None,
) -> tuple[Extras, tuple[Any, ...]]:
    batch, heads, rows, keys = shape
    options = _options(rows, keys, q.shape[-1], causal, softmax_scale, window_size, cap, dropout_p, deterministic, impl)
    if alibi_slopes is not None:
        _check_layout("alibi_slopes", alibi_slopes)
        alibi.check(alibi_slopes, batch, heads, q.device)
        alibi_slopes = alibi_slopes.resolve_neg()  # see ops.resolved
    if learnable_sink is not None:
        _check_layout("learnable_sink", learnable_sink)
        sink.check(learnable_sink, heads, q.device)
        learnable_sink = learnable_sink.resolve_neg()
    if bias is not None:
        _check_layout("attn_bias", bias)
        attn_bias.check(bias, "attn_bias", shape, q.device, False)
        bias = attn_bias.as_4d(bias).resolve_neg()
    if mask is not None:
        _check_layout("attn_mask", mask)
        attn_bias.check(mask, "attn_mask", shape, q.device, True)
        mask = attn_bias.as_4d(mask)
    if seqused_k is not None:
        seqused_k, used = _check_index("seqused_k", seqused_k, q, validate)
        if tuple(seqused_k.shape) != (batch,):
            raise ValueError(f"seqused_k must have shape ({batch},), got {tuple(seqused_k.shape)}")
        for n, most in zip(used or (), key_lengths or [keys] * batch, strict=used is not None):
            if not 0 <= n <= most:
                raise ValueError(f"seqused_k must be between 0 and a sequence's keys, {most}, got {n}")
    extras = NO_EXTRAS
    if not (alibi_slopes is learnable_sink is bias is mask is seqused_k is None):
        extras = Extras(alibi_slopes, learnable_sink, bias, mask, None, None, seqused_k, None)
    return extras, options


def _options(
    rows: int, keys: int, head_dim: int, causal: bool, softmax_scale: float | None, window_size: Any, cap: float,
    dropout_p: float, deterministic: bool | None, impl: str,
) -> tuple[Any, ...]:  # fmt: skip
    """The operators' arguments that are no tensors, in their order, checked."""
    scale, left, right, cap, p = check_options(
        causal, softmax_scale, window_size, cap, dropout_p, deterministic, impl, head_dim
    )
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return rows, keys, scale, causal, left, right, cap, p, deterministic, impl


def check_options(
    causal: bool,
    softmax_scale: float | None,
    window_size: Any,
    cap: float,
    dropout_p: float,
    deterministic: bool | None,
    impl: str,
    head_dim: int,
) -> tuple[float, int, int, float, float]:
    """Check the options of a call that are no tensors; modules do so when they are built.

    Returns:
        softmax_scale, the window's two sides, softcap, dropout_p.

    Raises:
        TypeError, ValueError: as :func:`flash_attn`.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    if type(causal) is not bool or (deterministic is not None and type(deterministic) is not bool):
        _check_bools(  # type: ignore[unreachable]
            ("causal", "deterministic"), causal, False if deterministic is None else deterministic
        )
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    elif isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale must be a float or None, got {type(softmax_scale).__name__}")
    elif not -FLOAT_MAX <= softmax_scale <= FLOAT_MAX:
        raise ValueError(f"softmax_scale must be finite, got {softmax_scale}")
    elif -FLOAT_TINY < softmax_scale < FLOAT_TINY:
        softmax_scale = 0.0
    left, right = window.check(window_size)
    cap = cap if type(cap) is float and cap == 0.0 else softcap.check(cap)  # nearly every call: off
    p = dropout_p if type(dropout_p) is float and dropout_p == 0.0 else dropout.check(dropout_p)
    return float(softmax_scale), left, right, cap, p


def _check_bools(names: Sequence[str], *values: object) -> None:
    for n, value in enumerate(values):
        if value is not True and value is not False:
            kind = type(value)  # numpy has a bool of its own
            got = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
            raise TypeError(f"{names[n]} must be a bool, got {got}")


def _check_layout(name: str, x: object) -> None:
    if isinstance(x, Tensor) and (x.layout is not torch.strided or x.is_nested):
        raise TypeError(f"{name} must be a dense (strided) tensor, got {'a nested one' if x.is_nested else x.layout}")


def _check_index(name: str, x: Any, q: Tensor, validate: bool) -> tuple[Tensor, list[int] | None]:
    """An int32 or int64 vector on q's device as contiguous int32; and its values, where the host reads them."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be an int32 tensor, got {type(x).__name__}")
    _check_layout(name, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 (int64 is cast), got {x.dtype}")
    if x.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {tuple(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    if validate:
        check_values(name, x)
    read = _host_reads(x, validate)
    as_int32 = x if x.dtype is torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()
    return as_int32.resolve_neg(), x.tolist() if read else None


def _host_reads(x: Tensor, validate: bool) -> bool:
    """Whether the values are checked: reading a CPU tensor waits for nothing."""
    return validate or (x.is_cpu and not ops.looked_into(x))


def _check_cu(name: str, cu: Any, q: Tensor, validate: bool) -> tuple[Tensor, list[int] | None]:
    index, values = _check_index(name, cu, q, validate)
    if index.shape[0] < 1:
        raise ValueError(f"{name} must have at least one entry (sequences + 1), got none")
    return index, values


def _check_starts(name: str, starts: list[int], total: int, longest: int) -> list[int]:
    """The lengths of the sequences."""
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    if starts[0] != 0 or any(n < 0 for n in lengths) or starts[-1] > total:
        raise ValueError(f"{name} must start at 0, never decrease, and end at most at {total}, got {starts[:8]}...")
    if lengths and max(lengths) > longest:
        raise ValueError(
            f"{name.replace('cu_seqlens', 'max_seqlen')}: the longest sequence of {name} has {max(lengths)} rows, got {longest}"
        )
    return lengths


def _check_max(name: str, value: Any) -> int:
    if isinstance(value, (Tensor, bool)) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be a Python int (a tensor would make the host wait), got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must be >= 0, got {value}")
    return value  # type: ignore[return-value]


def _call(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: tuple[Any, ...], return_lse: bool, return_max_logits: bool
) -> Any:
    if forward_ad._current_level >= 0:
        _refuse_transforms(**extras._asdict())
    dropout_p = options[-3]
    if dropout_p > 0.0:
        extras = extras._replace(rng=dropout.draw(q.device))
    if not (q.stride(-1) == k.stride(-1) == v.stride(-1) == 1):  # kernels read rows; flash-attn copies the rest as well
        q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (q, k, v))
    return _results(
        *ops.attention(q, k, v, extras, options, return_lse, return_max_logits), return_lse, return_max_logits
    )


def _results(out: Tensor, lse: Tensor | None, row_max: Tensor | None, return_lse: bool, return_max_logits: bool) -> Any:
    if not (return_lse or return_max_logits):
        return out
    results: list[Tensor | None] = [out]
    if return_lse:
        results.append(lse)
    if row_max is not None and return_max_logits:
        axes = (0, 2) if row_max.dim() == 3 else (1,)
        empty = row_max.new_full((row_max.shape[-2],), float("-inf"))
        results.append(row_max.amax(axes) if row_max.numel() else empty)
    return tuple(results)
