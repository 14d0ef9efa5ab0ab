"""Documents to test with: made by hand, so that they pass every rule and one change breaks one rule."""

import copy

import pytest
import torch

from flashtri_bench import results
from flashtri_bench.cases import BY_ID, SUITES
from flashtri_core.testing.plugin import gpu_turn, pytest_runtest_setup

__all__ = ["gpu_turn", "pytest_runtest_setup"]

RUN = {
    "id": "20260101T000000Z-0123456a",
    "started_at": "2026-01-01T00:00:00Z",
    "commit": "0123456a" * 5,
    "dirty": False,
    "command": "flashtri-bench run",
    "environment": {
        "device": "cuda", "gpu": "Test GPU", "sm": "9.0", "driver": "1", "cuda": "13.0", "cudnn": "9",
        "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.0", "peers": {"fa4": "4.0"},
    },
    "protocol": {
        "timer": "cuda_event", "l2_flush_bytes": 1 << 28, "order": "interleaved", "statistic": "median",
        "flops": "exact", "smoke": False,
    },
    "ceilings": {"copy_tb_s": 4.0, "matmul_tflops": {"bf16": 700.0}},
}  # fmt: skip
CHECK = {"ok": True, "max_err": 0.001, "budget": 0.004, "ratio": 0.5}


def spread(p50):
    return {"p20": p50 * 0.99, "p50": p50, "p80": p50 * 1.01, "rounds": 15}


def row(case, op, impl, run=RUN, check=CHECK, **measure):
    """A row of a real case; `rate=` makes a timed one that reaches so many TFLOP/s."""
    problem = BY_ID[case]
    base = {"run": run["id"], "suite": problem.suite, "case": case, "op": op, "impl": impl, "dtype": "bf16"}
    base |= results.describe(problem) | {"resolved": None, "check": dict(check)}
    if "rate" in measure:
        ms = results.flops(problem, op) / measure["rate"] * 1e-9
        timed = results.timed(problem, op, "bf16", spread(ms), run["ceilings"])
        return base | {"metric": "time"} | timed
    (name,) = measure
    metric = next(m for m, field in results.MEASURES.items() if field == name)
    return base | {"metric": metric} | measure


def document(run=RUN, factor=1.0):
    """Grid rows of three implementations, and one row of every other metric."""
    rates = {"flashtri": 500.0, "torch-flash": 300.0, "fa4": 520.0}
    rows = [
        row(case.id, op, impl, run, rate=rate * factor)
        for case in SUITES["grid"]
        for op in case.ops
        for impl, rate in rates.items()
    ]
    for impl, extra in (("flashtri", 1 << 20), ("eager", 1 << 28)):
        sizes = {"oom": False, "cap_bytes": 1 << 34, "peak_bytes": extra + (1 << 24), "extra_bytes": extra}
        rows.append(row("memory-n1024", "fwd_bwd", impl, run, memory=sizes))
    gone = {"oom": True, "cap_bytes": 1 << 34, "peak_bytes": None, "extra_bytes": None}
    rows.append(row("memory-n2048", "fwd_bwd", "eager", run, memory=gone))
    rows.append(row("host-b1-h4-n128-d64", "fwd", "flashtri", run, host_us=spread(31.0)))
    rows.append(row("first-call-d128-causal", "fwd_bwd", "flashtri", run, first_call_s={"cold": 6.0, "warm": 1.5}))
    errors = {name: {"max": 1e-3, "mean": 1e-5, "rmse": 2e-5} for name in ("out", "dq", "dk", "dv")}
    rows.append(row("errors-d64-full-normal", "fwd_bwd", "flashtri", run, error={"inputs": "normal"} | errors))
    skip = {"run": run["id"], "suite": "features", "case": "features-dropout10", "op": "fwd", "impl": "flex"}
    skips = [skip | {"dtype": "bf16", "reason": "FlexAttention has no dropout"}]
    return results.normalised({"schema_version": 1, "runs": [run], "rows": rows, "skipped": skips})


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Problems of these sizes are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def good():
    """A document that may be committed."""
    return copy.deepcopy(document())


@pytest.fixture
def make():
    """The functions above, for tests that build their own."""
    return type(
        "Make", (), {"row": staticmethod(row), "document": staticmethod(document), "run": RUN, "spread": spread}
    )
