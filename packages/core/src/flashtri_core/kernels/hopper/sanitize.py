"""Small calls of the Hopper kernels, for NVIDIA's compute-sanitizer, and a control.

    compute-sanitizer --tool memcheck python -m flashtri_core.kernels.hopper.sanitize
    compute-sanitizer --tool racecheck python -m flashtri_core.kernels.hopper.sanitize
    compute-sanitizer --tool racecheck python -m flashtri_core.kernels.hopper.sanitize --control

racecheck follows ``bar.sync``, not mbarriers. It therefore reports what one warp leaves in shared memory for others behind an
mbarrier (the forward's next tile: ``write_slot``, ``slot_field``), and the words by which Triton tells the warps of a
``warp_specialize`` what to run (the kernels' first lines and that call). ``--control`` is a kernel with one of each and nothing
else, right by its construction: what racecheck says of it, it says of any kernel of this kind. Everything else it finds counts.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtri_core import flash_attn, flash_attn_varlen


@gluon.jit
def leave(slot, full):
    """The warp that writes."""
    slot.store(gl.full([1], 7, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(full, count=1)


@gluon.jit
def take(slot, full, OUT):
    """The warps that read."""
    mbarrier.wait(full, 0)
    x = gl.max(slot.load(gl.BlockedLayout([1], [32], [8], [0])), 0)
    gl.store(OUT + gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [8], [0])), x)


@gluon.jit
def control_kernel(OUT):
    """One warp leaves a number in shared memory, behind an mbarrier; eight others take it from there."""
    slot = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    gl.warp_specialize([(take, (slot, full, OUT)), (leave, (slot, full))], [1], [24])


def control() -> str:
    """Run :func:`control_kernel` once."""
    out = torch.zeros(256, dtype=torch.int32, device="cuda")
    control_kernel[(1,)](out, num_warps=8)
    assert bool((out == 7).all())
    return "control: right"


def calls() -> str:
    """Forward and backward, dense and packed, full and causal, deterministic and not; nothing a multiple of a tile."""

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    count = 0
    for d, causal, deterministic in itertools.product((64, 128, 192, 256), (False, True), (False, True)):
        if deterministic and d > 128:
            continue
        keywords: dict[str, Any] = {"causal": causal, "deterministic": deterministic, "impl": "hopper"}
        q, k, v = new(1, 4, 300, d), new(1, 2, 260, d), new(1, 2, 260, d)
        flash_attn(q, k, v, **keywords).sum().backward()
        bounds = torch.tensor([0, 1, 130, 130, 480], dtype=torch.int32, device="cuda")
        q, k, v = new(480, 4, d), new(480, 2, d), new(480, 2, d)
        flash_attn_varlen(q, k, v, bounds, bounds, 350, 350, **keywords).sum().backward()
        count += 2
    torch.cuda.synchronize()
    return f"{count} calls, forward and backward"


if __name__ == "__main__":
    print(control() if "--control" in sys.argv[1:] else calls())
