"""Is it right? Every peer is compared with fp64 before it is timed; a wrong one gets no row.

The comparison takes some heads of the timed problem itself, not a smaller problem: what is timed is what was checked.
The budget is the error that plain same-dtype PyTorch makes on the same numbers. Ours must stay within twice that
(max) and 1.2 times (mean); a peer is refused only when it is far outside, and its row carries the ratio.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case
from .inputs import Inputs

OURS_MAX, OURS_MEAN = 2.0, 1.2
PEER_MAX = 8.0
# Elements of one block of scores; fp64 and a handful of temporaries of it stay below 2 GB.
SCORE_BLOCK = 1 << 25


@dataclass(frozen=True)
class Error:
    """Differences from fp64 of one tensor."""

    max: float
    mean: float
    rmse: float

    def as_dict(self) -> dict[str, float]:
        """The form in results.json."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Check:
    """Outcome of one comparison.

    Attributes:
        ok: Whether every tensor is inside its budget.
        max_err, budget: Of the tensor that came nearest to its budget, or went furthest past it.
        ratio: Its error over same-dtype eager's.
        tensor: Its name.
        errors: All errors by tensor name.
    """

    ok: bool
    max_err: float
    budget: float
    ratio: float
    tensor: str
    errors: Mapping[str, Error]

    def as_dict(self) -> dict[str, float | bool]:
        """The form in results.json."""
        return {"ok": self.ok, "max_err": self.max_err, "budget": self.budget, "ratio": self.ratio}

    @property
    def reason(self) -> str:
        """Why there is no row, for a red check."""
        return f"wrong result: {self.tensor} is off by {self.max_err:.2e}, the budget is {self.budget:.2e}"


@dataclass(frozen=True)
class _Piece:
    """One key head's problem: q `(G, Nq, D)`, k and v `(Nk, .)`, dout `(G, Nq, Dv)`, with where it came from."""

    batch: int
    rows: slice
    head: int
    heads: slice


def _pieces(case: Case, every: bool) -> Iterator[_Piece]:
    group = case.heads_q // case.heads_kv
    # The gradient of a sink or of a bias sums over the batch; otherwise the first and the last problem do, and for
    # long sequences the last one, where offsets are largest.
    whole_batch = every or case.packed or case.sink or case.bias
    if every:
        heads = range(case.heads_kv)
    elif whole_batch or case.seqlen_q > 8192:
        heads = range(case.heads_kv - 1, case.heads_kv)
    else:
        heads = range(0, case.heads_kv, max(1, case.heads_kv - 1))
    for hk in heads:
        if case.lengths is not None:
            start = 0
            for b, n in enumerate(case.lengths):
                yield _Piece(b, slice(start, start + n), hk, slice(hk * group, (hk + 1) * group))
                start += n
        else:
            batches = range(case.batch) if whole_batch else [0 if hk == 0 and case.heads_kv > 1 else case.batch - 1]
            for b in batches:
                yield _Piece(b, slice(None), hk, slice(hk * group, (hk + 1) * group))


def _take(tensor: Tensor, piece: _Piece, heads: slice | int, packed: bool) -> Tensor:
    """A piece of a canonical tensor: `(heads, rows, D)`, or `(rows, D)` for one head."""
    taken = tensor[piece.rows].transpose(0, 1) if packed else tensor[piece.batch]
    return taken[heads]


def attend(
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    keys: slice,
    seqlen_q: int,
    seqlen_k: int,
    slopes: Tensor | None,
    sink: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention of some query rows, written out: `(G, rows, Dv)` in the dtype of q.

    Args:
        case: Supplies mask and score features.
        q: `(G, rows, D)`, query rows `first ...` of their sequence.
        k: `(keys, D)`, the keys of the range `keys`.
        v: `(keys, Dv)`.
        first: Index of the first row of q.
        keys: Which keys k and v hold; the mask lets the rows see no other.
        seqlen_q: Queries of the whole sequence.
        seqlen_k: Keys of the whole sequence.
        slopes: `(G,)` ALiBi slopes or None.
        sink: `(G,)` or None.
        bias: `(G, rows, keys)` or None.

    Returns:
        The output rows; zero for a row that sees nothing.
    """
    i = torch.arange(first, first + q.shape[1], device=q.device)[:, None] + (seqlen_k - seqlen_q)
    j = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
    s = (q * case.head_dim**-0.5) @ k.transpose(-1, -2)
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    if slopes is not None:
        s = s - slopes[:, None, None] * (i - j).abs()  # slopes are fp32, so a lower dtype is promoted here
    if bias is not None:
        s = s + bias
    keep = torch.ones_like(i - j, dtype=torch.bool)
    if case.causal:
        keep &= j <= i
    if case.window is not None:
        left, right = case.window
        keep &= (j >= i - left) if left >= 0 else keep
        keep &= (j <= i + right) if right >= 0 else keep
    s = s.masked_fill(~keep, float("-inf")).to(torch.promote_types(s.dtype, torch.float32))
    top = s.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink.to(s.dtype)[:, None, None])
    top = top.detach().nan_to_num(neginf=0.0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.to(s.dtype)[:, None, None] - top)
    p = p / total.masked_fill(total == 0, 1.0)
    return p.to(q.dtype) @ v


def _key_range(case: Case, first: int, last: int, seqlen_q: int, seqlen_k: int) -> slice:
    """Keys that rows `first ... last` can see at most; never empty, so that shapes stay simple."""
    offset = seqlen_k - seqlen_q
    left, right = case.window if case.window is not None else (-1, -1)
    right = 0 if case.causal else right
    low = max(0, first + offset - left) if left >= 0 else 0
    high = min(seqlen_k, last + offset + right + 1) if right >= 0 else seqlen_k
    low = min(low, seqlen_k - 1)
    return slice(low, max(low + 1, high))


Gradients = dict[str, Tensor]


class Reference:
    """fp64 results, and same-dtype eager's error, of some heads of one case; computed once per cell.

    Args:
        inputs: The tensors that every peer gets.
        every: All heads instead of a few.
    """

    def __init__(self, inputs: Inputs, every: bool = False) -> None:
        self.inputs = inputs
        case = inputs.case
        self.case = dataclasses.replace(case, dropout=0.0)
        self.pieces = list(_pieces(case, every))
        self.exact = self._compute(torch.float64)
        eager = self._compute(inputs.dtype)
        self.eager = {name: self._error(name, [t.to(inputs.dtype) for t in eager[name]]) for name in self.exact}

    def _compute(self, dtype: torch.dtype) -> dict[str, list[Tensor]]:
        """Output and gradients of each piece; those of sink and bias summed over the pieces of a head."""
        results: dict[str, list[Tensor]] = {name: [] for name in ("out", "dq", "dk", "dv")}
        sums: dict[tuple[str, int], Tensor] = {}
        for piece in self.pieces:
            made = self._piece(piece, dtype)
            for name in results:
                results[name].append(made[name])
            for name in ("dsink", "dbias"):
                if name in made:
                    key = (name, piece.head)
                    sums[key] = sums[key] + made[name] if key in sums else made[name]
        for name in ("dsink", "dbias"):
            found = [t for (n, _), t in sums.items() if n == name]
            if found:
                results[name] = found
        return results

    def _piece(self, piece: _Piece, dtype: torch.dtype) -> Gradients:
        x, case = self.inputs, self.case
        q, dout = (_take(t, piece, piece.heads, case.packed).detach().to(dtype) for t in (x.q, x.dout))
        k, v = (_take(t, piece, piece.head, case.packed).detach().to(dtype) for t in (x.k, x.v))
        sink = None if x.sink is None else x.sink.detach()[piece.heads].to(dtype)
        slopes = None if x.slopes is None else x.slopes[piece.heads]
        bias = None if x.bias is None else x.bias.detach()[0, piece.heads].to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        seqlen_q, seqlen_k = q.shape[1], k.shape[0]
        sums = {"dk": torch.zeros_like(k, dtype=wide), "dv": torch.zeros_like(v, dtype=wide)}
        if sink is not None:
            sums["dsink"] = torch.zeros_like(sink, dtype=wide)
        if bias is not None:
            sums["dbias"] = torch.zeros_like(bias, dtype=wide)
        outs, dqs = [], []
        step = max(1, SCORE_BLOCK // max(1, q.shape[0] * seqlen_k))
        for first in range(0, seqlen_q, step):
            last = min(first + step, seqlen_q) - 1
            keys = _key_range(case, first, last, seqlen_q, seqlen_k)
            with torch.enable_grad():
                leaves = {"dq": q[:, first : last + 1], "dk": k[keys], "dv": v[keys]}
                if sink is not None:
                    leaves["dsink"] = sink
                if bias is not None:
                    leaves["dbias"] = bias[:, first : last + 1, keys]
                leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
                out = attend(
                    case, leaves["dq"], leaves["dk"], leaves["dv"], first, keys, seqlen_q, seqlen_k, slopes,
                    leaves.get("dsink"), leaves.get("dbias"),
                )  # fmt: skip
                grads = torch.autograd.grad(out, list(leaves.values()), dout[:, first : last + 1])
            made = dict(zip(leaves, grads, strict=True))
            outs.append(out.detach())
            dqs.append(made["dq"])
            sums["dk"][keys] += made["dk"]
            sums["dv"][keys] += made["dv"]
            if "dsink" in sums:
                sums["dsink"] += made["dsink"]
            if "dbias" in sums:
                sums["dbias"][:, first : last + 1, keys] += made["dbias"]
        return {"out": torch.cat(outs, 1), "dq": torch.cat(dqs, 1), **sums}

    def _error(self, name: str, values: Sequence[Tensor]) -> Error:
        worst, total, squares, count = 0.0, 0.0, 0.0, 0
        for got, want in zip(values, self.exact[name], strict=True):
            diff = (got.double() - want).abs()
            # A NaN is an error of any size: it must not vanish in a maximum.
            diff = diff.nan_to_num(nan=float("inf"))
            worst = max(worst, diff.max().item())
            total += diff.sum().item()
            squares += diff.square().sum().item()
            count += diff.numel()
        return Error(worst, total / count, (squares / count) ** 0.5)

    def _cut(self, results: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """The checked pieces of a peer's canonical tensors."""
        packed = self.case.packed
        cut: dict[str, list[Tensor]] = {}
        for name, tensor in results.items():
            if name in ("out", "dq"):
                cut[name] = [_take(tensor, p, p.heads, packed) for p in self.pieces]
            elif name in ("dk", "dv"):
                cut[name] = [_take(tensor, p, p.head, packed) for p in self.pieces]
            else:
                heads = dict.fromkeys((p.heads.start, p.heads.stop) for p in self.pieces)
                source = tensor[0] if name == "dbias" else tensor
                cut[name] = [source[start:stop] for start, stop in heads]
        return cut

    def compare(self, results: Mapping[str, Tensor], ours: bool) -> Check:
        """Compare a peer's tensors with fp64.

        Args:
            results: Canonical tensors by name: out, and any of dq, dk, dv, dsink, dbias.
            ours: Hold it to our own budget, mean included, instead of the wide one for peers.

        Returns:
            The outcome; never raises for a wrong result.
        """
        errors = {name: self._error(name, values) for name, values in self._cut(results).items()}
        eps = torch.finfo(self.inputs.dtype).eps
        if self.inputs.dtype == torch.float32:
            # Two right fp32 sums of D terms in different orders differ by about sqrt(D) roundings. Products of half
            # precision are summed in fp32, where that disappears beside the rounding of their inputs.
            eps *= self.case.head_dim**0.5
        outcomes = []
        for name, error in errors.items():
            top = max(t.abs().max().item() for t in self.exact[name])
            mean = sum(t.abs().sum().item() for t in self.exact[name]) / sum(t.numel() for t in self.exact[name])
            budget = (OURS_MAX if ours else PEER_MAX) * self.eager[name].max + eps * top
            mean_budget = OURS_MEAN * self.eager[name].mean + eps * mean
            ok = error.max <= budget and (not ours or error.mean <= mean_budget)
            outcomes.append((ok, error.max / budget if budget else 0.0, name, error.max, budget))
        ok = all(o[0] for o in outcomes)
        red = [o for o in outcomes if not o[0]] or outcomes
        _, _, name, max_err, budget = max(red, key=lambda o: o[1])
        eager = self.eager[name].max
        return Check(ok, max_err, budget, max_err / eager if eager else 0.0, name, errors)


def dropout_is_plausible(ones_out: Tensor, ones_dv: Tensor) -> str | None:
    """Whether dropout with v = 1 and dout = 1 behaves as dropout must.

    Args:
        ones_out: The output for v = 1; each row is the sum of what was kept, 1 on average.
        ones_dv: The gradient of v for dout = 1; its sum is that of the output when both passes drop the same entries.

    Returns:
        None, or what is wrong.
    """
    mean = ones_out.double().mean().item()
    spread = ones_out.double().std().item()
    grads = ones_dv.double().sum().item() / ones_out.numel()
    if not abs(mean - 1) < 0.05:
        return f"dropout changes the mean: rows of weights sum to {mean:.3f} on average"
    if not spread > 1e-4:
        return "dropout drops nothing"
    if not abs(grads - mean) < 0.02:
        return f"dropout differs between the passes: the forward kept {mean:.3f}, the backward {grads:.3f}"
    return None
