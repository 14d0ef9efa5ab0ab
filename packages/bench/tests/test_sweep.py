"""The sweep: what it accepts, and, on the Hopper kernels themselves (emulated), that candidates run and wrong ones do not."""

import pytest

from flashtri_bench import sweep
from flashtri_bench.cli import main


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

    candidates = [sweep.Candidate("three", {"q_stages": 3}), sweep.Candidate("typing error", {"stages": 3})]
    with gluon_cpu.emulate(0):
        cells = sweep.sweep("grid-d64-causal-n512", op, candidates, ("torch-math",), "bf16", "cpu", 1.0, smoke=True)
    assert list(cells) == ["shipped", "three", "typing error", "torch-math"]
    assert cells["shipped"].tflops, cells
    assert cells["three"].tflops, cells
    assert cells["torch-math"].tflops, cells
    assert "stages" in cells["typing error"].reason
