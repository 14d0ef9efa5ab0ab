"""A whole training step: a small decoder-only transformer whose attention is the peer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import Case

LAYERS = 4
VOCABULARY = 8192
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Pre-norm attention and MLP.

    Args:
        case: Heads and head dim.
        attend: Attention of `(B, H, N, D)` or `(B, N, H, D)` views.
        heads_first: Which of the two it takes.
    """

    def __init__(self, case: Case, attend: Attend, heads_first: bool) -> None:
        super().__init__()
        width = case.heads_q * case.head_dim
        self.heads, self.attend, self.heads_first = case.heads_q, attend, heads_first
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, N, width)` to the same."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (t.transpose(1, 2) if self.heads_first else t for t in qkv.unbind(2))
        out = self.attend(q, k, v)
        out = out.transpose(1, 2) if self.heads_first else out
        x = x + self.proj(out.flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class Model(nn.Module):
    """Token embedding, blocks, tied output.

    Args:
        case: Heads, head dim, and lengths.
        attend: The attention.
        heads_first: Layout that it takes.
        vocabulary: Number of tokens.
    """

    def __init__(self, case: Case, attend: Attend, heads_first: bool, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, case.heads_q * case.head_dim)
        self.blocks = nn.ModuleList(Block(case, attend, heads_first) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(case.heads_q * case.head_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean next-token loss of `(B, N + 1)` tokens."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def with_attention(self, attend: Attend, heads_first: bool) -> Model:
        """A copy with the same weights and another attention."""
        twin = copy.deepcopy(self)
        for block in twin.blocks:
            assert isinstance(block, Block)
            block.attend, block.heads_first = attend, heads_first
        return twin


def plain(case: Case) -> Attend:
    """Ordinary attention of the case, for the reference model."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (q * case.head_dim**-0.5) @ k.transpose(-1, -2)
        if case.causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
        wide = torch.promote_types(q.dtype, torch.float32)
        return torch.softmax(s, -1, dtype=wide).to(q.dtype) @ v

    return attend


def first_gradient(model: Model, tokens: Tensor) -> Tensor:
    """Gradient of the first block's query-key-value weight: it has passed through every attention."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    (grad,) = torch.autograd.grad(model(tokens), [block.qkv.weight])
    return grad.detach()


def stepper(model: Model, tokens: Tensor) -> Callable[[], None]:
    """One optimiser step on fixed tokens."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=tokens.is_cuda)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        model(tokens).backward()
        optimiser.step()

    return step
