import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from flashtri_bench import results, runner
from flashtri_bench.cases import SUITES, select
from flashtri_bench.progress import PlainProgress
from flashtri_bench.runner import Plan, Run, Stopped, Worker

PEERS = ("flashtri", "torch-flash", "torch-cudnn")


class StandIn(Worker):
    command: ClassVar = [sys.executable, str(Path(__file__).with_name("stand_in_worker.py"))]


@pytest.fixture
def run(monkeypatch):
    """Carries out a plan on stand-in workers, one peer of which misbehaves."""

    def carry_out(fault="", cases=("grid-d64-full",), **options):
        monkeypatch.setenv("FAULT", fault)
        monkeypatch.setenv("FLASHTRI_COMMIT", "0123456a")
        saved = []
        plan = Plan(select(["grid"], cases), PEERS, step_timeout_s=1.0, **options)
        made = Run(plan, PlainProgress(), saved.append, StandIn)
        made.carry_out()
        made.saved = saved
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


def test_no_case_is_started_after_the_budget(run):
    """Public report 123: measuring must end in a stated time, whatever is left."""
    done = run(budget_s=0.0)
    assert done.document["rows"] == []
    assert len(done.left_over) == 6


def test_a_hang_while_compiling_ahead_is_survived(run):
    began = time.monotonic()
    done = run("warm:torch-cudnn", cases=("grid-d64-full-n512",))
    assert {r["impl"] for r in done.document["rows"]} == set(PEERS)
    assert time.monotonic() - began < 30


def test_warming_up_is_by_kind_of_problem_not_by_length():
    """Public report 124: a key that holds the length compiles again for each of fifty lengths."""
    kinds = {runner._kind(case) for case in SUITES["grid"]}
    assert len(SUITES["grid"]) == 24
    assert len(kinds) == 4
    assert len({runner._kind(case) for case in SUITES["features"]}) == len(SUITES["features"])


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
