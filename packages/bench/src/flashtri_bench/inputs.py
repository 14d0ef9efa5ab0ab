"""The tensors of one case, drawn once and shared by all peers, in whichever memory layout a peer prefers.

Layouts are made before anything is timed, so that no peer pays for another's convention.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cases import Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OUTLIER_SHARE, OUTLIER_STD = 1e-3, 10.0


def alibi_slopes(heads: int, device: str) -> Tensor:
    """The usual geometric slopes, `(heads,)`, fp32."""
    return torch.tensor([2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)], device=device)


@dataclass
class Inputs:
    """Tensors of one case.

    Attributes:
        case: The case.
        dtype: Element type of q, k, v and dout.
        q, k, v, dout: `(B, H, N, D)` with `(B, N, H, D)` storage, or `(total, H, D)` when packed.
        sink: `(Hq,)` in the input dtype, or None.
        slopes: ALiBi slopes `(Hq,)`, fp32, or None.
        bias: `(1, Hq, Nq, Nk)`, or None.
        cu_seqlens: `(batch + 1,)` int32 when packed, else None.
    """

    case: Case
    dtype: torch.dtype
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sink: Tensor | None = None
    slopes: Tensor | None = None
    bias: Tensor | None = None
    cu_seqlens: Tensor | None = None
    _made: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def laid_out(self, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v (leaves that need a gradient) and dout in one layout.

        Args:
            layout: "bhnd": contiguous `(B, H, N, D)`, a packed batch as one sequence `(1, H, total, D)`; "bnhd":
                contiguous `(B, N, H, D)`; "thd": `(total, H, D)`.

        Returns:
            Four tensors; the same objects for the same layout.

        Raises:
            ValueError: The layout does not exist for this case.
        """
        if layout not in self._made:
            tensors = (self.q, self.k, self.v, self.dout)
            if self.case.packed:
                views = {"thd": tensors, "bhnd": tuple(t.transpose(0, 1).unsqueeze(0) for t in tensors)}
            else:
                views = {"bhnd": tensors, "bnhd": tuple(t.transpose(1, 2) for t in tensors)}
            if layout not in views:
                raise ValueError(f"layout: got {layout!r}, supported here are {', '.join(views)}")
            made = [t.detach().clone(memory_format=torch.contiguous_format) for t in views[layout]]
            self._made[layout] = (*(t.requires_grad_() for t in made[:3]), made[3])
        q, k, v, dout = self._made[layout]
        return q, k, v, dout

    def keep_only(self, layout: str) -> None:
        """Drop every copy but one layout, so that peak memory is that of a caller who has just these tensors."""
        self._made = {layout: self.laid_out(layout)}
        self.q, self.k, self.v, self.dout = (self.canonical(t.detach(), layout) for t in self._made[layout])

    def canonical(self, tensor: Tensor, layout: str) -> Tensor:
        """A view of an output or gradient in the shape of this object's own q, k, v."""
        if self.case.packed:
            return tensor.squeeze(0).transpose(0, 1) if layout == "bhnd" else tensor
        return tensor.transpose(1, 2) if layout == "bnhd" else tensor

    def parameters(self) -> list[Tensor]:
        """Further tensors that get a gradient, in a fixed order: sink, bias."""
        return [t for t in (self.sink, self.bias) if t is not None]


def draw(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """Draw the tensors of a case in the target dtype.

    Args:
        case: The case.
        dtype: Element type.
        device: Where.
        seed: Seed of the generator.

    Returns:
        Normal inputs; with `inputs="outlier"` 0.1 % of the entries are widened by a normal of deviation 10.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device)
        if case.inputs == "outlier":
            far = torch.rand(shape, generator=generator, device=device) < OUTLIER_SHARE
            x = x + far * OUTLIER_STD * torch.randn(shape, generator=generator, device=device)
        return x.to(dtype)

    def tokens(rows: int, seqlen: int, heads: int, dim: int) -> Tensor:
        if case.packed:
            return normal(rows, heads, dim)
        return normal(case.batch, seqlen, heads, dim).transpose(1, 2)

    made = Inputs(
        case,
        dtype,
        q=tokens(case.tokens_q, case.seqlen_q, case.heads_q, case.head_dim),
        k=tokens(case.tokens_k, case.seqlen_k, case.heads_kv, case.head_dim),
        v=tokens(case.tokens_k, case.seqlen_k, case.heads_kv, case.head_dim_v),
        dout=tokens(case.tokens_q, case.seqlen_q, case.heads_q, case.head_dim_v),
    )
    if case.sink:
        made.sink = normal(case.heads_q).requires_grad_()
    if case.alibi:
        made.slopes = alibi_slopes(case.heads_q, device)
    if case.bias:
        made.bias = normal(1, case.heads_q, case.seqlen_q, case.seqlen_k).requires_grad_()
    if case.lengths is not None:
        ends = torch.tensor([0, *case.lengths], dtype=torch.int64).cumsum(0)
        made.cu_seqlens = ends.to(torch.int32).to(device)
    return made
