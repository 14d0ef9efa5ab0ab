"""Measure tile sizes on this GPU: ``python -m flashtri_core.tune`` (or ``nox -s tune``).

Every candidate is checked against the chunked float32 reference before it is timed; the winners go into a table in the
user's cache folder (``FLASHTRI_CACHE`` moves it), which :func:`flashtri_core.tuning.choose` reads before the shipped one.
Nothing is tuned unless this is run: the shipped tables need no trials.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from . import reference, tuning
from .problem import Extras, Problem
from .target import Target, target_of
from .tuning import Config

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def candidates(kernel: str, problem: Problem, target: Target) -> list[Config]:
    """Every config worth timing: powers of two that fit, never an empty list when ``choose`` succeeds."""
    found = [
        Config(m, n, warps, stages)
        for m in (64, 128)
        for n in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
        if not (warps == 8 and m * n < 64 * 64) and not tuning.mixes_mma(kernel, Config(m, n, warps, stages), target)
    ]
    fitting = [c for c in found if tuning.shared_bytes(kernel, c, problem) <= target.shared_memory]
    shipped = tuning.choose(kernel, problem, target)
    return [shipped, *(c for c in fitting if c != shipped)]


def tune(
    kernel: str, problem: Problem, target: Target, measure: Callable[[Config], float | None]
) -> tuple[Config, dict[Config, float]]:
    """Time every candidate with ``measure`` (milliseconds, or None if it fails or is wrong) and record the best.

    Several processes may tune at once: the table is read and replaced under a lock, and readers see the old file or the
    new one.

    Raises:
        OSError: the table's folder cannot be written; said before anything is measured.
        RuntimeError: no candidate runs correctly.
    """
    path = tuning.cache_path(target)
    make_writable(path.parent)
    times = {c: t for c in candidates(kernel, problem, target) if (t := measure(c)) is not None}
    if not times:
        raise RuntimeError(f"no {kernel} config ran correctly for {problem}")
    best = min(times, key=lambda c: times[c])
    rule = {
        "when": {
            "max_head_dim": max(tuning.block_of(problem.head_dim), tuning.block_of(problem.head_dim_v)),
            "mask": problem.mask_kind,
            "max_seqlen": max(problem.seqlen_q, problem.seqlen_k),
            "features": [f for f in problem.features if f not in ("causal", "window", "gqa")],
        },
        "config": asdict(best),
    }
    with locked(path.with_suffix(".lock")):
        tuning.forget()  # another process may have written since
        table = dict(tuning.read_table(path))
        kept = [r for r in table.get(kernel, []) if r["when"] != rule["when"]]
        table[kernel] = sorted([*kept, rule], key=_narrowness)
        _replace(path, table)
        tuning.forget()
    return best, times


def _narrowness(rule: dict[str, Any]) -> tuple[int, int, int]:
    """Sorts rules that ask for more before those that ask for less."""
    when = rule["when"]
    return -len(when.get("features", ())), when.get("max_head_dim", 256), when.get("max_seqlen", 1 << 40)


def make_writable(folder: Path) -> None:
    """Make the folder of tuned tables, if need be.

    Raises:
        OSError: that, or making a file in it, fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        words = f"tune cannot write its table, set FLASHTRI_CACHE to another folder ({error.strerror})"
        raise OSError(error.errno, words, str(folder)) from error


def _replace(path: Path, table: dict[str, Any]) -> None:
    """Write a file of its own and move it into place whole. A writer that is killed leaves it for the next to overwrite."""
    whole = path.with_suffix(".tmp")
    try:
        with whole.open("w") as handle:
            json.dump(table, handle, indent=1, sort_keys=True)
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, stale: float = 60.0) -> Iterator[None]:
    """Hold the lock file ``path``, waiting for whoever holds it; the work inside takes milliseconds.

    The system frees its own locks when a process dies. Where it has none, the file's existence is the lock, and one that
    is ``stale`` seconds old was left behind.
    """
    if fcntl is not None:
        with path.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        return
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            _remove_stale(path, stale)
            time.sleep(0.01)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _remove_stale(path: Path, stale: float) -> None:
    aside = path.with_suffix(f".{os.getpid()}")
    try:
        born = path.stat().st_mtime_ns
        if time.time() - born / 1e9 > stale:
            path.rename(aside)  # one process wins
            if aside.stat().st_mtime_ns != born:  # somebody else removed the old one and made this
                aside.rename(path)
            aside.unlink(missing_ok=True)
    except FileNotFoundError:
        pass


def measure_on(device: torch.device, kernel: str, problem: Problem) -> Callable[[Config], float | None]:
    """A function that runs one config of ``kernel`` and returns milliseconds, or None if it fails or is wrong."""
    from .kernels import launch

    def tensor(heads: int, rows: int, width: int) -> Tensor:
        return torch.randn(problem.batch, heads, rows, width, device=device, dtype=problem.dtype)

    q, do = (tensor(problem.heads_q, problem.seqlen_q, w) for w in (problem.head_dim, problem.head_dim_v))
    k, v = (tensor(problem.heads_k, problem.seqlen_k, w) for w in (problem.head_dim, problem.head_dim_v))
    extras, out = Extras(), torch.empty_like(do)
    lse = torch.empty(q.shape[:3], device=device)
    reference.chunked_forward(problem, q, k, v, extras, out, lse, None)
    outputs = {"fwd": (out,), "dq": (q,), "dkdv": (k, v)}[kernel]
    want = tuple(x.clone() for x in outputs)
    grads: dict[str, tuple[Tensor | None, Tensor | None, Tensor | None]]
    grads = {"dq": (want[0], None, None), "dkdv": (None, want[0], want[-1])}
    if kernel != "fwd":
        reference.chunked_backward(problem, do, None, q, k, v, out, lse, extras, *grads[kernel], None, None)
    got = tuple(torch.empty_like(x) for x in want)

    def run_with(config: Config) -> Callable[[], None]:
        with mock.patch.object(launch, "choose", lambda *_: config):
            if kernel == "fwd":
                forward = launch.Forward(problem, q, k, v, extras, got[0], lse)
                return lambda: forward(q, k, v, extras, got[0], lse, None)
            dq, dk, dv = (got[0], None, None) if kernel == "dq" else (None, got[0], got[1])
            backward = launch.Backward(problem, do, None, q, k, v, out, lse, extras, dq, dk, dv, None)
            return lambda: backward(do, None, q, k, v, out, lse, extras, dq, dk, dv, None, None)

    def measure(config: Config) -> float | None:
        run = run_with(config)
        for x in got:
            x.fill_(float("nan"))
        try:
            run()
            torch.cuda.synchronize(device)
        except Exception as error:  # a config that does not compile or launch is no candidate; which ones is printed
            print(f"  {config}: {type(error).__name__}")
            return None
        if not all(torch.allclose(g.float(), w.float(), atol=2e-2, rtol=2e-2) for g, w in zip(got, want, strict=True)):
            print(f"  {config}: wrong result")
            return None
        times = []
        for _ in range(20):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(stop))
        return float(statistics.median(times))

    return measure


def main(argv: list[str] | None = None) -> None:
    """Command line: tune the given shapes on the current GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--kernels", nargs="+", choices=("fwd", "dkdv", "dq"), default=["fwd", "dkdv", "dq"])
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(1, "tuning measures on a CUDA GPU, and torch sees none; the shipped tables are used as they are\n")
    device = torch.device("cuda", torch.cuda.current_device())
    target = target_of(device)
    for head_dim in args.head_dim:
        for seqlen in sorted(args.seqlen, reverse=True):
            for causal in (False, True):
                heads = max(1, 2048 // head_dim)
                batch = max(1, 16384 // seqlen)
                problem = Problem(
                    batch, heads, heads, seqlen, seqlen, head_dim, head_dim, getattr(torch, args.dtype),
                    head_dim**-0.5, causal, total_q=seqlen, total_k=seqlen,
                )  # fmt: skip
                for kernel in args.kernels:
                    best, times = tune(kernel, problem, target, measure_on(device, kernel, problem))
                    print(f"D={head_dim} N={seqlen} causal={causal} {kernel}: {best} {times[best]:.3f} ms")
    print(f"written to {tuning.cache_path(target)}")


if __name__ == "__main__":
    main()
