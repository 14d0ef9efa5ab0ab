"""FlashSelfAttention and FlashCrossAttention against dense attention written out in plain torch."""

import copy
import gc
import io
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashtri_modules.attention as attention
from flashtri_modules import FlashCrossAttention, FlashSelfAttention, standard_alibi_slopes

E = 24
LENGTHS = [7, 0, 4, 1]

# (device, dtype, atol): on a GPU the kernels run, on a CPU the exact path does; fp64 leaves no room for a wrong term.
PLACES = [("cpu", torch.float64, 1e-10), ("cpu", torch.float32, 2e-5)]
if torch.cuda.is_available():
    PLACES.append(pytest.param("cuda", torch.float16, 2e-2, marks=pytest.mark.gpu))
DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))

SETTINGS = {
    "plain": {},
    "causal": {"causal": True},
    "gqa": {"num_kv_heads": 2, "causal": True},
    "mqa-no-bias": {"num_kv_heads": 1, "bias": False},
    "head-dim": {"head_dim": 10},
    "scale": {"softmax_scale": 0.3},
    "window": {"window_size": (2, 1)},
    "causal-window": {"causal": True, "window_size": (2, -1)},
    "softcap": {"softcap": 0.5, "causal": True},
    "alibi": {"alibi": True, "causal": True},
    "alibi-own": {"alibi": [1.0, 0.5, 0.25, 0.0]},
    "sink": {"sink": True},
    "all": {"num_kv_heads": 2, "causal": True, "window_size": (3, -1), "softcap": 0.7, "alibi": True, "sink": True},
}


def dense_attention(
    layer: attention._Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
) -> Tensor:
    """One sequence: q (N, Hq, D), k and v (M, Hk, D) -> (N, Hq D). Every definition written out, none imported."""
    (n, heads, dim), m = q.shape, k.shape[0]
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (layer.softmax_scale or dim**-0.5)
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    # How many keys to the right of its own position a key stands; the last query's own position is the last key.
    right_of = torch.arange(m, device=q.device)[None] - torch.arange(n, device=q.device)[:, None] - (m - n)
    if layer.alibi_slopes is not None:
        scores = scores - layer.alibi_slopes.to(scores)[:, None, None] * right_of.abs()
    if attn_bias is not None:
        scores = scores + attn_bias
    left, right = layer.window_size
    keep = torch.ones_like(right_of, dtype=torch.bool)
    keep &= (right_of <= 0) if layer.causal else keep
    keep &= (right_of >= -left) if left >= 0 else keep
    keep &= (right_of <= right) if right >= 0 else keep
    if attn_mask is not None:
        keep = keep & attn_mask
    logits = scores.masked_fill(~keep, -math.inf)
    if layer.sink is not None:
        logits = torch.cat([logits, layer.sink[:, None, None].expand(heads, n, 1)], dim=-1)
    blind = (logits == -math.inf).all(-1, keepdim=True)
    probabilities = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)[..., :m]
    return torch.einsum("hnm,mhd->nhd", probabilities, v).flatten(1)


def expected_self(layer: FlashSelfAttention, x: Tensor, **masks: Tensor | None) -> Tensor:
    """One sequence `(N, E)` through the layer's own weights and dense attention."""
    hq, hk = layer.num_heads, layer.num_kv_heads
    q, k, v = layer.qkv_proj(x).unflatten(-1, (-1, layer.head_dim)).split([hq, hk, hk], dim=-2)
    return layer.out_proj(dense_attention(layer, q, k, v, **masks))


def expected_cross(layer: FlashCrossAttention, x: Tensor, context: Tensor, **masks: Tensor | None) -> Tensor:
    q = layer.q_proj(x).unflatten(-1, (-1, layer.head_dim))
    k, v = layer.kv_proj(context).unflatten(-1, (-1, layer.head_dim)).chunk(2, dim=-2)
    return layer.out_proj(dense_attention(layer, q, k, v, **masks))


def make(cls: type, device: str, dtype: torch.dtype, **settings: object) -> tuple[nn.Module, nn.Module]:
    """The layer, and a copy of it in fp64 for the dense computation."""
    torch.manual_seed(0)
    layer = cls(E, 4, **settings).to(device, dtype)
    if layer.sink is not None:
        nn.init.normal_(layer.sink)
    return layer, copy.deepcopy(layer).double()


def assert_same(layer: nn.Module, exact: nn.Module, pairs: list[tuple[Tensor, Tensor]], atol: float) -> None:
    """Outputs `pairs[0]` agree, and after a backward pass the gradients of the inputs `pairs[1:]` and of parameters."""
    (out, want), inputs = pairs[0], pairs[1:]
    torch.testing.assert_close(out.double(), want, atol=atol, rtol=0)
    torch.manual_seed(1)
    gradient = torch.randn(out.shape, dtype=torch.float64).to(out.device) / out.shape[0]
    out.backward(gradient.to(out.dtype))
    want.backward(gradient)
    for got, reference in inputs:
        torch.testing.assert_close(got.grad.double(), reference.grad, atol=atol, rtol=0)
    for (name, got), reference in zip(layer.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(
            got.grad.double(), reference.grad, atol=atol, rtol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def leaf(*shape: int, device: str, dtype: torch.dtype, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Random values as a leaf in `dtype`, and the same values as a leaf in fp64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return x.requires_grad_(), x.detach().double().requires_grad_()


def cu_seqlens(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(("device", "dtype", "atol"), PLACES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
class TestSelf:
    def test_dense(self, settings: dict, device: str, dtype: torch.dtype, atol: float) -> None:
        layer, exact = make(FlashSelfAttention, device, dtype, **settings)
        x, x64 = leaf(2, 9, E, device=device, dtype=dtype)
        want = torch.stack([expected_self(exact, sequence) for sequence in x64])
        assert_same(layer, exact, [(layer(x), want), (x, x64)], atol)

    def test_padded(self, settings: dict, device: str, dtype: torch.dtype, atol: float) -> None:
        layer, exact = make(FlashSelfAttention, device, dtype, **settings)
        x, x64 = leaf(4, 7, E, device=device, dtype=dtype)
        rows = []
        for sequence, length in zip(x64, LENGTHS, strict=True):
            nothing = exact.out_proj(x64.new_zeros(7 - length, exact.num_heads * exact.head_dim))
            rows.append(torch.cat([expected_self(exact, sequence[:length]), nothing]))
        out = layer(x, lengths=torch.tensor(LENGTHS, device=device))
        assert_same(layer, exact, [(out, torch.stack(rows)), (x, x64)], atol)

    def test_packed(self, settings: dict, device: str, dtype: torch.dtype, atol: float) -> None:
        layer, exact = make(FlashSelfAttention, device, dtype, **settings)
        x, x64 = leaf(sum(LENGTHS), E, device=device, dtype=dtype)
        want = torch.cat([expected_self(exact, sequence) for sequence in x64.split(LENGTHS)])
        out = layer(x, cu_seqlens=cu_seqlens(LENGTHS, device), max_seqlen=max(LENGTHS))
        assert_same(layer, exact, [(out, want), (x, x64)], atol)


@pytest.mark.parametrize(("device", "dtype", "atol"), PLACES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
class TestCross:
    CONTEXT_LENGTHS = (3, 5, 9, 0)

    def test_dense(self, settings: dict, device: str, dtype: torch.dtype, atol: float) -> None:
        layer, exact = make(FlashCrossAttention, device, dtype, context_dim=10, **settings)
        (x, x64), (c, c64) = (leaf(2, n, e, device=device, dtype=dtype, seed=n) for n, e in ((6, E), (9, 10)))
        want = torch.stack([expected_cross(exact, a, b) for a, b in zip(x64, c64, strict=True)])
        assert_same(layer, exact, [(layer(x, c), want), (x, x64), (c, c64)], atol)

    def test_padded(self, settings: dict, device: str, dtype: torch.dtype, atol: float) -> None:
        layer, exact = make(FlashCrossAttention, device, dtype, context_dim=10, **settings)
        (x, x64), (c, c64) = (leaf(4, n, e, device=device, dtype=dtype, seed=n) for n, e in ((7, E), (9, 10)))
        rows = []
        for a, b, n, m in zip(x64, c64, LENGTHS, self.CONTEXT_LENGTHS, strict=True):
            nothing = exact.out_proj(x64.new_zeros(7 - n, exact.num_heads * exact.head_dim))
            rows.append(torch.cat([expected_cross(exact, a[:n], b[:m]), nothing]))
        lengths, context_lengths = (torch.tensor(t, device=device) for t in (LENGTHS, self.CONTEXT_LENGTHS))
        out = layer(x, c, lengths=lengths, context_lengths=context_lengths)
        assert_same(layer, exact, [(out, torch.stack(rows)), (x, x64), (c, c64)], atol)

    def test_packed(self, settings: dict, device: str, dtype: torch.dtype, atol: float) -> None:
        layer, exact = make(FlashCrossAttention, device, dtype, context_dim=10, **settings)
        shapes = ((sum(LENGTHS), E), (sum(self.CONTEXT_LENGTHS), 10))
        (x, x64), (c, c64) = (leaf(n, e, device=device, dtype=dtype, seed=n) for n, e in shapes)
        pieces = zip(x64.split(LENGTHS), c64.split(self.CONTEXT_LENGTHS), strict=True)
        want = torch.cat([expected_cross(exact, a, b) for a, b in pieces])
        out = layer(
            x, c, cu_seqlens=cu_seqlens(LENGTHS, device), max_seqlen=max(LENGTHS),
            context_cu_seqlens=cu_seqlens(list(self.CONTEXT_LENGTHS), device),
            context_max_seqlen=max(self.CONTEXT_LENGTHS),
        )  # fmt: skip
        assert_same(layer, exact, [(out, want), (x, x64), (c, c64)], atol)


@pytest.mark.parametrize(("device", "dtype", "atol"), PLACES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_mask_and_bias(device: str, dtype: torch.dtype, atol: float, padded: bool, causal: bool) -> None:
    layer, exact = make(FlashSelfAttention, device, dtype, causal=causal)
    x, x64 = leaf(4, 7, E, device=device, dtype=dtype)
    bias, bias64 = leaf(4, 7, 7, device=device, dtype=dtype, seed=5)
    mask = (torch.rand(4, 1, 7, 7, generator=torch.Generator().manual_seed(6)) < 0.7).to(device)
    lengths = LENGTHS if padded else [7] * 4
    rows = []
    for sequence, keep, n in zip(x64, mask, lengths, strict=True):
        got = expected_self(exact, sequence[:n], attn_mask=keep[:, :n, :n], attn_bias=bias64[:, :n, :n])
        rows.append(torch.cat([got, exact.out_proj(x64.new_zeros(7 - n, E))]))
    out = layer(x, attn_mask=mask, attn_bias=bias, lengths=torch.tensor(lengths, device=device) if padded else None)
    assert_same(layer, exact, [(out, torch.stack(rows)), (x, x64), (bias, bias64)], atol)


@pytest.mark.parametrize(("device", "dtype", "atol"), PLACES)
def test_packed_mask_and_bias(device: str, dtype: torch.dtype, atol: float) -> None:
    layer, exact = make(FlashSelfAttention, device, dtype, causal=True)
    x, x64 = leaf(sum(LENGTHS), E, device=device, dtype=dtype)
    bias, bias64 = leaf(4, 7, 7, device=device, dtype=dtype, seed=5)
    mask = (torch.rand(7, 7, generator=torch.Generator().manual_seed(6)) < 0.7).to(device)
    want = torch.cat(
        [
            expected_self(exact, s, attn_mask=mask[:n, :n], attn_bias=bias64[:, :n, :n])
            for s, n in zip(x64.split(LENGTHS), LENGTHS, strict=True)
        ]
    )
    out = layer(x, cu_seqlens=cu_seqlens(LENGTHS, device), max_seqlen=7, attn_mask=mask, attn_bias=bias)
    assert_same(layer, exact, [(out, want), (x, x64), (bias, bias64)], atol)


@pytest.mark.parametrize("lengths", [(3, 3), (2, 3)])
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"window_size": (1, 0), "alibi": True}])
def test_cross_mask_with_lengths(settings: dict, lengths: tuple[int, int]) -> None:
    """With a mask, too, the last real token of `x` stands at the last real token of `context`."""
    layer, exact = make(FlashCrossAttention, "cpu", torch.float64, **settings)
    (x, x64), (c, c64) = (leaf(2, n, E, device="cpu", dtype=torch.float64, seed=n) for n in (3, 5))
    mask = torch.ones(3, 5, dtype=torch.bool).tril(1)
    rows = []
    for a, b, n, m in zip(x64, c64, lengths, (5, 2), strict=True):
        seen = expected_cross(exact, a[:n], b[:m], attn_mask=mask[:n, :m])
        rows.append(torch.cat([seen, exact.out_proj(x64.new_zeros(3 - n, E))]))
    out = layer(x, c, lengths=torch.tensor(lengths), context_lengths=torch.tensor([5, 2]), attn_mask=mask)
    assert_same(layer, exact, [(out, torch.stack(rows)), (x, x64), (c, c64)], 1e-10)


def test_equals_torch_multihead_attention_with_the_same_weights() -> None:
    reference = nn.MultiheadAttention(E, 4, batch_first=True, dtype=torch.float64)
    nn.init.normal_(reference.in_proj_bias)
    layer = FlashSelfAttention(E, 4, causal=True, dtype=torch.float64)
    layer.qkv_proj.load_state_dict({"weight": reference.in_proj_weight, "bias": reference.in_proj_bias})
    layer.out_proj.load_state_dict(reference.out_proj.state_dict())
    x = torch.randn(2, 9, E, dtype=torch.float64)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    torch.testing.assert_close(layer(x), reference(x, x, x, attn_mask=hidden)[0])


def test_padding_is_never_read() -> None:
    layer = FlashSelfAttention(E, 4, causal=True)
    x = torch.randn(2, 8, E)
    clean = layer(x, lengths=torch.tensor([3, 8]))
    x[0, 3:] = torch.nan
    poisoned = layer(x, lengths=torch.tensor([3, 8]))
    assert torch.equal(poisoned[0, :3], clean[0, :3])
    assert torch.equal(poisoned[1], clean[1])


def test_query_key_value_are_views_of_one_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, ...]] = []
    for name in ("flash_attn", "flash_attn_varlen"):
        real = getattr(attention, name)
        monkeypatch.setattr(
            attention,
            name,
            lambda q, k, v, *args, _real=real, **kw: seen.append((q, k, v)) or _real(q, k, v, *args, **kw),
        )
    layer = FlashSelfAttention(E, 4, num_kv_heads=2)
    x = torch.randn(2, 8, E)
    layer(x)
    layer(x, lengths=torch.tensor([8, 2]))
    layer(x[0], cu_seqlens=torch.tensor([0, 8], dtype=torch.int32), max_seqlen=8)
    assert len(seen) == 3
    for tensors in seen:
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
        assert all(t.stride(-1) == 1 for t in tensors)


def test_blind_rows_leave_the_shared_weights_finite() -> None:
    """pytorch#41508, pytorch#103963: one fully masked row turned every shared weight's gradient into NaN."""
    layer, exact = make(FlashCrossAttention, "cpu", torch.float64, causal=True)
    (x, x64), (c, c64) = (leaf(2, n, E, device="cpu", dtype=torch.float64, seed=n) for n in (8, 4))
    out = layer(x, c)  # Queries 0..3 of 8 stand before the first of 4 keys.
    assert torch.equal(out[:, :4], layer.out_proj.bias.expand(2, 4, E))
    out[:, 4:].sum().backward()
    torch.stack([expected_cross(exact, a[4:], b) for a, b in zip(x64, c64, strict=True)]).sum().backward()
    for got, want in zip(layer.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    torch.testing.assert_close(x.grad, x64.grad)


class TestDropout:
    def make(self) -> tuple[FlashSelfAttention, Tensor]:
        torch.manual_seed(0)
        return FlashSelfAttention(E, 4, dropout_p=0.5), torch.randn(2, 16, E)

    def test_off_in_eval(self) -> None:
        """transformers#33844: dropout was still on in eval."""
        layer, x = self.make()
        layer.eval()
        assert torch.equal(layer(x), layer(x))
        without = copy.deepcopy(layer)
        without.dropout_p = 0.0
        assert torch.equal(layer(x), without.train()(x))

    def test_back_on_after_eval(self) -> None:
        """Megatron-LM#411: after one eval pass dropout stayed off for good."""
        layer, x = self.make()
        quiet = layer.eval()(x)
        layer.train()
        first, second = layer(x), layer(x)
        assert not torch.equal(first, quiet)
        assert not torch.equal(first, second)

    def test_follows_the_seed(self) -> None:
        layer, x = self.make()
        runs = []
        for _ in range(2):
            torch.manual_seed(7)
            runs.append(layer(x))
        assert torch.equal(*runs)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_checkpoint(use_reentrant: bool, packed: bool, dropout_p: float) -> None:
    """flash-attention#341, pytorch#103726: checkpointing raised on saved tensors that are neither input nor output."""
    layer = FlashSelfAttention(E, 4, causal=True, dropout_p=dropout_p)
    kwargs = {"cu_seqlens": cu_seqlens([5, 3], "cpu"), "max_seqlen": 5} if packed else {}
    x = torch.randn(8, E) if packed else torch.randn(2, 8, E)
    gradients = []
    for checkpointed in (False, True):
        layer.zero_grad()
        leaf_x = x.clone().requires_grad_()
        torch.manual_seed(3)
        out = (
            checkpoint(lambda t: layer(t, **kwargs), leaf_x, use_reentrant=use_reentrant)
            if checkpointed
            else layer(leaf_x, **kwargs)
        )
        out.square().sum().backward()
        gradients.append([leaf_x.grad, *(p.grad for p in layer.parameters())])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "padded"])
def test_operations_are_counted_once_and_for_the_layer(lengths: list[int] | None) -> None:
    """By torch's FlopCounterMode: grouped heads, of 6; two products forward, five backward; padding attends to nothing."""
    layer = FlashSelfAttention(E, 4, num_kv_heads=2, causal=True)
    x = torch.randn(4, 7, E, requires_grad=True)
    with FlopCounterMode(display=False) as mode:
        layer(x, lengths=None if lengths is None else torch.tensor(lengths)).sum().backward()
    counts = mode.get_flop_counts()["FlashSelfAttention"]
    pairs = 4 * sum(n * n for n in lengths or [7] * 4)
    assert counts.pop(torch.ops.flashtri.fwd) == 2 * pairs * 2 * 6
    assert counts.pop(torch.ops.flashtri.bwd) == 2 * pairs * 5 * 6
    projections = 2 * (4 * 7) * E * (2 * E + E)  # E to 4 and 2 * 2 heads of 6, and back
    assert sum(counts.values()) == 3 * projections  # a product forward, two backward, and no other matmul


def test_checkpointed_attention_leaks_nothing() -> None:
    """pytorch#161186: as last operation of a checkpointed region, a function leaked its saved outputs at each step."""
    layer = FlashSelfAttention(E, 4)
    x = torch.randn(2, 8, E, requires_grad=True)

    def live_tensors(steps: int) -> int:
        for _ in range(steps):
            checkpoint(layer, x, use_reentrant=False).sum().backward()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    live_tensors(3)
    gc.collect()
    gc.disable()  # What only the collector would free counts as leaked.
    try:
        assert live_tensors(20) <= live_tensors(1)
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestFullSize:
    """Sizes at which the kernels loop over tiles; on Hopper `impl="auto"` is the Hopper kernel where it fits."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("settings", ["plain", "causal", "gqa", "window", "alibi", "sink", "all"])
    @pytest.mark.parametrize("form", ["dense", "padded"])
    def test_self(self, form: str, settings: str, head_dim: int, dtype: torch.dtype) -> None:
        layer, exact = make(FlashSelfAttention, "cuda", dtype, head_dim=head_dim, **SETTINGS[settings])
        x, x64 = leaf(2, 777, E, device="cuda", dtype=dtype)
        lengths = torch.tensor([777, 333], device="cuda") if form == "padded" else None
        used = (777, 333) if form == "padded" else (777, 777)
        width = exact.num_heads * head_dim
        rows = [
            torch.cat([expected_self(exact, a[:n]), exact.out_proj(x64.new_zeros(777 - n, width))])
            for a, n in zip(x64, used, strict=True)
        ]
        atol = 5e-2 if dtype == torch.bfloat16 else 1e-2
        out, want = layer(x, lengths=lengths), torch.stack(rows)
        torch.testing.assert_close(out.double(), want, atol=atol, rtol=0)
        gradient = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to("cuda", torch.float64)
        out.backward(gradient.to(dtype))
        want.backward(gradient)
        pairs = [(x, x64), *zip(layer.parameters(), exact.parameters(), strict=True)]
        for got, reference in pairs:
            error = (got.grad.double() - reference.grad).norm() / reference.grad.norm()
            assert error < atol, f"shape {tuple(got.shape)}: off by {error:.3f} of its norm"

    def test_memory_of_checkpointed_attention_is_flat(self) -> None:
        """pytorch#161186, in bytes of GPU memory."""
        layer = FlashSelfAttention(256, 4, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(2, 512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        allocated = []
        for _ in range(50):
            checkpoint(layer, x, use_reentrant=False).sum().backward()
            allocated.append(torch.cuda.memory_allocated())
        assert max(allocated[2:]) == allocated[2]


@pytest.mark.parametrize("device", DEVICES)
def test_fp32_weights_under_autocast(device: str) -> None:
    """transformers#35945, unsloth#827: fp32 weights under autocast were refused."""
    layer = FlashSelfAttention(E, 4, causal=True, sink=True, alibi=True)
    x = torch.randn(2, 8, E)
    want = layer(x)
    layer, x = layer.to(device), x.to(device)
    with torch.autocast(device, torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float().cpu(), want, atol=2e-2, rtol=0)
    out.float().square().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_autocast_casts_inputs(given: torch.dtype, weights: torch.dtype) -> None:
    """Refused without it, and float64 with it: that autocast leaves alone."""
    x = torch.randn(2, 8, E, dtype=given)
    attend = FlashSelfAttention(E, 4, dtype=weights)
    cross = FlashCrossAttention(E, 4, dtype=weights)
    for layer, inputs in ((attend, (x,)), (cross, (x, x.float())), (cross, (x.float(), x))):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(*inputs).dtype == torch.bfloat16
            with pytest.raises(TypeError, match=f"must have the dtype of .*weight, {weights}, got torch.float64$"):
                layer(*(y.double() for y in inputs))
        if {y.dtype for y in inputs} != {weights}:
            with pytest.raises(TypeError, match=f"must have the dtype of .*weight, {weights}, got"):
                layer(*inputs)


@pytest.mark.parametrize("way", ["hook", "subclass", "parametrised"])
def test_projections_may_cast(way: str) -> None:
    """What sharding with mixed precision, adapters and quantised weights do is theirs."""

    class Casting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.half()

    layer = FlashSelfAttention(E, 4, bias=False)
    x = torch.randn(2, 8, E).half()
    if way == "hook":
        layer.qkv_proj.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    elif way == "subclass":
        layer.qkv_proj = Casting(E, 3 * E, bias=False)
    else:
        for projection in (layer.qkv_proj, layer.out_proj):
            nn.utils.parametrize.register_parametrization(projection, "weight", Halved(), unsafe=True)
    assert layer(x).dtype == (torch.float16 if way == "parametrised" else torch.float32)


@pytest.mark.parametrize("form", ["dense", "padded", "packed"])
def test_compile_fullgraph_without_a_recompile_per_length(form: str) -> None:
    torch._dynamo.reset()
    layer = FlashSelfAttention(E, 4, num_kv_heads=2, causal=True, alibi=True, sink=True, window_size=(5, -1))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    compiled_graphs = []
    for n in (8, 11, 17, 30):
        x = torch.randn(n, E) if form == "packed" else torch.randn(2, n, E)
        kwargs = {
            "dense": {},
            "padded": {"lengths": torch.tensor([n, n // 2])},
            "packed": {"cu_seqlens": cu_seqlens([n - 3, 3], "cpu"), "max_seqlen": n},
        }[form]
        results = []
        for module in (layer, compiled):
            layer.zero_grad()
            leaf_x = x.clone().requires_grad_()
            out = module(leaf_x, **kwargs)
            out.square().sum().backward()
            results.append([out, leaf_x.grad, *(p.grad for p in layer.parameters())])
        for eager, got in zip(*results, strict=True):
            torch.testing.assert_close(got, eager)
        compiled_graphs.append(counter.frame_count)
    assert len(set(compiled_graphs)) == 1


def test_export_with_dynamic_batch_and_length() -> None:
    """pytorch#110563: symbolic sizes reached code that wanted plain integers."""
    layer = FlashSelfAttention(E, 4, causal=True).eval()
    dynamic = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=4096)}
    program = torch.export.export(layer, (torch.randn(3, 8, E),), dynamic_shapes={"x": dynamic})
    for shape in ((1, 5, E), (4, 19, E)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), layer(x))


class TestModule:
    def test_state_dict_is_stable(self) -> None:
        layer = FlashSelfAttention(E, 4, num_kv_heads=2, head_dim=8, alibi=True, sink=True)
        assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == {
            "qkv_proj.weight": (64, E), "qkv_proj.bias": (64,), "out_proj.weight": (E, 32), "out_proj.bias": (E,),
            "alibi_slopes": (4,), "sink": (4,),
        }  # fmt: skip
        layer = FlashCrossAttention(E, 4, context_dim=10, bias=False)
        assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == {
            "q_proj.weight": (E, E), "kv_proj.weight": (2 * E, 10), "out_proj.weight": (E, E),
        }  # fmt: skip

    @pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "save"])
    def test_copies_compute_the_same(self, way: str) -> None:
        settings = {"causal": True, "sink": True, "alibi": True, "window_size": (3, 0), "softcap": 2.0}
        layer = FlashSelfAttention(E, 4, **settings)
        nn.init.normal_(layer.sink)
        if way == "state_dict":
            other = FlashSelfAttention(E, 4, **settings)
            other.load_state_dict(layer.state_dict())
        elif way == "deepcopy":
            other = copy.deepcopy(layer)
        elif way == "pickle":
            other = pickle.loads(pickle.dumps(layer))
        else:
            file = io.BytesIO()
            torch.save(layer, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        x = torch.randn(2, 9, E)
        assert torch.equal(layer(x), other(x))

    def test_slopes_stay_fp32(self) -> None:
        layer = FlashSelfAttention(E, 12, alibi=True)  # Among them 2^-0.5, which bf16 would round.
        for converted in (layer.bfloat16(), layer.to("cpu", torch.float64)):
            assert layer.qkv_proj.weight.dtype != torch.float32
            assert converted.alibi_slopes.dtype == torch.float32
            assert torch.equal(converted.alibi_slopes, standard_alibi_slopes(12))

    def test_meta_device(self) -> None:
        layer = FlashSelfAttention(E, 4, alibi=[1.0, 2.0, 3.0, 4.0], sink=True, device="meta")
        assert {t.device.type for t in layer.state_dict().values()} == {"meta"}
        layer.to_empty(device="cpu")
        for tensor in layer.state_dict().values():
            tensor.fill_(torch.nan)
        layer.reset_parameters()
        assert layer.alibi_slopes.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert layer.sink.tolist() == [0.0] * 4
        assert layer(torch.randn(1, 5, E)).isfinite().all()

    def test_extra_repr(self) -> None:
        assert FlashSelfAttention(E, 4).extra_repr() == "embed_dim=24, num_heads=4, head_dim=6"
        layer = FlashCrossAttention(
            E, 4, context_dim=10, num_kv_heads=2, causal=True, window_size=(8, 0), alibi=True, sink=True, dropout_p=0.1
        )
        assert layer.extra_repr() == (
            "embed_dim=24, num_heads=4, num_kv_heads=2, head_dim=6, causal=True, window_size=(8, 0), dropout_p=0.1, "
            "alibi=True, sink=True, context_dim=10"
        )

    def test_empty_batch_and_empty_sequence(self) -> None:
        layer = FlashSelfAttention(E, 4, causal=True)
        assert layer(torch.randn(0, 5, E)).shape == (0, 5, E)
        assert layer(torch.randn(2, 0, E)).shape == (2, 0, E)
        assert layer(torch.randn(0, 5, E), lengths=torch.zeros(0, dtype=torch.int32)).shape == (0, 5, E)


def test_standard_alibi_slopes() -> None:
    assert standard_alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    # 12 heads: the 8 slopes of 8 heads, then the odd ones (first, third, ...) of 16 heads.
    expected = [2.0**-i for i in range(1, 9)] + [2.0**-e for e in (0.5, 1.5, 2.5, 3.5)]
    torch.testing.assert_close(standard_alibi_slopes(12), torch.tensor(expected))
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        standard_alibi_slopes(0)


BAD_SETTINGS = [
    ({"embed_dim": 0, "num_heads": 1}, "embed_dim must be at least 1, got 0"),
    ({"embed_dim": 8, "num_heads": 0}, "num_heads must be at least 1, got 0"),
    ({"embed_dim": 8, "num_heads": 2, "num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
    ({"embed_dim": 8, "num_heads": 4, "num_kv_heads": 3}, "multiple of num_kv_heads, got 4 and 3"),
    ({"embed_dim": 10, "num_heads": 4}, "embed_dim must be a multiple of num_heads, got 10 and 4; or give head_dim"),
    ({"embed_dim": 10, "num_heads": 4, "head_dim": 257}, "head_dim must be between 1 and 256, got 257"),
    ({"embed_dim": 8, "num_heads": 4, "dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1.0"),
    ({"embed_dim": 8, "num_heads": 4, "alibi": [1.0]}, r"num_heads = 4 slopes, got shape \(1,\)"),
    ({"embed_dim": 8, "num_heads": 4, "softmax_scale": float("nan")}, "softmax_scale must be finite, got nan"),
    ({"embed_dim": 8, "num_heads": 4, "softcap": -1.0}, "softcap must be finite and >= 0"),
    ({"embed_dim": 8, "num_heads": 4, "window_size": (-5, 0)}, "window_size: left must be >= -1"),
    ({"embed_dim": 8, "num_heads": 4, "impl": "cuda"}, "impl must be one of auto"),
]
BAD_KINDS = [
    ({"embed_dim": "8"}, "embed_dim must be an int, got str"),
    ({"num_heads": 4.0}, "num_heads must be an int, got float"),
    ({"num_heads": True}, "num_heads must be an int, got bool"),
    ({"num_kv_heads": 2.0}, "num_kv_heads must be an int, got float"),
    ({"head_dim": 8.5}, "head_dim must be an int, got float"),
    ({"bias": "no"}, "bias must be a bool, got str"),
    ({"causal": 1}, "causal must be a bool, got int"),
    ({"sink": 1}, "sink must be a bool, got int"),
    ({"softmax_scale": "1"}, "softmax_scale must be a float or None, got str"),
    ({"softcap": "30"}, "softcap must be a float, got str"),
    ({"dropout_p": None}, "dropout_p must be a float, got NoneType"),
    ({"window_size": 3}, "window_size must be a pair"),
    ({"deterministic": "x"}, "deterministic must be a bool, got str"),
    ({"alibi": "yes"}, "alibi must be True, False or num_heads = 4 slopes, got 'yes'"),
    ({"alibi": None}, "alibi must be True, False or num_heads = 4 slopes, got None"),
]


@pytest.mark.parametrize("cls", [FlashSelfAttention, FlashCrossAttention])
@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_bad_settings(cls: type, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**settings)


@pytest.mark.parametrize("cls", [FlashSelfAttention, FlashCrossAttention])
@pytest.mark.parametrize(("settings", "message"), BAD_KINDS)
def test_bad_kinds_of_settings(cls: type, settings: dict, message: str) -> None:
    """Refused when the layer is built, not when it first runs."""
    with pytest.raises(TypeError, match=message):
        cls(**({"embed_dim": 8, "num_heads": 4} | settings))


CU = torch.tensor([0, 8], dtype=torch.int32)
X, X2, MASK = torch.zeros(2, 4, E), torch.zeros(8, E), torch.ones(4, 4, dtype=torch.bool)
LEN = torch.tensor([1, 4])
NESTED = torch.nested.nested_tensor([torch.zeros(2, E), torch.zeros(3, E)], layout=torch.jagged)
PACKED = {"cu_seqlens": CU, "max_seqlen": 8}
BAD_SELF = [
    (
        {"x": X2},
        ValueError,
        r"x must be \(B, N, 24\), got shape \(8, 24\); packed input needs cu_seqlens and max_seqlen",
    ),
    ({"x": X[..., :5]}, ValueError, r"x must be \(B, N, 24\), got shape \(2, 4, 5\)"),
    ({"x": X, **PACKED}, ValueError, r"x must be \(total, 24\) with cu_seqlens"),
    ({"x": [1.0]}, TypeError, "x must be a float tensor, got list"),
    ({"x": X.int()}, TypeError, "x must be a float tensor, got torch.int32"),
    (
        {"x": X.half()},
        TypeError,
        r"x must have the dtype of qkv_proj.weight, torch.float32, got torch.float16 \(torch.autocast",
    ),
    ({"x": X.double()}, TypeError, "x must have the dtype of qkv_proj.weight, torch.float32, got torch.float64$"),
    (
        {"x": X2.bfloat16(), **PACKED},
        TypeError,
        "x must have the dtype of qkv_proj.weight, torch.float32, got torch.bfloat16",
    ),
    ({"x": X, "lengths": [1, 4]}, TypeError, "lengths must be a tensor of integers, got list"),
    ({"x": X, "lengths": LEN, "attn_mask": [True]}, TypeError, "attn_mask must be a tensor, got list"),
    ({"x": X2, "cu_seqlens": [0, 8], "max_seqlen": 8}, TypeError, "cu_seqlens_q must be an int32 tensor, got list"),
    ({"x": X2, "cu_seqlens": CU + 1, "max_seqlen": 8}, ValueError, "cu_seqlens_q must start at 0"),
    ({"x": X2, "cu_seqlens": CU, "max_seqlen": 7}, ValueError, "max_seqlen_q: the longest sequence"),
    ({"x": X2, "cu_seqlens": CU}, ValueError, "cu_seqlens and max_seqlen must be given together"),
    ({"x": X2, "max_seqlen": 8}, ValueError, "cu_seqlens and max_seqlen must be given together"),
    ({"x": NESTED}, TypeError, "x must be a plain tensor, got a nested one"),
    ({"x": X, "lengths": LEN.float()}, TypeError, "lengths must hold integers, got torch.float32"),
    ({"x": X, "lengths": LEN[:1]}, ValueError, r"lengths must have shape \(B,\) = \(2,\), got \(1,\)"),
    ({"x": X, "lengths": LEN + 1}, ValueError, r"lengths must be between 0 and the sequence length 4, got \[2, 5\]"),
    ({"x": X, "lengths": LEN.to("meta")}, ValueError, "lengths must be on the device of its sequences, cpu, got meta"),
    ({"x": X, "lengths": LEN - 2}, ValueError, "lengths must be between 0"),
    ({"x": X2, **PACKED, "lengths": LEN}, ValueError, "lengths describes a padded batch"),
    ({"x": X, "attn_mask": MASK.float()}, TypeError, "attn_mask"),
    ({"x": X, "attn_bias": MASK}, TypeError, "attn_bias"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_SELF)
def test_bad_self_input(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FlashSelfAttention(E, 4)(**arguments)


PACKED_PAIR = {**PACKED, "context_cu_seqlens": CU, "context_max_seqlen": 8}
BAD_CROSS = [
    ({"x": X2, "context": X}, ValueError, r"x must be \(B, N, 24\)"),
    ({"x": X, "context": X[..., :9]}, ValueError, r"context must be \(B, N, 24\), got shape \(2, 4, 9\)"),
    (
        {"x": X.half(), "context": X},
        TypeError,
        "x must have the dtype of q_proj.weight, torch.float32, got torch.float16",
    ),
    (
        {"x": X, "context": X.half()},
        TypeError,
        "context must have the dtype of kv_proj.weight, torch.float32, got torch.float16",
    ),
    ({"x": X, "context": [1.0]}, TypeError, "context must be a float tensor, got list"),
    ({"x": X, "context": X[:1]}, ValueError, "x and context must have the same batch size, got 2 and 1"),
    ({"x": X, "context": NESTED}, TypeError, "context must be a plain tensor, got a nested one"),
    ({"x": X2, "context": X2, **PACKED}, ValueError, "context_max_seqlen must be given together"),
    ({"x": X, "context": X, "lengths": LEN + 1}, ValueError, "lengths must be between 0 and the sequence length 4"),
    ({"x": X, "context": X, "context_lengths": LEN + 1}, ValueError, "context_lengths must be between 0"),
    ({"x": X, "context": X, "context_lengths": LEN.bool()}, TypeError, "context_lengths must hold integers"),
    (
        {"x": X2, "context": X2, **PACKED_PAIR, "context_lengths": LEN},
        ValueError,
        "context_lengths describe padded batches",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_CROSS)
def test_bad_cross_input(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FlashCrossAttention(E, 4)(**arguments)


def test_bad_context_dim() -> None:
    with pytest.raises(ValueError, match="context_dim must be at least 1, got 0"):
        FlashCrossAttention(E, 4, context_dim=0)
    with pytest.raises(TypeError, match="context_dim must be an int, got float"):
        FlashCrossAttention(E, 4, context_dim=8.0)
