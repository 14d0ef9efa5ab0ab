"""Fused multiply-add: a GPU rounds ``a * b - c`` once, Triton's interpreter twice. Here the interpreter rounds once, too."""

import numpy as np
import pytest
import torch

from flashtri_core import flash_attn

pytestmark = pytest.mark.interpreter

INF = float("inf")


@pytest.fixture(params=["left", "right"], autouse=True)
def fused(request, monkeypatch):
    """Products stay exact until they are added to something; of two products a compiler may keep either one exact."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def exact(x):
        return getattr(x, "exact", None)

    def multiply(self, a, b):
        product = self.binary_op(a, b, np.multiply)
        if product.data.dtype == np.float32:
            product.exact = np.multiply(a.data, b.data, dtype=np.float64)
        return product

    def fuse(operation):
        def method(self, a, b):
            x, y = exact(a), exact(b)
            if x is None and y is None:
                return self.binary_op(a, b, operation)
            if x is not None and y is not None:
                x, y = (x, None) if request.param == "left" else (None, y)
            x, y = (wide if wide is not None else handle.data.astype(np.float64) for wide, handle in ((x, a), (y, b)))
            return TensorHandle(operation(x, y).astype(np.float32), a.dtype.scalar)

        return method

    def view(name):
        narrow = getattr(InterpreterBuilder, name)

        def method(self, a, *where):
            out = narrow(self, a, *where)
            if exact(a) is not None:
                out.exact = narrow(self, TensorHandle(exact(a), tl.float64), *where).data
            return out

        return method

    monkeypatch.setattr(InterpreterBuilder, "create_fmul", multiply)
    monkeypatch.setattr(InterpreterBuilder, "create_fadd", fuse(np.add))
    monkeypatch.setattr(InterpreterBuilder, "create_fsub", fuse(np.subtract))
    for name in ("create_expand_dims", "create_broadcast"):
        monkeypatch.setattr(InterpreterBuilder, name, view(name))


def check(scores):
    """Weights of sixteen groups of keys, and LSE, for given scores [Nq, Nk]: they come as a bias on products of zero."""
    q, k = (torch.zeros(1, 1, n, 16, dtype=torch.float16) for n in scores.shape)
    v = torch.eye(16).repeat_interleave(len(k[0, 0]) // 16, 0)
    out, lse = flash_attn(q, k, v[None, None].half(), attn_bias=scores[None, None], return_lse=True, impl="triton")
    torch.testing.assert_close(out[0, 0].double(), scores.double().softmax(1) @ v.double(), rtol=1e-3, atol=2.0**-14)
    torch.testing.assert_close(lse[0, 0].double(), scores.double().logsumexp(1), rtol=3e-7, atol=2e-6)


def test_huge_equal_inputs():
    """Row 41: with one key the output is v exactly; p was 2^8192 or 2^-8192, the rounding of the row's maximum."""
    x = torch.full((1, 1, 1, 64), 65504.0, dtype=torch.float16).requires_grad_()
    out, lse = flash_attn(x, x, x, softmax_scale=0.3, return_lse=True, impl="triton")
    assert (out == 65504).all()
    assert lse.item() == pytest.approx(65504**2 * 64 * 0.3, rel=3e-7)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert not grad.isnan().any()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [3, 16, 23, 27, 28, 100])
def test_equal_scores_weigh_the_same_in_every_tile(exponent, sign):
    """While the maximum stays, alpha is 1. It was 2^e for every tile, e the rounding of the maximum: weights drifted."""
    check(torch.linspace(1.0, 1.99, 16)[:, None].mul(sign * 2.0**exponent).repeat(1, 1024))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [3, 16, 26, 29, 100])
def test_neighbouring_scores(exponent, sign):
    """Scores that fp32 can only just tell apart get the weights of their differences, across tiles as well."""
    start = torch.linspace(1.0, 1.3, 16)[:, None] * sign * 2.0**exponent
    steps = torch.randint(-3, 4, (16, 1024), generator=torch.Generator().manual_seed(1))
    check((start.view(torch.int32) + steps.int()).view(torch.float32))


@pytest.mark.parametrize(
    "levels",
    [
        (-INF, 1e12, 1e12, 1e12),
        (3.0, 2e9, 5.0, 2e9),
        (-1e12, -2.0, -1e30, -2.0),
        (-1e30, -1e12, -INF, -INF),
        (0.0, 1e30, 1e38, -1e38),
    ],
    ids=str,
)
def test_a_row_changes_its_magnitude(levels):
    """From small to huge, from hugely negative to small, out of nothing: alpha joins the two units without NaN."""
    check(torch.tensor(levels).repeat_interleave(256).expand(16, -1).contiguous())


@pytest.mark.parametrize("scale", [1e-46, 1e-40, 1.2e-38])
def test_a_scale_among_the_smallest_numbers(scale):
    """The unit is zero or nearly so, and rows have seen nothing in the first tile: outputs are means, not NaN."""
    q, k, v = (torch.rand(1, 1, 512, 16, generator=torch.Generator().manual_seed(s)).half() for s in range(3))
    out = flash_attn(q, k, v, softmax_scale=scale, window_size=(0, 5), impl="triton")
    right = torch.stack([v[0, 0, i : i + 6].double().mean(0) for i in range(512)])
    torch.testing.assert_close(out[0, 0].double(), right, rtol=2e-3, atol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("exponent", "scale"), [(0, 0.09), (11, 0.09), (12, 0.09), (13, 0.09), (13, 1.3)])
def test_gradients_of_huge_scores_are_finite(exponent, scale, bias):
    """LSE in fp32 does not hold the size of p from 2^24 on: p is taken as 0 there, it was anything up to infinity."""
    draws = [torch.randn(1, 2, 96, 32, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    q, k, v = ((x * 2.0**e).half().requires_grad_() for x, e in zip(draws, (exponent, exponent, 0), strict=True))
    leaves = [q, k, v, *([torch.zeros(1, 2, 96, 96, requires_grad=True)] if bias else [])]
    out = flash_attn(q, k, v, softmax_scale=scale, attn_bias=leaves[3] if bias else None, causal=True, impl="triton")
    grads = torch.autograd.grad(out, leaves, torch.full_like(out, 2.0**-6))
    assert all(x.isfinite().all() for x in (out, *grads))
    assert grads[2].abs().max() > 0 or exponent > 12
