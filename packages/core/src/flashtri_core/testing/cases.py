"""What the tests compute: one description of a call, its inputs in any memory layout, and its exact results.

A :class:`Case` is data: sizes, features, layouts. :func:`inputs` makes tensors for it on a device, :func:`run` sends them
through an implementation and back, :func:`exact` does the same by the formulas of ``reference.eager_attention`` in the
dtype asked for. The same cases serve the chunked path, Triton's interpreter and a GPU, where :meth:`Case.grown` makes
them larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import draw_rng, flash_attn, flash_attn_varlen
from ..problem import Extras, Problem, describe
from ..reference import eager_attention
from ..variants.attn_bias import as_4d

SEED = 20
#: What a call saves for its backward, in this order.
SAVED = ("q", "k", "v", "out", "lse", *Extras._fields)
GRADS = {"q": "dq", "k": "dk", "v": "dv", "learnable_sink": "dsink", "attn_bias": "dbias"}


@dataclass(frozen=True)
class Case:
    """One call without its numbers.

    ``bias`` and ``mask`` name the axes they have, out of "bhqk", "1" where they broadcast: "1hqk", "b11k", "qk".
    ``lengths`` (query, key rows of each sequence) makes the call a packed one, with ``tail`` rows behind the last.
    ``layouts`` are those of q, k, v and dO, see :data:`LAYOUTS`.
    """

    name: str
    batch: int = 1
    heads: tuple[int, int] = (2, 1)
    nq: int = 40
    nk: int = 50
    d: int = 16
    dv: int | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi: str = ""
    sink: bool = False
    bias: str = ""
    bias_dtype: torch.dtype | None = None
    mask: str = ""
    used: tuple[int, ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    tail: tuple[int, int] = (0, 0)
    layouts: tuple[str, str, str, str] = ("plain", "plain", "plain", "plain")
    outliers: bool = False

    @property
    def sequences(self) -> int:
        """Batch, or number of packed sequences."""
        return len(self.lengths) if self.lengths else self.batch

    @property
    def longest(self) -> tuple[int, int]:
        """Most query and key rows that one sequence has."""
        if not self.lengths:
            return self.nq, self.nk
        return max(n for n, _ in self.lengths), max(n for _, n in self.lengths)

    def grown(self, n: int, d: int = 1) -> Case:
        """The same case with lengths times ``n`` and head dimensions times ``d`` (256 at most); 0, 1 and -1 stay."""

        def more(x: int) -> int:
            return x if x <= 1 else x * n

        wide = min(self.d * d, 256)
        return replace(
            self,
            nq=more(self.nq),
            nk=more(self.nk),
            d=wide,
            dv=None if self.dv is None else min(self.dv * d, 256),
            window=(more(self.window[0]), more(self.window[1])),
            used=tuple(more(x) for x in self.used),
            lengths=tuple((more(a), more(b)) for a, b in self.lengths),
        )


@dataclass
class Inputs:
    """Tensors of a case: ``tensors`` holds q, k, v and what the features need, ``numbers`` the other keywords."""

    case: Case
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    do: Tensor
    dlse: Tensor
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def differentiable(self) -> list[str]:
        """Names of the tensors that get gradients."""
        return [name for name in GRADS if name in self.tensors]


def _plain(x: Tensor) -> Tensor:
    return x.contiguous()


def _rows_first(x: Tensor) -> Tensor:
    """(B, N, H, D) in memory, as most models have it."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def _fused(x: Tensor) -> Tensor:
    """The middle third of a fused QKV buffer."""
    rows = x.transpose(-3, -2)
    buffer = torch.full((*rows.shape[:-2], 3, *rows.shape[-2:]), float("nan"), dtype=x.dtype, device=x.device)
    buffer[..., 1, :, :] = rows
    return buffer[..., 1, :, :].transpose(-3, -2)


def _expanded(x: Tensor) -> Tensor:
    """One head for all, head stride 0 (the values become those of head 0)."""
    return x.narrow(-3, 0, 1).contiguous().expand(x.shape)


def _offset(x: Tensor) -> Tensor:
    """Starts one element behind an aligned address."""
    buffer = torch.full((x.numel() + 1,), float("nan"), dtype=x.dtype, device=x.device)
    buffer[1:] = x.flatten()
    return buffer[1:].view(x.shape)


def _padded(x: Tensor) -> Tensor:
    """Row stride D + 1: odd, so that hardly any row is aligned."""
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + 1), float("nan"), dtype=x.dtype, device=x.device)
    buffer[..., :-1] = x
    return buffer[..., :-1]


def _batch_inside(x: Tensor) -> Tensor:
    """Sequence-major, (N, B, H, D) in memory."""
    return x.movedim(-2, 0).contiguous().movedim(0, -2)


def _columns(x: Tensor) -> Tensor:
    """Last stride is not 1: every second column of a buffer."""
    buffer = torch.full((*x.shape, 2), float("nan"), dtype=x.dtype, device=x.device)
    buffer[..., 0] = x
    return buffer[..., 0]


def _ones(x: Tensor) -> Tensor:
    """What sum().backward() sends: a one, expanded with strides 0."""
    return torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape)


#: Memory layouts of a (B, H, N, D) tensor; the gaps of padded buffers are NaN, so that reading them shows.
LAYOUTS = {
    "plain": _plain,
    "rows_first": _rows_first,
    "fused": _fused,
    "expanded": _expanded,
    "offset": _offset,
    "padded": _padded,
    "batch_inside": _batch_inside,
    "columns": _columns,
    "ones": _ones,
}


def laid_out(x: Tensor, layout: str, packed: bool = False) -> Tensor:
    """``x`` with the same values in another memory layout; packed tensors are (total, H, D)."""
    if not packed:
        return LAYOUTS[layout](x)
    return LAYOUTS[layout](x.transpose(0, 1)[None])[0].transpose(0, 1)


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = SEED) -> Inputs:
    """Random tensors for a case. Numbers are drawn on the CPU, so that every device sees the same."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator)
        if case.outliers:
            x += 10 * torch.randn(*shape, generator=generator) * (torch.rand(*shape, generator=generator) < 1e-3)
        return x.to(device, dtype)

    (hq, hk), dv = case.heads, case.dv or case.d
    packed = bool(case.lengths)
    shapes: tuple[tuple[int, ...], ...]
    if packed:
        total = [sum(row[side] for row in case.lengths) + case.tail[side] for side in (0, 1)]
        shapes = ((total[0], hq, case.d), (total[1], hk, case.d), (total[1], hk, dv), (total[0], hq, dv))
    else:
        b, nq, nk = case.batch, case.nq, case.nk
        shapes = ((b, hq, nq, case.d), (b, hk, nk, case.d), (b, hk, nk, dv), (b, hq, nq, dv))
    q, k, v, do = (laid_out(normal(*s), l, packed) for s, l in zip(shapes, case.layouts, strict=True))
    lse_shape = (hq, shapes[0][0]) if packed else shapes[0][:3]
    dlse = torch.randn(*lse_shape, generator=generator).to(
        device, torch.float64 if dtype == torch.float64 else torch.float32
    )
    tensors = {"q": q, "k": k, "v": v}
    sizes = dict(zip("bhqk", (case.sequences, hq, *case.longest), strict=True))
    if case.sink:
        tensors["learnable_sink"] = normal(hq)
    if case.bias:
        shape = [1 if axis == "1" else sizes[axis] for axis in case.bias]
        tensors["attn_bias"] = normal(*shape).to(case.bias_dtype or dtype)
    if case.alibi:
        shape = [sizes[axis] for axis in case.alibi]
        tensors["alibi_slopes"] = torch.rand(*shape, generator=generator).to(device) * 0.2
    if case.mask:
        shape = [1 if axis == "1" else sizes[axis] for axis in case.mask]
        mask = torch.rand(*shape, generator=generator) < 0.7
        mask[..., : min(mask.shape[-1] - 1, 128)] &= torch.rand(*shape[:-1], 1, generator=generator) < 0.9
        if mask.shape[-2:].numel() > 1 and mask.shape[-1] > 128:
            mask[..., :128] = False  # a block that the summary can rule out
        tensors["attn_mask"] = mask.to(device)
    if case.used:
        tensors["seqused_k"] = torch.tensor(case.used, dtype=torch.int32, device=device)
    if packed:
        for side, name in ((0, "cu_seqlens_q"), (1, "cu_seqlens_k")):
            lengths = torch.tensor([0, *(row[side] for row in case.lengths)])
            tensors[name] = lengths.cumsum(0).to(device, torch.int32)
    numbers = {
        "causal": case.causal,
        "softmax_scale": case.scale,
        "window_size": case.window,
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
    }
    return Inputs(case, tensors, numbers, do, dlse)


def call(given: Inputs, impl: str, **keywords: Any) -> Any:
    """The public function on these inputs."""
    positional = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    rest: dict[str, Any] = {n: t for n, t in given.tensors.items() if n not in positional}
    rest |= {**given.numbers, **keywords}
    q, k, v = (given.tensors[n] for n in "qkv")
    if not given.case.lengths:
        return flash_attn(q, k, v, impl=impl, **rest)
    cu_q, cu_k = given.tensors["cu_seqlens_q"], given.tensors["cu_seqlens_k"]
    longest_q, longest_k = given.case.longest
    return flash_attn_varlen(q, k, v, cu_q, cu_k, longest_q, longest_k, impl=impl, **rest)


def run(given: Inputs, impl: str, backward: bool = True, **keywords: Any) -> dict[str, Tensor]:
    """out, lse, max and, with ``backward``, every gradient (dq, dk, dv, dsink, dbias) through ``impl``."""
    leaves = {n: given.tensors[n].detach().requires_grad_(backward) for n in given.differentiable}
    given = replace(given, tensors=given.tensors | leaves)
    torch.manual_seed(SEED)
    out, lse, row_max = call(given, impl, return_lse=True, return_max_logits=True, **keywords)
    results = {"out": out.detach(), "lse": lse.detach(), "max": row_max}
    if backward:
        grads = torch.autograd.grad((out, lse), list(leaves.values()), (given.do, given.dlse))
        results |= {GRADS[n]: g for n, g in zip(leaves, grads, strict=True)}
    return results


def run_with_hook(
    given: Inputs, impl: str, name: str, change: Callable[[Tensor], Tensor], **keywords: Any
) -> tuple[Tensor, ...]:
    """Gradients of the output alone, where a hook of autograd's gives the saved tensor ``name`` (of SAVED) back changed."""
    leaves = {n: given.tensors[n].detach().requires_grad_() for n in given.differentiable}
    given = replace(given, tensors=given.tensors | leaves)
    extras = problem_of(given)[1]._asdict()
    names = iter([n for n in SAVED if n not in extras or extras[n] is not None])

    def unpack(saved: tuple[str, Tensor]) -> Tensor:
        return change(saved[1]) if saved[0] == name else saved[1]

    torch.manual_seed(SEED)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (next(names), x), unpack):
        out = call(given, impl, **keywords)
    assert next(names, None) is None
    return torch.autograd.grad(out, list(leaves.values()), given.do)


def problem(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras = Extras(), max_q: int = 0, max_k: int = 0, **fields: Any
) -> Problem:
    """The Problem of dense (B, H, N, D) or packed (total, H, D) tensors.

    ``max_q`` and ``max_k``: a packed call's longest sequences. ``fields``: those of Problem that tensors do not tell.
    """
    plain = describe(q, k, v, extras, max_q, max_k, q.shape[-1] ** -0.5, False, -1, -1, 0.0, 0.0)
    return replace(plain, **fields)


def problem_of(given: Inputs) -> tuple[Problem, Extras]:
    """What the formulas need beside q, k and v."""
    case, t = given.case, dict(given.tensors)
    q, k, v = t.pop("q"), t.pop("k"), t.pop("v")
    for name in ("attn_bias", "attn_mask"):
        if name in t:
            t[name] = as_4d(t[name])
    rng = None
    if case.dropout_p:
        torch.manual_seed(SEED)
        rng = draw_rng(q.device)
    extras = Extras(**t, rng=rng)
    scale = case.d**-0.5 if case.scale is None else case.scale
    return describe(
        q, k, v, extras, *case.longest, scale, case.causal, *case.window, case.softcap, case.dropout_p
    ), extras


def exact(given: Inputs, dtype: torch.dtype = torch.float64, backward: bool = True) -> dict[str, Tensor]:
    """What :func:`run` must give, from the dense formulas in ``dtype``; gradients by torch's autograd."""
    t = dict(given.tensors)
    for name in given.differentiable:
        t[name] = t[name].detach().to(dtype, memory_format=torch.contiguous_format).requires_grad_(backward)
    given = replace(given, tensors=t)
    problem, extras = problem_of(given)
    out, lse, row_max = eager_attention(t["q"], t["k"], t["v"], problem, extras)
    axes = (0, 2) if row_max.dim() == 3 else (1,)
    results = {"out": out.detach(), "lse": lse.detach()}
    if row_max.numel():
        results["max"] = row_max.detach().amax(axes)
    if backward:
        ways = [given.do.to(dtype), given.dlse.to(dtype).masked_fill(lse == float("-inf"), 0.0)]
        leaves = [t[n] for n in given.differentiable]
        grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if out.requires_grad:  # a pack without a single row depends on nothing
            grads = torch.autograd.grad((out, lse), leaves, ways, allow_unused=True)
        for name, leaf, grad in zip(given.differentiable, leaves, grads, strict=True):
            results[GRADS[name]] = torch.zeros_like(leaf) if grad is None else grad
    return results


# --------------------------------------------------------------------------------------------- the shared list
_SHAPES = (
    Case("full"),
    Case("one_tile", nq=32, nk=32),
    Case("exact_tiles", nq=64, nk=64, causal=True),
    Case("ragged_m", nq=33, nk=64),
    Case("ragged_n", nq=64, nk=33),
    Case("one_query", nq=1, nk=45, causal=True),
    Case("one_key", nq=40, nk=1),
    Case("one_of_each", nq=1, nk=1),
    Case("causal", nq=48, nk=48, causal=True),
    Case("causal_more_keys", nq=33, nk=70, causal=True),
    Case("causal_dead_rows", nq=70, nk=33, causal=True),
    Case("mha", heads=(2, 2), causal=True),
    Case("gqa", heads=(4, 2), causal=True),
    Case("group_of_3", heads=(6, 2), nq=20, nk=35),
    Case("mqa_batch", batch=2, heads=(4, 1), nq=20, nk=35, causal=True),
    Case("d8", d=8),
    Case("d20_dv12", d=20, dv=12, causal=True),
    Case("d3_dv1", d=3, dv=1),
    Case("dv_larger", d=16, dv=40, causal=True),
    Case("dv_smaller", d=40, dv=24),
)
_FEATURES = (
    Case("window", nq=70, nk=70, window=(17, 5)),
    Case("window_causal", nq=70, nk=50, window=(17, -1), causal=True),
    Case("window_right", nq=50, nk=70, window=(-1, 6)),
    Case("window_left", nq=50, nk=70, window=(9, -1)),
    Case("window_self", nq=40, nk=40, window=(0, 0)),
    Case("window_dead_rows", nq=90, nk=33, window=(10, 3)),
    Case("window_longer_than_context", window=(4096, 4096)),
    Case("scale_negative", scale=-0.5, causal=True),
    Case("scale_zero", scale=0.0, causal=True),
    Case("scale_large", scale=2.0),
    Case("softcap", softcap=2.0, causal=True),
    Case("softcap_scale_negative", softcap=1.5, scale=-0.4),
    Case("softcap_bias", softcap=2.0, bias="hqk"),
    Case("alibi", batch=2, alibi="bh"),
    Case("alibi_causal", alibi="h", causal=True, softcap=3.0),
    Case("sink", sink=True),
    Case("sink_dead_rows", sink=True, causal=True, nq=60, nk=30),
    Case("bias_all_axes", batch=2, bias="bhqk", causal=True),
    Case("bias_shared_by_batch", batch=2, bias="1hqk"),
    Case("bias_shared_windowed", batch=2, bias="1hqk", window=(8, 2), nq=70, nk=90),
    Case("bias_shared_by_three", batch=3, bias="1hqk", used=(40, 17, 3)),
    Case("bias_shared_by_heads", batch=2, bias="b1qk"),
    Case("bias_shared_by_all", batch=2, bias="qk", window=(20, 20)),
    Case("bias_of_keys", batch=2, bias="b11k"),
    Case("bias_of_heads_and_keys", batch=2, bias="bh1k", causal=True),
    Case("bias_of_queries", batch=2, bias="q1"),
    Case("bias_scalar", batch=2, bias="11", softcap=5.0),
    Case("bias_of_one_key", batch=2, bias="1hqk", nk=1),
    Case("bias_float32", bias="hqk", bias_dtype=torch.float32),
    Case("mask", batch=2, mask="bhqk", causal=True),
    Case("mask_of_keys", batch=2, mask="b11k"),
    Case("mask_of_queries", mask="q1"),
    Case("mask_blocks", nq=20, nk=170, heads=(1, 1), mask="qk"),
    Case("seqused", batch=3, used=(0, 17, 50), causal=True),
    Case("seqused_window", batch=2, used=(20, 50), window=(9, 3)),
    Case("dropout", dropout_p=0.3, causal=True),
    Case("dropout_window", dropout_p=0.6, window=(20, 4), nq=60, nk=60),
)  # fmt: skip
_PACK = ((20, 30), (33, 33), (1, 40))
_PACKED = (
    Case("packed", lengths=_PACK),
    Case("packed_causal", lengths=_PACK, causal=True),
    Case("packed_empty", lengths=((0, 0), (0, 20), (25, 0), (30, 35), (0, 0)), causal=True),
    Case("packed_tail", lengths=((15, 10), (20, 33)), tail=(5, 7), causal=True),
    Case("packed_window", lengths=((40, 50), (33, 20)), window=(8, 4)),
    Case("packed_seqused", lengths=((20, 30), (20, 33), (10, 20)), used=(7, 33, 0), causal=True),
    Case("packed_alibi", lengths=_PACK, alibi="bh", causal=True),
    Case("packed_sink", lengths=_PACK, sink=True),
    Case("packed_softcap", lengths=_PACK, softcap=2.0, causal=True),
    Case("packed_bias", lengths=_PACK, bias="bhqk"),
    Case("packed_bias_shared", lengths=_PACK, bias="hqk", causal=True),
    Case("packed_mask", lengths=_PACK, mask="bhqk"),
    Case("packed_dropout", lengths=_PACK, dropout_p=0.3, causal=True),
)
_STRIDED = (
    Case(
        "fused_qkv", batch=2, heads=(2, 2), nq=40, nk=40, causal=True, layouts=("fused", "fused", "fused", "rows_first")
    ),
    Case("all_different", batch=2, heads=(2, 2), layouts=("rows_first", "batch_inside", "fused", "plain")),
    Case("broadcast_heads", heads=(4, 2), nq=20, nk=33, layouts=("expanded", "expanded", "expanded", "rows_first")),
    Case("misaligned", layouts=("offset", "padded", "offset", "padded"), causal=True),
    Case("ones_from_sum", batch=2, layouts=("plain", "rows_first", "rows_first", "ones")),
    Case("copied_columns", layouts=("columns", "columns", "columns", "columns")),
    Case("packed_fused", lengths=_PACK, layouts=("fused", "fused", "fused", "fused"), heads=(2, 2)),
    Case("packed_misaligned", lengths=_PACK, layouts=("offset", "padded", "padded", "batch_inside"), causal=True),
)

#: Every shape, feature and layout on its own.
CASES = {case.name: case for case in (*_SHAPES, *_FEATURES, *_PACKED, *_STRIDED)}

#: What can be combined, by axis; the first entry of each is "off".
AXES: dict[str, tuple[dict[str, Any], ...]] = {
    "mask": ({}, {"causal": True}, {"window": (17, 5)}, {"causal": True, "window": (9, -1)}),
    "softcap": ({}, {"softcap": 2.0}),
    "alibi": ({}, {"alibi": "h"}, {"alibi": "bh"}),
    "sink": ({}, {"sink": True}),
    "bias": ({}, {"bias": "bhqk"}, {"bias": "hq1"}, {"bias": "b11k"}),
    "attn_mask": ({}, {"mask": "bhqk"}, {"mask": "b11k"}),
    "dropout": ({}, {"dropout_p": 0.3}),
    "rows": ({}, {"used": (17, 40)}, {"lengths": ((30, 40), (24, 33))}, {"lengths": ((30, 40), (24, 33)), "used": (40, 9)}),
    "layout": ({}, {"layouts": ("fused", "rows_first", "padded", "rows_first")}),
    "scale": ({}, {"scale": -0.3}),
}  # fmt: skip


def combined(choice: dict[str, int], name: str) -> Case:
    """The case that takes entry ``choice[axis]`` of every axis."""
    keywords: dict[str, Any] = {}
    for axis, index in choice.items():
        keywords |= AXES[axis][index]
    return Case(name, batch=2, heads=(4, 2), nq=30, nk=40, d=16, dv=24, **keywords)


def pairwise() -> Iterator[Case]:
    """Few cases in which every two entries of two axes meet at least once (greedy, always the same)."""
    names = list(AXES)
    sizes = {axis: len(entries) for axis, entries in AXES.items()}
    open_pairs = {
        ((a, i), (b, j))
        for n, a in enumerate(names) for b in names[n + 1 :] for i in range(sizes[a]) for j in range(sizes[b])
    }  # fmt: skip
    number = 0
    while open_pairs:
        choice: dict[str, int] = dict(min(open_pairs))
        for axis in names:
            if axis in choice:
                continue

            def met(i: int, axis: str = axis, chosen: dict[str, int] = choice, left: Any = open_pairs) -> int:
                pairs = (tuple(sorted([(axis, i), other], key=lambda x: names.index(x[0]))) for other in chosen.items())
                return sum(pair in left for pair in pairs)

            choice[axis] = max(range(sizes[axis]), key=met)
        ordered = [(axis, choice[axis]) for axis in names]
        open_pairs -= {(ordered[a], ordered[b]) for a in range(len(ordered)) for b in range(a + 1, len(ordered))}
        number += 1
        yield combined(dict(ordered), f"pairs_{number}")


PAIRS = {case.name: case for case in pairwise()}
