"""How wrong may a result be? No more than plain PyTorch is in the same dtype, on the same numbers.

Against float64, the largest error may be twice that of same-dtype eager attention and the mean error 1.2 times, plus
one rounding to the result's dtype. Infinities must agree exactly; NaN is never right. Results in float64 have no such
yardstick and must agree to 1e-10 of their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_FACTOR, MEAN_FACTOR = 2.0, 1.2
FLOAT64 = 1e-10
FEW = 64  # a mean over fewer entries is no statistic; the largest error judges them alone


@dataclass(frozen=True)
class Verdict:
    """One tensor's errors beside what they may be."""

    name: str
    largest: float
    largest_allowed: float
    mean: float
    mean_allowed: float

    @property
    def ok(self) -> bool:
        """Within budget; false for NaN."""
        return self.largest <= self.largest_allowed and self.mean <= self.mean_allowed

    def __str__(self) -> str:
        return (
            f"{self.name}: largest error {self.largest:.2e} of {self.largest_allowed:.2e} allowed, "
            f"mean {self.mean:.2e} of {self.mean_allowed:.2e}"
        )


def judge(name: str, got: Tensor, right: Tensor, eager: Tensor | None) -> Verdict:
    """Hold ``got`` against ``right`` (float64), with ``eager``'s error as the yardstick (None for float64 inputs).

    Raises:
        AssertionError: the shape or the infinite entries differ.
    """
    if got.shape != right.shape:
        raise AssertionError(f"{name} has shape {tuple(got.shape)}, expected {tuple(right.shape)}")
    infinite = right.isinf()
    if not torch.equal(got.isinf(), infinite) or not torch.equal(got[infinite].double(), right[infinite]):
        raise AssertionError(f"{name} is infinite in {int(got.isinf().sum())} places, expected {int(infinite.sum())}")
    rounding = torch.finfo(got.dtype).eps / 2
    got, right = got[~infinite].double(), right[~infinite]
    if not got.numel():
        return Verdict(name, 0.0, 0.0, 0.0, 0.0)
    error, size = (got - right).abs(), right.abs()
    largest, mean = error.max().item(), error.mean().item()
    if eager is None:
        allowed = FLOAT64 * (1.0 + size.max().item()) + rounding * size.max().item()
        return Verdict(name, largest, allowed, mean, allowed)
    yardstick = (eager[~infinite].double() - right).abs()
    largest_allowed = MAX_FACTOR * yardstick.max().item() + rounding * size.max().item()
    mean_allowed = MEAN_FACTOR * yardstick.mean().item() + rounding * size.mean().item()
    return Verdict(name, largest, largest_allowed, mean, largest_allowed if error.numel() < FEW else mean_allowed)


def check(got: Mapping[str, Tensor], right: Mapping[str, Tensor], eager: Mapping[str, Tensor] | None) -> None:
    """Hold every result against its budget.

    Raises:
        AssertionError: with the errors of everything that is over budget.
    """
    verdicts = [judge(name, got[name], right[name], None if eager is None else eager[name]) for name in right]
    wrong = [str(verdict) for verdict in verdicts if not verdict.ok]
    if wrong:
        raise AssertionError("; ".join(wrong))
