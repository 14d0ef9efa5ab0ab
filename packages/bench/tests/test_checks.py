import dataclasses

import pytest
import torch
import torch.nn.functional as F

from flashtri_bench.cases import BY_ID, Case
from flashtri_bench.checks import Reference, dropout_is_plausible
from flashtri_bench.inputs import draw

SMALL = Case("x", "x", 2, 4, 2, 24, 33, 16, 16, causal=True)


def exact(inputs):
    """Output and gradients by torch's own attention in fp64, unchunked."""
    case = inputs.case
    q, k, v = (t.detach().double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    i = torch.arange(case.seqlen_q)[:, None] + case.seqlen_k - case.seqlen_q
    keep = torch.arange(case.seqlen_k)[None, :] <= i if case.causal else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)
    return {"out": out.detach()} | dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), inputs.dout.double()), strict=True)
    )


def test_reference_agrees_with_torch_in_fp64(monkeypatch):
    monkeypatch.setattr("flashtri_bench.checks.SCORE_BLOCK", 200)  # several blocks of rows
    inputs = draw(SMALL, torch.float32, "cpu")
    found = Reference(inputs, every=True).compare(exact(inputs), ours=True)
    assert found.ok
    assert max(error.max for error in found.errors.values()) < 1e-12


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_a_single_wrong_entry_is_red(name):
    """A fast kernel that is wrong in one entry of one tensor gets no row."""
    inputs = draw(SMALL, torch.float32, "cpu")
    reference = Reference(inputs, every=True)
    results = {k: t.float() for k, t in exact(inputs).items()}
    assert reference.compare(results, ours=True).ok
    results[name] = results[name].clone()
    results[name][1, 1, 7, 3] += 1e-3
    red = reference.compare(results, ours=True)
    assert not red.ok
    assert red.tensor == name
    assert f"wrong result: {name} is off by" in red.reason


def test_nan_is_red():
    inputs = draw(SMALL, torch.float32, "cpu")
    results = exact(inputs)
    results["out"][0, 0, 0, 0] = float("nan")
    assert not Reference(inputs, every=True).compare(results, ours=False).ok


def test_peers_have_a_wider_budget_and_show_it():
    inputs = draw(SMALL, torch.bfloat16, "cpu")
    reference = Reference(inputs, every=True)
    results = exact(inputs)
    results["dq"] = results["dq"] + 4 * reference.eager["dq"].max
    assert not reference.compare(results, ours=True).ok
    peer = reference.compare(results, ours=False)
    assert peer.ok
    assert peer.ratio == pytest.approx(4.0, rel=0.05)


def test_a_slice_of_a_big_problem_has_its_last_head():
    """Offsets are largest in the last batch and head: that is where an overflow would show."""
    case = dataclasses.replace(SMALL, seqlen_q=48, seqlen_k=48, heads_q=8, heads_kv=4)
    inputs = draw(case, torch.float32, "cpu")
    pieces = Reference(inputs).pieces
    assert {(p.batch, p.head) for p in pieces} == {(0, 0), (1, 3)}
    results = exact(inputs)
    results["dv"][1, 3, 40, 0] += 1.0
    assert not Reference(inputs).compare(results, ours=False).ok


FEATURES = ["features-window1024", "features-varlen22", "features-softcap30", "features-sink", "features-alibi",
            "features-bias-n4096", "models-gemma2-9b-n4096", "models-gpt-oss-window-n8192", "models-deepseek-v3-n4096",
            "models-whisper-cross-n448-1500"]  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_two_references_agree(name):
    """The benchmark's reference is written apart from the core's: a wrong reading of a feature shows here."""
    from flashtri_bench.peers import Flashtri

    inputs = draw(BY_ID[name].smoke(), torch.float64, "cpu")
    found = Reference(inputs, every=True).compare(Flashtri("reference").prepare(inputs).results(), ours=True)
    assert max(error.max for error in found.errors.values()) < 1e-10


def test_rows_without_keys_are_zero():
    case = dataclasses.replace(SMALL, seqlen_q=8, seqlen_k=3, heads_kv=4)
    reference = Reference(draw(case, torch.float32, "cpu"), every=True)
    for out, dq in zip(reference.exact["out"], reference.exact["dq"], strict=True):
        assert not out[:, :5].any()
        assert not dq[:, :5].any()
        assert out[:, 5:].abs().min() > 0


def test_dropout_must_keep_the_mean_and_both_passes_must_drop_alike():
    torch.manual_seed(0)
    p = torch.softmax(torch.randn(64, 64, 64), -1)
    keep = (torch.rand_like(p) > 0.1) / 0.9
    ones = torch.ones(64, 64, 8)
    out, dv = (p * keep) @ ones, (p * keep).transpose(1, 2) @ ones
    assert dropout_is_plausible(out, dv) is None
    assert "changes the mean" in dropout_is_plausible(out * 0.9, dv * 0.9)
    assert "drops nothing" in dropout_is_plausible(ones, ones)
    assert "differs between the passes" in dropout_is_plausible(out, p.transpose(1, 2) @ ones * 0.95)
