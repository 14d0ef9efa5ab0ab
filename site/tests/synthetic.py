"""A results document with made-up figures, for driving the benchmark page in tests. Never written to results.json."""

from __future__ import annotations

from typing import Any

from flashtri_bench import results
from flashtri_bench.cases import SUITES
from flashtri_bench.memory import CAP_BYTES

RUN = {
    "id": "20260101T000000Z-test",
    "started_at": "2026-01-01T00:00:00Z",
    "commit": "0123456",
    "dirty": False,
    "command": "a test",
    "environment": {
        "device": "cuda", "gpu": "Imaginary GPU", "sm": "9.0", "driver": "1", "cuda": "1", "cudnn": "1", "torch": "1",
        "triton": "1", "python": "3", "peers": {},
    },
    "protocol": {"timer": "cuda_event", "l2_flush_bytes": 1, "order": "o", "statistic": "s", "flops": "f", "smoke": False},
    "ceilings": {"copy_tb_s": 2.0, "matmul_tflops": {"bf16": 500.0}},
}  # fmt: skip
CHECK = {"ok": True, "max_err": 0.0, "budget": 1.0, "ratio": 1.0}


def document() -> dict[str, Any]:
    """Rows for every chart, with implementations that run out of memory at different lengths."""
    rows: list[dict[str, Any]] = []

    def add(case: Any, op: str, impl: str, metric: str, **figures: Any) -> None:
        row = {
            "run": RUN["id"],
            "suite": case.suite,
            "case": case.id,
            "op": op,
            "impl": impl,
            "dtype": "bf16",
            "metric": metric,
        }
        rows.append({**row, **results.describe(case), "resolved": None, "check": CHECK, **figures})

    for case in SUITES["grid"]:
        for op in case.ops:
            for impl, rate in (("flashtri", 400e9), ("torch-flash", 300e9), ("torch-cudnn", 390e9)):
                p50 = results.flops(case, op) / rate
                time_ms = {"p20": p50 * 0.9, "p50": p50, "p80": p50 * 1.1, "rounds": 9}
                add(case, op, impl, "time", **results.timed(case, op, "bf16", time_ms, RUN["ceilings"]))
    for case in SUITES["memory"]:
        # bytes beyond inputs, output and gradients: so many per row, or per score of each of the 16 heads
        for impl, per_row, per_score in (
            ("flashtri", 128, 0),
            ("torch-flash", 192, 0),
            ("torch-math", 0, 80),
            ("eager", 0, 64),
        ):
            extra = case.seqlen_q * (per_row + case.seqlen_q * per_score)
            peak = extra + 8 * 16 * case.seqlen_q * 128 * 2
            oom = peak > CAP_BYTES
            memory = {
                "oom": oom,
                "cap_bytes": CAP_BYTES,
                "peak_bytes": None if oom else peak,
                "extra_bytes": None if oom else extra,
            }
            add(case, "fwd_bwd", impl, "memory", memory=memory)
    for case in SUITES["host"]:
        add(case, "fwd", "flashtri", "host", host_us={"p20": 1.0, "p50": 2.0, "p80": 3.0, "rounds": 9})
    for case in SUITES["first_call"]:
        add(case, "fwd_bwd", "flashtri", "first_call", first_call_s={"cold": 2.0, "warm": 1.0})
    for case in SUITES["errors"]:
        for impl, rmse in (("flashtri", 2e-4), ("torch-flash", 3e-4), ("eager", 2.5e-4)):
            error = {
                t: {"max": 5 * rmse, "mean": rmse / 2, "rmse": f * rmse}
                for t, f in (("out", 1), ("dq", 2), ("dk", 3), ("dv", 1.5))
            }
            add(case, "fwd_bwd", impl, "error", error={"inputs": case.inputs} | error)
    skip = {
        "run": RUN["id"],
        "suite": "grid",
        "case": "grid-d64-full-n512",
        "op": "fwd",
        "impl": "absent",
        "dtype": "bf16",
    }
    skip["reason"] = "not installed"
    return results.normalised({"schema_version": 1, "runs": [RUN], "rows": rows, "skipped": [skip]})
