"""The schedule that the visualiser draws is the kernels' own, and it is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtri_core.variants import MASKS
from flashtri_core.variants.window import normalise

pytestmark = pytest.mark.interpreter
TOOLS = Path(__file__).parents[1] / "tools"
INTERPRETER = {**os.environ, "TRITON_INTERPRET": "1"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("data") / "tiles.json"
    subprocess.run([sys.executable, str(TOOLS / "export_tiles.py"), str(out)], env=INTERPRETER, check=True, timeout=300)
    return json.loads(out.read_text())


def tiles_of(program: list[int], edges: list[bool]) -> dict[int, bool]:
    """Tile -> does it run with the mask; as the page's programsOf reads an exported program."""
    _, lo, full_lo, full_hi, hi = program
    return {
        at: (at < full_lo and edges[0]) or (at >= full_hi and edges[1]) for at in range(lo if edges[0] else full_lo, hi)
    }


def blocks_of(key: str) -> tuple[str, int, int, int]:
    mask, blocks, tiles = key.split("/")
    block_m, block_n = map(int, blocks.split("x"))
    return mask, block_m, block_n, int(tiles) * min(block_m, block_n)


@pytest.mark.parametrize("mask", ["full", "causal", "window", "band"])
def test_bounds_against_brute_force(exported: dict[str, Any], mask: str) -> None:
    """Every mask, block size and length: skipped tiles show nothing, tiles without a mask show everything."""
    checked = 0
    for key in exported["rows"]:
        name, block_m, block_n, n = blocks_of(key)
        if name != mask:
            continue
        left, right = (side if side >= 0 else 1 << 30 for side in exported["masks"][mask]["window"])
        kind = "window" if mask == "band" else mask
        visible = MASKS[kind].keep_eager(torch.arange(n)[:, None], torch.arange(n)[None, :], n, n, left, right)
        tiles = visible.view(n // block_m, block_m, n // block_n, block_n)
        some, every = tiles.any(3).any(1), tiles.all(3).all(1)
        edges = exported["masks"][mask]
        for axis, programs, which in (
            ("rows", exported["rows"], "kv_edges"),
            ("columns", exported["columns"], "q_edges"),
        ):
            own_some, own_every = (some, every) if axis == "rows" else (some.T, every.T)
            assert sorted(p[0] for p in programs[key]) == list(range(len(own_some))), key
            for program in programs[key]:
                visited = tiles_of(program, edges[which])
                assert set(visited) == set(own_some[program[0]].nonzero().flatten().tolist()), (key, axis, program)
                free = {at for at, masked in visited.items() if not masked}
                assert free == set(own_every[program[0]].nonzero().flatten().tolist()), (key, axis, program)
                checked += 1
    assert checked > 500


def test_page_mask_is_the_given_one(exported: dict[str, Any]) -> None:
    assert exported["masks"]["window"]["window"] == list(normalise(255, 0, True))
    assert exported["masks"]["band"]["window"] == [128, 128]
    assert exported["masks"]["causal"]["window"] == [-1, 0]
    assert exported["masks"]["full"]["window"] == [-1, -1]


def test_causal_starts_with_the_longest_program(exported: dict[str, Any]) -> None:
    assert [p[0] for p in exported["rows"]["causal/64x64/8"]] == list(range(7, -1, -1))
    assert [p[0] for p in exported["columns"]["causal/64x64/8"]] == list(range(8))


def test_the_kernels_compute_exactly_these_tiles(exported: dict[str, Any]) -> None:
    """The boards that the real kernels filled in from inside, under the interpreter."""
    run = subprocess.run(
        [sys.executable, str(TOOLS / "trace_tiles.py")],
        env=INTERPRETER,
        check=True,
        timeout=600,
        capture_output=True,
        text=True,
    )
    traced = json.loads(run.stdout)
    assert len(traced) == 8
    for key, kernels in traced.items():
        masks = exported["masks"][key.split("/")[0]]
        for kernel, (computed, masked) in kernels.items():
            by_column = kernel == "dkdv"
            programs = exported["columns" if by_column else "rows"][key]
            edges = masks["q_edges" if by_column else "kv_edges"]
            want = {(p[0], at): m for p in programs for at, m in tiles_of(p, edges).items()}
            cells = torch.tensor(computed).nonzero().tolist()
            got = {((c, r) if by_column else (r, c)): bool(masked[r][c]) for r, c in cells}
            if key.startswith("full"):
                # without a mask the last span is empty: nothing tests anything
                assert not torch.tensor(masked).any()
            assert got == want, (key, kernel)
