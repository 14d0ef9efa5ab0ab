"""One import for the function and the layers: `from flash_attn_triton import flash_attn, FlashSelfAttention`."""

from flashtri_core import flash_attn, flash_attn_varlen, supports
from flashtri_modules import FlashCrossAttention, FlashMultiheadAttention, FlashSelfAttention

__all__ = [
    "FlashCrossAttention",
    "FlashMultiheadAttention",
    "FlashSelfAttention",
    "flash_attn",
    "flash_attn_varlen",
    "supports",
]
