from flashtri_core.testing.plugin import gpu_turn

__all__ = ["gpu_turn"]
