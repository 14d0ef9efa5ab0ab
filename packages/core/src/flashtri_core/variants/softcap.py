"""Softcap: ``s = softcap * tanh(softmax_scale * qk / softcap)``, as Gemma 2 and Grok use it.

Applied to the scaled score before any bias and mask; 0 switches it off. Its gradient factor is ``1 - tanh(.)^2``, taken
from the same tanh the forward computed. The tanh is a second special-function instruction per score beside exp2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import INTERPRETED, jit, tl

if INTERPRETED:

    @jit
    def tanh(x):
        """1 - 2 / (exp(2x) + 1): the interpreter knows no hardware tanh. Absolute error below 2e-7."""
        return 1.0 - 2.0 / (tl.math.exp2(x * 2.8853900817779268) + 1.0)

else:

    @jit
    def tanh(x):
        """One special-function instruction (sm_75 and newer), relative error at most 2^-11: half of bf16's own step."""
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def score(qk, args):
    """Unit: softcap. args = (softmax_scale / softcap,)."""
    return tanh(qk * args[0])


@jit
def score_grad(ds, s, args):
    return ds * (1.0 - s * s)


@jit
def score_natural(qk, args):
    """Unit: 1, for a bias that follows. args = (softmax_scale / softcap, softcap, 1 / softcap)."""
    return tanh(qk * args[0]) * args[1]


@jit
def score_grad_natural(ds, s, args):
    t = s * args[2]
    return ds * (1.0 - t * t)


def score_eager(s: Tensor, softcap: float) -> Tensor:
    """Eager twin, on scaled scores."""
    return softcap * torch.tanh(s / softcap)


def check(softcap: object) -> float:
    """Validate ``softcap``: 0, or a positive number that float32 holds together with its reciprocal.

    Raises:
        TypeError: not a number.
        ValueError: negative, NaN, too large or too small.
    """
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap must be a float, got {type(softcap).__name__}")
    if softcap != 0 and not 1e-38 <= softcap <= 1e38:
        raise ValueError(f"softcap must be finite and >= 0 (0 = off, else 1e-38 to 1e38), got {softcap}")
    return float(softcap)
