"""Host side of the Hopper backward: which problems it takes, which kernels and tiles it uses, and a call that is cheap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem import NO_EXTRAS, Extras, Problem
from ...target import maker, target_of
from ...variants import MASKS, assemble, sink
from ..launch_tail import Tail
from ..quick import compiled_only
from . import launch_forward
from .backward import attn_bwd_hopper
from .backward_convert import Piece
from .backward_ends import attn_bwd_after_kernel, attn_bwd_before_kernel
from .backward_prepare import Rows
from .common import Block, Constants, Job, Launches, for_triton, four_axes, tma_reason


@dataclass(frozen=True)
class BackwardConfig:
    """Everything the compiler needs to know about one fused (or dK, dV) kernel."""

    block_m: int = 64  # query rows per step
    block_n: int = 128  # keys per thread block
    q_stages: int = 2
    do_stages: int = 2
    early_dv: bool = False  # issue dV before dS is known: more overlap, more registers
    late_dk: bool = False  # a step's dK product runs under the next step's exp2; without dQ, which would need both
    dk_last: bool = False  # a step's dK product is issued when its dQ is there, whose additions leave beneath it
    early_statistics: bool = False  # LSE and delta are read before the products that they are needed after: more registers
    dq: bool = True  # add dQ to the accumulator; False leaves it to the dQ kernel
    group_split: int = 1  # thread blocks that share the query heads of a key head; see group_split()
    l2_bytes: int = 0  # of the heads that run side by side under a mask; 0: l2_bytes_of()
    ordered: bool = False  # key tiles add to dQ in a fixed order, which makes it deterministic
    prepares: bool = False  # thread blocks do most of the pass before, for later ones
    converts: bool = False  # and, launched in pieces, most of the pass after, for the piece before; only with prepares
    whole_head: bool = False  # one thread block takes all key tiles of a head: no zeroing, a fixed order, no conversion pass
    consumer_regs: int = 240  # of the second warpgroup; the first one takes what is left
    producer_regs: int = 24
    d: int = 128  # columns of the dQ accumulator
    tail: int = 0  # of Q and K past the first 128
    v_tail: int = 0
    head_dim: int = 128
    head_dim_v: int = 128
    packed: bool = False
    used: bool = False  # seqused_k
    ragged_keys: bool = False  # a tile may hold fewer than 128 keys
    edge_lo: bool = False  # steps before the free middle may need the mask
    edge_hi: bool = False
    past_end: bool = True  # as in ForwardConfig
    linear_bias: bool = True  # as in ForwardConfig
    rotation: int = 0  # ordered, no mask: key tiles of a head that walk in rotation, at most
    both_ways: bool = False  # ordered, causal: the key tiles of the last heads walk from the last rows to the first


@dataclass(frozen=True)
class DqConfig:
    """Everything the compiler needs to know about one dQ kernel of the split backward."""

    block_m: int = 128
    block_n: int = 64
    k_stages: int = 3
    v_stages: int = 2
    consumer_regs: int = 240
    producer_regs: int = 24
    block_stat: int = 64  # rows per block of the padded statistics
    d: int = 128
    head_dim: int = 128
    packed: bool = False
    used: bool = False
    mask_last: bool = False
    right_edge: bool = False
    left_edge: bool = False
    past_end: bool = True  # as in ForwardConfig
    linear_bias: bool = False  # as in ForwardConfig
    words: bool = False  # dS goes from step to step in 32-bit words


# Of pieces_of(), measured: pieces, waves of each, and the steps that a thread block has for each block that it converts
PIECES, PIECE_WAVES, CONVERT_STEPS = 8, 2, {64: 8, 128: 4}
PREPARE_WINDOW = 1023  # rows of a window, its own not among them, that leave a tile of D = 128 time to prepare others
WIDE_ROWS = 1024  # whose LSE a program of the pass before takes, where it leaves delta to the main kernel
SHARE_ROWS, SHARE_TASKS, SHARE_L2 = 1024, 4, 16 << 20  # of group_split(): by arithmetic, which NOTES_backward.md bears out


def width(problem: Problem) -> int:
    """Tile width for the head dimensions; columns past the tensor's read as zeros."""
    return next(limit for limit in (64, 128, 256) if max(problem.head_dim, problem.head_dim_v) <= limit)


def tiles(problem: Problem, deterministic: bool, multiprocessors: int) -> BackwardConfig:
    """Tile sizes and schedule for a problem: the fastest measured on an H200 (NOTES_backward.md)."""
    plain = set(problem.features) <= {"causal", "gqa", "sink"}  # a causal ALiBi would spill 800 bytes; a full one was not timed
    if width(problem) == 64 and plain and not whole_head_reason(problem):
        rows = problem.seqlen_q * problem.heads_q // problem.heads_k  # of dQ, which a thread block adds up in L2
        heads = problem.batch * problem.heads_k
        waves = -(-heads // multiprocessors)
        full = waves >= 2 and heads >= 0.9 * waves * multiprocessors
        if full and max(rows, problem.seqlen_k) <= (512 if deterministic or problem.causal else 256):
            return whole_head(problem)
    chosen = deterministic_tiles(problem) if deterministic and width(problem) <= 128 else fused_tiles(problem)
    return shared(chosen, problem, multiprocessors)


def shared(config: BackwardConfig, problem: Problem, multiprocessors: int) -> BackwardConfig:
    """``config`` with as many shares of a group as :func:`group_split` says."""
    return replace(config, group_split=group_split(problem, config.block_n, multiprocessors))


def group_split(problem: Problem, block_n: int, multiprocessors: int) -> int:
    """Into how many shares the query heads of a key head go, each with a thread block for every ``block_n`` keys.

    As few as it takes, because every share writes and reads back 8 bytes per element of dK and dV:

    - the multiprocessors are busy: thread blocks fill their waves to nine tenths, and under a causal mask, where they
      differ in length, there are SHARE_TASKS for each multiprocessor;
    - Q, dO and the dQ accumulator of a causal share fit SHARE_L2, so that the tiles of several run side by side, longest first:
      those of a single one, the last, would begin late with a long tile;

    and no more than leave a share SHARE_ROWS rows of work for its traffic, and take the memory of the dQ accumulator once
    more. Packed sequences get a share for every eight heads: all else depends on what they are packed with.
    """
    group = problem.heads_q // problem.heads_k
    splits = [n for n in range(1, group + 1) if group % n == 0]
    if problem.varlen:
        return next(n for n in splits if group <= 8 * n)
    left, right = problem.window if problem.mask_kind == "window" else (problem.seqlen_q, problem.seqlen_q)
    rows = group * min(problem.seqlen_q, left + right + block_n)  # of all heads, that a key tile sees
    tasks = problem.batch * problem.heads_k * -(-problem.seqlen_k // block_n)
    row_bytes = 4 * (problem.head_dim + problem.head_dim_v)

    def enough(n: int) -> bool:
        if problem.mask_kind == "causal":
            return tasks * n >= SHARE_TASKS * multiprocessors and rows // n * row_bytes <= SHARE_L2
        return tasks * n >= 0.9 * multiprocessors * -(-tasks * n // multiprocessors)

    def affordable(n: int) -> bool:
        return rows >= SHARE_ROWS * n and 2 * n * problem.heads_k * problem.seqlen_k <= problem.heads_q * problem.seqlen_q

    worth = [n for n in splits if n == 1 or affordable(n)]
    return next((n for n in worth if enough(n)), worth[-1])


def fused_tiles(problem: Problem) -> BackwardConfig:
    """One kernel for all three gradients, whose dQ is added up in memory."""
    if width(problem) == 256:
        return BackwardConfig(block_n=64, consumer_regs=224)  # which leaves the scores 255
    if width(problem) == 64 and problem.softcap > 0:  # tanh's gradient does not fit beside 128 rows of P, dP and dQ
        return split_tiles(problem)
    features, few = set(problem.features), {"causal", "gqa", "sink", "alibi"}
    converts = features <= few  # measured, or without a spill more in the loops
    if width(problem) == 64:
        return BackwardConfig(block_m=128, dk_last=True, prepares=converts, converts=converts)
    slow = problem.mask_kind != "window" or sum(problem.window) >= PREPARE_WINDOW  # tiles have time to prepare rows
    early = problem.mask_kind != "full" and not problem.varlen and problem.softcap == 0  # whose gradient takes the registers
    prepares = slow and features <= few | {"window", "softcap"}
    return BackwardConfig(early_statistics=early, prepares=prepares, converts=converts)


def deterministic_tiles(problem: Problem) -> BackwardConfig:
    """Up to D = 128: dQ's additions in order, but split kernels where all tiles of a head would begin with the same rows."""
    lengths_differ = problem.varlen or problem.seqused
    return split_tiles(problem) if problem.mask_kind == "full" and lengths_differ else ordered_tiles(problem)


def ordered_tiles(problem: Problem) -> BackwardConfig:
    """:func:`fused_tiles` with dQ's additions in a fixed order, where they add up dQ.

    Nothing is converted for the launch before where tiles differ in length: the shortest would wait for its longest to end.
    """
    config = fused_tiles(problem)
    full = problem.mask_kind == "full"
    prepares = config.prepares and problem.mask_kind != "window" and problem.softcap == 0
    return replace(
        config, ordered=config.dq, prepares=prepares, converts=prepares and config.converts and full, early_statistics=False
    )


def split_tiles(problem: Problem) -> BackwardConfig:
    """A kernel for dK and dV; dQ has its own."""
    if problem.softcap > 0:  # its registers have no room for 128 rows, nor for a dK under way, nor at D = 128 for P beside dS
        return BackwardConfig(dq=False, early_dv=width(problem) == 128)
    if width(problem) == 64:
        return BackwardConfig(block_m=128, dq=False)
    return BackwardConfig(q_stages=3, dq=False, late_dk=True)


def whole_head(problem: Problem) -> BackwardConfig:
    """One kernel for all three gradients, with a thread block per head; see :func:`whole_head_reason`."""
    return replace(fused_tiles(problem), whole_head=True, prepares=False, dk_last=False)


def whole_head_reason(problem: Problem) -> str:
    """Why one thread block cannot take all key tiles of a head; empty when it can.

    The last tile, the one with key 0, must be seen by every row, and every tile by some row.
    """
    if problem.varlen or problem.seqused or problem.mask_kind not in ("full", "causal"):
        return "whole_head takes dense full and causal attention"
    if width(problem) == 256 or not fused_tiles(problem).dq:
        return "whole_head takes head dimensions up to 128, and 64 not with a softcap, whose tiles leave dQ out"
    if problem.causal and problem.seqlen_q > problem.seqlen_k:
        return "whole_head takes causal attention with no more queries than keys"
    return ""


def specialise(config: BackwardConfig, problem: Problem) -> BackwardConfig:
    """``config`` with the fields that follow from the problem.

    Raises:
        ValueError: the problem does not fit ``config``.
    """
    group = problem.heads_q // problem.heads_k
    if config.group_split < 1 or group % config.group_split:
        raise ValueError(f"group_split: must divide the {group} query heads of a key head, got {config.group_split}")
    if config.whole_head and config.group_split > 1:
        raise ValueError("group_split: not with whole_head, where one thread block takes all key tiles of all heads of a group")
    if config.whole_head and whole_head_reason(problem):
        raise ValueError(whole_head_reason(problem))
    if config.dq and width(problem) <= 128 and config.block_m * width(problem) != 8192:  # two halves of 64 x 64
        raise ValueError(f"block_m: with dQ, steps have {8192 // width(problem)} rows here, got {config.block_m}")
    if config.whole_head and not config.dq:
        raise ValueError("whole_head: only with dQ, which no other kernel computes then")
    if config.dk_last and (not config.dq or width(problem) > 128):
        raise ValueError("dk_last: only in the kernel for all three gradients of heads up to 128")
    if config.ordered and (not config.dq or config.whole_head or width(problem) > 128):
        raise ValueError("ordered: only with dQ and heads up to 128, and not with whole_head")
    if config.do_stages > 2 and width(problem) > 128:  # dO's stages guard two buffers of P and dS there
        raise ValueError(f"do_stages: at most 2 for heads wider than 128, got {config.do_stages}")
    if config.late_dk and config.early_dv:
        raise ValueError("late_dk: not with early_dv, with which the ptxas of Triton 3.6 crashes")
    if config.late_dk and config.dq:
        raise ValueError("late_dk: only without dQ, whose product needs the same dS")
    if config.prepares and (not config.dq or config.whole_head or problem.varlen or width(problem) > 128):
        raise ValueError("prepares: only dense, with dQ and heads up to 128, and not with whole_head")
    mask = MASKS[problem.mask_kind]
    ragged = problem.varlen or problem.seqused or problem.seqlen_k % config.block_n != 0
    return replace(
        config,
        d=width(problem),
        tail=_tail(problem.head_dim),
        v_tail=_tail(problem.head_dim_v),
        head_dim=problem.head_dim if problem.varlen or config.whole_head else 0,  # stores without TMA look at them
        head_dim_v=problem.head_dim_v if problem.varlen else 0,
        packed=problem.varlen,
        used=problem.seqused,
        ragged_keys=ragged,
        edge_lo=mask.Q_LEFT_EDGE or ragged,
        edge_hi=mask.Q_RIGHT_EDGE,
        past_end=problem.mask_kind == "full" or problem.window[1] > 0,
        linear_bias=config.linear_bias and launch_forward.linear_bias(problem),
        rotation=0,  # plan() says
        both_ways=config.ordered and problem.mask_kind == "causal" and not problem.varlen and not problem.seqused,
    )


def _tail(head_dim: int) -> int:
    return 0 if head_dim <= 128 else 64 if head_dim <= 192 else 128


def specialise_dq(problem: Problem, block_stat: int, linear_bias: bool) -> DqConfig:
    """The dQ kernel of a problem, beside a main one with blocks of ``block_stat`` rows."""
    kind, block_n = problem.mask_kind, DqConfig.block_n
    even = not problem.varlen and not problem.seqused and problem.seqlen_k % block_n == 0
    return DqConfig(
        block_stat=block_stat,
        d=width(problem),
        head_dim=problem.head_dim if problem.varlen else 0,
        packed=problem.varlen,
        used=problem.seqused,
        mask_last=kind != "full" or not even,
        right_edge=kind != "full",
        left_edge=MASKS[kind].KV_LEFT_EDGE,
        past_end=kind == "full" or problem.window[1] > 0,
        linear_bias=linear_bias,
        words=kind != "full",
    )


def problem_reason(problem: Problem, device: torch.device, deterministic: bool = False) -> str:
    """Why this backward does not take the problem, whatever its tensors' addresses; empty when it does."""
    reason = launch_forward.problem_reason(problem, device)
    if not reason and deterministic and width(problem) > 128:
        reason = (
            f"head dimensions {problem.head_dim} and {problem.head_dim_v}: the deterministic Hopper backward ends at 128; "
            "wider ones run on the plain kernel"
        )
    return reason


def supports(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[bool, str]:
    """Whether the Hopper backward takes this call, and if not, why. dO is no reason: a bad one is copied."""
    reason = problem_reason(problem, q.device, deterministic)
    for name, x in (("q", q), ("k", k), ("v", v), ("dq", dq), ("dk", dk), ("dv", dv)):
        if not reason and x is not None:
            reason = tma_reason(name, x)
    return not reason, reason


# -------------------------------------------------------------------------------------------------------------- plan
@dataclass(frozen=True)
class Plan:
    """What a problem needs at launch, apart from its tensors."""

    config: BackwardConfig
    constants: Constants
    dq_config: DqConfig
    dq_constants: Constants
    q_blocks: int  # blocks of block_m rows per head
    stat_blocks: int  # and in all
    grid: int
    sizes: tuple[int, ...]  # key heads (or shares), query heads of one, Nq, Nk, blocks, batch_heads, head_group, q_blocks
    share_blocks: int  # blocks of 64 keys per share
    prepared: int  # blocks of rows that the pass before prepares: all, but with config.prepares
    each: int  # and thereafter every thread block
    before_grid: int
    pieces: tuple[tuple[int, Piece], ...]  # launches of the main kernel, and how many thread blocks each has
    converted: int  # blocks of rows that they convert
    key_programs: int  # of the conversion pass for dK, and as many for dV
    dq_grid: int
    dq_sizes: tuple[int, ...]
    workspace: tuple[int, ...]  # floats of the parts of :class:`Workspace`, all but the last two multiples of 256 bytes


def _tiling(problem: Problem, heads: int, rows: int, total: int, block: int) -> tuple[int, int, int]:
    """(blocks per head, second schedule argument, programs) of a grid over query or key tiles."""
    if problem.varlen:
        blocks = total // block + problem.batch
        return blocks, problem.batch, blocks * heads
    blocks = -(-rows // block)
    return blocks, problem.batch * heads, blocks * problem.batch * heads


def l2_bytes_of(problem: Problem) -> int:
    """Q, dO, K and V bytes of the heads that run side by side when tiles come longest first; measured best.

    Four times as many where sequences are packed (by simulation): the longest of them is counted, and most are shorter.
    """
    megabytes = 8 if width(problem) == 64 or problem.seqlen_q <= 1024 else 32
    return megabytes << (22 if problem.varlen else 20)


def plan(
    problem: Problem, deterministic: bool, config: BackwardConfig | None = None, multiprocessors: int = 132
) -> Plan:
    """Grids and sizes; None means the shipped choice."""
    full = specialise(config or tiles(problem, deterministic, multiprocessors), problem)
    if full.ordered and problem.mask_kind == "full" and not problem.varlen and not problem.seqused:
        full = replace(full, rotation=max(1, multiprocessors // 2))  # half of them, so that two such kernels run side by side
    dq_config = specialise_dq(problem, full.block_m, full.linear_bias)
    heads, heads_k, group = problem.heads_q, problem.heads_k, problem.heads_q // problem.heads_k
    q_blocks, _second, stat_blocks = _tiling(problem, heads, problem.seqlen_q, problem.total_q, full.block_m)
    row_bytes = 4 * (problem.head_dim + problem.head_dim_v)

    def together(pairs: int, rows: int) -> int:
        if problem.mask_kind == "full" and not problem.varlen:
            return 1
        groups = -(-pairs // max(1, (full.l2_bytes or l2_bytes_of(problem)) // max(1, rows * row_bytes)))
        return -(-pairs // groups)  # equal groups: a small last one is a tail

    shares, walked = heads_k * full.group_split, group // full.group_split
    blocks, second, grid = _tiling(problem, shares, problem.seqlen_k, problem.total_k, full.block_n)
    share_blocks = blocks * (full.block_n // 64)
    key_programs = grid * (full.block_n // 64) // full.group_split if full.group_split > 1 else 0
    if full.whole_head:
        grid = second
    side = together(shares if problem.varlen else second, walked * problem.seqlen_q)
    if full.rotation:  # one rotation of each
        side = min(second, multiprocessors // rotation_of(blocks, q_blocks, full.rotation))
    if full.both_ways:  # a wave
        side = min(second, max(2, -(-multiprocessors // blocks)))
    sizes = (shares, walked, problem.seqlen_q, problem.seqlen_k, blocks, second, side, q_blocks)
    blocks, second, dq_grid = _tiling(problem, heads, problem.seqlen_q, problem.total_q, dq_config.block_m)
    side = together(heads if problem.varlen else second, problem.seqlen_k)
    dq_sizes = (heads, group, problem.seqlen_q, problem.seqlen_k, blocks, second, side, q_blocks)
    stat, keys = stat_blocks * full.block_m, key_programs * 64 * full.group_split
    prepared, each = prepared_first(full, sizes, stat_blocks, grid, multiprocessors)
    if prepared == stat_blocks:  # nothing to do for thread blocks
        full, each = replace(full, prepares=False), 0
    before_grid = prepared + -(-(stat_blocks - prepared) // (WIDE_ROWS // full.block_m))
    pieces = pieces_of(full, problem, sizes, grid, multiprocessors)
    full = replace(full, converts=len(pieces) > 1)
    semaphores, counters = (stat_blocks if yes else 0 for yes in (full.ordered, full.prepares))
    workspace = stat, stat, stat * full.d if full.dq else 0, keys * full.d, keys * full.d, semaphores, counters
    return Plan(
        full, Constants(full), dq_config, Constants(dq_config), q_blocks, stat_blocks, grid, sizes, share_blocks,
        prepared, each, before_grid, pieces, pieces[-1][1].end, key_programs, dq_grid, dq_sizes, workspace,
    )  # fmt: skip


def rotation_of(tiles: int, blocks: int, most: int) -> int:
    """:func:`.backward_walk.rotation_of`."""
    most = min(most, max(blocks // 2, 1))
    return -(-tiles // -(-tiles // most))


def prepared_first(
    config: BackwardConfig, sizes: tuple[int, ...], blocks: int, grid: int, multiprocessors: int
) -> tuple[int, int]:
    """Blocks of rows that the pass before prepares, and how many every thread block prepares thereafter.

    Of ``blocks`` in all. The heads that run side by side need theirs when their first thread block starts: by then, those that
    run beside it may not be done, but whatever was launched a wave (``multiprocessors``) earlier is. Shared memory has room
    for as many rows as a thread block has keys; the pass before does what is left over.
    """
    if not config.prepares:
        return blocks, 0
    _heads, group, _nq, _nk, tiles, units, side, q_blocks = sizes
    each = min(-(-blocks // grid), config.block_n // config.block_m)
    alone = units - side if config.both_ways else 0  # heads that run one after another, before those side by side
    side = 1 if alone else side
    rows, launched = side * group * q_blocks, side * tiles  # of the heads side by side: blocks and thread blocks
    last, ahead = (alone or -(-blocks // rows)) - 1, multiprocessors // launched
    # heads side by side by number; in between, what they need grows or falls evenly, and the last are perhaps fewer
    numbers = {min(last, n) for n in (0, ahead, ahead + 1, max(0, last - 1), last)}
    needs = [(min((n + 1) * rows, blocks), n * launched) for n in numbers] + [(blocks, alone * tiles)] * bool(alone)
    return min(blocks, max(rows - each * max(0, start - multiprocessors) for rows, start in needs)), each


def pieces_of(
    config: BackwardConfig, problem: Problem, sizes: tuple[int, ...], grid: int, multiprocessors: int
) -> tuple[tuple[int, Piece], ...]:
    """The launches of the main kernel; one, unless thread blocks have time to convert the rows of the launch before.

    A piece has whole groups of heads that run side by side, and no fewer of them than the one before, whose rows it converts.
    The last group may be a small one: then the pass after does what is left over.
    """
    _heads, group, _nq, _nk, tiles, units, side, q_blocks = sizes
    groups, rows = -(-units // side), group * q_blocks  # rows: blocks of a unit, and steps of a key tile that all of them see
    n, each = min(PIECES, groups, round(grid / (PIECE_WAVES * multiprocessors))), -(-rows // tiles)
    steps = rows // 2 if problem.causal else rows
    if not (config.prepares and config.converts) or n < 2 or steps < CONVERT_STEPS[config.d] * each:
        return ((grid, Piece(0, 0, 0, 0)),)
    found: list[tuple[int, Piece]] = []
    first = begin = 0  # thread block, and block of rows
    for i in range(n):
        here = min((groups // n + (i >= n - groups % n)) * side * tiles, grid - first)
        end = min(first // tiles * rows, begin + each * here)
        found.append((here, Piece(first, begin, end, each)))
        first, begin = first + here, end
    return tuple(found)


class Workspace(NamedTuple):
    """What the kernels of one backward share, fp32; None where there is no use for it."""

    lse_log2: Tensor
    delta: Tensor
    acc: Tensor | None  # of dQ
    dk_shares: Tensor | None
    dv_shares: Tensor | None
    semaphores: Tensor | None  # of dQ's order; the bits of int32
    counters: Tensor | None  # of prepared blocks; the bits of int32


def workspace(p: Plan, memory: Tensor) -> Workspace:
    """The parts of one allocation."""
    return Workspace(*(x if x.numel() else None for x in memory.split(p.workspace)))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------- arguments
def _strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, head, row) strides in elements; packed tensors have no batch axis."""
    return four_axes(x)[1][:3]


def _lse_strides(lse: Tensor) -> tuple[int, int]:
    return (lse.stride(0), lse.stride(1)) if lse.dim() == 3 else (0, lse.stride(0))


def before_arguments(
    p: Plan, problem: Problem, do: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, extras: Extras,
    work: Workspace, delta_rows: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Of :func:`.backward_ends.attn_bwd_before_kernel`."""
    zeroed = None if p.config.whole_head else work.acc
    dlse_strides = () if dlse is None else (0, *dlse.stride()) if dlse.dim() == 2 else dlse.stride()
    _variant, args, unit_log2 = assemble(problem, extras)
    return (
        out, do, lse, dlse, work.lse_log2, work.delta, delta_rows, zeroed, work.semaphores, work.counters, extras.cu_seqlens_q,
        args.alibi if p.config.linear_bias else None, unit_log2, _strides(out), _strides(do), _lse_strides(lse), dlse_strides,
        problem.heads_q, problem.seqlen_q, p.q_blocks, problem.batch, p.prepared, p.stat_blocks, problem.head_dim_v,
        p.config.d, p.config.block_m, WIDE_ROWS // p.config.block_m,
    )  # fmt: skip


def after_arguments(
    p: Plan, problem: Problem, extras: Extras, work: Workspace, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None
) -> tuple[Any, ...]:
    """Of :func:`.backward_ends.attn_bwd_after_kernel`."""
    acc, c = work.acc, p.config
    if dq is None or acc is None:
        of_dq: tuple[Any, ...] = (None, None, None, ())
    else:
        of_dq = (acc, dq, extras.cu_seqlens_q, _strides(dq))
    if dk is None or dv is None or c.group_split == 1:
        of_keys: tuple[Any, ...] = (None, None, None, None, None, (), ())
    else:
        of_keys = (work.dk_shares, work.dv_shares, dk, dv, extras.cu_seqlens_k, _strides(dk), _strides(dv))
    return (
        *of_dq, *of_keys, problem.softmax_scale, problem.heads_q, problem.seqlen_q, p.q_blocks, problem.batch,
        problem.heads_k, problem.seqlen_k, p.share_blocks, p.key_programs, p.converted, problem.head_dim, problem.head_dim_v,
        c.d, c.block_m, c.group_split,
    )  # fmt: skip


def sums_block(acc: Tensor) -> Block:
    """dQ's accumulator: groups of 8 columns (8 to a 64 x 64 chunk), 16 rows, pairs of those, 32 numbers. A unit: 16 rows."""
    return Block(acc, (acc.numel() // 512, 4, 4, 32), (512, 128, 32, 1), (8, 1, 4, 32))


def fused_arguments(
    p: Plan, problem: Problem, do: Tensor, q: Tensor, k: Tensor, v: Tensor, work: Workspace,
    dq: Tensor | None, dk: Tensor, dv: Tensor, extras: Extras, out: Tensor, rows: Rows, piece: Piece,
) -> tuple[Any, ...]:  # fmt: skip
    """Of :func:`.backward.attn_bwd_hopper`, or of the kernel for wide heads."""
    c = p.config
    variant, args, unit_log2 = assemble(problem, extras)

    def block(x: Tensor, rows: int, tail: int) -> list[Block | None]:
        if c.d <= 128:
            return [Block(x, *four_axes(x), (1, 1, rows, c.d))]
        return [Block(x, *four_axes(x), (1, 1, rows, n)) if n else None for n in (128, tail)]

    blocks = [*block(q, c.block_m, c.tail), *block(do, c.block_m, c.v_tail), *block(k, 64, c.tail), *block(v, 64, c.v_tail)]
    blocks += [Block(x, (x.shape[0],), (1,), (c.block_m,)) for x in (work.lse_log2, work.delta)]
    if c.group_split > 1:
        blocks += [None] * (2 if c.d <= 128 else 4)
        stored: tuple[Any, ...] = (work.dk_shares, work.dv_shares, (), ())
    else:
        blocks += [*block(dk, 64, c.tail), *block(dv, 64, c.v_tail)]
        stored = (dk, dv, _strides(dk), _strides(dv)) if c.packed else (None, None, (), ())
    own: tuple[Any, ...] = ()
    if c.d <= 128:
        own = (dq, _strides(dq)) if dq is not None and c.whole_head else (None, ())
        own += (work.semaphores, work.acc)
        of_rows = (Block(out, *four_axes(out), (1, 1, c.block_m, c.d)), rows, p.prepared, p.each)
        own += of_rows if c.prepares else (None, None, 0, 0)
        own += (sums_block(work.acc), Block(dq, *four_axes(dq), (1, 1, c.block_m, c.d))) if c.converts else (None, None)
        own += piece
    else:
        own = (work.acc,)
    return (
        *blocks, *stored, *own, extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k, variant, args, unit_log2,
        problem.softmax_scale, *p.sizes, p.constants,
    )  # fmt: skip


def dq_arguments(
    p: Plan, problem: Problem, do: Tensor, q: Tensor, k: Tensor, v: Tensor, work: Workspace, dq: Tensor, extras: Extras
) -> tuple[Any, ...]:  # fmt: skip
    """Of :func:`.backward_split.attn_bwd_dq_hopper`."""
    c = p.dq_config
    variant, args, unit_log2 = assemble(problem, extras)
    rows, keys = (1, 1, 64, c.d), (1, 1, c.block_n, c.d)
    blocks = [Block(x, *four_axes(x), box) for x, box in ((q, rows), (do, rows), (k, keys), (v, keys), (dq, rows))]
    stored = (dq, _strides(dq)) if c.packed else (None, ())
    return (
        *blocks, *stored, work.lse_log2, work.delta, extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k, variant, args,
        unit_log2, problem.softmax_scale, *p.dq_sizes, p.dq_constants,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- launch
def jobs(
    p: Plan, problem: Problem, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    extras: Extras, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, work: Workspace, delta_rows: Tensor | None,
) -> list[Job]:  # fmt: skip
    """(kernel, grid, arguments) of every launch of one backward, in order.

    The kernels that few problems need are imported here: each takes 15 ms, of every process's first call.
    """
    before = before_arguments(p, problem, do, dlse, out, lse, extras, work, delta_rows)
    found: list[Job] = [(attn_bwd_before_kernel, p.before_grid, before)]
    if dk is not None and dv is not None:
        main = attn_bwd_hopper
        if p.config.d > 128:
            from .backward_wide import attn_bwd_wide_hopper as main
        rows = Rows(work.counters, work.delta, None if dlse is None else work.delta, delta_rows)
        for grid, piece in p.pieces:
            arguments = fused_arguments(p, problem, do, q, k, v, work, dq, dk, dv, extras, out, rows, piece)
            found.append((main, grid, arguments))
    if p.config.whole_head:
        return found
    summed = dq is not None and p.config.dq
    programs = (p.stat_blocks - p.converted if summed else 0) + (2 * p.key_programs if dk is not None else 0)
    if programs:
        found.append((attn_bwd_after_kernel, programs, after_arguments(p, problem, extras, work, dq, dk, dv)))
    if dq is not None and not summed:
        from .backward_split import attn_bwd_dq_hopper

        found.append((attn_bwd_dq_hopper, p.dq_grid, dq_arguments(p, problem, do, q, k, v, work, dq, extras)))
    return found


class Backward:
    """The backward of one problem at one set of layouts: strides, dtypes, alignment, which gradients are wanted.

    Called with tensors of these layouts, it fills the gradients that are not None (dk and dv come together). The tensors
    of the first call must pass :func:`supports`. A call that wants only dQ or only dK and dV takes the split kernels;
    heads wider than 128, which have none, compute all three. Memory beyond the gradients: 8 bytes per query row
    and 4 for every 64 or 128 of them (8 where it keeps an order and prepares rows);
    without split kernels 4 bytes per element of dQ; and where a group is shared out, 4 bytes
    per share and element of dK and dV (all of them 1 kB per row of wide heads, up to one block per head more). Called with
    meta tensors it compiles and runs nothing. ``config`` is for tuning.
    """

    def __init__(
        self, problem: Problem, deterministic: bool = False, config: BackwardConfig | None = None
    ) -> None:
        self.problem, self.deterministic, self.config = problem, deterministic, config
        self.launches: Launches | None = None
        self.copy_do = False

    def __call__(
        self, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, extras: Extras,
        dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dsink: Tensor | None, dbias: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Shapes as in :func:`flashtri_core.flash_attn`; runs on the current stream of the tensors' device, the current one.

        Raises:
            NotImplementedError: ``dbias`` is wanted.
        """
        if dbias is not None:
            raise NotImplementedError("attn_bias has no Hopper backward; supports() says so")
        if self.launches is None:
            device = q.device
            self.copy_do = bool(tma_reason("do", do))
            config, multiprocessors = self.config, target_of(device).multiprocessors
            if width(self.problem) <= 128 and (dq is None or dk is None):
                config = config or shared(split_tiles(self.problem), self.problem, multiprocessors)
            config = config or tiles(self.problem, self.deterministic, multiprocessors)
            # hooks give O back as they like; and nothing is converted to a dQ that nobody wants
            if tma_reason("out", out) or out.dtype != q.dtype or dq is None:
                config = replace(config, prepares=False)
            self.plan = plan(self.problem, self.deterministic, config, multiprocessors)
            self.behind = Tail(self.problem, device, dq, dk, dv, None, None)
            self.new_memory = maker(lse.new_empty(sum(self.plan.workspace)))  # one allocation
        if self.plan.config.d > 128:
            dk, dv = (torch.empty_like(x) if y is None else y for x, y in ((k, dk), (v, dv)))
        if self.copy_do:
            do = do.clone(memory_format=torch.contiguous_format)  # contiguous() keeps a dense tensor at a bad address
        delta_rows = lse.new_empty(lse.shape) if dsink is not None else None
        memory = self.new_memory()
        given = () if extras is NO_EXTRAS else extras
        tensors = (memory, do, dlse, q, k, v, out, lse, dq, dk, dv, delta_rows, *given)
        if self.launches is None:
            self._launch_first(*(None if x is None else x.detach() for x in tensors))
        elif not self.launches.run([0 if x is None else x.data_ptr() for x in tensors]):
            self.launches.run_slowly(self._jobs(workspace(self.plan, memory), *tensors[1:]))
        if dsink is None or dsink.is_meta:  # torch's arithmetic without memory imports its compiler
            return
        if delta_rows is not None and extras.learnable_sink is not None:
            dsink.copy_(sink.gradient(extras.learnable_sink, lse, delta_rows, lse.dim() - 2))

    def _launch_first(self, memory: Tensor, *tensors: Tensor | None) -> None:
        """With tensors that are told apart even where a call has one twice, as ``flash_attn(x, x, x)`` does."""
        own = workspace(self.plan, memory)
        jobs = self._jobs(own, *tensors)
        given = [(kernel, grid, for_triton(arguments)) for kernel, grid, arguments in jobs]
        compiled = [compiled_only(kernel, arguments, num_warps=4) for kernel, _, arguments in given]
        if any(compiled):
            return
        binaries = [kernel[(grid,)](*arguments, num_warps=4) for kernel, grid, arguments in given]
        offsets = accumulate((4 * n for n in self.plan.workspace), initial=0)  # and the end
        parts = [*zip(own, offsets, strict=False)]
        main = range(len(jobs) - len(self.plan.pieces), len(jobs) - 1)  # the pieces but the first: a pass follows them
        overlapping = main if self.plan.config.converts else ()
        self.launches = Launches(binaries, jobs, (memory, *tensors), memory.device.index, parts, overlapping)

    def _jobs(
        self, own: Workspace, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, delta_rows: Tensor | None, *given: Tensor | None,
    ) -> list[Job]:  # fmt: skip
        extras = Extras(*given)
        found = jobs(self.plan, self.problem, do, dlse, q, k, v, out, lse, extras, dq, dk, dv, own, delta_rows)
        return [self.behind.job(extras, dq, dk, dv, None, None), *found] if self.problem.varlen else found


def backward(
    problem: Problem, *tensors: Any, deterministic: bool = False, config: BackwardConfig | None = None
) -> None:
    """One call without a plan to keep."""
    Backward(problem, deterministic, config)(*tensors)
