"""What runs where, asked of ``flashtri_core.supports``: fake CUDA tensors, and one target after another in place of a GPU."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashtri_core import Support, supports, target
from flashtri_core.target import SHARED_MEMORY, Target
from flashtri_core.variants import attn_bias

GPUS = {
    80: "A100",
    86: "RTX 30, A10",
    89: "RTX 40, L4",
    90: "H100, H200",
    100: "B200",
    120: "RTX 50",
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (255, 0)},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": ((4,), torch.float32)},
    "sink": {"learnable_sink": ((4,), torch.float32)},
    "bias": {"attn_bias": ((1, 4, 256, 256), torch.float32)},
    "mask": {"attn_mask": ((1, 1, 256, 256), torch.bool)},
    "dropout": {"dropout_p": 0.1},
    "seqused_k": {"seqused_k": ((2,), torch.int32)},
    "gqa": {"heads_k": 2},
}


def _modules() -> list[Any]:
    """Every module of flashtri_core that asks which GPU a tensor lies on; all are imported first, outside any patch."""
    with suppress(ImportError):  # Triton is missing, or too old for Gluon: dispatch says so itself
        from flashtri_core.kernels import hopper

        for found in pkgutil.iter_modules(hopper.__path__):
            importlib.import_module(f"{hopper.__name__}.{found.name}")
    return [m for name, m in list(sys.modules.items()) if name.startswith("flashtri_core") and hasattr(m, "target_of")]


@contextmanager
def on(capability: int) -> Iterator[None]:
    """Inside, every CUDA tensor lies on a GPU of this compute capability (80 for 8.0)."""
    here = Target(capability, SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values())))
    with ExitStack() as stack:
        for module in _modules():
            stack.enter_context(mock.patch.object(module, "target_of", lambda device: here))
        stack.enter_context(mock.patch.object(target, "INTERPRETED", False))
        # a torch built without CUDA cannot index a fake CUDA tensor; the tensors below have four dimensions already
        stack.enter_context(mock.patch.object(attn_bias, "as_4d", lambda bias: bias))
        yield


def ask(
    capability: int,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    impl: str = "auto",
    device: str = "cuda",
    **call: Any,
) -> Support:
    """``supports`` for a (2, 4, 256, head_dim) call with the keywords of FEATURES."""
    call = dict(call)
    heads_k = call.pop("heads_k", 4)
    with FakeTensorMode(), on(capability):
        make = lambda spec: torch.empty(spec[0], dtype=spec[1], device=device)
        q = make(((2, 4, 256, head_dim), dtype))
        k = make(((2, heads_k, 256, head_dim), dtype))
        extras = {
            name: make(value) if isinstance(value, tuple) and isinstance(value[0], tuple) else value
            for name, value in call.items()
        }
        return supports(q, k, k, impl=impl, **extras)


def features() -> list[tuple[str, str, str, str, str]]:
    """(feature, Triton kernels, Hopper kernels, CPU path): "yes", or the reason why not; and what "auto" picks on Hopper."""
    rows = []
    for name, call in FEATURES.items():
        answers = (
            ask(80, impl="triton", **call),
            ask(90, impl="hopper", **call),
            ask(80, impl="reference", device="cpu", **call),
        )
        rows.append((name, *("yes" if answer else answer.reason for answer in answers), ask(90, **call).impl))
    return rows


def dtypes() -> list[tuple[str, str, str]]:
    """(dtype, on a GPU, on a CPU)."""
    return [
        (name, *("yes" if answer else answer.reason for answer in (ask(80, dtype), ask(80, dtype, device="cpu"))))
        for name, dtype in DTYPES.items()
    ]


def head_dims(dims: tuple[int, ...] = (32, 64, 96, 128, 192, 256)) -> list[tuple[int, list[str]]]:
    """(head dim, per GPU: which implementation runs a bf16 call)."""
    answers = lambda dim: (ask(gpu, head_dim=dim) for gpu in GPUS)
    return [(dim, [answer.impl or answer.reason for answer in answers(dim)]) for dim in dims]


__all__ = ["DTYPES", "FEATURES", "GPUS", "ask", "dtypes", "features", "head_dims", "on"]
