"""Scores as they are: softmax_scale times the dot product."""

from __future__ import annotations

from .._jit import jit, tl  # noqa: F401  (the interpreter wants tl beside every jit function)


@jit
def score(qk, args):
    """Unit: softmax_scale, which must be positive to be folded into exp2 behind the maximum."""
    return qk


@jit
def score_scaled(qk, args):
    """Unit: 1. Taken when a bias in natural units follows, or when softmax_scale is zero or negative."""
    return qk * args[0]


@jit
def score_grad(ds, s, args):
    return ds
