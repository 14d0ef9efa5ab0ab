"""Learnable sink: one extra logit per head that takes part in the softmax and carries no value, as in gpt-oss.

``p_ij = exp(s_ij) / (exp(sink_h) + sum_k exp(s_ik))``. The kernels start the online softmax at m = sink, l = 1 instead
of m = -inf, l = 0; LSE includes the sink, and the backward kernels need nothing else. Its gradient,
``dsink_h = -sum_i exp(sink_h - LSE_i) * delta_i``, is a reduction over numbers that exist anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attn_bias import FLOATS


def gradient(sink: Tensor, lse: Tensor, delta: Tensor, head_dim_axis: int) -> Tensor:
    """dsink (Hq,) in the sink's dtype; ``lse`` and ``delta`` fp32 with the heads on axis ``head_dim_axis``."""
    shape = [1] * lse.dim()
    shape[head_dim_axis] = -1
    axes = [axis for axis in range(lse.dim()) if axis != head_dim_axis]
    p_sink = torch.exp(sink.to(lse.dtype).view(shape) - lse)
    # a row that sees nothing, or lies behind the last sequence, gives 0 whatever its delta is
    return -(p_sink * delta).masked_fill(lse == float("-inf"), 0.0).sum(axes).to(sink.dtype)


def check(sink: object, heads: int, device: object) -> None:
    """Validate ``learnable_sink``.

    Raises:
        TypeError: not a float tensor.
        ValueError: another shape than (Hq,), or another device.
    """
    if not isinstance(sink, Tensor) or sink.dtype not in FLOATS:
        kind = sink.dtype if isinstance(sink, Tensor) else type(sink).__name__
        raise TypeError(f"learnable_sink must be a float tensor, got {kind} (supported: float16, bfloat16, float32, float64)")
    if tuple(sink.shape) != (heads,):
        raise ValueError(f"learnable_sink must have shape ({heads},), got {tuple(sink.shape)}")
    if sink.device != device:
        raise ValueError(f"learnable_sink must be on {device}, got {sink.device}")
