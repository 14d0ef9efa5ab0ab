"""The figures, drawn by code and put into the page as SVG, so that they follow the colour scheme and cannot go stale.

Each function returns one ``<figure>``; classes are those of assets/css/site.css.
"""

from __future__ import annotations

import math
import re
from typing import Any

import s04_tiled
import s07_masks
import s09_varlen
import torch
from reachable import region

from flashtri_core.variants import causal


def _figure(width: int, height: int, body: str, alt: str, caption: str) -> str:
    name = re.sub(r"<[^>]+>", "", caption).split(". ")[0]
    return (
        f'<figure class="ft-figure"><div {region(f"Figure: {name}")}><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{alt}" style="max-width:{width * 1.12:g}px;min-width:{min(0.78 * width, 560):g}px">{body}</svg></div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _text(x: float, y: float, text: str, css: str = "", anchor: str = "start", size: int | None = None) -> str:
    style = f' style="font-size:{size}px"' if size else ""
    return f'<text x="{x:g}" y="{y:g}" class="{css}" text-anchor="{anchor}"{style}>{text}</text>'


#: Text colour on a rectangle of each class.
ON = {"blue": "var(--ft-paper)", "now": "#12151c", "wait": "var(--ft-ink)"}


def _label(x: float, y: float, text: str, fill: str) -> str:
    """Small text centred on a coloured rectangle."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" style="font-size:11px;fill:{fill}">{text}</text>'


def _rect(x: float, y: float, w: float, h: float, css: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" class="{css}"/>'


def _line(points: list[tuple[float, float]], css: str = "line") -> str:
    return f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in points)}" class="{css}"/>'


def _arrow(x0: float, y0: float, x1: float, y1: float, css: str = "line") -> str:
    angle = math.atan2(y1 - y0, x1 - x0)
    head = [(x1 - 7 * math.cos(angle + turn), y1 - 7 * math.sin(angle + turn)) for turn in (0.45, -0.45)]
    return _line([(x0, y0), (x1, y1)], css) + _line([head[0], (x1, y1), head[1]], css)


def scale() -> tuple[str, str]:
    """The home page's two pictures, to one scale: an 8192 x 8192 score matrix, and one 128 x 64 tile in its place."""
    side, n = 240.0, 8192
    tile = _rect(side * 0.42, side * 0.5, 64 / n * side, 128 / n * side, "")
    box = f'viewBox="0 0 {side:g} {side:g}" aria-hidden="true"'
    whole = f'width="{side:g}" height="{side:g}" style="fill:var(--tile-waiting)"'
    ordinary = f"<svg {box}><rect {whole}/></svg>"
    outline = (
        f'<rect x=".5" y=".5" width="{side - 1:g}" height="{side - 1:g}" '
        'style="fill:none;stroke:var(--tile-edge);stroke-dasharray:3 4"/>'
    )
    amber = "fill:var(--tile-now);stroke:var(--tile-now);stroke-width:1.5"
    ours = f'<svg {box}>{outline}<g style="{amber}">{tile}</g></svg>'
    return ordinary, ours


def hierarchy() -> str:
    """Where the numbers live on an A100, sizes and bandwidths as published."""
    rows = [
        (
            "Registers and shared memory",
            "on the chip",
            "192 KB in each of 108 processors, 20 MB in all",
            "about 19 TB/s",
            19.0,
            "now",
        ),
        ("HBM", "main memory of the GPU", "40 GB", "1.5 TB/s", 1.5, "wait"),
    ]
    body = ""
    for r, (name, where, size, speed, rate, css) in enumerate(rows):
        y = 18 + 92 * r
        body += _text(0, y, f"{name}", "", size=15) + _text(0, y + 19, f"{where}: {size}", "soft")
        body += _rect(0, y + 29, 310 * rate / 19, 22, css) + _text(310 * rate / 19 + 8, y + 45, speed, "mono")
    return _figure(
        420, 190, body, "Bandwidth of on-chip memory, 19 terabytes per second, beside HBM, 1.5",
        "Bandwidth of the two levels of an A100, drawn to scale (figures: FlashAttention, section 2.1).",
    )  # fmt: skip


def traffic() -> str:
    """Numbers moved per head by three orders of the same arithmetic, counted by rung 4."""
    n, d = 8192, 64
    counts = s04_tiled.traffic(n, n, d, 128, 64)
    labels = {
        "ordinary": "S and P written and read back",
        "keys outside": "tiled, keys in the outer loop",
        "queries outside": "tiled, queries in the outer loop",
    }
    most = max(counts.values())
    body = ""
    for r, (name, count) in enumerate(counts.items()):
        y = 14 + 58 * r
        body += _text(0, y, labels[name]) + _rect(0, y + 8, 360 * count / most, 20, "wait" if r == 0 else "blue")
        body += _text(360 * count / most + 8, y + 23, f"{count / 1e6:.0f} M", "mono")
    return _figure(
        420, 170, body, "; ".join(f"{labels[k]}: {v / 1e6:.0f} million numbers" for k, v in counts.items()),
        f"Numbers that cross the memory bus per head, N = {n}, D = {d}, tiles of 128 × 64. Counted by "
        "<code>traffic</code> in rung 4, not measured.",
    )  # fmt: skip


def online() -> str:
    """Three tiles of one row: the maximum moves, and alpha corrects what was summed under the old one."""
    scores = [[0.2, 1.1, 0.6, 0.9], [0.4, 0.1, 1.0, 0.3], [0.8, 2.0, 1.4, 0.5]]
    m, l, body = -math.inf, 0.0, ""
    for t, tile in enumerate(scores):
        x = 20 + 235 * t
        m_new = max(m, *tile)
        alpha = math.exp(m - m_new) if m > -math.inf else 0.0
        l = l * alpha + sum(math.exp(s - m_new) for s in tile)
        for c, s in enumerate(tile):
            body += _rect(x + 48 * c, 118 - 44 * s, 36, 44 * s, "now" if s == m_new else "wait")
            body += _text(x + 48 * c + 18, 134, f"{s:.1f}", "mono soft", "middle")
        level = 118 - 44 * m_new
        body += (
            f'<line x1="{x - 8:g}" y1="{level:g}" x2="{x + 192:g}" y2="{level:g}" class="line" stroke-dasharray="4 3"/>'
        )
        body += _text(x - 8, level - 6, f"m = {m_new:.1f}", "mono")
        body += _text(x, 162, f"α = {alpha:.3f}" if t else "α = 0, nothing yet", "mono") + _text(
            x, 182, f"l = {l:.3f}", "mono"
        )
        m = m_new
    exact = sum(math.exp(s - m) for tile in scores for s in tile)
    return _figure(
        720, 195, body,
        "A row of twelve scores in three tiles; in the third the maximum rises and alpha becomes smaller than one",
        "Twelve scores, four at a time. Where no larger score arrives, α is 1. "
        f"The last l is {l:.3f}; summed in one go it is {exact:.3f}.",
    )  # fmt: skip


def _grid(
    x: float, y: float, rows: int, cols: int, cell: float, css: dict[tuple[int, int], str], base: str = "wait"
) -> str:
    return "".join(
        _rect(x + cell * c + 1, y + cell * r + 1, cell - 2, cell - 2, css.get((r, c), base))
        for r in range(rows)
        for c in range(cols)
    )


def loops() -> str:
    """The same tiles in two orders: what has to wait in memory, and what can stay on chip."""
    body = ""
    for side, (title, sub, own) in enumerate(
        (
            ("Keys outside", "m, l, O of every row wait in memory", "col"),
            ("Queries outside", "m, l, acc of one block stay on chip", "row"),
        )
    ):
        x = 10 + 340 * side
        css = {(r, 2) if own == "col" else (2, r): "gone" for r in range(6)}
        css |= {(r, 1) if own == "col" else (1, r): "gone" for r in range(6)} | {
            (r, 0) if own == "col" else (0, r): "gone" for r in range(6)
        }
        css |= {((r, 3) if own == "col" else (3, r)): "gone" for r in range(2)}
        css[(2, 3) if own == "col" else (3, 2)] = "now"
        body += _text(x, 16, title, "", size=15) + _text(x, 35, sub, "soft")
        body += _grid(x, 48, 6, 6, 30, css)
        if own == "col":
            body += (
                _arrow(x + 105, 52, x + 105, 118)
                + _rect(x + 196, 49, 26, 178, "card")
                + "".join(_text(x + 209, 68 + 30 * r, "↕", "mono", "middle") for r in range(6))
            )
            body += _text(x + 230, 140, "memory", "soft")
        else:
            body += (
                _arrow(x + 4, 153, x + 72, 153)
                + _rect(x + 196, 139, 26, 28, "now")
                + _text(x + 230, 158, "registers", "soft")
            )
    return _figure(
        690, 240, body,
        "Left: the loop runs down the queries for each key block; right: it runs along the keys for one query block",
        "Amber: the tile on chip. Hollow: computed before. "
        "With queries outside, nothing about a row leaves the chip until the row is done.",
    )  # fmt: skip


def ownership() -> str:
    """The backward pass's two kernels: who writes what."""
    body = ""
    for side, (title, sub) in enumerate(
        (("dK, dV", "a program owns a column and adds it up"), ("dQ", "a program owns a row and adds it up"))
    ):
        x = 10 + 340 * side
        css = {((r, 3) if side == 0 else (3, r)): "now" if r == 2 else "gone" if r < 2 else "wait" for r in range(6)}
        body += _text(x, 16, title, "", size=15) + _text(x, 35, sub, "soft")
        body += _grid(x, 48, 6, 6, 30, css, "card")
        if side == 0:
            body += _rect(x + 91, 236, 28, 12, "blue") + _text(x + 128, 247, "dK, dV of these keys", "soft")
        else:
            body += _rect(x + 190, 139, 12, 28, "blue") + _text(x + 208, 158, "dQ of these queries", "soft")
    return _figure(
        690, 258, body, "Two grids: in the first a program owns a column of tiles, in the second a row",
        "Every tile of P is rebuilt twice, once by each kernel. In return no program adds to what another one writes.",
    )  # fmt: skip


def bounds() -> str:
    """The four bounds of one query tile under a window, from rung 7."""
    n, bm, bn, m0, left, right = 512, 64, 32, 256, 128, 64
    lo, full_lo, full_hi, hi = s07_masks.kv_range(m0, m0 + bm, n, n, left, right)
    at = lambda key: 10 + 660 * key / n
    body = ""
    for start in range(0, n, bn):
        kind = (
            "gone"
            if start + bn <= lo or start >= hi
            else "blue"
            if full_lo <= start and start + bn <= full_hi
            else "now"
        )
        body += _rect(at(start) + 1, 62, 660 * bn / n - 2, 40, kind)
    for name, key, y in (("lo", lo, 22), ("full_lo", full_lo, 46), ("full_hi", full_hi, 46), ("hi", hi, 22)):
        body += f'<line x1="{at(key):g}" y1="{y + 4}" x2="{at(key):g}" y2="104" class="line" stroke-dasharray="3 3"/>'
        body += _text(at(key), y, f"{name} = {key}", "mono", "middle")
    body += (
        _text(10, 128, "skipped", "soft")
        + _text(at(150), 128, "masked", "soft")
        + _text(at(240), 128, "no mask", "soft")
        + _text(at(345), 128, "masked", "soft")
    )
    return _figure(
        680, 140, body,
        f"Key tiles from 0 to {n}: outside {lo} and {hi} skipped, between {full_lo} and {full_hi} without a mask",
        f"Queries {m0} to {m0 + bm - 1}, window ({left}, {right}), N = {n}, key tiles of {bn}. "
        "Only the amber tiles test the mask.",
    )  # fmt: skip


def alignment(nq: int, nk: int) -> torch.Tensor:
    """The causal mask as the kernels' own eager twin gives it: bool (nq, nk)."""
    return causal.keep_eager(torch.arange(nq)[:, None], torch.arange(nk)[None, :], nq, nk, -1, -1)


def causal_pictures() -> str:
    """2 x 5 and 5 x 2: this package's causal mask next to SDPA's."""
    body, cell = "", 26
    for side, (nq, nk) in enumerate(((2, 5), (5, 2))):
        y0 = 26 if side == 0 else 132
        for kind, x0 in (("flash_attn(causal=True)", 10), ("SDPA(is_causal=True)", 300)):
            visible = alignment(nq, nk) if x0 == 10 else torch.ones(nq, nk, dtype=torch.bool).tril()
            css = {(r, c): "blue" if visible[r, c] else "gone" for r in range(nq) for c in range(nk)}
            body += _text(x0, y0 - 9, f"{kind}, Nq = {nq}, Nk = {nk}", "soft") + _grid(x0, y0, nq, nk, cell, css)
            empty = [r for r in range(nq) if not visible[r].any()]
            for r in empty:
                body += _text(x0 + nk * cell + 8, y0 + r * cell + 18, "O = 0, LSE = −∞", "mono soft")
    return _figure(
        560, 270, body, "Causal masks of 2 by 5 and 5 by 2, bottom-right aligned on the left and top-left aligned on the right",
        "Filled: the query (row) sees the key (column). Left: bottom-right aligned. Right: top-left aligned. "
        "For Nq = Nk they agree.",
    )  # fmt: skip


def heads(hq: int = 8, hk: int = 2) -> str:
    """Query heads that read key head h // group."""
    body, group = "", hq // hk
    for h in range(hq):
        x = 10 + 82 * h
        body += _rect(x, 30, 66, 30, "card") + _text(x + 33, 50, f"q {h}", "mono", "middle")
        target = 10 + 82 * (group * (h // group)) + 82 * (group - 1) / 2 + 33
        body += _line([(x + 33, 60), (target, 102)], "thin")
    for k in range(hk):
        x = 10 + 82 * group * k + 82 * (group - 1) / 2
        body += (
            _rect(x - 12, 102, 90, 34, "blue")
            + f'<text x="{x + 33:g}" y="124" text-anchor="middle" class="mono" style="fill:var(--ft-paper)">k, v {k}</text>'
        )
    body += _text(10, 18, "query heads", "soft") + _text(
        10, 160, "key and value heads: loaded where they lie, never copied", "soft"
    )
    return _figure(
        670,
        170,
        body,
        f"{hq} query heads, {group} of them reading each of {hk} key heads",
        f"Hq = {hq}, Hk = {hk}: head h reads key head h // {group}.",
    )


def packed() -> str:
    """Sequences in one tensor, and which tile numbers rung 9's search gives to each."""
    cu, block = [0, 40, 56, 136], 32
    total, colours = cu[-1], ("blue", "now", "wait")
    at = lambda row: 10 + 640 * row / total
    body = _text(10, 18, f"rows in memory, no padding: cu_seqlens = {cu}", "soft")
    for s, css in enumerate(colours):
        body += _rect(at(cu[s]) + 1, 28, at(cu[s + 1]) - at(cu[s]) - 2, 30, css)
        body += _text(at(cu[s]) + 2, 76, f"{cu[s]}", "mono soft")
    tiles = total // block + len(cu) - 1
    body += _text(10, 112, f"tile numbers 0 to {tiles - 1}: total // {block} + {len(cu) - 1} sequences", "soft")
    for t in range(tiles):
        s, row = s09_varlen.owner(t, cu, block)
        spare = row >= cu[s + 1] - cu[s]
        x = 10 + 92 * t
        body += _rect(x, 122, 80, 34, "gone" if spare else colours[s])
        label = "spare" if spare else f"seq {s}, row {row}"
        body += _label(x + 40, 143, label, "var(--ft-soft)" if spare else ON[colours[s]])
    return _figure(
        670, 165, body, "Three sequences packed into one tensor and the seven tile numbers that cover them",
        "Each program finds its sequence by a binary search in <code>cu_seqlens</code>; "
        "at most one number per sequence is a spare and returns at once.",
    )  # fmt: skip


def pipeline() -> str:
    """Two consumer warpgroups and a producer: what runs at the same time on Hopper."""
    body = ""
    lanes = ("TMA producer", "warpgroup 0", "warpgroup 1")
    for r, name in enumerate(lanes):
        body += _text(0, 34 + 52 * r, name, "", size=13) + _line([(110, 44 + 52 * r), (700, 44 + 52 * r)], "thin")
    for j in range(5):
        body += _rect(112 + 112 * j, 16, 46, 24, "card") + _text(135 + 112 * j, 33, f"K{j}", "mono", "middle")
        body += _rect(162 + 112 * j, 16, 46, 24, "card") + _text(185 + 112 * j, 33, f"V{j}", "mono", "middle")
    for lane in (0, 1):
        for j in range(4):
            x, y = 136 + 56 * lane + 128 * j, 68 + 52 * lane
            products = f"QK{j} PV{j - 1}" if j else "QK0"
            body += _rect(x, y, 60, 24, "blue") + _label(x + 30, y + 16, products, ON["blue"])
            body += _rect(x + 62, y, 62, 24, "now") + _label(x + 93, y + 16, f"softmax {j}", ON["now"])
    body += _text(110, 172, "time →", "soft")
    return _figure(
        712, 182, body, "A producer loads K and V while two warpgroups alternate between matrix products and softmax",
        "Schematic. Blue: tensor cores. Amber: exponentials. While one warpgroup exponentiates, the other multiplies; "
        "the loads run ahead of both.",
    )  # fmt: skip


def roofline(ceilings: dict[str, Any] | None, gpu: str, n: int = 8192, d: int = 128) -> str:
    """Attention on the roofline of the card whose ceilings were measured; without one, nothing is drawn."""
    if ceilings is None:
        note = "No card's ceilings have been measured yet: the roofline appears here with the first benchmark run."
        return f'<div class="ft-empty"><p>{note}</p></div>'
    copy, peak = ceilings["copy_tb_s"], ceilings["matmul_tflops"]["bf16"]
    counts = s04_tiled.traffic(n, n, d, 128, 128)
    once = 4 * n * d + n  # q, k, v, o and the log-sum-exp, each moved once
    per_byte = lambda numbers: 4 * n * n * d / (2 * numbers)
    points = {
        "ordinary": per_byte(counts["ordinary"]),
        "tiled": per_byte(counts["queries outside"]),
        "tiled, each tensor moved once": per_byte(once),
    }
    x = lambda intensity: 46 + 420 * math.log10(intensity) / 4
    y = lambda rate: 240 - 200 * math.log10(rate) / 3.2
    ridge = peak / copy
    body = _line([(46, 30), (46, 240), (486, 240)], "line")
    body += _line([(x(1), y(copy)), (x(ridge), y(peak)), (x(10**4), y(peak))], "amberline")
    body += _text(x(10**4), y(peak) - 12, f"matrix products {peak:.0f} TFLOP/s", "", "end")
    body += _text(x(2.2), y(copy * 2.2) + 22, f"copy {copy:.2f} TB/s")
    for exponent in range(5):
        body += _text(x(10**exponent), 258, f"{10**exponent:,}", "mono soft", "middle")
    body += _text(486, 278, "operations per byte moved", "soft", "end") + _text(
        0, 20, "TFLOP/s that fit under the roof", "soft"
    )
    for intensity in points.values():
        at, roof = x(intensity), y(min(peak, copy * intensity))
        body += _line([(at, roof), (at, 240)], "thin") + f'<circle cx="{at:g}" cy="{roof:g}" r="6" class="blue"/>'
    ordinary, tiled, best = points.values()
    body += _text(x(ordinary) - 8, 178, f"ordinary: {ordinary:.0f}", "", "end")
    body += _text(x(tiled) + 8, 178, f"tiled: {tiled:.0f}")
    body += _text(x(best) - 8, 206, "tiled, each tensor", "", "end") + _text(
        x(best) - 8, 223, f"moved once: {best:,.0f}", "", "end"
    )
    told = "; ".join(f"{name} {intensity:,.0f} operations per byte" for name, intensity in points.items())
    return _figure(
        500, 285, body,
        f"Roofline of {gpu}, flat from {ridge:.0f} operations per byte on; {told}",
        f"Ceilings measured on {gpu} in the benchmark run. The points are arithmetic, N = {n}, D = {d}, tiles of 128 × 128, "
        "16-bit numbers: they say how high each could go, not how fast it is.",
    )  # fmt: skip
