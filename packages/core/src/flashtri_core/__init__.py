"""flashtri-core: exact FlashAttention, forward and backward, in readable Python on Triton."""

from __future__ import annotations

import torch

from ._jit import HAS_TRITON
from .dispatch import Support
from .interface import draw_rng, dropout_mask, flash_attn, flash_attn_varlen, supports
from .packing import Packed, pack, unpack

if HAS_TRITON or torch.version.cuda is None:
    from . import flops as flops  # a millisecond, for torch's FlopCounterMode to count; see there

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
