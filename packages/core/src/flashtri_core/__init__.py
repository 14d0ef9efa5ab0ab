"""flashtri-core: exact FlashAttention, forward and backward, in readable Python on Triton."""

from __future__ import annotations

from .dispatch import Support
from .interface import draw_rng, dropout_mask, flash_attn, flash_attn_varlen, supports
from .packing import Packed, pack, unpack

__version__ = "0.1.0"

__all__ = [
    "Packed",
    "Support",
    "__version__",
    "draw_rng",
    "dropout_mask",
    "flash_attn",
    "flash_attn_varlen",
    "pack",
    "supports",
    "unpack",
]
