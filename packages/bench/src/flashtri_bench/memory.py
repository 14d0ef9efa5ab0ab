"""Peak memory of one forward and backward call."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# The memory that every peer is given, so that the point where each runs out does not depend on how large a card was
# rented. 16 GiB is a common size of smaller cards.
CAP_BYTES = 16 << 30


class Meter(Protocol):
    """Counters of a device's allocator."""

    def settle(self) -> None:
        """Wait for the device, and give back what is free."""

    def reset_peak(self) -> None:
        """Forget the peak so far."""

    def allocated(self) -> int:
        """Bytes in use now."""

    def peak(self) -> int:
        """Most bytes in use since `reset_peak`."""


class CudaMeter:
    """Torch's caching allocator on the current GPU."""

    def settle(self) -> None:
        """Synchronise and empty the cache."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Start counting the peak anew."""
        torch.cuda.reset_peak_memory_stats()

    def allocated(self) -> int:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Most bytes of live tensors."""
        return torch.cuda.max_memory_allocated()


class ProcessMeter:
    """The process's resident memory: good enough to show that the suite runs where there is no GPU."""

    def settle(self) -> None:
        """Collect garbage."""
        gc.collect()

    def reset_peak(self) -> None:
        """A process can't reset its peak."""

    def allocated(self) -> int:
        """The peak so far, since the present size is not known portably."""
        return self.peak()

    def peak(self) -> int:
        """Peak resident size."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class Peak:
    """Bytes of one call.

    Attributes:
        peak_bytes: Most bytes above what was allocated before the call.
        extra_bytes: The same less what the call returned.
    """

    peak_bytes: int
    extra_bytes: int


def measure(call: Callable[[], Sequence[Tensor]], meter: Meter) -> Peak:
    """Peak memory of a call that has been warmed up.

    The call runs once more first: compilation, tuning and workspaces that stay are not the call's own. Only then is the
    peak reset and the call measured.

    Args:
        call: Returns the tensors it made (output and gradients).
        meter: The allocator.

    Returns:
        The peak above the state before the call.
    """
    call()
    meter.settle()
    meter.reset_peak()
    before = meter.allocated()
    made = call()
    peak = max(0, meter.peak() - before)
    returned = sum(t.untyped_storage().nbytes() for t in made)
    return Peak(peak, max(0, peak - returned))
