import contextlib
import types

import pytest

from flashtri_bench import timing
from flashtri_bench.memory import measure
from flashtri_bench.timing import CpuClock, CudaClock, HangError, Timed, host_time, interleave, quantiles, rounds_for


class FakeClock:
    """Writes down what is asked of it; every call takes as many milliseconds as its function returns."""

    def __init__(self):
        self.log = []

    def flush(self):
        self.log.append("flush")

    def start(self, timed, cover_s):
        with timed.around():
            taken = timed.fn()
        self.log.append(("start", cover_s > 0))
        return taken

    def finish(self, handle, peer):
        self.log.append(("finish", peer))
        return handle

    def wait(self, peer):
        self.log.append(("wait", peer))


def test_every_timed_call_meets_a_cold_cache():
    """Public report 140: a warm L2 distorts small cases."""
    clock = FakeClock()
    interleave({"a": Timed(lambda: 1.0), "b": Timed(lambda: 2.0)}, clock, window_ms=30)
    starts = [i for i, entry in enumerate(clock.log) if entry[0] == "start"]
    assert len(starts) > 30
    assert all(clock.log[i - 1] == "flush" for i in starts)


def test_host_time_is_hidden_in_timed_rounds():
    """Public report 140: launch overhead counted as device time."""
    clock = FakeClock()
    interleave({"a": Timed(lambda: 1.0)}, clock, window_ms=5, least=5, most=5, warmup=2)
    covered = [entry[1] for entry in clock.log if entry[0] == "start"]
    assert covered == [False, False, True, True, True, True, True]


def test_peers_take_turns_and_the_first_one_rotates():
    order = []
    calls = {name: Timed(lambda name=name: order.append(name) or 1.0) for name in "abc"}
    interleave(calls, FakeClock(), window_ms=1, least=3, most=3, warmup=1)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"


def test_warm_up_is_not_counted():
    """Public report 123: the first calls tune and compile; none of that may be in a figure."""
    taken = iter([1000.0] * 3 + [5.0] * 100)
    result = interleave({"a": Timed(lambda: next(taken))}, FakeClock(), window_ms=1, least=10, most=10, warmup=3)
    assert result["a"] == timing.Quantiles(5.0, 5.0, 5.0, 10)


def test_context_is_entered_outside_the_clock():
    inside = []

    @contextlib.contextmanager
    def around():
        inside.append(True)
        yield
        inside.pop()

    def call():
        assert inside
        return 1.0

    interleave({"a": Timed(call, around)}, FakeClock(), least=1, most=1)
    assert not inside


def test_rounds_follow_the_window_within_bounds():
    assert rounds_for(10.0, 400.0, 15, 60) == 40
    assert rounds_for(100.0, 400.0, 15, 60) == 15
    assert rounds_for(0.001, 400.0, 15, 60) == 60


def test_quantiles():
    spread = quantiles([float(i) for i in range(11)])
    assert (spread.p20, spread.p50, spread.p80, spread.rounds) == (2.0, 5.0, 8.0, 11)
    with pytest.raises(ValueError, match="got none"):
        quantiles([])


def test_host_time_counts_calls_not_rounds():
    calls = []
    spread = host_time(Timed(lambda: calls.append(1)), CpuClock(), "a", calls=10, rounds=4)
    assert len(calls) == 10 * 5  # a first round warms up
    assert spread.rounds == 4
    assert 0 < spread.p50 < 1000


def test_a_peer_that_never_finishes_is_named(monkeypatch):
    clock = CudaClock.__new__(CudaClock)
    clock.timeout_s = 0.01
    with pytest.raises(HangError, match=r"flex did not finish within 0\.01 s") as raised:
        clock._poll(types.SimpleNamespace(query=lambda: False), "flex")
    assert raised.value.peer == "flex"


def test_cpu_clock_measures_the_call():
    clock = CpuClock()
    ticks = iter([1.0, 1.25])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.time, "perf_counter", lambda: next(ticks))
        assert clock.finish(clock.start(Timed(lambda: None), 0.0), "a") == pytest.approx(250.0)


class FakeMeter:
    """An allocator with a peak, as torch's caching allocator counts."""

    def __init__(self):
        self.now = self.most = 0

    def use(self, size):
        self.now += size
        self.most = max(self.most, self.now)

    def settle(self):
        pass

    def reset_peak(self):
        self.most = self.now

    def allocated(self):
        return self.now

    def peak(self):
        return self.most


class FakeTensor:
    def __init__(self, size):
        self.size = size

    def untyped_storage(self):
        return types.SimpleNamespace(nbytes=lambda: self.size)


def test_peak_memory_is_the_calls_own():
    """Public report 141: peak memory that includes warm-up or tuning."""
    meter = FakeMeter()
    meter.use(100)  # the inputs
    calls = []

    def call():
        size = 10**9 if not calls else 700  # the first call tunes
        calls.append(size)
        meter.use(size)
        meter.use(-size)
        meter.use(50)
        return [FakeTensor(50)]

    peak = measure(call, meter)
    assert len(calls) == 2
    assert peak.peak_bytes == 700
    assert peak.extra_bytes == 650


def test_peak_memory_sees_an_expanded_copy():
    """Public reports 134 and 136: padded statistics and expanded K, V are memory beyond outputs, whatever N is."""
    meter = FakeMeter()

    def call(copied):
        meter.use(40)
        meter.use(copied)
        meter.use(-copied)
        return [FakeTensor(40)]

    assert measure(lambda: call(0), meter).extra_bytes == 0
    assert measure(lambda: call(320), meter).extra_bytes == 320
