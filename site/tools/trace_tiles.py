"""Record, from inside the real kernels, which tiles they compute and in which of them they test the mask.

The kernels run through Triton's interpreter with two of their own hooks replaced: ``drop`` is called once per computed
tile, ``keep`` once per tile with a mask; both note where they are. ``TRITON_INTERPRET=1 python trace_tiles.py`` prints
JSON for the tests, which hold it against the exported schedule.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from export_tiles import CHOICES, seqlen

from flashtri_core.kernels import launch
from flashtri_core.problem import Extras, Problem
from flashtri_core.tuning import Config
from flashtri_core.variants import assemble as real_assemble
from flashtri_core.variants import causal, full, window

TILES = 6
BLOCKS = [(64, 64), (128, 64)]  # square and not: a tile costs 40 ms here
HEAD_DIM = 16


@triton.jit
def note(i, j, args, AT: tl.constexpr):
    """Mark the tile of every score that is in hand; args[AT:] = board, its columns, BLOCK_M, BLOCK_N."""
    tl.store(args[AT] + i // args[AT + 2] * args[AT + 1] + j // args[AT + 3], 1)


@triton.jit
def drop(p, z, h, i, j, args, SPARE: tl.constexpr = False):
    """Stands in for dropout: notes the tile, drops nothing."""
    note(i, j, args, 0)
    return p


@triton.jit
def keep_full(i, j, Nq, Nk, args):
    """Notes the tile, then answers as the mask does."""
    note(i, j, args, 2)
    return full.keep(i, j, Nq, Nk, args)


@triton.jit
def keep_causal(i, j, Nq, Nk, args):
    """Notes the tile, then answers as the mask does."""
    note(i, j, args, 2)
    return causal.keep(i, j, Nq, Nk, args)


@triton.jit
def keep_window(i, j, Nq, Nk, args):
    """Notes the tile, then answers as the mask does."""
    note(i, j, args, 2)
    return window.keep(i, j, Nq, Nk, args)


KEEP = {"full": keep_full, "causal": keep_causal, "window": keep_window}


def trace(mask_file: str, sides: tuple[int, int, bool], block_m: int, block_n: int) -> dict[str, Any]:
    """Per kernel two boards of 0 and 1, [query tile][key tile]: computed, and computed with the mask."""
    n = seqlen(TILES, block_m, block_n)
    left, right, is_causal = sides
    problem = Problem(1, 1, 1, n, n, HEAD_DIM, HEAD_DIM, torch.float16, 0.25, is_causal, left, right)
    assert problem.mask_kind == mask_file
    q, k, v, do = (torch.randn(1, 1, n, HEAD_DIM, dtype=torch.float16) for _ in range(4))
    out, lse = torch.empty_like(q), torch.empty(1, 1, n)
    found: dict[str, Any] = {}

    def run(kernel: str, call: Any) -> None:
        boards = torch.zeros(2, n // block_m, n // block_n, dtype=torch.int32)

        def assemble(*args: Any) -> Any:
            variant, given, unit = real_assemble(*args)
            where = lambda board: (board, n // block_n, block_m, block_n)
            mask = (*(given.mask or (0, 0)), *where(boards[1]))
            return (
                variant._replace(keep=KEEP[mask_file], drop=drop),
                given._replace(mask=mask, drop=where(boards[0])),
                unit,
            )

        config = Config(block_m, block_n, 4, 1)
        with mock.patch.object(launch, "assemble", assemble), mock.patch.object(launch, "choose", lambda *_: config):
            call()
        found[kernel] = boards.tolist()

    extras = Extras()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def backward(dq: Any, dk: Any, dv: Any) -> None:
        plan = launch.Backward(problem, do, None, q, k, v, out, lse, extras, dq, dk, dv, None)
        plan(do, None, q, k, v, out, lse, extras, dq, dk, dv, None, None)

    run("fwd", lambda: launch.Forward(problem, q, k, v, extras, out, lse)(q, k, v, extras, out, lse, None))
    run("dkdv", lambda: backward(None, dk, dv))
    run("dq", lambda: backward(dq, None, None))
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    print(
        json.dumps(
            {
                f"{choice}/{block_m}x{block_n}/{TILES}": trace(mask_file, sides, block_m, block_n)
                for choice, (_, mask_file, sides) in CHOICES.items()
                for block_m, block_n in BLOCKS
            }
        )
    )
