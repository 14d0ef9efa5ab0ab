"""Candidates for the Hopper kernels' tables, timed side by side: what a line of NOTES.md is measured with.

The shipped choice, its candidates and the peers take turns in one process, so that ratios hold. A candidate is checked
like any other implementation before it is timed; a wrong or failing one has no figure. One that hangs, faults or ends the
process is left out, and the case is done again.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

from .checks import Reference
from .flops import flops
from .measure import Bench, Emit, RefusedError, Unit, poisons
from .peers import PEERS
from .runner import Run, Stopped
from .timing import HangError, Timed, interleave

HOPPER = "flashtri-hopper"
SHIPPED = "shipped"
Entry: TypeAlias = "tuple[str, str, dict[str, Any] | None]"  # name in the table, peer, changes to the shipped choice


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
    run: Run, case: str, op: str, candidates: Sequence[Candidate], peers: Sequence[str], dtype: str
) -> dict[str, Cell]:
    """Time one case in a run's measuring process.

    Args:
        run: Whose plan says on which device, and whether at cut-down sizes.
        case: Id of the case.
        op: "fwd" or "bwd".
        candidates: Beside the shipped configuration, which is always measured.
        peers: Names of other implementations.
        dtype: "bf16" or "fp16".

    Returns:
        Name -> TFLOP/s or a reason, the shipped configuration first.
    """
    todo: list[Entry] = [(c.name, HOPPER, c.changes) for c in (Candidate(SHIPPED, {}), *candidates)]
    todo += [(peer, peer, None) for peer in peers]
    unit = Unit(case, (HOPPER, *peers), (op,), dtype, run.plan.device, run.plan.smoke, window_ms=120.0)
    cells: dict[str, Cell] = {}
    left = todo
    while left:
        try:
            *_, last = run.ask({"do": "sweep", "unit": dataclasses.asdict(unit), "todo": left})
            cells |= {name: Cell(**cell) for name, cell in last["cells"].items()}
            break
        except Stopped as stopped:
            names = [name for name, *_ in left]
            blamed = [stopped.peer] if stopped.peer in names else names
            cells |= {name: Cell(None, stopped.reason) for name in blamed}
            left = [entry for entry in left if entry[0] not in blamed]
    return {name: cells[name] for name, *_ in todo}


def answer(command: dict[str, Any], emit: Emit) -> None:
    """The measuring process's part of `sweep`.

    Args:
        command: The unit and what is left to try.
        emit: Receives each step, named after the candidate or peer, and the cells.

    Raises:
        Exception: A candidate left the device unusable.
    """
    unit = Unit.parse(command["unit"])
    (op,) = unit.ops
    bench = Bench(unit, emit)
    inputs = bench.inputs()
    reference = Reference(inputs)
    cells: dict[str, Cell] = {}
    timed: dict[str, Timed] = {}
    for name, peer, changes in command["todo"]:
        bench.step(name, "first call")
        try:
            reason = PEERS[peer].refuses(inputs.case)
            if unit.device == "cuda":
                reason = reason or PEERS[peer].unavailable(unit.device)
            if reason is not None:
                raise RefusedError(reason)
            call = PEERS[peer].prepare(inputs)
            if changes is not None:
                candidate = Candidate(name, changes)
                call.around = lambda candidate=candidate: candidate.active(op)  # type: ignore[misc]
            with call.around():  # the backward of the check too
                bench.checked(call, reference)
            timed[name] = dataclasses.replace(bench.timed(call, op), around=call.around)
        except HangError as hang:
            hang.peer = name
            raise
        except Exception as error:  # a candidate may not compile, fit or be right; the others still count
            if poisons(error):
                raise
            cells[name] = Cell(None, f"{type(error).__name__}: {error}".splitlines()[0][:120])
    bench.step(None, "timing")
    times = interleave(timed, bench.clock, window_ms=unit.window_ms * len(timed), least=10) if timed else {}
    work = flops(inputs.case, op)
    cells |= {name: Cell(work / spread.p50 * 1e-9) for name, spread in times.items()}
    emit({"event": "cells", "cells": {name: dataclasses.asdict(cell) for name, cell in cells.items()}})


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
