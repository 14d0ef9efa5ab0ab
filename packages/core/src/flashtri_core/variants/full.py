"""Full attention: every query sees every key of its sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import jit, tl  # noqa: F401  (the interpreter wants tl beside every jit function)

KV_LEFT_EDGE = False  # do tiles before the free middle need the mask, in the loop over keys
Q_LEFT_EDGE, Q_RIGHT_EDGE = False, False  # the same for both ends of the loop over queries


@jit
def keep(i, j, Nq, Nk, args):
    return (i >= 0) & (j >= 0)


@jit
def place(i, j, Nq, Nk, args):
    return j, i * 0, 0x7FFFFFFF


@jit
def kv_range(m0, m1, Nq, Nk, args):
    return 0, 0, Nk, Nk


@jit
def q_range(n0, n1, Nq, Nk, args):
    return 0, 0, Nq, Nq


def keep_eager(i: Tensor, j: Tensor, nq: int | Tensor, nk: int | Tensor, left: int, right: int) -> Tensor:
    """Eager twin of ``keep``: True everywhere, in the broadcast shape of ``i`` and ``j``."""
    return torch.ones(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool, device=i.device)
