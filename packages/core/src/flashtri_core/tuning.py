"""Tile sizes as data. ``choose`` is deterministic and needs no GPU; ``flashtri_core.tune`` measures and writes a table.

``configs/<arch>.json`` holds, per kernel, rules tried in order; the first whose conditions hold and whose tiles fit the
device's shared memory wins. A table that ``tune`` wrote into the user's cache folder goes before the shipped one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .problem import Problem
from .target import Target

KERNELS = ("fwd", "dkdv", "dq", "dbias")  # a table may also name "dq_dbias": the dQ kernel where it gives dBias as well
L2_BYTES = 8 << 20  # K and V of the heads that run side by side; measured best among 2..32 MB on an H200 (50 MB of L2)


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes of one kernel launch."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


def block_of(head_dim: int) -> int:
    """The power of two, at least 16, that holds a head dimension inside a tile."""
    return max(16, 1 << (head_dim - 1).bit_length())


def blocks_of(problem: Problem) -> tuple[int, int]:
    """Tile widths (BLOCK_D, BLOCK_DV) for the head dimensions.

    A padded V narrower than K gets K's width: with V's own, Triton 3.6 on sm_90 returned wrong outputs (D = 40 with
    Dv = 24, D = 64 with Dv = 25), while equal widths and unpadded ones are right.
    """
    d, dv = block_of(problem.head_dim), block_of(problem.head_dim_v)
    return d, max(d, dv) if dv != problem.head_dim_v else dv


def shared_bytes(kernel: str, config: Config, problem: Problem) -> int:
    """Estimate of the shared memory a config needs, in bytes; the ahead-of-time tests hold it against the compiler."""
    width = 2 * sum(blocks_of(problem))
    scores = 4 * config.BLOCK_M * config.BLOCK_N  # a tile of float32, or two of 16 bits on their way to another layout
    stages = config.num_stages
    ahead = scores * (stages - 1) if problem.bias else 0  # bias tiles are read ahead; they may be float32
    if kernel == "fwd":
        return 2 * config.BLOCK_M * block_of(problem.head_dim) + stages * config.BLOCK_N * width + ahead
    if kernel == "dkdv":
        return config.BLOCK_N * width + stages * config.BLOCK_M * width + scores + ahead
    return config.BLOCK_M * width + stages * config.BLOCK_N * width + scores + ahead


def _matches(rule: dict[str, Any], problem: Problem) -> bool:
    when = rule.get("when", {})
    width = max(block_of(problem.head_dim), block_of(problem.head_dim_v))
    seqlen = max(problem.seqlen_q, problem.seqlen_k)
    return (
        width <= when.get("max_head_dim", 256)
        and when.get("mask", problem.mask_kind) == problem.mask_kind
        and seqlen <= when.get("max_seqlen", 1 << 40)
        and when.get("narrow_rows", problem.narrow_rows) == problem.narrow_rows
        and set(when.get("features", ())) <= set(problem.features)
        and ("any_of" not in when or not set(when["any_of"]).isdisjoint(problem.features))
    )


@cache
def _shipped(arch: str) -> dict[str, list[dict[str, Any]]]:
    path = Path(__file__).parent / "configs" / f"{arch}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def cache_path(target: Target) -> Path:
    """Where ``tune`` keeps its table for a device kind; ``FLASHTRI_CACHE`` overrides the folder."""
    root = os.environ.get("FLASHTRI_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "flashtri")
    return Path(root) / f"{target.name}.json"


@cache
def read_table(path: Path) -> dict[str, list[dict[str, Any]]]:
    """A tuned table; empty when there is none or it is not one, since the shipped table then serves."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(table, dict) and all(isinstance(x, list) and all(map(_is_rule, x)) for x in table.values())
    return table if whole else {}


_CONDITIONS = {
    "max_head_dim": int, "max_seqlen": int, "mask": str, "narrow_rows": bool, "features": list, "any_of": list,
}  # fmt: skip


def _is_rule(rule: Any) -> bool:
    """Are these conditions that ``_matches`` can test, and tiles that a kernel can have?"""
    try:
        when, config = rule["when"], Config(**rule["config"])
        powers = (config.BLOCK_M, config.BLOCK_N, config.num_warps)
        return (
            all(type(value) is _CONDITIONS[name] for name, value in when.items())
            and all(type(name) is str for key in ("features", "any_of") for name in when.get(key, ()))
            and all(type(size) is int and size > 0 for size in (*powers, config.num_stages))
            and all(size & (size - 1) == 0 for size in powers)
            and min(config.BLOCK_M, config.BLOCK_N) >= 16  # the least that a matrix product takes
        )
    except (TypeError, KeyError, AttributeError):
        return False


def forget() -> None:
    """Read tuned tables anew from now on."""
    read_table.cache_clear()


def rules(kernel: str, target: Target) -> Iterator[dict[str, Any]]:
    """All rules for a kernel in the order they are tried: tuned, this arch, the arch's family, the default."""
    if not target.interpreted:
        yield from read_table(cache_path(target)).get(kernel, [])
        yield from _shipped(target.name).get(kernel, [])
    yield from _shipped("interpreter" if target.interpreted else "default").get(kernel, [])


def mixes_mma(kernel: str, config: Config, target: Target) -> bool:
    """Would a dK/dV tile mix the two kinds of tensor-core instruction of Hopper, or of datacenter Blackwell?

    Products of 64 rows and more are asynchronous there (wgmma, tcgen05), smaller ones are mma. Triton 3.6 does not order
    the two on one shared tile: measured on an H200, 32 x 64 tiles gave dK and dV wrong by up to 16 %, differently on
    every run. A tile below 64 both ways is mma alone, but was not run there.
    """
    smaller, larger = sorted((config.BLOCK_M, config.BLOCK_N))
    return kernel == "dkdv" and 90 <= target.capability < 120 and smaller < 64 <= larger


def choose(kernel: str, problem: Problem, target: Target) -> Config:
    """The config of a launch: first matching rule that fits.

    Raises:
        NotImplementedError: no config fits the device's shared memory; names the need and the limit.
    """
    smallest = 1 << 60
    for rule in rules(kernel, target):
        if not _matches(rule, problem):
            continue
        config = Config(**rule["config"])
        if mixes_mma(kernel, config, target):
            continue
        need = shared_bytes(kernel, config, problem)
        if need <= target.shared_memory:
            return config
        smallest = min(smallest, need)
    raise NotImplementedError(
        f"head dimensions {problem.head_dim} and {problem.head_dim_v}: the {kernel} kernel needs {smallest} bytes of shared "
        f"memory with its smallest tiles, {target.name} has {target.shared_memory}"
    )


def head_group(problem: Problem) -> int:
    """How many (batch, head) pairs, or heads of a packed problem, share the machine at a time, longest tiles first.

    1 where all tiles are equal.
    """
    if problem.mask_kind != "causal" and not problem.varlen:
        return 1
    per_head = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    heads = problem.heads_q if problem.varlen else problem.batch * problem.heads_q
    return max(1, min(heads, L2_BYTES // max(per_head, 1)))
