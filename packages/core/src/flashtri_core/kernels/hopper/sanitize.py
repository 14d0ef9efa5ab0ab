"""Small calls of the Hopper kernels, for NVIDIA's compute-sanitizer, and a control.

    compute-sanitizer --tool memcheck python -m flashtri_core.kernels.hopper.sanitize
    compute-sanitizer --tool racecheck python -m flashtri_core.kernels.hopper.sanitize
    compute-sanitizer --tool racecheck python -m flashtri_core.kernels.hopper.sanitize --control

memcheck finds nothing. racecheck reports two things. One is the lines that a kernel and its ``warp_specialize`` begin with, in
every kernel: unexplained so far. The other is the forward's next tile (``write_slot`` against ``slot_field``). A tile's slot is
written again only after its output is there, which has needed its Q, whose load the producer issued after reading the slot: the
chain goes through a TMA load. ``--control`` is a kernel of a few lines with such a chain, right by construction: a number goes
through an mbarrier to another warp, which reads it and issues a TMA load; behind that load the number is overwritten. racecheck
reports both writes, the first too, which the mbarrier alone puts in order; a control without the load and what follows it
was not reported. So beside TMA loads it reports what is right, and what it says of the slots tells nothing.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashtri_core import flash_attn, flash_attn_varlen
from flashtri_core.kernels.hopper.common import tma_load


@gluon.jit
def take(desc, slot, full, loaded, tile, OUT):
    """One warp reads the number and then issues a load."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(full, 0)
    gl.store(OUT + gl.arange(0, 32, layout=LAYOUT), gl.max(slot.load(LAYOUT), 0))
    mbarrier.expect(loaded, 64 * 4)
    tma_load(desc, [0], loaded, tile)


@gluon.jit
def leave(slot, full, loaded):
    """Eight warps leave a number, and another one when the load has landed."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    slot.store(gl.full([1], 7, gl.int32, LAYOUT))
    mbarrier.arrive(full, count=1)
    mbarrier.wait(loaded, 0)
    slot.store(gl.full([1], 8, gl.int32, LAYOUT))


@gluon.jit
def control_kernel(desc, OUT):
    """A number through shared memory, overwritten behind a load that its reader has issued."""
    slot = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile = gl.allocate_shared_memory(gl.float32, [64], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(loaded, count=1)
    fence_async_shared()
    gl.warp_specialize([(leave, (slot, full, loaded)), (take, (desc, slot, full, loaded, tile, OUT))], [1], [24])


def control() -> str:
    """Run :func:`control_kernel` once."""
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    data = torch.zeros(64, device="cuda")
    layout = gl.NVMMASharedLayout.get_default_for([64], gl.float32)
    control_kernel[(1,)](TensorDescriptor(data, [64], [1], [64], layout), out, num_warps=8)
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
