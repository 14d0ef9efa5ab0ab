"""The pass before the fused backward, most of it done beneath the main kernel: thread blocks prepare rows for later ones.

That pass (:mod:`.backward_ends`) reads O and dO for delta and zeroes dQ's accumulator, 8 bytes per element at memory speed,
while the main kernel leaves the memory idle. With ``C.prepares`` it does so for the first blocks of rows only, those of the
heads that run first, and every thread block of the main kernel, by two warps of their own, for ``each`` further ones: thread
block p for those from prepared + p * each on. Blocks are numbered head by head, as thread blocks take the heads
(:func:`.backward_walk.first_block`).

``READY`` has an integer per key head, which counts the warps that are done with a block of it. A producer lets no delta
through, and so nothing be added to dQ, until all are (:func:`await_rows`). Those blocks belong to thread blocks launched
before its own, which run or have ended and in turn wait only for earlier ones; and so much earlier that it seldom waits at all
(:func:`.launch_backward.prepared_first`).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .common import tma_load

WARPS = gl.constexpr(2)  # that prepare
GROUP = gl.constexpr(8)  # rows at a time: 64 columns of them are together in shared memory

# One per thread. $1: the address of a counter. When what the lanes of a warp have stored is there, the one that $2 says adds 1.
# TMA will read it, hence the first fence here and the last one below.
COUNT = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $2, 0;
fence.proxy.async.global;
fence.acq_rel.gpu;
bar.warp.sync 0xffffffff;
@p red.relaxed.gpu.global.add.s32 [$1], 1;
mov.b32 $0, 0;
}""")
READ_COUNT = gl.constexpr("ld.relaxed.gpu.global.b32 $0, [$1];")
# Wait until it is $2; $3 is what it was a while ago.
AWAIT_COUNT = gl.constexpr("""{
.reg .pred p;
.reg .b32 x;
mov.b32 x, $3;
bra.uni test_${:uid};
again_${:uid}:
ld.relaxed.gpu.global.b32 x, [$1];
test_${:uid}:
setp.ne.s32 p, x, $2;
vote.sync.any.pred p, p, 0xffffffff;
@p bra.uni again_${:uid};
fence.acq_rel.gpu;
fence.proxy.async.global;
mov.b32 $0, x;
}""")


class Rows(NamedTuple):
    """Global memory: the counters, delta in blocks, the same again where it holds -dLSE, and delta as LSE lies; or None."""

    READY: Any
    DELTA: Any
    MINUS_DLSE: Any
    DELTA_ROWS: Any


class Slots(NamedTuple):
    """Shared memory for a thread block's blocks of O and dO, seen also as groups of rows by 64 columns, and their barriers."""

    o: Any
    do: Any
    o_groups: Any
    do_groups: Any
    full: Any


@gluon.jit
def counter_of(READY, unit, THREADS: gl.constexpr):
    """Address of a key head's counter for each thread, and the thread's number."""
    thread = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [THREADS // 32], [0]))
    return READY.to(gl.int64) + (thread * 0 + unit * 4).to(gl.int64), thread


@gluon.jit
def read_rows(READY, unit):
    """The counter of key head ``unit``, for :func:`await_rows`: asked for early, because it takes its time."""
    counter, _lane = counter_of(READY, unit, 32)
    return gl.inline_asm_elementwise(READ_COUNT, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_rows(READY, unit, early, prepared, sizes):
    """The producer warp waits until all blocks of key head ``unit`` from ``prepared`` on are ready."""
    blocks = sizes.group * sizes.q_blocks
    done = WARPS * gl.minimum(gl.maximum((unit + 1) * blocks - prepared, 0), blocks)
    counter, lane = counter_of(READY, unit, 32)
    gl.inline_asm_elementwise(
        AWAIT_COUNT, "=r,l,r,r", [counter, lane * 0 + done, early], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def place_of_block(block, sizes, C: gl.constexpr):
    """Head among all heads, batch, head, first row."""
    heads = sizes.heads * sizes.group
    zh = block // sizes.q_blocks
    return zh, zh // heads, zh % heads, (block - zh * sizes.q_blocks) * C.block_m


@gluon.jit
def prepare_rows(o_desc, do_desc, rows, DQ_ACC, prepared, each, pid, slots, k_full, sizes, C: gl.constexpr):
    """Two warps: delta and zeros for the blocks of rows of thread block ``pid``, once K is there, which everybody waits for.

    Few branches: from a certain number on, LLVM moves what all partitions compute, such as parts of a thread's number, to
    the kernel's start, ptxas spills it there, and every tile waits for it (NOTES_backward.md).
    """
    SLOTS: gl.constexpr = C.block_n // C.block_m
    GROUPS: gl.constexpr = C.block_m // GROUP
    PANELS: gl.constexpr = C.d // 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    begin = prepared + pid * each
    end = gl.minimum(begin + each, sizes.batch_heads * sizes.group * sizes.q_blocks)
    mbarrier.wait(k_full.index(0), 0)
    for s in gl.static_range(SLOTS):
        yes = begin + s < end
        _zh, z, h, row = place_of_block(begin + s, sizes, C)
        mbarrier.expect(slots.full.index(s), 4 * C.block_m * C.d, pred=yes)
        tma_load(o_desc, [z, h, row, 0], slots.full.index(s), slots.o.index(s), pred=yes)
        tma_load(do_desc, [z, h, row, 0], slots.full.index(s), slots.do.index(s), pred=yes)
    for block in range(begin, end):
        zeros = DQ_ACC + block.to(gl.int64) * (C.block_m * C.d) + gl.arange(0, 512, layout=FLAT)
        for _ in range(C.block_m * C.d // 512):
            gl.store(zeros, gl.zeros([512], gl.float32, FLAT))
            zeros += 512
    for block in range(begin, end):
        slot = block - begin
        mbarrier.wait(slots.full.index(slot), 0)
        for g in range(GROUPS):
            offs = g * GROUP + gl.arange(0, GROUP, layout=gl.SliceLayout(1, LAYOUT))
            products = gl.zeros([GROUP, 64], gl.float32, LAYOUT)
            for panel in gl.static_range(PANELS):
                n = (slot * PANELS + panel) * GROUPS + g
                o = slots.o_groups.index(n).load(LAYOUT).to(gl.float32)
                products += o * slots.do_groups.index(n).load(LAYOUT).to(gl.float32)
            delta = gl.sum(products, 1)
            at = block.to(gl.int64) * C.block_m + offs
            if rows.MINUS_DLSE is not None:
                delta += gl.load(rows.MINUS_DLSE + at)
            gl.store(rows.DELTA + at, delta)
            if rows.DELTA_ROWS is not None:
                zh, _z, _h, row = place_of_block(block, sizes, C)
                gl.store(rows.DELTA_ROWS + zh.to(gl.int64) * sizes.Nq + row + offs, delta, mask=row + offs < sizes.Nq)
    for s in gl.static_range(SLOTS):
        counter, thread = counter_of(rows.READY, (begin + s) // (sizes.group * sizes.q_blocks), 32 * WARPS)
        lane_0 = ((thread & 31) == 0).to(gl.int32) * (begin + s < end).to(gl.int32)
        gl.inline_asm_elementwise(COUNT, "=r,l,r", [counter, lane_0], dtype=gl.int32, is_pure=False, pack=1)
