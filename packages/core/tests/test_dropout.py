"""Dropout: the same bits everywhere, the right share of them, and torch's generator left as it should be."""

import pytest
import torch

from flashtri_core import draw_rng, dropout_mask, flash_attn
from flashtri_core._jit import HAS_TRITON, jit, tl
from flashtri_core.testing.plugin import REFERENCE, lanes
from flashtri_core.variants import dropout


def philox_round_by_hand(counter, key):
    """Philox-4x32-10 in Python integers, from the paper's definition."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low = 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & low, (p0 >> 32) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [c0, c1, c2, c3]


def test_philox_known_answers():
    """The known-answer vectors of the generator's authors (Random123), first word of each line the first output word."""
    ones = 0xFFFFFFFF
    assert philox_round_by_hand((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_round_by_hand((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("key", [0, 1, (1 << 62) - 1, 0x123456789ABCDEF])
def test_eager_philox(key):
    words = torch.randint(0, 1 << 32, (4, 50), generator=torch.Generator().manual_seed(1))
    got = torch.stack(dropout._philox(key, *words))
    want = [philox_round_by_hand(c, (key & 0xFFFFFFFF, key >> 32)) for c in words.T.tolist()]
    assert got.T.tolist() == want


if HAS_TRITON:

    @jit
    def drop_kernel(OUT, rng, levels, z, h, m0, n0, M: tl.constexpr, N: tl.constexpr):
        at = OUT + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(at, dropout_drop(tl.load(at), z, h, m0, n0, (rng, levels)))

    dropout_drop = dropout.drop


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("z", "h", "m0", "n0", "p"),
    [(0, 0, 0, 0, 0.5), (3, 7, 48, 96, 0.1), (1, 2, 70000, 65504, 0.9), (1, 1, 64, 32, 0.9999), (2, 1, 16, 64, 0.001)],
)
def test_kernel_bits_are_the_eager_twin_s(device, z, h, m0, n0, p):
    rng = torch.tensor([(1 << 62) - 5, (1 << 61) + 0xFFFFFFF0], device=device)
    p_tile = torch.rand(32, 64, device=device) + 0.5
    out = p_tile.clone()
    drop_kernel[(1,)](out, rng, dropout.levels(p), z, h, m0, n0, 32, 64)
    i, j = torch.arange(m0, m0 + 32, device=device)[:, None], torch.arange(n0, n0 + 64, device=device)[None, :]
    want = dropout.keep_eager(rng, torch.full_like(i, z), torch.full_like(i, h), i, j, p)
    assert torch.equal(out, p_tile * want)


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9])
def test_share_and_independence(p):
    """The kept share is 1 - p within five standard deviations, along every axis; neighbours are uncorrelated."""
    mask = dropout_mask(torch.tensor([12345678901, 987654321]), (4, 4, 256, 256), p).double()
    share = dropout.levels(p) / 256
    assert abs(share - (1 - p)) <= 1 / 512
    sigma = (share * (1 - share)) ** 0.5
    assert abs(mask.mean().item() - share) < 5 * sigma / mask.numel() ** 0.5
    for axes in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        means = mask.mean(axes)
        assert ((means - share).abs() < 6 * sigma / (mask.numel() / means.numel()) ** 0.5).all()
    centred = (mask - share) / sigma
    for axis, step in ((3, 1), (3, 2), (3, 8), (3, 16), (2, 1), (2, 8), (2, 16), (1, 1), (0, 1)):
        size = mask.shape[axis] - step
        product = (centred.narrow(axis, 0, size) * centred.narrow(axis, step, size)).mean()
        assert abs(product.item()) < 6 / mask.numel() ** 0.5 * (mask.shape[axis] / size) ** 0.5, (axis, step)


def test_calls_are_independent():
    a, b = (dropout_mask(draw_rng(), (1, 1, 256, 256), 0.5) for _ in range(2))
    assert abs((a == b).double().mean().item() - 0.5) < 0.02


@lanes()
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_mask_is_the_documented_one(lane, p):
    """Row 77: with v = identity the output shows the mask; kept entries are divided by the keep probability."""
    n = 32
    q, k = lane.randn(2, 2, n, 16), lane.randn(2, 2, n, 16, seed=1)
    v = torch.eye(n, device=lane.device, dtype=lane.dtype).expand(2, 2, n, n)
    torch.manual_seed(5)
    out = flash_attn(q, k, v, dropout_p=p, impl=lane.impl)
    torch.manual_seed(5)
    mask = dropout_mask(draw_rng(lane.device), (2, 2, n, n), p)
    whole = flash_attn(q, k, v, impl=lane.impl)
    assert torch.equal(out != 0, mask & (whole != 0))
    torch.testing.assert_close(out[mask], whole[mask] * dropout.keep_scale(p), rtol=1e-2, atol=1e-3)


@lanes()
def test_expectation_and_variance(lane):
    """The mean over calls is attention without dropout, the variance what independent bits give."""
    q, k, v = (lane.randn(1, 1, 16, 16, seed=s) for s in range(3))
    whole = flash_attn(q, k, v, impl=lane.impl).double()
    calls, p = (20, 0.25) if lane.name == "interpreter" else (400, 0.25)
    torch.manual_seed(1)
    samples = torch.stack([flash_attn(q, k, v, dropout_p=p, impl=lane.impl).double() for _ in range(calls)])
    prob = torch.softmax(q.double() @ k.double().transpose(-1, -2) * 16**-0.5, -1)
    variance = (prob**2 @ v.double() ** 2) * p / (1 - p)
    z = (samples.mean(0) - whole) / (variance / calls).sqrt()
    assert z.abs().max() < 5.5 and abs(z.mean().item()) < 0.5
    assert ((samples - whole) ** 2 / variance).mean().item() == pytest.approx(1.0, abs=0.5 if calls < 100 else 0.15)


@lanes()
def test_generator_advances_and_repeats(lane):
    """Row 74: two calls draw different masks, the same seed the same one."""
    q, k, v = (lane.randn(1, 1, 32, 16, seed=s) for s in range(3))
    torch.manual_seed(0)
    first, second = (flash_attn(q, k, v, dropout_p=0.1, impl=lane.impl) for _ in range(2))
    torch.manual_seed(0)
    third = flash_attn(q, k, v, dropout_p=0.1, impl=lane.impl)
    assert not torch.equal(first, second)
    assert torch.equal(first, third)


@lanes()
def test_no_dropout_leaves_the_generator_alone(lane):
    """Row 78: p = 0 draws nothing."""
    q, k, v = (lane.randn(1, 1, 8, 16, seed=s).requires_grad_() for s in range(3))
    state = torch.cuda.get_rng_state if lane.device == "cuda" else torch.get_rng_state
    before = state()
    flash_attn(q, k, v, dropout_p=0.0, impl=lane.impl).sum().backward()
    assert torch.equal(state(), before)
    flash_attn(q, k, v, dropout_p=0.5, impl=lane.impl)
    assert not torch.equal(state(), before)


@lanes(REFERENCE)
@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9])
def test_gradients_for_each_probability(lane, p):
    """Row 77: the backward divides by the keep probability too; a factor p is right near one half only."""
    q, k, v = (lane.randn(1, 2, 33, 8, seed=s).requires_grad_() for s in range(3))
    do = lane.randn(1, 2, 33, 8, seed=4)
    torch.manual_seed(3)
    grads = torch.autograd.grad(flash_attn(q, k, v, dropout_p=p), (q, k, v), do)
    torch.manual_seed(3)
    kept = dropout_mask(draw_rng(), (1, 2, 33, 33), p)
    prob = torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1)
    want = torch.autograd.grad((prob * kept / (dropout.levels(p) / 256)) @ v, (q, k, v), do)
    for a, b in zip(grads, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_the_factor_has_the_precision_of_the_scores(default, request):
    """It was of torch's default dtype: 3e-8 off in float64, and 2e-3 where that is bfloat16."""
    q, k, v = (torch.randn(1, 2, 33, 8, dtype=torch.float64) for _ in range(3))
    request.addfinalizer(lambda before=torch.get_default_dtype(): torch.set_default_dtype(before))
    torch.set_default_dtype(default)
    torch.manual_seed(1)
    kept = dropout_mask(draw_rng(), (1, 2, 33, 33), 0.1)
    torch.manual_seed(1)
    out = flash_attn(q, k, v, dropout_p=0.1)
    want = torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1).masked_fill(~kept, 0.0) * (256 / 230) @ v
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_near_one_still_divides():
    assert dropout.levels(0.9999) == 1
    assert torch.isfinite(flash_attn(*(torch.randn(1, 1, 9, 8) for _ in range(3)), dropout_p=0.9999)).all()
