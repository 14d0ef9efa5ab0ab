"""Candidates for the Hopper kernels' tables, timed side by side: what a line of NOTES.md is measured with.

The shipped choice, its candidates and the peers take turns in one process, so that ratios hold. A candidate is checked
like any other implementation before it is timed; a wrong or failing one has no figure.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from .checks import Reference
from .flops import flops
from .measure import Bench, RefusedError, Unit
from .peers import PEERS
from .timing import Timed, interleave

HOPPER = "flashtri-hopper"
SHIPPED = "shipped"


@dataclass
class Candidate:
    """A configuration as changes to the shipped one.

    Attributes:
        name: For the table.
        changes: Field of :class:`ForwardConfig` or :class:`BackwardConfig` -> value.
        plans: The operators' plans under this configuration.
    """

    name: str
    changes: dict[str, Any]
    plans: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """``name:field=value,field=value``; values are Python literals or words.

        Raises:
            ValueError: no name, or a change without "=".
        """
        name, colon, rest = text.partition(":")
        pairs = [part.partition("=") for part in rest.split(",") if part]
        if not name or not colon or not pairs or any(not equals for _, equals, _ in pairs):
            raise ValueError(f"candidate: got {text!r}, expected name:field=value,field=value")
        return cls(name, {key.strip(): _literal(value.strip()) for key, _, value in pairs})

    @contextmanager
    def active(self, op: str) -> Iterator[None]:
        """Inside, calls run with this configuration."""
        from flashtri_core import ops
        from flashtri_core.kernels.hopper import launch_backward, launch_forward

        module = launch_forward if op == "fwd" else launch_backward
        shipped: Callable[..., Any] = module.tiles

        def chosen(*args: Any, **kwargs: Any) -> Any:
            return dataclasses.replace(shipped(*args, **kwargs), **self.changes)

        with mock.patch.object(module, "tiles", chosen), mock.patch.object(ops, "_plans", self.plans):
            yield


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@dataclass(frozen=True)
class Cell:
    """One candidate or peer on one case: TFLOP/s, or why there are none."""

    tflops: float | None
    reason: str = ""


def sweep(
    case: str, op: str, candidates: Sequence[Candidate], peers: Sequence[str], dtype: str, device: str = "cuda",
    window_ms: float = 120.0, smoke: bool = False,
) -> dict[str, Cell]:  # fmt: skip
    """Time one case.

    Args:
        case: Id of the case.
        op: "fwd" or "bwd".
        candidates: Beside the shipped configuration, which is always measured.
        peers: Names of other implementations.
        dtype: "bf16" or "fp16".
        device: Where.
        window_ms: Device time for each.
        smoke: Cut the size down.

    Returns:
        Name -> TFLOP/s or a reason, the shipped configuration first.
    """
    bench = Bench(Unit(case, (HOPPER, *peers), (op,), dtype, device, smoke), lambda event: None)
    inputs = bench.inputs()
    reference = Reference(inputs)
    cells: dict[str, Cell] = {}
    timed: dict[str, Timed] = {}
    tried = [Candidate(SHIPPED, {}), *candidates]
    todo = [(c.name, HOPPER, c) for c in tried] + [(peer, peer, None) for peer in peers]
    for name, peer, candidate in todo:
        try:
            reason = PEERS[peer].refuses(inputs.case) or (PEERS[peer].unavailable(device) if device == "cuda" else None)
            if reason is not None:
                raise RefusedError(reason)
            call = PEERS[peer].prepare(inputs)
            if candidate is not None:
                call.around = lambda candidate=candidate: candidate.active(op)  # type: ignore[misc]
            with call.around():  # the backward of the check too
                bench.checked(call, reference)
            timed[name] = dataclasses.replace(bench.timed(call, op), around=call.around)
        except Exception as error:  # a candidate may not compile, fit or be right; the others still count
            cells[name] = Cell(None, f"{type(error).__name__}: {error}".splitlines()[0][:120])
    times = interleave(timed, bench.clock, window_ms=window_ms * len(timed), least=10) if timed else {}
    work = flops(inputs.case, op)
    cells |= {name: Cell(work / spread.p50 * 1e-9) for name, spread in times.items()}
    return {name: cells[name] for name, *_ in todo}


def table(rows: dict[str, dict[str, Cell]]) -> str:
    """Markdown: a line per case, a column per candidate with its ratio to the shipped one."""
    names = list(dict.fromkeys(name for cells in rows.values() for name in cells))
    lines = ["| case | " + " | ".join(names) + " |", "|:--|" + "--:|" * len(names)]
    for case, cells in rows.items():
        base = cells[SHIPPED].tflops
        shown = []
        for name in names:
            rate = cells[name].tflops
            ratio = f" ({rate / base:.2f})" if rate and base and name != SHIPPED else ""
            shown.append(f"{rate:.0f}{ratio}" if rate else "-")
        lines.append(f"| {case} | " + " | ".join(shown) + " |")
    reasons = [
        f"{case} {name}: {cell.reason}" for case, cells in rows.items() for name, cell in cells.items() if cell.reason
    ]
    return "\n".join([*lines, *reasons])
