"""Bad input is refused before anything runs, by a message that names the argument and what is supported."""

import math
import subprocess
import sys

import pytest
import torch

from flashtri_core import draw_rng, dropout_mask, flash_attn, flash_attn_varlen, pack, supports, unpack
from flashtri_core._jit import INTERPRETED
from flashtri_core.problem import Extras, Problem
from flashtri_core.target import Target


def dense(**keywords):
    """Valid arguments of flash_attn with some replaced."""
    arguments = dict(q=torch.zeros(2, 4, 6, 8), k=torch.zeros(2, 2, 7, 8), v=torch.zeros(2, 2, 7, 8)) | keywords
    q, k, v = (arguments.pop(name) for name in "qkv")
    return flash_attn(q, k, v, **arguments)


def packed_arguments(**keywords):
    """Valid arguments of flash_attn_varlen with some replaced."""
    cu_q, cu_k = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
    arguments = dict(
        q=torch.zeros(6, 4, 8), k=torch.zeros(7, 2, 8), v=torch.zeros(7, 2, 8), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
        max_seqlen_q=4, max_seqlen_k=4,
    )  # fmt: skip
    return arguments | keywords


def packed(**keywords):
    return flash_attn_varlen(**packed_arguments(**keywords))


META = torch.device("meta")
DENSE = [
    # q, k, v
    (dict(q=[1.0]), TypeError, r"^q must be a tensor, got list"),
    (dict(v=None), TypeError, r"^v must be a tensor, got NoneType"),
    (dict(q=torch.zeros(4, 6, 8)), ValueError, r"^q must have 4 dimensions \(B, H, N, D\), got shape \(4, 6, 8\)"),
    (dict(k=torch.zeros(1, 2, 2, 7, 8)), ValueError, r"^k must have 4 dimensions .* \(1, 2, 2, 7, 8\)"),
    (dict(q=torch.zeros(2, 4, 6, 8, dtype=torch.int32)), TypeError, r"^q must be float16, .*got torch.int32"),
    (dict(k=torch.zeros(2, 2, 7, 8, dtype=torch.half)), TypeError, r"^k must have q's dtype torch.float32, got torch.float16"),
    (dict(v=torch.zeros(2, 2, 7, 8, dtype=torch.half)), TypeError, r"^v must have q's dtype torch.float32, got torch.float16"),
    (dict(k=torch.zeros(2, 2, 7, 8, device=META)), ValueError, r"^k must be on q's device cpu, got meta"),
    (dict(q=torch.zeros(2, 4, 6, 257), k=torch.zeros(2, 2, 7, 257)), ValueError, r"^q: head dimension must be 1 to 256, got 257"),
    (dict(q=torch.zeros(2, 4, 6, 0)), ValueError, r"^q: head dimension must be 1 to 256, got 0"),
    (dict(v=torch.zeros(2, 2, 7, 300)), ValueError, r"^v: head dimension must be 1 to 256, got 300"),
    (dict(k=torch.zeros(2, 2, 7, 16)), ValueError, r"^k must have q's head dimension 8, got 16 \(v may differ\)"),
    (dict(k=torch.zeros(3, 2, 7, 8)), ValueError, r"k and v must have q's batch size 2, got 3 and 2"),
    (dict(v=torch.zeros(1, 2, 7, 8)), ValueError, r"k and v must have q's batch size 2, got 2 and 1"),
    (dict(v=torch.zeros(2, 2, 9, 8)), ValueError, r"^v must have k's length 7, got 9"),
    (dict(v=torch.zeros(2, 4, 7, 8)), ValueError, r"^v must have k's heads 2, got 4"),
    (dict(q=torch.zeros(2, 6, 6, 8), k=torch.zeros(2, 4, 7, 8), v=torch.zeros(2, 4, 7, 8)), ValueError, r"multiple of k's, got 6 and 4"),
    (dict(k=torch.zeros(2, 0, 7, 8), v=torch.zeros(2, 0, 7, 8)), ValueError, r"^q's heads must be a positive multiple of k's, got 4 and 0"),
    (dict(q=torch.zeros(2, 4, 6, 8).to_sparse()), TypeError, r"^q must be a dense \(strided\) tensor, got torch.sparse_coo"),
    (dict(v=torch.zeros(2, 2, 7, 8).to_mkldnn()), TypeError, r"^v must be a dense \(strided\) tensor, got torch._mkldnn"),
    (dict(k=torch.zeros(2, 2, 7, 8, dtype=torch.float8_e4m3fn)), TypeError, r"^k must be float16, .*got torch.float8_e4m3fn"),
    # plain keywords
    (dict(causal=1), TypeError, r"^causal must be a bool, got int"),
    (dict(causal=type("bool", (), {"__module__": "numpy"})()), TypeError, r"^causal must be a bool, got numpy\.bool"),
    (dict(causal=None), TypeError, r"^causal must be a bool, got NoneType"),
    (dict(softmax_scale="1"), TypeError, r"^softmax_scale must be a float or None, got str"),
    (dict(softmax_scale=True), TypeError, r"^softmax_scale must be a float or None, got bool"),
    (dict(softmax_scale=math.nan), ValueError, r"^softmax_scale must be finite, got nan"),
    (dict(softmax_scale=10**400), ValueError, r"^softmax_scale must be finite, got 1000"),
    (dict(softmax_scale=1e39), ValueError, r"^softmax_scale must be finite, got 1e\+39"),
    (dict(softmax_scale=torch.tensor(0.1)), TypeError, r"^softmax_scale must be a float or None, got Tensor"),
    (dict(softmax_scale=math.inf), ValueError, r"^softmax_scale must be finite, got inf"),
    (dict(window_size=3), TypeError, r"^window_size must be a pair \(left, right\) of ints, got 3"),
    (dict(window_size=(-1.0, -1.0)), TypeError, r"^window_size: left must be an int or None, got float"),
    (dict(window_size=torch.tensor([1, 2])), TypeError, r"^window_size must be a pair .*got tensor"),
    (dict(window_size=(1, 2, 3)), TypeError, r"^window_size must be a pair"),
    (dict(window_size=(1.5, 0)), TypeError, r"^window_size: left must be an int or None, got float"),
    (dict(window_size=(0, True)), TypeError, r"^window_size: right must be an int or None, got bool"),
    (dict(window_size=(-128, 128)), ValueError, r"^window_size: left must be >= -1 \(-1 = unbounded\), got -128"),
    (dict(window_size=(-128, 0)), ValueError, r"^window_size: left must be >= -1 \(-1 = unbounded\), got -128"),
    (dict(window_size=(0, -2)), ValueError, r"^window_size: right must be >= -1 \(-1 = unbounded\), got -2"),
    (dict(softcap="30"), TypeError, r"^softcap must be a float, got str"),
    (dict(softcap=True), TypeError, r"^softcap must be a float, got bool"),
    (dict(softcap=False), TypeError, r"^softcap must be a float, got bool"),
    (dict(softcap=None), TypeError, r"^softcap must be a float, got NoneType"),
    (dict(softcap=10**400), ValueError, r"^softcap must be finite and >= 0 \(0 = off, else 1e-38 to 1e38\), got 1000"),
    (dict(softcap=1e-40), ValueError, r"^softcap must be finite and >= 0 \(0 = off, else 1e-38 to 1e38\), got 1e-40"),
    (dict(softcap=-1.0), ValueError, r"^softcap must be finite and >= 0 \(0 = off, else 1e-38 to 1e38\), got -1.0"),
    (dict(softcap=math.nan), ValueError, r"^softcap must be finite and >= 0 \(0 = off, else 1e-38 to 1e38\), got nan"),
    (dict(softcap=math.inf), ValueError, r"^softcap must be finite and >= 0 \(0 = off, else 1e-38 to 1e38\), got inf"),
    (dict(dropout_p="0.1"), TypeError, r"^dropout_p must be a float, got str"),
    (dict(dropout_p=True), TypeError, r"^dropout_p must be a float, got bool"),
    (dict(dropout_p=False), TypeError, r"^dropout_p must be a float, got bool"),
    (dict(dropout_p=torch.tensor(0.1)), TypeError, r"^dropout_p must be a float, got Tensor"),
    (dict(dropout_p=1.0), ValueError, r"^dropout_p must be in \[0, 1\), got 1.0"),
    (dict(dropout_p=-0.1), ValueError, r"^dropout_p must be in \[0, 1\), got -0.1"),
    (dict(dropout_p=math.nan), ValueError, r"^dropout_p must be in \[0, 1\), got nan"),
    (dict(deterministic="yes"), TypeError, r"^deterministic must be a bool, got str"),
    (dict(return_lse=1), TypeError, r"^return_lse must be a bool, got int"),
    (dict(return_max_logits="x"), TypeError, r"^return_max_logits must be a bool, got str"),
    (dict(validate=None), TypeError, r"^validate must be a bool, got NoneType"),
    (dict(impl=None), ValueError, r"^impl must be one of auto, triton, hopper, reference, got None"),
    (dict(impl="cuda"), ValueError, r"^impl must be one of auto, triton, hopper, reference, got 'cuda'"),
    # tensors of features
    (dict(alibi_slopes=[1.0]), TypeError, r"^alibi_slopes must be a tensor, got list"),
    (dict(alibi_slopes=torch.zeros(4, dtype=torch.half)), TypeError, r"^alibi_slopes must be float32, got torch.float16"),
    (dict(alibi_slopes=torch.zeros(4).to_sparse()), TypeError, r"^alibi_slopes must be a dense \(strided\) tensor"),
    (dict(alibi_slopes=torch.zeros(2)), ValueError, r"^alibi_slopes must have shape \(4,\) or \(2, 4\), got \(2,\)"),
    (dict(alibi_slopes=torch.zeros(4, device=META)), ValueError, r"^alibi_slopes must be on cpu, got meta"),
    (dict(alibi_slopes=torch.zeros(4).requires_grad_()), ValueError, r"^alibi_slopes requires a gradient"),
    (dict(learnable_sink=[1.0]), TypeError, r"^learnable_sink must be a float tensor, got list"),
    (dict(learnable_sink=torch.zeros(4, dtype=torch.int32)), TypeError, r"^learnable_sink must be a float tensor, got torch.int32"),
    (dict(learnable_sink=torch.zeros(4, dtype=torch.float8_e4m3fn)), TypeError, r"^learnable_sink must be a float tensor, got torch.float8_e4m3fn"),
    (dict(learnable_sink=torch.zeros(4).to_sparse()), TypeError, r"^learnable_sink must be a dense \(strided\) tensor"),
    (dict(learnable_sink=torch.zeros(2)), ValueError, r"^learnable_sink must have shape \(4,\), got \(2,\)"),
    (dict(learnable_sink=torch.zeros(4, device=META)), ValueError, r"^learnable_sink must be on cpu, got meta"),
    (dict(attn_bias=1.0), TypeError, r"^attn_bias must be a tensor, got float"),
    (dict(attn_bias=torch.zeros(6, 7, dtype=torch.bool)), TypeError, r"^attn_bias must be float16, .* got torch.bool; boolean .*attn_mask"),
    (dict(attn_bias=torch.zeros(6, 7, dtype=torch.float8_e4m3fn)), TypeError, r"^attn_bias must be float16, .* got torch.float8_e4m3fn"),
    (dict(attn_bias=torch.zeros(6, 7).to_sparse()), TypeError, r"^attn_bias must be a dense \(strided\) tensor, got torch.sparse_coo"),
    (dict(attn_bias=torch.zeros(0)), ValueError, r"^attn_bias must broadcast to .*got \(0,\)"),
    (dict(attn_bias=torch.zeros(6, 6)), ValueError, r"^attn_bias must broadcast to \(B, Hq, Nq, Nk\) = \(2, 4, 6, 7\), got \(6, 6\)"),
    (dict(attn_bias=torch.zeros(1, 2, 4, 6, 7)), ValueError, r"^attn_bias must broadcast to .*got \(1, 2, 4, 6, 7\)"),
    (dict(attn_bias=torch.zeros(6, 7, device=META)), ValueError, r"^attn_bias must be on cpu, got meta"),
    (dict(attn_mask=[True]), TypeError, r"^attn_mask must be a tensor, got list"),
    (dict(attn_mask=torch.zeros(6, 7)), TypeError, r"^attn_mask must be bool \(True = visible\), got torch.float32; .*attn_bias"),
    (dict(attn_mask=torch.zeros(3, 1, 6, 7, dtype=torch.bool)), ValueError, r"^attn_mask must broadcast to .*got \(3, 1, 6, 7\)"),
    (dict(attn_mask=torch.zeros(6, 7, dtype=torch.bool, device=META)), ValueError, r"^attn_mask must be on cpu, got meta"),
    (dict(seqused_k=[3, 4]), TypeError, r"^seqused_k must be an int32 tensor, got list"),
    (dict(seqused_k=torch.tensor([3.0, 4.0])), TypeError, r"^seqused_k must be int32 \(int64 is cast\), got torch.float32"),
    (dict(seqused_k=torch.tensor([True, False])), TypeError, r"^seqused_k must be int32 \(int64 is cast\), got torch.bool"),
    (dict(seqused_k=torch.tensor([2, 8])), ValueError, r"^seqused_k must be between 0 and a sequence's keys, 7, got 8"),
    (dict(seqused_k=torch.tensor([-1, 2])), ValueError, r"^seqused_k must be between 0 and a sequence's keys, 7, got -1"),
    (dict(seqused_k=torch.tensor([2**32 + 1, 2])), ValueError, r"^seqused_k must be between 0 and a sequence's keys, 7, got 4294967297"),
    (dict(seqused_k=torch.zeros(2, 1, dtype=torch.int32)), ValueError, r"^seqused_k must be one-dimensional, got shape \(2, 1\)"),
    (dict(seqused_k=torch.zeros(3, dtype=torch.int32)), ValueError, r"^seqused_k must have shape \(2,\), got \(3,\)"),
    (dict(seqused_k=torch.zeros(2, dtype=torch.int32, device=META)), ValueError, r"^seqused_k must be on q's device cpu, got meta"),
]  # fmt: skip
PACKED = [
    (dict(q=torch.zeros(1, 6, 4, 8)), ValueError, r"^q must have 3 dimensions \(total, H, D\), got shape \(1, 6, 4, 8\)"),
    (dict(v=torch.zeros(9, 2, 8)), ValueError, r"^v must have k's rows 7, got 9"),
    (dict(cu_seqlens_q=[0, 2, 6]), TypeError, r"^cu_seqlens_q must be an int32 tensor, got list"),
    (dict(cu_seqlens_k=torch.tensor([0.0, 3.0, 7.0])), TypeError, r"^cu_seqlens_k must be int32 \(int64 is cast\), got torch.float32"),
    (dict(cu_seqlens_k=torch.zeros(3, 1, dtype=torch.int32)), ValueError, r"^cu_seqlens_k must be one-dimensional, got shape \(3, 1\)"),
    (dict(cu_seqlens_q=torch.zeros(0, dtype=torch.int32)), ValueError, r"^cu_seqlens_q must have at least one entry"),
    (dict(cu_seqlens_k=torch.zeros(2, dtype=torch.int32)), ValueError, r"^cu_seqlens_k must have as many entries as cu_seqlens_q \(3\), got 2"),
    (dict(cu_seqlens_q=torch.zeros(3, dtype=torch.int32, device=META)), ValueError, r"^cu_seqlens_q must be on q's device cpu, got meta"),
    (dict(max_seqlen_q=torch.tensor(4)), TypeError, r"^max_seqlen_q must be a Python int .*got Tensor"),
    (dict(max_seqlen_k=4.0), TypeError, r"^max_seqlen_k must be a Python int .*got float"),
    (dict(max_seqlen_q=True), TypeError, r"^max_seqlen_q must be a Python int .*got bool"),
    (dict(max_seqlen_k=-1), ValueError, r"^max_seqlen_k must be >= 0, got -1"),
    (dict(alibi_slopes=torch.zeros(3, 4)), ValueError, r"^alibi_slopes must have shape \(4,\) or \(2, 4\), got \(3, 4\)"),
    (dict(attn_bias=torch.zeros(6, 7)), ValueError, r"^attn_bias must broadcast to \(B, Hq, Nq, Nk\) = \(2, 4, 4, 4\), got \(6, 7\)"),
    (dict(seqused_k=torch.zeros(7, dtype=torch.int32)), ValueError, r"^seqused_k must have shape \(2,\), got \(7,\)"),
    (dict(validate=1), TypeError, r"^validate must be a bool, got int"),
    (dict(cu_seqlens_q=torch.tensor([1, 2, 6])), ValueError, r"^cu_seqlens_q must start at 0"),
    (dict(cu_seqlens_q=torch.tensor([0, -1, 6])), ValueError, r"^cu_seqlens_q must start at 0, never decrease"),
    (dict(cu_seqlens_q=torch.tensor([0, 2**33, 6])), ValueError, r"^cu_seqlens_q must start at 0, never decrease"),
    (dict(cu_seqlens_k=torch.tensor([0, 5, 3])), ValueError, r"^cu_seqlens_k must start at 0, never decrease"),
    (dict(cu_seqlens_k=torch.tensor([0, 3, 8])), ValueError, r"^cu_seqlens_k must .* end at most at 7"),
    (dict(max_seqlen_q=3), ValueError, r"^max_seqlen_q: the longest sequence of cu_seqlens_q has 4 rows, got 3"),
    (dict(max_seqlen_k=3), ValueError, r"^max_seqlen_k: the longest sequence of cu_seqlens_k has 4 rows, got 3"),
    (dict(seqused_k=torch.tensor([4, 2])), ValueError, r"^seqused_k must be between 0 and a sequence's keys, 3, got 4"),
    (dict(seqused_k=torch.tensor([3, -2])), ValueError, r"^seqused_k must be between 0 and a sequence's keys, 4, got -2"),
]  # fmt: skip


def ids(rows):
    return [f"{n}-{'-'.join(change)}" for n, (change, _, _) in enumerate(rows)]


def test_the_valid_calls_are_valid():
    """The templates that the tests below spoil are fine themselves."""
    assert dense().shape == (2, 4, 6, 8)
    assert packed(validate=True).shape == (6, 4, 8)
    assert packed(seqused_k=torch.tensor([3, 0])).shape == (6, 4, 8)
    spread = torch.tensor([0, 9, 2, 9, 6, 9])[::2]
    assert packed(cu_seqlens_q=spread).equal(packed())  # of any stride


@pytest.mark.parametrize(("change", "error", "words"), DENSE, ids=ids(DENSE))
def test_dense_input_is_refused(change, error, words):
    """Rows 22, 63 (windows below -1), 70 (slopes that want a gradient), 150 (odd shapes): an error by name.

    Also behind the same call without the fault: what was checked for one call is not for another that looks like it.
    """
    dense()
    with pytest.raises(error, match=words):
        dense(**change)


@pytest.mark.parametrize(("change", "error", "words"), PACKED, ids=ids(PACKED))
def test_packed_input_is_refused(change, error, words):
    """Rows 59 (kinds of cu_seqlens), 97 (max_seqlen as a tensor). Also behind the same call without the fault."""
    packed()
    with pytest.raises(error, match=words):
        packed(**change)


def test_cu_seqlens_elsewhere_are_refused_behind_the_same_call():
    """No values are read there, and so such a call is looked up first: their device must be part of what is looked up."""
    q, cu = torch.zeros(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    elsewhere = cu.to(META)
    for here, there in ((cu, elsewhere), (cu.clone(), elsewhere.clone())):
        for _ in range(2):
            flash_attn_varlen(q, q, q, cu, here, 4, 4)
        with pytest.raises(ValueError, match=r"^cu_seqlens_q must be on q's device cpu, got meta"):
            flash_attn_varlen(q, q, q, elsewhere, there, 4, 4)


@pytest.mark.parametrize(("change", "error", "words"), DENSE, ids=ids(DENSE))
def test_supports_says_what_the_call_says(change, error, words):
    """``supports`` answers no exactly where the call raises, with the same words."""
    with pytest.raises(error) as raised:
        dense(**change)
    arguments = dict(q=torch.zeros(2, 4, 6, 8), k=torch.zeros(2, 2, 7, 8), v=torch.zeros(2, 2, 7, 8)) | change
    answer = supports(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert not answer
    assert answer.reason == str(raised.value)


@pytest.mark.parametrize(("change", "error", "words"), PACKED, ids=ids(PACKED))
def test_supports_says_what_the_packed_call_says(change, error, words):
    with pytest.raises(error) as raised:
        packed(**change)
    arguments = packed_arguments(**change)
    answer = supports(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert not answer
    assert answer.reason == str(raised.value)


def test_supports_answers_for_packed_calls():
    arguments = packed_arguments(causal=True, return_lse=True, seqused_k=torch.tensor([3, 0]))
    q, k, v = (arguments.pop(name) for name in "qkv")
    assert supports(q, k, v, **arguments) == (True, "", "reference")
    del arguments["max_seqlen_k"], arguments["cu_seqlens_k"]
    answer = supports(q, k, v, **arguments)
    assert not answer
    assert answer.reason.startswith(
        "cu_seqlens_k must be given too: a packed call has cu_seqlens_q, cu_seqlens_k, max_seqlen_q"
    )


@pytest.mark.parametrize("impl", ["auto", "triton", "hopper", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_supports_answers_for_meta_tensors_as_the_call_does(dtype, impl):
    """They have shapes and nothing to compute: every implementation takes them, and every fault of shape is one."""
    x, cu = torch.zeros(6, 2, 8, dtype=dtype, device=META), torch.zeros(3, dtype=torch.int32, device=META)
    ends = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4)
    assert flash_attn(x[None], x[None], x[None], impl=impl).is_meta and supports(x[None], x[None], x[None], impl=impl)
    assert flash_attn_varlen(x, x, x, **ends, impl=impl).is_meta and supports(x, x, x, **ends, impl=impl)
    assert not supports(x[None], x[None, 1:], x[None], impl=impl)
    assert not supports(x, x, x, **ends | dict(cu_seqlens_q=torch.zeros(3, dtype=torch.int32)), impl=impl)


def gpu(**keywords):
    """The valid packed call on a GPU, some arguments replaced."""
    x = torch.zeros(7, 2, 16, dtype=torch.half, device="cuda")
    cu = torch.tensor([0, 3, 7], dtype=torch.int32, device="cuda")
    arguments = dict(q=x, k=x, v=x, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4) | keywords
    return flash_attn_varlen(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "values"),
    [("cu_seqlens_q", [1, 3, 7]), ("cu_seqlens_k", [0, 5, 3]), ("cu_seqlens_k", [0, 3, 8]), ("seqused_k", [4, 2])],
)
def test_values_on_a_gpu_are_read_when_asked(name, values):
    """validate=True waits for the device and says what is wrong; without it nothing is read back."""
    with pytest.raises(ValueError, match=rf"^{name} must"):
        gpu(**{name: torch.tensor(values, device="cuda")}, validate=True)
    with pytest.raises(ValueError, match=r"^max_seqlen_k: the longest sequence"):
        gpu(max_seqlen_k=3, validate=True)
    assert gpu(validate=True).shape == (7, 2, 16)


@pytest.mark.gpu
def test_used_keys_on_a_gpu_are_read_when_asked():
    q = torch.zeros(1, 2, 5, 16, dtype=torch.half, device="cuda")
    with pytest.raises(ValueError, match=r"^seqused_k must be between 0 and a sequence's keys, 5, got 6"):
        flash_attn(q, q, q, seqused_k=torch.tensor([6], device="cuda"), validate=True)


def test_supports():
    q, k = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)
    yes = supports(q, k, k, causal=True, return_lse=True, deterministic=True)
    assert yes and yes.ok and yes.impl == "reference" and not yes.reason
    no = supports(q, k, k, windows=(1, 0))
    assert not no and "unknown keyword 'windows'" in no.reason


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 is set: CPU tensors do run on the kernels")
def test_an_explicit_impl_never_falls_back():
    """Row 119: impl="triton" on CPU tensors without the interpreter says what to do; it does not quietly compute otherwise."""
    q = torch.zeros(1, 2, 3, 8, dtype=torch.half)
    with pytest.raises(
        NotImplementedError,
        match=r"CPU tensors need Triton's interpreter .* or impl='reference'|Triton is not installed",
    ):
        flash_attn(q, q, q, impl="triton")
    with pytest.raises(NotImplementedError, match=r"Hopper|interpreter|Triton is not installed"):
        flash_attn(q, q, q, impl="hopper")


def test_float32_is_refused_by_the_kernels():
    """Row 46: float32 on the kernels is refused by name instead of computed in TF32."""
    q = torch.zeros(1, 2, 3, 8)
    for impl in ("triton", "hopper"):
        words = (
            rf"^impl='{impl}': q: .* float16 and bfloat16, got torch\.float32; impl='reference'|Triton is not installed"
        )
        with pytest.raises(NotImplementedError, match=words):
            flash_attn(q, q, q, impl=impl)


def test_float32_on_the_cpu_is_float32():
    """Row 46: gradients of the float32 path are below 1e-4 from float64."""
    leaves = [torch.randn(1, 1, 128, 32).requires_grad_() for _ in range(3)]
    high = [x.detach().double().requires_grad_() for x in leaves]
    do = torch.randn(1, 1, 128, 32)
    low = torch.autograd.grad(flash_attn(*leaves, causal=True), leaves, do)
    right = torch.autograd.grad(flash_attn(*high, causal=True), high, do.double())
    assert max((a - b).abs().max().item() for a, b in zip(low, right, strict=True)) < 1e-5


@pytest.mark.parametrize("limit", [16384, 4096])
def test_a_gpu_too_small_is_named(limit):
    """Row 122: where no tile fits, the message has the head dimension, the need and the limit."""
    from flashtri_core.tuning import choose

    problem = Problem(1, 1, 1, 64, 64, 256, 256, torch.float16, 1.0)
    with pytest.raises(NotImplementedError, match=rf"head dimensions 256 and 256: .* needs \d+ bytes .* has {limit}"):
        choose("dkdv", problem, Target(86, limit))


def test_dropout_mask_checks_its_probability():
    with pytest.raises(ValueError, match="dropout_p must be in"):
        dropout_mask(torch.zeros(2, dtype=torch.int64), (1, 1, 2, 2), 1.0)


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 1, -2, 2), (1, 1, 2.0, 2), 4, None])
def test_dropout_mask_checks_its_shape(shape):
    with pytest.raises(ValueError, match=r"^shape must be \(B, Hq, Nq, Nk\), none negative, got"):
        dropout_mask(torch.zeros(2, dtype=torch.int64), shape, 0.5)


@pytest.mark.parametrize("device", ["bogus", None, 1.5])
def test_draw_rng_names_its_device(device):
    with pytest.raises(ValueError, match=f"^device must be one that torch knows, got {device!r}"):
        draw_rng(device)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_draw_rng_says_that_there_is_no_gpu(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"^device must be one that is here, got 'cuda(:1)?', and torch sees no CUDA GPU"
    ):
        draw_rng(device)


def test_packing_names_what_is_no_tensor():
    x, lengths = torch.zeros(2, 3), torch.tensor([1, 2])
    for call, name in (
        (lambda: pack(None, lengths), "padded"), (lambda: pack(x, [1, 2]), "lengths"),
        (lambda: unpack(None, lengths, 3), "values"), (lambda: unpack(x, [0, 1], 3), "cu_seqlens"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"^{name} must be a tensor, got (NoneType|list)"):
            call()


@pytest.mark.parametrize("starts", [[2, 5, 7], [0, 3, 2], [], [[0, 1]], [0.0, 1.0]], ids=str)
def test_unpack_names_starts_that_are_none(starts):
    """Rows 0 to 4 stood for sequences that begin at row 2."""
    with pytest.raises((TypeError, ValueError), match=r"^cu_seqlens must "):
        unpack(torch.zeros(9, 4), torch.tensor(starts, dtype=None if starts else torch.int32), 9)


def test_meta_tensors_have_no_values_to_read():
    q, cu = torch.zeros(2, 1, 6, 8, device=META), torch.zeros(3, dtype=torch.int32, device=META)
    for call, name in (
        (lambda: pack(torch.zeros(3, 4, device=META), cu), "lengths"),
        (lambda: unpack(torch.zeros(9, 4, device=META), cu, 9), "cu_seqlens"),
        (lambda: flash_attn(q, q, q, seqused_k=cu[1:], validate=True), "seqused_k"),
        (lambda: flash_attn_varlen(q[0], q[0], q[0], cu, cu, 1, 1, validate=True), "cu_seqlens_q"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must have values to read, got a meta tensor"):
            call()
    assert flash_attn(q, q, q, seqused_k=cu[1:]).is_meta  # without validate nothing is read


def test_unpack_names_a_length_that_is_no_int():
    with pytest.raises(TypeError, match=r"^length must be an int, got float"):
        unpack(torch.zeros(9, 4), torch.tensor([0, 9]), 9.0)


def test_the_process_survives_empty_heads():
    """Row 150: no division by zero in native code; the interpreter lives on."""
    code = (
        "import torch\nfrom flashtri_core import flash_attn\n"
        "for hq, hk in ((4, 0), (0, 4), (0, 0)):\n"
        "    q, k = torch.zeros(1, hq, 2, 8), torch.zeros(1, hk, 2, 8)\n"
        "    try:\n        flash_attn(q, k, k)\n    except ValueError as error:\n        print(str(error)[:7])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["q's hea"] * 3


def test_extras_default_to_off():
    assert all(value is None for value in Extras())
