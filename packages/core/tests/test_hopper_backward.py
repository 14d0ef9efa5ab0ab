"""The Hopper backward: what it takes, that it compiles well without a GPU, and that it is right on one."""

import dataclasses
import functools
import itertools
import random
import re
import types

import pytest
import torch

from flashtri_core import flash_attn, flash_attn_varlen
from flashtri_core.problem import Extras
from flashtri_core.reference import eager_attention
from flashtri_core.testing import aot
from flashtri_core.testing.cases import problem

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")
from flashtri_core.kernels.hopper import backward_order, backward_walk, common, launch_forward  # noqa: E402
from flashtri_core.kernels.hopper import launch_backward as hopper  # noqa: E402

HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]


# ------------------------------------------------------------------------------------------------------ no kernel
def dense(d=128, n=256, heads=(4, 2), dtype=torch.float16, dv=None):
    return tuple(torch.empty(2, h, n, w, dtype=dtype) for h, w in ((heads[0], d), (heads[1], d), (heads[1], dv or d)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(dropout_p=0.1), "dropout_p"),
        (dict(bias=True), "attn_bias"),
        (dict(mask=True), "attn_mask"),
        (dict(head_dim=100), "multiples of 8"),
    ],
)
def test_reason_names_what_is_missing(monkeypatch, change, words):
    monkeypatch.setattr(launch_forward, "target_of", lambda device: types.SimpleNamespace(capability=90))
    monkeypatch.setattr(launch_forward, "triton_version", lambda: (3, 6))
    device, fine = types.SimpleNamespace(type="cuda", index=0), problem(*dense())
    assert hopper.problem_reason(fine, device) == ""
    assert words in hopper.problem_reason(dataclasses.replace(fine, **change), device)


def test_wide_heads_are_not_deterministic(monkeypatch):
    monkeypatch.setattr(launch_forward, "target_of", lambda device: types.SimpleNamespace(capability=90))
    monkeypatch.setattr(launch_forward, "triton_version", lambda: (3, 6))
    device, wide = types.SimpleNamespace(type="cuda", index=0), problem(*dense(192))
    assert hopper.problem_reason(wide, device) == ""
    assert "ends at 128" in hopper.problem_reason(wide, device, deterministic=True)


def test_scratch_memory_is_linear():
    small, large = (hopper.plan(problem(*dense(n=n)), False) for n in (1000, 16000))
    rows = [p.stat_blocks * p.config.block_m for p in (small, large)]
    assert rows[0] <= 2 * 4 * (1000 + 64)
    assert rows[1] <= 2 * 4 * (16000 + 64)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_workspace(d, heads):
    """8 bytes per query row, 4 per element of dQ, and 4 per share and element of dK and dV where a group is shared out: per
    element of whole blocks, of 256 columns for wide heads."""
    p = problem(*dense(d, n=1000, heads=heads), causal=True)
    rows, keys = 2 * heads[0] * 1024, 2 * heads[1] * 1024
    for split in (1, 2, 4)[: 1 if heads[1] == 8 else 3]:
        plan = hopper.plan(p, False, dataclasses.replace(hopper.fused_tiles(p), group_split=split))
        shares = (split * keys * d if split > 1 else 0,) * 2
        assert plan.workspace == (rows, rows, rows * d, *shares, 0, 0)  # float32
    if d < 256:
        semaphores = rows * d // 8192  # one for each block of rows
        assert hopper.plan(p, False, hopper.ordered_tiles(p)).workspace == (rows, rows, rows * d, 0, 0, semaphores, 0)


@pytest.mark.parametrize(("d", "n", "change", "side"), [
    (128, 1024, dict(), 16),  # a rotation of 8 tiles of each
    (64, 1024, dict(), 33),  # of 4, two blocks of rows apart
    (128, 16384, dict(), 2),  # two rotations of 64, one after the other
    (64, 16384, dict(), 2),
    (128, 17152, dict(), 2),  # three of 45, 45, 44
    (128, 4096, dict(causal=True), 5),  # a wave, at the end
    (128, 65536, dict(causal=True), 2),
    (128, 1024, dict(window_left=100, window_right=0), 8),  # 8 MB
])  # fmt: skip
def test_heads_of_ordered_additions_that_run_side_by_side(d, n, change, side):
    p = dataclasses.replace(problem(*dense(d, n=1, heads=(64, 64))), seqlen_q=n, seqlen_k=n, **change)
    plan = hopper.plan(p, True, hopper.ordered_tiles(p))
    assert plan.sizes[6] == side
    assert plan.config.rotation == (0 if change else 66)
    assert plan.config.both_ways is ("causal" in change)


def on_the_host(function, **known):
    """A kernel's function of integers as a Python function, with others that it calls."""
    language = types.SimpleNamespace(where=lambda yes, a, b: a if yes else b, minimum=min, maximum=max)
    return types.FunctionType(function.fn.__code__, {**function.fn.__globals__, "gl": language, **known})


ROTATION_OF = on_the_host(backward_walk.rotation_of)
ROTATING_TILE = on_the_host(backward_walk.rotating_tile, rotation_of=ROTATION_OF)
TILE_OF_EITHER_WAY = on_the_host(backward_walk.tile_of_either_way)
TURN_OF = on_the_host(backward_order.turn_of)


def first_seen(p, n, d):
    """Block of rows that first sees the n-th key tile."""
    return min(max(0, 128 * n + p.seqlen_q - p.seqlen_k), p.seqlen_q) // (8192 // d) if p.causal else 0


def walk_of(p, plan, pid, d):
    """Head, key tile, and its walk: blocks of rows with what their semaphores are at its turn and afterwards."""
    tiles, blocks = plan.sizes[4], plan.sizes[7]
    sizes = types.SimpleNamespace(blocks=tiles, batch_heads=plan.sizes[5], head_group=plan.sizes[6], q_blocks=blocks)
    c = types.SimpleNamespace(rotation=plan.config.rotation, both_ways=plan.config.both_ways, block_n=128)
    if c.rotation:
        head, n = ROTATING_TILE(pid, sizes, c.rotation)
        most = ROTATION_OF(tiles, blocks, c.rotation)
        place = n % most
        mates = min(most, tiles - n + place)
        t = types.SimpleNamespace(start_n=128 * n, place=place, mates=mates, hi=blocks)
        begin = (mates - 1 - place) * blocks // mates
        walk = [*range(begin, blocks), *range(begin)]
    else:
        head, n, descends = TILE_OF_EITHER_WAY(pid, sizes)
        next_lo = first_seen(p, n + 1, d) if n + 1 < tiles else blocks
        t = types.SimpleNamespace(start_n=128 * n, next_lo=next_lo, descends=descends)
        walk = list(range(first_seen(p, n, d), blocks))[:: -1 if descends else 1]
    return head, n, [(m, *TURN_OF(m, t, c)) for m in walk]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_every_tile_gets_its_turn(d, causal):
    """In all plans, with as few thread blocks side by side as are promised to do; each block of rows meets its tiles once."""
    draw = random.Random(2)
    for _ in range(150):
        nq, nk, multiprocessors = draw.randint(1, 3000), draw.randint(1, 3000), draw.choice([2, 3, 4, 7, 16, 132])
        p = dataclasses.replace(problem(*dense(d, n=1)), seqlen_q=nq, seqlen_k=nk, causal=causal)
        p = dataclasses.replace(p, batch=draw.randint(1, 3), heads_q=draw.randint(1, 5), heads_k=1)
        p = dataclasses.replace(p, heads_k=p.heads_q)
        plan = hopper.plan(p, True, hopper.ordered_tiles(p), multiprocessors)
        todo = [walk_of(p, plan, pid, d) for pid in range(plan.grid)]
        assert len({(head, n) for head, n, _ in todo}) == plan.grid == plan.sizes[4] * plan.sizes[5]
        semaphores, met, running = {}, {}, []
        room = max(1, multiprocessors // 2) if plan.config.rotation else 1
        while todo or running:
            running += [todo.pop(0) for _ in range(min(room - len(running), len(todo)))]
            moved = False
            for head, n, walk in running:
                while walk and semaphores.get((head, walk[0][0]), 0) == walk[0][1]:
                    m, _turn, after = walk.pop(0)
                    semaphores[head, m] = after
                    met.setdefault((head, m), []).append(n)
                    moved = True
            ended = [x for x in running if not x[2]]
            assert moved or ended, (p, multiprocessors)
            running = [x for x in running if x[2]]
        first = [first_seen(p, n, d) for n in range(plan.sizes[4])]
        for (_head, m), tiles in met.items():
            assert sorted(tiles) == [n for n in range(plan.sizes[4]) if first[n] <= m]


def test_whole_head_refuses_what_it_would_get_wrong():
    p = problem(*dense())
    assert hopper.plan(p, True, hopper.whole_head(p)).grid == 2 * 2
    capped = dict(softcap=5.0, head_dim=64, head_dim_v=64)  # its tiles have 64 rows, where a dQ tile has 128
    wide = dict(head_dim=256, head_dim_v=256)
    for bad in (dict(window_left=100), dict(seqused=True), dict(causal=True, seqlen_q=257), capped, wide):
        assert hopper.whole_head_reason(dataclasses.replace(p, **bad))
        with pytest.raises(ValueError, match="whole_head"):
            hopper.plan(dataclasses.replace(p, **bad), True, hopper.whole_head(p))


@pytest.mark.parametrize(("d", "change", "words"), [
    (64, dict(block_m=64), "block_m"), (128, dict(block_m=128), "block_m"), (128, dict(late_dk=True), "late_dk"),
    (128, dict(whole_head=True, dq=False), "whole_head"), (64, dict(whole_head=True, group_split=2), "group_split"),
    (128, dict(ordered=True, dq=False), "ordered"), (128, dict(ordered=True, whole_head=True), "ordered"),
    (256, dict(ordered=True), "ordered"), (64, dict(dq=False), "dk_last"),
    (256, dict(do_stages=3), "do_stages"),
    (128, dict(dq=False, late_dk=True, early_dv=True), "late_dk: .* early_dv"),
    (256, dict(dk_last=True), "dk_last"), (128, dict(group_split=0), "group_split"), (128, dict(group_split=4), "group_split: must divide the 2 query heads"),
])  # fmt: skip
def test_configurations_that_do_not_fit_are_refused(d, change, words):
    p = problem(*dense(d))
    with pytest.raises(ValueError, match=words):
        hopper.plan(p, False, dataclasses.replace(hopper.fused_tiles(p), **change))


@pytest.mark.parametrize(("change", "fast", "deterministic"), [
    (dict(), "fused", "head"),
    (dict(seqlen_q=256, seqlen_k=256), "head", "head"),
    (dict(causal=True), "head", "head"),
    (dict(heads_q=64, seqlen_q=128, seqlen_k=256, sink=True), "head", "head"),
    (dict(heads_q=64), "fused", "ordered"),  # 1024 rows of dQ for each key head
    (dict(head_dim=40, head_dim_v=40, causal=True), "head", "head"),
    (dict(seqlen_k=513), "fused", "ordered"),
    (dict(seqlen_q=513), "fused", "ordered"),
    (dict(batch=4), "fused", "ordered"),  # 128 heads on 132 multiprocessors
    (dict(batch=9), "fused", "ordered"),  # 288 heads: two waves and a fifth
    (dict(causal=True, seqlen_q=512, seqlen_k=511), "fused", "ordered"),
    (dict(alibi=True), "fused", "ordered"),
    (dict(window_left=100), "fused", "ordered"),
    (dict(seqused=True), "fused", "split"),  # tiles would begin with the same rows
    (dict(seqused=True, causal=True), "fused", "ordered"),
    (dict(varlen=True), "fused", "split"),
    (dict(varlen=True, causal=True), "fused", "ordered"),
    (dict(softcap=5.0), "split", "split"),
    (dict(head_dim=96, head_dim_v=96), "fused", "ordered"),
    (dict(head_dim=128, head_dim_v=128, varlen=True), "fused", "late"),
    (dict(head_dim=128, head_dim_v=128, softcap=5.0), "fused", "ordered"),
    (dict(head_dim=256, head_dim_v=256), "fused", "fused"),
    (dict(head_dim=128, head_dim_v=128, seqlen_q=16384, seqlen_k=16384), "fused", "ordered"),
], ids=str)  # fmt: skip
def test_what_is_chosen(change, fast, deterministic):
    p = dataclasses.replace(problem(*dense(64, n=512, heads=(32, 32))), batch=32)
    p = dataclasses.replace(p, **change)
    for wanted, path in ((fast, False), (deterministic, True)):
        c = hopper.specialise(hopper.tiles(p, path, 132), p)
        name = (
            "head"
            if c.whole_head
            else "ordered"
            if c.ordered
            else "fused"
            if c.dq
            else "late"
            if c.late_dk
            else "split"
        )
        assert name == wanted, path


def some_shapes():
    """Batch, heads and lengths, by hand and drawn; and how many multiprocessors."""
    yield from itertools.product([
        (16, (16, 16), 1024, 1024), (1, (16, 16), 16384, 16384), (32, (32, 32), 512, 512), (3, (5, 5), 333, 1111),
        (5, (8, 2), 700, 129), (2, (64, 8), 8192, 8192), (300, (2, 1), 5, 1),
        # with a last group of heads that is smaller than the others
        (58, (5, 5), 2048, 1536), (133, (2, 1), 1280, 1280), (43, (16, 8), 1536, 1536), (962, (1, 1), 1032, 1024),
        (197, (2, 1), 2048, 3072), (89, (2, 1), 8192, 14720), (241, (1, 1), 8192, 7296),
    ], [1, 7, 132])  # fmt: skip
    draw = random.Random(1)
    for _ in range(1500):
        kv_heads, group = draw.choice([1, 2, 5, 8, 12]), draw.choice([1, 1, 2, 4, 8])
        nq, nk = (draw.choice([1, 5, 8, 12, 16, 24, 64, 115]) * 128 - draw.choice([0, 0, 1, 64]) for _ in range(2))
        yield (draw.randint(1, 250), (kv_heads * group, kv_heads), nq, nk), draw.choice([1, 7, 78, 132])


def some_plans(d, causal):
    """Problem, multiprocessors and plan for each of those shapes, with and without shares."""
    q = torch.empty(1, 1, 1, d, dtype=torch.bfloat16)
    one = problem(q, q, q, causal=causal)
    for (batch, heads, nq, nk), multiprocessors in some_shapes():
        p = dataclasses.replace(one, batch=batch, heads_q=heads[0], heads_k=heads[1], seqlen_q=nq, seqlen_k=nk)
        chosen = hopper.shared(hopper.fused_tiles(p), p, multiprocessors)
        assert chosen.prepares and chosen.converts
        for split in {1, chosen.group_split}:
            for config in (chosen, hopper.ordered_tiles(p)):
                config = dataclasses.replace(config, group_split=split)
                yield p, multiprocessors, hopper.plan(p, False, config, multiprocessors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [8, 64, 72, 128])
def test_rows_are_prepared_a_wave_before_they_are_read(d, causal):
    """Each block by the pass before, or by one thread block; never by one that waits for it."""
    prepared = 0
    for p, multiprocessors, c in some_plans(d, causal):
        units, group, _nq, _nk, tiles, _total, side, q_blocks = c.sizes
        rows, total = group * q_blocks, p.batch * units
        assert c.stat_blocks == total * rows
        assert c.grid == total * tiles
        assert c.config.prepares is (c.prepared < c.stat_blocks)
        prepared += c.config.prepares
        assert c.prepared + c.each * c.grid >= c.stat_blocks
        assert c.each * c.config.block_m <= 128
        alone = total - side if c.config.both_ways else 0
        for unit in [*range(alone), *range(alone, total, side)]:  # the first of those that run side by side
            there = c.prepared + c.each * max(0, unit * tiles - multiprocessors)
            assert min(unit + (1 if unit < alone else side), total) * rows <= there, (p, multiprocessors)
    assert prepared > 2000


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [8, 64, 72, 128])
def test_rows_are_converted_once_by_the_launch_behind_their_last_addition(d, causal):
    several = 0
    for p, _multiprocessors, c in some_plans(d, causal):
        units, group, _nq, _nk, tiles, _total, side, q_blocks = c.sizes
        rows, first, done = group * q_blocks, 0, 0
        assert c.config.converts is (len(c.pieces) > 1)
        assert not (c.config.converts and c.config.both_ways)
        assert sum(here for here, _piece in c.pieces) == c.grid
        for here, piece in c.pieces:
            assert here > 0
            assert piece.first == first
            unit = first // tiles
            assert unit * tiles == first
            assert unit % side == 0  # heads side by side stay together
            assert piece.begin == done
            ready = unit * rows  # all that earlier launches have added to
            assert piece.end == ready or first + here == c.grid
            assert piece.end <= ready
            assert piece.each * here >= piece.end - piece.begin
            if len(c.pieces) > 1:
                assert rows // (2 if causal else 1) >= hopper.CONVERT_STEPS[c.config.d] * piece.each
            first, done = first + here, piece.end
        assert c.converted == done < p.batch * units * rows == c.stat_blocks
        several += len(c.pieces) > 1
    assert several > 200


@pytest.mark.parametrize(("heads", "n", "change", "split"), [
    ((64, 8), 2048, dict(causal=True), 4),  # 128 key tiles on 132 multiprocessors, some of them much longer than others
    ((64, 8), 8192, dict(causal=True), 4),  # two heads of 8 MB
    ((64, 8), 32768, dict(causal=True), 4),  # eight would take twice the memory of dQ's accumulator
    ((32, 8), 8192, dict(causal=True), 2),
    ((32, 8), 8192, dict(causal=True, batch=8, seqlen_q=2048, seqlen_k=2048), 1),  # tiles enough, and 8 MB
    ((64, 8), 2048, dict(), 1),  # 128 equal tiles
    ((64, 8), 1024, dict(), 2),  # 64
    ((64, 8), 8192, dict(window_left=1023, window_right=0), 1),
    ((64, 1), 8192, dict(causal=True), 32),
    ((64, 8), 128, dict(causal=True), 1),  # 1024 rows see a tile: not worth the traffic
    ((64, 8), 8192, dict(seqlen_q=1), 1),
    ((64, 64), 2048, dict(causal=True), 1),
    ((64, 8), 8192, dict(varlen=True, total_k=32768, causal=True), 1),
    ((64, 4), 8192, dict(varlen=True, total_k=32768, causal=True), 2),
], ids=str)  # fmt: skip
def test_how_groups_are_shared_out(heads, n, change, split):
    p = dataclasses.replace(problem(*dense(n=1)), heads_q=heads[0], heads_k=heads[1], seqlen_q=n, seqlen_k=n, batch=1)
    p = dataclasses.replace(p, **change)
    for deterministic in (False, True):
        assert hopper.plan(p, deterministic).config.group_split == split


# ------------------------------------------------------------------------------------------------ ahead of time
def compiled(p, extras, tensors, deterministic, config=None):
    """Every kernel that the backward of a problem launches, compiled."""
    plan = hopper.plan(p, deterministic, config)
    q, k, v = tensors
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    lse = torch.empty(q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0]))
    work = hopper.workspace(plan, torch.empty(sum(plan.workspace)))
    for kernel, _grid, arguments in hopper.jobs(plan, p, out, None, q, k, v, out, lse, extras, q, k, v, work, None):
        binary = kernel.warmup(*common.for_triton(arguments), num_warps=4, grid=(1,))
        yield aot.resources(binary, 90, disassemble=True)


def spills(sass):
    """Spilled loads and stores in each innermost loop that holds tensor-core instructions, in order."""
    return [sum(bool(re.search(r"\b(LDL|STL)", text)) for text in loop) for loop in aot.main_loops(sass)]


def assert_good(kernel, most, inside=0):
    """``most``: bytes of spills in all; ``inside``: spilled loads and stores in each warpgroup's best main loop."""
    aot.check_hopper(kernel, most)
    if "hopper" in kernel.name:
        assert sorted(spills(kernel.sass))[1] <= inside, spills(kernel.sass)


@pytest.mark.aot
@pytest.mark.parametrize("path", ["fused", "ordered", "split"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_shipped_tiles_compile_well(sm90, d, causal, path):
    tensors = dense(d, heads=(4, 4), dtype=torch.bfloat16)
    p, names = problem(*tensors, causal=causal), []
    config = {"fused": hopper.fused_tiles, "ordered": hopper.ordered_tiles, "split": hopper.split_tiles}[path](p)
    if path != "split":
        assert config == hopper.tiles(dataclasses.replace(p, batch=1), path == "ordered", 132)
    newer = d == 64 and not triton.__version__.startswith("3.6.")  # 3.9 spills in the split dK, dV kernel
    most, inside = (256 if causal else 128, 32) if newer and path == "split" else (36 if d == 64 else 16, 0)
    for kernel in compiled(p, Extras(), tensors, False, config):
        assert_good(kernel, most=most, inside=inside)
        names.append(kernel.name)
        if kernel.name == "attn_bwd_dq_hopper":
            assert not any(
                "PRMT" in text for loop in aot.main_loops(kernel.sass) for text in loop
            )  # see common.in_16_bits
        if kernel.name == "attn_bwd_hopper":
            assert ("REDG" in kernel.sass) is (path != "split")  # where every sum has one owner
            assert ("MEMBAR.ALL.GPU" in kernel.sass) is (path == "ordered")
            assert "UTMASTG" in kernel.sass
    last = "attn_bwd_dq_hopper" if path == "split" else "attn_bwd_after_kernel"
    assert names == ["attn_bwd_before_kernel", "attn_bwd_hopper", last]


@pytest.mark.aot
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_thread_blocks_that_work_for_others_compile_well(sm90, d, converts, causal):
    """As many as it takes for some to do so; the two warps have 24 registers and spill, the warpgroups nothing that a tile needs.

    A spill in front of a tile's first product, read behind the wait for K, cost every tile half a microsecond.
    """
    tensors = dense(d, n=2048, heads=(16, 16), dtype=torch.bfloat16)
    p = problem(*tensors, causal=causal)
    config = hopper.tiles(p, False, 132)
    assert config.converts
    config = dataclasses.replace(config, converts=converts)
    plan = hopper.plan(p, False, config)
    assert plan.config.prepares
    assert [len(plan.pieces), plan.config.converts] == [1 + converts, converts]
    before, main, *_more, after = compiled(p, Extras(), tensors, False, config)
    assert_good(main, most={64: 48, 128: 80}[d])
    for kernel in (before, after):
        assert_good(kernel, most=0)
    if triton.__version__.startswith("3.6."):
        assert tile_spills(main.sass) <= (2 if d == 128 else 4)
    if converts:  # nothing of the launch before is read before it has ended
        text = main.ptx[main.ptx.index("griddepcontrol.launch_dependents") :]
        copies = [at.start() for at in re.finditer(r"cp\.async\.bulk\.tensor\.4d\.shared", text)]
        wait = text.index("griddepcontrol.wait")
        assert text.index("fence.proxy.async.global", wait) < min(at for at in copies if at > wait)


@pytest.mark.aot
@pytest.mark.parametrize("change", [
    dict(window_left=1023, window_right=0), dict(window_left=500, window_right=523), dict(softcap=30.0),
    dict(causal=True, softcap=30.0),
], ids=str)  # fmt: skip
def test_features_that_prepare_compile_well(sm90, change):
    """The two warps spill; the warpgroups no more of a tile than without."""
    tensors = dense(128, n=4096, heads=(64, 64), dtype=torch.bfloat16)
    p = problem(*tensors, **change)
    config = hopper.tiles(p, False, 132)
    assert config.prepares
    assert hopper.plan(p, False, config).config.prepares
    assert not hopper.plan(p, True, hopper.tiles(p, True, 132)).config.prepares  # one spill more in the loops
    _before, main, *_more = compiled(p, Extras(), tensors, False, config)
    _before, alone, *_more = compiled(p, Extras(), tensors, False, dataclasses.replace(config, prepares=False))
    assert_good(main, most=168, inside=40)
    assert tile_spills(main.sass) <= max(tile_spills(alone.sass), 4)


def test_a_config_leaves_the_walk_of_its_first_problem_behind():
    full = problem(*dense(128, n=1024))
    causal = dataclasses.replace(full, causal=True)
    rotates, both = (hopper.plan(p, True).config for p in (full, causal))
    assert (rotates.rotation, rotates.both_ways, both.rotation, both.both_ways) == (66, False, 0, True)
    assert hopper.plan(causal, True, rotates).config.rotation == 0
    assert not hopper.plan(full, True, both).config.both_ways


def test_which_features_prepare():
    base = dataclasses.replace(problem(*dense(128, n=4096)), causal=True)
    for change, wanted in (
        (dict(), (True, True)),
        (dict(softcap=1.0), (True, False)),
        (dict(window_left=1023), (True, False)),
        (dict(window_left=1022), (False, False)),  # tiles have too few steps
        (dict(window_left=1023, head_dim=64, head_dim_v=64), (False, False)),
        (dict(softcap=1.0, head_dim=64, head_dim_v=64), (False, False)),
        (dict(seqused=True), (False, False)),
        (dict(varlen=True), (False, False)),
    ):
        c = hopper.fused_tiles(dataclasses.replace(base, **change))
        assert (c.prepares, c.converts) == wanted, change


def tile_spills(sass):
    """How many spilled numbers the two warpgroups read, from where each begins to where its dK leaves."""
    lines = sass.splitlines()
    products = [n for n, line in enumerate(lines) if "HGMMA" in line]
    starts = [0] + [n + 1 for n, line in enumerate(lines) if "USETMAXREG" in line]
    ends = [n for n, line in enumerate(lines) if "UTMASTG" in line]
    spilled = 0
    for group in (products[: len(products) // 2], products[len(products) // 2 :]):
        begin = max(n for n in starts if n < group[0])
        end = [n for n in ends if n > group[-1]][1]  # of dV and dK
        spilled += sum(bool(re.search(r"\bLDL", line)) for line in lines[begin:end])
    return spilled


def sums_of_rows(ptx):
    """What is added up over eight lanes, and in which order: every such sum as a formula of products."""
    pattern = r"\s(add\.f32|fma\.rn\.f32|mov\.b32|shfl\.sync\.bfly\.b32)\s+(%\w+)(?:\|%\w+)?, (.*);"
    made = {to: (op[:3], [x.strip() for x in given.split(",")]) for op, to, given in re.findall(pattern, ptx)}

    def formula(x):
        op, given = made.get(x, ("", []))
        if op == "add":
            return f"({formula(given[0])} + {formula(given[1])})"
        if op == "shf":
            return f"lane {given[1]} {formula(given[0])}"
        if op == "fma":
            return "product" if given[2].startswith("0f") else f"{formula(given[2])}, product"
        return formula(given[0]) if op == "mov" else x

    last = [
        to
        for to, (op, given) in made.items()
        if op == "add" and any(made.get(x, " ")[0] == "shf" and made[x][1][1] == "1" for x in given)
    ]
    return {formula(x) for x in last}


@pytest.mark.aot
@pytest.mark.parametrize("d", [64, 128])
def test_a_rows_delta_is_the_same_sum_whoever_takes_it(sm90, d):
    """In the pass before and in thread blocks that prepare: the bits of dK and dV do not depend on what else is in the batch."""
    tensors = dense(d, n=2048, heads=(16, 16), dtype=torch.bfloat16)
    kernels = list(compiled(problem(*tensors), Extras(), tensors, False))
    before, main = (sums_of_rows(kernel.ptx) for kernel in kernels[:2])
    assert before == main
    assert len(before) == 1
    (one,) = before
    assert one.count("product") == d


@pytest.mark.aot
def test_additions_leave_beneath_the_last_product(sm90):
    """Narrow heads: in program order, the last wgmma group of a step begins before its additions to dQ and ends behind them."""
    tensors = dense(64, n=2048, heads=(4, 4), dtype=torch.bfloat16)
    main = list(compiled(problem(*tensors), Extras(), tensors, False))[1]
    for loop in aot.main_loops(main.sass):
        where = [n for n, line in enumerate(loop) if "REDG" in line]
        assert where and any("HGMMA" in line for line in loop[where[-1] :])
        assert not any("DEPBAR" in line for line in loop[where[0] : where[-1]])


WIDE = {
    "full": (dict(), {}),
    "causal": (dict(causal=True), {}),
    "ragged": (dict(causal=True, seqlen_k=250), {}),
    "window": (dict(window_left=100, window_right=0), {}),
    "softcap, alibi": (dict(causal=True, softcap=30.0), dict(alibi_slopes=torch.zeros(4))),
    "seqused": (dict(causal=True), dict(seqused_k=torch.zeros(2, dtype=torch.int32))),
}


@pytest.mark.aot
@pytest.mark.parametrize(("d", "dv"), [(192, 192), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", WIDE)
def test_wide_heads_compile_well(sm90, name, d, dv):
    kw, extra = WIDE[name]
    tensors, extras = dense(d, dv=dv), Extras(**extra)
    p = dataclasses.replace(problem(*tensors, extras), **kw)
    newer = not triton.__version__.startswith("3.6.")  # 3.9 keeps up to 76 bytes of a tile's scalars in local memory
    names = []
    for kernel in compiled(p, extras, tensors, False):
        assert_good(kernel, most=80 if newer and len(kw) + len(extra) > 1 else 16 if extra else 0)
        names.append(kernel.name)
    assert names == ["attn_bwd_before_kernel", "attn_bwd_wide_hopper", "attn_bwd_after_kernel"]


#: Bytes of per-tile scalars that the loop over a share's heads keeps in local memory, on Triton 3.6 and on later ones.
LOOP_OVER_HEADS = (64, 96)

#: Bytes of per-tile scalars that a block per head keeps in local memory, with one query head per key head and with more.
WHOLE_HEAD = {
    "full": (dict(), 16, 16),
    "causal": (dict(causal=True), 96, 112),
    "ragged": (dict(seqlen_k=250), 64, 48),
    "ragged causal": (dict(causal=True, seqlen_q=250, seqlen_k=250), 148, 208),
}


@pytest.mark.aot
@pytest.mark.parametrize(("batch", "d", "rows_first"), [(1, 128, False), (1, 64, True), (2, 72, True), (1, 256, False)])
def test_the_ends_move_more_than_two_bytes_at_a_time(sm90, batch, d, rows_first):
    """TMA's stride of an axis of size 1, or that of heads of 72 columns, is no multiple of 16: loads stay wide all the same."""
    q = torch.empty(batch, 256, 4, d, dtype=torch.bfloat16).transpose(1, 2)
    q = q if rows_first else q.contiguous()
    before, _main, after = compiled(problem(q, q, q, Extras()), Extras(), (q, q, q), False)
    for kernel in (before, after):
        assert "LDG" in kernel.sass and not re.search(r"(LDG|STG)\S*\.U16", kernel.sass)


@pytest.mark.aot
@pytest.mark.parametrize("heads_k", [4, 2])
@pytest.mark.parametrize("name", WHOLE_HEAD)
def test_whole_head_compiles_well(sm90, name, heads_k):
    change, *most = WHOLE_HEAD[name]
    tensors = dense(64, heads=(4, heads_k), dtype=torch.bfloat16)
    p = dataclasses.replace(problem(*tensors), **change)
    names = []
    for kernel in compiled(p, Extras(), tensors, False, hopper.whole_head(p)):
        assert_good(kernel, most=most[heads_k == 2], inside=2)
        names.append(kernel.name)
    assert names == ["attn_bwd_before_kernel", "attn_bwd_hopper"]


@pytest.mark.aot
@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize(("d", "without_dq"), [(64, False), (64, True), (128, False), (128, True), (256, False)])
def test_shared_groups_compile_well(sm90, d, split, without_dq):
    """A share of one head has no loop over heads, and then no more spills than ungrouped heads."""
    tensors = dense(d, heads=(8, 2), dtype=torch.bfloat16)
    p = problem(*tensors, causal=True)
    config = dataclasses.replace((hopper.split_tiles if without_dq else hopper.fused_tiles)(p), group_split=split)
    newer = not triton.__version__.startswith("3.6.")
    one = {64: (128 if newer else 32) if without_dq else 32}.get(d, 16)
    most = one if split == 4 else max(one, LOOP_OVER_HEADS[newer])
    names = []
    for kernel in compiled(p, Extras(), tensors, False, config):
        assert_good(
            kernel, most=most if "hopper" in kernel.name else 0, inside=32 if newer and d == 64 and without_dq else 0
        )
        names.append(kernel.name)
    main = "attn_bwd_wide_hopper" if d == 256 else "attn_bwd_hopper"
    assert names == ["attn_bwd_before_kernel", main, "attn_bwd_after_kernel", *["attn_bwd_dq_hopper"] * without_dq]


@pytest.mark.aot
@pytest.mark.parametrize("causal", [False, True])
def test_late_dk_compiles_well(sm90, causal):
    """At D = 64, where it is not shipped."""
    newer = not triton.__version__.startswith("3.6.")  # as in the shipped deterministic kernel
    tensors = dense(64, heads=(4, 4), dtype=torch.bfloat16)
    p = problem(*tensors, causal=causal)
    late = dataclasses.replace(hopper.split_tiles(p), late_dk=True, q_stages=3)
    for kernel in compiled(p, Extras(), tensors, True, late):
        assert_good(
            kernel, most=(128 if causal else 68) if newer else 28, inside=(16 if causal else 11) if newer else 0
        )


#: Problems with ordered additions: the change, heads, rows; and the bytes kept in local memory at D = 64 and 128, outside of the
#: loops, most of them by the warps that prepare rows.
ORDERED = {
    "group": (dict(causal=True), (4, 2), 256, 32, 0),
    "full group": (dict(), (4, 2), 256, 44, 16),
    "ragged": (dict(causal=True, seqlen_k=250), (4, 4), 256, 32, 0),
    "window": (dict(window_left=100, window_right=0), (4, 4), 256, 56, 28),
    "seqused": (dict(causal=True, seqused=True), (4, 4), 256, 32, 16),
    "prepares": (dict(), (16, 16), 2048, 64, 156),
    "causal prepares": (dict(causal=True), (16, 16), 2048, 64, 128),
}


@pytest.mark.aot
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ORDERED)
def test_ordered_additions_compile_well(sm90, name, d):
    """No spill in the unmasked loop, where the fused kernel has none."""
    change, heads, n, *most = ORDERED[name]
    tensors = dense(d, heads=heads, dtype=torch.bfloat16, n=n)
    p = dataclasses.replace(problem(*tensors), **change)
    extras = Extras(seqused_k=torch.zeros(2, dtype=torch.int32)) if p.seqused else Extras()
    config = hopper.ordered_tiles(p)
    assert ("prepares" in name) is hopper.plan(p, False, config).config.prepares
    _before, main, *_more = compiled(p, extras, tensors, False, config)
    assert_good(main, most=most[d == 128], inside=0)
    assert "REDG" in main.sass
    assert "MEMBAR.ALL.GPU" in main.sass


FEATURES = {
    "group": (dict(causal=True), {}),
    "ragged": (dict(seqlen_k=250), {}),
    "window": (dict(window_left=100, window_right=0), {}),
    "softcap": (dict(causal=True, softcap=30.0), {}),
    "alibi": (dict(causal=True), dict(alibi_slopes=torch.zeros(4))),
    "seqused": (dict(causal=True), dict(seqused_k=torch.zeros(2, dtype=torch.int32))),
}


#: (bytes in all, instructions in the main loop) where a feature's scores do not fit the registers; elsewhere (256, 0).
TIGHT = {("alibi", 64): (448, 4), ("softcap", 128): (256, 32)}
if not triton.__version__.startswith("3.6."):
    TIGHT |= {("softcap", 128): (336, 40), ("alibi", 64): (336, 40)}


@pytest.mark.slow  # minutes
@pytest.mark.aot
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", FEATURES)
def test_features_compile_well(sm90, name, d, split):
    kw, extra = FEATURES[name]
    tensors, extras = dense(d), Extras(**extra)
    p = dataclasses.replace(problem(*tensors, extras), **kw)
    most, inside = TIGHT.get((name, d), (256, 0))
    if d == 64 and split and not triton.__version__.startswith("3.6."):  # as in test_shipped_tiles_compile_well
        most, inside = 560 if p.seqused else most, max(inside, 32)
    for kernel in compiled(p, extras, tensors, False, hopper.shared(hopper.split_tiles(p), p, 132) if split else None):
        assert_good(kernel, most=most, inside=inside)


@pytest.mark.aot
def test_alibi_costs_a_multiply_add_per_score(sm90):
    """32 scores and two keys a thread, where no mask is needed and no key lies right of the diagonal; queries have theirs."""
    tensors, slopes = dense(128, n=4096), Extras(alibi_slopes=torch.zeros(4))
    plain, biased = (
        min(
            len(loop)
            for loop in aot.main_loops(list(compiled(problem(*tensors, x, causal=True), x, tensors, False))[1].sass)
            if any("FFMA" in instruction for instruction in loop)  # not one inside, that waits for dK alone
        )
        for x in (Extras(), slopes)
    )
    assert 0 < biased - plain <= 32 + 2 + 16


@pytest.mark.slow  # minutes
@pytest.mark.aot
@pytest.mark.parametrize(("d", "path"), [(64, "fused"), (64, "ordered"), (64, "split"), (128, "fused"), (128, "ordered"),
                                         (128, "split"), (256, "fused")])  # fmt: skip
def test_packed_kernels_compile_well(sm90, d, path):
    cu = torch.zeros(4, dtype=torch.int32)
    tensors = tuple(torch.empty(512, heads, d, dtype=torch.float16) for heads in (4, 2, 2))
    extras = Extras(cu_seqlens_q=cu, cu_seqlens_k=cu)
    newer = d == 64 and not triton.__version__.startswith("3.6.")  # as in test_shipped_tiles_compile_well
    most, inside = (400, 40) if newer and path == "split" else (256, 1 if newer and path == "ordered" else 0)
    p = problem(*tensors, extras, 256, 256, causal=True)
    config = {"fused": hopper.fused_tiles, "ordered": hopper.ordered_tiles, "split": hopper.split_tiles}[path](p)
    for kernel in compiled(p, extras, tensors, False, config):
        assert_good(kernel, most=most, inside=inside)


# ---------------------------------------------------------------------------------------------------------- GPU
def randn(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def qkvo(d, dv=None, nq=333, nk=517, heads=(4, 2), dtype=torch.bfloat16, rows_first=False):
    def make(h, n, width, seed):
        if rows_first:
            return randn(2, n, h, width, dtype=dtype, seed=seed).transpose(1, 2)
        return randn(2, h, n, width, dtype=dtype, seed=seed)

    dv = dv or d
    return make(heads[0], nq, d, 1), make(heads[1], nk, d, 2), make(heads[1], nk, dv, 3), make(heads[0], nq, dv, 4)


def eager_gradients(p, q, k, v, do, dlse, extras, dtype):
    """Gradients of q, k, v (and of the sink) by autograd through the specification, computed in ``dtype``."""
    leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
    wide = [x.to(dtype) if x is not None and x.is_floating_point() and dtype == torch.float64 else x for x in extras]
    if p.sink:
        wide[1] = wide[1].detach().requires_grad_()
        leaves.append(wide[1])
    out, lse, _max = eager_attention(*leaves[:3], p, Extras(*wide))
    loss = (out * do.to(out.dtype)).sum()
    if dlse is not None:
        loss = loss + (torch.where(lse > float("-inf"), lse, 0.0) * dlse).sum()
    return out.detach(), lse.detach(), torch.autograd.grad(loss, leaves)


def run(p, q, k, v, do, out, lse, dlse=None, extras=Extras(), deterministic=False, **kw):
    dq, dk, dv = (torch.empty_like(x).fill_(float("nan")) for x in (q, k, v))
    dsink = torch.empty_like(extras.learnable_sink) if p.sink else None
    ok, reason = hopper.supports(p, q, k, v, dq, dk, dv)
    assert ok, reason
    args = (p, do, dlse, q, k, v, out, lse, extras, dq, dk, dv, dsink)
    hopper.backward(*args, deterministic=deterministic, **kw)
    return (dq, dk, dv) if dsink is None else (dq, dk, dv, dsink)


PATHS = ("fused", "ordered", "split", "late dK", "whole head", "shared fused", "shared ordered", "shared split")


def paths_of(p):
    """The ways to run a problem's backward: arguments by name."""
    share = {"group_split": p.heads_q // p.heads_k}
    shared = {"shared fused": dict(config=dataclasses.replace(hopper.fused_tiles(p), **share))}
    if hopper.width(p) > 128:
        return {"wide": {}} | shared
    split = hopper.split_tiles(p)
    found = {
        "fused": {},
        "split": dict(config=dataclasses.replace(split, late_dk=False)),
        "late dK": dict(config=dataclasses.replace(split, early_dv=False, late_dk=True, q_stages=3)),
        "shared split": dict(config=dataclasses.replace(split, **share)),
    } | shared
    ordered = hopper.ordered_tiles(p)
    if ordered.ordered:
        found |= {
            "ordered": dict(config=ordered),
            "shared ordered": dict(config=dataclasses.replace(ordered, **share)),
        }
    return found if hopper.whole_head_reason(p) else found | {"whole head": dict(config=hopper.whole_head(p))}


def check(p, q, k, v, do, extras=Extras(), with_dlse=True):
    """All paths inside the project's error budget against same-dtype eager attention, measured against fp64."""
    dlse = randn(*q.shape[:3], dtype=torch.float32, seed=9) if with_dlse else None
    out, lse, exact = eager_gradients(p, q, k, v, do, dlse, extras, torch.float64)
    eager = eager_gradients(p, q, k, v, do, dlse, extras, q.dtype)[2]
    for path, kw in paths_of(p).items():
        found = run(p, q, k, v, do, out.to(q.dtype), lse.float(), dlse, extras, **kw)
        for name, x, truth, base in zip(("dq", "dk", "dv", "dsink"), found, exact, eager, strict=False):
            err, own = (x.double() - truth).abs(), (base.double() - truth).abs()
            where = (name, path, err.max().item(), own.max().item())
            assert torch.isfinite(x).all(), where
            assert err.max() <= 2 * own.max() + 1e-3 * truth.abs().max(), where
            assert err.mean() <= 1.2 * own.mean() + 1e-4, where


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv"), [*HEAD_DIMS, (32, 32), (80, 80)], ids=str)
def test_head_dims(d, dv, causal, dtype):
    q, k, v, do = qkvo(d, dv, dtype=dtype, rows_first=causal)
    check(problem(q, k, v, causal=causal), q, k, v, do)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 700), (128, 128), (129, 127), (700, 64), (512, 512), (300, 5)])
def test_lengths(nq, nk, causal):
    for d in (64, 128, 256):
        q, k, v, do = qkvo(d, nq=nq, nk=nk)
        check(problem(q, k, v, causal=causal), q, k, v, do, with_dlse=nq != 300)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(0, 0), (100, 0), (100, 30), (-1, 20), (50, -1), (300, 0), (7, 3)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_windows(window, d):
    for nq, nk in ((600, 600), (300, 700), (700, 300)):
        q, k, v, do = qkvo(d, nq=nq, nk=nk)
        check(problem(q, k, v, window_left=window[0], window_right=window[1]), q, k, v, do)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("name", ["softcap", "sink", "alibi", "softcap, alibi", "all", "negative scale", "zero scale"])
def test_features(name, d):
    q, k, v, do = qkvo(d)
    slopes = torch.tensor([0.5, 0.25, 0.01, 2.0], device="cuda") if "alibi" in name or name == "all" else None
    sink = torch.tensor([0.0, 3.0, -2.0, 8.0], device="cuda") if name in ("sink", "all") else None
    extras = Extras(alibi_slopes=slopes, learnable_sink=sink)
    scale = {"negative scale": -0.1, "zero scale": 0.0}.get(name, d**-0.5)
    capped = 5.0 if "softcap" in name or name == "all" else 0.0
    left = 150 if name == "all" else -1
    p = problem(q, k, v, extras, causal=True, softcap=capped, softmax_scale=scale, window_left=left)
    check(p, q, k, v, do, extras)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_low_scores_do_not_overflow_on_padding_keys(d):
    """Every LSE far below zero: exp2(0 - LSE) of a key that is not there would be inf, and inf * 0 NaN."""
    q, k, v, do = qkvo(d, nk=200)
    extras = Extras(alibi_slopes=torch.full((4,), 10.0, device="cuda"))
    q, k = q * 4, k * 4
    check(problem(q, k, v, extras), q, k, v, do, extras)


@pytest.mark.gpu
def test_any_strides_of_do():
    q, k, v, _do = qkvo(128)
    p = problem(q, k, v)
    wide = randn(2, 333, 4, 200)
    out, lse, _g = eager_gradients(p, q, k, v, torch.zeros_like(q), None, Extras(), torch.float64)
    for do in (
        wide[..., 72:].transpose(1, 2),
        wide[..., 3:131].transpose(1, 2),
        randn(4, 1, 128).expand(2, 4, 333, 128),
    ):
        got = run(p, q, k, v, do, out.to(q.dtype), lse.float(), deterministic=True)
        want = run(p, q, k, v, do.contiguous(), out.to(q.dtype), lse.float(), deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["full", "long", "causal", "long causal", "window", "packed"])
@pytest.mark.parametrize("d", [64, 128])
def test_ordered_additions_over_several_waves(d, kind):
    """More thread blocks than run side by side, whose key tiles wait for one another. Other work shifts the timing."""
    p, tensors, extras = several_waves(d, kind)
    q, k, v, do, out, lse = tensors
    config = hopper.ordered_tiles(p)
    if "long" in kind:
        assert p.seqlen_k > 128 * torch.cuda.get_device_properties(0).multi_processor_count // 2
    want = run(p, q, k, v, do, out, lse, extras=extras, config=config)
    fused = run(p, q, k, v, do, out, lse, extras=extras, config=hopper.fused_tiles(p))
    for x, y in zip(want, fused, strict=True):
        torch.testing.assert_close(x, y, atol=1e-3, rtol=2e-2)
    load, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for i in range(200):
        if i % 10 == 0:
            with torch.cuda.stream(side):
                load @ load
        got = run(p, q, k, v, do, out, lse, extras=extras, config=config)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), i


def several_waves(d, kind):
    """A problem of 2048 thread blocks, or 1136 where packed, 426 where long; q, k, v, do, out and lse; and its extras."""
    if kind == "packed":
        lengths = [1, 3000, 128, 0, 777, 4000, 286]
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        q, k, v, do = (randn(sum(lengths), heads, d, seed=i) for i, heads in enumerate((32, 16, 16, 32)))
        extras = Extras(cu_seqlens_q=cu, cu_seqlens_k=cu)
        p = problem(q, k, v, extras, max(lengths), max(lengths), causal=True)
        call = flash_attn_varlen(
            q, k, v, cu, cu, max(lengths), max(lengths), causal=True, impl="hopper", return_lse=True
        )
        return p, (q, k, v, do, *call), extras
    batch, heads, n = (1, 6, 9000) if "long" in kind else (4, 32, 2000)
    q, k, v, do = (randn(batch, heads, n, d, seed=i) for i in range(4))
    window, causal = (300, 100) if kind == "window" else (-1, -1), "causal" in kind
    p = problem(q, k, v, causal=causal, window_left=window[0], window_right=window[1])
    call = flash_attn(q, k, v, causal=causal, window_size=window, impl="hopper", return_lse=True)
    return p, (q, k, v, do, *call), Extras()


@pytest.mark.gpu
@pytest.mark.parametrize("extra", ["", "dLSE, sink", "shares"])
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
@pytest.mark.parametrize("d", [64, 128])
def test_rows_prepared_by_earlier_thread_blocks(d, kind, extra):
    """The pass before alone gives the same bits (dQ's additions come in any order). Other work shifts the timing."""
    p, (q, k, v, do, out, lse), extras = several_waves(d, kind)
    dlse = None
    if extra == "dLSE, sink":
        dlse, extras = randn(*lse.shape, dtype=torch.float32), Extras(learnable_sink=randn(32, dtype=torch.float32))
    if extra == "shares":
        k, v = k[:, :8], v[:, :8]
    p = dataclasses.replace(p, heads_k=k.shape[1], sink=bool(dlse is not None))
    config = dataclasses.replace(hopper.fused_tiles(p), prepares=True, group_split=2 if extra == "shares" else 1)
    assert hopper.plan(p, False, config).config.prepares
    tensors = q, k, v, do, out, lse, dlse, extras
    alone = run(p, *tensors, config=dataclasses.replace(config, prepares=False))
    load, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for i in range(100):
        if i % 10 == 0:
            with torch.cuda.stream(side):
                load @ load
        got = run(p, *tensors, config=config)
        torch.testing.assert_close(got[0], alone[0], atol=1e-3 * alone[0].abs().max().item(), rtol=2e-2)
        assert all(torch.equal(a, b) for a, b in zip(alone[1:], got[1:], strict=True)), i


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_rows_converted_by_the_launch_behind_their_last_addition(d, causal, group, captured):
    """Launches that begin before the one in front of them has ended, called directly and replayed, under other work."""
    p, (q, k, v, do, out, lse), extras = several_waves(d, "causal" if causal else "full")
    k, v = (x[:, : 32 // group] for x in (k, v))
    p = dataclasses.replace(p, heads_k=k.shape[1])
    config = dataclasses.replace(hopper.fused_tiles(p), group_split=1 if group == 1 else 2)
    given = (do, None, q, k, v, out, lse, extras)
    alone = [torch.empty_like(x) for x in (q, k, v)]
    hopper.backward(p, *given, *alone, None, config=dataclasses.replace(config, converts=False))
    kept, grads = hopper.Backward(p, config=config), [torch.empty_like(x) for x in (q, k, v)]
    assert len(hopper.plan(p, False, config).pieces) > 3
    call = functools.partial(kept, *given, *grads, None)
    call()  # by Triton's launcher, one launch behind the other
    overlapping = [launch for launch in kept.launches._launches if launch.config.attribute_count]
    assert len(overlapping) == len(kept.plan.pieces) - 1
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    load, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for i in range(50):
        if i % 5 == 0:
            with torch.cuda.stream(side):
                load @ load
        for x in grads:
            x.fill_(float("nan"))
        call()
        torch.testing.assert_close(grads[0], alone[0], atol=1e-3 * alone[0].abs().max().item(), rtol=2e-2)
        assert all(torch.equal(a, b) for a, b in zip(alone[1:], grads[1:], strict=True)), i


@pytest.mark.gpu
@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "deterministic"), [(64, False), (64, True), (128, False), (128, True), (256, False)])
def test_seqused_ignores_what_lies_behind(d, causal, deterministic, shares):
    q, k, v, do = qkvo(d, nq=260, nk=517)
    used = torch.tensor([517, 139], dtype=torch.int32, device="cuda")
    extras = Extras(seqused_k=used)
    p = problem(q, k, v, extras, causal=causal)
    out, lse, exact = eager_gradients(p, q, k, v, do, None, extras, torch.float64)
    for z in range(2):
        k[z, :, int(used[z]) :] = float("nan")
        v[z, :, int(used[z]) :] = float("nan")
    config = dataclasses.replace(hopper.tiles(p, deterministic, 132), group_split=shares)
    found = run(p, q, k, v, do, out.to(q.dtype), lse.float(), None, extras, deterministic, config=config)
    for x, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), truth, atol=0.02 * truth.abs().max().item(), rtol=0)
    assert not found[1][1, :, 139:].any()
    assert not found[2][1, :, 139:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("d", "deterministic"),
    [(64, False), (64, True), (96, False), (96, True), (128, False), (128, True), (192, False), (256, False)],
)
def test_packed_equals_one_by_one(d, causal, deterministic, shares):
    lengths_q, lengths_k = [1, 128, 300, 0, 77, 513, 65], [5, 128, 260, 3, 0, 700, 129]
    cu_q, cu_k = (torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (lengths_q, lengths_k))
    shapes = ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2), (lengths_q, 4))
    q, k, v, do = (randn(sum(n) + 3, h, d, seed=i) for i, (n, h) in enumerate(shapes))
    poison = [(q, cu_q), (k, cu_k), (v, cu_k), (do, cu_q)]
    for x, cu in poison:
        x[int(cu[2])] = float("nan")  # a NaN in one sequence stays there
        x[int(cu[-1]) :] = float("nan")  # and rows behind the last one are nobody's
    extras = Extras(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    p = problem(q, k, v, extras, max(lengths_q), max(lengths_k), causal=causal)
    out, lse = torch.zeros_like(q), torch.full((4, q.shape[0]), float("-inf"), device="cuda")
    parts = []
    for s, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, keys = slice(int(cu_q[s]), int(cu_q[s]) + nq), slice(int(cu_k[s]), int(cu_k[s]) + nk)
        if nq == 0 or nk == 0:
            continue
        own = [x[span].transpose(0, 1)[None] for x, span in ((q, rows), (k, keys), (v, keys), (do, rows))]
        alone = problem(*own[:3], causal=causal)
        o, l, _g = eager_gradients(alone, *own, None, Extras(), torch.float64)
        out[rows], lse[:, rows] = o[0].transpose(0, 1).to(q.dtype), l[0].float()
        parts.append((s, rows, keys, alone, own, o.to(q.dtype), l.float()))
    config = dataclasses.replace(hopper.tiles(p, deterministic, 132), group_split=shares)
    dq, dk, dv = run(p, q, k, v, do, out, lse, None, extras, deterministic, config=config)
    for s, rows, keys, alone, own, o, l in parts:
        want = run(alone, *own, o, l, deterministic=deterministic)
        for x, span, truth in ((dq, rows, want[0]), (dk, keys, want[1]), (dv, keys, want[2])):
            truth = truth[0].transpose(0, 1)
            if s != 2:
                assert torch.isfinite(x[span]).all(), s
                torch.testing.assert_close(x[span], truth, atol=2e-2 * truth.abs().max().item() + 1e-6, rtol=2e-2)
    assert not dk[int(cu_k[3]) : int(cu_k[4])].any()  # three keys that no query sees
    assert not dq[int(cu_q[4]) : int(cu_q[5])].any()  # 77 queries that see no key


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "causal", "path"),
    [(d, causal, path) for path in PATHS for d, causal in ((64, True), (128, True), (128, False))]
    + [(192, True, "wide"), (256, False, "wide"), (256, True, "shared fused")],
)
def test_a_thousand_runs_are_bitwise_equal(d, causal, path):
    """All gradients when deterministic; dK and dV always. Other work on the machine shifts the timing."""
    q, k, v, do = qkvo(d, nq=1000, nk=1000, heads=(16, 4))
    p = problem(q, k, v, causal=causal)
    out, lse, _g = eager_gradients(p, q, k, v, do, None, Extras(), torch.float64)
    out, lse = out.to(q.dtype), lse.float()
    kw = paths_of(p)[path]
    want = run(p, q, k, v, do, out, lse, **kw)
    load = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    for i in range(1000):
        if i % 10 == 0:
            with torch.cuda.stream(side):
                load @ load
        got = run(p, q, k, v, do, out, lse, **kw)
        assert torch.equal(want[1], got[1]), i
        assert torch.equal(want[2], got[2]), i
        if "fused" not in path and path != "wide":
            assert torch.equal(want[0], got[0]), i
        else:
            torch.testing.assert_close(want[0], got[0], atol=1e-3, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
@pytest.mark.parametrize(("n", "group"), [(512, 1), (500, 1), (256, 2), (1024, 1), (500, 2)])
@pytest.mark.parametrize("d", [64, 128])
def test_many_short_heads(d, n, group, kind, deterministic):
    """Two waves of key heads: at D = 64 a thread block takes a whole one. The same bits again, where they are promised."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    batch, call = multiprocessors // 4, {"causal": kind == "causal"}
    if kind == "window":
        call["window_size"] = (100, 20)
    q, k, v, do = (randn(batch, heads, n, d, seed=i) for i, heads in enumerate((8 * group, 8, 8, 8 * group)))
    left, right = call.get("window_size", (-1, -1))
    p = problem(q, k, v, causal=call["causal"], window_left=left, window_right=right)
    chosen = hopper.plan(p, deterministic, multiprocessors=multiprocessors).config
    assert chosen.whole_head is (
        d == 64 and kind != "window" and n * group <= (512 if deterministic or kind == "causal" else 256)
    )
    assert chosen.ordered is (deterministic and not chosen.whole_head)

    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn(*leaves, **call, impl="hopper", deterministic=deterministic)
    got = torch.autograd.grad(out, leaves, do, retain_graph=True)
    for z in (0, batch - 1):
        own = [x.detach()[z : z + 1] for x in (q, k, v, do)]
        alone = dataclasses.replace(p, batch=1)
        exact, eager = (eager_gradients(alone, *own, None, Extras(), t)[2] for t in (torch.float64, q.dtype))
        for name, x, truth, base in zip(("dq", "dk", "dv"), got, exact, eager, strict=True):
            err, allowed = (x[z : z + 1].double() - truth).abs(), (base.double() - truth).abs()
            where = (name, z, err.max().item(), allowed.max().item())
            assert err.max() <= 2 * allowed.max() + 1e-3 * truth.abs().max(), where
            assert err.mean() <= 1.2 * allowed.mean() + 1e-4, where
    for _ in range(100 if deterministic or chosen.whole_head else 0):
        again = torch.autograd.grad(out, leaves, do, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_few_key_heads_are_shared_out(d, deterministic):
    """As shipped: right, and in the memory that the launcher's docstring states."""
    q, k, v, do = (randn(1, heads, 2048, d, seed=i) for i, heads in enumerate((64, 8, 8, 64)))
    p = problem(q, k, v, causal=True)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    split = hopper.plan(p, deterministic, multiprocessors=multiprocessors).config.group_split
    assert split > 1
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn(*leaves, causal=True, impl="hopper", deterministic=deterministic)
    torch.autograd.grad(out, leaves, do, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    got = torch.autograd.grad(out, leaves, do, retain_graph=True)
    extra = (
        torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - sum(x.numel() * x.element_size() for x in got)
    )
    assert extra <= 8 * 64 * 2048 + 4 * q.numel() + 4 * split * (k.numel() + v.numel()) + (1 << 16)
    own = [x.detach() for x in (q, k, v, do)]
    exact, eager = (eager_gradients(p, *own, None, Extras(), t)[2] for t in (torch.float64, q.dtype))
    for name, x, truth, base in zip(("dq", "dk", "dv"), got, exact, eager, strict=True):
        err, allowed = (x.double() - truth).abs(), (base.double() - truth).abs()
        assert err.max() <= 2 * allowed.max() + 1e-3 * truth.abs().max(), (name, err.max().item(), allowed.max().item())
        assert err.mean() <= 1.2 * allowed.mean() + 1e-4, name


@pytest.mark.gpu
@pytest.mark.parametrize("d", [128, 256])
@pytest.mark.parametrize("wanted", ["dq", "dkdv"])
def test_part_of_the_gradients(wanted, d):
    q, k, v, do = qkvo(d)
    p = problem(q, k, v)
    out, lse, _g = eager_gradients(p, q, k, v, do, None, Extras(), torch.float64)
    out, lse = out.to(q.dtype), lse.float()
    want = run(p, q, k, v, do, out, lse, config=hopper.split_tiles(p) if d == 128 else None)
    found = [torch.empty_like(x) for x in (q, k, v)]
    asked = [found[0], None, None] if wanted == "dq" else [None, *found[1:]]
    hopper.backward(p, do, None, q, k, v, out, lse, Extras(), *asked, None)
    for a, x, b in zip(asked, found, want, strict=True):
        if a is not None and (d == 128 or wanted == "dkdv"):
            assert torch.equal(x, b)
        elif a is not None:  # dQ of wide heads is added up in any order
            torch.testing.assert_close(x, b, atol=1e-3, rtol=2e-2)


@pytest.mark.gpu
def test_cuda_graph_replays():
    q, k, v, do = qkvo(128, nq=512, nk=512)
    p = problem(q, k, v, causal=True)
    out, lse, _g = eager_gradients(p, q, k, v, do, None, Extras(), torch.float64)
    out, lse = out.to(q.dtype), lse.float()
    want = run(p, q, k, v, do, out, lse, deterministic=True)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hopper.backward(p, do, None, q, k, v, out, lse, Extras(), *grads, None, deterministic=True)
    for _ in range(3):
        for x in grads:
            x.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))


@pytest.mark.gpu
def test_repeated_calls_take_the_quick_path(monkeypatch):
    q, k, v, do = qkvo(128)
    p = problem(q, k, v)
    lse = torch.zeros(q.shape[:3], device="cuda")
    backward = hopper.Backward(p)
    monkeypatch.setattr(common.Launches, "run_slowly", None)
    for _ in range(3):
        backward(do, None, q, k, v, q, lse, Extras(), *(torch.empty_like(x) for x in (q, k, v)), None)
    assert len(backward.launches.binaries) == 3
