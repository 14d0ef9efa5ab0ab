"""How each implementation is called: one adapter each, none of them with a copy inside the timed call.

An adapter says in which memory layout it wants q, k and v, refuses what it can't compute with a reason that goes into
the report, and returns a plain function of (q, k, v). What an adapter does not know beforehand, the peer's own
exception says at its first call; that message is the reason then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cases import Case
from .inputs import Inputs

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Call:
    """A peer made ready for one case.

    Attributes:
        peer: Name of the peer.
        layout: Layout of its tensors, see `Inputs.laid_out`.
        attend: The function; returns the output in the same layout.
        inputs: Where the tensors come from.
        around: Context to enter outside the timed region.
        resolved: The kernel family that ran, where the peer tells, or what a peer left out.
        missing: Gradients that it did not give; known after `results`.
    """

    peer: str
    layout: str
    attend: Attend
    inputs: Inputs
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    resolved: str | None = None
    missing: list[str] = dataclasses.field(default_factory=list)

    def forward(self) -> Tensor:
        """One forward call, recorded for a backward where gradients are enabled."""
        q, k, v, _ = self.inputs.laid_out(self.layout)
        return self.attend(q, k, v)

    @property
    def wrt(self) -> list[Tensor]:
        """Tensors that get a gradient: q, k, v, then sink and bias if there are."""
        return [*self.inputs.laid_out(self.layout)[:3], *self.inputs.parameters()]

    @property
    def dout(self) -> Tensor:
        """The gradient that comes in."""
        return self.inputs.laid_out(self.layout)[3]

    def backward(self, out: Tensor, keep: bool = False) -> tuple[Tensor | None, ...]:
        """Gradients of an output of `forward`, None where the peer gives none; `keep` allows another backward."""
        return torch.autograd.grad(out, self.wrt, self.dout, retain_graph=keep, allow_unused=True)

    def results(self) -> dict[str, Tensor]:
        """Output and gradients of one forward and backward, as canonical tensors by name."""
        with self.around():
            out = self.forward()
        own = {"dsink": self.inputs.sink, "dbias": self.inputs.bias}
        names = ["dq", "dk", "dv", *(name for name, tensor in own.items() if tensor is not None)]
        grads = dict(zip(names, self.backward(out), strict=True))
        self.missing = [name for name, grad in grads.items() if grad is None]
        if self.missing and self.resolved is None:
            self.resolved = f"without {', '.join(self.missing)}"
        found = {"out": out.detach()} | {name: grad for name, grad in grads.items() if grad is not None}
        return {n: t if n in own else self.inputs.canonical(t, self.layout) for n, t in found.items()}


class Peer:
    """An implementation.

    Attributes:
        name: Id in results.json.
        label: Name for people.
        ours: Whether it is this project's.
        compiles: Whether its first call compiles for seconds and keeps the outcome on disk, so that other processes can
            do it beforehand.
    """

    name = ""
    label = ""
    ours = False
    compiles = False

    def unavailable(self, device: str) -> str | None:
        """Why it can't run here at all, or None."""
        return None

    def refuses(self, case: Case) -> str | None:
        """Why it can't compute a case, or None."""
        return None

    def prepare(self, inputs: Inputs) -> Call:
        """Build everything that a caller would build once (masks, options) and return the call."""
        raise NotImplementedError

    def version(self) -> str | None:
        """Version of the package it comes from, where that is neither torch nor this project."""
        return None


def _missing(module: str, name: str) -> str | None:
    """Why a function can't be imported, or None."""
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"not installed: {type(error).__name__}: {error}"[:160]
    return None


def _first(out: Any) -> Tensor:
    """The output of an implementation that may also return statistics."""
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first


class Flashtri(Peer):
    """This project, by one of its `impl` values."""

    ours = True
    compiles = True

    def __init__(self, impl: str, deterministic: bool = False) -> None:
        self.impl = impl
        self.deterministic = deterministic
        suffix = "deterministic" if deterministic else "" if impl == "auto" else impl
        self.name = "flashtri" + (f"-{suffix}" if suffix else "")
        self.label = "flashtri" + (f" ({suffix})" if suffix else "")

    def unavailable(self, device: str) -> str | None:
        """Kernels need a GPU; the exact CPU path is what "auto" takes on a CPU."""
        if device == "cpu" and self.name not in ("flashtri", "flashtri-reference"):
            return "needs a GPU"
        return _missing("flashtri_core", "flash_attn")

    def options(self, inputs: Inputs) -> dict[str, Any]:
        """Keywords of the call: only the features that the case has."""
        case = inputs.case
        options: dict[str, Any] = {"causal": case.causal, "impl": self.impl}
        if self.deterministic:
            options["deterministic"] = True
        if case.window is not None:
            options["window_size"] = case.window
        if case.softcap:
            options["softcap"] = case.softcap
        if inputs.slopes is not None:
            options["alibi_slopes"] = inputs.slopes
        if inputs.sink is not None:
            options["learnable_sink"] = inputs.sink
        if inputs.bias is not None:
            options["attn_bias"] = inputs.bias
        if case.dropout:
            options["dropout_p"] = case.dropout
        return options

    def prepare(self, inputs: Inputs) -> Call:
        """`flash_attn`, or `flash_attn_varlen` for a packed batch."""
        import flashtri_core

        options, case = self.options(inputs), inputs.case
        if case.packed:
            ends = {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": case.seqlen_q}
            options |= {f"{name}_{side}": value for name, value in ends.items() for side in "qk"}
        layout, attention = (
            ("thd", flashtri_core.flash_attn_varlen) if case.packed else ("bhnd", flashtri_core.flash_attn)
        )
        support = flashtri_core.supports(*inputs.laid_out(layout)[:3], **options)
        if not support:
            raise NotImplementedError(support.reason)
        attend = lambda q, k, v: _first(attention(q, k, v, **options))
        return Call(self.name, layout, attend, inputs, resolved=support.impl)


def _sdpa_refusal(case: Case) -> str | None:
    if case.packed:
        return "SDPA takes no packed batch"
    if case.window is not None:
        return "SDPA has a window only as a dense mask"
    if case.softcap:
        return "SDPA has no softcap"
    if case.sink:
        return "SDPA has no sink"
    if case.causal and case.seqlen_q != case.seqlen_k:
        return "SDPA aligns causal masks top-left"
    return None


class Sdpa(Peer):
    """`torch.nn.functional.scaled_dot_product_attention` with one backend forced.

    ALiBi and bias go in as an additive mask, which is what a user of it has to do.
    """

    def __init__(self, name: str, label: str, backend: SDPBackend, on_cpu: bool, masks: bool, gqa: bool) -> None:
        self.name, self.label = name, label
        self.backend, self.on_cpu, self.masks, self.gqa = backend, on_cpu, masks, gqa

    def unavailable(self, device: str) -> str | None:
        """Some backends exist on GPUs only."""
        return None if device == "cuda" or self.on_cpu else "needs a GPU"

    def refuses(self, case: Case) -> str | None:
        """What SDPA or this backend lacks."""
        if case.heads_q != case.heads_kv and not self.gqa:
            return "no grouped heads without copying K and V"
        if (case.alibi or case.bias) and not self.masks:
            return "takes no additive mask"
        if case.alibi and case.causal and case.seqlen_q * case.seqlen_k * case.heads_q > 1 << 32:
            return "the dense mask that ALiBi needs would pass 8 GB"
        return _sdpa_refusal(case)

    def prepare(self, inputs: Inputs) -> Call:
        """The call under the backend's context manager, which is entered outside the timed region."""
        case = inputs.case
        mask, causal = inputs.bias, case.causal
        if inputs.slopes is not None:
            mask, causal = _dense_alibi(inputs), False
        grouped = case.heads_q != case.heads_kv

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=case.dropout, is_causal=causal, enable_gqa=grouped
            )

        return Call(self.name, "bhnd", attend, inputs, around=lambda: sdpa_kernel(self.backend))


def _dense_alibi(inputs: Inputs) -> Tensor:
    """ALiBi and the causal mask as an additive `(1, Hq, Nq, Nk)` tensor."""
    case = inputs.case
    assert inputs.slopes is not None
    i = torch.arange(case.seqlen_q, device=inputs.q.device)[:, None] + (case.seqlen_k - case.seqlen_q)
    j = torch.arange(case.seqlen_k, device=inputs.q.device)[None, :]
    bias = (-inputs.slopes[:, None, None] * (i - j).abs()).to(inputs.dtype)[None]
    return torch.where(j > i, float("-inf"), bias) if case.causal else bias


class _AtenFlash(torch.autograd.Function):
    """Torch's own FlashAttention-2 with the options that SDPA does not pass on; `(B, N, H, D)` or `(T, H, D)`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, longest: tuple[int, int], causal: bool,
        window: tuple[int | None, int | None], dropout: float,
    ) -> Any:  # fmt: skip
        out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, *longest, dropout, causal, False, window_size_left=window[0], window_size_right=window[1]
        )
        ctx.save_for_backward(q, k, v, out, lse, rng, unused, cu)
        ctx.options = (longest, causal, window, dropout)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, rng, unused, cu = ctx.saved_tensors
        longest, causal, window, dropout = ctx.options
        grads = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, cu, cu, *longest, dropout, causal, rng, unused,
            window_size_left=window[0], window_size_right=window[1],
        )  # fmt: skip
        return (*grads, None, None, None, None, None)


class TorchFlash(Sdpa):
    """Torch's flash backend: FlashAttention-2 on a GPU. Window and packed batches go through its aten operator."""

    def __init__(self) -> None:
        super().__init__(
            "torch-flash", "FA2 (torch flash)", SDPBackend.FLASH_ATTENTION, on_cpu=True, masks=False, gqa=True
        )

    def refuses(self, case: Case) -> str | None:
        """As SDPA, but window and packed batches work."""
        if case.alibi:
            return "torch's build of FlashAttention-2 has no ALiBi"
        plain = dataclasses.replace(case, window=None, lengths=None)
        return super().refuses(plain)

    def prepare(self, inputs: Inputs) -> Call:
        """SDPA for the plain call, the aten operator for the rest."""
        case = inputs.case
        if not case.packed and case.window is None:
            return super().prepare(inputs)
        if inputs.q.device.type == "cpu":
            raise NotImplementedError("the aten operator with a window or a packed batch needs a GPU")
        left, right = case.window if case.window is not None else (-1, -1)
        window = (None if left < 0 else left, None if right < 0 else right)
        if case.window is not None and case.causal:
            window = (window[0], 0)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = _AtenFlash.apply(  # type: ignore[no-untyped-call]
                q, k, v, inputs.cu_seqlens, (case.seqlen_q, case.seqlen_k), case.causal, window, case.dropout
            )
            return out

        return Call(self.name, "thd" if case.packed else "bnhd", attend, inputs)


class Eager(Peer):
    """Ordinary attention: matmul, softmax, matmul, with the score matrix in memory."""

    name, label = "eager", "eager (ordinary attention)"

    def refuses(self, case: Case) -> str | None:
        """Only the plain call is written out."""
        if case.packed or case.window or case.softcap or case.alibi or case.sink or case.dropout or case.bias:
            return "written out for the plain call only"
        return "no grouped heads without copying K and V" if case.heads_q != case.heads_kv else None

    def prepare(self, inputs: Inputs) -> Call:
        """Two matmuls around a softmax in fp32."""
        case = inputs.case
        hidden = None
        if case.causal:
            hidden = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=inputs.q.device).triu(
                1 + case.seqlen_k - case.seqlen_q
            )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            s = (q * case.head_dim**-0.5) @ k.transpose(-1, -2)
            if hidden is not None:
                s = s.masked_fill(hidden, float("-inf"))
            return torch.softmax(s, -1, dtype=torch.float32).to(q.dtype) @ v

        return Call(self.name, "bhnd", attend, inputs)


class Flex(Peer):
    """Compiled FlexAttention: masks as block masks, score features as a score function."""

    name, label = "flex", "FlexAttention (compiled)"
    compiles = True

    def unavailable(self, device: str) -> str | None:
        """On a CPU it compiles C++ for a minute a case."""
        return None if device == "cuda" else "compiled for GPUs only here"

    def refuses(self, case: Case) -> str | None:
        """It has no dropout."""
        return "FlexAttention has no dropout" if case.dropout else None

    def prepare(self, inputs: Inputs) -> Call:
        """Block mask and score function are built here, once."""
        from torch.nn.attention.flex_attention import flex_attention

        # The backward is timed several times on one recorded forward, which must not give its buffers away.
        torch._functorch.config.donated_buffer = False
        compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
        case, mask, score = inputs.case, _flex_mask(inputs), _flex_score(inputs)
        grouped, sink = case.heads_q != case.heads_kv, inputs.sink

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if sink is None:
                out: Tensor = compiled(q, k, v, score_mod=score, block_mask=mask, enable_gqa=grouped)
                return out
            out, lse = compiled(q, k, v, score_mod=score, block_mask=mask, enable_gqa=grouped, return_lse=True)
            # One more logit in the denominator scales the whole row.
            return out * torch.sigmoid(lse - sink[None, :, None]).unsqueeze(-1).to(out.dtype)

        return Call(self.name, "bhnd", attend, inputs)


def _flex_mask(inputs: Inputs) -> Any:
    """The block mask of a case, None where everything is visible."""
    from torch.nn.attention.flex_attention import create_block_mask

    case, device = inputs.case, inputs.q.device
    if not (case.causal or case.window is not None or case.packed):
        return None
    nq, nk = (case.tokens_q, case.tokens_k) if case.packed else (case.seqlen_q, case.seqlen_k)
    offset = nk - nq
    left, right = case.window if case.window is not None else (-1, -1)
    causal = case.causal
    document = None
    if case.lengths is not None:
        lengths = torch.tensor(case.lengths, device=device)
        document = torch.repeat_interleave(torch.arange(len(case.lengths), device=device), lengths)

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = i + offset
        visible = j <= at if causal else j >= 0
        if left >= 0:
            visible = visible & (at - j <= left)
        if right >= 0:
            visible = visible & (j - at <= right)
        if document is not None:
            visible = visible & (document[i] == document[j])
        return visible

    # Evaluated densely the mask takes N x N bytes; compiled, it does not.
    return create_block_mask(keep, None, None, nq, nk, device=device, _compile=nq * nk > 1 << 28)


def _flex_score(inputs: Inputs) -> Callable[..., Tensor] | None:
    """The score function of a case, None for plain scores."""
    case = inputs.case
    cap, slopes, bias = case.softcap, inputs.slopes, inputs.bias
    offset = case.seqlen_k - case.seqlen_q
    if cap:
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    if slopes is not None:
        return lambda s, b, h, i, j: s - slopes[h] * (i + offset - j).abs()
    if bias is not None:
        return lambda s, b, h, i, j: s + bias[0, h, i, j]
    return None


class FlashAttn(Peer):
    """The flash-attn packages 2, 3 and 4 (CuTe), which share the `(B, N, H, D)` convention.

    Args:
        name: Id.
        label: Name for people.
        module: Where the functions live.
        package: Distribution that tells the version.
        deterministic: Ask for the deterministic backward.
    """

    def __init__(self, name: str, label: str, module: str, package: str, deterministic: bool = False) -> None:
        self.name, self.label, self.module, self.package = name, label, module, package
        self.deterministic = deterministic
        self.unbounded: int | None = None if module == "flash_attn.cute" else -1

    def unavailable(self, device: str) -> str | None:
        """It must be importable, and a GPU present."""
        return "needs a GPU" if device != "cuda" else _missing(self.module, "flash_attn_func")

    def version(self) -> str | None:
        """The distribution's version."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(self.package)
        return None

    @functools.cached_property
    def _keywords(self) -> frozenset[str]:
        function = importlib.import_module(self.module).flash_attn_func
        return frozenset(inspect.signature(function).parameters)

    def refuses(self, case: Case) -> str | None:
        """Features whose keyword its function lacks."""
        needs = {
            "softcap": bool(case.softcap),
            "alibi_slopes": case.alibi,
            "learnable_sink": case.sink,
            "dropout_p": bool(case.dropout),
            "window_size": case.window is not None,
            "attn_bias": case.bias,
            "deterministic": self.deterministic,
        }
        missing = [name for name, needed in needs.items() if needed and name not in self._keywords]
        return f"{self.label} has no {', '.join(missing)}" if missing else None

    def prepare(self, inputs: Inputs) -> Call:
        """The function with the keywords of the case."""
        module, case = importlib.import_module(self.module), inputs.case
        options: dict[str, Any] = {"causal": case.causal}
        if case.window is not None:
            left, right = case.window
            options["window_size"] = (self.unbounded if left < 0 else left, self.unbounded if right < 0 else right)
        if case.softcap:
            options["softcap"] = case.softcap
        if inputs.slopes is not None:
            options["alibi_slopes"] = inputs.slopes
        if inputs.sink is not None:
            options["learnable_sink"] = inputs.sink
        if case.dropout:
            options["dropout_p"] = case.dropout
        if self.deterministic:
            options["deterministic"] = True
        if case.packed:
            options |= {
                "cu_seqlens_q": inputs.cu_seqlens,
                "cu_seqlens_k": inputs.cu_seqlens,
                "max_seqlen_q": case.seqlen_q,
                "max_seqlen_k": case.seqlen_k,
            }
            function = module.flash_attn_varlen_func
        else:
            function = module.flash_attn_func
        layout = "thd" if case.packed else "bnhd"
        return Call(self.name, layout, lambda q, k, v: _first(function(q, k, v, **options)), inputs)


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Flashtri("auto"),
        Flashtri("triton"),
        Flashtri("hopper"),
        Flashtri("auto", deterministic=True),
        TorchFlash(),
        Sdpa("torch-cudnn", "cuDNN (torch)", SDPBackend.CUDNN_ATTENTION, on_cpu=False, masks=True, gqa=True),
        Sdpa("torch-efficient", "memory-efficient (torch)", SDPBackend.EFFICIENT_ATTENTION, False, True, gqa=False),
        Sdpa("torch-math", "math (torch)", SDPBackend.MATH, on_cpu=True, masks=True, gqa=True),
        Flex(),
        FlashAttn("fa2", "flash-attn 2", "flash_attn", "flash-attn"),
        FlashAttn("fa3", "flash-attn 3", "flash_attn_interface", "flash-attn-3"),
        FlashAttn("fa4", "flash-attn 4", "flash_attn.cute", "flash-attn-4"),
        FlashAttn("fa4-deterministic", "flash-attn 4 (deterministic)", "flash_attn.cute", "flash-attn-4", True),
        Eager(),
    )
}

# Who is measured when nobody says otherwise. The score matrix of eager and math attention is measured where it is the
# point, not in every cell.
FAST = ("flashtri", "flashtri-triton", "torch-flash", "torch-cudnn", "flex", "fa2", "fa3", "fa4")
EVERYONE = ("flashtri", "flashtri-triton", "torch-flash", "torch-cudnn", "torch-efficient", "torch-math", "flex",
            "fa2", "fa3", "fa4", "eager")  # fmt: skip
DEFAULT_PEERS: dict[str, tuple[str, ...]] = {
    "grid": FAST,
    "dims": FAST,
    "gqa": FAST,
    "features": (*FAST, "torch-efficient"),
    "window": ("flashtri", "flashtri-triton", "torch-flash", "flex", "fa4"),
    "models": (*FAST, "torch-efficient"),
    "host": EVERYONE,
    "memory": EVERYONE,
    "first_call": ("flashtri", "flashtri-triton", "torch-flash", "torch-cudnn", "flex", "fa4"),
    "errors": EVERYONE,
    "training": FAST,
}
CPU_PEERS = ("flashtri", "torch-flash", "torch-math", "eager")


def chosen(names: tuple[str, ...], suite: str, device: str) -> list[str]:
    """Peers of a suite.

    Args:
        names: What the caller asked for; empty for the suite's default.
        suite: The suite.
        device: "cuda" or "cpu".

    Returns:
        Names in a fixed order.

    Raises:
        ValueError: A peer does not exist.
    """
    unknown = [n for n in names if n not in PEERS]
    if unknown:
        raise ValueError(f"peers: got {', '.join(unknown)}, supported are {', '.join(PEERS)}")
    # On a CPU a new process per peer would be most of a smoke run.
    defaults = CPU_PEERS[: 1 if suite == "first_call" else None] if device == "cpu" else DEFAULT_PEERS[suite]
    wanted = names or defaults
    return [n for n in PEERS if n in wanted]
