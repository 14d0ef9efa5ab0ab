"""The pass after the fused backward, most of it done beneath the main kernel: launches convert the dQ of those before.

That pass (:mod:`.backward_ends`) reads dQ's accumulator and writes dQ, 6 bytes per element at memory speed, and a row's dQ is
complete when every key tile of its head has added to it. Counting those in takes a fence per tile, which costs more than the
pass. With ``C.converts`` the main kernel is launched in pieces instead, whole heads each. The driver may start a piece when all
thread blocks of the one before run and say so, or have ended ("programmatic dependent launch"): no multiprocessor is idle in
between. And two warps of every thread block, those that prepare rows (:mod:`.backward_prepare`), wait until the piece before
has ended, and convert their share of its rows. The pass after does the last piece's.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .backward_prepare import WARPS, place_of_block, prepare_rows
from .common import tma_load, tma_store

UNIT = gl.constexpr(1024)  # fp32 that one TMA copy brings: 16 rows by 64 columns

# Results nobody reads. What the launch before has added, TMA reads: hence the fence.
LET_NEXT_START = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")
AWAIT_LAUNCH_BEFORE = gl.constexpr("griddepcontrol.wait; fence.proxy.async.global; mov.b32 $0, 0;")


class Piece(NamedTuple):
    """This launch: its first thread block; which blocks of rows it converts, and how many of them ``each`` thread block."""

    first: Any
    begin: Any
    end: Any
    each: Any


class Sums(NamedTuple):
    """Shared memory of the two warps once no O and dO are left in it: units of the accumulator, and what becomes of them."""

    units: Any
    dq: Any
    dq_blocks: Any
    full: Any


@gluon.jit
def tell(ASSEMBLY: gl.constexpr):
    """The two warps execute an instruction without operands."""
    idle = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0])) * 0
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [idle], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def work_for_others(
    o_desc, do_desc, rows, DQ_ACC, prepared, each, acc_desc, dq_desc, piece, softmax_scale, slots, sums, k_full, sizes,
    C: gl.constexpr,
):  # fmt: skip
    """Two warps: the rows of later thread blocks, then those of the launch before."""
    pid = gl.program_id(0)
    if C.converts:
        tell(LET_NEXT_START)
        pid += piece.first
    if C.prepares:
        prepare_rows(o_desc, do_desc, rows, DQ_ACC, prepared, each, pid, slots, k_full, sizes, C)
    if C.converts:
        tell(AWAIT_LAUNCH_BEFORE)  # in every thread block, so that an ended launch means that all before it have
        convert_rows(acc_desc, dq_desc, piece, softmax_scale, sums, sizes, C)


@gluon.jit
def load_part(acc_desc, block, part, yes, sums, STAGE: gl.constexpr, UNITS: gl.constexpr):
    """If ``yes``, ask for ``UNITS`` units of a block's accumulator, which go to one half of the room there is."""
    mbarrier.expect(sums.full.index(STAGE), UNITS * UNIT * 4, pred=yes)
    for n in gl.static_range(UNITS):
        at = part * UNITS + n
        where = [block * 16 + at // 4 * 8, at % 4, 0, 0]
        tma_load(acc_desc, where, sums.full.index(STAGE), sums.units.index(STAGE * UNITS + n), pred=yes)


@gluon.jit
def convert_rows(acc_desc, dq_desc, piece, softmax_scale, sums, sizes, C: gl.constexpr):
    """Two warps: softmax_scale * the accumulator of this thread block's share, out as dQ.

    ``acc_desc``: :func:`.launch_backward.sums_block`. A unit holds 16 rows as :func:`.backward_ends.convert` says: group of 8
    columns 8, row 8, column pair 4, row + 8, column. A thread takes 8 neighbouring columns of two rows: 16 bytes each.
    """
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]],
        [[0, 0, 0, 16], [0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0]],
        [[4, 0, 0, 0]],
        [],
        [8, 1, 4, 32],
    )
    SLOTS: gl.constexpr = C.block_n // C.block_m
    UNITS: gl.constexpr = C.block_n * C.d // 4096  # of a part: half of the room for dO
    PARTS: gl.constexpr = 8 // UNITS  # of a block
    begin = piece.begin + gl.program_id(0) * piece.each
    end = gl.minimum(begin + piece.each, piece.end)
    load_part(acc_desc, begin, 0, begin < end, sums, 0, UNITS)
    load_part(acc_desc, begin, 1, begin < end, sums, 1, UNITS)
    for block in range(begin, end):
        slot = (block - begin) % SLOTS
        for part in gl.static_range(PARTS):
            mbarrier.wait(sums.full.index(part % 2), ((block - begin) * (PARTS // 2) + part // 2) & 1)
            for n in gl.static_range(UNITS):
                x = sums.units.index(part % 2 * UNITS + n).load(LAYOUT).reshape([8, 8, 4, 2, 2]) * softmax_scale
                x = x.to(sums.dq.dtype).permute((3, 1, 0, 2, 4)).reshape([16, 64])
                sums.dq.index(slot * 8 + part * UNITS + n).store(x)
            if part + 2 < PARTS:
                load_part(acc_desc, block, part + 2, True, sums, part % 2, UNITS)
            else:
                load_part(acc_desc, block + 1, part + 2 - PARTS, block + 1 < end, sums, part % 2, UNITS)
        _zh, z, h, row = place_of_block(block, sizes, C)
        fence_async_shared()
        tma_store(dq_desc, [z, h, row, 0], sums.dq_blocks.index(slot))
        tma.store_wait(SLOTS - 1)
    tma.store_wait(0)
