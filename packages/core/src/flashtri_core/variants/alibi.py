"""ALiBi: a penalty that grows linearly with distance, ``-slope * |i + Nk - Nq - j|`` (Press et al. 2021).

``alibi_slopes`` is fp32 ``(Hq,)`` or ``(B, Hq)``. Distance is counted from the bottom-right diagonal, so that a decode
step equals the last row of the full run; it works with and without ``causal``. Slopes are constants: a tensor that
requires a gradient is refused rather than silently given none.

A slope beyond ``2 ** 90`` (1.2e27) in size counts as that, with its sign: among the keys that a row sees the nearest, or with a
negative slope the farthest, have all the weight anyway, and no distance takes the penalty out of float32.
The Hopper kernels give NaN where the largest score of a row is beyond 1.9e8 in size and its keys fill more than one
block, as with a slope of -1e8; ``impl="triton"`` does not.
"""

from __future__ import annotations

from torch import Tensor

from .._jit import jit, tl

STEEPEST = tl.constexpr(2.0**90)


@jit
def slope(z, h, args):
    """args = (slopes, stride of the batch, stride of the head, scores per natural unit); the slope in the scores' unit."""
    natural = tl.load(args[0] + z * args[1] + h * args[2])
    natural = tl.maximum(natural, -STEEPEST, tl.PropagateNan.ALL)
    return tl.minimum(natural, STEEPEST, tl.PropagateNan.ALL) * args[3]


@jit
def add(s, slope, i, j, Nq, Nk):
    """The penalty, ``slope`` being what the function of that name returned."""
    return s - slope * tl.abs(i + (Nk - Nq) - j).to(tl.float32)


@jit
def add_behind(s, slope, i, j, Nq, Nk):
    """The same where no key right of the diagonal is seen: an operation less."""
    return s - slope * (i + (Nk - Nq) - j).to(tl.float32)


def add_eager(s: Tensor, slopes: Tensor, i: Tensor, j: Tensor, nq: int | Tensor, nk: int | Tensor) -> Tensor:
    """Eager twin; ``s`` (..., Hq, Nq, Nk), slopes (..., Hq)."""
    distance = (i + (nk - nq) - j).abs()
    steepest = getattr(STEEPEST, "value", STEEPEST)  # a plain float where Triton is not installed
    return s - slopes.clamp(-steepest, steepest).to(s.dtype)[..., None, None] * distance


def check(slopes: object, batch: int, heads: int, device: object) -> None:
    """Validate ``alibi_slopes``.

    Raises:
        TypeError: not an fp32 tensor.
        ValueError: another shape than (Hq,) or (B, Hq), another device, or it requires a gradient.
    """
    if not isinstance(slopes, Tensor):
        raise TypeError(f"alibi_slopes must be a tensor, got {type(slopes).__name__}")
    if str(slopes.dtype) != "torch.float32":
        raise TypeError(f"alibi_slopes must be float32, got {slopes.dtype}")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes must have shape ({heads},) or ({batch}, {heads}), got {tuple(slopes.shape)}")
    if slopes.device != device:
        raise ValueError(f"alibi_slopes must be on {device}, got {slopes.device}")
    if slopes.requires_grad:
        raise ValueError("alibi_slopes requires a gradient, which ALiBi does not give; pass alibi_slopes.detach()")
