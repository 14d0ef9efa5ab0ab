"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the operators, by torch's conventions.

Floating-point operations, a multiply and an add being two, of the products alone: two in the forward (S = Q K^T, O = P V),
five in the backward (S again, dP, dV, dQ, dK), whichever gradients are asked for and whatever a kernel computes twice.
Every query of a sequence counts with every key of it: as for torch's own attention, causal and other masks and windows
change nothing, so that figures compare. (``flashtri_bench`` counts what the mask leaves.) Packed sequences count with their
own lengths, ``seqused_k`` with what it says; reading them waits for the device. Where they are fake or meta tensors, which
have no values, each sequence counts as the longest.

``import flashtri_core`` registers the formulas by importing this module, except where torch is built for CUDA and Triton is
missing: torch's module logs a warning there, so whoever wants to count imports ``flashtri_core.flops``.

Source: ``sdpa_flop_count``, ``sdpa_backward_flop_count`` and ``_offsets_to_lengths`` in torch/utils/flop_counter.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.flop_counter import register_flop_formula

from .problem import Extras

_N_EXTRAS = len(Extras._fields)


@register_flop_formula(torch.ops.flashtri.fwd, get_raw=True)
def forward_flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_out: Any) -> int:
    """Operations of ``flashtri::fwd``, which takes these arguments: 2 * pairs * (D + Dv)."""
    return 2 * _pairs(q, k, rest) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.flashtri.bwd, get_raw=True)
def backward_flops(
    _do: Tensor, _dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _lse: Tensor, *rest: Any, **_grads: Any
) -> int:  # fmt: skip
    """Operations of ``flashtri::bwd``: 2 * pairs * (3 D + 2 Dv)."""
    return 2 * _pairs(q, k, rest) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _pairs(q: Tensor, k: Tensor, rest: tuple[Any, ...]) -> int:
    """Pairs of a query and a key, over the query heads; ``rest`` is what follows the tensors that every call has."""
    extras, max_seqlens = Extras(*rest[:_N_EXTRAS]), rest[_N_EXTRAS : _N_EXTRAS + 2]
    cu_q, cu_k, used = extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k
    if cu_q is None or cu_k is None:
        batch, heads, rows, _ = q.shape
        keys = k.shape[2]
    else:
        batch, heads, (rows, keys) = cu_q.shape[0] - 1, q.shape[1], max_seqlens
    lengths = [x for x in (cu_q, cu_k, used) if x is not None]
    if not lengths or any(x.is_meta or isinstance(x, (FakeTensor, FunctionalTensor)) for x in lengths):
        return batch * heads * rows * keys  # symbols, maybe: a list of them would settle the batch
    all_rows: list[int] = [rows] * batch if cu_q is None else cu_q.diff().tolist()
    all_keys: list[int] = (cu_k.diff() if used is None else used).tolist()  # type: ignore[union-attr]
    return heads * sum(m * n for m, n in zip(all_rows, all_keys, strict=True))
