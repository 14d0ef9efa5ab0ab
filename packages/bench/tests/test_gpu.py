"""On a GPU: the adapters compute what their cases say, and the memory counter counts."""

import pytest
import torch

from flashtri_bench import memory
from flashtri_bench.cases import SUITES
from flashtri_bench.measure import Unit, measure
from flashtri_bench.timing import CudaClock, Timed, interleave

pytestmark = pytest.mark.gpu

PEERS = ("flashtri", "flashtri-triton", "torch-flash", "torch-cudnn", "torch-efficient", "torch-math")


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in SUITES["features"]])
def test_every_adapter_is_right_or_says_why(case):
    events = []
    unit = Unit(case.id, PEERS, case.ops, "bf16", "cuda", smoke=True, window_ms=1.0, least=3, most=5)
    measure(unit, events.append)
    skips = [e for e in events if e["event"] == "skip"]
    rows = [e["row"] for e in events if e["event"] == "row"]
    assert {row["op"] for row in rows if row["impl"] == "flashtri"} == set(case.ops), skips
    assert not [s for s in skips if "wrong result" in s["reason"]]
    assert len(skips) + len(rows) >= len(PEERS)


def test_peak_memory_is_the_calls_own():
    """Public report 141: peak memory that includes warm-up or tuning."""
    calls = []

    def call():
        torch.empty((1 << 30) if not calls else (1 << 26), dtype=torch.uint8, device="cuda")
        calls.append(1)
        return [torch.empty(1 << 20, dtype=torch.uint8, device="cuda")]

    peak = memory.measure(call, memory.CudaMeter())
    assert peak.peak_bytes == 1 << 26
    assert peak.extra_bytes == (1 << 26) - (1 << 20)


@pytest.mark.alone
def test_a_cold_cache_is_slower_than_a_warm_one():
    """Public report 140: a warm L2 distorts small cases."""
    x = torch.randn(1 << 22, device="cuda")  # 16 MB: fits the L2 of every supported data-centre card

    class Warm(CudaClock):
        def flush(self):
            x.sum()

    cold = interleave({"sum": Timed(lambda: x.sum())}, CudaClock(), window_ms=20)["sum"]
    warm = interleave({"sum": Timed(lambda: x.sum())}, Warm(), window_ms=20)["sum"]
    assert warm.p50 < cold.p50


@pytest.mark.alone
def test_host_time_is_not_in_the_device_time():
    """Public report 140: launch overhead counted as device time."""
    import time

    x = torch.randn(1 << 10, device="cuda")

    def slow_to_launch():
        time.sleep(2e-3)
        x.add_(0)

    assert interleave({"add": Timed(slow_to_launch)}, CudaClock(), least=5, most=5)["add"].p50 < 0.2
