"""Clocks. On a GPU: CUDA events around one call, a cold L2, peers interleaved; on a CPU: perf_counter.

Three mistakes that make attention kernels look faster or slower than they are have their counter-measure here: a warm
L2 (a buffer larger than the cache is written before every timed call), clock drift between peers (they take turns, in
an order that rotates), and host time counted as device time (the device is kept busy until the whole call is queued).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Twice the largest L2 in use (126 MB on a B200): whatever the timed call reads has left the cache.
FLUSH_BYTES = 256 << 20
# The spin that hides host time is given in cycles; no GPU clocks higher, so it never ends early.
CYCLES_PER_S = 3e9


class HangError(RuntimeError):
    """The device did not finish a peer's work in time.

    Attributes:
        peer: Whose work it is.
    """

    def __init__(self, peer: str, seconds: float) -> None:
        super().__init__(f"{peer} did not finish within {seconds:g} s")
        self.peer = peer


@dataclass(frozen=True)
class Timed:
    """Something to time.

    Attributes:
        fn: The call; what happens in it is what is measured.
        around: Context entered outside the timed region, such as a choice of backend.
    """

    fn: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


@dataclass(frozen=True)
class Quantiles:
    """Durations of one peer, in the unit of the clock (milliseconds or microseconds)."""

    p20: float
    p50: float
    p80: float
    rounds: int

    def as_dict(self) -> dict[str, float | int]:
        """The form in results.json."""
        return {"p20": self.p20, "p50": self.p50, "p80": self.p80, "rounds": self.rounds}


def quantiles(samples: Sequence[float]) -> Quantiles:
    """20th, 50th and 80th percentile.

    Raises:
        ValueError: No samples.
    """
    if not samples:
        raise ValueError("samples: got none")
    ordered = sorted(samples)
    if len(ordered) == 1:
        return Quantiles(ordered[0], ordered[0], ordered[0], 1)
    cuts = statistics.quantiles(ordered, n=10, method="inclusive")
    return Quantiles(cuts[1], cuts[4], cuts[7], len(ordered))


class Clock(Protocol):
    """What the round-robin needs of a device."""

    def flush(self) -> None:
        """Evict what earlier calls left in the cache."""

    def start(self, timed: Timed, cover_s: float) -> Any:
        """Run a call once; `cover_s` is the host time to hide. Returns a handle for `finish`."""

    def finish(self, handle: Any, peer: str) -> float:
        """Wait for a call and return its duration in milliseconds."""

    def wait(self, peer: str) -> None:
        """Wait until the device is idle."""


class CudaClock:
    """Durations by CUDA events.

    Args:
        timeout_s: How long a peer's work may take before it counts as hung. Waiting polls an event rather than
            blocking, because a blocked process can't say which kernel it waits for.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self._buffer: torch.Tensor | None = None

    def flush(self) -> None:
        """Write a buffer larger than L2."""
        if self._buffer is None:  # not before it is needed: peak memory is measured by processes that never flush
            self._buffer = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._buffer.zero_()

    def start(self, timed: Timed, cover_s: float) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Queue one call between two events, behind a spin long enough that the queue is complete when it ends."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with timed.around():
            if cover_s > 0:
                torch.cuda._sleep(int(cover_s * CYCLES_PER_S))
            begin.record()
            timed.fn()
            end.record()
        return begin, end

    def finish(self, handle: tuple[torch.cuda.Event, torch.cuda.Event], peer: str) -> float:
        """Milliseconds between the two events."""
        begin, end = handle
        self._poll(end, peer)
        return float(begin.elapsed_time(end))

    def wait(self, peer: str) -> None:
        """Wait for everything queued so far."""
        event = torch.cuda.Event()
        event.record()
        self._poll(event, peer)

    def _poll(self, event: torch.cuda.Event, peer: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not event.query():
            if time.monotonic() > deadline:
                raise HangError(peer, self.timeout_s)
            time.sleep(50e-6)


class CpuClock:
    """Durations by perf_counter; there is no cache to flush that a call of this size would not fill itself."""

    def flush(self) -> None:
        """Nothing to do."""

    def start(self, timed: Timed, cover_s: float) -> float:
        """Run the call and return its milliseconds."""
        with timed.around():
            begin = time.perf_counter()
            timed.fn()
            return (time.perf_counter() - begin) * 1e3

    def finish(self, handle: float, peer: str) -> float:
        """The duration that `start` measured."""
        return handle

    def wait(self, peer: str) -> None:
        """Nothing is queued on a CPU."""


def clock_for(device: str, timeout_s: float = 60.0) -> Clock:
    """The clock of a device type, "cuda" or "cpu"."""
    return CudaClock(timeout_s) if device == "cuda" else CpuClock()


def rounds_for(total_ms: float, window_ms: float, least: int, most: int) -> int:
    """How many rounds fill the time window when one round of all peers takes `total_ms`."""
    return max(least, min(most, int(window_ms / max(total_ms, 1e-3))))


def interleave(
    calls: Mapping[str, Timed],
    clock: Clock,
    *,
    window_ms: float = 400.0,
    least: int = 15,
    most: int = 60,
    warmup: int = 3,
) -> dict[str, Quantiles]:
    """Time several calls round-robin.

    Every peer runs once per round, and the starting peer moves on by one each round, so that a clock that throttles or
    a neighbour that wakes up hits all peers alike. The caller has run each call before; `warmup` further rounds are
    not counted and give the host time to hide and the number of rounds.

    Args:
        calls: Peers by name.
        clock: The device's clock.
        window_ms: Device time that all rounds together should take, before `least` and `most` apply.
        least: Fewest rounds.
        most: Most rounds.
        warmup: Rounds whose durations are thrown away, at least 1.

    Returns:
        Milliseconds by peer.
    """
    names = list(calls)
    host_s = dict.fromkeys(names, 0.0)
    total_ms = 0.0
    for i in range(max(1, warmup)):
        total_ms = 0.0
        for name in names:
            clock.wait(name)
            clock.flush()
            begin = time.perf_counter()
            handle = clock.start(calls[name], 0.0)
            host_s[name] = time.perf_counter() - begin if i == 0 else min(host_s[name], time.perf_counter() - begin)
            total_ms += clock.finish(handle, name)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds_for(total_ms, window_ms, least, most)):
        shift = r % len(names)
        handles = []
        for name in names[shift:] + names[:shift]:
            clock.flush()
            # Half as long again as the fastest warm-up launch took: launches jitter.
            handles.append((name, clock.start(calls[name], 1.5 * host_s[name])))
        for name, handle in handles:
            samples[name].append(clock.finish(handle, name))
    return {name: quantiles(values) for name, values in samples.items()}


def host_time(timed: Timed, clock: Clock, peer: str, calls: int = 30, rounds: int = 15) -> Quantiles:
    """Microseconds that the processor spends in one call, the device not waited for.

    Args:
        timed: The call; its context is entered once, outside.
        clock: The device's clock.
        peer: Whose call it is.
        calls: Calls per round; few enough that the launch queue of the device never fills.
        rounds: How often that is measured.

    Returns:
        Microseconds per call.
    """
    samples = []
    with timed.around():
        for _ in range(rounds + 1):
            clock.wait(peer)
            begin = time.perf_counter()
            for _ in range(calls):
                timed.fn()
            samples.append((time.perf_counter() - begin) / calls * 1e6)
    clock.wait(peer)
    return quantiles(samples[1:])
