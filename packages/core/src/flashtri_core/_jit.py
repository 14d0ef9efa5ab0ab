"""One place that knows whether Triton is installed.

``import flashtri_core`` must work where Triton cannot be installed (macOS, Windows): there ``jit`` leaves a function
alone and ``tl`` is a stand-in that is never called, because CPU tensors take the chunked PyTorch path.
"""

from __future__ import annotations

import os
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # read once: Triton itself decides when it is imported

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Absent:
        """Accepts attribute access and calls at import time (``tl.constexpr(1.0)``), nothing more."""

        def __getattr__(self, name: str) -> _Absent:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args else self

    tl = _Absent()

    def jit(fn: Any = None, **options: Any) -> Any:
        """Stand-in for ``triton.jit``: returns the function unchanged."""
        return fn if fn is not None else (lambda f: f)


def triton_version() -> tuple[int, int] | None:
    """Major and minor version of the installed Triton, or None."""
    if not HAS_TRITON:
        return None
    major, minor = triton.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)
