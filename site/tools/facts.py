"""Quick facts for the home page, read out of the code."""

from __future__ import annotations

import support

from flashtri_core import interface
from flashtri_core.target import SHARED_MEMORY
from flashtri_core.variants import FEATURES, MASKS


def facts() -> dict[str, str]:
    """Label -> fact."""
    gpu = [name for name, on_gpu, _ in support.dtypes() if on_gpu == "yes"]
    cpu = [name for name, _, on_cpu in support.dtypes() if on_cpu == "yes" and name not in gpu]
    extras = [name for name in FEATURES if name not in MASKS]
    names = {"alibi": "ALiBi", "sink": "learnable sink", "bias": "additive bias", "mask": "boolean mask"}
    return {
        "Result": "exact: tiling is algebra, not approximation",
        "Passes": "forward and backward, gradients of every input",
        "Precision": f"{' and '.join(gpu)} on GPUs; {' and '.join(cpu)} too on CPUs",
        "Head dimension": f"any from 1 to {interface.MAX_HEAD_DIM}, V's may differ",
        "Masks": ", ".join(MASKS) + ": bounds skip whole tiles",
        "Also in one call": ", ".join(names.get(name, name) for name in extras),
        "Layouts": "dense, packed (varlen), grouped heads",
        "GPUs": f"NVIDIA, compute capability {min(SHARED_MEMORY) / 10:.1f} and newer",
        "Without a GPU": "the same call, exact, on the CPU",
    }
