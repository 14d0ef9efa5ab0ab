"""Padded batches to packed sequences and back, with gradients: what :func:`flash_attn_varlen` takes and returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Sequences end to end without padding."""

    values: Tensor  # (total, ...)
    cu_seqlens: Tensor  # int32 (B + 1,)
    max_seqlen: int


def pack(padded: Tensor, lengths: Tensor) -> Packed:
    """Drop the padding of a batch.

    Args:
        padded: (B, N, ...), row b holding ``lengths[b]`` tokens and then padding.
        lengths: integer (B,), each 0 to N. Reading their sum and maximum waits for the device, once.

    Returns:
        Packed(values (total, ...), cu_seqlens int32 (B + 1,), max_seqlen); gradients flow back to ``padded``.

    Raises:
        TypeError: an argument is not a tensor, or lengths are not integers.
        ValueError: lengths of another shape, outside 0 .. N, or on the meta device.

    Example:
        >>> packed = pack(torch.arange(6.0).view(2, 3), torch.tensor([1, 3]))
        >>> packed.values.tolist(), packed.cu_seqlens.tolist(), packed.max_seqlen
        ([0.0, 3.0, 4.0, 5.0], [0, 1, 4], 3)
    """
    _check_are_tensors(padded=padded, lengths=lengths)
    if padded.dim() < 2:
        raise ValueError(f"padded must have shape (B, N, ...), got {tuple(padded.shape)}")
    if lengths.dim() != 1 or lengths.shape[0] != padded.shape[0]:
        raise ValueError(f"lengths must have shape ({padded.shape[0]},), got {tuple(lengths.shape)}")
    if lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
        raise TypeError(f"lengths must be an integer tensor, got {lengths.dtype}")
    check_values("lengths", lengths)
    limit = padded.shape[1]
    values = lengths.tolist()
    if any(n < 0 or n > limit for n in values):
        raise ValueError(f"lengths must be 0 to {limit}, got {values[:8]}")
    cu = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return Packed(padded[_present(lengths, limit)], cu, max(values, default=0))


def unpack(values: Tensor, cu_seqlens: Tensor, length: int) -> Tensor:
    """The padded batch (B, length, ...) again, zeros where there was no token; gradients flow back to ``values``.

    Args:
        values: (total, ...), as :func:`pack` or :func:`flash_attn_varlen` returned it.
        cu_seqlens: int32 or int64 (B + 1,), starts at 0, never decreases.
        length: N of the result, at least the longest sequence.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: cu_seqlens is of another form, on the meta device, or ends past ``values``, or a sequence is longer than
            ``length``.
    """
    _check_are_tensors(values=values, cu_seqlens=cu_seqlens)
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"length must be an int, got {type(length).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape (B + 1,), got {tuple(cu_seqlens.shape)}")
    check_values("cu_seqlens", cu_seqlens)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    sizes, start = lengths.tolist(), int(cu_seqlens[0])
    if start != 0 or any(n < 0 for n in sizes):
        raise ValueError(f"cu_seqlens must start at 0 and never decrease, got {cu_seqlens.tolist()[:8]}")
    if any(n > length for n in sizes):
        raise ValueError(f"length must be at least the longest sequence, {max(sizes)}, got {length}")
    if sum(sizes) > values.shape[0]:
        raise ValueError(f"cu_seqlens ends at {sum(sizes)}, values has {values.shape[0]} rows")
    padded = values.new_zeros(len(sizes), length, *values.shape[1:])
    return padded.masked_scatter(_wide(_present(lengths, length), padded), values[: sum(sizes)])


def check_values(name: str, x: Tensor) -> None:
    """Refuse a tensor whose values are to be read, and that has none."""
    if x.is_meta:
        raise ValueError(f"{name} must have values to read, got a meta tensor")


def _check_are_tensors(**arguments: object) -> None:
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def _present(lengths: Tensor, limit: int) -> Tensor:
    """bool (B, limit): True where there is a token."""
    return torch.arange(limit, device=lengths.device)[None, :] < lengths[:, None]


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(*mask.shape, *([1] * (like.dim() - 2))).expand(like.shape)
