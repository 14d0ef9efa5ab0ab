"""Host side of the kernels: grids, argument packing, and a cache that skips Triton's own binder on repeated calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..problem import Extras, Problem
from ..target import Target, target_of
from ..tuning import Config, block_of, choose, head_group
from ..variants import MASKS, assemble, attn_mask, attn_bias, sink
from .backward import attn_bwd_dbias_kernel, attn_bwd_delta_kernel, attn_bwd_dkdv_kernel, attn_bwd_dq_kernel
from .forward import attn_fwd_kernel

#: Compiled kernels by everything their code depends on; a hit costs a dictionary look-up instead of Triton's binding.
_compiled: dict[tuple[Any, ...], Any] = {}
_COMPILED_LIMIT = 4096  # exact shapes are part of the key: a workload of ever-new lengths starts over, it does not grow


def launch(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: tuple[Any, ...], config: Config | None, device: torch.device) -> None:
    """Run ``kernel`` on ``grid`` programs; ``args`` are its runtime arguments in order, then its constexprs.

    A compiled kernel depends on the arguments' types, on which integers are 1 or divisible by 16, and on which
    pointers are aligned. All integers and the alignment of all pointers are in the key, so a hit is always right.
    """
    if grid == 0:
        return
    options = {} if config is None else {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if device.type == "cpu":
        kernel[(grid,)](*args, *constexprs, **options)
        return
    key = (kernel, device.index, config, constexprs, _key(args))
    with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
        compiled = _compiled.get(key)
        if compiled is None:
            if len(_compiled) >= _COMPILED_LIMIT:
                _compiled.clear()
            _compiled[key] = kernel[(grid,)](*args, *constexprs, **options)
        else:
            compiled[(grid, 1, 1)](*args, *constexprs)


def _key(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors as (dtype, aligned to 16 bytes), floats as their type, everything else as it is."""
    parts: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            parts.append(arg.dtype)
            parts.append(arg.data_ptr() & 15 == 0)
        elif type(arg) is float:
            parts.append(float)
        elif isinstance(arg, tuple):
            parts.append(_key(arg))
        else:
            parts.append(arg)
    return tuple(parts)


def strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, head, row) strides in elements of a dense (B, H, N, D) or packed (total, H, D) tensor."""
    if x.dim() == 4:
        return x.stride(0), x.stride(1), x.stride(2)
    return 0, x.stride(1), x.stride(0)


def lse_strides(lse: Tensor) -> tuple[int, int]:
    """(batch, head) strides of a contiguous (B, H, N) or (H, total) statistic."""
    return (lse.stride(0), lse.stride(1)) if lse.dim() == 3 else (0, lse.stride(0))


def blocks_and_programs(problem: Problem, heads: int, rows: int, total: int, block: int) -> tuple[int, int, int]:
    """(blocks per head, second schedule argument, programs) of a grid over query or key tiles."""
    if problem.varlen:
        tiles = total // block + problem.batch if problem.batch else 0
        return tiles, problem.batch, tiles * heads
    blocks = -(-rows // block)
    return blocks, problem.batch * heads, blocks * problem.batch * heads


def _mask_args(extras: Extras) -> tuple[Any, ...]:
    mask = extras.attn_mask
    if mask is None:
        return ()
    summary = attn_mask.summarise(mask)
    bytes_ = mask.view(torch.int8)
    return (bytes_, *attn_bias.broadcast_strides(mask), summary, *attn_bias.broadcast_strides(summary))


class _Call:
    """What the kernels of one call have in common."""

    def __init__(self, problem: Problem, extras: Extras, device: torch.device) -> None:
        self.problem, self.device = problem, device
        self.target: Target = target_of(device)
        self.variant, self.args, self.unit_log2 = assemble(problem, extras)
        self.mask_module = MASKS[problem.mask_kind]
        self.mask_args = _mask_args(extras)
        self.packed = (extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k)
        self.hooks = (*self.packed, self.variant, self.args, self.mask_args, self.unit_log2)
        self.group = problem.heads_q // problem.heads_k
        self.dims = (problem.head_dim, problem.head_dim_v, block_of(problem.head_dim), block_of(problem.head_dim_v))

    def config(self, kernel: str) -> Config:
        return choose(kernel, self.problem, self.target)


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, out: Tensor, lse: Tensor, row_max: Tensor | None
) -> None:
    """Fill ``out``, ``lse`` and ``row_max`` (natural logarithm, natural units)."""
    call = _Call(problem, extras, q.device)
    config = call.config("fwd")
    blocks, batch_heads, programs = blocks_and_programs(
        problem, problem.heads_q, problem.seqlen_q, problem.total_q, config.BLOCK_M
    )
    args = (
        q, k, v, out, lse, row_max, extras.learnable_sink, strides(q), strides(k), strides(v), strides(out),
        lse_strides(lse), *call.hooks, problem.heads_q, call.group, problem.seqlen_q, problem.seqlen_k, blocks,
        batch_heads, head_group(problem),
    )  # fmt: skip
    constexprs = (*call.dims, config.BLOCK_M, config.BLOCK_N, call.mask_module.KV_LEFT_EDGE, problem.mask)
    launch(attn_fwd_kernel, programs, args, constexprs, config, q.device)


def delta_of(problem: Problem, out: Tensor, do: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """delta = rowsum(dO * O) - dLSE, fp32, shaped and laid out like ``lse``."""
    delta = torch.empty_like(lse)
    rows = lse.shape[-1]
    batch = 1 if problem.varlen else problem.batch
    block = 64
    grid = -(-rows // block) * batch * problem.heads_q
    dlse_strides = () if dlse is None else (0, *dlse.stride()) if dlse.dim() == 2 else dlse.stride()
    args = (out, do, dlse, delta, strides(out), strides(do), dlse_strides, problem.heads_q, rows)
    launch(attn_bwd_delta_kernel, grid, args, (problem.head_dim_v, block_of(problem.head_dim_v), block), None, do.device)
    return delta


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
    dbias: Tensor | None,
) -> None:
    """Fill the gradients that are not None; dk and dv come together. Deterministic: every value has one owner."""
    call = _Call(problem, extras, q.device)
    delta = delta_of(problem, out, do, dlse, lse)
    if dsink is not None:
        assert extras.learnable_sink is not None
        dsink.copy_(sink.gradient(extras.learnable_sink, lse, delta, lse.dim() - 2))
    inputs = (q, k, v, do, lse, delta)
    in_strides = (strides(q), strides(k), strides(v), strides(do))
    sizes = (call.group, problem.seqlen_q, problem.seqlen_k)
    scale = problem.softmax_scale
    if dk is not None and dv is not None:
        config = call.config("dkdv")
        blocks, batch_heads, programs = blocks_and_programs(
            problem, problem.heads_k, problem.seqlen_k, problem.total_k, config.BLOCK_N
        )
        edges = (call.mask_module.Q_LEFT_EDGE, call.mask_module.Q_RIGHT_EDGE)
        args: tuple[Any, ...] = (
            *inputs, dk, dv, *in_strides, strides(dk), strides(dv), lse_strides(lse), *call.hooks, scale,
            problem.heads_k, *sizes, blocks, batch_heads, head_group(problem),
        )  # fmt: skip
        constexprs: tuple[Any, ...] = (*call.dims, config.BLOCK_M, config.BLOCK_N, *edges, problem.mask)
        launch(attn_bwd_dkdv_kernel, programs, args, constexprs, config, q.device)
    if dq is not None:
        config = call.config("dq")
        blocks, batch_heads, programs = blocks_and_programs(
            problem, problem.heads_q, problem.seqlen_q, problem.total_q, config.BLOCK_M
        )
        args = (
            *inputs, dq, *in_strides, strides(dq), lse_strides(lse), *call.hooks, scale,
            problem.heads_q, *sizes, blocks, batch_heads, head_group(problem),
        )  # fmt: skip
        constexprs = (*call.dims, config.BLOCK_M, config.BLOCK_N, call.mask_module.KV_LEFT_EDGE, problem.mask)
        launch(attn_bwd_dq_kernel, programs, args, constexprs, config, q.device)
    if dbias is not None:
        _dbias(call, inputs, in_strides, lse, dbias)


def _dbias(call: _Call, inputs: tuple[Tensor, ...], in_strides: tuple[Any, ...], lse: Tensor, dbias: Tensor) -> None:
    """Gradient of the additive bias, summed over its broadcast axes."""
    problem, config = call.problem, call.config("dbias")
    bz, bh, bm, bn = dbias.shape
    sum_z = problem.batch if bz == 1 else 1
    sum_h = problem.heads_q if bh == 1 else 1
    blocks_m, blocks_n = -(-problem.seqlen_q // config.BLOCK_M), -(-problem.seqlen_k // config.BLOCK_N)
    sum_m, sum_n = bm == 1 and problem.seqlen_q != 1, bn == 1 and problem.seqlen_k != 1
    grid = bz * bh * (1 if sum_m else blocks_m) * (1 if sum_n else blocks_n)
    args = (
        *inputs, dbias, *in_strides, lse_strides(lse), dbias.stride(), *call.hooks, call.group,
        problem.seqlen_q, problem.seqlen_k, bh, sum_z, sum_h, blocks_m, blocks_n,
    )  # fmt: skip
    constexprs = (*call.dims, config.BLOCK_M, config.BLOCK_N, sum_m, sum_n, problem.mask)
    launch(attn_bwd_dbias_kernel, grid, args, constexprs, config, dbias.device)


