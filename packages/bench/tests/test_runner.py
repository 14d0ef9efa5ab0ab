import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from flashtri_bench import results
from flashtri_bench.cases import BY_ID, select
from flashtri_bench.progress import PlainProgress
from flashtri_bench.runner import Plan, Run, Stopped, Worker

PEERS = ("flashtri", "torch-flash", "torch-cudnn")


class StandIn(Worker):
    command: ClassVar = [sys.executable, str(Path(__file__).with_name("stand_in_worker.py"))]
    sent: ClassVar[list] = []

    def send(self, command):
        self.sent.append(command)
        super().send(command)


def orders():
    """What the workers were told to compile and to measure: (what, suite, case, peers)."""
    units = [(c["do"], c["unit"]) for c in StandIn.sent if "unit" in c]
    return [(do, BY_ID[unit["case"]].suite, unit["case"], unit["peers"]) for do, unit in units]


@pytest.fixture
def run(monkeypatch):
    """Carries out a plan on stand-in workers, one peer of which misbehaves."""

    def carry_out(fault="", cases=("grid-d64-full",), suites=("grid",), spent_s=0.0, **options):
        StandIn.sent.clear()
        monkeypatch.setenv("FAULT", fault)
        monkeypatch.setenv("FLASHTRI_COMMIT", "0123456a")
        saved, alive = [], []

        def save(document):
            saved.append(document)
            alive.extend(worker for worker in made._compilers if worker.process.poll() is None)

        plan = Plan(select(suites, cases), PEERS, step_timeout_s=1.0, **options)
        made = Run(plan, PlainProgress(), save, StandIn, _began=time.monotonic() - spent_s)
        made.carry_out()
        made.saved, made.alive = saved, alive
        return made

    return carry_out


def test_every_case_pass_and_peer_gives_a_row_that_may_be_committed(run):
    done = run()
    assert len(done.document["rows"]) == 6 * 2 * 3
    assert done.document["skipped"] == []
    assert list(results.problems(done.document)) == []
    assert len(done.saved) == 6  # one for each case: a run that is cut short keeps what it has
    assert done.record["commit"] == "0123456a"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("hang:torch-flash", "hung: nothing for 1 s in first call"),
        ("die:torch-flash", "the process died (exit code 9) in first call"),
        ("fault:torch-flash", "CUDA error: misaligned address"),
    ],
)
def test_a_peer_that_stops_the_worker_costs_only_its_own_rows(run, fault, reason):
    done = run(fault, cases=("grid-d64-full-n512", "grid-d64-full-n1024"))
    assert {r["impl"] for r in done.document["rows"]} == {"flashtri", "torch-cudnn"}
    assert len(done.document["rows"]) == 2 * 2 * 2
    assert [(s["impl"], s["reason"]) for s in done.document["skipped"]] == [("torch-flash", reason)] * 4


def test_a_machine_that_cannot_start_is_said(run):
    with pytest.raises(Stopped) as raised:
        run("start")
    assert "the process died" in raised.value.reason


def test_no_case_is_started_after_the_budget(run, capfd):
    """Public report 123: measuring must end in a stated time, whatever is left."""
    done = run(budget_s=0.0)
    assert done.document["rows"] == []
    assert len(done.left_over) == 6
    assert [s["reason"] for s in done.document["skipped"]] == ["not started within the time budget"] * (6 * 2 * 3)
    assert done.saved == [done.document]
    assert list(results.problems(done.document)) == []
    assert not orders()
    assert f"not started within the time budget: {', '.join(done.left_over)}" in capfd.readouterr().err


def test_a_hang_while_compiling_ahead_is_survived(run):
    began = time.monotonic()
    done = run("warm:flashtri", cases=("grid-d64-full-n512",))
    assert {r["impl"] for r in done.document["rows"]} == set(PEERS)
    assert time.monotonic() - began < 30


TWO_SUITES = {"suites": ("grid", "gqa"), "cases": ("grid-d64-full-n512", "grid-d64-full-n1024", "h64-8-n2048")}


def test_without_a_budget_everything_is_compiled_before_its_suite_is_measured(run, capfd):
    run(**TWO_SUITES)
    stages = [(do, suite) for do, suite, *_ in orders()]
    assert stages == [("warm", "grid")] * 2 + [("measure", "grid")] * 2 + [("warm", "gqa"), ("measure", "gqa")]
    compiled = [(case, peers) for do, _, case, peers in orders() if do == "warm"]
    assert sorted(compiled) == sorted((case, ("flashtri",)) for do, _, case, _ in orders() if do == "measure")
    assert "not compiled ahead" not in capfd.readouterr().err


def test_compiling_that_never_ends_leaves_most_of_the_budget_to_measuring(run, capfd):
    """A run of eight suites once spent its whole budget on compiling and measured nothing."""
    done = run("endless:flashtri", budget_s=5.0, **TWO_SUITES)
    assert 1.0 < done._compiling_s < 2.6  # 2 s, and what it takes to end the processes
    assert done.alive == []  # nobody compiles while others are timed
    assert len(done.document["rows"]) == 3 * 2 * 3
    assert done.left_over == []
    said = capfd.readouterr().err
    assert "grid: 2 of 2 not compiled ahead, the measurement compiles them" in said
    assert "gqa: 1 of 1 not compiled ahead" in said


def test_compiling_takes_a_share_of_what_is_left(run):
    """Late in a run the whole budget's share may be untouched and yet be all that is left."""
    done = run("endless:flashtri", cases=("grid-d64-full-n512",), budget_s=100.0, spent_s=96.0)
    assert len(done.document["rows"]) == 2 * 3


def test_no_worker_outlives_its_run(run, monkeypatch):
    made = []

    class Remembered(StandIn):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(sys.modules[__name__], "StandIn", Remembered)
    run("hang:flashtri", cases=("grid-d64-full-n512",))
    assert len(made) >= 2
    assert all(worker.process.poll() is not None for worker in made)


def test_smoke_plans_are_small_and_ops_can_be_chosen():
    plan = Plan(select(["models"]), (), ("fwd",), "fp32", "cpu", smoke=True)
    units = plan.units()
    assert all(unit.ops == ("fwd",) for unit in units)
    assert all(unit.most <= 5 for unit in units)
    assert all(unit.problem.seqlen_q <= 96 for unit in units)
    assert [u.case for u in Plan(select(["training"]), (), ("fwd",)).units()] == []
