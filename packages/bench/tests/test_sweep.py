"""The sweep: what it accepts, and, on the Hopper kernels themselves (emulated), that candidates run and wrong ones do not."""

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from flashtri_bench import sweep, worker
from flashtri_bench.cli import main
from flashtri_bench.measure import Bench, Unit
from flashtri_bench.progress import PlainProgress
from flashtri_bench.runner import Plan, Run, Worker


def test_candidates_are_parsed_or_refused():
    found = sweep.Candidate.parse("wide:block_m=192,order=static,turns=False")
    assert (found.name, found.changes) == ("wide", {"block_m": 192, "order": "static", "turns": False})
    for bad in ("x", "x:", ":a=1", "x:a"):
        with pytest.raises(ValueError, match="name:field=value"):
            sweep.Candidate.parse(bad)


def test_without_a_gpu_it_says_so(capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["sweep", "x:q_stages=3"]) == 2
    assert "no GPU here" in capsys.readouterr().err


def test_table_shows_ratios_and_reasons():
    cells = {"shipped": sweep.Cell(100.0), "x": sweep.Cell(110.0), "y": sweep.Cell(None, "does not fit")}
    assert "| grid | 100 | 110 (1.10) | - |" in sweep.table({"grid": cells})
    assert "grid y: does not fit" in sweep.table({"grid": cells})


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_candidates_run_and_wrong_ones_give_no_figure(op, monkeypatch):
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from flashtri_core._jit import INTERPRETED

    if INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 is set: jit functions are the interpreter's")
    from flashtri_core.testing import gluon_cpu

    said = io.StringIO()
    with gluon_cpu.emulate(0):
        worker.serve(io.StringIO(json.dumps(command(op, {"q_stages": 3}, {"stages": 3}))), said)
    *_, answer, done = (json.loads(line) for line in said.getvalue().splitlines())
    assert done == {"event": "done"}
    cells = {name: sweep.Cell(**cell) for name, cell in answer["cells"].items()}
    assert list(cells) == ["1", "shipped", "0", "torch-math"]
    assert cells["shipped"].tflops, cells
    assert cells["0"].tflops, cells
    assert cells["torch-math"].tflops, cells
    assert "stages" in cells["1"].reason


def command(op, *changes):
    """What the worker is sent: the shipped choice, candidates named by number, a peer."""
    unit = Unit("grid-d64-causal-n512", (sweep.HOPPER, "torch-math"), (op,), "bf16", "cpu", smoke=True, window_ms=1.0)
    ours = [(str(i), sweep.HOPPER, c) for i, c in enumerate(changes)]
    todo = [("shipped", sweep.HOPPER, {}), *ours, ("torch-math", "torch-math", None)]
    return {"do": "sweep", "unit": dataclasses.asdict(unit), "todo": todo}


def test_a_candidate_that_loses_the_device_is_blamed(monkeypatch):
    """Nothing may be tried after it in the same process, and the last step must name it, not its implementation."""
    outcomes = iter([None, RuntimeError("CUDA error: an illegal instruction was encountered")])

    def checked(self, call, reference):
        if (error := next(outcomes)) is not None:
            raise error

    monkeypatch.setattr(Bench, "checked", checked)
    monkeypatch.setattr(Bench, "timed", lambda self, call, op: sweep.Timed(lambda: None))
    events, todo = [], [(name, "torch-math", None) for name in ("good", "bad", "better")]
    with pytest.raises(RuntimeError, match="illegal instruction"):
        sweep.answer(command("fwd") | {"todo": todo}, events.append)
    assert events[-1]["peer"] == "bad"


class StandIn(Worker):
    command: ClassVar = [sys.executable, str(Path(__file__).with_name("stand_in_worker.py"))]


@pytest.mark.parametrize("fault", ["hang", "die", "fault"])
def test_a_candidate_that_stops_the_process_costs_only_its_own_cell(fault, monkeypatch):
    monkeypatch.setenv("FAULT", f"{fault}:bad")
    candidates = [sweep.Candidate(name, {"q_stages": 3}) for name in ("good", "bad", "better")]
    run = Run(Plan([], step_timeout_s=1.0), PlainProgress(), spawn=StandIn)
    try:
        cells = sweep.sweep(run, "grid-d64-full-n512", "fwd", candidates, ("torch-cudnn",), "bf16")
    finally:
        run.close()
    assert list(cells) == ["shipped", "good", "bad", "better", "torch-cudnn"]
    assert [name for name, cell in cells.items() if cell.tflops is None] == ["bad"]
    assert cells["bad"].reason
