"""What a shape costs in memory: arithmetic on tensor sizes, nothing measured. The calculator page is tested against this."""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB")


@dataclass(frozen=True)
class Shape:
    """Self-attention of ``batch`` sequences, ``heads`` heads, ``seqlen`` tokens, ``head_dim`` numbers per token and head."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    dtype: str = "fp16"

    @property
    def score_matrix(self) -> int:
        """Bytes of S, which ordinary attention writes to main memory."""
        return self.batch * self.heads * self.seqlen**2 * BYTES[self.dtype]

    @property
    def tensors(self) -> int:
        """Bytes of Q, K, V and O."""
        return 4 * self.batch * self.heads * self.seqlen * self.head_dim * BYTES[self.dtype]

    @property
    def kernel(self) -> int:
        """Bytes the forward kernel holds in main memory: Q, K, V, O and L, one fp32 per row."""
        return self.tensors + 4 * self.batch * self.heads * self.seqlen


def ordinary_limit(memory: int, shape: Shape) -> int:
    """The largest N at which Q, K, V, O and one score matrix fit into ``memory`` bytes; ``shape.seqlen`` is ignored.

    b h e (N^2 + 4 N d) <= memory, so N = floor(sqrt(memory / (b h e) + 4 d^2)) - 2 d, exact in integers.
    """
    unit = shape.batch * shape.heads * BYTES[shape.dtype]
    return max(0, math.isqrt(memory // unit + 4 * shape.head_dim**2) - 2 * shape.head_dim)


def kernel_limit(memory: int, shape: Shape) -> int:
    """The same for this kernel: Q, K, V, O and L."""
    return memory // (shape.batch * shape.heads * (4 * shape.head_dim * BYTES[shape.dtype] + 4))


def human(count: int) -> str:
    """Bytes in binary units, at most three digits: 134217728 -> "128 MiB"."""
    size, unit = float(count), 0
    while size >= 1000 and unit < 8:
        size /= 1024
        unit += 1
    digits = 0 if size >= 100 or unit == 0 else 1 if size >= 10 else 2
    text = f"{size:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {UNITS[unit]}"
