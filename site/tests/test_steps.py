"""Every rung of the derivation returns what the rung before it returned, and runs as a script."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import s01_softmax
import s02_safe
import s03_online
import s04_tiled
import s05_fa2
import s06_backward
import s07_masks
import s08_gqa
import s09_varlen
import s10_pipelined
import torch

STEPS = Path(__file__).parents[1] / "steps"
SIZES = [(24, 40), (40, 24), (1, 33), (16, 16), (17, 1)]
close = torch.testing.assert_close


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_forward_rungs_agree(m: int, n: int) -> None:
    q, k, v = s01_softmax.example(m, n)
    first = s01_softmax.attention(q, k, v)
    for rung in (s02_safe, s03_online, s04_tiled):
        close(rung.attention(q, k, v), first)
    o, lse = s05_fa2.attention(q, k, v)
    close(o, first)
    close(lse, torch.logsumexp(q @ k.T * q.shape[1] ** -0.5, 1))


def test_plain_softmax_overflows_and_the_safe_one_does_not() -> None:
    q, k, v = s01_softmax.example()
    large = 1000 * q.float(), k.float(), v.float()
    assert s01_softmax.attention(*large).isnan().any()
    assert s02_safe.attention(*large).isfinite().all()
    close(s05_fa2.attention(*large)[0], s02_safe.attention(*large), rtol=1e-4, atol=1e-4)


def test_online_prefix_is_attention_over_the_prefix() -> None:
    q, k, v = s01_softmax.example()
    for n in (1, 7, 40):
        close(s03_online.attention(q, k[:n], v[:n]), s02_safe.attention(q, k[:n], v[:n]))


@pytest.mark.parametrize("blocks", [(16, 16), (8, 32), (64, 64), (5, 3)])
def test_block_sizes_do_not_matter(blocks: tuple[int, int]) -> None:
    q, k, v = s01_softmax.example(40, 50)
    expected = s02_safe.attention(q, k, v)
    close(s04_tiled.attention(q, k, v, *blocks), expected)
    close(s05_fa2.attention(q, k, v, *blocks)[0], expected)


def test_traffic_counts_match_a_walk_over_the_loops() -> None:
    """Count loads and stores by walking the loop nests, with one block that is ragged."""
    m, n, d, bm, bn = 48, 80, 8, 16, 16
    keys_outside = queries_outside = 0
    for _ in range(0, n, bn):
        keys_outside += 2 * bn * d
        for _ in range(0, m, bm):
            keys_outside += bm * d + 2 * (bm * d + 2 * bm)
    for _ in range(0, m, bm):
        queries_outside += bm * d + 2 * n * d + bm * d + bm
    counted = s04_tiled.traffic(m, n, d, bm, bn)
    assert counted["keys outside"] == keys_outside
    assert counted["queries outside"] == queries_outside
    assert counted["ordinary"] == (m + 2 * n) * d + 4 * m * n + m * d


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_backward_rung_matches_autograd_and_the_dense_formulas(m: int, n: int) -> None:
    q, k, v = (x.requires_grad_() for x in s01_softmax.example(m, n))
    o = s02_safe.attention(q, k, v)
    do = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(o, (q, k, v), do)
    with torch.no_grad():
        for got in (s06_backward.backward_dense(q, k, v, do), s06_backward.backward(q, k, v, do, 16, 8)):
            for a, b in zip(got, expected, strict=True):
                close(a, b)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (20, 3), (0, 0), (3, -1)])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (40, 70), (70, 40), (1, 33)])
def test_mask_rung_matches_the_dense_mask(window: tuple[int, int], m: int, n: int) -> None:
    q, k, v = s01_softmax.example(m, n)
    o, lse, _ = s07_masks.attention(q, k, v, *window)
    close(o, s07_masks.attention_dense(q, k, v, *window))
    visible = s07_masks.keep(torch.arange(m)[:, None], torch.arange(n)[None], m, n, *window)
    assert torch.equal(lse == -torch.inf, ~visible.any(1))
    if window == (-1, -1):
        close(o, s05_fa2.attention(q, k, v)[0])


def test_causal_rung_visits_half_and_masks_one_tile_per_row() -> None:
    seen = s07_masks.attention(*s01_softmax.example(256, 256), -1, 0)[2]
    assert seen == {"free": 120, "masked": 16}


def test_gqa_rung_matches_expanded_heads() -> None:
    q, k, v = s08_gqa.example()
    wide = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    close(s08_gqa.attention(q, k, v), s08_gqa.attention(q, *wide))
    do = torch.randn_like(q)
    dq, dk, dv = s08_gqa.backward(q, k, v, do)
    wide_dq, wide_dk, wide_dv = s08_gqa.backward(q, *wide, do)
    close(dq, wide_dq)
    close(dk, wide_dk.unflatten(0, (2, 2)).sum(1))
    close(dv, wide_dv.unflatten(0, (2, 2)).sum(1))


@pytest.mark.parametrize("cu", [[0, 87], [0, 5, 5, 38, 54, 87], [0, 0, 1, 2, 87, 87], [0, 16, 32, 87]])
def test_varlen_rung_matches_one_call_per_sequence(cu: list[int]) -> None:
    q, k, v = s01_softmax.example(87, 87)
    close(s09_varlen.attention(q, k, v, cu), s09_varlen.one_by_one(q, k, v, cu))


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_pipelined_rung_agrees_and_never_waits_for_its_own_softmax(m: int, n: int) -> None:
    q, k, v = s01_softmax.example(m, n)
    for got, want in zip(s10_pipelined.attention(q, k, v, 8, 16), s05_fa2.attention(q, k, v), strict=True):
        close(got, want)
    log: list[str] = []
    s10_pipelined.program(0, *s01_softmax.example(16, 64), 16, 16, log)
    assert log == ["QK3, softmax 3", "QK2 + PV3, softmax 2", "QK1 + PV2, softmax 1", "QK0 + PV1, softmax 0", "PV0"]


@pytest.mark.parametrize("script", sorted(STEPS.glob("s[01]*.py")), ids=lambda p: p.stem)
def test_rung_runs_as_a_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
