"""dQ in a fixed order: with ``C.ordered`` the key tiles of a head add to a block of rows one after another, always alike.

A block of rows has a semaphore, which says who has added to it. One warp of every thread block (:func:`keep_order`) waits until
it is the tile's turn and tells the consumers, and when both have added, and a fence finds the additions performed, it hands the
block on. The consumers wait for a barrier in shared memory only, and seldom for long.

Which order? One in which hardly anybody waits, although tiles that are launched together begin together:

- Under a mask the last tile of a head is launched first, and all walk from their first row to their last. A causal tile begins
  at its diagonal then, and the tile behind it, which began further on, stays ahead: a block of rows meets its tiles in
  descending order. So they are launched as they get longer, and in the end the longest would leave half of the multiprocessors
  idle. The last heads go the other way (``C.both_ways``): longest first, from the last row to the first, in ascending order.
  Their tiles begin with the same block, each a step behind the one before, but few of a head are launched together.
- Without a mask all tiles see all rows, and walk in rotation: of k tiles and M blocks the r-th begins with block
  (k - 1 - r) M / k, goes on to the last one and then from the first one on. They are always at different blocks, M / k apart,
  and a block meets them in ascending order from the one that begins there, the first tile after the last.

A tile waits for tiles launched before it, which run or have ended: some tile can always go on. In a rotation it waits for later
ones as well, which therefore have to run beside it. ``C.rotation``, the most that walk in one, is half of the multiprocessors:
of two such kernels that share the GPU one always finds room. A head with more tiles has several rotations of about the same
size, one after the other for every block, and as many heads run side by side as there is room for a rotation of each: the next
rotation starts when this one ends.

A walk takes all heads of a group for one block of rows before the next block: head by head, no tile could end much earlier than
the longest.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .backward_walk import first_query_block, locate, place_of, ring

# By a warp. $0: a result nobody reads; $1: the address; $2: the value to wait for or to set. The vote tells ptxas that the warp
# stays together. Setting: one lane ($3) stores, when all additions that the warp knows of have been performed.
AWAIT_SEMAPHORE = gl.constexpr("""{
.reg .pred p;
.reg .b32 x;
again_${:uid}:
ld.acquire.gpu.global.b32 x, [$1];
setp.ne.s32 p, x, $2;
vote.sync.any.pred p, p, 0xffffffff;
@p bra.uni again_${:uid};
mov.b32 $0, x;
}""")
PASS_SEMAPHORE = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $3, 0;
fence.acq_rel.gpu;
@p st.relaxed.gpu.global.b32 [$1], $2;
mov.b32 $0, 0;
}""")


@gluon.jit
def semaphore_of(DQ_SEMAPHORE, block):
    """Address of a block's semaphore, for every lane of a warp, and the lane."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    return DQ_SEMAPHORE.to(gl.int64) + (block.to(gl.int64) * 4 + (lane * 0).to(gl.int64)), lane


@gluon.jit
def turn_of(m, t, C: gl.constexpr):
    """What the m-th block's semaphore is when it is this tile's turn, and what it is afterwards.

    In a rotation, how many tiles have added; else 1 + the number of the last one, 0 at first.
    """
    n = t.start_n // C.block_n
    if C.rotation > 0:
        first = t.mates - 1 - ((m + 1) * t.mates - 1) // t.hi  # the last tile that begins with this block or an earlier one
        turn = n - t.place + gl.where(t.place < first, t.place - first + t.mates, t.place - first)
        after = turn + 1
    else:
        turn = gl.where(m >= t.next_lo, n + 2, 0)
        if C.both_ways:
            turn = gl.where(t.descends, n, turn)
        after = n + 1
    return turn, after


@gluon.jit
def keep_order(
    DQ_SEMAPHORE, first, CU_Q, CU_K, USED_K, unit_log2, sizes, variant, args, turn_is, added, C: gl.constexpr
):  # fmt: skip
    """One warp: for every block of rows of the walk, waits for its turn, says so (``turn_is``), and hands it on when ``added``.

    ``DQ_SEMAPHORE``: an int32 per block of rows as :func:`.backward_walk.first_block` numbers them, zeros.
    """
    if C.ordered:
        count = 0
        t = locate(0, first, sizes, CU_Q, CU_K, USED_K, unit_log2, variant, args, C)
        h0 = t.hk * sizes.group
        block0 = first_query_block(t.z, h0, t.q_row0, sizes, C)
        for at in range(t.lo * sizes.group, t.hi * sizes.group):
            _h, m, block = place_of(at, h0, block0, t, sizes, C)
            turn, after = turn_of(m, t, C)
            stage, phase = ring(count, 2)
            address, lane = semaphore_of(DQ_SEMAPHORE, block)
            gl.inline_asm_elementwise(
                AWAIT_SEMAPHORE, "=r,l,r", [address, lane * 0 + turn], dtype=gl.int32, is_pure=False, pack=1
            )
            mbarrier.arrive(turn_is.index(stage), count=1)
            mbarrier.wait(added.index(stage), phase)
            one = (lane == 0).to(gl.int32)
            gl.inline_asm_elementwise(
                PASS_SEMAPHORE, "=r,l,r,r", [address, lane * 0 + after, one], dtype=gl.int32, is_pure=False, pack=1
            )
            count += 1
