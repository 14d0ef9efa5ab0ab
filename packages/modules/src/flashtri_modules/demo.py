"""``python -m flashtri_modules.demo``: flashtri at work on whatever this machine has.

1. Exactness: forward and backward of the real kernels against fp64, beside what same-dtype eager attention errs. With
   a GPU they are compiled; without one they run through Triton's interpreter, at a small size.
2. Training: a small character model on the Python standard library's own sources, beside the same model on torch's
   ``scaled_dot_product_attention`` from the same weights. Both loss curves are plotted and must end alike.
3. Speed (GPU only): beside ``scaled_dot_product_attention``, in turns.

Any claim that does not hold ends the program with an error.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtri_core import flash_attn

from .attention import FlashSelfAttention

VOCAB = 128  # ASCII
PARTS = ("exactness", "training", "speed")


class SdpaSelfAttention(nn.Module):
    """Causal self-attention on torch's own kernel, with the parameters of ``FlashSelfAttention`` under the same names.

    Args:
        embed_dim: features of input and output, a multiple of ``num_heads``.
        num_heads: heads.
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``x (B, N, embed_dim)`` to the same shape."""
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv_proj(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a feed-forward layer four times as wide.

    Args:
        width: features.
        heads: attention heads.
        attention: ``"flash"`` or ``"sdpa"``.
    """

    def __init__(self, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention: nn.Module = (
            FlashSelfAttention(width, heads, causal=True) if attention == "flash" else SdpaSelfAttention(width, heads)
        )
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``x (B, N, width)`` to the same shape."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class CharModel(nn.Module):
    """A small decoder-only transformer over characters; its state dict is the same for either attention.

    Args:
        vocab: number of characters.
        width: features, a multiple of ``heads``.
        heads: attention heads.
        layers: transformer blocks.
        block: longest sequence.
        attention: ``"flash"`` for FlashSelfAttention, ``"sdpa"`` for torch's ``scaled_dot_product_attention``.

    Raises:
        ValueError: another ``attention``.
    """

    def __init__(self, vocab: int, width: int, heads: int, layers: int, block: int, attention: str = "flash") -> None:
        super().__init__()
        if attention not in ("flash", "sdpa"):
            raise ValueError(f'attention must be "flash" or "sdpa", got {attention!r}')
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, N, vocab)`` of the character after each of ``tokens (B, N)``, integers below ``vocab``."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Size(NamedTuple):
    """A training run: the model, and how long it is trained."""

    width: int
    heads: int
    layers: int
    block: int
    batch: int
    steps: int
    learning_rate: float


CPU_SIZE = Size(width=64, heads=4, layers=2, block=128, batch=12, steps=250, learning_rate=3e-3)
GPU_SIZE = Size(width=384, heads=6, layers=6, block=1024, batch=16, steps=300, learning_rate=6e-4)


def progress(items: range, label: str) -> Iterator[int]:
    """Yield ``items`` and draw a bar on a terminal; elsewhere print a line at every tenth."""
    terminal, started = sys.stdout.isatty(), time.perf_counter()
    for done, item in enumerate(items, 1):
        yield item
        seconds = time.perf_counter() - started
        left = seconds / done * (len(items) - done)
        if terminal:
            filled = 30 * done // len(items)
            bar = "#" * filled + "." * (30 - filled)
            print(f"\r  {label} [{bar}] {done}/{len(items)}, {left:.0f} s left ", end="", flush=True)
        elif done * 10 // len(items) > (done - 1) * 10 // len(items):
            print(f"  {label} {done}/{len(items)}, {seconds:.0f} s", flush=True)
    if terminal:
        print()


def in_words(size: float) -> str:
    """A number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


# 1. Exactness


def eager_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention as it is written on paper, score matrix and all, in the dtype of ``q (B, Hq, N, D)``."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, Hq, N, N)
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    out: Tensor = s.softmax(-1) @ v
    return out


def out_and_gradients(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype, **keywords: object
) -> list[Tensor]:
    """``[out, dq, dk, dv]`` of ``attend`` at ``inputs``, which are ``q, k, v, d(out)``, cast to ``dtype``."""
    q, k, v, do = (x.detach().to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, **keywords)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def exactness(device: torch.device, impl: str) -> None:
    """Compare one forward and backward of ``impl`` with fp64, for full and causal attention.

    Raises:
        RuntimeError: an error is over the budget: twice that of same-dtype eager, plus one rounding step.
    """
    gpu = device.type == "cuda"
    dtypes = [torch.float16, torch.bfloat16] if gpu else [torch.float32 if impl == "reference" else torch.float16]
    batch, heads, kv_heads, length, dim = (2, 8, 2, 2048, 128) if gpu else (1, 2, 1, 80, 32)
    print(f"  q ({batch}, {heads}, {length}, {dim}), k and v with {kv_heads} heads; largest error against fp64:")
    print(f"  {'dtype':9} {'mask':7} {'':4} {'kernel':>9} {'eager':>9}  score matrix never written")
    generator = torch.Generator(device).manual_seed(0)
    for dtype, causal in itertools.product(dtypes, (False, True)):
        mask = "causal" if causal else "full"
        inputs = [
            torch.randn(batch, number, length, dim, device=device, generator=generator).to(dtype)
            for number in (heads, kv_heads, kv_heads, heads)
        ]
        truth = out_and_gradients(eager_attention, inputs, torch.float64, causal=causal)
        eager = out_and_gradients(eager_attention, inputs, dtype, causal=causal)
        kernel = out_and_gradients(flash_attn, inputs, dtype, causal=causal, impl=impl)
        saved = in_words(batch * heads * length * length * dtype.itemsize)
        for name, true, by_eager, by_kernel in zip(("out", "dq", "dk", "dv"), truth, eager, kernel, strict=True):
            ours, theirs = ((x.double() - true).abs().max().item() for x in (by_kernel, by_eager))
            label = f"{str(dtype).removeprefix('torch.'):9} {mask:7}" if name == "out" else " " * 17
            print(f"  {label} {name:4} {ours:9.1e} {theirs:9.1e}  {saved if name == 'out' else ''}".rstrip())
            budget = 2 * theirs + torch.finfo(dtype).eps * true.abs().max().item()
            if not ours <= budget:
                raise RuntimeError(f"{name} of {dtype}, {mask}: error {ours:.3e} is over the budget of {budget:.3e}")


def interpreted_exactness() -> None:
    """Run ``exactness`` on the kernels in a new process, for Triton must be told to interpret before its import."""
    command = [sys.executable, "-m", "flashtri_modules.demo", "--only", "exactness"]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


# 2. Training


def corpus() -> Tensor:
    """About a million characters of the standard library's sources: integers below ``VOCAB``, (length,)."""
    pieces: list[bytes] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pieces.append(path.read_bytes())
        if sum(map(len, pieces)) > 1_000_000:
            break
    return torch.tensor(list(b"".join(pieces)), dtype=torch.int64).clamp(max=VOCAB - 1)


def entropy(text: Tensor) -> float:
    """Nats per character of a model that knows only how often each character occurs."""
    p = torch.bincount(text).double() / text.numel()
    return -(p * p.log()).nansum().item()


def training(device: torch.device, size: Size, seed: int, out: Path) -> None:
    """Train the model on both attentions, on the same batches, plot the losses and compare where they end.

    Raises:
        RuntimeError: the model learned nothing, or the two ended apart by more than the noise of the loss itself.
    """
    text = corpus()
    torch.manual_seed(seed)
    names = {"flash": "FlashSelfAttention", "sdpa": "torch SDPA"}
    models = {
        name: CharModel(VOCAB, size.width, size.heads, size.layers, size.block, attention=name).to(device)
        for name in names
    }
    models["sdpa"].load_state_dict(models["flash"].state_dict())
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=size.learning_rate) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in names}
    seconds = dict.fromkeys(names, 0.0)
    parameters = sum(p.numel() for p in models["flash"].parameters())
    print(f"  {text.numel():,} characters of Python; {parameters:,} parameters; ", end="")
    print(f"{size.steps} steps of {size.batch} x {size.block} characters")
    generator = torch.Generator().manual_seed(seed)
    for step in progress(range(size.steps), "training both"):
        starts = torch.randint(text.numel() - size.block - 1, (size.batch, 1), generator=generator)
        chars = text[starts + torch.arange(size.block + 1)].to(device)
        # A short warm-up, then a straight line to zero: the curves end on a plateau that can be compared.
        rate = size.learning_rate * min((step + 1) / 20, (size.steps - step) / size.steps)
        for name, model in models.items():
            began = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(chars[:, :-1]).flatten(0, 1).float(), chars[:, 1:].flatten())
            optimizers[name].param_groups[0]["lr"] = rate
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            losses[name].append(loss.item())
            seconds[name] += time.perf_counter() - began
    curves = {names[name]: values for name, values in losses.items()}
    # Plotted first: the curves are what one looks at when a check fails.
    for path in plot(curves, "steps", "loss, nats per character", out / "loss"):
        print(f"  loss curves: {path}")
    ends = {name: statistics.mean(values[-last_steps(values) :]) for name, values in losses.items()}
    apart, noise = ends_apart(losses["flash"], losses["sdpa"])
    for name, label in names.items():
        print(f"  {label:18} loss {losses[name][0]:.4f} -> {ends[name]:.4f}, {seconds[name]:.1f} s")
    print(f"  apart by {apart:.5f} at the end; the noise of that mean is {noise:.4f}")
    if not ends["flash"] < entropy(text):
        raise RuntimeError(
            f"the model learned nothing: {ends['flash']:.3f} nats, frequencies alone give {entropy(text):.3f}"
        )
    if not apart < noise:
        raise RuntimeError("the two models ended further apart than the noise")


def last_steps(losses: Sequence[float]) -> int:
    """How many steps count as the end of a run."""
    return max(2, len(losses) // 10)


def ends_apart(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """How far apart two runs end, and twice the standard error of such an end: the batches' own noise."""
    last = last_steps(a)
    apart = abs(statistics.mean(a[-last:]) - statistics.mean(b[-last:]))
    return apart, 2 * statistics.stdev(a[-last:]) / math.sqrt(last)


def plot(curves: dict[str, list[float]], x_label: str, y_label: str, stem: Path) -> list[Path]:
    """Write the curves as ``stem.svg``, and as ``stem.png`` too where matplotlib is installed; returns the paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    svg = stem.with_suffix(".svg")
    svg.write_text(svg_plot(curves, x_label, y_label), encoding="utf-8")
    if find_spec("matplotlib") is None:
        return [svg]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    for (name, values), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(values, style, label=name)
    axes.legend()
    figure.savefig(stem.with_suffix(".png"), dpi=120)
    return [svg, stem.with_suffix(".png")]


def svg_plot(curves: dict[str, list[float]], x_label: str, y_label: str) -> str:
    """A line chart of two curves over their index, as an SVG document."""
    width, height, left, right, top, bottom = 700, 400, 60, 20, 20, 50
    length = max(map(len, curves.values()))
    highest = max(map(max, curves.values()))
    ticks = range(math.ceil(highest) + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + x / max(length - 1, 1) * (width - left - right),
            height - bottom - y / ticks[-1] * (height - top - bottom),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in ticks:
        (x0, y), (x1, _) = at(0, tick), at(length - 1, tick)
        parts.append(f'<path d="M{x0:.1f} {y:.1f}H{x1:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
    for x in (0, length - 1):
        parts.append(f'<text x="{at(x, 0)[0]:.1f}" y="{height - bottom + 18}" text-anchor="middle">{x + 1}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(16 {height / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    styles = (("#d97706", "none"), ("#1d4ed8", "6 4"))
    for row, ((name, values), (colour, dash)) in enumerate(zip(curves.items(), styles, strict=True)):
        line = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in enumerate(values))
        stroke = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        y = top + 14 + 20 * row
        parts.append(f'<polyline points="{line}" {stroke}/>')
        parts.append(f'<path d="M{width - 220} {y - 4}h30" {stroke}/>')
        parts.append(f'<text x="{width - 182}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


# 3. Speed


def speed(device: torch.device) -> None:
    """Print medians beside torch's ``scaled_dot_product_attention`` for 16k tokens of bf16, hidden size 2048."""
    print(f"  {'N':>6} {'D':>4} {'mask':7} {'pass':9} {'flashtri':>9} {'SDPA':>9}  SDPA / flashtri")
    for length, dim, causal in itertools.product((1024, 4096, 16384), (64, 128), (False, True)):
        shape = (16384 // length, 2048 // dim, length, dim)
        q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        calls: list[Callable[[], Tensor]] = [
            partial(flash_attn, q, k, v, causal=causal),
            partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal),
        ]
        do = torch.randn(shape, device=device, dtype=torch.bfloat16)
        backward = [partial(torch.autograd.grad, call(), (q, k, v), do, retain_graph=True) for call in calls]
        for label, (ours, theirs) in (("forward", in_turns(calls)), ("backward", in_turns(backward))):
            mask = "causal" if causal else "full"
            print(f"  {length:6} {dim:4} {mask:7} {label:9} {ours:6.3f} ms {theirs:6.3f} ms  {theirs / ours:.2f}")


def in_turns(calls: Sequence[Callable[[], object]], rounds: int = 20) -> list[float]:
    """Median milliseconds of each call on the GPU, all called once in every round, after three rounds of warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 3):
        for call, values in zip(calls, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            if number >= 3:
                values.append(start.elapsed_time(end))
    return [statistics.median(values) for values in times]


def main(arguments: list[str] | None = None) -> None:
    """Run the parts that this machine can, and say where each one ran."""
    parser = argparse.ArgumentParser(
        prog="python -m flashtri_modules.demo", description="flashtri at work on this machine"
    )
    parser.add_argument("--only", choices=PARTS, help="run one part")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the plots")
    options = parser.parse_args(arguments)
    gpu = torch.cuda.is_available() and find_spec("triton") is not None
    device = torch.device("cuda" if gpu else "cpu")
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    where = torch.cuda.get_device_name() if gpu else "the CPU"
    parts = [options.only] if options.only else list(PARTS)

    if "exactness" in parts:
        if gpu or interpreting:
            how = f"compiled, on {where}" if gpu else "through Triton's interpreter, on the CPU"
            print(f"Exactness: the kernels, {how}", flush=True)
            exactness(device, "auto" if gpu else "triton")
        elif find_spec("triton") is not None:
            interpreted_exactness()
        else:
            print("Exactness: no Triton here, so the chunked PyTorch path, on the CPU", flush=True)
            exactness(device, "reference")
    if "training" in parts:
        print(f"Training: a character model, on {where}", flush=True)
        size = GPU_SIZE if gpu else CPU_SIZE
        if not gpu:
            torch.set_num_threads(1)  # matrices this small: several threads wait for each other more than they compute
        training(device, size._replace(steps=options.steps or size.steps), options.seed, options.out)
    if "speed" in parts and gpu:
        print(f"Speed: on {where}", flush=True)
        speed(device)
    elif "speed" in parts:
        print("Speed: not measured, for there is no GPU here")


if __name__ == "__main__":
    main()
