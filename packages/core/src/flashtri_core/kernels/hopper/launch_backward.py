"""Host side of the Hopper backward: which problems it takes, which kernels and tiles it uses, and a call that is cheap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Extras, Problem
from ...target import target_of
from ...variants import MASKS, assemble, sink
from . import launch_forward
from .backward import attn_bwd_hopper
from .backward_ends import attn_bwd_after_kernel, attn_bwd_before_kernel
from .backward_split import attn_bwd_dq_hopper
from .common import Block, Constants, Launch, four_axes, tma_reason

BLOCK_N = 128  # keys per thread block of the fused kernel

#: Q, dO, K and V bytes of the heads that run side by side under a causal mask, when tiles come longest first.
L2_BYTES = 32 << 20


@dataclass(frozen=True)
class BackwardConfig:
    """Everything the compiler needs to know about one fused (or dK, dV) kernel."""

    block_m: int = 64  # query rows per step
    q_stages: int = 2
    do_stages: int = 2
    early_dv: bool = False  # issue dV before dS is known: more overlap, more registers
    dq: bool = True  # add dQ to the accumulator; False leaves it to the dQ kernel
    consumer_regs: int = 240
    producer_regs: int = 24
    d: int = 128
    head_dim: int = 128
    head_dim_v: int = 128
    packed: bool = False
    used: bool = False  # seqused_k
    ragged_keys: bool = False  # a tile may hold fewer than 128 keys
    edge_lo: bool = False  # steps before the free middle may need the mask
    edge_hi: bool = False


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


def width(problem: Problem) -> int:
    """Tile width for the head dimensions; columns past the tensor's read as zeros."""
    return 64 if max(problem.head_dim, problem.head_dim_v) <= 64 else 128


def tiles(problem: Problem, deterministic: bool) -> BackwardConfig:
    """Tile sizes and schedule for a problem: the fastest measured on an H200 (NOTES_backward.md)."""
    if width(problem) == 64:
        return BackwardConfig(block_m=128, dq=not deterministic)
    return BackwardConfig(block_m=64, early_dv=problem.mask_kind != "full" and not deterministic, dq=not deterministic)


def specialise(config: BackwardConfig, problem: Problem) -> BackwardConfig:
    """``config`` with the fields that follow from the problem."""
    mask = MASKS[problem.mask_kind]
    ragged = problem.varlen or problem.seqused or problem.seqlen_k % BLOCK_N != 0
    return replace(
        config,
        d=width(problem),
        head_dim=problem.head_dim if problem.varlen else 0,  # only packed stores look at them
        head_dim_v=problem.head_dim_v if problem.varlen else 0,
        packed=problem.varlen,
        used=problem.seqused,
        ragged_keys=ragged,
        edge_lo=mask.Q_LEFT_EDGE or ragged,
        edge_hi=mask.Q_RIGHT_EDGE or problem.varlen,
    )


def specialise_dq(problem: Problem, block_stat: int) -> DqConfig:
    """The dQ kernel of a problem."""
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
    )


def problem_reason(problem: Problem, device: torch.device) -> str:
    """Why this backward does not take the problem, whatever its tensors' addresses; empty when it does."""
    reason = launch_forward.problem_reason(problem, device)
    if not reason and max(problem.head_dim, problem.head_dim_v) > 128:
        reason = (
            f"head dimensions {problem.head_dim} and {problem.head_dim_v}: the Hopper backward keeps dK and dV of 64 keys in "
            "a warpgroup's registers, which ends at 128; wider ones run on the plain kernel"
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
) -> tuple[bool, str]:
    """Whether the Hopper backward takes this call, and if not, why. dO is no reason: a bad one is copied."""
    reason = problem_reason(problem, q.device)
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
    sizes: tuple[int, ...]  # key heads, group, Nq, Nk, blocks, batch_heads, head_group, q_blocks
    dq_grid: int
    dq_sizes: tuple[int, ...]


_plans: dict[tuple[Any, ...], Plan] = {}
_PLAN_LIMIT = 4096


def _tiling(problem: Problem, heads: int, rows: int, total: int, block: int) -> tuple[int, int, int]:
    """(blocks per head, second schedule argument, programs) of a grid over query or key tiles."""
    if problem.varlen:
        blocks = total // block + problem.batch
        return blocks, problem.batch, blocks * heads
    blocks = -(-rows // block)
    return blocks, problem.batch * heads, blocks * problem.batch * heads


def plan(problem: Problem, deterministic: bool, config: BackwardConfig | None = None, l2_bytes: int = L2_BYTES) -> Plan:
    """Grids and sizes; ``config`` None means the shipped choice."""
    key = (problem, deterministic, config, l2_bytes)
    found = _plans.get(key)
    if found is not None:
        return found
    full = specialise(config or tiles(problem, deterministic), problem)
    dq_config = specialise_dq(problem, full.block_m)
    heads, keys, group = problem.heads_q, problem.heads_k, problem.heads_q // problem.heads_k
    q_blocks, _second, stat_blocks = _tiling(problem, heads, problem.seqlen_q, problem.total_q, full.block_m)
    row_bytes = 4 * (problem.head_dim + problem.head_dim_v)

    def together(batch_heads: int, rows: int) -> int:
        if problem.mask_kind == "full":
            return 1
        return max(1, min(batch_heads, l2_bytes // max(1, rows * row_bytes)))

    blocks, second, grid = _tiling(problem, keys, problem.seqlen_k, problem.total_k, BLOCK_N)
    side = together(second, group * problem.seqlen_q)
    sizes = (keys, group, problem.seqlen_q, problem.seqlen_k, blocks, second, side, q_blocks)
    blocks, second, dq_grid = _tiling(problem, heads, problem.seqlen_q, problem.total_q, dq_config.block_m)
    side = together(second, problem.seqlen_k)
    dq_sizes = (heads, group, problem.seqlen_q, problem.seqlen_k, blocks, second, side, q_blocks)
    if len(_plans) >= _PLAN_LIMIT:
        _plans.clear()
    found = _plans[key] = Plan(
        full, Constants(full), dq_config, Constants(dq_config), q_blocks, stat_blocks, grid, sizes, dq_grid, dq_sizes
    )
    return found


# --------------------------------------------------------------------------------------------------------- arguments
def _strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, head, row) strides in elements; packed tensors have no batch axis."""
    return four_axes(x)[1][:3]


def _lse_strides(lse: Tensor) -> tuple[int, int]:
    return (lse.stride(0), lse.stride(1)) if lse.dim() == 3 else (0, lse.stride(0))


def before_arguments(
    p: Plan, problem: Problem, do: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, extras: Extras, stats: Tensor,
    delta_rows: Tensor | None, acc: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Of :func:`.backward_ends.attn_bwd_before_kernel`."""
    dlse_strides = () if dlse is None else (0, *dlse.stride()) if dlse.dim() == 2 else dlse.stride()
    return (
        out, do, lse, dlse, stats[0], stats[1], delta_rows, acc, extras.cu_seqlens_q, _strides(out), _strides(do),
        _lse_strides(lse), dlse_strides, problem.heads_q, problem.seqlen_q, p.q_blocks, problem.batch,
        problem.head_dim_v, p.config.d, p.config.block_m,
    )  # fmt: skip


def after_arguments(p: Plan, problem: Problem, extras: Extras, acc: Tensor, dq: Tensor) -> tuple[Any, ...]:
    """Of :func:`.backward_ends.attn_bwd_after_kernel`."""
    return (
        acc, dq, extras.cu_seqlens_q, _strides(dq), problem.softmax_scale, problem.heads_q, problem.seqlen_q, p.q_blocks,
        problem.batch, problem.head_dim, p.config.d, p.config.block_m,
    )  # fmt: skip


def fused_arguments(
    p: Plan, problem: Problem, do: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, dk: Tensor, dv: Tensor,
    acc: Tensor | None, extras: Extras,
) -> tuple[Any, ...]:  # fmt: skip
    """Of :func:`.backward.attn_bwd_hopper`."""
    c = p.config
    variant, args, unit_log2 = assemble(problem, extras)
    rows, keys, stat = (1, 1, c.block_m, c.d), (1, 1, 64, c.d), (c.block_m,)
    blocks = [Block(x, *four_axes(x), box) for x, box in ((q, rows), (do, rows), (k, keys), (v, keys))]
    blocks += [Block(x, (x.shape[0],), (1,), stat) for x in (stats[0], stats[1])]
    blocks += [Block(x, *four_axes(x), keys) for x in (dk, dv)]
    stored = (dk, dv, _strides(dk), _strides(dv)) if c.packed else (None, None, (), ())
    return (
        *blocks, *stored, acc, extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k, variant, args, unit_log2,
        problem.softmax_scale, *p.sizes, p.constants,
    )  # fmt: skip


def dq_arguments(
    p: Plan, problem: Problem, do: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, dq: Tensor, extras: Extras
) -> tuple[Any, ...]:
    """Of :func:`.backward_split.attn_bwd_dq_hopper`."""
    c = p.dq_config
    variant, args, unit_log2 = assemble(problem, extras)
    rows, keys = (1, 1, 64, c.d), (1, 1, c.block_n, c.d)
    blocks = [Block(x, *four_axes(x), box) for x, box in ((q, rows), (do, rows), (k, keys), (v, keys), (dq, rows))]
    stored = (dq, _strides(dq)) if c.packed else (None, ())
    return (
        *blocks, *stored, stats[0], stats[1], extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k, variant, args,
        unit_log2, problem.softmax_scale, *p.dq_sizes, p.dq_constants,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- launch
_launches: dict[tuple[Any, ...], Any] = {}


def for_triton(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with every :class:`.Block` as the descriptor object that Triton knows; the statistics' are fp32."""
    return tuple(_descriptor(arg) if type(arg) is Block else arg for arg in arguments)


def _descriptor(block: Block) -> TensorDescriptor:
    if block.tensor.dtype != torch.float32:
        return block.for_triton()
    layout = gl.NVMMASharedLayout.get_default_for(list(block.box), gl.float32)
    return TensorDescriptor(block.tensor, list(block.shape), list(block.strides), list(block.box), layout)


def _specialised(arg: Any) -> Any:
    """What Triton specialises an argument on: integers by value, tensors by type and alignment, floats not."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() & 15 == 0
    if type(arg) is Block:
        return arg.tensor.dtype, arg.box
    if isinstance(arg, tuple):
        return tuple(map(_specialised, arg))
    return float if type(arg) is float else arg


def _launch(kernel: Any, grid: int, arguments: tuple[Any, ...], device: torch.device) -> None:
    key = (device.index, kernel.__name__, *map(_specialised, arguments))
    launch = _launches.get(key)
    if launch is None:
        if len(_launches) >= _PLAN_LIMIT:
            _launches.clear()
        compiled = kernel[(grid,)](*for_triton(arguments), num_warps=4)
        has_blocks = any(type(arg) is Block for arg in arguments)
        _launches[key] = Launch(compiled) if has_blocks else compiled
    elif type(launch) is not Launch:
        launch[(grid, 1, 1)](*arguments)
    elif not launch.run(grid, device.index, launch.flatten(arguments)):
        launch.compiled[(grid, 1, 1)](*for_triton(arguments))


def backward(
    problem: Problem,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dsink: Tensor | None,
    dbias: Tensor | None = None,
    *,
    deterministic: bool = False,
    config: BackwardConfig | None = None,
    l2_bytes: int = L2_BYTES,
) -> None:
    """Fill the gradients that are not None (dk and dv come together); the call must pass :func:`supports`.

    ``deterministic`` takes the split kernels, and so does a call that wants only dQ or only dK and dV. Memory beyond the
    gradients: 8 bytes per query row, and in the fused path 4 bytes per element of dQ.
    """
    if dbias is not None:
        raise NotImplementedError("attn_bias has no Hopper backward; supports() says so")
    if tma_reason("do", do):
        do = do.contiguous()
    device = q.device
    with torch.cuda.device(device):
        _backward(problem, do, dlse, q, k, v, out, lse, extras, dq, dk, dv, dsink, deterministic, config, l2_bytes)


def _backward(
    problem: Problem, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    extras: Extras, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dsink: Tensor | None, deterministic: bool,
    config: BackwardConfig | None, l2_bytes: int,
) -> None:  # fmt: skip
    device = q.device
    p = plan(problem, deterministic or dq is None or dk is None, config, l2_bytes)
    rows = p.stat_blocks * p.config.block_m
    stats = torch.empty((2, rows), dtype=torch.float32, device=device)
    acc = torch.empty(rows * p.config.d, dtype=torch.float32, device=device) if p.config.dq else None
    delta_rows = torch.empty_like(lse) if dsink is not None else None
    before = before_arguments(p, problem, do, dlse, out, lse, extras, stats, delta_rows, acc)
    _launch(attn_bwd_before_kernel, p.stat_blocks, before, device)
    if dsink is not None and delta_rows is not None and extras.learnable_sink is not None:
        dsink.copy_(sink.gradient(extras.learnable_sink, lse, delta_rows, lse.dim() - 2))
    if dk is not None and dv is not None:
        arguments = fused_arguments(p, problem, do, q, k, v, stats, dk, dv, acc, extras)
        _launch(attn_bwd_hopper, p.grid, arguments, device)
    if dq is not None and acc is not None:
        _launch(attn_bwd_after_kernel, p.stat_blocks, after_arguments(p, problem, extras, acc, dq), device)
    elif dq is not None:
        _launch(attn_bwd_dq_hopper, p.dq_grid, dq_arguments(p, problem, do, q, k, v, stats, dq, extras), device)
