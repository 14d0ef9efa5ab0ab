"""The specification, and the exact path that CPU tensors take.

:func:`eager_attention` is attention as the formulas say it: the whole score matrix, any dtype up to float64, gradients by
torch's autograd. It defines what every kernel must compute. :func:`chunked_forward` and :func:`chunked_backward` compute
the same from chunks of query rows, in memory linear in the sequence length and with the gradient written by hand: they
are what ``impl="reference"`` and every CPU tensor runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .problem import Extras, Problem
from .variants import MASKS, alibi, dropout, softcap

CHUNK_ELEMENTS = 1 << 22  # scores alive at a time in the chunked path


def masked_scores(
    qk: Tensor, problem: Problem, extras: Extras, z: Tensor, i: Tensor, nq: int, nk: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of rows ``i`` (c, 1) against all keys: ``qk`` (b, Hq, c, Nk) raw products, ``z`` (b,) batch indices.

    Returns:
        The capped score before biases (what softcap's gradient needs), the final score with -inf where nothing is
        visible, and the boolean visibility (broadcastable to ``qk``).
    """
    j = torch.arange(qk.shape[-1], device=qk.device)[None, :]
    capped = qk * problem.softmax_scale
    if problem.softcap > 0:
        capped = softcap.score_eager(capped, problem.softcap)
    s = capped
    if extras.alibi_slopes is not None:
        slopes = extras.alibi_slopes[z] if extras.alibi_slopes.dim() == 2 else extras.alibi_slopes
        s = alibi.add_eager(s, slopes, i, j, nq, nk)
    if extras.attn_bias is not None:
        s = s + _slice(extras.attn_bias, z, i, qk.shape[-1]).to(s.dtype)
    left, right = problem.window
    visible = MASKS[problem.mask_kind].keep_eager(i, j, nq, nk, left, right) & (j < nk)
    if extras.attn_mask is not None:
        visible = visible & _slice(extras.attn_mask, z, i, qk.shape[-1])
    visible = visible & (s != float("-inf"))  # NaN is a score like any other
    return capped, s.masked_fill(~visible, float("-inf")), visible


def _slice(x: Tensor, z: Tensor, i: Tensor, keys: int) -> Tensor:
    """Rows ``i`` and the first ``keys`` columns of a broadcastable 4-D tensor for batches ``z``."""
    x = x if x.shape[0] == 1 else x[z]
    x = x if x.shape[2] == 1 else x[:, :, i[:, 0]]
    return x if x.shape[3] == 1 else x[..., :keys]


def dropout_scale(p: Tensor, problem: Problem, extras: Extras, z: Tensor, i: Tensor, keys: int) -> Tensor | float:
    """Factor on each of ``p``: 0 where dropped, 1 / keep probability elsewhere; 1.0 without dropout."""
    if problem.dropout_p == 0.0:
        return 1.0
    assert extras.rng is not None
    h = torch.arange(problem.heads_q, device=i.device)[None, :, None, None]
    j = torch.arange(keys, device=i.device)[None, None, None, :]
    kept = dropout.keep_eager(extras.rng, z[:, None, None, None], h, i[None, None], j, problem.dropout_p)
    high = torch.promote_types(p.dtype, torch.float32)  # a bool by a number would be of torch's default dtype
    return kept.to(high) * dropout.keep_scale(problem.dropout_p)


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, extras: Extras = Extras(), z: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Dense attention by the formulas, in the dtype of its inputs; differentiable in q, k, v, sink and bias.

    Args:
        q: (B, Hq, Nq, D). k: (B, Hk, Nk, D). v: (B, Hk, Nk, Dv). Any float dtype, any device.
        problem: what to compute; its dtype is ignored, the tensors' own counts.
        extras: the features' tensors.
        z: batch indices that biases, slopes and dropout see; default 0 .. B - 1.

    Returns:
        out (B, Hq, Nq, Dv), lse (B, Hq, Nq) natural logarithm, row_max (B, Hq, Nq): -inf where a row sees no key.
    """
    if problem.varlen:
        return _eager_packed(q, k, v, problem, extras)
    group = problem.heads_q // problem.heads_k
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    batch, nq, nk = q.shape[0], q.shape[2], k.shape[2]
    z = torch.arange(batch, device=q.device) if z is None else z
    i = torch.arange(nq, device=q.device)[:, None]
    used: int | Tensor = nk
    if extras.seqused_k is not None:
        used = extras.seqused_k.clamp(max=nk).to(torch.int64)[z, None, None, None]
        k, v = _in_use(k, used), _in_use(v, used)
    _, s, _ = masked_scores(q @ k.transpose(-1, -2), problem, extras, z, i, nq, used)
    if extras.learnable_sink is not None:
        column = extras.learnable_sink.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, column], -1)
    dead = (s == float("-inf")).all(-1, keepdim=True)
    s = s.masked_fill(dead, 0.0)
    p = torch.softmax(s, -1).masked_fill(dead, 0.0)[..., :nk]
    lse = torch.logsumexp(s, -1).masked_fill(dead[..., 0], float("-inf"))
    row_max = s.amax(-1) if s.numel() else s.sum(-1)
    row_max = row_max.masked_fill(dead[..., 0], float("-inf"))
    p = p * dropout_scale(p, problem, extras, z, i, nk)
    return p.to(v.dtype) @ v, lse, row_max


def _eager_packed(q: Tensor, k: Tensor, v: Tensor, problem: Problem, extras: Extras) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence by sequence through the dense formulas; rows outside every sequence give 0 and -inf."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"))
    row_max = lse.clone()
    pieces: list[tuple[slice, Tensor, Tensor, Tensor]] = []
    for part in _segments(problem, extras, q.device):
        qs, ks, vs = (
            x[rows].transpose(0, 1)[None] for x, rows in ((q, part.rows_q), (k, part.rows_k), (v, part.rows_k))
        )
        used = None if extras.seqused_k is None else part.used
        sub = extras._replace(cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None)
        if isinstance(used, int):
            ks, vs = ks[:, :, :used], vs[:, :, :used]
        o, l, m = eager_attention(qs, ks, vs, _dense(problem), sub, part.z)
        pieces.append((part.rows_q, o[0].transpose(0, 1), l[0], m[0]))
    for rows, o, l, m in pieces:
        out = torch.cat([out[: rows.start], o, out[rows.stop :]])
        lse = torch.cat([lse[:, : rows.start], l, lse[:, rows.stop :]], 1)
        row_max = torch.cat([row_max[:, : rows.start], m, row_max[:, rows.stop :]], 1)
    return out, lse, row_max


def _dense(problem: Problem) -> Problem:
    from dataclasses import replace

    return replace(problem, varlen=False, seqused=False, batch=1)


class _Segment(NamedTuple):
    """Rows that share one (Nq, Nk): the whole dense batch, or one packed sequence."""

    z: Tensor  # (b,) batch or sequence indices
    rows_q: slice
    rows_k: slice
    nq: int
    used: int | Tensor  # keys in use: an int, or (b, 1, 1, 1) for a dense batch with seqused_k


def _segments(problem: Problem, extras: Extras, device: torch.device) -> Iterator[_Segment]:
    if not problem.varlen:
        used: int | Tensor = problem.seqlen_k
        if extras.seqused_k is not None:
            used = extras.seqused_k.clamp(max=problem.seqlen_k).to(torch.int64)[:, None, None, None]
        z = torch.arange(problem.batch, device=device)
        yield _Segment(z, slice(0, problem.seqlen_q), slice(0, problem.seqlen_k), problem.seqlen_q, used)
        return
    assert extras.cu_seqlens_q is not None and extras.cu_seqlens_k is not None
    cu_q, cu_k = extras.cu_seqlens_q.tolist(), extras.cu_seqlens_k.tolist()
    limits = None if extras.seqused_k is None else extras.seqused_k.tolist()
    for s in range(problem.batch):
        nq, nk = cu_q[s + 1] - cu_q[s], cu_k[s + 1] - cu_k[s]
        if nq <= 0:
            continue
        used = nk if limits is None else min(nk, limits[s])
        rows_k = slice(cu_k[s], cu_k[s] + used)
        yield _Segment(torch.tensor([s], device=device), slice(cu_q[s], cu_q[s + 1]), rows_k, nq, used)


def _heads_first(x: Tensor, rows: slice, varlen: bool) -> Tensor:
    """(b, H, rows, D) view of a dense or packed tensor."""
    return x[rows].transpose(0, 1)[None] if varlen else x[:, :, rows]


def _in_use(x: Tensor, used: int | Tensor) -> Tensor:
    """x (b, H, keys, D) with 0 for the keys behind those in use, whatever memory holds there: 0 times NaN is NaN."""
    return (
        x if isinstance(used, int) else x.masked_fill(torch.arange(x.shape[2], device=x.device)[:, None] >= used, 0.0)
    )


def _chunks(problem: Problem, part: _Segment, keys: int) -> Iterator[slice]:
    per_row = max(1, len(part.z) * problem.heads_q * keys)
    step = max(1, CHUNK_ELEMENTS // per_row)
    for first in range(0, part.nq, step):
        yield slice(first, min(first + step, part.nq))


def _grouped(x: Tensor, heads_k: int) -> Tensor:
    """(b, Hq, c, D) as (b, Hk, group * c, D): the query heads of a key head side by side, so K is never repeated."""
    return x.reshape(x.shape[0], heads_k, x.shape[1] // heads_k * x.shape[2], x.shape[-1])  # no -1: Nk may be 0


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunked_forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, out: Tensor, lse: Tensor, row_max: Tensor | None
) -> None:
    """Fill out, lse and row_max chunk by chunk; arithmetic in float32, or float64 for float64 inputs."""
    high = _compute_dtype(q.dtype)
    if problem.varlen:  # rows behind the last sequence are in no segment
        out.zero_()
        for statistic in (lse, row_max):
            if statistic is not None:
                statistic.fill_(float("-inf"))
    for part in _segments(problem, extras, q.device):
        qs, os = (_heads_first(x, part.rows_q, problem.varlen) for x in (q, out))
        ks, vs = (_in_use(_heads_first(x, part.rows_k, problem.varlen).to(high), part.used) for x in (k, v))
        lses, maxes = (
            None if x is None else (x[:, part.rows_q][None] if problem.varlen else x) for x in (lse, row_max)
        )
        keys = ks.shape[2]
        for rows in _chunks(problem, part, keys):
            i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            qc = qs[:, :, rows].to(high)
            qk = (_grouped(qc, problem.heads_k) @ ks.transpose(-1, -2)).view(*qc.shape[:3], keys)
            _, s, _ = masked_scores(qk, problem, extras, part.z, i, part.nq, part.used)
            m = s.amax(-1) if keys else s.new_full(s.shape[:3], float("-inf"))
            if extras.learnable_sink is not None:
                m = torch.maximum(m, extras.learnable_sink.to(high)[None, :, None])
            pivot = m.masked_fill(m == float("-inf"), 0.0)
            p = torch.exp(s - pivot[..., None])
            total = p.sum(-1)
            if extras.learnable_sink is not None:
                total = total + torch.exp(extras.learnable_sink.to(high)[None, :, None] - pivot)
            p = p * dropout_scale(p, problem, extras, part.z, i, keys)
            o = (_grouped(p, problem.heads_k) @ vs).view(*qc.shape[:3], vs.shape[-1])
            safe = total.masked_fill(total == 0, 1.0)
            os[:, :, rows] = (o / safe[..., None]).to(out.dtype)
            assert lses is not None
            lses[:, :, rows] = (m + torch.log(safe)).to(lse.dtype)
            if maxes is not None:
                maxes[:, :, rows] = m.to(maxes.dtype)


def chunked_backward(
    problem: Problem,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dsink: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """Fill the gradients that are not None, in memory linear in the sequence length."""
    high = _compute_dtype(q.dtype)
    sink_sum = None if dsink is None else torch.zeros(problem.heads_q, dtype=high, device=q.device)
    bias_sum = None if dbias is None else torch.zeros(dbias.shape, dtype=high, device=q.device)
    if problem.varlen:
        for grad in (dq, dk, dv):
            if grad is not None:
                grad.zero_()
    for part in _segments(problem, extras, q.device):
        dos, qs, os = (_heads_first(x, part.rows_q, problem.varlen) for x in (do, q, out))
        ks, vs = (_in_use(_heads_first(x, part.rows_k, problem.varlen).to(high), part.used) for x in (k, v))
        lses, dlses = (None if x is None else (x[:, part.rows_q][None] if problem.varlen else x) for x in (lse, dlse))
        assert lses is not None
        dk_sum, dv_sum = torch.zeros_like(ks), torch.zeros_like(vs)
        keys = ks.shape[2]
        for rows in _chunks(problem, part, keys):
            i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            qc, doc, oc = (x[:, :, rows].to(high) for x in (qs, dos, os))
            lse_c = lses[:, :, rows].to(high)
            lse_c = lse_c.masked_fill(lse_c == float("-inf"), float("inf"))  # rows without keys: every p is 0
            delta = (doc * oc).sum(-1)
            if dlses is not None:
                delta = delta - dlses[:, :, rows].to(high)
            if sink_sum is not None:
                assert extras.learnable_sink is not None
                p_sink = torch.exp(extras.learnable_sink.to(high)[None, :, None] - lse_c)
                sink_sum -= (p_sink * delta).sum((0, 2))
            qk = (_grouped(qc, problem.heads_k) @ ks.transpose(-1, -2)).view(*qc.shape[:3], keys)
            capped, s, _ = masked_scores(qk, problem, extras, part.z, i, part.nq, part.used)
            p = torch.exp(s - lse_c[..., None])
            factor = dropout_scale(p, problem, extras, part.z, i, keys)
            dv_sum += _grouped(p * factor, problem.heads_k).transpose(-1, -2) @ _grouped(doc, problem.heads_k)
            dp = (_grouped(doc, problem.heads_k) @ vs.transpose(-1, -2)).view(p.shape) * factor
            ds = _in_use((p * (dp - delta[..., None])).mT, part.used).mT
            if bias_sum is not None:
                _add_to_bias(bias_sum, ds, part, i)
            if problem.softcap > 0:
                ds = ds * (1.0 - (capped / problem.softcap) ** 2)
            ds = ds * problem.softmax_scale
            dk_sum += _grouped(ds, problem.heads_k).transpose(-1, -2) @ _grouped(qc, problem.heads_k)
            if dq is not None:
                dqc = (_grouped(ds, problem.heads_k) @ ks).view(qc.shape)
                _heads_first(dq, part.rows_q, problem.varlen)[:, :, rows] = dqc.to(dq.dtype)
        for grad, total in ((dk, dk_sum), (dv, dv_sum)):
            if grad is not None:
                _heads_first(grad, part.rows_k, problem.varlen).copy_(_in_use(total, part.used))
    if dsink is not None and sink_sum is not None:
        dsink.copy_(sink_sum)
    if dbias is not None and bias_sum is not None:
        dbias.copy_(bias_sum)


def _add_to_bias(total: Tensor, ds: Tensor, part: _Segment, i: Tensor) -> None:
    """Add ds (b, Hq, c, Nk) to the bias gradient, summed over the axes that the bias broadcasts."""
    for axis in (1, 2, 3):
        if total.shape[axis] == 1:
            ds = ds.sum(axis, keepdim=True)
    z = part.z
    if total.shape[0] == 1:
        ds, z = ds.sum(0, keepdim=True), z[:1] * 0
    rows = slice(0, 1) if total.shape[2] == 1 else slice(int(i[0, 0]), int(i[-1, 0]) + 1)
    for n, batch in enumerate(z.tolist()):
        total[batch, :, rows, : ds.shape[3]] += ds[n]


__all__ = ["chunked_backward", "chunked_forward", "eager_attention", "masked_scores"]
