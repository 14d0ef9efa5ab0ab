"""`flash_attn_triton`: the names of the project in one import."""

import torch
import torch.nn.functional as F

import flashtri_core
import flashtri_modules


def test_usage_line() -> None:
    from flash_attn_triton import FlashSelfAttention, flash_attn

    q, k, v = torch.randn(3, 2, 4, 32, 16).unbind(0)
    torch.testing.assert_close(
        flash_attn(q, k, v, causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )
    attn = FlashSelfAttention(embed_dim=1024, num_heads=16, causal=True)
    assert attn(torch.randn(1, 4, 1024)).shape == (1, 4, 1024)


def test_names_are_the_packages_own() -> None:
    import flash_attn_triton

    for name in flash_attn_triton.__all__:
        home = flashtri_modules if hasattr(flashtri_modules, name) else flashtri_core
        assert getattr(flash_attn_triton, name) is getattr(home, name)
