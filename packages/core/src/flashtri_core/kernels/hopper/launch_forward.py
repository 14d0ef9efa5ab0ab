"""Host side of the Hopper forward: which problems it takes, which tiles it uses, and a call that costs microseconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from ..._jit import triton_version
from ...problem import NO_EXTRAS, Extras, Problem
from ...target import target_of
from ...variants import MASKS, assemble
from ..launch_tail import Tail
from .common import Block, Constants, Job, Launches, for_triton, four_axes, tma_reason
from .forward import attn_fwd_hopper

OLDEST, NEWEST = (3, 6), (3, 9)  # Triton versions whose compiled code the ahead-of-time tests check

MB = 1 << 20

#: Head dimension up to -> columns in the main tile and in the second tile (powers of two, 128-byte rows or less).
COLUMNS = {64: (64, 0), 96: (64, 32), 128: (128, 0), 192: (128, 64), 256: (256, 0)}


@dataclass(frozen=True)
class ForwardConfig:
    """Everything the compiler needs to know about one forward kernel."""

    block_m: int = 128
    block_n: int = 128
    warpgroups: int = 2  # consumers; each owns block_m / warpgroups = 64 rows
    kv_stages: int = 2
    q_stages: int = 2
    order: str = "dynamic"  # "single": a block per tile; "static": a block per multiprocessor, strided; or a counter
    turns: bool = True  # warpgroups take turns at the tensor cores
    named_release: bool = False  # k_empty and v_empty as named barriers instead of mbarriers; for two stages at most
    consumer_regs: int = 240
    producer_regs: int = 24
    resident: int = 1  # thread blocks that share a multiprocessor
    l2_bytes: int = 32 * MB  # K and V of the heads that run side by side
    d: int = 128
    d_tail: int = 0
    dv: int = 128
    dv_tail: int = 0
    head_dim_v: int = 128
    packed: bool = False
    used: bool = False  # seqused_k
    mask_last: bool = True  # the last key block may be ragged or masked
    right_edge: bool = False  # more than one block at the end of the key range may need the mask
    left_edge: bool = False
    past_end: bool = True  # the mask shows keys at or past Nk to rows below Nq; a causal one does not
    linear_bias: bool = True  # behind the diagonal, take ALiBi for the linear function that it is there
    words: bool = True  # where one loop hands P on to another, it goes from step to step in 32-bit words

    def __post_init__(self) -> None:
        if self.named_release and self.kv_stages > 2:  # forward.py numbers two barriers for K, two for V, of 16 in all
            raise ValueError(f"named_release: got True with kv_stages={self.kv_stages}, it serves two stages at most")


def columns(head_dim: int) -> tuple[int, int]:
    """Main and second tile width for a head dimension; columns past it read as zeros."""
    return next(split for limit, split in COLUMNS.items() if head_dim <= limit)


#: Blocks of one consumer warpgroup with 64 rows, several to a multiprocessor: while one begins or ends a tile, the others
#: keep the tensor cores busy. Best where tiles are short.
THREE_BLOCKS = ForwardConfig(block_m=64, block_n=64, warpgroups=1, kv_stages=3, turns=False, resident=3)  # D <= 64
TWO_BLOCKS = ForwardConfig(block_m=64, block_n=64, warpgroups=1, turns=False, resident=2)  # D <= 128

#: For D <= 64 and long rows of plain tiles: more warpgroups hide more of one another's latency, and share K and V. In words,
#: P would spill.
THREE_WARPGROUPS = ForwardConfig(
    block_m=192, warpgroups=3, kv_stages=3, consumer_regs=160, producer_regs=32, words=False
)


def tiles(problem: Problem) -> ForwardConfig:
    """Tile sizes and schedule for a problem, by the measurements in NOTES.md.

    Packed problems get the same tiles whatever their lengths: a sequence's result does not depend on what it is packed with.
    """
    width = max(problem.head_dim, problem.head_dim_v)
    others = set(problem.features) - {"gqa"}
    if width > 192:
        return ForwardConfig(block_n=64, q_stages=1, named_release=True, l2_bytes=128 * MB)  # a second Q does not fit
    if width > 128:
        return ForwardConfig(block_n=64, l2_bytes=128 * MB)
    if width > 96 and problem.mask_kind == "causal" and problem.seqlen_q <= 1024 and not problem.varlen:
        return TWO_BLOCKS
    if width > 64:
        grouped = problem.heads_q > problem.heads_k
        return ForwardConfig(
            named_release=True, l2_bytes=(32 if problem.seqlen_k <= 2048 else 16 if grouped else 64) * MB
        )
    if (not others and problem.seqlen_q >= 2048) or (others == {"causal"} and problem.seqlen_q >= 8192):
        return THREE_WARPGROUPS
    return THREE_BLOCKS


def specialise(config: ForwardConfig, problem: Problem) -> ForwardConfig:
    """``config`` with the fields that follow from the problem."""
    d, d_tail = columns(problem.head_dim)
    dv, dv_tail = columns(problem.head_dim_v)
    kind = problem.mask_kind
    even = not problem.varlen and not problem.seqused and problem.seqlen_k % config.block_n == 0
    return replace(
        config,
        d=d,
        d_tail=d_tail,
        dv=dv,
        dv_tail=dv_tail,
        head_dim_v=problem.head_dim_v if problem.varlen else dv + dv_tail,
        packed=problem.varlen,
        used=problem.seqused,
        mask_last=kind != "full" or not even,
        right_edge=kind != "full",
        left_edge=MASKS[kind].KV_LEFT_EDGE,
        past_end=kind == "full" or problem.window[1] > 0,
        linear_bias=config.linear_bias and linear_bias(problem),
        words=config.words and kind != "full",
    )


def linear_bias(problem: Problem) -> bool:
    """Whether there is ALiBi, and no key right of the diagonal is seen."""
    return problem.alibi and problem.mask_kind != "full" and problem.window[1] == 0


#: Features that the Hopper kernels have; a new one goes to the plain kernels until it is here too.
TAKEN = {"causal", "window", "softcap", "alibi", "sink", "varlen", "seqused_k", "gqa"}
LARGEST_SCALE = 1e4


def problem_reason(problem: Problem, device: torch.device) -> str:
    """Why this kernel does not take the problem, whatever its tensors' addresses; empty when it does."""
    version = triton_version()
    if version is None or not OLDEST <= version <= NEWEST:
        return f"the Hopper kernels are checked with Triton {OLDEST} to {NEWEST}, found {version}"
    if device.type != "cuda" or target_of(device).capability != 90:
        return "the Hopper kernels need a GPU of compute capability 9.0"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"the Hopper kernels take float16 and bfloat16, got {problem.dtype}"
    if problem.dropout_p > 0:
        return "dropout_p > 0 runs on the plain kernel: Philox, not the tensor cores, is the bottleneck there"
    if problem.bias or problem.mask:
        return "attn_bias and attn_mask run on the plain kernel: their tiles are read from memory score by score"
    if set(problem.features) - TAKEN:
        return f"{', '.join(sorted(set(problem.features) - TAKEN))} is not in the Hopper kernels"
    if abs(problem.softmax_scale) > LARGEST_SCALE:
        return f"softmax_scale beyond {LARGEST_SCALE:g}: a multiply-add in fp32 is exact up to scores of 1.9e8 only"
    if not (0 < problem.head_dim <= 256 and 0 < problem.head_dim_v <= 256):
        return f"head dimensions {problem.head_dim} and {problem.head_dim_v} are outside 1..256"
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return f"head dimensions {problem.head_dim} and {problem.head_dim_v} must be multiples of 8 (16 bytes) for TMA"
    if columns(problem.head_dim) != columns(problem.head_dim_v) and (problem.head_dim, problem.head_dim_v) != (
        192,
        128,
    ):
        return f"head dimensions {problem.head_dim} and {problem.head_dim_v} have no common tile; (192, 128) has"
    if problem.seqlen_q == 0 or problem.seqlen_k == 0 or problem.batch == 0:
        return "the problem is empty"
    return ""


def supports(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> tuple[bool, str]:
    """Whether the Hopper forward takes this call, and if not, why.

    TMA adds to what the problem says: 16-byte aligned addresses and strides, and a unit stride along the head dimension.
    """
    reason = problem_reason(problem, q.device)
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        if not reason and x is not None:
            reason = tma_reason(name, x)
    return not reason, reason


@dataclass(frozen=True)
class Plan:
    """What a problem needs at launch, apart from its tensors."""

    config: ForwardConfig
    constants: Constants
    grid: int
    registers: int | None  # per thread at launch, where the multiprocessor is shared
    sizes: tuple[int, ...]  # heads, group, Nq, Nk, blocks, batch_heads, head_group, num_tiles


def plan(problem: Problem, config: ForwardConfig | None, multiprocessors: int) -> Plan:
    """Grid and sizes; ``config`` None means the shipped choice."""
    full = specialise(config or tiles(problem), problem)
    heads, group = problem.heads_q, problem.heads_q // problem.heads_k
    if problem.varlen:
        blocks, batch_heads = problem.total_q // full.block_m + problem.batch, problem.batch
        num_tiles = blocks * heads
    else:
        blocks, batch_heads = -(-problem.seqlen_q // full.block_m), problem.batch * heads
        num_tiles = blocks * batch_heads
    per_head = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v) // group
    pairs = heads if problem.varlen else batch_heads
    groups = -(-pairs // max(1, full.l2_bytes // max(per_head, 1)))
    unequal = problem.varlen or problem.mask_kind != "full"
    together = -(-pairs // groups) if unequal else 1  # equal groups: a small last one is a tail
    sizes = (heads, group, problem.seqlen_q, problem.seqlen_k, blocks, batch_heads, together, num_tiles)
    grid = num_tiles if full.order == "single" else min(num_tiles, full.resident * multiprocessors)
    threads = 128 * (full.warpgroups + 1)
    registers = None if full.resident == 1 else 65536 // full.resident // threads // 8 * 8
    return Plan(full, Constants(full), grid, registers, sizes)


def pack(
    p: Plan,
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    out: Tensor,
    lse: Tensor,
    row_max: Tensor | None,
    counter: Tensor | None,
) -> tuple[Any, ...]:
    """The kernel's arguments in order."""
    c = p.config
    rows = c.block_m // c.warpgroups
    variant, args, unit_log2 = assemble(problem, extras)
    (qs, ks, vs, os) = (four_axes(x) for x in (q, k, v, out))
    stored = (out, os[1][:3]) if c.packed else (None, ())
    lse_strides = (lse.stride(0), lse.stride(1)) if lse.dim() == 3 else (0, lse.stride(0))
    return (
        Block(q, *qs, (1, 1, rows, c.d)), Block(q, *qs, (1, 1, rows, c.d_tail)) if c.d_tail else None,
        Block(k, *ks, (1, 1, c.block_n, c.d)), Block(k, *ks, (1, 1, c.block_n, c.d_tail)) if c.d_tail else None,
        Block(v, *vs, (1, 1, c.block_n, c.dv)), Block(v, *vs, (1, 1, c.block_n, c.dv_tail)) if c.dv_tail else None,
        Block(out, *os, (1, 1, rows, c.dv)), Block(out, *os, (1, 1, rows, c.dv_tail)) if c.dv_tail else None,
        *stored, lse, row_max, lse_strides, extras.learnable_sink, extras.cu_seqlens_q, extras.cu_seqlens_k,
        extras.seqused_k, counter, variant, args, unit_log2, *p.sizes, p.constants,
    )  # fmt: skip


_counters: dict[tuple[int, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """Two zero words for the dynamic tile order, which the kernel leaves zero; one pair per stream.

    A captured graph may be replayed on any stream, beside anything: it gets its own pair and its own memset.
    """
    stream = driver.active.get_current_stream(device.index)
    if stream and torch.cuda.is_current_stream_capturing():  # the default stream, 0, cannot be captured
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device.index, stream)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return found


class Forward:
    """The forward of one problem at one set of layouts: strides, dtypes, alignment, which optional tensors there are.

    Called with tensors of these layouts, it fills ``out``, ``lse`` and, if given, ``row_max``. The tensors of the first
    call must pass :func:`supports`. ``config`` is for tuning.
    """

    def __init__(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, out: Tensor, lse: Tensor,
        config: ForwardConfig | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.device = problem, q.device
        self.plan = plan(problem, config, target_of(q.device).multiprocessors)
        self.dynamic = self.plan.config.order == "dynamic"
        self.behind = Tail(problem, q.device, out, None, None, lse, lse)
        self.launches: Launches | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, out: Tensor, lse: Tensor, row_max: Tensor | None = None
    ) -> None:
        """Shapes as in :func:`flashtri_core.flash_attn`; runs on the current stream of the tensors' device, the current one."""
        counter = _counter(self.device) if self.dynamic else None
        tensors = (q, k, v, out, lse, row_max, counter, *(() if extras is NO_EXTRAS else extras))
        if self.launches is None:
            self._launch_first(tuple([None if x is None else x.detach() for x in tensors]))
        elif not self.launches.run([0 if x is None else x.data_ptr() for x in tensors]):
            self.launches.run_slowly(self._jobs(tensors))

    def _launch_first(self, tensors: tuple[Tensor | None, ...]) -> None:
        """With tensors that are told apart even where a call has one twice."""
        jobs, registers = self._jobs(tensors), {attn_fwd_hopper: self.plan.registers}
        binaries = [
            kernel[(grid,)](*for_triton(arguments), num_warps=4, maxnreg=registers.get(kernel))
            for kernel, grid, arguments in jobs
        ]
        self.launches = Launches(binaries, jobs, tensors, self.device.index)

    def _jobs(self, tensors: tuple[Tensor | None, ...]) -> list[Job]:
        q, k, v, out, lse, row_max, counter, *rest = tensors
        extras = Extras(*rest)
        assert q is not None and k is not None and v is not None and out is not None and lse is not None
        arguments = pack(self.plan, self.problem, q, k, v, extras, out, lse, row_max, counter)
        found: list[Job] = [(attn_fwd_hopper, self.plan.grid, arguments)]
        return [self.behind.job(extras, out, None, None, lse, row_max), *found] if self.problem.varlen else found


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, out: Tensor, lse: Tensor,
    row_max: Tensor | None = None,
) -> None:  # fmt: skip
    """One call without a plan to keep."""
    Forward(problem, q, k, v, extras, out, lse)(q, k, v, extras, out, lse, row_max)
