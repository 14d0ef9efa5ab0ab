"""Additive bias: ``s + attn_bias``, any float dtype, broadcastable to ``(B, Hq, Nq, Nk)``, with its gradient.

T5 and relative-position biases, pair biases, learned masks. Added to the scaled (and capped) score before the mask;
-inf entries hide their key. The gradient is summed over the axes that were broadcast, in a fixed order inside one
program per tile: deterministic, no atomics, never a tensor larger than the bias. Packed sequences index the bias by
(sequence, head, row, key), rows and keys counted inside their sequence.
"""

from __future__ import annotations

from torch import Tensor

from .._jit import jit, tl


@jit
def add(s, z, h, i, j, Nq, Nk, args):
    """args = (bias, its four strides in elements, 0 on broadcast axes); ``s`` in natural units."""
    base = args[0] + z.to(tl.int64) * args[1] + h.to(tl.int64) * args[2]
    ptrs = base + i.to(tl.int64) * args[3] + j * args[4]
    return s + tl.load(ptrs, mask=(i < Nq) & (j < Nk), other=0.0).to(tl.float32)


def check(bias: object, name: str, shape: tuple[int, int, int, int], device: object, boolean: bool) -> None:
    """Validate ``attn_bias`` or ``attn_mask`` (``boolean``) against the score matrix's shape.

    Raises:
        TypeError: not a tensor of the right kind of dtype.
        ValueError: not broadcastable to (B, Hq, Nq, Nk), or on another device.
    """
    if not isinstance(bias, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(bias).__name__}")
    if boolean and str(bias.dtype) != "torch.bool":
        raise TypeError(f"{name} must be bool (True = visible), got {bias.dtype}; additive terms go to attn_bias")
    if not boolean and not bias.dtype.is_floating_point:
        raise TypeError(f"{name} must be a float tensor, got {bias.dtype}; boolean masks go to attn_mask")
    if bias.dim() > 4 or any(b not in (1, s) for b, s in zip(bias.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(f"{name} must broadcast to (B, Hq, Nq, Nk) = {shape}, got {tuple(bias.shape)}")
    if bias.device != device:
        raise ValueError(f"{name} must be on {device}, got {bias.device}")


def as_4d(bias: Tensor) -> Tensor:
    """A view with four axes; leading axes of size 1 are added, nothing is expanded."""
    return bias[(None,) * (4 - bias.dim())]


def broadcast_strides(bias: Tensor) -> tuple[int, ...]:
    """Strides of a 4-D tensor with 0 wherever its size is 1, so that any index reads the one entry."""
    return tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))
