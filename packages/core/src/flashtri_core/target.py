"""The only file that asks which device this is, what memory it has, and whether Triton is interpreted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ._jit import HAS_TRITON, INTERPRETED, triton_version

#: Shared memory one program may use, bytes, by compute capability (CUDA programming guide, table of capabilities).
SHARED_MEMORY = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}


@dataclass(frozen=True, slots=True)
class Target:
    """Where a kernel runs: ``capability`` as 10 * major + minor, shared memory per program in bytes."""

    capability: int
    shared_memory: int
    interpreted: bool = False
    multiprocessors: int = 132

    @property
    def name(self) -> str:
        """Key in configs/*.json, and how messages call it."""
        return "interpreter" if self.interpreted else f"sm_{self.capability}"


INTERPRETER = Target(capability=0, shared_memory=1 << 30, interpreted=True)


@cache
def _cuda_target(index: int) -> Target:
    major, minor = torch.cuda.get_device_capability(index)
    properties = torch.cuda.get_device_properties(index)
    limit = getattr(properties, "shared_memory_per_block_optin", None) or SHARED_MEMORY.get(10 * major + minor, 101376)
    return Target(10 * major + minor, limit, multiprocessors=properties.multi_processor_count)


def target_of(device: torch.device) -> Target:
    """Target of a tensor's device; CPU tensors mean the interpreter, and meta ones stand for the current GPU's."""
    if device.type in ("cuda", "meta"):
        return _cuda_target(device.index if device.index is not None else torch.cuda.current_device())
    return INTERPRETER


def triton_ready(device: torch.device, dtype: torch.dtype) -> str:
    """Why Triton kernels cannot run on tensors of this device and dtype; empty when they can."""
    if not HAS_TRITON:
        return "Triton is not installed (pip install triton, Linux only); CPU tensors take impl='reference'"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"q: the kernels compute in float16 and bfloat16, got {dtype}; impl='reference' computes the others"
    if device.type == "cpu":
        if not INTERPRETED:
            return "CPU tensors need Triton's interpreter (TRITON_INTERPRET=1 before the import) or impl='reference'"
        if dtype is torch.bfloat16:
            return "Triton's interpreter multiplies bfloat16 wrongly; use float16 under TRITON_INTERPRET=1"
        return ""
    if device.type != "cuda":
        return f"expected CUDA or CPU tensors, got {device.type}"
    if INTERPRETED:
        return "TRITON_INTERPRET=1 is set: the interpreter runs on CPU tensors only"
    if target_of(device).capability < 80:
        return f"the kernels need compute capability 8.0 or newer, got {target_of(device).name}"
    return ""


def empty_like(x: Tensor) -> Tensor:
    """``torch.empty_like`` of a dense tensor. torch's own, on the meta device, is Python that imports SymPy: 0.3 s."""
    return x.new_empty_strided(x.shape, x.stride()) if x.is_meta else torch.empty_like(x)


def maker(x: Tensor) -> Callable[[], Tensor]:
    """A function that makes uninitialised tensors of x's layout, on the current device if x is on a GPU.

    It asks the allocator as compiled code does, past the dispatcher, in half the time of ``torch.empty_like``.
    """
    if x.is_meta:
        return partial(empty_like, x)
    guards: Any = torch._C._dynamo.guards
    empty = guards._empty_strided_cuda if x.is_cuda else guards._empty_strided_cpu
    return partial(empty, tuple(x.shape), x.stride(), x.dtype)


__all__ = [
    "INTERPRETER",
    "SHARED_MEMORY",
    "Target",
    "empty_like",
    "maker",
    "target_of",
    "triton_ready",
    "triton_version",
]
