"""Host side of the kernels: grids and argument packing, planned once per shape and then only filled with tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..problem import Extras, Problem
from ..target import Target, maker, target_of
from ..tuning import block_of, blocks_of, choose, head_group
from ..variants import MASKS, assemble, attn_bias, attn_mask, sink
from .backward import attn_bwd_dbias_kernel, attn_bwd_delta_kernel, attn_bwd_dkdv_kernel, attn_bwd_dq_kernel
from .forward import attn_fwd_kernel
from .launch_tail import Tail
from .quick import Launch

DELTA_ROWS = 64  # query rows per program of the delta pre-pass


def strides(x: Tensor) -> tuple[int, int, int, int | None, int | None]:
    """(batch, head, row, wide, even) strides in elements of a dense (B, H, N, D) or packed (total, H, D) tensor."""
    z, h, m, rows = (*x.stride()[:3], x.shape[2]) if x.dim() == 4 else (0, x.stride(1), x.stride(0), x.shape[0])
    return z, h, m, (m if m * (rows + 256) >= 1 << 31 else None), (None if (z | h | m) & 7 else 1)


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


class _Plan:
    """What the kernels of one problem have in common."""

    def __init__(self, problem: Problem, extras: Extras, device: torch.device) -> None:
        self.problem, self.device = problem, device
        self.target: Target = target_of(device)
        self.mask_module = MASKS[problem.mask_kind]
        self.group = problem.heads_q // problem.heads_k
        self.dims = (problem.head_dim, problem.head_dim_v, *blocks_of(problem))
        self.together = head_group(problem)
        tensors = (extras.alibi_slopes, extras.attn_bias, extras.attn_mask, extras.rng)
        self._fixed = self._assemble(extras) if all(t is None for t in tensors) else None

    def _assemble(self, extras: Extras) -> tuple[Any, ...]:
        variant, args, unit_log2 = assemble(self.problem, extras)
        mask = extras.attn_mask
        return variant, args, () if mask is None else attn_mask.kernel_args(mask), unit_log2

    def hooks(self, extras: Extras) -> tuple[Any, ...]:
        """(cu_seqlens_q, cu_seqlens_k, seqused_k, variant, its arguments, mask arguments, unit_log2)."""
        return (extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k, *(self._fixed or self._assemble(extras)))

    def launch(
        self, kernel: Any, name: str, heads: int, rows: int, total: int, by_keys: bool, *flags: Any, of: Problem | None = None
    ) -> Any:
        """A Launch over query or key tiles, and the schedule arguments that end its runtime arguments.

        ``of`` is the problem whose tiles the grid counts, where that is another than the plan's.
        """
        problem, config = self.problem, choose(name, self.problem, self.target)
        block = config.BLOCK_N if by_keys else config.BLOCK_M
        blocks, batch_heads, programs = blocks_and_programs(of or problem, heads, rows, total, block)
        constexprs = (*self.dims, config.BLOCK_M, config.BLOCK_N, *flags, problem.mask)
        tail = (heads, self.group, problem.seqlen_q, problem.seqlen_k, blocks, batch_heads, self.together)
        return Launch(kernel, programs, constexprs, config, self.device), tail


class Forward(_Plan):
    """Plan of the forward of one problem at one set of strides."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, out: Tensor, lse: Tensor) -> None:
        super().__init__(problem, extras, q.device)
        self.behind = Tail(problem, q.device, out, None, None, lse, lse)
        self.strides = (strides(q), strides(k), strides(v), strides(out), lse_strides(lse))
        self.fwd, self.tail = self.launch(
            attn_fwd_kernel, "fwd", problem.heads_q, problem.seqlen_q, problem.total_q, False,
            self.mask_module.KV_LEFT_EDGE,
        )  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, out: Tensor, lse: Tensor, row_max: Tensor | None
    ) -> None:
        """Fill ``out``, ``lse`` (natural logarithm) and ``row_max`` (natural units)."""
        if self.problem.varlen:
            self.behind(extras, out, None, None, lse, row_max)
        self.fwd(q, k, v, out, lse, row_max, extras.learnable_sink, *self.strides, *self.hooks(extras), *self.tail)


class Delta:
    """Plan of the pre-pass: delta = rowsum(dO * O) - dLSE, fp32, shaped and laid out like LSE."""

    def __init__(self, problem: Problem, do: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> None:
        dlse_strides = () if dlse is None else (0, *dlse.stride()) if dlse.dim() == 2 else dlse.stride()
        rows, batch = lse.shape[-1], 1 if problem.varlen else problem.batch
        self.tail = (strides(out), strides(do), dlse_strides, problem.heads_q, rows)
        grid = -(-rows // DELTA_ROWS) * batch * problem.heads_q
        dims = (problem.head_dim_v, block_of(problem.head_dim_v), DELTA_ROWS)
        self.kernel = Launch(attn_bwd_delta_kernel, grid, dims, None, do.device)
        self.new_memory = maker(lse)

    def __call__(self, do: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
        delta = self.new_memory()
        self.kernel(out, do, dlse, delta, *self.tail)
        return delta


#: Batch entries that one program of the dQ kernel may take in turn for the sake of the bias gradient that they share: the
#: 16-bit sum over more of them would round too often, and programs would get scarce.
MOST_ENTRIES = 2


def batch_entries_of_one_program(problem: Problem, dbias: Tensor, target: Target) -> int | None:
    """How many batch entries a program of the dQ kernel takes so that it owns its tiles of dBias; None where it does not.

    Then S, P and dP are not computed a third time. A bias that is shared by heads, rows or columns, or by many batch
    entries, has a kernel of its own, and so it is on devices whose table names no tiles for "dq_dbias".
    """
    bz, *rest = dbias.shape
    share = 1 if bz == problem.batch else problem.batch
    own = (*rest,) == (problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    if not own or share > MOST_ENTRIES or problem.varlen:
        return None
    try:
        choose("dq_dbias", problem, target)
    except NotImplementedError:
        return None
    return share


def dkdv_takes_one_loop(problem: Problem) -> bool:
    """Whether the masked and the free steps of dK and dV are one loop, and ungrouped heads no loop around it.

    A second loop's prologue costs a tile as much as two steps, and at D = 128 the values that both prologues need are spilled.
    Compiled for sm_90 by Triton 3.6 (ptxas 12.8), causal: 1468 instead of 2096 instructions outside the loop, 505 instead of
    517 in a free step, 676 instead of 643 in a masked one. At D = 64 its wgmma would be serialised.
    """
    plain = not set(problem.features) - {"causal", "gqa", "sink"}
    return plain and problem.mask_kind == "causal" and sum(blocks_of(problem)) == 256


class Backward(_Plan):
    """Plan of the split backward. Deterministic: every value of every gradient has one owner."""

    def __init__(
        self, problem: Problem, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, extras: Extras, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(problem, extras, q.device)
        self.behind = Tail(problem, q.device, dq, dk, dv, None, None)
        self.delta = Delta(problem, do, dlse, out, lse)
        self.inputs = (strides(q), strides(k), strides(v), strides(do))
        self.lse = lse_strides(lse)
        scale = problem.softmax_scale
        mask = self.mask_module
        if dk is not None and dv is not None:
            edges, one_loop = (mask.Q_LEFT_EDGE, mask.Q_RIGHT_EDGE), dkdv_takes_one_loop(problem)
            self.dkdv, (heads, group, *sizes) = self.launch(
                attn_bwd_dkdv_kernel, "dkdv", problem.heads_k, problem.seqlen_k, problem.total_k, True, *edges, one_loop
            )
            group = None if one_loop and group == 1 else group
            self.dkdv_strides, self.dkdv_tail = (strides(dk), strides(dv)), (scale, heads, group, *sizes)
        share = None if dq is None or dbias is None else batch_entries_of_one_program(problem, dbias, self.target)
        self.dbias_with_dq = share is not None
        self.all_tiles = problem.mask_kind == "full" and not problem.mask and not problem.seqused
        if dq is not None:
            shared = problem if share is None else replace(problem, batch=problem.batch // share)
            name = "dq" if share is None else "dq_dbias"
            self.dq, tail = self.launch(
                attn_bwd_dq_kernel, name, problem.heads_q, problem.seqlen_q, problem.total_q, False, mask.KV_LEFT_EDGE,
                share or 1, self.dbias_with_dq, of=shared,
            )  # fmt: skip
            self.dq_strides, self.dq_tail = strides(dq), (scale, *tail)
        if dbias is not None and not self.dbias_with_dq:
            self._plan_dbias(dbias)

    def _plan_dbias(self, dbias: Tensor) -> None:
        """The bias gradient, summed over its broadcast axes inside one program per tile."""
        problem, config = self.problem, choose("dbias", self.problem, self.target)
        bz, bh, bm, bn = dbias.shape
        sum_z = problem.batch if bz == 1 else 1
        sum_h = problem.heads_q if bh == 1 else 1
        blocks_m, blocks_n = -(-problem.seqlen_q // config.BLOCK_M), -(-problem.seqlen_k // config.BLOCK_N)
        sum_m, sum_n = bm == 1 and problem.seqlen_q != 1, bn == 1 and problem.seqlen_k != 1
        grid = bz * bh * (1 if sum_m else blocks_m) * (1 if sum_n else blocks_n)
        constexprs = (*self.dims, config.BLOCK_M, config.BLOCK_N, sum_m, sum_n, problem.mask)
        self.dbias = Launch(attn_bwd_dbias_kernel, grid, constexprs, config, self.device)
        self.dbias_tail = (self.group, problem.seqlen_q, problem.seqlen_k, bh, sum_z, sum_h, blocks_m, blocks_n)

    def __call__(
        self, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        extras: Extras, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dsink: Tensor | None,
        dbias: Tensor | None,
    ) -> None:  # fmt: skip
        """Fill the gradients that are not None; dk and dv come together."""
        if self.problem.varlen:
            self.behind(extras, dq, dk, dv, None, None)
        delta = self.delta(do, dlse, out, lse)
        if dsink is not None and not dsink.is_meta:  # torch's arithmetic without memory imports its compiler
            assert extras.learnable_sink is not None
            dsink.copy_(sink.gradient(extras.learnable_sink, lse, delta, lse.dim() - 2))
        hooks = self.hooks(extras)
        inputs = (q, k, v, do, lse, delta)
        if dk is not None:
            self.dkdv(*inputs, dk, dv, *self.inputs, *self.dkdv_strides, self.lse, *hooks, *self.dkdv_tail)
        bias = dbias if self.dbias_with_dq else None
        if bias is not None and not self.all_tiles:
            bias.zero_()  # tiles that nobody visits
        if dq is not None:
            bias_args = () if bias is None else attn_bias.pointer_args(bias)
            self.dq(*inputs, dq, bias_args, *self.inputs, self.dq_strides, self.lse, *hooks, *self.dq_tail)
        if dbias is not None and bias is None:
            self.dbias(*inputs, dbias, *self.inputs, self.lse, dbias.stride(), *hooks, *self.dbias_tail)
