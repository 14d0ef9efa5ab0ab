"""Host side of :mod:`.tail`, for the plain and for the Hopper kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import Extras, Problem
from .quick import Launch
from .tail import attn_tail_kernel

TAIL_PROGRAMS, TAIL_BLOCK = 32, 1024  # elements that a program fills at a time


class Tail:
    """Plan of what packed tensors hold behind the last sequence.

    Args:
        tensors: O or dQ, dK, dV: (total, H, columns), and LSE, row_max: (H, total); None where there is none.
    """

    def __init__(self, problem: Problem, device: torch.device, *tensors: Tensor | None) -> None:
        self.shapes = [  # (row stride, head stride, heads, columns)
            () if x is None else (1, x.stride(0), x.shape[0], 1) if x.dim() == 2 else (*x.stride()[:2], *x.shape[1:])
            for x in tensors
        ]
        self.sizes = (problem.batch, problem.total_q, problem.total_k)
        self.kernel = Launch(attn_tail_kernel, TAIL_PROGRAMS, (TAIL_BLOCK,), None, device)

    def job(self, extras: Extras, *tensors: Tensor | None) -> tuple[Any, int, tuple[Any, ...]]:
        """(kernel, grid, arguments) of the launch, for whoever launches it among others.

        What there was none of when this was planned is left alone: a gradient that only the kernel needs.
        """
        wanted = [x if shape else None for x, shape in zip(tensors, self.shapes, strict=True)]
        arguments = *wanted, *self.shapes, extras.cu_seqlens_q, extras.cu_seqlens_k, *self.sizes
        return self.kernel.kernel, self.kernel.grid, (*arguments, *self.kernel.constexprs)

    def __call__(self, extras: Extras, *tensors: Tensor | None) -> None:
        self.kernel(*tensors, *self.shapes, extras.cu_seqlens_q, extras.cu_seqlens_k, *self.sizes)
