"""Which kernels run a problem: plain Triton everywhere, Gluon on Hopper where it covers the problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .problem import Problem
from .target import target_of, triton_ready

IMPLS = ("auto", "triton", "hopper", "reference")


class Support(NamedTuple):
    """Answer of :func:`flashtri_core.supports`; true in a boolean context exactly when the call would run."""

    ok: bool
    reason: str  # why not, naming the argument; empty when ok
    impl: str  # the implementation that runs the forward; empty when not ok

    def __bool__(self) -> bool:
        return self.ok


def choose(problem: Problem, device: torch.device, impl: str) -> Support:
    """The implementation that ``impl`` means for this problem on this device, or why there is none."""
    if impl == "reference" or (impl == "auto" and device.type == "cpu"):
        return Support(True, "", "reference")
    reason = triton_ready(device, problem.dtype)
    if reason:
        return Support(False, reason, "")
    reason = _unfit(problem, device) if impl in ("auto", "triton") else ""
    if impl == "triton":
        return Support(not reason, reason, "" if reason else "triton")
    hopper_reason = hopper_forward_reason(problem, device)
    if not hopper_reason:
        return Support(True, "", "hopper")
    if impl == "hopper":
        return Support(False, f"impl='hopper': {hopper_reason}", "")
    return Support(not reason, reason, "" if reason else "triton")


def _unfit(problem: Problem, device: torch.device) -> str:
    from . import tuning

    try:
        for kernel in ("fwd", "dkdv", "dq"):
            tuning.choose(kernel, problem, target_of(device))
    except NotImplementedError as error:
        return str(error)
    return ""


def hopper_forward_reason(problem: Problem, device: torch.device) -> str:
    """Why the Hopper forward does not run this problem; empty when it does."""
    return "the Hopper kernels are not part of this build"


def require(problem: Problem, device: torch.device, impl: str) -> str:
    """The implementation to run.

    Raises:
        NotImplementedError: with the reason, before anything is launched.
    """
    support = choose(problem, device, impl)
    if not support:
        raise NotImplementedError(support.reason)
    return support.impl


def forward(problem: Problem, q: Tensor, impl: str) -> Callable[..., Any]:
    """The forward launcher."""
    require(problem, q.device, impl)
    from .kernels import launch

    return launch.forward


def backward(problem: Problem, q: Tensor, impl: str, deterministic: bool) -> Callable[..., Any]:
    """The backward launcher."""
    require(problem, q.device, impl)
    from .kernels import launch

    return launch.backward
