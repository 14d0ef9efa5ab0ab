"""pytest-benchmark on the same cases, checks and clocks as `flashtri-bench run`.

A test measures one case with all its peers in this process, interleaved; the figures go into `extra_info` of
pytest-benchmark's report and, with `--flashtri-out`, into a results file. pytest-benchmark's own statistics are
wall-clock times of our call, synchronised: they are there to compare runs by its tools, not to be published.
Peers that hang hang the session; `flashtri-bench run` isolates them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from . import ceilings, measure, provenance, results
from .cases import Case
from .inputs import DTYPES, draw
from .measure import Unit
from .peers import PEERS, chosen
from .runner import rows_and_skips
from .timing import clock_for


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the benchmarks."""
    group = parser.getgroup("flashtri")
    group.addoption("--flashtri-out", type=Path, help="merge the rows into this results file")
    group.addoption("--flashtri-peers", default="", help="only these implementations, separated by commas")


class Session:
    """One pytest session's run.

    Args:
        out: Results file, None to write nothing.
        peers: Chosen peers; empty for each suite's default.
    """

    def __init__(self, out: Path | None, peers: tuple[str, ...]) -> None:
        self.out, self.peers = out, peers
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.smoke = self.device == "cpu"
        self.dtype = "fp32" if self.smoke else "bf16"
        if self.smoke:
            torch.set_num_threads(1)  # problems of these sizes are slower on several threads
        self.record = provenance.run_record(self.device, self.smoke, provenance.environment(self.device))
        self.record["ceilings"] = ceilings.measure(self.device, (self.dtype,), clock_for(self.device))
        self.document = results.empty()

    def measure(self, case: Case) -> tuple[list[results.Row], list[results.Row]]:
        """Rows and skips of a case."""
        peers = tuple(chosen(self.peers, case.suite, self.device))
        unit = Unit(case.id, peers, case.ops, self.dtype, self.device, self.smoke)
        if self.smoke:
            unit = dataclasses.replace(unit, window_ms=1.0, least=3, most=5)
        events: list[dict[str, Any]] = []
        measure.measure(unit, events.append)
        rows, skips = rows_and_skips(unit, self.record, events)
        self.document = results.add(self.document, rows, skips, self.record)
        return rows, skips

    def ours(self, case: Case) -> Callable[[], object]:
        """Our forward call of a case, synchronised, for pytest-benchmark's own clock."""
        clock = clock_for(self.device)
        inputs = draw(case.smoke() if self.smoke else case, DTYPES[self.dtype], self.device)
        call = PEERS["flashtri"].prepare(inputs)

        def forward() -> None:
            with torch.no_grad():
                call.forward()
            clock.wait("flashtri")

        return forward

    def close(self) -> None:
        """Write the file; a smoke run never touches the committed one."""
        if self.out is None or not self.document["rows"]:
            return
        if self.smoke and self.out.resolve() == committed():
            raise pytest.UsageError(f"--flashtri-out: a smoke run leaves {self.out} alone")
        before = results.load(self.out) if self.out.exists() else results.empty()
        results.save(results.merge(before, self.document), self.out)


def committed() -> Path:
    """The committed results file."""
    from .runner import committed_path

    return committed_path().resolve()


@pytest.fixture(scope="session")
def bench_session(request: pytest.FixtureRequest) -> Any:
    """The run that all benchmarks of this session belong to."""
    names = tuple(n for n in request.config.getoption("--flashtri-peers").split(",") if n)
    session = Session(request.config.getoption("--flashtri-out"), names)
    yield session
    session.close()


@pytest.fixture
def measured(bench_session: Session, benchmark: Any) -> Callable[[Case], list[results.Row]]:
    """A function that measures a case, fails if our result is wrong, and reports to pytest-benchmark."""

    def run(case: Case) -> list[results.Row]:
        rows, skips = bench_session.measure(case)
        wrong = [s for s in skips if PEERS[s["impl"]].ours and s["reason"].startswith("wrong")]
        assert not wrong, f"{wrong[0]['impl']}: {wrong[0]['reason']}"
        benchmark.extra_info["rows"] = rows
        benchmark.extra_info["skipped"] = skips
        if case.kind == "time":
            benchmark(bench_session.ours(case))
        else:
            benchmark.pedantic(lambda: None, rounds=1)
        return rows

    return run
