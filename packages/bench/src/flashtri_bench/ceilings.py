"""The card's own limits, measured in the same run as the peers: a copy and a square matmul."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .inputs import DTYPES
from .timing import Clock, Timed, interleave

SIZES = {"cuda": (1 << 30, (4096, 8192)), "cpu": (1 << 22, (256,))}


def measure(device: str, dtypes: tuple[str, ...], clock: Clock) -> dict[str, Any]:
    """Copy bandwidth and matmul rates.

    Args:
        device: "cuda" or "cpu".
        dtypes: Element types of the matmuls.
        clock: The device's clock.

    Returns:
        `ceilings` of the schema. Matmuls multiply normal random numbers, as attention's products do: a GPU's clock
        depends on how many bits toggle.
    """
    copy_bytes, sizes = SIZES[device]
    times = interleave({"copy": Timed(_copy(copy_bytes, device))}, clock, window_ms=50)
    copy_tb_s = 2 * copy_bytes / times["copy"].p50 * 1e-9
    rates: dict[str, float] = {}
    for name in dtypes:
        rates[name] = 0.0
        for n in sizes:
            times = interleave({"matmul": Timed(_product(n, DTYPES[name], device))}, clock, window_ms=150)
            rates[name] = max(rates[name], 2 * n**3 / times["matmul"].p50 * 1e-9)
    return {"copy_tb_s": copy_tb_s, "matmul_tflops": rates}


def _copy(size: int, device: str) -> Callable[[], torch.Tensor]:
    source = torch.randint(0, 1 << 30, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(n: int, dtype: torch.dtype, device: str) -> Callable[[], torch.Tensor]:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return lambda: a @ b
