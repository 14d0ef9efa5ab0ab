"""The error messages of the troubleshooting page, as the package raises them when the site is built.

A test holds the list against every ``raise`` of the public functions: a new message fails it until it is explained here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import support
import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtri_core import draw_rng, dropout_mask, flash_attn, flash_attn_varlen, pack, supports, unpack

Mistake = tuple[str, Callable[[], Any], str]


def call(q: Any = None, k: Any = None, v: Any = None, **keywords: Any) -> Any:
    """``flash_attn`` of (1, 4, 8, 16) tensors, some of them replaced."""
    x = torch.zeros(1, 4, 8, 16)
    return flash_attn(x if q is None else q, x if k is None else k, x if v is None else v, **keywords)


def packed(
    q: Any = None, cu_q: Any = (0, 5, 8), cu_k: Any = (0, 5, 8), longest: Any = 8, v: Any = None, **keywords: Any
) -> Any:
    """``flash_attn_varlen`` of (8, 4, 16) tensors, some arguments replaced."""
    x = torch.zeros(8, 4, 16)
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) if isinstance(c, tuple) else c for c in (cu_q, cu_k))
    return flash_attn_varlen(x if q is None else q, x, x if v is None else v, cu_q, cu_k, longest, longest, **keywords)


def without_gpu() -> None:
    """Random words for a GPU that is not there, wherever the site is built."""
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        draw_rng("cuda")


def twice() -> None:
    """A gradient of a gradient."""
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(flash_attn(q, q, q).sum(), q, create_graph=True)
    grad.sum().backward()


def transformed() -> None:
    """A transform of torch.func."""
    q = torch.randn(1, 1, 4, 8)
    torch.func.jvp(lambda x: flash_attn(x, q, q), (q,), (q,))


def forward_mode() -> None:
    """A tangent by hand."""
    q = torch.randn(1, 1, 4, 8)
    with forward_ad.dual_level():
        flash_attn(forward_ad.make_dual(q, q), q, q)


def zeros(*shape: int, **keywords: Any) -> Tensor:
    """A tensor of zeros."""
    return torch.zeros(*shape, **keywords)


META = {"device": "meta"}  # stands for "another device" on a machine that has one
SECTIONS: dict[str, list[Mistake]] = {
    "q, k and v": [
        ("a list as k", lambda: call(k=[1.0]), "Give tensors."),
        (
            "q of three dimensions",
            lambda: call(q=zeros(4, 8, 16)),
            "Add the batch axis; packed sequences go to `flash_attn_varlen`.",
        ),
        ("int64 tensors", lambda: call(q=zeros(1, 4, 8, 16, dtype=torch.int64)), "Cast to a floating-point type."),
        ("a sparse k", lambda: call(k=zeros(1, 4, 8, 16).to_sparse()), "`.to_dense()`."),
        ("q in fp16, k in fp32", lambda: call(q=zeros(1, 4, 8, 16).half()), "Cast one of them, or use autocast."),
        ("k on another device", lambda: call(k=zeros(1, 4, 8, 16, **META)), "Move it."),
        (
            "a head dimension of 300",
            lambda: call(*(zeros(1, 1, 4, 300) for _ in "qkv")),
            "Split the head, or use SDPA for this layer.",
        ),
        ("q and k of different head dimension", lambda: call(k=zeros(1, 4, 8, 32)), "Only v may have its own."),
        ("v with other heads than k", lambda: call(v=zeros(1, 2, 8, 16)), "K and V share their heads."),
        ("k of another batch size", lambda: call(k=zeros(2, 4, 8, 16)), "Expand it: `.expand` costs no memory."),
        ("v of another length than k", lambda: call(v=zeros(1, 4, 9, 16)), "Each key has one value."),
        (
            "3 key heads for 4 query heads",
            lambda: call(k=zeros(1, 3, 8, 16), v=zeros(1, 3, 8, 16)),
            "Grouped heads divide evenly.",
        ),
    ],
    "Options": [
        ("`impl='cuda'`", lambda: call(impl="cuda"), 'Leave it at "auto" unless you are comparing.'),
        ("`causal=1`", lambda: call(causal=1), "Give a bool. A tensor here would make the host wait for the GPU."),
        ('`softmax_scale="0.1"`', lambda: call(softmax_scale="0.1"), "Give a Python number."),
        ("`softmax_scale=inf`", lambda: call(softmax_scale=float("inf")), "Look for a division by zero."),
        ("`window_size=64`", lambda: call(window_size=64), "Give both sides: `(63, 0)` is a causal window of 64."),
        ("`window_size=(1.5, 0)`", lambda: call(window_size=(1.5, 0)), "Round it."),
        ("`window_size=(-2, 0)`", lambda: call(window_size=(-2, 0)), "-1 opens a side."),
        ('`softcap="30"`', lambda: call(softcap="30"), "Give a Python number."),
        ("`softcap=-1.0`", lambda: call(softcap=-1.0), "0 switches it off."),
        ('`dropout_p="0.1"`', lambda: call(dropout_p="0.1"), "Give a Python number."),
        ("`dropout_p=1.0`", lambda: call(dropout_p=1.0), "Everything would be dropped."),
        (
            "`supports(..., casual=True)`",
            lambda: supports(*(zeros(1, 4, 8, 16),) * 3, casual=True),
            "A typing mistake, most likely.",
        ),
    ],
    "Tensors of features": [
        ("a number as `alibi_slopes`", lambda: call(alibi_slopes=0.5), "One slope per head."),
        ("slopes in fp16", lambda: call(alibi_slopes=zeros(4).half()), "`.float()`: distances outgrow fp16."),
        (
            "slopes for 3 heads of 4",
            lambda: call(alibi_slopes=zeros(3)),
            "One per query head, or per batch and query head.",
        ),
        (
            "slopes on another device",
            lambda: call(alibi_slopes=zeros(4, **META)),
            "Move them; register them as a buffer of the module.",
        ),
        (
            "slopes that require a gradient",
            lambda: call(alibi_slopes=zeros(4, requires_grad=True)),
            "A learned slope is an `attn_bias`.",
        ),
        ("a number as `learnable_sink`", lambda: call(learnable_sink=0.0), "One logit per query head."),
        ("a sink for 3 heads of 4", lambda: call(learnable_sink=zeros(3)), "One logit per query head."),
        (
            "a sink on another device",
            lambda: call(learnable_sink=zeros(4, **META)),
            "Move it; register it as a parameter.",
        ),
        ("a list as `attn_bias`", lambda: call(attn_bias=[0.0]), "Give a tensor."),
        ("a float tensor as `attn_mask`", lambda: call(attn_mask=zeros(8, 8)), "A float mask is a bias: `attn_bias`."),
        (
            "a boolean tensor as `attn_bias`",
            lambda: call(attn_bias=zeros(8, 8).bool()),
            "A boolean bias is a mask: `attn_mask`.",
        ),
        (
            "a bias that does not broadcast",
            lambda: call(attn_bias=zeros(3, 8, 8)),
            "Each of its last four axes is 1 or full.",
        ),
        ("a bias on another device", lambda: call(attn_bias=zeros(8, 8, **META)), "Move it."),
        (
            "`seqused_k` for another batch",
            lambda: call(seqused_k=zeros(3, dtype=torch.int32)),
            "One count per sequence.",
        ),
        (
            "`seqused_k` above the keys there are",
            lambda: call(seqused_k=torch.tensor([9])),
            "Count keys, not tokens. On a GPU `validate=True` looks.",
        ),
    ],
    "Packed sequences": [
        (
            "a list as `cu_seqlens_q`",
            lambda: packed(cu_q=[0, 5, 8]),
            "`torch.tensor([...], dtype=torch.int32)` on q's device.",
        ),
        ("`cu_seqlens_q` in fp32", lambda: packed(cu_q=zeros(3)), "Cast to int32."),
        ("`cu_seqlens_q` of two dimensions", lambda: packed(cu_q=zeros(3, 1, dtype=torch.int32)), "Flatten it."),
        (
            "`cu_seqlens_q` on another device",
            lambda: packed(cu_q=zeros(3, dtype=torch.int32, **META)),
            "Build it there; a copy makes the host wait.",
        ),
        ("an empty `cu_seqlens_q`", lambda: packed(cu_q=zeros(0, dtype=torch.int32)), "No sequence at all is `[0]`."),
        (
            "different counts of sequences",
            lambda: packed(cu_k=(0, 8)),
            "Every query sequence has its key sequence, which may be empty.",
        ),
        ("v with other rows than k", lambda: packed(v=zeros(9, 4, 16)), "Each key has one value."),
        (
            "offsets that decrease",
            lambda: packed(cu_q=(0, 9, 8)),
            "They are cumulative sums of lengths. On a GPU `validate=True` looks.",
        ),
        (
            "`supports(..., cu_seqlens_q=cu)` alone",
            lambda: supports(*(zeros(8, 4, 16),) * 3, cu_seqlens_q=torch.tensor([0, 8])),
            "Give all four arguments that make a call a packed one.",
        ),
        (
            "a tensor as `max_seqlen_q`",
            lambda: packed(longest=torch.tensor(5)),
            "An upper bound does: the padded length, for instance.",
        ),
        ("a negative `max_seqlen_q`", lambda: packed(longest=-1), "An upper bound of the lengths."),
        (
            "a `max_seqlen` too small",
            lambda: packed(longest=4),
            "Give the longest length, or any bound above it. On a GPU `validate=True` looks.",
        ),
        ("`pack` of a vector", lambda: pack(zeros(3), torch.tensor([3])), "A batch axis and a token axis come first."),
        ("`pack` with lengths for another batch", lambda: pack(zeros(2, 3), torch.tensor([3])), "One length per row."),
        ("`pack` with a mask for lengths", lambda: pack(zeros(2, 3), torch.tensor([True, True])), "`mask.sum(1)`."),
        (
            "`pack` with a length above N",
            lambda: pack(zeros(2, 3), torch.tensor([4, 1])),
            "Lengths count tokens of a row.",
        ),
        (
            "`pack` on the meta device",
            lambda: pack(zeros(2, 3, **META), zeros(2, dtype=torch.int64, **META)),
            "Lengths are read to know the sizes. The same is said of `validate=True`.",
        ),
        ("a fraction as `unpack`'s length", lambda: unpack(zeros(8), torch.tensor([0, 8]), 8.0), "N, a Python int."),
        ("`unpack` with offsets in fp32", lambda: unpack(zeros(8), zeros(2), 8), "Cast to int32."),
        (
            "`unpack` without offsets",
            lambda: unpack(zeros(8), torch.tensor([]).int(), 8),
            "No sequence at all is `[0]`.",
        ),
        (
            "`unpack` with offsets that start elsewhere",
            lambda: unpack(zeros(8), torch.tensor([2, 8]), 8),
            "Give the offsets that `pack` returned, and the rows that they count.",
        ),
        (
            "`unpack` into too short a batch",
            lambda: unpack(zeros(8), torch.tensor([0, 5, 8]), 4),
            "N of the padded batch.",
        ),
        (
            "`unpack` of too few rows",
            lambda: unpack(zeros(7), torch.tensor([0, 5, 8]), 5),
            "Give the offsets that `pack` returned.",
        ),
    ],
    "Where it runs": [
        (
            "fp32 on a GPU",
            lambda: support.ask(80, torch.float32),
            'Use bf16 or fp16, or autocast; `impl="reference"` computes fp32, slower.',
        ),
        ("a GPU older than Ampere", lambda: support.ask(75), 'Use SDPA there, or `impl="reference"`.'),
        ("`impl='hopper'` on an A100", lambda: support.ask(80, impl="hopper"), '"auto" chooses by GPU.'),
        (
            "`impl='triton'` on CPU tensors",
            lambda: support.ask(80, torch.float16, impl="triton", device="cpu"),
            "See [On a CPU](cpu.md#the-real-kernels-without-a-gpu).",
        ),
        (
            "`impl='triton'` on an Apple GPU",
            lambda: support.ask(80, impl="triton", device="mps"),
            "NVIDIA GPUs and CPUs.",
        ),
        (
            "`dropout_mask` with words of its own making",
            lambda: dropout_mask(zeros(1), (1, 4, 8, 8), 0.1),
            "Take them from `draw_rng`.",
        ),
        (
            "`dropout_mask` with two lengths",
            lambda: dropout_mask(draw_rng(), (8, 8), 0.1),  # type: ignore[arg-type]
            "Give all four sizes of the score matrix.",
        ),
        ("`draw_rng` for a device that does not exist", lambda: draw_rng("gpu"), 'One of torch\'s: `"cpu"`, `"cuda"`.'),
        ("`draw_rng` for CUDA without a GPU", without_gpu, "Draw where the tensors are."),
        ("a gradient of a gradient", twice, "Use torch's MATH backend for that part."),
        ("`torch.func.jvp`", transformed, "Use `torch.autograd`, or torch's MATH backend for that part."),
        ("a dual tensor as q", forward_mode, "Use reverse mode, or torch's MATH backend for that part."),
    ],
}


def rows(section: str) -> list[list[str]]:
    """[what was done, the message, what to do].

    Raises:
        RuntimeError: one of the calls was accepted, so that the page would be wrong.
    """
    found = []
    for what, mistake, advice in SECTIONS[section]:
        try:
            answer = mistake()
            message, kind = (answer.reason if isinstance(answer, support.Support) else ""), "NotImplementedError"
        except (TypeError, ValueError, NotImplementedError) as error:
            message, kind = str(error), type(error).__name__
        if not message:
            raise RuntimeError(f"troubleshooting: {what} is accepted now; remove it from tools/messages.py")
        found.append([what, f"`{kind}`: {message}", advice])
    return found
