"""Attention layers and integrations on `flashtri_core`: parameters and shape plumbing, no kernels."""

from .attention import FlashCrossAttention, FlashSelfAttention, standard_alibi_slopes
from .multihead import FlashMultiheadAttention

__all__ = ["FlashCrossAttention", "FlashMultiheadAttention", "FlashSelfAttention", "standard_alibi_slopes"]
