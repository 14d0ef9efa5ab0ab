"""The Hopper kernels compute what they should, on CPU tensors: their own source, run by testing/gluon_cpu.

Every case of the shared table that they take, at sizes of a few tiles, forward and both backward paths. The seed decides
which partition runs when and when a copy lands.
"""

import dataclasses
import zlib

import pytest
import torch

from flashtri_core import flash_attn, flash_attn_varlen, supports
from flashtri_core.testing import budget, cases
from flashtri_core.testing.cases import CASES, Case

pytest.importorskip("triton", reason="Triton exists on Linux only")
from flashtri_core._jit import INTERPRETED

if INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is set: jit functions are the interpreter's", allow_module_level=True)
from flashtri_core.kernels.hopper import launch_backward, launch_forward
from flashtri_core.testing import gluon_cpu

HALF, BFLOAT = torch.float16, torch.bfloat16
NAN = float("nan")


def check(case, dtype=HALF, backward=True, deterministic=(False, True), seed=0, pieces=(), **emulation):
    """Forward and every gradient, through both backward paths (above D = 128 there is one), within the budget.

    ``pieces``: a list whose last plan is that of the call by then.
    """
    given = cases.inputs(case, dtype)
    right, eager = cases.exact(given, torch.float64, backward), cases.exact(given, dtype, backward)
    for path in deterministic if backward and max(case.d, case.dv or 0) <= 128 else (False,):
        with gluon_cpu.emulate(seed, **emulation) as emulator:
            got = cases.run(given, "hopper", backward, deterministic=path)
        behind = (2 if backward else 1) if case.lengths else 0  # what lies behind the last sequence
        more = len(pieces[-1].pieces) - 1 if pieces else 0
        assert emulator.launches - behind - more in ((5, 4, 3) if backward else (1,))
        budget.check(got, right, eager)


# ------------------------------------------------------------------------------------------------- the shared cases
def taken(case):
    """Whether the Hopper kernels take it; what they refuse, the tests of their reasons cover."""
    refused = case.bias or case.mask or case.dropout_p or {"offset", "padded"} & set(case.layouts[:3])
    return not refused and (case.dv or case.d) == case.d and case.d % 8 == 0


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES.values() if taken(c)])
def test_case(case, poisoned):
    """D = 32 to 64 and 96 to 128, in turns with the dtype."""
    number = zlib.crc32(case.name.encode())
    check(case.grown(6, (4, 8)[number % 2]), (HALF, BFLOAT)[number // 2 % 2], seed=number)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [8, 64, 72, 80, 96, 128])
def test_head_dims(d, causal, poisoned):
    check(Case("head_dim", nq=200, nk=270, d=d, causal=causal, layouts=("rows_first",) * 4), BFLOAT, seed=d)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("d", "dv"), [(136, 136), (192, 192), (256, 256), (192, 128)], ids=str)
def test_wide_heads(d, dv, causal, poisoned):
    check(Case("wide", nq=200, nk=270, d=d, dv=dv, causal=causal), BFLOAT, seed=d)


@pytest.mark.parametrize(
    "name", ["alibi_causal", "sink", "softcap", "window", "seqused", "group_of_3", "ones_from_sum"]
)
def test_wide_heads_with_features(name, poisoned):
    check(dataclasses.replace(CASES[name].grown(4), d=192), HALF, seed=len(name))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_packed_head_dims(d, causal, poisoned):
    """At D = 96 and 128 the dQ kernel read other rows' statistics: it numbered their blocks by its own rows, not by theirs."""
    lengths = ((1, 5), (128, 128), (150, 130), (0, 3), (77, 0), (263, 300), (65, 129))
    check(Case("packed", lengths=lengths, d=d, causal=causal, tail=(3, 5)), HALF, seed=d)


@pytest.mark.parametrize("layout", ["rows_first", "expanded", "offset", "padded", "columns", "ones"])
def test_layouts_of_the_output_gradient(layout):
    check(Case("do", batch=2, nq=70, nk=130, d=64, layouts=("fused", "rows_first", "plain", layout)))


@pytest.mark.parametrize("window", [(0, 0), (100, 0), (100, 30), (-1, 20), (50, -1), (300, 0), (7, 3)])
@pytest.mark.parametrize(("nq", "nk"), [(300, 300), (150, 350), (350, 150)])
def test_windows(window, nq, nk, poisoned):
    check(Case("window", nq=nq, nk=nk, d=128 if nq > nk else 64, window=window), HALF, seed=sum(window))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("d", [64, 128])
def test_all_features_together(d, seed, poisoned):
    case = Case("all", heads=(4, 2), nq=200, nk=300, d=d, window=(150, 20), softcap=5.0, alibi="h", sink=True)
    check(case, BFLOAT, seed=seed)


@pytest.mark.parametrize("slopes", [(0.01, -0.01), (1.0, 1e-4), (1.35, 1.45), (30.0, 1e4)], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (500, 0)], ids=str)
@pytest.mark.parametrize("d", [64, 128, 192])
def test_alibi_over_many_blocks(d, window, slopes, poisoned):
    """Most blocks need no mask there, up to a slope of 1.386; with a negative slope the farthest keys weigh most."""
    given = cases.inputs(Case("alibi", nq=200, nk=900, d=d, causal=True, window=window, alibi="h"), HALF)
    given.tensors["alibi_slopes"] = torch.tensor(slopes)
    right, eager = cases.exact(given, torch.float64), cases.exact(given, HALF)
    for path in (False, True) if d <= 128 else (False,):
        with gluon_cpu.emulate(d):
            got = cases.run(given, "hopper", deterministic=path)
        budget.check(got, right, eager)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (2, 1)], ids=str)
def test_negative_slopes_round_forward_and_backward_alike(heads, deterministic):
    """Scores of 36000 round by 0.002: what both passes round alike cancels out of P."""
    given = cases.inputs(Case("steep", heads=heads, nq=600, nk=600, d=64, causal=True, alibi="h"), HALF)
    given.tensors["alibi_slopes"] = torch.tensor([-30.0, -60.0])
    right, eager = cases.exact(given, torch.float64), cases.exact(given, HALF)
    with gluon_cpu.emulate(0):
        got = cases.run(given, "hopper", deterministic=deterministic)
    budget.check(got, right, eager)


def test_alibi_over_64k_keys():
    """However far away keys are, no more is lost than fp32 loses."""
    given = cases.inputs(Case("far", heads=(4, 1), nq=5, nk=1 << 16, d=64, causal=True, alibi="h"), HALF)
    given.tensors["alibi_slopes"] = torch.tensor([1.0, 0.01, 1e-4, -0.01])
    right = cases.exact(given, torch.float64, False)
    with gluon_cpu.emulate(0):
        got = cases.run(given, "hopper", False)
    budget.check(got, right, cases.exact(given, torch.float32, False))
    torch.testing.assert_close(got["lse"].double(), right["lse"], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("slope", [-3.3e5, -1e9, -1e30])
@pytest.mark.parametrize("d", [64, 128])
def test_a_bias_too_large_for_a_multiply_add(d, slope):
    """Exact, or NaN, as rows are whose scores are too large: not zero, as if they saw no key."""
    given = cases.inputs(Case("large", nq=128, nk=600, d=d, causal=True, alibi="h"), HALF)
    given.tensors["alibi_slopes"] = torch.tensor([slope, slope / 2])
    right = cases.exact(given, torch.float64, False)
    with gluon_cpu.emulate(0):
        got = cases.run(given, "hopper", False)
    lost = got["out"].isnan().any(-1)
    assert torch.equal(lost, got["lse"].isnan())
    torch.testing.assert_close(got["out"][~lost].double(), right["out"][~lost], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_slope_so_steep_that_float32_would_overflow(causal, deterministic):
    """The key on the diagonal has all the weight, one block or several away from where the tile begins."""
    given = cases.inputs(Case("steep", heads=(2, 2), nq=200, nk=600, d=64, causal=causal, alibi="h"), BFLOAT)
    given.tensors["alibi_slopes"] = torch.tensor([1e38, 3e38])
    right, eager = cases.exact(given, torch.float64), cases.exact(given, BFLOAT)
    with gluon_cpu.emulate(0):
        got = cases.run(given, "hopper", deterministic=deterministic)
    assert torch.equal(got["out"], given.tensors["v"][:, :, -200:])
    budget.check(got, right, eager)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_a_sign_in_a_flag(name, deterministic):
    """The second call differs from the first by the flag alone, and finds its plan."""
    plain = {
        key: torch.randn(1, 2, 70, 64, generator=torch.Generator().manual_seed(s)).half()
        for s, key in enumerate(("q", "k", "v", "do"))
    }

    def results(t):
        leaves = [t[key].detach().requires_grad_() for key in "qkv"]
        out = flash_attn(*leaves, deterministic=deterministic, impl="hopper")
        return out, *torch.autograd.grad(out, leaves, t["do"])

    with gluon_cpu.emulate(0):
        want, got = results(plain), results(plain | {name: torch._neg_view(-plain[name])})
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


HOOKED = {
    "dense": (Case("dense", batch=2, nq=20, nk=30, d=64, causal=True), cases.SAVED[:5]),
    "packed": (
        Case("packed", lengths=((5, 5), (9, 12)), tail=(2, 3), d=64, causal=True, alibi="h", sink=True, used=(3, 12)),
        ("alibi_slopes", "learnable_sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
    ),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in HOOKED for name in HOOKED[kind][1]])
def test_saved_tensors_come_back_from_hooks_with_the_same_values(kind, name, deterministic):
    given = cases.inputs(HOOKED[kind][0], HALF)
    same, sign, columns = (
        lambda x: x,
        lambda x: torch._neg_view(-x),
        lambda x: torch.stack((x, torch.ones_like(x)), -1)[..., 0],
    )
    with gluon_cpu.emulate(0):
        want, *others = (
            cases.run_with_hook(given, "hopper", name, change, deterministic=deterministic)
            for change in (same, sign, columns)
        )
    for got in others:
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(("d", "deterministic"), [(64, False), (64, True), (192, False)])
def test_what_lies_behind_the_keys_in_use(d, deterministic):
    """A cache may hold anything there, also NaN."""
    given = cases.inputs(Case("used", batch=2, heads=(2, 1), nq=70, nk=150, d=d, causal=True, used=(40, 150)), HALF)
    for name in "kv":
        given.tensors[name][0, :, 40:] = NAN
    right, eager = cases.exact(given), cases.exact(given, HALF)
    with gluon_cpu.emulate(0):
        got = cases.run(given, "hopper", deterministic=deterministic)
    budget.check(got, right, eager)
    assert not (got["dk"][0, :, 40:].any() or got["dv"][0, :, 40:].any())


@pytest.mark.parametrize("d", [64, 128])
def test_nan_is_not_lost(d):
    """A maximum drops NaN; the row that a NaN key or sink belongs to must not."""
    q, k, v = (torch.randn(1, 2, 200, d, generator=torch.Generator().manual_seed(s)).half() for s in range(3))
    k[:, 1, 150] = NAN
    for sink, lost in ((None, 0), (torch.tensor([NAN, 0.0]), 200)):
        with gluon_cpu.emulate(0):
            out = flash_attn(q, k, v, causal=True, learnable_sink=sink, impl="hopper")
        assert out[0, 0].isnan().any(-1).sum() == lost
        assert out[0, 1].isnan().any(-1).nonzero().flatten().tolist() == list(range(150, 200))


# ------------------------------------------------------------------------------------------------- schedules
def use(launcher, options, monkeypatch):
    """Launch what is shipped with some fields of its configuration changed."""
    tiles = launcher.tiles
    monkeypatch.setattr(launcher, "tiles", lambda *call: dataclasses.replace(tiles(*call), **options))


FORWARD = {
    "single": dict(order="single"),
    "static": dict(order="static"),
    "dynamic": dict(order="dynamic"),
    "no turns": dict(turns=False),
    "named barriers": dict(kv_stages=2, named_release=True),
    "mbarriers": dict(kv_stages=3, named_release=False),
    "one Q stage": dict(q_stages=1),
    "three warpgroups": dict(block_m=192, warpgroups=3, kv_stages=2),
    "one warpgroup, two blocks a multiprocessor": dict(
        block_m=128, block_n=64, warpgroups=1, kv_stages=4, turns=False, resident=2
    ),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", FORWARD)
def test_forward_schedules(name, causal, monkeypatch, poisoned):
    use(launch_forward, FORWARD[name], monkeypatch)
    for seed in range(2):
        check(Case("schedule", heads=(4, 2), nq=400, nk=330, d=64, causal=causal), HALF, backward=False, seed=seed)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("options", [
    dict(block_m=192, warpgroups=3, kv_stages=3, turns=True, resident=1),
    dict(block_m=128, warpgroups=2, kv_stages=2, turns=True, resident=1, named_release=True),
], ids=["three", "two"])  # fmt: skip
def test_warpgroups_without_rows(options, causal, monkeypatch, poisoned):
    """At a sequence's end, where the others have several key blocks to compute."""
    use(launch_forward, options, monkeypatch)
    lengths = ((200, 300), (65, 300), (1, 270), (0, 3), (193, 193), (300, 130))
    for seed in range(2):
        check(Case("ends", lengths=lengths, d=64, causal=causal, tail=(3, 5)), HALF, backward=False, seed=seed)


@pytest.mark.parametrize("options", [
    dict(early_dv=True, late_dk=False), dict(q_stages=3), dict(do_stages=3), dict(early_statistics=False), dict(early_statistics=True),
    dict(dk_last=False), dict(dk_last=True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("d", [64, 128])
def test_backward_schedules(d, options, monkeypatch, poisoned):
    use(launch_backward, options, monkeypatch)
    paths = (False,) if "dk_last" in options else (False, True)  # a deterministic dK has no dQ beside it
    check(Case("schedule", heads=(4, 2), nq=400, nk=330, d=d, causal=True), HALF, deterministic=paths)


@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize(("nq", "nk", "causal"), [(300, 400, False), (400, 300, False), (260, 400, True)])
def test_one_block_per_head(nq, nk, causal, d, monkeypatch, poisoned):
    monkeypatch.setattr(launch_backward, "tiles", lambda p, *call: launch_backward.whole_head(p))
    check(Case("whole head", heads=(2, 1), nq=nq, nk=nk, d=d, causal=causal), BFLOAT)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", [
    Case("full", batch=2, heads=(2, 2), nq=200, nk=250, d=64),
    Case("causal", batch=2, heads=(2, 2), nq=256, nk=256, d=64, causal=True),
    Case("group", batch=4, heads=(3, 1), nq=70, nk=300, d=40, causal=True, sink=True, layouts=("rows_first",) * 4),
], ids=lambda case: case.name)  # fmt: skip
def test_many_short_heads_take_a_block_each(case, deterministic, poisoned):
    """As shipped, where two multiprocessors have two heads each; then dQ's bits are the same in any interleaving."""
    given = cases.inputs(case, BFLOAT)
    right, eager = cases.exact(given, torch.float64), cases.exact(given, BFLOAT)
    found = []
    for seed in range(3):
        with gluon_cpu.emulate(seed, multiprocessors=2, resident=1 + seed) as emulator:
            found.append(cases.run(given, "hopper", deterministic=deterministic))
        assert emulator.launches == 3  # forward, pre-pass, all three gradients
        budget.check(found[-1], right, eager)
    assert all(torch.equal(x, other[name]) for other in found for name, x in found[0].items())


LATE = [
    Case("full", nq=200, nk=300), Case("causal", nq=300, nk=200, heads=(4, 2), causal=True, alibi="h", sink=True),
    Case("window", nq=150, nk=300, window=(30, 20), softcap=5.0), Case("used", nq=100, nk=150, batch=2, used=(100, 0)),
    Case("packed", lengths=((1, 5), (128, 128), (150, 130), (0, 3), (77, 0)), causal=True, tail=(3, 5)),
]  # fmt: skip


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("q_stages", [2, 3])
@pytest.mark.parametrize("case", LATE, ids=lambda case: case.name)
def test_late_dk(case, d, q_stages, monkeypatch, poisoned):
    split, late = launch_backward.split_tiles, {"late_dk": True, "early_dv": False, "q_stages": q_stages}
    monkeypatch.setattr(launch_backward, "tiles", lambda p, *call: dataclasses.replace(split(p), **late))
    check(dataclasses.replace(case, d=d), BFLOAT, deterministic=(True,), seed=q_stages)


PREPARED = {
    "full": Case("full", batch=4, heads=(2, 2), nq=200, nk=300),
    "fewer keys": Case("fewer keys", batch=6, heads=(2, 2), nq=300, nk=70),
    "one block of rows": Case("one block of rows", batch=5, nq=50, nk=130),
    "group": Case("group", batch=4, heads=(4, 2), nq=260, nk=200, causal=True, layouts=("rows_first",) * 4),
    "window": Case("window", batch=5, nq=300, nk=300, window=(30, 20), sink=True),
    "rows without keys": Case("rows without keys", batch=6, nq=300, nk=130, causal=True, sink=True),
    "scores": Case("scores", batch=4, heads=(2, 2), nq=150, nk=140, causal=True, softcap=5.0, alibi="h"),
    "used": Case("used", batch=4, nq=200, nk=150, used=(100, 0, 150, 7)),
    "narrow": Case("narrow", batch=5, nq=200, nk=200, d=72, dv=72, causal=True),
    "slopes of a batch": Case("slopes of a batch", batch=4, nq=65, nk=65, causal=True, alibi="bh"),
}  # fmt: skip


def prepares(monkeypatch, multiprocessors=1, converts=True):
    """As shipped for many heads, of which few run side by side, but for more features, and converted if that slows them down.

    Returns the plans that were made.
    """
    made, plan, fused = [], launch_backward.plan, launch_backward.fused_tiles
    wanted = dict(prepares=True, converts=converts)
    monkeypatch.setattr(launch_backward, "fused_tiles", lambda p: dataclasses.replace(fused(p), **wanted))
    monkeypatch.setattr(launch_backward, "l2_bytes_of", lambda p: 1)
    monkeypatch.setattr(launch_backward, "CONVERT_STEPS", {64: 0, 128: 0})
    monkeypatch.setattr(
        launch_backward, "plan", lambda p, d, c, m: made.append(plan(p, d, c, multiprocessors)) or made[-1]
    )
    return made


@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize(("name", "d"), [
    (name, d) for name, case in PREPARED.items() for d in (64, 128)
    if d == 128 or not case.softcap  # with a softcap, 64 columns take the split kernels
])  # fmt: skip
def test_rows_prepared_by_earlier_thread_blocks_and_converted_by_later_ones(name, d, converts, monkeypatch, poisoned):
    case = PREPARED[name]
    made = prepares(monkeypatch, converts=converts)
    for seed in range(3):
        check(
            dataclasses.replace(case, d=case.d if case.dv else d),
            HALF,
            deterministic=(False,),
            seed=seed,
            pieces=made,
            resident=2 + seed,
        )
    assert all(p.config.prepares and p.prepared < p.stat_blocks for p in made)
    assert all((len(p.pieces) > 1) is converts and (p.converted > 0) is converts for p in made)


def test_rows_of_a_smaller_last_group_of_heads(monkeypatch, poisoned):
    """Five heads run side by side, one is left over; and one thread block at a time must be able to go on."""
    made = prepares(monkeypatch)
    monkeypatch.setattr(launch_backward, "l2_bytes_of", lambda p: 5 * 324 * 512)
    case = Case("left over", batch=21, heads=(1, 1), nq=324, nk=216, d=64, causal=True)
    check(case, HALF, deterministic=(False,), pieces=made, resident=1)
    assert [(p.prepared, p.stat_blocks, p.sizes[6]) for p in made] == [(31, 63, 5)]


@pytest.mark.parametrize("d", [64, 128])
def test_prepared_rows_with_a_gradient_of_lse(d, monkeypatch, poisoned):
    made = prepares(monkeypatch)
    generator = torch.Generator().manual_seed(5)
    q, k, v, do = (torch.randn(4, 2, 200, d, generator=generator).to(HALF) for _ in range(4))
    dlse = torch.randn(4, 2, 200, generator=generator)

    def run(x, impl):
        leaves = [y.detach().to(x).requires_grad_() for y in (q, k, v)]
        out, lse = flash_attn(*leaves, causal=True, return_lse=True, impl=impl)
        return torch.autograd.grad((out, lse), leaves, (do.to(x), dlse.to(lse)))

    with gluon_cpu.emulate(3):
        got = run(HALF, "hopper")
    assert made[0].config.prepares
    names = ("dq", "dk", "dv")
    want, eager = (dict(zip(names, run(x, "reference"), strict=True)) for x in (torch.float64, HALF))
    budget.check(dict(zip(names, got, strict=True)), want, eager)


def test_an_output_that_tma_cannot_read_is_prepared_before(monkeypatch, poisoned):
    """Hooks give saved tensors back as they like. dK and dV have the same bits, whoever prepares."""
    made = prepares(monkeypatch)
    generator = torch.Generator().manual_seed(5)
    q, k, v, do = (torch.randn(4, 2, 200, 64, generator=generator).to(HALF) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def elsewhere(x):
        if x.dim() < 4 or x.data_ptr() in [y.data_ptr() for y in leaves]:
            return x
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)

    with gluon_cpu.emulate():
        want = torch.autograd.grad(flash_attn(*leaves, impl="hopper"), leaves, do)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, elsewhere):
            got = torch.autograd.grad(flash_attn(*leaves, impl="hopper"), leaves, do)
    assert [p.config.prepares for p in made] == [True, False]
    torch.testing.assert_close(got[0], want[0])
    assert all(torch.equal(x, y) for x, y in zip(got[1:], want[1:], strict=True))


FAULTS_FOR_OTHERS = {
    "rows nobody waits for": ("backward.load_do", "await_rows(rows.READY, unit, ready, prepared, sizes)", "pass", ""),
    "rows nobody counts": ("backward_prepare.prepare_rows", "(thread & 31) == 0", "thread < 0", "deadlock.*semaphores"),
    "no zeros": ("backward_prepare.prepare_rows", "gl.store(zeros, gl.zeros([512], gl.float32, FLAT))", "pass", ""),
    "no wait for O and dO": ("backward_prepare.prepare_rows", "mbarrier.wait(slots.full.index(slot), 0)", "pass", "TMA load fills"),
    "the blocks of another": ("backward_prepare.await_rows", "(unit + 1) * blocks", "unit * blocks", ""),
    "counted for another": ("backward_prepare.prepare_rows", "(begin + s) // (sizes", "(begin + s + 1) // (sizes", ""),
    "no wait for sums": ("backward_convert.convert_rows", "mbarrier.wait(sums.full.index(part % 2), ", "max(0, ", "TMA load fills"),
    "no fence behind dQ": ("backward_convert.convert_rows", "fence_async_shared()", "pass", "lacks fence"),
    "no wait for dQ to leave": ("backward_convert.convert_rows", "tma.store_wait(0)", "pass", "not waited for"),
    "another row's sums": ("backward_convert.load_part", "at % 4, 0, 0]", "at % 4 ^ 1, 0, 0]", ""),
    "a share too small": ("backward_convert.convert_rows", "begin + piece.each", "begin + piece.each - 1", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS_FOR_OTHERS)
def test_a_fault_in_what_is_done_for_others_is_noticed(fault, monkeypatch, poisoned):
    """By wrong numbers, or because nobody can go on."""
    place, old, new, words = FAULTS_FOR_OTHERS[fault]
    given = cases.inputs(dataclasses.replace(PREPARED["full"], d=(64, 128)[len(fault) % 2]), BFLOAT)
    right, eager = cases.exact(given, torch.float64), cases.exact(given, BFLOAT)
    prepares(monkeypatch, converts=place.startswith("backward_convert"))

    def run():
        for seed in range(12):
            with gluon_cpu.emulate(seed, resident=4, edits={place: (old, new)}):
                budget.check(cases.run(given, "hopper"), right, eager)

    with pytest.raises((gluon_cpu.EmulationError, AssertionError), match=words or None):
        run()


SHARED = {
    "causal": Case("causal", nq=200, nk=300, causal=True),
    "full, ragged": Case("full", batch=2, nq=130, nk=70, layouts=("rows_first",) * 4),
    "window": Case("window", nq=200, nk=300, window=(30, 20), sink=True),
    "scores": Case("scores", nq=150, nk=140, causal=True, softcap=5.0, alibi="h"),
    "used": Case("used", batch=3, nq=100, nk=150, used=(100, 0, 150), causal=True),
    "packed": Case("packed", lengths=((1, 5), (128, 128), (150, 130), (0, 3), (77, 0), (30, 65)), causal=True, tail=(3, 5)),
}  # fmt: skip


@pytest.mark.parametrize(("group", "split"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)])
@pytest.mark.parametrize("name", SHARED)
def test_shared_groups(name, group, split, monkeypatch, poisoned):
    """Several thread blocks take a group's heads, and the conversion pass adds their dK and dV."""
    use(launch_backward, {"group_split": split}, monkeypatch)
    heads = (2 * group, 2) if group < 8 else (8, 1)
    d = (64, 128, 40, 96)[(split + len(name)) % 4]
    check(dataclasses.replace(SHARED[name], heads=heads, d=d), BFLOAT, seed=split)


@pytest.mark.parametrize(("name", "d", "dv"), [("causal", 192, 128), ("full, ragged", 136, 136), ("packed", 256, 256)])
def test_shared_groups_of_wide_heads(name, d, dv, monkeypatch, poisoned):
    use(launch_backward, {"group_split": 2}, monkeypatch)
    check(dataclasses.replace(SHARED[name], heads=(8, 2), d=d, dv=dv), BFLOAT)


def test_shares_are_added_in_a_fixed_order(monkeypatch):
    """dK and dV, bit by bit, in any interleaving; and as shipped there are shares where thread blocks are few."""
    given = cases.inputs(Case("order", heads=(8, 1), nq=600, nk=200, d=128, causal=True), BFLOAT)
    workspace, splits, found = launch_backward.workspace, [], []
    monkeypatch.setattr(
        launch_backward, "workspace", lambda p, like: splits.append(p.config.group_split) or workspace(p, like)
    )
    for seed in range(3):
        with gluon_cpu.emulate(seed, multiprocessors=2, resident=1 + 2 * seed) as emulator:
            found.append(cases.run(given, "hopper"))
        assert emulator.launches == 4
    assert splits == [4, 4, 4]
    assert all(torch.equal(found[0][name], other[name]) for other in found for name in ("dk", "dv"))


def test_a_split_that_does_not_divide_the_group_is_refused(monkeypatch):
    use(launch_backward, {"group_split": 4}, monkeypatch)
    given = cases.inputs(Case("refused", heads=(6, 3), nq=70, nk=70, d=64), BFLOAT)
    with gluon_cpu.emulate(), pytest.raises(ValueError, match="group_split: must divide the 2 query heads"):
        cases.run(given, "hopper")


# ------------------------------------------------------------------------------------------------- ordered additions
ORDERED = {
    "full": Case("full", batch=2, nq=200, nk=400),
    "rotation": Case("rotation", batch=2, heads=(3, 3), nq=650, nk=900),
    "full, ragged": Case("full", heads=(4, 2), nq=330, nk=300, layouts=("rows_first",) * 4),
    "causal": Case("causal", nq=300, nk=400, heads=(4, 2), causal=True, sink=True),
    "causal, both ways": Case("causal", batch=2, heads=(3, 3), nq=300, nk=400, causal=True),
    "causal, rows that see nothing": Case("causal", nq=450, nk=300, causal=True),
    "window": Case("window", nq=500, nk=500, heads=(2, 1), window=(150, 20)),
    "window of one key": Case("window", nq=300, nk=420, window=(0, 0)),
    "window, open to the left": Case("window", nq=420, nk=300, window=(-1, 20)),
    "scores": Case("scores", nq=150, nk=300, causal=True, softcap=5.0, alibi="h"),
    "used": Case("used", batch=3, nq=150, nk=300, used=(139, 0, 300), causal=True),
    "packed": Case("packed", heads=(6, 2), lengths=((1, 5), (70, 280), (0, 3), (77, 0), (200, 150)), causal=True, tail=(3, 5)),
    "packed, full": Case("packed", lengths=((150, 330), (128, 128), (65, 300)), tail=(3, 5)),
    "packed window": Case("packed", heads=(4, 2), lengths=((150, 260), (1, 5), (200, 140)), window=(90, 10)),
}  # fmt: skip


def ordered(monkeypatch, **options):
    """Launch the fused kernel with dQ's additions in order; returns a list of the workspaces that it gets."""
    tiles, workspace, used = launch_backward.ordered_tiles, launch_backward.workspace, []
    monkeypatch.setattr(launch_backward, "tiles", lambda p, *call: dataclasses.replace(tiles(p), **options))
    monkeypatch.setattr(launch_backward, "workspace", lambda *call: used.append(workspace(*call)) or used[-1])
    return used


def some_orders(given, right, eager, used, seeds, residents=(1, 2, 3), **emulation):
    """Gradients within the budget, and the same bits, with so many thread blocks side by side.

    The same bits of dQ's fp32 accumulator: rounded to 16 bits, most sums in another order are equal.
    """
    found = []
    for seed in seeds:
        with gluon_cpu.emulate(seed, resident=residents[seed % len(residents)], **emulation):
            got = cases.run(given, "hopper")
        budget.check(got, right, eager)
        found.append({**got, "dq's accumulator": used[-1].acc})
        different = [name for name, x in found[0].items() if not torch.equal(x, found[-1][name])]
        assert not different, f"{different} in interleaving {seed}"
    return found[0]


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ORDERED)
def test_ordered_additions(name, d, monkeypatch, poisoned):
    """dQ of the fused kernel, bit by bit in any interleaving; half the cases in shares."""
    case = dataclasses.replace(ORDERED[name], d=d)
    split = (len(name) + d // 64) % 2 == 1
    group = case.heads[0] // case.heads[1]
    if case.softcap and d == 64:
        case = dataclasses.replace(case, softcap=0.0)  # whose tiles leave dQ out
    if split and group == 1:
        case, group = dataclasses.replace(case, heads=(4, 2)), 2
    given = cases.inputs(case, BFLOAT)
    right, eager = cases.exact(given, torch.float64), cases.exact(given, BFLOAT)
    some_orders(given, right, eager, ordered(monkeypatch, group_split=group if split else 1), range(6))


def test_ordered_additions_with_heads_in_groups(monkeypatch, poisoned):
    """As many heads side by side as their bytes allow; the last group is smaller."""
    given = cases.inputs(Case("groups", batch=3, heads=(1, 1), nq=150, nk=300, d=64, window=(200, 0)), BFLOAT)
    used = ordered(monkeypatch, l2_bytes=2 * 150 * 512)
    some_orders(given, cases.exact(given, torch.float64), cases.exact(given, BFLOAT), used, range(3))


@pytest.fixture
def plans(monkeypatch):
    """Every plan that is made from here on."""
    found, plan = [], launch_backward.plan
    monkeypatch.setattr(launch_backward, "plan", lambda *call: found.append(plan(*call)) or found[-1])
    return found


@pytest.mark.parametrize("most", [2, 3, 4, 8])
@pytest.mark.parametrize("d", [64, 128])
def test_rotations(d, most, monkeypatch, poisoned, plans):
    """Eight key tiles in several rotations and in one, with room for one and for more, some of it beneath preparation."""
    given = cases.inputs(dataclasses.replace(ORDERED["rotation"], d=d), BFLOAT)
    right, eager = cases.exact(given, torch.float64), cases.exact(given, BFLOAT)
    monkeypatch.setattr(launch_backward, "CONVERT_STEPS", {64: 0, 128: 0})
    monkeypatch.setattr(launch_backward, "PIECE_WAVES", 1)
    used = ordered(monkeypatch)
    residents = most, 2 * most, 2 * most + 1
    some_orders(given, right, eager, used, range(3), residents, multiprocessors=2 * most)
    assert plans[-1].config.rotation == most


@pytest.mark.parametrize("d", [64, 128])
def test_heads_that_walk_either_way(d, monkeypatch, poisoned, plans):
    """Causal: four heads one after another, then two side by side; their rows prepared by earlier ones."""
    given = cases.inputs(dataclasses.replace(ORDERED["causal, both ways"], d=d), BFLOAT)
    right, eager = cases.exact(given, torch.float64), cases.exact(given, BFLOAT)
    some_orders(given, right, eager, ordered(monkeypatch), range(6))
    assert plans[-1].config.both_ways
    assert plans[-1].config.prepares
    assert plans[-1].sizes[5:7] == (6, 2)


#: A fault, as below, and the case that shows it.
ORDER_FAULTS = {
    "added without waiting": ("backward.step", "mbarrier.wait(bars.turn", "mbarrier.wait(bars.ds_full", "dq", "full"),
    "handed on before it is added": ("backward_order.keep_order", "mbarrier.wait(added.index(stage), phase)", "pass", "deadlock|dq", "full"),
    "handed on when one warpgroup has added": (
        "backward.attn_bwd_hopper", "barriers(2, 2) if C.ordered", "barriers(2, 1) if C.ordered", "deadlock|dq|arriv", "full",
    ),
    "waits for the tile behind the next": ("backward_order.turn_of", "n + 2, 0)", "n + 3, 0)", "deadlock", "causal, both ways"),
    "waits for a tile that does not see the block": (
        "backward_walk.locate", "next_lo = gl.where(next_lo < next_hi, next_lo, hi)", "next_lo = lo", "deadlock", "window",
    ),
    "does not wait where the next tile begins": (
        "backward_order.turn_of", "m >= t.next_lo", "m > t.next_lo", "deadlock|dq", "causal, both ways",
    ),
    "handed on at the wrong place": (
        "backward_order.keep_order", "[address, lane * 0 + after", "[address + 4, lane * 0 + after", "deadlock|dq|outside", "full",
    ),
    "the last block kept": (
        "backward_order.keep_order", "(lane == 0)", "((lane == 0) & (at + 1 < t.hi * sizes.group))", "deadlock", "full",
    ),
    "semaphores not zeroed": (
        "backward_ends.attn_bwd_before_kernel", "tl.store(SEMAPHORES + pid, 0.0)", "pass", "deadlock", "full",
    ),
    "semaphores of rows that others prepare not zeroed": (
        "backward_ends.attn_bwd_before_kernel", "tl.store(SEMAPHORES + block, 0.0", "tl.store(SEMAPHORES + block, 1.0", "deadlock", "causal, both ways",
    ),
    "Q loaded in another order": (
        "backward.producer", "place_of(at, h0,", "place_of((t.lo + t.hi) * heads - 1 - at, h0,", "dq|dk", "causal",
    ),
    "a tile launched before the one it waits for": (
        "backward_walk.locate", "C.block_n, C.ordered)\n        z =", "C.block_n, False)\n        z =", "deadlock", "window",
    ),
    "a causal tile launched before the one it waits for": (
        "backward_walk.tile_of_either_way", "sizes.blocks - 1 - pid % sizes.blocks", "pid % sizes.blocks", "deadlock", "causal, both ways",
    ),
    "a descending tile launched before the one it waits for": (
        "backward_walk.tile_of_either_way", "rank // sizes.head_group,", "sizes.blocks - 1 - rank // sizes.head_group,", "deadlock",
        "causal, both ways",
    ),
    "descending tiles in the order of the others": (
        "backward_order.turn_of", "gl.where(t.descends, n, turn)", "turn", "deadlock", "causal, both ways",
    ),
    "a packed tile launched before the one it waits for": (
        "backward_walk.locate", "CU_K, C.block_n, C.ordered", "CU_K, C.block_n, False", "deadlock", "packed",
    ),
    "a rotation in another order than it walks": (
        "backward_order.turn_of", "((m + 1) * t.mates - 1) // t.hi", "(m * t.mates) // t.hi", "deadlock", "rotation",
    ),
    "a rotation before the one in front of it": (
        "backward_order.turn_of", "turn = n - t.place +", "turn =", "deadlock|dq", "rotation",
    ),
    "more heads' rotations begun than there is room for": (
        "backward_walk.rotating_tile", "rank // here, first + rank % here", "rank % heads_here, first + rank // heads_here",
        "deadlock", "rotation",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", ORDER_FAULTS)
def test_a_fault_in_the_order_is_noticed(fault, monkeypatch, poisoned):
    """By the other bits of dQ, by wrong numbers, or because nobody can go on."""
    place, old, new, words, name = ORDER_FAULTS[fault]
    given = cases.inputs(dataclasses.replace(ORDERED[name], d=(64, 128)[len(fault) % 2]), BFLOAT)
    right, eager = cases.exact(given, torch.float64), cases.exact(given, BFLOAT)
    used = ordered(monkeypatch)
    turning = dict(residents=(4, 6, 8), multiprocessors=8) if name == "rotation" else {}
    with pytest.raises((gluon_cpu.EmulationError, AssertionError), match=words):
        some_orders(given, right, eager, used, range(12), edits={place: (old, new)}, **turning)


# ------------------------------------------------------------------------------------------------- other memory
PATHS = [(64, False), (64, True), (128, False), (128, True), (192, False)]  # head dimension, deterministic


def packed(lengths, d=128, tail=0, dtype=HALF):
    generator = torch.Generator().manual_seed(7)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    shapes = [(sum(lengths) + tail, heads, d) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes], cu


def gradients(q, k, v, do, call, seed=0, deterministic=False):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with gluon_cpu.emulate(seed):
        out = call(*leaves, impl="hopper", deterministic=deterministic)
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]


@pytest.mark.parametrize(("d", "deterministic"), PATHS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_nan_stays_in_its_sequence(d, causal, deterministic, poisoned):
    lengths = [60, 128, 1, 150, 0, 77]
    tensors, cu = packed(lengths, d, tail=3)

    def run():
        return gradients(
            *tensors,
            lambda q, k, v, **kw: flash_attn_varlen(q, k, v, cu, cu, max(lengths), max(lengths), causal=causal, **kw),
            deterministic=deterministic,
        )

    clean = run()
    for x in tensors:
        x[cu[-1] :] = NAN
        x[cu[1] : cu[2]] = NAN
    own = torch.ones(len(tensors[0]), dtype=torch.bool)
    own[cu[1] : cu[2]] = False
    for x, y in zip(clean, run(), strict=True):
        if deterministic:
            assert torch.equal(x[own], y[own])
        torch.testing.assert_close(x[own], y[own])
        assert y[cu[1] : cu[2]].isnan().all()
        assert not y[cu[-1] :].any()


@pytest.mark.parametrize(("d", "deterministic"), PATHS)
def test_keys_past_those_in_use_are_not_looked_at(d, deterministic, poisoned):
    case = Case("seqused", batch=3, heads=(4, 2), nq=150, nk=300, d=d, used=(300, 139, 0), causal=True)
    given = cases.inputs(case, BFLOAT)
    right, eager = cases.exact(given), cases.exact(given, BFLOAT)
    for z, used in enumerate(case.used):
        for name in "kv":
            given.tensors[name][z, :, used:] = NAN
    with gluon_cpu.emulate():
        budget.check(cases.run(given, "hopper", deterministic=deterministic), right, eager)


@pytest.mark.parametrize(("d", "deterministic"), PATHS)
@pytest.mark.parametrize("shares", [1, 2])
def test_nan_in_a_query_leaves_keys_past_those_in_use_alone(d, deterministic, shares, monkeypatch, poisoned):
    """In q, v and dO: those keys' gradients are zeros, and the other head of keys has what it had."""
    use(launch_backward, dict(group_split=shares, whole_head=False), monkeypatch)
    case = Case("seqused", batch=2, heads=(4, 2), nq=70, nk=300, d=d, used=(139, 5))
    given = cases.inputs(case, HALF)
    given.tensors["q"][0, 0, 3] = given.tensors["v"][1, 0, 2] = given.do[0, 1, 66] = NAN
    with gluon_cpu.emulate():
        got = cases.run(given, "hopper", deterministic=deterministic)
    for z, used in enumerate(case.used):
        for name in ("dk", "dv"):
            assert not got[name][z, :, used:].any()
            assert torch.isfinite(got[name][z, 1, :used]).all()
        assert got["dk"][z, 0, :used].isnan().any()


def test_supports_follows_torch_s_deterministic_switch(monkeypatch):
    """As the call does: wide heads have no deterministic Hopper backward."""
    q = torch.zeros(1, 2, 3, 192, dtype=HALF)
    with gluon_cpu.emulate():
        assert supports(q, q, q, impl="hopper")
        assert not supports(q, q, q, impl="hopper", deterministic=True)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert "deterministic" in supports(q, q, q, impl="hopper").reason
        assert supports(q, q, q, impl="hopper", deterministic=False)


# ------------------------------------------------------------------------------------------------- interleavings
@pytest.mark.parametrize("d", [64, 128])
def test_results_do_not_depend_on_the_interleaving(d):
    """Bit by bit, but for dQ of the fused path, whose additions come in any order."""
    given = cases.inputs(Case("order", heads=(4, 2), nq=300, nk=300, d=d, causal=True), BFLOAT)
    found = {}
    for seed in range(3):
        for path in (False, True):
            with gluon_cpu.emulate(seed, multiprocessors=2 + seed, resident=1 + seed):
                got = cases.run(given, "hopper", deterministic=path)
            want = found.setdefault(path, got)
            same = {name for name in got if torch.equal(got[name], want[name])}
            assert set(got) - same <= (set() if path else {"dq"})
            torch.testing.assert_close(got["dq"], want["dq"])


def test_repeated_calls_reuse_the_plan_and_leave_the_counter_zero():
    q, k, v = (torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(i)).to(HALF) for i in range(3))
    with gluon_cpu.emulate() as emulator:
        first = flash_attn(q, k, v, impl="hopper")
        for _ in range(2):
            assert torch.equal(first, flash_attn(q, k, v, impl="hopper"))
        assert not any(counter.any() for counter in launch_forward._counters.values())
    assert emulator.launches == 3


@pytest.mark.parametrize("wanted", ["q", "kv"])
def test_part_of_the_gradients(wanted, monkeypatch):
    """Of the split kernels, which compute them without the others."""
    monkeypatch.setattr(launch_backward, "deterministic_tiles", launch_backward.split_tiles)
    tensors = [torch.randn(1, 2, 200, 64, generator=torch.Generator().manual_seed(i)).to(HALF) for i in range(4)]
    want = gradients(*tensors, flash_attn, deterministic=True)[1:]
    leaves = [x.detach().requires_grad_(name in wanted) for x, name in zip(tensors, "qkv", strict=False)]
    with gluon_cpu.emulate():
        out = flash_attn(*leaves, impl="hopper")
        got = torch.autograd.grad(out, [x for x in leaves if x.requires_grad], tensors[3])
    assert all(torch.equal(a, b) for a, b in zip(got, want[:1] if wanted == "q" else want[1:], strict=True))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
@pytest.mark.parametrize("d", [64, 128, 192])
def test_part_of_the_gradients_of_packed_tensors(d, wanted, poisoned):
    """Wide heads compute all three, and what lies behind the last sequence is filled in what was asked for."""
    lengths = [60, 129, 0]
    tensors, cu = packed(lengths, d, tail=3)

    def run(names):
        leaves = [x.detach().requires_grad_(name in names) for x, name in zip(tensors, "qkv", strict=False)]
        with gluon_cpu.emulate():
            for _ in range(2):  # planned, and by that plan
                out = flash_attn_varlen(*leaves, cu, cu, 129, 129, causal=True, impl="hopper")
                got = torch.autograd.grad(out, [x for x in leaves if x.requires_grad], tensors[3])
        return dict(zip(names, got, strict=True))

    whole = run("qkv")
    for name, x in run(wanted).items():
        torch.testing.assert_close(x, whole[name], atol=1e-3, rtol=1e-2)  # q alone takes another path
        assert not x[cu[-1] :].any()


# ------------------------------------------------------------------------------------------------- injected faults
FAULTS = {
    "a phase that never flips": ("forward.stage_of", "& 1", "& 0", "deadlock.*k_full"),
    "no wait for K": ("forward.step", "mbarrier.wait(bars.k_full.index(k_stage), k_phase)", "pass", "TMA load fills"),
    "no wait for V": ("forward.step", "mbarrier.wait(bars.v_full.index(k_stage), k_phase)", "pass", "TMA load|twice"),
    "no wait for a tile's Q": ("forward.first_block", "mbarrier.wait(bars.q_full.", "(bars.q_full.", "TMA load fills"),
    "Q loaded over O": (
        "forward.producer",
        "mbarrier.wait(bars.q_empty.",
        "(bars.q_empty.",
        "while a wgmma or a TMA store reads|TMA load fills",
        {"q_stages": 1},
    ),
    "K loaded too early": ("forward.load_k", "wait_empty(", "(", "while a wgmma or a TMA store reads"),
    "V loaded too early": ("forward.load_v", "wait_empty(", "(", "while a wgmma|named barrier twice"),
    "K and V loaded too early": (
        "forward.wait_empty",
        "mbarrier.wait(",
        "(",
        "while a wgmma or a TMA store reads",
        {"named_release": False},
    ),
    "K and V never released": (
        "forward.release",
        "mbarrier.arrive(bar.index(stage), count=1)",
        "pass",
        "deadlock.*k_empty",
        {"named_release": False},
    ),
    "V never released": (
        "forward.step",
        "release(bars.v_empty, RELEASE_V, v_stage, C)",
        "pass",
        "deadlock.*named barrier",
    ),
    "V released too early": (
        "forward.step",
        "acc = wait_pv(acc, C)\n    release(bars.v_empty, RELEASE_V, v_stage, C)",
        "release(bars.v_empty, RELEASE_V, v_stage, C)\n    acc = wait_pv(acc, C)",
        "while a wgmma or a TMA store reads",
    ),
    "S used before its wait": ("forward.wait_qk", "warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,", "read before"),
    "too few bytes expected": ("forward.load_rows", "(D + D_TAIL) * 2)", "(D + D_TAIL))", "deadlock"),
    "O stored without a fence": ("forward.finish_tile", "fence_async_shared()", "pass", "lacks fence_async_shared"),
    "O sent too early": ("forward.send_output", "mbarrier.wait(bars.o_full.", "(bars.o_full.", "TMA load fills|out"),
    "a tile taken before it is announced": ("forward.await_tile", "mbarrier.wait(", "(", "deadlock|out"),
    "one key too many": ("forward.scores", "Nk - 1, j", "Nk, j", "lse"),
    "the wrong key head": ("forward.producer", "hk = h // sizes.group", "hk = h % 2", "out"),
    "a tile left out": ("forward.next_tile", "gl.atomic_add(COUNTER, 1)", "gl.atomic_add(COUNTER, 2)", "out"),
    "a row too many": (
        "forward.finish_tile",
        "gl.log2(l_safe)) * LN2, mask=row < Nq",
        "gl.log2(l_safe)) * LN2, mask=row <= Nq",
        "outside a tensor|lse",
    ),
    "counts past the ring": ("forward.pass_turn", "(WG + 1) % C.warpgroups", "WG", "twice before it opens|deadlock"),
    "no wait for Q": ("backward.step", "mbarrier.wait(bars.q_full.index(q_stage), q_phase)", "pass", "TMA load fills"),
    "dS read too early": (
        "backward.step",
        "mbarrier.wait(bars.ds_full.index(buffer), ds_phase)\n        dq = ",
        "dq = ",
        "dq|fence|reads",
    ),
    "dS without a fence": ("backward.step", "fence_async_shared()", "pass", "lacks fence_async_shared"),
    "Q released too early": (
        "backward.step",
        "dk = warpgroup_mma_wait(0, deps=(dk,))\n        mbarrier.arrive(bars.q_empty.index(q_stage), count=1)",
        "mbarrier.arrive(bars.q_empty.index(q_stage), count=1)\n        dk = warpgroup_mma_wait(0, deps=(dk,))",
        "while a wgmma or a TMA store reads",
    ),
    "K overwritten by dK": (
        "backward.consumer",
        "mbarrier.wait(bars.k_done.index(0), turn & 1)",
        "pass",
        "reads|dq|fence",
    ),
    "one buffer for dS": ("backward.step", "ds_phase = ring(count, 2)", "ds_phase = ring(count, 1)", "dq|fence|reads"),
    "K loaded over dK": (
        "backward.producer",
        "mbarrier.wait(bars.kv_empty.",
        "(bars.kv_empty.",
        "while a wgmma or a TMA store reads|while a TMA load fills|without fence",
        {"whole_head": True, "prepares": False},
    ),
    "a share left out": ("backward_ends.convert", "range(1, SHARES)", "range(2, SHARES)", "dk.*dv", {"group_split": 2}),
    "dK of another head's share": (
        "backward_ends.convert",
        "at += pid // blocks",
        "at += 0 * pid // blocks",
        "dk",
        {"group_split": 2},
    ),
    "a share reads another head's keys": (
        "backward.producer",
        "load_half(k_desc, zb, t.hk // C.group_split,",
        "load_half(k_desc, zb, t.hk % 2,",
        "dq",
        {"group_split": 2},
    ),
    "dK used before its wait": (
        "backward.step",
        "dk = warpgroup_mma_wait(0, deps=(dk,))\n        mbarrier.arrive(bars.q_empty",
        "mbarrier.arrive(bars.q_empty",
        "while a wgmma or a TMA store reads|read before",
        {"dk_last": True},
    ),
    "LSE of another step": (
        "backward.step",
        "if C.early_statistics:\n        lse_log2 = tiles.lse.index(q_stage)",
        "if C.early_statistics:\n        lse_log2 = tiles.lse.index(q_stage ^ 1)",
        "TMA load fills|dv",
        {"early_statistics": True},
    ),
    "dQ to the wrong half": ("backward.step", "DQ_ACC, block * 2 + WG,", "DQ_ACC, block * 2 + 1 - WG,", "dq"),
    "the accumulator not zeroed": (
        "backward_ends.attn_bwd_before_kernel",
        "tl.store(zeros, tl.zeros([BLOCK_M * BLOCK_D], tl.float32))",
        "pass",
        "dq",
    ),
    "delta without the gradient of LSE": ("backward_ends.keep_statistics", "delta -= ", "delta += ", "dq.*dk"),
    "the mask left out": ("backward.step", "p = select(p, a, b, width, OR_ZERO)", "pass", "dv"),
    "stores not waited for": ("backward.consumer", "tma.store_wait(0)", "pass", "not waited for"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_noticed(fault, monkeypatch, poisoned):
    """By a rule of the machine, or by wrong numbers, in one of a few interleavings."""
    place, old, new, words, *options = FAULTS[fault]
    launcher = launch_backward if place.startswith("backward") else launch_forward
    for changes in options:
        use(launcher, changes, monkeypatch)
    case = Case("fault", heads=(4, 2), nq=260, nk=300, d=128, causal=place.startswith("backward"))

    def some_runs():
        for seed in range(12):
            check(case, HALF, place.startswith("backward"), (False,), seed, edits={place: (old, new)})

    with pytest.raises((gluon_cpu.EmulationError, AssertionError), match=words):
        some_runs()
