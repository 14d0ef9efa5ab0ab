"""Forward on sm_90: two warps fetch, two or three warpgroups compute, and neither side waits for the other without need.

The arithmetic is that of the plain kernel (FlashAttention-2); this file is about keeping the tensor cores busy, with the
schedule of FlashAttention-3 (Shah et al. 2024, section 3). A thread block owns a tile of BLOCK_M query rows; each consumer
warpgroup owns an equal share of them and walks over the key blocks from the last to the first, masked ones first.

Within a warpgroup, step j issues S_j = Q K_j^T and O += P_{j-1} V_{j-1} together and computes softmax(S_j) while the second
product still runs. Between warpgroups, a turn passes around: while one issues its products, the others do softmax.

Barriers (``full``: the data have landed; ``empty``: all readers are done; ``slot``: which tile comes next)::

    scheduler warp           producer warp              shared memory        consumer warpgroup w (of NUM_WG)
    --------------           -------------              -------------        --------------------------------
    claim tile t
    wait o_full[t-2, w],
    send O(t-2); q_empty --> wait q_empty[t]
    write -------------------------------------> slots[2] -----------------> wait slot_full, read
                             wait slot_full, read
                             wait k_empty, load K ----> k[kv_stages] ------> wait k_full
                             load Q ------------------> q[q_stages, w] ----> wait q_full[t, w]; turn; issue S_j = Q K_j^T
                             wait v_empty, load V ----> v[kv_stages] ------> (V_j-1 seen last step) issue O += P V_j-1
                                                                             pass the turn to w + 1
                                         k_empty <-- S_j is in registers --- wait for the first product; softmax(S_j)
                                         v_empty <-- O is in registers ----- wait v_full; wait for the second; rescale O
    <------------------------------ o_full[t, w] <-- O has replaced Q ------ after the tile's last product

The scheduler is a warp of its own because claiming a tile from the counter takes about a microsecond, in which the producer
would fetch nothing. Block counters run on across tiles, so stage = count % kv_stages and phase = (count // kv_stages) & 1 need
no reset, and the producer fetches the next tile's Q and K while the consumers finish this one. :mod:`...testing.gluon_cpu` runs
all of this on CPU tensors, in random order.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..schedule import dense_tile, packed_tile, span_of
from ..softmax import LARGE_LOG2, LN2, LOG2E, LOWEST
from .common import (
    ANY,
    OR_MINUS_INFINITY,
    in_16_bits,
    left_operand,
    named_barrier_arrive,
    named_barrier_wait,
    select,
    tma_load,
    tma_store,
)

SLOT_FIELDS = gl.constexpr(8)  # start_m, z, h, first query row, first key row, Nq, Nk, and 1.0
TURN = gl.constexpr(8)  # named barriers: TURN + w is warpgroup w's turn,
RELEASE_K = gl.constexpr(11)  # RELEASE_K + stage and RELEASE_V + stage stand for k_empty and v_empty when there are
RELEASE_V = gl.constexpr(13)  # two stages
CLEARED = gl.constexpr(15)  # warpgroup 0 has cleared rows of V


class Tiles(NamedTuple):
    """Shared-memory tiles; each entry is a pair (first columns, remaining columns or None)."""

    q: Any
    k: Any
    v: Any
    slots: Any


class Bars(NamedTuple):
    """mbarriers; see the diagram above."""

    q_full: Any
    q_empty: Any
    o_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    slot_full: Any


class Sizes(NamedTuple):
    """Run-time sizes that every partition needs."""

    heads: Any
    group: Any
    Nq: Any
    Nk: Any
    blocks: Any
    batch_heads: Any
    head_group: Any
    num_tiles: Any


# ---------------------------------------------------------------------------------------------------------- schedule
@gluon.jit
def key_blocks(start_m, ROWS: gl.constexpr, Nq, Nk, variant, args, C: gl.constexpr):
    """Blocks [first, last) hold the keys that these rows see, at least one; [free_lo, free_hi) need no mask."""
    BLOCK_N: gl.constexpr = C.block_n
    end_m = gl.minimum(start_m + ROWS, Nq)
    lo, full_lo, full_hi, hi = variant.kv_range(start_m, end_m, Nq, Nk, args.mask)
    first = lo // BLOCK_N
    last = gl.maximum((hi + BLOCK_N - 1) // BLOCK_N, first + 1)
    free_lo = (full_lo + BLOCK_N - 1) // BLOCK_N
    free_hi = gl.maximum(full_hi // BLOCK_N, free_lo)
    return first, free_lo, free_hi, last


@gluon.jit
def locate(tile, sizes, CU_Q, CU_K, USED_K, C: gl.constexpr):
    """Tile number -> batch or sequence z, head h, first row, first query and key rows in memory, and lengths."""
    tile = gl.minimum(tile, sizes.num_tiles - 1)  # one past the end is looked up before it is known to be: read in bounds
    if CU_Q is None:
        zh, start_m = dense_tile(tile, sizes.blocks, sizes.batch_heads, sizes.head_group, C.block_m, True)
        z = zh // sizes.heads
        h = zh % sizes.heads
    else:
        h, z, start_m = packed_tile(
            tile, sizes.blocks, sizes.heads, sizes.head_group, sizes.batch_heads, CU_Q, C.block_m, True
        )
    q_row0, Nq, _q = span_of(CU_Q, None, z, sizes.Nq)
    k_row0, _k, Nk = span_of(CU_K, USED_K, z, sizes.Nk)
    return z, h, start_m, q_row0, k_row0, Nq, Nk


@gluon.jit
def next_tile(tile, COUNTER, C: gl.constexpr):
    """The tile after ``tile`` for this thread block; past the end when there is none."""
    if C.order == "dynamic":  # whoever is free takes the next one
        following = gl.atomic_add(COUNTER, 1) + gl.num_programs(0)
    else:
        following = tile + gl.num_programs(0)
    return following


@gluon.jit
def find_tile(tile, sizes, CU_Q, CU_K, USED_K, COUNTER, C: gl.constexpr):
    """``tile``, or the first one after it that exists, and where it lies."""
    z, h, start_m, q_row0, k_row0, Nq, Nk = locate(tile, sizes, CU_Q, CU_K, USED_K, C)
    if C.packed:  # packed problems number a few tiles that no sequence needs
        while (tile < sizes.num_tiles) & (start_m >= Nq):
            tile = next_tile(tile, COUNTER, C)
            z, h, start_m, q_row0, k_row0, Nq, Nk = locate(tile, sizes, CU_Q, CU_K, USED_K, C)
    return tile, z, h, start_m, q_row0, k_row0, Nq, Nk


@gluon.jit
def reset_counter(COUNTER, C: gl.constexpr):
    """The last thread block to finish leaves both words zero for the next launch on this stream."""
    if C.order == "dynamic":
        if gl.atomic_add(COUNTER + 1, 1) == gl.num_programs(0) - 1:
            gl.store(COUNTER, 0)
            gl.store(COUNTER + 1, 0)


# ---------------------------------------------------------------------------------------------------------- pipeline
@gluon.jit
def stage_of(count, C: gl.constexpr):
    """Ring position and phase of the count-th block."""
    return count % C.kv_stages, (count // C.kv_stages) & 1


@gluon.jit
def load_rows(descs, z, h, row, barrier, tiles, stage, ROWS: gl.constexpr, D: gl.constexpr, D_TAIL: gl.constexpr):
    """Fetch ``ROWS`` rows of one head into ring position ``stage``; what lies outside the tensor arrives as zeros."""
    mbarrier.expect(barrier, ROWS * (D + D_TAIL) * 2)
    tma_load(descs[0], [z, h, row, 0], barrier, tiles[0].index(stage))
    if D_TAIL > 0:
        tma_load(descs[1], [z, h, row, D], barrier, tiles[1].index(stage))


@gluon.jit
def wait_empty(bar, NAMED: gl.constexpr, count, C: gl.constexpr):
    """Producer: wait until every consumer has released what the count-th block will overwrite."""
    stage, phase = stage_of(count, C)
    if C.named_release:
        if count >= C.kv_stages:
            named_barrier_wait(NAMED + stage, 32, 32 + 128 * C.warpgroups)
    else:
        mbarrier.wait(bar.index(stage), phase ^ 1)


@gluon.jit
def release(bar, NAMED: gl.constexpr, stage, C: gl.constexpr):
    """Consumer: this warpgroup no longer reads ring position ``stage``."""
    if C.named_release:
        named_barrier_arrive(NAMED + stage, 128, 32 + 128 * C.warpgroups)
    else:
        mbarrier.arrive(bar.index(stage), count=1)


@gluon.jit
def one_after_release(turn, tiles, C: gl.constexpr):
    """1, to multiply with what is needed next. ptxas, for which nothing depends on a release, moves it to the step's end.

    As a number in shared memory that is read after the release, 1 is such a thing. Releases through mbarriers stay in place.
    """
    if C.named_release:
        one = slot_field(tiles.slots, turn % 2, 7, 4).to(gl.float32, bitcast=True)
    else:
        one = 1.0
    return one


@gluon.jit
def take_turn(WG: gl.constexpr, C: gl.constexpr):
    if C.turns:
        named_barrier_wait(TURN + WG, 128, 256)


@gluon.jit
def pass_turn(WG: gl.constexpr, C: gl.constexpr):
    if C.turns:
        named_barrier_arrive(TURN + (WG + 1) % C.warpgroups, 128, 256)


@gluon.jit
def dot_qk(tiles, q_stage, k_stage, zero, C: gl.constexpr):
    """Issue S = Q K^T [64, BLOCK_N]; both operands come from shared memory."""
    M: gl.constexpr = C.block_m // C.warpgroups
    q = tiles.q[0].index(q_stage).reshape([M, C.d])
    k = tiles.k[0].index(k_stage).reshape([C.block_n, C.d])
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if C.d_tail > 0:
        q_tail = tiles.q[1].index(q_stage).reshape([M, C.d_tail])
        k_tail = tiles.k[1].index(k_stage).reshape([C.block_n, C.d_tail])
        s = warpgroup_mma(q_tail, k_tail.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def dot_pv(p, tiles, stage, acc, C: gl.constexpr):
    """Issue O += P V; P comes from registers. ``acc`` is a pair, as V's columns are."""
    v = tiles.v[0].index(stage).reshape([C.block_n, C.dv])
    o = warpgroup_mma(p, v, acc[0], is_async=True)
    if C.dv_tail > 0:
        v_tail = tiles.v[1].index(stage).reshape([C.block_n, C.dv_tail])
        result = (o, warpgroup_mma(p, v_tail, acc[1], is_async=True))
    else:
        result = (o, 0)
    return result


@gluon.jit
def wait_qk(s, C: gl.constexpr):
    """Wait for S while the products with V, issued after it, go on."""
    if C.dv_tail > 0:
        s = warpgroup_mma_wait(2, deps=(s,))
    else:
        s = warpgroup_mma_wait(1, deps=(s,))
    return s


@gluon.jit
def wait_pv(acc, C: gl.constexpr):
    if C.dv_tail > 0:
        result = warpgroup_mma_wait(0, deps=(acc[0], acc[1]))
    else:
        result = (warpgroup_mma_wait(0, deps=(acc[0],)), 0)
    return result


# ------------------------------------------------------------------------------------------------------ softmax step
@gluon.jit
def scores(s, row, start_n, slope, Nq, Nk, variant, args, MASK: gl.constexpr, S_LAYOUT: gl.constexpr, C: gl.constexpr):
    """Score function, bias and mask of one tile: s [64, BLOCK_N], -inf where the key is hidden."""
    i = row[:, None]
    j = (start_n + gl.arange(0, C.block_n, layout=gl.SliceLayout(0, S_LAYOUT)))[None, :]
    s = variant.score(s, args.score)
    s = variant.alibi(s, slope, i, j, Nq, Nk)
    if MASK:
        a, b, width = variant.place(i, j, Nq, Nk, args.mask)
        s = select(s, a - b, 0, width, OR_MINUS_INFINITY)  # subtracted here, where two rows share differences
        if C.past_end:
            s = select(s, Nk - 1, j, ANY, OR_MINUS_INFINITY)
    return s


@gluon.jit
def power_of_two_from(x):
    """The smallest normal power of two that is at least x; x a positive fp32 scalar."""
    return ((x.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def probabilities(s, m_log2, unit_log2, FIRST: gl.constexpr):
    """p = exp(s - m) [M, BLOCK_N], the factor alpha [M] for what was accumulated before, and the new maximum m [M].

    As in :func:`..softmax.online_softmax_step`, whose words on rounding hold here; but the maximum is carried in base 2,
    rounded, and starts at LOWEST: then it is the pivot, and no difference is NaN. The unit of a row with huge scores is
    looked after in a tile's first block only: its two operations a row would cost 2 to 4 % in every block.
    """
    top = gl.max(s, 1)
    if FIRST:
        power = power_of_two_from(unit_log2)
        large = gl.abs(gl.maximum(m_log2, top * unit_log2)) > LARGE_LOG2  # [M]
        unit = gl.where(large, power, unit_log2)
        m_log2 = gl.maximum(gl.where(large, m_log2 * (power / unit_log2), m_log2), LOWEST)  # a sink's, in the row's unit
        m_new = gl.maximum(m_log2, top * unit)
        p = gl.exp2(s * unit[:, None] - m_new[:, None])
    else:
        m_new = gl.maximum(m_log2, top * unit_log2)
        p = gl.exp2(s * unit_log2 - m_new[:, None])
    return p, gl.exp2(m_log2 - m_new), m_new


@gluon.jit
def linear_probabilities(
    s, row, start_n, slope, Nq, Nk, m_log2, unit_log2, variant, args, S_LAYOUT: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """:func:`scores` and :func:`probabilities` of a block without mask, where the bias is linear in the key.

    It costs a multiply-add per score.
    A thread owns columns 8 a + 2 t + b of its rows, t in 0..3 its own, a and b known to the compiler. What a key's bias has
    beyond that of the thread's last column is added with 8 a + b as a literal; the last column's, one number per row and
    thread, goes into the pivot. The two have the same sign, so that neither shows what the other rounds away.

    Scores that a negative slope made large would round here otherwise than in the backward; such a head masks every block.
    """
    LAST: gl.constexpr = C.block_n - 7  # 8 a + b of a thread's last column
    j = gl.arange(0, C.block_n, layout=gl.SliceLayout(0, S_LAYOUT))
    s = variant.alibi(variant.score(s, args.score), slope, LAST, (j & -7)[None, :], 0, 0)
    parts = s.reshape([s.shape[0], C.block_n // 8, 4, 2])
    top = gl.max(gl.max(parts, 3), 1)  # [M, 4]
    i = gl.convert_layout(row, gl.SliceLayout(1, top.type.layout))
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, top.type.layout))
    rest = variant.alibi(0.0, slope * unit_log2, i[:, None], (start_n + LAST + 2 * t)[None, :], Nq, Nk)  # [M, 4], base 2
    m_new = gl.maximum(m_log2, gl.convert_layout(gl.max(top * unit_log2 + rest, 1), m_log2.type.layout))
    pivot = gl.convert_layout(m_new, gl.SliceLayout(1, top.type.layout))[:, None] - rest
    p = gl.exp2(parts * unit_log2 - pivot[:, None, :, None]).reshape(s.shape)
    return gl.convert_layout(p, S_LAYOUT), gl.exp2(m_log2 - m_new), m_new


@gluon.jit
def row_parts(p, C: gl.constexpr):
    """Row sums as far as one thread can add them, [64, 4]: four threads share a row, and the loop needs no shuffle."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], C.block_n // 8, 4, 2]), 3), 1)


@gluon.jit
def scale_rows(x, factor):
    """x * factor[:, None] in x's layout; moving ``factor`` there moves no data."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def rescale(acc, factor, C: gl.constexpr):
    if C.dv_tail > 0:
        result = (scale_rows(acc[0], factor), scale_rows(acc[1], factor))
    else:
        result = (scale_rows(acc[0], factor), 0)
    return result


@gluon.jit
def skip_block(count, bars, WG: gl.constexpr, C: gl.constexpr):
    """Let a key block pass that only other warpgroups need."""
    stage, phase = stage_of(count, C)
    mbarrier.wait(bars.k_full.index(stage), phase)
    take_turn(WG, C)
    pass_turn(WG, C)
    release(bars.k_empty, RELEASE_K, stage, C)
    mbarrier.wait(bars.v_full.index(stage), phase)
    release(bars.v_empty, RELEASE_V, stage, C)


@gluon.jit
def clear_rows(tile, valid, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Set rows ``valid`` and up of a tile in shared memory to zero.

    A thread's rows are PASS apart. Compared as they stand, all their numbers would be kept in registers along the loop that
    this stands in; what is left of ``valid`` is not known before.
    """
    PER_ROW: gl.constexpr = COLS // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // PER_ROW, PER_ROW], [4, 1], [1, 0])
    PASS: gl.constexpr = 128 // PER_ROW
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    x = tile.load(LAYOUT)
    tile.store(gl.where((rows % PASS < valid - rows // PASS * PASS)[:, None], x, gl.zeros([ROWS, COLS], x.dtype, LAYOUT)))


@gluon.jit
def clear_foreign_keys(count, start_n, Nk, tiles, bars, WG: gl.constexpr, C: gl.constexpr):
    """Zero the rows of V that lie past the sequence's end but inside the tensor; only a tile's last block has such.

    Their probabilities are zero, but they belong to another sequence or to nobody, and 0 * NaN is NaN.
    """
    if Nk - start_n < C.block_n:
        if WG == 0:
            stage, phase = stage_of(count, C)
            mbarrier.wait(bars.v_full.index(stage), phase)
            clear_rows(tiles.v[0].index(stage).reshape([C.block_n, C.dv]), Nk - start_n, C.block_n, C.dv)
            if C.dv_tail > 0:
                clear_rows(tiles.v[1].index(stage).reshape([C.block_n, C.dv_tail]), Nk - start_n, C.block_n, C.dv_tail)
            fence_async_shared()
        named_barrier_wait(CLEARED, 128, 128 * C.warpgroups)


@gluon.jit
def step(
    acc, p16, m_log2, l_i, where, block, count, turn, unit_log2, variant, args, tiles, bars,
    WG: gl.constexpr, MASK: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One key block: its scores and softmax, under the previous block's product with V."""
    row0, slope, h, Nq, Nk = where
    row = row0 + gl.arange(0, m_log2.shape[0], layout=m_log2.type.layout)
    q_stage = (turn % C.q_stages) * C.warpgroups + WG
    k_stage, k_phase = stage_of(count, C)
    v_stage, _phase = stage_of(count - 1, C)
    mbarrier.wait(bars.k_full.index(k_stage), k_phase)
    take_turn(WG, C)
    zero = gl.zeros([row.shape[0], C.block_n], gl.float32, S_LAYOUT)
    s = dot_qk(tiles, q_stage, k_stage, zero, C)
    acc = dot_pv(left_operand(p16, tiles.q[0].dtype, P_LAYOUT, C.words), tiles, v_stage, acc, C)
    pass_turn(WG, C)
    s = wait_qk(s, C)
    release(bars.k_empty, RELEASE_K, k_stage, C)
    if C.linear_bias and not MASK:
        p, alpha, m_log2 = linear_probabilities(
            s, row, block * C.block_n, slope, Nq, Nk, m_log2, unit_log2, variant, args, S_LAYOUT, C
        )
    else:
        s = scores(s, row, block * C.block_n, slope, Nq, Nk, variant, args, MASK, S_LAYOUT, C)
        p, alpha, m_log2 = probabilities(s, m_log2, unit_log2, False)
    parts = row_parts(p, C)
    l_i = scale_rows(l_i, alpha) + parts
    # The next step needs this V anyway. Waiting here, a branch, keeps ptxas from moving exp2 below the wait for O.
    mbarrier.wait(bars.v_full.index(k_stage), k_phase)
    acc = wait_pv(acc, C)
    release(bars.v_empty, RELEASE_V, v_stage, C)
    alpha = alpha * one_after_release(turn, tiles, C)
    p16 = in_16_bits(p, tiles.q[0].dtype, P_LAYOUT, C.words)  # after the wait: before it, Triton 3.8's ptxas serialises wgmma
    return rescale(acc, alpha, C), p16, m_log2, l_i


# ---------------------------------------------------------------------------------------------------------- epilogue
@gluon.jit
def finish_tile(
    acc, m_log2, l_i, turn, blocks, O, stride_o, LSE, ROW_MAX, stride_lse, unit_log2, sizes, tiles, bars,
    WG: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Divide by the row sums, store LSE, and put O where Q was: no one reads this warpgroup's Q any more.

    A row whose maximum is past LARGE_LOG2 was exact in the first block alone, and in another unit: with more blocks it
    becomes NaN. A row that saw no key has l = 0, as one far past LARGE_LOG2 may, but its maximum is still LOWEST; it gives
    O = 0 and LSE = -inf.

    The scheduler sends O on by TMA, which drops rows past the tensor's end. In a packed tensor, rows past the sequence's end
    are the next one's: where there are some, this warpgroup stores the others itself, under a mask.
    """
    M: gl.constexpr = C.block_m // C.warpgroups
    dtype: gl.constexpr = tiles.q[0].dtype
    start_m, z, h, q_row0, _k_row0, Nq, _Nk = read_tile(turn, sizes, tiles, 4, C)
    q_stage = (turn % C.q_stages) * C.warpgroups + WG
    row0 = start_m + WG * M
    row = row0 + gl.arange(0, M, layout=m_log2.type.layout)
    l_row = gl.convert_layout(gl.sum(l_i, 1), m_log2.type.layout)
    large = gl.abs(m_log2) > LARGE_LOG2
    l_safe = gl.where(large & (blocks > 1), float("nan"), l_row)
    unseen = (l_row == 0.0) & (m_log2 == LOWEST)
    l_safe = gl.where(unseen, 1.0, l_safe)
    m = gl.where(large, m_log2 * (unit_log2 / power_of_two_from(unit_log2)), m_log2)
    m = gl.where(unseen, float("-inf"), gl.where(l_row == l_row, m, float("nan")))
    at = h.to(gl.int64) * stride_lse[1] + q_row0 + row
    if not C.packed:
        at += z.to(gl.int64) * stride_lse[0]
    gl.store(LSE + at, (m + gl.log2(l_safe)) * LN2, mask=row < Nq)
    if ROW_MAX is not None:
        gl.store(ROW_MAX + at, m * LN2, mask=row < Nq)
    acc = rescale(acc, 1.0 / l_safe, C)
    main = tiles.q[0].index(q_stage).reshape([M, C.dv])
    main.store(acc[0].to(dtype))
    if C.packed and row0 + M > Nq:
        store_masked(main, O, stride_o, h, row0, q_row0, Nq, 0, M, C.dv, C)
    if C.dv_tail > 0:
        tail = tiles.q[1].index(q_stage).reshape([M, C.dv_tail])
        tail.store(acc[1].to(dtype))
        if C.packed and row0 + M > Nq:
            store_masked(tail, O, stride_o, h, row0, q_row0, Nq, C.dv, M, C.dv_tail, C)
    fence_async_shared()
    mbarrier.arrive(bars.o_full.index(q_stage), count=1)


@gluon.jit
def store_masked(
    stage, O, stride_o, h, row0, q_row0, Nq, FIRST: gl.constexpr, M: gl.constexpr, COLS: gl.constexpr, C: gl.constexpr
):
    """Copy one [M, COLS] part of O, which starts at column FIRST, from shared memory: the rows that are the sequence's."""
    PER_ROW: gl.constexpr = COLS // 8  # threads of 16 bytes each that cover a row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // PER_ROW, PER_ROW], [4, 1], [1, 0])
    rows = row0 + gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
    cols = FIRST + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
    # strides are multiples of 8 elements (the host has checked), which the compiler needs for 16-byte stores
    head = gl.multiple_of(h.to(gl.int64) * stride_o[1], 8)
    line = gl.multiple_of((q_row0 + rows).to(gl.int64) * stride_o[2], 8)
    ptrs = O + head + line[:, None] + cols[None, :]
    gl.store(ptrs, stage.load(LAYOUT), mask=(rows < Nq)[:, None] & (cols < C.head_dim_v)[None, :])


@gluon.jit
def send_output(turn, o_descs, tiles, bars, C: gl.constexpr):
    """Scheduler: when the consumers are done with the turn-th tile, pass its O from Q's buffers to memory and free them.

    Then nobody looks at the tile's slot any more either.
    """
    M: gl.constexpr = C.block_m // C.warpgroups
    if turn >= 0:
        start_m = slot_field(tiles.slots, turn % 2, 0, 1)
        z = 0 if C.packed else slot_field(tiles.slots, turn % 2, 1, 1)
        h = slot_field(tiles.slots, turn % 2, 2, 1)
        q_row0 = slot_field(tiles.slots, turn % 2, 3, 1) if C.packed else 0
        Nq = slot_field(tiles.slots, turn % 2, 5, 1) if C.packed else 0
        for w in gl.static_range(C.warpgroups):
            stage = (turn % C.q_stages) * C.warpgroups + w
            mbarrier.wait(bars.o_full.index(stage), (turn // C.q_stages) & 1)
            if not C.packed or start_m + (w + 1) * M <= Nq:  # else finish_tile has stored them
                row = q_row0 + start_m + w * M
                tma_store(o_descs[0], [z, h, row, 0], tiles.q[0].index(stage))
                if C.dv_tail > 0:
                    tma_store(o_descs[1], [z, h, row, C.dv], tiles.q[1].index(stage))
        tma.store_wait(0)
        mbarrier.arrive(bars.q_empty.index(turn % C.q_stages), count=1)


# -------------------------------------------------------------------------------------------------------- partitions
@gluon.jit
def write_slot(slots, stage, FIELD: gl.constexpr, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots.index(stage * SLOT_FIELDS + FIELD).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def slot_field(slots, stage, FIELD: gl.constexpr, WARPS: gl.constexpr):
    return gl.max(slots.index(stage * SLOT_FIELDS + FIELD).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def announce(turn, start_m, z, h, q_row0, k_row0, Nq, Nk, tiles, bars, C: gl.constexpr):
    """Scheduler: the turn-th tile, for everybody; start_m < 0 when there is none."""
    slot = turn % 2
    write_slot(tiles.slots, slot, 0, start_m)
    write_slot(tiles.slots, slot, 1, z)
    write_slot(tiles.slots, slot, 2, h)
    if C.packed or C.used:
        write_slot(tiles.slots, slot, 3, q_row0)
        write_slot(tiles.slots, slot, 4, k_row0)
        write_slot(tiles.slots, slot, 5, Nq)
        write_slot(tiles.slots, slot, 6, Nk)
    if C.named_release:
        write_slot(tiles.slots, slot, 7, 0x3F800000)  # see one_after_release
    mbarrier.arrive(bars.slot_full.index(slot), count=1)


@gluon.jit
def read_tile(turn, sizes, tiles, WARPS: gl.constexpr, C: gl.constexpr):
    """The turn-th tile as it was announced, for a partition of ``WARPS`` warps."""
    slot = turn % 2
    start_m = slot_field(tiles.slots, slot, 0, WARPS)
    z = slot_field(tiles.slots, slot, 1, WARPS)
    h = slot_field(tiles.slots, slot, 2, WARPS)
    q_row0 = 0
    k_row0 = 0
    Nq = sizes.Nq
    Nk = sizes.Nk
    if C.packed or C.used:
        q_row0 = slot_field(tiles.slots, slot, 3, WARPS)
        k_row0 = slot_field(tiles.slots, slot, 4, WARPS)
        Nq = slot_field(tiles.slots, slot, 5, WARPS)
        Nk = slot_field(tiles.slots, slot, 6, WARPS)
    return start_m, z, h, q_row0, k_row0, Nq, Nk


@gluon.jit
def await_tile(turn, sizes, tiles, bars, WARPS: gl.constexpr, C: gl.constexpr):
    """:func:`read_tile`, as soon as the tile is announced."""
    mbarrier.wait(bars.slot_full.index(turn % 2), (turn // 2) & 1)
    return read_tile(turn, sizes, tiles, WARPS, C)


@gluon.jit
def scheduler(o_descs, CU_Q, CU_K, USED_K, COUNTER, sizes, tiles, bars, C: gl.constexpr):
    """Chooses the tiles, one ahead of the producer, announces them, and sends off what the consumers have finished."""
    turn = 0
    tile, z, h, start_m, q_row0, k_row0, Nq, Nk = find_tile(gl.program_id(0), sizes, CU_Q, CU_K, USED_K, COUNTER, C)
    while tile < sizes.num_tiles:
        send_output(turn - 2, o_descs, tiles, bars, C)  # which frees the slot
        announce(turn, start_m, z, h, q_row0, k_row0, Nq, Nk, tiles, bars, C)
        turn += 1
        tile, z, h, start_m, q_row0, k_row0, Nq, Nk = find_tile(
            next_tile(tile, COUNTER, C), sizes, CU_Q, CU_K, USED_K, COUNTER, C
        )
    send_output(turn - 2, o_descs, tiles, bars, C)
    announce(turn, -1, 0, 0, 0, 0, 0, 0, tiles, bars, C)
    send_output(turn - 1, o_descs, tiles, bars, C)
    reset_counter(COUNTER, C)


@gluon.jit
def producer(q_descs, k_descs, v_descs, sizes, variant, args, tiles, bars, C: gl.constexpr):
    """Streams Q, K and V into the rings in the order they are used."""
    M: gl.constexpr = C.block_m // C.warpgroups
    count = 0  # key blocks fetched
    turn = 0  # tiles fetched
    start_m, z, h, q_row0, k_row0, Nq, Nk = await_tile(turn, sizes, tiles, bars, 1, C)
    while start_m >= 0:
        zb = 0 if C.packed else z  # packed tensors have no batch axis
        hk = h // sizes.group
        first, _lo, _hi, last = key_blocks(start_m, C.block_m, Nq, Nk, variant, args, C)
        load_k(k_descs, zb, hk, k_row0, last - 1, count, tiles, bars, C)
        q_stage = turn % C.q_stages
        mbarrier.wait(bars.q_empty.index(q_stage), ((turn // C.q_stages) & 1) ^ 1)
        for w in gl.static_range(C.warpgroups):
            stage = q_stage * C.warpgroups + w
            load_rows(
                q_descs, zb, h, q_row0 + start_m + w * M, bars.q_full.index(stage), tiles.q, stage, M, C.d, C.d_tail
            )
        count += 1
        for block in range(last - 2, first - 1, -1):
            load_k(k_descs, zb, hk, k_row0, block, count, tiles, bars, C)
            load_v(v_descs, zb, hk, k_row0, block + 1, count - 1, tiles, bars, C)
            count += 1
        load_v(v_descs, zb, hk, k_row0, first, count - 1, tiles, bars, C)
        turn += 1
        start_m, z, h, q_row0, k_row0, Nq, Nk = await_tile(turn, sizes, tiles, bars, 1, C)


@gluon.jit
def load_k(descs, z, h, row0, block, count, tiles, bars, C: gl.constexpr):
    wait_empty(bars.k_empty, RELEASE_K, count, C)
    stage, _phase = stage_of(count, C)
    load_rows(descs, z, h, row0 + block * C.block_n, bars.k_full.index(stage), tiles.k, stage, C.block_n, C.d, C.d_tail)


@gluon.jit
def load_v(descs, z, h, row0, block, count, tiles, bars, C: gl.constexpr):
    wait_empty(bars.v_empty, RELEASE_V, count, C)
    stage, _phase = stage_of(count, C)
    load_rows(
        descs, z, h, row0 + block * C.block_n, bars.v_full.index(stage), tiles.v, stage, C.block_n, C.dv, C.dv_tail
    )


@gluon.jit
def first_block(
    where, block, count, turn, SINK, unit_log2, variant, args, tiles, bars,
    WG: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of a tile's rightmost key block, and the running maximum and sum that they start."""
    row0, slope, h, Nq, Nk = where
    M: gl.constexpr = C.block_m // C.warpgroups
    dtype: gl.constexpr = tiles.q[0].dtype
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    row = row0 + gl.arange(0, M, layout=ROWS)
    q_stage = (turn % C.q_stages) * C.warpgroups + WG
    k_stage, k_phase = stage_of(count, C)
    mbarrier.wait(bars.q_full.index(q_stage), (turn // C.q_stages) & 1)
    mbarrier.wait(bars.k_full.index(k_stage), k_phase)
    take_turn(WG, C)
    s = dot_qk(tiles, q_stage, k_stage, gl.zeros([M, C.block_n], gl.float32, S_LAYOUT), C)
    pass_turn(WG, C)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(bars.k_empty, RELEASE_K, k_stage, C)
    m_log2 = gl.full([M], LOWEST, gl.float32, layout=ROWS)
    if SINK is not None:
        sink_log2 = gl.load(SINK + h).to(gl.float32) * LOG2E
        m_log2 = gl.maximum(m_log2, sink_log2)
    s = scores(s, row, block * C.block_n, slope, Nq, Nk, variant, args, C.mask_last, S_LAYOUT, C)
    p, alpha, m_log2 = probabilities(s, m_log2, unit_log2, True)
    l_i = row_parts(p, C)
    if SINK is not None:  # l = 1, shared by four threads; 0 for a sink of -inf, and NaN for NaN, which a maximum loses
        share = 0.25 * gl.exp2(sink_log2 - gl.maximum(sink_log2, LOWEST))
        l_i += scale_rows(gl.full([M, 4], 0.0, gl.float32, l_i.type.layout) + share, alpha)
    p16 = in_16_bits(p, dtype, P_LAYOUT, C.words)
    mbarrier.wait(bars.v_full.index(k_stage), k_phase)
    return p16, m_log2, l_i


@gluon.jit
def zero_output(M: gl.constexpr, O_LAYOUT: gl.constexpr, C: gl.constexpr):
    main = gl.zeros([M, C.dv], gl.float32, O_LAYOUT)
    if C.dv_tail > 0:
        TAIL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.dv_tail, 16])
        result = (main, gl.zeros([M, C.dv_tail], gl.float32, TAIL_LAYOUT))
    else:
        result = (main, 0)
    return result


@gluon.jit
def consumer(
    O, stride_o, LSE, ROW_MAX, stride_lse, SINK, unit_log2, sizes, variant, args, tiles, bars, WG: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Warpgroup WG: its rows of every tile that this thread block is given."""
    M: gl.constexpr = C.block_m // C.warpgroups
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_n, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.dv, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    if WG == C.warpgroups - 1:
        pass_turn(WG, C)  # the first turn is warpgroup 0's
    turn = 0  # tiles begun before this one
    count = 0  # key blocks begun
    start_m, z, h, _q_row0, _k_row0, Nq, Nk = await_tile(turn, sizes, tiles, bars, 4, C)
    while start_m >= 0:
        where = (start_m + WG * M, variant.slope(z, h, args.alibi), h, Nq, Nk)
        first, free_lo, free_hi, last = key_blocks(start_m, C.block_m, Nq, Nk, variant, args, C)
        if C.packed or C.used:
            clear_foreign_keys(count, (last - 1) * C.block_n, Nk, tiles, bars, WG, C)
        if C.right_edge or (C.packed and WG > 0):  # its rows may see none of the tile's last blocks
            _first, free_lo, free_hi, needed = key_blocks(start_m + WG * M, M, Nq, Nk, variant, args, C)
            if C.packed and WG > 0:
                needed = gl.where(start_m + WG * M < Nq, needed, first)  # at a sequence's end it may have no rows
            needed = gl.maximum(gl.minimum(needed, last), first + 1)
            for _block in range(needed, last):
                skip_block(count, bars, WG, C)
                count += 1
            last = needed
        if C.linear_bias:  # see linear_probabilities
            free_lo = gl.where(where[1] < 0, first, free_lo)
            free_hi = gl.where(where[1] < 0, first, free_hi)
        p16, m_log2, l_i = first_block(
            where, last - 1, count, turn, SINK, unit_log2, variant, args, tiles, bars, WG, S_LAYOUT, P_LAYOUT, C
        )
        acc = zero_output(M, O_LAYOUT, C)
        # the other key blocks: an edge, the free middle, the other edge
        if C.right_edge:
            for block in range(last - 2, gl.maximum(free_hi, first) - 1, -1):
                acc, p16, m_log2, l_i = step(acc, p16, m_log2, l_i, where, block, count + (last - 1 - block), turn, unit_log2,
                                          variant, args, tiles, bars, WG, True, S_LAYOUT, P_LAYOUT, C)  # fmt: skip
        for block in range(gl.minimum(last - 1, free_hi) - 1, gl.maximum(free_lo, first) - 1, -1):
            acc, p16, m_log2, l_i = step(acc, p16, m_log2, l_i, where, block, count + (last - 1 - block), turn, unit_log2,
                                      variant, args, tiles, bars, WG, False, S_LAYOUT, P_LAYOUT, C)  # fmt: skip
        if C.left_edge:
            for block in range(gl.minimum(last - 1, free_lo) - 1, first - 1, -1):
                acc, p16, m_log2, l_i = step(acc, p16, m_log2, l_i, where, block, count + (last - 1 - block), turn, unit_log2,
                                          variant, args, tiles, bars, WG, True, S_LAYOUT, P_LAYOUT, C)  # fmt: skip
        count += last - first
        v_stage, _phase = stage_of(count - 1, C)
        acc = wait_pv(dot_pv(left_operand(p16, tiles.q[0].dtype, P_LAYOUT, C.words), tiles, v_stage, acc, C), C)
        release(bars.v_empty, RELEASE_V, v_stage, C)
        finish_tile(
            acc, m_log2, l_i, turn, last - first, O, stride_o, LSE, ROW_MAX, stride_lse, unit_log2, sizes, tiles, bars, WG, C
        )
        turn += 1
        start_m, z, h, _q_row0, _k_row0, Nq, Nk = await_tile(turn, sizes, tiles, bars, 4, C)
    if WG == 0:
        take_turn(WG, C)  # the pass that opened the ring


# ------------------------------------------------------------------------------------------------------------ kernel
@gluon.jit
def tile_pair(dtype: gl.constexpr, stages: gl.constexpr, rows: gl.constexpr, desc, desc_tail, D: gl.constexpr,
              D_TAIL: gl.constexpr):  # fmt: skip
    main = gl.allocate_shared_memory(dtype, [stages, 1, 1, rows, D], desc.layout)
    if D_TAIL > 0:
        result = (main, gl.allocate_shared_memory(dtype, [stages, 1, 1, rows, D_TAIL], desc_tail.layout))
    else:
        result = (main, 0)
    return result


@gluon.jit
def barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """mbarriers that complete a phase after ``arrivals``. No barrier may be made and not used.

    Triton gives the memory of one that no partition uses to another buffer, without the ``mbarrier.inval`` that PTX asks for.
    On an H200 shared by several processes the barrier came back there, and 8 bytes of that buffer were lost.
    """
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit(
    do_not_specialize=["Nq", "Nk", "blocks", "batch_heads", "head_group", "num_tiles", "heads", "group"],
    do_not_specialize_on_alignment=["LSE", "ROW_MAX", "SINK", "CU_Q", "CU_K", "USED_K", "COUNTER"],
)
def attn_fwd_hopper(
    q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, o_desc, o_tail, O, stride_o, LSE, ROW_MAX, stride_lse, SINK, CU_Q,
    CU_K, USED_K, COUNTER, variant, args, unit_log2, heads, group, Nq, Nk, blocks, batch_heads, head_group, num_tiles,
    C: gl.constexpr,
):  # fmt: skip
    """Grid: one thread block per tile, or one per multiprocessor (``C.order``). ``C`` is a :class:`.ForwardConfig`."""
    M: gl.constexpr = C.block_m // C.warpgroups
    dtype: gl.constexpr = q_desc.dtype
    tiles = Tiles(
        tile_pair(dtype, C.q_stages * C.warpgroups, M, q_desc, q_tail, C.d, C.d_tail),
        tile_pair(dtype, C.kv_stages, C.block_n, k_desc, k_tail, C.d, C.d_tail),
        tile_pair(dtype, C.kv_stages, C.block_n, v_desc, v_tail, C.dv, C.dv_tail),
        gl.allocate_shared_memory(gl.int32, [2 * SLOT_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    bars = Bars(
        barriers(C.q_stages * C.warpgroups, 1),
        barriers(C.q_stages, 1),
        barriers(C.q_stages * C.warpgroups, 1),
        barriers(C.kv_stages, 1),
        barriers(C.kv_stages, C.warpgroups) if not C.named_release else None,
        barriers(C.kv_stages, 1),
        barriers(C.kv_stages, C.warpgroups) if not C.named_release else None,
        barriers(2, 1),
    )
    fence_async_shared()
    sizes = Sizes(heads, group, Nq, Nk, blocks, batch_heads, head_group, num_tiles)
    q_descs = (q_desc, q_tail)
    k_descs = (k_desc, k_tail)
    v_descs = (v_desc, v_tail)
    o_descs = (o_desc, o_tail)
    # the argument tuples stand here in full because assigning one to a name would turn its constants into tensors
    if C.warpgroups == 1:
        gl.warp_specialize([
            (consumer, (O, stride_o, LSE, ROW_MAX, stride_lse, SINK, unit_log2, sizes, variant, args, tiles, bars, 0, C)),
            (producer, (q_descs, k_descs, v_descs, sizes, variant, args, tiles, bars, C)),
            (scheduler, (o_descs, CU_Q, CU_K, USED_K, COUNTER, sizes, tiles, bars, C)),
        ], [1, 1], [C.producer_regs, C.producer_regs])  # fmt: skip
    elif C.warpgroups == 2:
        gl.warp_specialize([
            (consumer, (O, stride_o, LSE, ROW_MAX, stride_lse, SINK, unit_log2, sizes, variant, args, tiles, bars, 0, C)),
            (consumer, (O, stride_o, LSE, ROW_MAX, stride_lse, SINK, unit_log2, sizes, variant, args, tiles, bars, 1, C)),
            (producer, (q_descs, k_descs, v_descs, sizes, variant, args, tiles, bars, C)),
            (scheduler, (o_descs, CU_Q, CU_K, USED_K, COUNTER, sizes, tiles, bars, C)),
        ], [4, 1, 1], [C.consumer_regs, C.producer_regs, C.producer_regs])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (O, stride_o, LSE, ROW_MAX, stride_lse, SINK, unit_log2, sizes, variant, args, tiles, bars, 0, C)),
            (consumer, (O, stride_o, LSE, ROW_MAX, stride_lse, SINK, unit_log2, sizes, variant, args, tiles, bars, 1, C)),
            (consumer, (O, stride_o, LSE, ROW_MAX, stride_lse, SINK, unit_log2, sizes, variant, args, tiles, bars, 2, C)),
            (producer, (q_descs, k_descs, v_descs, sizes, variant, args, tiles, bars, C)),
            (scheduler, (o_descs, CU_Q, CU_K, USED_K, COUNTER, sizes, tiles, bars, C)),
        ], [4, 4, 1, 1], [C.consumer_regs, C.consumer_regs, C.producer_regs, C.producer_regs])  # fmt: skip
