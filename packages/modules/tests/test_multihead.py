"""FlashMultiheadAttention against the `nn.MultiheadAttention` whose weights it loads."""

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from torch import Tensor, nn

from flashtri_modules import FlashMultiheadAttention

N, L, S, E, H = 3, 5, 7, 16, 4
PLACES = [("cpu", torch.float64, 1e-10)]
if torch.cuda.is_available():
    PLACES.append(pytest.param(("cuda", torch.float16, 2e-2), marks=pytest.mark.gpu))


def pair(**settings: object) -> tuple[FlashMultiheadAttention, nn.MultiheadAttention]:
    """Ours, and torch's in fp64 with the same weights."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, dtype=torch.float64, **settings)
    if theirs.in_proj_bias is not None:
        nn.init.normal_(theirs.in_proj_bias)
    ours = FlashMultiheadAttention(E, H, dtype=torch.float64, **settings)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def compare(
    ours: FlashMultiheadAttention,
    theirs: nn.MultiheadAttention,
    inputs: tuple[Tensor, ...],
    place: tuple[str, torch.dtype, float],
    need_weights: bool = False,
    masks_of_theirs: dict | None = None,
    **masks: object,
) -> None:
    """Outputs, weights and every gradient, `inputs` being one tensor (self-attention), two (key is value) or three."""
    device, dtype, atol = place

    def run(module: nn.Module, dtype: torch.dtype, masks: dict, weights: bool) -> list[Tensor | None]:
        module = module.to(device, dtype)
        leaves = [x.detach().to(device, dtype).requires_grad_() for x in inputs]
        query, key, value = (leaves * 3 if len(leaves) == 1 else [*leaves, leaves[-1]])[:3]
        moved = {
            name: m.detach().to(device, dtype if m.is_floating_point() else m.dtype) if isinstance(m, Tensor) else m
            for name, m in masks.items()
        }
        biases = [m.requires_grad_() for m in moved.values() if isinstance(m, Tensor) and m.is_floating_point()]
        out, attention = module(query, key, value, need_weights=weights, **moved)
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
        out.backward(gradient)
        return [out, attention, *(x.grad for x in leaves + biases), *(p.grad for p in module.parameters())]

    got = run(ours, dtype, masks, need_weights)
    want = run(theirs, torch.float64, masks if masks_of_theirs is None else masks_of_theirs, need_weights)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, atol=atol, rtol=atol)


def inputs_for(form: str, batch_first: bool, kdim: int = E, vdim: int = E) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    lengths, features = (L, S, S), (E, kdim, vdim)
    shapes = [(N, n, e) if batch_first else (n, N, e) for n, e in zip(lengths, features, strict=True)]
    if form == "unbatched":
        shapes = list(zip(lengths, features, strict=True))
    count = {"self": 1, "kv": 2}.get(form, 3)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes[:count])


def test_is_the_same_module_but_for_forward() -> None:
    assert inspect.signature(FlashMultiheadAttention) == inspect.signature(nn.MultiheadAttention)
    assert inspect.signature(FlashMultiheadAttention.forward).parameters.keys() == (
        inspect.signature(nn.MultiheadAttention.forward).parameters.keys()
    )
    for settings in ({}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 3, "vdim": 9}):
        torch.manual_seed(4)
        ours = FlashMultiheadAttention(E, H, **settings)
        torch.manual_seed(4)
        theirs = nn.MultiheadAttention(E, H, **settings)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("form", ["self", "kv", "qkv", "unbatched"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"kdim": 10, "vdim": 12},
    ],
)
def test_equals_torch(
    settings: dict, form: str, batch_first: bool, need_weights: bool, place: tuple[str, torch.dtype, float]
) -> None:
    ours, theirs = pair(batch_first=batch_first, **settings)
    kdim, vdim = settings.get("kdim", E), settings.get("vdim", E)
    if kdim != E and form in ("self", "kv"):
        form = "qkv"
    compare(ours, theirs, inputs_for(form, batch_first, kdim, vdim), place, need_weights)


MASKS = {
    "bool": torch.rand(L, S, generator=torch.Generator().manual_seed(3)) < 0.3,
    "float": torch.randn(L, S, generator=torch.Generator().manual_seed(3), dtype=torch.float64),
    "bool-3d": torch.rand(N * H, L, S, generator=torch.Generator().manual_seed(3)) < 0.3,
    "float-3d": torch.randn(N * H, L, S, generator=torch.Generator().manual_seed(3), dtype=torch.float64),
    "float-inf": torch.zeros(L, S, dtype=torch.float64).masked_fill(torch.ones(L, S).triu(2).bool(), -torch.inf),
}
PADDING = {
    "bool": torch.arange(S) >= torch.tensor([[S], [3], [5]]),
    "float": torch.randn(N, S, generator=torch.Generator().manual_seed(5), dtype=torch.float64),
}
for masks in MASKS.values():
    masks[..., 0] = False  # torch gives NaN where a query sees nothing; those rows have tests of their own.


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask is deprecated")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("extra_keys", [False, True])
@pytest.mark.parametrize(
    ("mask", "padding"), [m for m in itertools.product([None, *MASKS], [None, *PADDING]) if any(m)]
)
def test_masks(
    mask: str | None, padding: str | None, extra_keys: bool, need_weights: bool, place: tuple[str, torch.dtype, float]
) -> None:
    ours, theirs = pair(batch_first=True, add_bias_kv=extra_keys, add_zero_attn=extra_keys)
    masks = {"attn_mask": MASKS.get(mask), "key_padding_mask": PADDING.get(padding)}
    compare(ours, theirs, inputs_for("kv", True), place, need_weights, **masks)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask_given", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("extra_keys", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(6, 6), (5, 7), (7, 5)])
def test_is_causal_is_top_left(
    seqlen_q: int,
    seqlen_k: int,
    extra_keys: bool,
    padded: bool,
    mask_given: bool,
    need_weights: bool,
    place: tuple[str, torch.dtype, float],
) -> None:
    ours, theirs = pair(batch_first=True, add_bias_kv=extra_keys, add_zero_attn=extra_keys)
    hidden = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).triu(1)
    padding = {"key_padding_mask": torch.arange(seqlen_k) >= torch.tensor([[seqlen_k], [1], [3]])} if padded else {}
    inputs = (torch.randn(N, seqlen_q, E, dtype=torch.float64), torch.randn(N, seqlen_k, E, dtype=torch.float64))
    compare(
        ours, theirs, inputs, place, need_weights, masks_of_theirs={"attn_mask": hidden, **padding},
        is_causal=True, **padding, **({"attn_mask": hidden} if mask_given else {}),
    )  # fmt: skip


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("unbatched", [False, True])
def test_shapes_of_weights(need_weights: bool, average: bool, unbatched: bool) -> None:
    ours, theirs = pair(add_bias_kv=True, add_zero_attn=True, batch_first=True)
    inputs = inputs_for("unbatched" if unbatched else "qkv", True)
    got, want = (m(*inputs, need_weights=need_weights, average_attn_weights=average) for m in (ours, theirs))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("need_weights", [False, True])
def test_query_that_sees_nothing(need_weights: bool) -> None:
    """Torch gives NaN, and NaN gradients for every shared weight; here the row is 0 and leaves no trace."""
    ours, _ = pair(batch_first=True)
    x = torch.randn(2, 4, E, dtype=torch.float64)
    padding = torch.tensor([[True] * 4, [False] * 4])
    out, weights = ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    assert torch.equal(out[0], ours.out_proj.bias.expand(4, E))
    assert weights is None or (weights[0] == 0).all()
    out.square().sum().backward()
    gradients = [p.grad for p in ours.parameters()]
    ours.zero_grad()
    (ours(x[1], x[1], x[1])[0].square().sum() + 4 * ours.out_proj.bias.square().sum()).backward()
    for got, want in zip(gradients, ours.parameters(), strict=True):
        torch.testing.assert_close(got, want.grad)


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_only_while_training(need_weights: bool) -> None:
    torch.manual_seed(0)
    ours = FlashMultiheadAttention(E, H, dropout=0.5, batch_first=True)
    x = torch.randn(2, 9, E)

    def run() -> Tensor:
        return ours(x, x, x, need_weights=need_weights)[0]

    ours.eval()
    quiet = run()
    assert torch.equal(run(), quiet)
    ours.train()
    assert not torch.equal(run(), quiet)
    assert not torch.equal(run(), run())


def test_inside_transformer_layers() -> None:
    """A whole encoder layer and decoder layer with the attention swapped give what torch's give."""
    torch.manual_seed(0)
    settings = {"d_model": E, "nhead": H, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
    encoder, decoder = nn.TransformerEncoderLayer(**settings), nn.TransformerDecoderLayer(**settings)
    swapped = copy.deepcopy(encoder), copy.deepcopy(decoder)
    for layer, name in ((swapped[0], "self_attn"), (swapped[1], "self_attn"), (swapped[1], "multihead_attn")):
        attention = FlashMultiheadAttention(E, H, batch_first=True)
        attention.load_state_dict(getattr(layer, name).state_dict())
        setattr(layer, name, attention)
    x, memory = torch.randn(N, L, E), torch.randn(N, S, E)
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    padding = {"memory_key_padding_mask": PADDING["bool"]}
    results = [
        (enc(x, src_mask=causal, is_causal=True), dec(x, memory, tgt_mask=causal, tgt_is_causal=True, **padding))
        for enc, dec in ((encoder, decoder), swapped)
    ]
    torch.testing.assert_close(results[1], results[0])


def test_compile_fullgraph() -> None:
    torch._dynamo.reset()
    ours, theirs = pair(batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(N, L, E, dtype=torch.float64)
    out, _ = compiled(x, x, x, need_weights=False, is_causal=True)
    torch.testing.assert_close(out, theirs(x, x, x, attn_mask=torch.ones(L, L).triu(1).bool())[0])


def test_autocast_with_extra_keys() -> None:
    ours = FlashMultiheadAttention(E, H, batch_first=True, add_bias_kv=True, add_zero_attn=True)
    x = torch.randn(N, L, E)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = ours(x, x, x, need_weights=False)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), ours(x, x, x)[0], atol=2e-2, rtol=0)
    out.float().sum().backward()
    assert {p.grad.dtype for p in ours.parameters()} == {torch.float32}


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_compute_the_same(way: str) -> None:
    ours, _ = pair(add_bias_kv=True)
    other = copy.deepcopy(ours) if way == "deepcopy" else pickle.loads(pickle.dumps(ours))
    x = torch.randn(L, N, E, dtype=torch.float64)
    assert torch.equal(ours(x, x, x, need_weights=False)[0], other(x, x, x, need_weights=False)[0])


X = torch.zeros(N, L, E)
NESTED = torch.nested.nested_tensor([torch.zeros(2, E), torch.zeros(3, E)], layout=torch.jagged)
BAD = [
    ((NESTED, NESTED, NESTED), {}, TypeError, "query must be a plain tensor, got a nested one"),
    ((X, X, NESTED), {}, TypeError, "value must be a plain tensor, got a nested one"),
    ((X[..., :3], X, X), {}, ValueError, r"query must be \(N, L, features\) with 16 features, got shape \(3, 5, 3\)"),
    ((X, X[..., :3], X), {}, ValueError, "key must be"),
    ((X, X, X[0]), {}, ValueError, r"value must be .* got shape \(5, 16\)"),
    ((X, X[:, :4], X), {}, ValueError, "key and value must agree in N and S"),
    ((X[:2], X, X), {}, ValueError, "query and key must agree in N"),
    (([1.0], X, X), {}, TypeError, "query must be a float tensor, got list"),
    ((X, None, X), {}, TypeError, "key must be a float tensor, got NoneType"),
    ((X, X, X.int()), {}, TypeError, "value must be a float tensor, got torch.int32"),
    ((X.half(), X, X), {}, TypeError, "query must have the dtype of in_proj_weight, torch.float32, got torch.float16"),
    ((X, X.bfloat16(), X), {}, TypeError, "key must have the dtype of in_proj_weight, torch.float32, got torch.bfloat16"),
    ((X, X, X.double()), {}, TypeError, "value must have the dtype of in_proj_weight, torch.float32, got torch.float64$"),
    ((X, X, X), {"attn_mask": [1.0]}, TypeError, "attn_mask must be boolean or floating point, got list"),
    ((X, X, X), {"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
    ((X, X, X), {"key_padding_mask": [True]}, TypeError, "key_padding_mask must be boolean or floating point, got list"),
    ((X, X, X), {"attn_mask": torch.zeros(L, L + 1)}, ValueError, r"attn_mask must be \(L, S\) = \(5, 5\) or"),
    ((X, X, X), {"attn_mask": torch.zeros(N, L, L)}, ValueError, r"\(12, 5, 5\), got shape \(3, 5, 5\)"),
    ((X, X, X), {"attn_mask": torch.zeros(L, L).int()}, TypeError, "attn_mask must be boolean or floating"),
    ((X, X, X), {"key_padding_mask": torch.zeros(L, N)}, ValueError, r"key_padding_mask must be \(N, S\) = \(3, 5\)"),
    ((X, X, X), {"key_padding_mask": torch.zeros(N, L).long()}, TypeError, "key_padding_mask must be boolean"),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "masks", "error", "message"), BAD)
@pytest.mark.parametrize("need_weights", [False, True])
def test_bad_input(inputs: tuple, masks: dict, error: type[Exception], message: str, need_weights: bool) -> None:
    with pytest.raises(error, match=message):
        FlashMultiheadAttention(E, H, batch_first=True)(*inputs, need_weights=need_weights, **masks)


@pytest.mark.parametrize("need_weights", [False, True])
def test_dtypes_of_inputs_with_other_widths(need_weights: bool) -> None:
    """Three projections then; autocast casts whatever meets them."""
    layer = FlashMultiheadAttention(E, H, batch_first=True, kdim=3, vdim=5)
    inputs = [torch.zeros(N, L, width) for width in (E, 3, 5)]
    for n, name in enumerate(("query", "key", "value")):
        odd = [x.half() if m == n else x for m, x in enumerate(inputs)]
        with pytest.raises(
            TypeError, match=f"{name} must have the dtype of {name[0]}_proj_weight, torch.float32, got torch.float16"
        ):
            layer(*odd, need_weights=need_weights)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(*odd, need_weights=need_weights)[0].dtype == torch.bfloat16


def test_a_parametrised_projection_may_cast() -> None:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.half()

    layer = FlashMultiheadAttention(E, H, batch_first=True, bias=False)
    nn.utils.parametrize.register_parametrization(layer, "in_proj_weight", Halved(), unsafe=True)
    layer.out_proj.half()
    assert layer(X.half(), X.half(), X.half(), need_weights=False)[0].dtype == torch.float16
