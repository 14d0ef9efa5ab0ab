"""What one call computes: shapes, dtype, and which features are on. The one description passed around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .variants import window
from .variants.attn_bias import eighths


class Extras(NamedTuple):
    """The optional tensors of a call; None where the feature is off."""

    alibi_slopes: Tensor | None = None  # fp32 (Hq,) or (B, Hq)
    learnable_sink: Tensor | None = None  # (Hq,)
    attn_bias: Tensor | None = None  # 4-D, broadcastable to (B, Hq, Nq, Nk)
    attn_mask: Tensor | None = None  # bool, 4-D, broadcastable to (B, Hq, Nq, Nk)
    cu_seqlens_q: Tensor | None = None  # int32 (sequences + 1,)
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None  # int32 (B,) or (sequences,)
    rng: Tensor | None = None  # int64 (2,): dropout's seed and offset


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class Problem:
    """A call without its data.

    ``batch`` counts sequences and ``seqlen_q``, ``seqlen_k`` are the longest ones when ``varlen``; ``total_q`` and
    ``total_k`` are rows in memory per head. ``window_left`` and ``window_right`` are as given, -1 = open. ``narrow_rows``
    says that a bias or mask is read entry by entry, see :func:`~flashtri_core.variants.attn_bias.eighths`.
    """

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    softmax_scale: float
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi: bool = False
    sink: bool = False
    bias: bool = False
    mask: bool = False
    varlen: bool = False
    seqused: bool = False
    narrow_rows: bool = False
    total_q: int = 0
    total_k: int = 0

    @property
    def mask_kind(self) -> str:
        """Which file of variants/ describes the visible keys: "full", "causal" or "window"."""
        if self.window_left < 0 and (self.window_right < 0 or (self.causal and self.window_right >= 0)):
            return "causal" if self.causal else "full"
        return "window" if (self.window_left, self.window_right) != (-1, 0) else "causal"

    @property
    def window(self) -> tuple[int, int]:
        """Both bounds as non-negative ints, an open side as ``window.UNBOUNDED``, causal folded in."""
        return window.normalise(self.window_left, self.window_right, self.causal)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that are on, for messages and tables."""
        on = {
            "causal": self.mask_kind == "causal",
            "window": self.mask_kind == "window",
            "softcap": self.softcap > 0,
            "alibi": self.alibi,
            "sink": self.sink,
            "bias": self.bias,
            "mask": self.mask,
            "dropout": self.dropout_p > 0,
            "varlen": self.varlen,
            "seqused_k": self.seqused,
            "gqa": self.heads_q != self.heads_k,
        }
        return tuple(name for name, used in on.items() if used)


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
) -> Problem:
    """The Problem of a call whose arguments are already validated; dense q (B, Hq, Nq, D) or packed (total, Hq, D)."""
    varlen = extras.cu_seqlens_q is not None
    if varlen:
        assert extras.cu_seqlens_q is not None
        batch, seqlen_q, seqlen_k = extras.cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k
        total_q, total_k, axis = q.shape[0], k.shape[0], 1
    else:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[2], k.shape[2]
        total_q, total_k, axis = seqlen_q, seqlen_k, 1
    return Problem(
        batch=batch,
        heads_q=q.shape[axis],
        heads_k=k.shape[axis],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=q.dtype,
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        dropout_p=dropout_p,
        alibi=extras.alibi_slopes is not None,
        sink=extras.learnable_sink is not None,
        bias=extras.attn_bias is not None,
        mask=extras.attn_mask is not None,
        varlen=varlen,
        seqused=extras.seqused_k is not None,
        narrow_rows=any(x is not None and eighths(x) is None for x in (extras.attn_bias, extras.attn_mask)),
        total_q=total_q,
        total_k=total_k,
    )
