"""Dropout on the attention probabilities, the same mask forward and backward.

Each probability is kept with probability 1 - p and divided by it; the softmax denominator is that of all of them. The
bits are Philox-4x32-10 (Salmon et al. 2011), keyed by two 64-bit words drawn from torch's generator for the call, and
counted by (row, key, head, batch): ``torch.manual_seed``, CUDA graphs and activation checkpointing behave as for any
torch op, and ``dropout_p=0`` draws nothing. One Philox call serves sixteen scores, one byte each, so p is rounded to a
multiple of 1/256, and the survivors are divided by the rounded keep probability: the expectation stays exact. Output and
gradients are linear in that division, which the kernels make once, at their end.
Dropout happens whenever ``dropout_p > 0``; it is the module, not this function, that knows about ``eval()``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import INTERPRETED, jit, tl

LEVELS = 256  # one byte per score


@jit
def philox(seed, c0, c1, c2, c3):
    """Philox-4x32-10 of uint32 counters that broadcast: four words.

    As ``tl.philox``, but both halves of a product come from one wide multiplication: in two, they are two instructions.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


if INTERPRETED:

    @jit
    def select(p, word, above, limit):
        return tl.where(word << above <= limit, p, 0.0)

    @jit
    def anew(x):
        return x

else:
    SELECT = tl.constexpr("{ .reg .pred p; .reg .u32 x; shl.b32 x, $2, $3; setp.le.u32 p, x, $4; selp.f32 $0, $1, 0.0, p; }")

    @jit
    def select(p, word, above, limit):
        """p where the byte of ``word`` with ``above`` bits above it is at most the top byte of ``limit``, elsewhere 0.

        Written as one instruction, the test stays beside its use and the word stays whole. Apart, the compiler keeps the
        comparisons as bits of integers until it has room for them, and makes a word anew for each of its four bytes.
        """
        return tl.inline_asm_elementwise(SELECT, "=f,f,r,r,r", [p, word, above, limit], tl.float32, is_pure=True, pack=1)

    @jit
    def anew(x):
        """The int64 x; the compiler cannot move what follows from it out of a loop."""
        return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], tl.int64, is_pure=False, pack=1)


@jit
def drop(p, z, h, start_m, start_n, args, SPARE: tl.constexpr = False):
    """args = (rng, kept levels of 256, 1 / keep probability); rng = int64 (seed, offset).

    Sixteen scores share a counter: rows i and i + 8, keys j, j + 1 and j + 8, 16, 24. Those are the entries that a
    tensor-core accumulator gives to one thread, and their counters are equal before the tile's start is added: the
    compiler computes each Philox call once for the sixteen.

    SPARE registers: the twenty round keys are added up for each tile, not held through the loop.
    """
    seed = tl.load(args[0])
    if SPARE:
        seed = anew(seed)
    offset = tl.load(args[0] + 1)
    i = tl.arange(0, p.shape[0])[:, None]
    j = tl.arange(0, p.shape[1])[None, :]
    row = start_m // 16 * 8 + ((i >> 4) * 8 + (i & 7))
    col = start_n // 32 * 4 + ((j >> 5) * 4 + ((j >> 1) & 3))
    batch = z + offset.to(tl.int32)
    w0, w1, w2, w3 = philox(
        seed, row.to(tl.uint32), col.to(tl.uint32), tl.cast(h, tl.uint32), batch.to(tl.uint32)
    )
    word = tl.where((j & 8) == 0, tl.where((j & 16) == 0, w0, w2), tl.where((j & 16) == 0, w1, w3))
    above = 24 - (i & 8) - (j & 1) * 16
    limit = (tl.cast(args[1] - 1, tl.uint32) << 24) + 0xFFFFFF  # the bits below the byte are another's
    return select(p, word, above.to(tl.uint32), limit)


@jit
def drop_grad(p, kept, dp, delta, args):
    """p * (where kept: dp / keep probability, elsewhere 0, less delta), times the keep probability, with one selection."""
    return kept * dp - p * (delta * (args[1] / 256.0))


@jit
def rescale(x, args):
    return x * args[2]


def levels(dropout_p: float) -> int:
    """Kept levels out of 256; at least 1, so that p just below 1 still divides by a positive number."""
    return max(1, round((1.0 - dropout_p) * LEVELS))


def keep_scale(dropout_p: float) -> float:
    """What kept probabilities are multiplied by: 1 / the rounded keep probability."""
    return LEVELS / levels(dropout_p)


def _philox(key: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> list[Tensor]:
    """Philox-4x32-10 on int64 tensors that hold 32-bit words."""
    low = 0xFFFFFFFF
    k0, k1 = key & low, (key >> 32) & low
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # may wrap in int64: high words are taken by halves below
        h0, h1 = _mulhi(c0, 0xD2511F53), _mulhi(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, p1 & low, h0 ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [c0, c1, c2, c3]


def _mulhi(a: Tensor, b: int) -> Tensor:
    """High 32 bits of a product of 32-bit words; int64 alone would overflow, so ``a`` goes in two halves."""
    lo = (a & 0xFFFF) * b
    hi = (a >> 16) * b + (lo >> 16)
    return (hi >> 16) & 0xFFFFFFFF


def keep_eager(rng: Tensor, z: Tensor, h: Tensor, i: Tensor, j: Tensor, dropout_p: float) -> Tensor:
    """Eager twin of what ``drop`` keeps; index tensors broadcast against one another, int64. Returns bool."""
    seed, offset = (int(x) for x in rng.tolist())
    shape = torch.broadcast_shapes(z.shape, h.shape, i.shape, j.shape)
    row = ((i >> 4) * 8 + (i & 7)).expand(shape)
    col = ((j >> 5) * 4 + ((j >> 1) & 3)).expand(shape)
    batch = (z + (offset & 0xFFFFFFFF)) & 0xFFFFFFFF
    words = _philox(seed, row, col, h.expand(shape), batch.expand(shape))
    pick = ((j >> 3) & 3).expand(shape)
    word = torch.where(pick == 0, words[0], torch.where(pick == 1, words[1], torch.where(pick == 2, words[2], words[3])))
    byte = (word >> ((i & 8) + (j & 1) * 16).expand(shape)) & 255
    return byte < levels(dropout_p)


def draw(device: torch.device) -> Tensor:
    """Two int64 words from torch's generator on ``device``: the seed and the offset of one call."""
    return torch.randint(0, 1 << 62, (2,), dtype=torch.int64, device=device)


def check(dropout_p: object) -> float:
    """Validate ``dropout_p``: 0 <= p < 1.

    Raises:
        TypeError: not a number.
        ValueError: outside [0, 1).
    """
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a float, got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    return float(dropout_p)
