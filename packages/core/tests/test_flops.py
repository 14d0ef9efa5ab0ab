"""torch's FlopCounterMode counts the operators as it counts torch's own attention."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from flashtri_core import flash_attn, flash_attn_varlen
from flashtri_core.testing.plugin import GPU_BFLOAT, INTERPRETER, REFERENCE, lanes

WHERE = REFERENCE, INTERPRETER, GPU_BFLOAT
FWD, BWD = torch.ops.flashtri.fwd, torch.ops.flashtri.bwd
aten = torch.ops.aten


def counted(call):
    """Operations by operator."""
    with FlopCounterMode(display=False) as mode:
        call()
    return mode.get_flop_counts().get("Global", {})


def torchs(q, k, v):
    """What torch counts for its kernels, forward and backward, by tensors without memory; keys repeated to q's heads."""
    q, k, v = (
        torch.empty(x.shape[0], q.shape[1], *x.shape[2:], device="meta", dtype=torch.half, requires_grad=True)
        for x in (q, k, v)
    )

    def both():
        if q.shape[-1] == v.shape[-1]:
            out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
        else:
            out = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]
        out.sum().backward()

    forward, backward = counted(both).values()
    return {FWD: forward, BWD: backward}


@lanes(*WHERE)
@pytest.mark.parametrize(
    ("heads", "heads_k", "rows", "keys", "width", "width_v", "forward", "backward"),
    [
        (4, 4, 16, 16, 16, 16, 2 * 2048 * 32, 2 * 2048 * 80),  # 2 * 4 * 16 * 16 pairs; 2 and 5 products
        (4, 2, 16, 24, 16, 16, 2 * 3072 * 32, 2 * 3072 * 80),
        (4, 1, 24, 16, 16, 32, 2 * 3072 * 48, 2 * 3072 * (3 * 16 + 2 * 32)),
    ],
    ids=["plain", "grouped, Nq < Nk", "MQA, Nq > Nk, D != Dv"],
)
def test_products_of_a_dense_call(lane, heads, heads_k, rows, keys, width, width_v, forward, backward):
    q = lane.randn(2, heads, rows, width).requires_grad_()
    k, v = (lane.randn(2, heads_k, keys, n).requires_grad_() for n in (width, width_v))

    def both(**features):
        return counted(lambda: flash_attn(q, k, v, impl=lane.impl, **features).sum().backward())

    assert both() == {FWD: forward, BWD: backward} == torchs(q, k, v)
    assert both(causal=True) == both(window_size=(3, 0)) == both()
    with torch.no_grad():
        assert counted(lambda: flash_attn(q, k, v, impl=lane.impl)) == {FWD: forward}


def test_the_forward_counts_as_sdpa_on_a_cpu():
    """Whose two forward products the math backend makes with bmm; its backward keeps S, and so has four."""
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (8, 24, 24))
    ours = counted(lambda: flash_attn(q, k, v).sum().backward())
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        assert sum(counted(lambda: scaled_dot_product_attention(q, k, v)).values()) == ours[FWD]
    with sdpa_kernel(SDPBackend.MATH):
        theirs = sum(counted(lambda: scaled_dot_product_attention(q, k, v).sum().backward()).values())
    assert theirs == ours[FWD] + ours[BWD] * 4 // 5


def packed(lane, lengths_q, lengths_k, heads_k=2):
    """q, k, v with two rows behind the last sequence, and the four arguments that say where sequences lie."""
    cu_q, cu_k = (
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(lane.device)
        for lengths in (lengths_q, lengths_k)
    )
    q = lane.randn(sum(lengths_q) + 2, 4, 16).requires_grad_()
    k, v = (lane.randn(sum(lengths_k) + 2, heads_k, 16).requires_grad_() for _ in "kv")
    return q, k, v, cu_q, cu_k, 12, 12


@lanes(*WHERE)
@pytest.mark.parametrize("heads_k", [4, 2])
def test_packed_sequences_count_with_their_own_lengths(lane, heads_k):
    given = packed(lane, (3, 0, 9, 4), (5, 2, 7, 4), heads_k)
    pairs = 4 * (3 * 5 + 0 * 2 + 9 * 7 + 4 * 4)
    found = counted(lambda: flash_attn_varlen(*given, causal=True, impl=lane.impl).sum().backward())
    assert found == {FWD: 2 * pairs * 32, BWD: 2 * pairs * 80}

    q, k, v, *where = given
    k, v = (x.repeat_interleave(4 // heads_k, dim=1) for x in (k, v))
    assert found[FWD] == flop_registry[aten._flash_attention_forward](q, k, v, *where)
    assert found[BWD] == flop_registry[aten._flash_attention_backward](q, q, k, v, q, None, *where)


@lanes(*WHERE)
def test_keys_in_use_are_a_length(lane):
    q, used = lane.randn(2, 4, 16, 16).requires_grad_(), torch.tensor([5, 0], dtype=torch.int32, device=lane.device)
    found = counted(lambda: flash_attn(q, q, q, seqused_k=used, impl=lane.impl).sum().backward())
    assert found == {FWD: 2 * 4 * 16 * 5 * 32, BWD: 2 * 4 * 16 * 5 * 80}


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_unknown_lengths_count_as_the_longest(kind):
    """Guards against reading a tensor without values: 3 sequences of at most 12 rows and keys each."""
    given = packed(REFERENCE, (3, 0, 9), (5, 2, 7))
    turn = FakeTensorMode().from_tensor if kind == "fake" else lambda x: x.to("meta")
    *tensors, cu_q, cu_k = map(turn, given[:5])
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    found = counted(lambda: flash_attn_varlen(q, k, v, cu_q, cu_k, 12, 12).sum().backward())
    pairs = 4 * 3 * 12 * 12
    assert found == {FWD: 2 * pairs * 32, BWD: 2 * pairs * 80}
    k = k.repeat_interleave(2, dim=1)
    assert found[FWD] == flop_registry[aten._flash_attention_forward](q, k, k, cu_q, cu_k, 12, 12)


@lanes(*WHERE)
def test_a_backward_alone(lane):
    """Its forward ran where nobody counted, past the operators; the chunked path's products are not to show up instead."""
    q = lane.randn(2, 4, 16, 16).requires_grad_()
    out = flash_attn(q, q, q, impl=lane.impl)
    assert counted(lambda: out.sum().backward()) == {BWD: 2 * 2048 * 80}


@lanes(REFERENCE, GPU_BFLOAT)
@pytest.mark.parametrize("warm", [False, True])
def test_compiled_calls_count_once(lane, warm):
    """torch runs them uncompiled under such a mode."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: flash_attn(x * 2, x, x, impl=lane.impl), backend="aot_eager")
    q = lane.randn(2, 4, 16, 16).requires_grad_()
    if warm:
        compiled(q)
    for _ in range(2):
        assert counted(lambda: compiled(q).sum().backward()) == {FWD: 2 * 2048 * 32, BWD: 2 * 2048 * 80}
    torch._dynamo.reset()


@lanes(REFERENCE, GPU_BFLOAT)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_the_forward_twice(lane, reentrant):
    q = lane.randn(2, 4, 16, 16).requires_grad_()

    def both():
        checkpoint(lambda x: flash_attn(x, x, x, impl=lane.impl), q, use_reentrant=reentrant).sum().backward()

    assert counted(both) == {FWD: 2 * 2 * 2048 * 32, BWD: 2 * 2048 * 80}
