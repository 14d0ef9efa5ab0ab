import dataclasses
import sys
import types

import pytest
import torch

from flashtri_bench.cases import BY_ID, SUITES, Case
from flashtri_bench.checks import Reference
from flashtri_bench.inputs import draw
from flashtri_bench.peers import PEERS, FlashAttn, Flashtri

SMALL = Case("x", "x", 2, 4, 4, 40, 40, 16, 16, causal=True)


def assert_right(peer, case):
    inputs = draw(case, torch.float32, "cpu")
    check = Reference(inputs, every=True).compare(peer.prepare(inputs).results(), ours=False)
    assert check.ok, check.reason


@pytest.mark.parametrize("name", ["flashtri", "torch-flash", "torch-math", "eager"])
@pytest.mark.parametrize("causal", [False, True])
def test_cpu_peers_are_right(name, causal):
    assert_right(PEERS[name], dataclasses.replace(SMALL, causal=causal))


FLEX = [
    "features-window1024", "features-varlen22", "features-softcap30", "features-sink", "features-alibi",
    "features-bias-n4096", "gqa-h32-8-n8192", "models-whisper-cross-n448-1500", "models-deepseek-v3-n4096",
]  # fmt: skip


@pytest.mark.parametrize("name", FLEX)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:.*return_lse is deprecated")
def test_flex_masks_and_scores_say_what_the_case_says(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    inputs = draw(BY_ID[name].smoke(), torch.float32, "cpu")
    call = PEERS["flex"].prepare(inputs)
    leaves = [t.detach() for t in inputs.laid_out(call.layout)]  # it has no gradients on a CPU
    with torch.no_grad():
        out = inputs.canonical(call.attend(*leaves[:3]), call.layout)
    check = Reference(inputs, every=True).compare({"out": out}, ours=False)
    assert check.ok, check.reason


@pytest.mark.parametrize("name", ["features-alibi", "features-bias-n4096"])
def test_dense_masks_for_sdpa(name):
    assert_right(PEERS["torch-math"], BY_ID[name].smoke())


def fake_package(monkeypatch, module, seen, tuple_out=True):
    """A module with the flash-attn functions that computes by the exact CPU path and remembers its arguments."""
    from flashtri_core import flash_attn, flash_attn_varlen

    def flash_attn_func(q, k, v, causal=False, window_size=(None, None), softcap=0.0, learnable_sink=None):
        seen.append(("dense", q, window_size))
        window = tuple(-1 if w is None else w for w in window_size)
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        out = flash_attn(
            *heads_first, causal=causal, window_size=window, softcap=softcap, learnable_sink=learnable_sink
        ).transpose(1, 2)
        return (out, None) if tuple_out else out

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
        seen.append(("packed", q, max_seqlen_q))
        return flash_attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal)

    made = types.ModuleType(module)
    made.flash_attn_func, made.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    if "." in module:
        monkeypatch.setitem(sys.modules, module.partition(".")[0], types.ModuleType(module.partition(".")[0]))
    monkeypatch.setitem(sys.modules, module, made)


@pytest.mark.parametrize("tuple_out", [True, False])
@pytest.mark.parametrize(
    "name", ["features-plain", "features-window1024", "features-varlen22", "features-softcap30", "features-sink"]
)
def test_flash_attn_packages_are_called_in_their_own_layout(name, tuple_out, monkeypatch):
    seen = []
    fake_package(monkeypatch, "flash_attn.cute", seen, tuple_out)
    peer, case = FlashAttn("fa4", "flash-attn 4", "flash_attn.cute", "flash-attn-4"), BY_ID[name].smoke()
    assert peer.refuses(case) is None
    assert_right(peer, case)
    kind, q, options = seen[0]
    assert q.is_contiguous()
    if case.packed:
        assert (kind, tuple(q.shape)) == ("packed", (case.tokens_q, case.heads_q, case.head_dim))
        assert options == case.seqlen_q
    else:
        assert (kind, tuple(q.shape)) == ("dense", (case.batch, case.seqlen_q, case.heads_q, case.head_dim))
        assert options == (case.window or (None, None))


def test_unbounded_window_is_none_for_flash_attn_4_and_minus_one_before(monkeypatch):
    case = dataclasses.replace(SMALL, causal=False, window=(-1, 3))
    for module, unbounded in (("flash_attn.cute", None), ("flash_attn_interface", -1)):
        seen = []
        fake_package(monkeypatch, module, seen)
        FlashAttn("fa", "fa", module, "fa").prepare(draw(case, torch.float32, "cpu")).results()
        assert seen[0][2] == (unbounded, 3)


def test_a_missing_keyword_is_a_reason(monkeypatch):
    fake_package(monkeypatch, "flash_attn.cute", [])
    peer = FlashAttn("fa4", "flash-attn 4", "flash_attn.cute", "flash-attn-4")
    assert peer.refuses(BY_ID["features-dropout10"]) == "flash-attn 4 has no dropout_p"
    assert peer.refuses(BY_ID["features-alibi"]) == "flash-attn 4 has no alibi_slopes"
    assert PEERS["fa4-deterministic"].refuses(SMALL) == "flash-attn 4 (deterministic) has no deterministic"


@pytest.mark.parametrize("name", list(PEERS))
def test_nothing_is_copied_inside_the_timed_call(name, monkeypatch):
    """A copy inside the timed call charges a peer for another's convention: it must get storage made before."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for module in ("flash_attn.cute", "flash_attn", "flash_attn_interface"):
        fake_package(monkeypatch, module, seen)
    if name == "fa4-deterministic":  # the stand-in has no such keyword
        monkeypatch.setattr(PEERS[name], "deterministic", False)
    impl = "reference" if name.startswith("flashtri") else None
    peer = Flashtri(impl) if impl else PEERS[name]
    inputs = draw(SMALL, torch.float32, "cpu")
    call = peer.prepare(inputs)
    made = [t.data_ptr() for t in inputs.laid_out(call.layout)]
    got = []
    monkeypatch.setattr(call, "attend", lambda q, k, v: got.extend(t.data_ptr() for t in (q, k, v)))
    call.forward()
    assert got == made[:3]
    assert [t.data_ptr() for t in call.wrt] == made[:3]
    assert call.dout.data_ptr() == made[3]
    assert all(t.is_contiguous() for t in inputs.laid_out(call.layout))


def test_every_peer_runs_or_says_why():
    for case in (c for suite in SUITES.values() for c in suite):
        for name, peer in PEERS.items():
            if name.startswith("fa"):  # their keywords need the package
                continue
            reason = peer.refuses(case)
            assert reason is None or len(reason) > 10


def test_kernels_need_a_gpu_and_say_so():
    for name in ("flashtri-triton", "flashtri-hopper", "torch-cudnn", "torch-efficient", "fa2", "fa3", "fa4"):
        assert PEERS[name].unavailable("cpu") == "needs a GPU"
    assert PEERS["flashtri"].unavailable("cpu") is None


def test_a_package_that_cannot_be_imported_says_so():
    assert FlashAttn("x", "x", "no_such_package", "x").unavailable("cuda").startswith("not installed: ModuleNotFound")


def test_a_gradient_that_a_peer_does_not_give_is_said(monkeypatch):
    """A peer without a gradient for the sink does less work than one with it: its row must say so."""
    inputs = draw(BY_ID["features-sink"].smoke(), torch.float32, "cpu")
    call = PEERS["flashtri"].prepare(inputs)
    plain, call.resolved = call.attend, None
    assert inputs.sink is not None
    monkeypatch.setattr(call, "attend", lambda q, k, v: plain(q, k, v) if call.missing else q * 1.0 + v * 0.0 + k * 0.0)
    assert set(call.results()) == {"out", "dq", "dk", "dv"}
    assert call.resolved == "without dsink"
    assert set(call.results()) == {"out", "dq", "dk", "dv", "dsink"}


def test_deterministic_is_asked_for():
    inputs = draw(SMALL, torch.float32, "cpu")
    assert PEERS["flashtri-deterministic"].options(inputs)["deterministic"] is True
    assert "deterministic" not in PEERS["flashtri"].options(inputs)


def test_outlier_inputs_have_outliers_and_layouts_share_values():
    inputs = draw(dataclasses.replace(SMALL, batch=8, heads_q=16, heads_kv=16, inputs="outlier"), torch.float32, "cpu")
    assert inputs.q.abs().max() > 8
    assert draw(SMALL, torch.float32, "cpu").q.abs().max() < 8
    assert torch.equal(inputs.laid_out("bnhd")[0].transpose(1, 2), inputs.laid_out("bhnd")[0])
    inputs.keep_only("bnhd")
    assert inputs.q.data_ptr() == inputs.laid_out("bnhd")[0].data_ptr()
    with pytest.raises(ValueError, match="layout: got 'thd', supported here are bhnd, bnhd"):
        inputs.laid_out("thd")
