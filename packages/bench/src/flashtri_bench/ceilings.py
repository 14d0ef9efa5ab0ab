"""The card's own limits, measured in the same run as the peers: a copy and a square matmul."""

from __future__ import annotations

from collections.abc import Mapping
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
    source = torch.randint(0, 1 << 30, (copy_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = interleave({"copy": Timed(lambda: target.copy_(source))}, clock, window_ms=50)
    copy_tb_s = 2 * copy_bytes / times["copy"].p50 * 1e-9
    del source, target
    rates: dict[str, float] = {}
    for name in dtypes:
        rates[name] = 0.0
        for n in sizes:
            a, b = (torch.randn(n, n, device=device).to(DTYPES[name]) for _ in range(2))
            times = interleave({"matmul": Timed(_product(a, b))}, clock, window_ms=150)
            rates[name] = max(rates[name], 2 * n**3 / times["matmul"].p50 * 1e-9)
    return {"copy_tb_s": copy_tb_s, "matmul_tflops": rates}


def _product(a: torch.Tensor, b: torch.Tensor) -> Any:
    return lambda: a @ b


def matmul_rate(ceilings: Mapping[str, Any] | None, dtype: str) -> float | None:
    """TFLOP/s of the matmul of one dtype, None if it was not measured."""
    return None if ceilings is None else ceilings["matmul_tflops"].get(dtype)
