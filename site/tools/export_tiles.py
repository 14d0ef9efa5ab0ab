"""Write docs/data/tiles.json: which tiles each program of the kernels visits, from the kernels' own functions.

Nothing is worked out here. A small Triton kernel calls the ``kv_range`` and ``q_range`` of each mask, and
``block_bounds`` and ``dense_tile`` of kernels/schedule.py, with the arguments that the attention kernels give them, and
stores what comes back. Run ``TRITON_INTERPRET=1 python export_tiles.py OUT.json``: the interpreter needs no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from flashtri_core.kernels.schedule import block_bounds, dense_tile
from flashtri_core.variants import MASKS
from flashtri_core.variants.window import UNBOUNDED, normalise

#: What the page offers: label, mask file, and (left, right, causal) as a caller would give them.
CHOICES = {
    "full": ("Full", "full", (-1, -1, False)),
    "causal": ("Causal", "causal", (-1, -1, True)),
    "window": ("Window (255, 0)", "window", (255, 0, True)),
    "band": ("Window (128, 128)", "window", (128, 128, False)),
}
BLOCKS = [(64, 64), (128, 64), (64, 128), (128, 128)]
TILES = [4, 6, 8, 10, 12, 16, 20, 24, 28, 32]  # along the longer side of the grid


@triton.jit
def bounds_kernel(
    OUT, LENGTHS, args, RANGE: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr, LAST_FIRST: tl.constexpr
):
    """Every program of 16 grids at once: for each length and program id, its tile and the bounds of its loop, in tiles.

    OWN is the block size a program owns, OTHER the one its loop walks over. Forward and dQ own queries and start with
    the last tile, dK/dV owns keys and starts with the first.
    """
    N = tl.load(LENGTHS + tl.arange(0, 16))[:, None]
    count = tl.cdiv(N, OWN)
    pid = tl.arange(0, 32)[None, :]
    zeros = pid * 0 + N * 0  # a bound that does not depend on the tile is a plain number; this makes it one per program
    _, start = dense_tile(tl.minimum(pid, count - 1), count, 1, 1, OWN, LAST_FIRST)
    lo, full_lo, full_hi, hi = RANGE(start, tl.minimum(start + OWN, N), N, N, args)
    lo, full_lo, full_hi, hi = block_bounds(lo + zeros, full_lo + zeros, full_hi + zeros, hi + zeros, OTHER)
    out = OUT + (tl.arange(0, 16)[:, None] * 32 + pid) * 5
    tl.store(out + 0, start // OWN)
    tl.store(out + 1, lo // OTHER)
    tl.store(out + 2, tl.cdiv(full_lo, OTHER))
    tl.store(out + 3, tl.cdiv(full_hi, OTHER))
    tl.store(out + 4, tl.cdiv(hi, OTHER))


def seqlen(tiles: int, block_m: int, block_n: int) -> int:
    """Tokens of a grid that has ``tiles`` tiles along its longer side."""
    return tiles * min(block_m, block_n)


def programs(
    axis: str, mask_file: str, sides: tuple[int, int, bool], block_m: int, block_n: int
) -> list[list[list[int]]]:
    """Per grid of TILES, per program in launch order: [tile, lo, full_lo, full_hi, hi], counted in tiles.

    ``axis`` is what a program owns: "q" for forward and dQ, "k" for dK/dV.
    """
    mask = MASKS[mask_file]
    own, other, bounds = (block_m, block_n, mask.kv_range) if axis == "q" else (block_n, block_m, mask.q_range)
    lengths = torch.full((16,), own, dtype=torch.int32)  # grids past the end of TILES have one program, and are dropped
    lengths[: len(TILES)] = torch.tensor([seqlen(tiles, block_m, block_n) for tiles in TILES])
    out = torch.full((16, 32, 5), -1, dtype=torch.int32)
    args = normalise(*sides) if mask_file == "window" else ()
    bounds_kernel[(1,)](out, lengths, args, bounds, own, other, axis == "q")
    return [grid[: length // own].tolist() for grid, length in zip(out[: len(TILES)], lengths.tolist(), strict=False)]


def export() -> dict[str, Any]:
    """Everything the page draws; "rows" and "columns" are keyed "mask/BLOCK_MxBLOCK_N/tiles"."""
    rows: dict[str, list[list[int]]] = {}
    columns: dict[str, list[list[int]]] = {}
    for choice, (_, mask_file, sides) in CHOICES.items():
        for block_m, block_n in BLOCKS:
            keys = [f"{choice}/{block_m}x{block_n}/{tiles}" for tiles in TILES]
            rows |= zip(keys, programs("q", mask_file, sides, block_m, block_n), strict=True)
            columns |= zip(keys, programs("k", mask_file, sides, block_m, block_n), strict=True)
    masks = {
        choice: {
            "label": label,
            "window": [side if side < UNBOUNDED else -1 for side in normalise(*sides)],
            # which ends of the loop run with the mask: (left, right), for the loop over keys and the one over queries
            "kv_edges": [MASKS[file].KV_LEFT_EDGE, True],
            "q_edges": [MASKS[file].Q_LEFT_EDGE, MASKS[file].Q_RIGHT_EDGE],
        }
        for choice, (label, file, sides) in CHOICES.items()
    }
    return {"masks": masks, "blocks": BLOCKS, "tiles": TILES, "rows": rows, "columns": columns}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(export(), separators=(",", ":")))
    print(f"{target.name}: {target.stat().st_size / 1e3:.0f} kB")
