"""Which kernels run a problem: plain Triton everywhere, Gluon on Hopper where it covers the problem."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .problem import Extras, Problem
from .target import target_of, triton_ready

IMPLS = ("auto", "triton", "hopper", "reference")


class Support(NamedTuple):
    """Answer of :func:`flashtri_core.supports`; true in a boolean context exactly when the call would run."""

    ok: bool
    reason: str  # why not, naming the argument; empty when ok
    impl: str  # the implementation that runs the forward; empty when not ok

    def __bool__(self) -> bool:
        return self.ok


def choose(problem: Problem, device: torch.device, impl: str, deterministic: bool = False) -> Support:
    """The implementation that ``impl`` means for this problem on this device, or why there is none.

    ``deterministic`` asks about the backward as well, which ``impl="hopper"`` may refuse; "auto" has another one then.
    On the meta device there is nothing to compute, and nobody who could not.
    """
    if impl == "reference" or device.type == "meta" or (impl == "auto" and device.type == "cpu"):
        return Support(True, "", "reference")
    named = "" if impl == "auto" else f"impl={impl!r}: "
    reason = triton_ready(device, problem.dtype)
    if reason:
        return Support(False, named + reason, "")
    if impl != "triton":
        reason = hopper_forward_reason(problem, device)
        if impl == "hopper" and deterministic and not reason:
            from .kernels.hopper import launch_backward

            reason = launch_backward.problem_reason(problem, device, deterministic)
        if not reason:
            return Support(True, "", "hopper")
        if impl == "hopper":
            return Support(False, named + reason, "")
    reason = _unfit(problem, device)
    return Support(not reason, named + reason if reason else "", "" if reason else "triton")


def _unfit(problem: Problem, device: torch.device) -> str:
    from . import tuning

    try:
        for kernel in ("fwd", "dkdv", "dq"):
            tuning.choose(kernel, problem, target_of(device))
    except NotImplementedError as error:
        return str(error)
    return ""


def hopper_forward_reason(problem: Problem, device: torch.device) -> str:
    """Why the Hopper forward does not take this problem, whatever its addresses; empty when it does."""
    if target_of(device).capability != 90:
        return f"the Hopper kernels need a GPU of compute capability 9.0, got {target_of(device).name}"
    from .kernels.hopper import launch_forward

    return launch_forward.problem_reason(problem, device)


def require(problem: Problem, device: torch.device, impl: str) -> str:
    """The implementation to run.

    Raises:
        NotImplementedError: with the reason, before anything is launched.
    """
    support = choose(problem, device, impl)
    if not support:
        raise NotImplementedError(support.reason)
    return support.impl


def forward_plan(
    problem: Problem, impl: str, q: Tensor, k: Tensor, v: Tensor, extras: Extras, out: Tensor, lse: Tensor
) -> Callable[..., None]:
    """A callable ``(q, k, v, extras, out, lse, row_max)`` for this problem and these layouts."""
    chosen = require(problem, q.device, impl)
    if chosen == "reference":
        return partial(reference.chunked_forward, problem)
    if chosen == "hopper":
        from .kernels.hopper import launch_forward

        ok, reason = launch_forward.supports(problem, q, k, v, out)
        if ok:
            return launch_forward.Forward(problem, q, k, v, extras, out, lse)
        if impl == "hopper":
            raise NotImplementedError(f"impl='hopper': {reason}")
        _require_triton(problem, q.device)
    from .kernels import launch

    return launch.Forward(problem, q, k, v, extras, out, lse)


def backward_plan(
    problem: Problem, impl: str, deterministic: bool, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, extras: Extras, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    dbias: Tensor | None,
) -> Callable[..., None]:  # fmt: skip
    """A callable ``(do, dlse, q, k, v, out, lse, extras, dq, dk, dv, dsink, dbias)``."""
    chosen = require(problem, q.device, impl)
    if chosen == "reference":
        return partial(reference.chunked_backward, problem)
    if chosen == "hopper":
        from .kernels.hopper import launch_backward

        ok, reason = launch_backward.supports(problem, q, k, v, dq, dk, dv, deterministic)
        if ok:
            return launch_backward.Backward(problem, deterministic)
        if impl == "hopper":
            raise NotImplementedError(f"impl='hopper', backward: {reason}; impl='auto' takes the plain kernel for it")
    _require_triton(problem, q.device)
    from .kernels import launch

    return launch.Backward(problem, do, dlse, q, k, v, out, lse, extras, dq, dk, dv, dbias)


def _require_triton(problem: Problem, device: torch.device) -> None:
    reason = _unfit(problem, device)
    if reason:
        raise NotImplementedError(reason)
