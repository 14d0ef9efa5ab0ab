"""The error messages of the troubleshooting page, as the package raises them when the site is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import support
import torch

from flashtri_core import flash_attn, flash_attn_varlen


def _qkv(heads_k: int = 4, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(1, heads, 8, 16, **kwargs) for heads in (4, heads_k, heads_k))


def _packed(max_seqlen: Any, **kwargs: Any) -> Any:
    x, cu = torch.zeros(8, 2, 16), torch.tensor([0, 5, 8], dtype=torch.int32)
    return flash_attn_varlen(x, x, x, cu, cu, max_seqlen, max_seqlen, **kwargs)


#: (what was called, the call, what to do)
MISTAKES: list[tuple[str, Callable[[], Any], str]] = [
    ("K with 3 heads for 4 query heads", lambda: flash_attn(*_qkv(3)), "Grouped heads must divide evenly."),
    (
        "q of three dimensions",
        lambda: flash_attn(*(x[0] for x in _qkv())),
        "Add the batch axis, or use `flash_attn_varlen` for packed sequences.",
    ),
    ("int64 tensors", lambda: flash_attn(*_qkv(dtype=torch.int64)), "Cast to a floating-point type."),
    ("q in fp16, k in fp32", lambda: flash_attn(_qkv()[0].half(), *_qkv()[1:]), "Cast one of them, or use autocast."),
    (
        "a head dimension of 300",
        lambda: flash_attn(*(torch.zeros(1, 1, 4, 300) for _ in range(3))),
        "Split the head, or use SDPA for this layer.",
    ),
    (
        "`causal=1`",
        lambda: flash_attn(*_qkv(), causal=1),
        "Give a bool. A tensor here would make the host wait for the GPU.",
    ),
    (
        "`window_size=64`",
        lambda: flash_attn(*_qkv(), window_size=64),
        "Give both sides: `(63, 0)` is a causal window of 64.",
    ),
    ("`dropout_p=1.0`", lambda: flash_attn(*_qkv(), dropout_p=1.0), "Everything would be dropped."),
    (
        "a float tensor as `attn_mask`",
        lambda: flash_attn(*_qkv(), attn_mask=torch.zeros(8, 8)),
        "A float mask is a bias: `attn_bias`.",
    ),
    (
        "a bias that does not broadcast",
        lambda: flash_attn(*_qkv(), attn_bias=torch.zeros(3, 8, 8)),
        "Its last four axes are (B, Hq, Nq, Nk), each that size or 1.",
    ),
    (
        "slopes that require a gradient",
        lambda: flash_attn(*_qkv(), alibi_slopes=torch.ones(4, requires_grad=True)),
        "Slopes are constants. A learned slope is an `attn_bias`.",
    ),
    ("`impl='cuda'`", lambda: flash_attn(*_qkv(), impl="cuda"), 'Leave it at "auto" unless you are comparing.'),
    (
        "a tensor as `max_seqlen_q`",
        lambda: _packed(torch.tensor(5)),
        "Call `.item()` once, outside the training loop; an upper bound is enough.",
    ),
    (
        "a `max_seqlen` that is too small, with `validate=True`",
        lambda: _packed(4, validate=True),
        "Give the longest length, or any bound above it.",
    ),
    (
        "fp32 on a GPU",
        lambda: support.ask(80, torch.float32),
        'Use bf16 or fp16, or autocast; `impl="reference"` computes fp32 exactly, slower.',
    ),
    (
        "`impl='triton'` on CPU tensors",
        lambda: support.ask(80, torch.float16, impl="triton", device="cpu"),
        "See [On a CPU](cpu.md#the-real-kernels-without-a-gpu).",
    ),
]


def rows() -> list[list[str]]:
    """[what was done, the message, what to do].

    Raises:
        RuntimeError: one of the calls was accepted, so that the page would be wrong.
    """
    found = []
    for what, call, advice in MISTAKES:
        try:
            answer = call()
            message = answer.reason if isinstance(answer, support.Support) else ""
            kind = "NotImplementedError"
        except (TypeError, ValueError, NotImplementedError) as error:
            message, kind = str(error), type(error).__name__
        if not message:
            raise RuntimeError(f"troubleshooting: {what} is accepted now; remove it from tools/messages.py")
        found.append([what, f"`{kind}`: {message}", advice])
    return found
