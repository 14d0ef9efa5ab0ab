"""Sliding window: query i sees keys from ``i + Nk - Nq - left`` to ``i + Nk - Nq + right``, both included.

``window_size=(left, right)``; -1 leaves that side open, and ``causal=True`` closes the right side at 0, so that
``causal=True, window_size=(1023, -1)`` shows each query itself and the 1023 keys before it. The window moves along the
same bottom-right diagonal as the causal mask. A window of W tokens that includes the query itself is ``(W - 1, 0)``.
Work and time are linear in the sequence length: tiles outside the band are never visited.
"""

from __future__ import annotations

from torch import Tensor

from .._jit import jit, tl

KV_LEFT_EDGE = True  # do tiles before the free middle need the mask, in the loop over keys
Q_LEFT_EDGE, Q_RIGHT_EDGE = True, True  # the same for both ends of the loop over queries
UNBOUNDED = 1 << 30  # stands for an open side; sums with any index stay inside int32


@jit
def keep(i, j, Nq, Nk, args):
    diagonal = i + (Nk - Nq)
    return (j >= diagonal - args[0]) & (j <= diagonal + args[1])


@jit
def place(i, j, Nq, Nk, args):
    return j, i + (Nk - Nq) - args[0], args[0] + args[1]


@jit
def kv_range(m0, m1, Nq, Nk, args):
    first = m0 + (Nk - Nq)  # the diagonal at the first and at the last row
    last = m1 - 1 + (Nk - Nq)
    lo = tl.minimum(tl.maximum(first - args[0], 0), Nk)
    hi = tl.minimum(tl.maximum(last + args[1] + 1, lo), Nk)
    full_lo = tl.minimum(tl.maximum(last - args[0], lo), hi)
    full_hi = tl.minimum(tl.maximum(first + args[1] + 1, full_lo), hi)
    return lo, full_lo, full_hi, hi


@jit
def q_range(n0, n1, Nq, Nk, args):
    first = n0 - (Nk - Nq)  # the row whose diagonal meets the first and the last key
    last = n1 - 1 - (Nk - Nq)
    lo = tl.minimum(tl.maximum(first - args[1], 0), Nq)
    hi = tl.minimum(tl.maximum(last + args[0] + 1, lo), Nq)
    full_lo = tl.minimum(tl.maximum(last - args[1], lo), hi)
    full_hi = tl.minimum(tl.maximum(first + args[0] + 1, full_lo), hi)
    return lo, full_lo, full_hi, hi


def keep_eager(i: Tensor, j: Tensor, nq: int | Tensor, nk: int | Tensor, left: int, right: int) -> Tensor:
    """Eager twin of ``keep``; ``left`` and ``right`` as normalised by :func:`normalise`."""
    diagonal = i + (nk - nq)
    return (j >= diagonal - left) & (j <= diagonal + right)


def check(window_size: object) -> tuple[int, int]:
    """Validate ``window_size`` and return it as two ints.

    Raises:
        TypeError: not a pair of ints.
        ValueError: a side below -1.
    """
    if type(window_size) is tuple and window_size == (-1, -1) and type(window_size[0]) is type(window_size[1]) is int:
        return -1, -1  # nearly every call
    pair = (-1, -1) if window_size is None else window_size
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"window_size must be a pair (left, right) of ints, got {window_size!r}")
    sides = tuple(-1 if side is None else side for side in pair)
    for name, side in zip(("left", "right"), sides, strict=True):
        if isinstance(side, bool) or not isinstance(side, int):
            raise TypeError(f"window_size: {name} must be an int or None, got {type(side).__name__}")
        if side < -1:
            raise ValueError(f"window_size: {name} must be >= -1 (-1 = unbounded), got {side}")
    return int(sides[0]), int(sides[1])


def normalise(left: int, right: int, causal: bool) -> tuple[int, int]:
    """Both sides as non-negative bounds: -1 becomes UNBOUNDED, and causal closes the right side at 0."""
    left = UNBOUNDED if left < 0 else min(left, UNBOUNDED)
    right = UNBOUNDED if right < 0 else min(right, UNBOUNDED)
    return left, min(right, 0) if causal else right
