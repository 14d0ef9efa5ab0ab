"""Runs the plan: watches the worker processes, keeps what they report, blames the peer that stops one.

A peer that hangs, faults or dies costs its own rows of one case: the worker is replaced and the case is measured
again without that peer. Results are written after every case, so a run that is cut short keeps what it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from . import results
from .cases import BY_ID, Case
from .measure import Unit
from .peers import PEERS, chosen

Event = dict[str, Any]
Inbox: TypeAlias = "queue.Queue[tuple[Worker, Event | None]]"

# Without an event for this long a worker is stuck. The longest step that is not stuck compiles for minutes.
STEP_TIMEOUT_S = 240.0
WARM_TIMEOUT_S = 180.0
# Of a time budget, what may go into compiling ahead: of all of it, and for one suite of what is left.
COMPILE_SHARE = 0.4


class Progress(Protocol):
    """Where a run says what it does."""

    def stage(self, name: str, total: int) -> None:
        """A part of the run begins."""

    def doing(self, text: str) -> None:
        """What happens now."""

    def advance(self) -> None:
        """One item of the part is done."""

    def note(self, text: str) -> None:
        """A line worth keeping on the screen."""


class Worker:
    """A worker process whose events go to a queue as `(worker, event)`; None as event means that it has ended.

    Args:
        inbox: The queue.
        threads: Processor threads per worker, None for torch's choice.
        compile_threads: Compiler processes that the worker may start.
    """

    command: ClassVar[list[str]] = [sys.executable, "-m", "flashtri_bench.worker"]

    def __init__(
        self, inbox: queue.Queue[tuple[Worker, Event | None]], threads: int | None, compile_threads: int
    ) -> None:
        env = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads), "PYTHONUNBUFFERED": "1"}
        if threads is not None:
            env["FLASHTRI_BENCH_THREADS"] = str(threads)
        self.inbox = inbox
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("FLASHTRI_BENCH_VERBOSE") else subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self.peer: str | None = None
        self.what = "starting"
        self.heard = time.monotonic()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.inbox.put((self, json.loads(line)))
        self.inbox.put((self, None))

    def send(self, command: dict[str, Any]) -> None:
        """Give it a command; its answer ends with a "done" event."""
        assert self.process.stdin is not None
        self.peer, self.what, self.heard = None, "starting", time.monotonic()
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.what = "dying"  # the reader's end-of-file event follows

    def hear(self, event: Event) -> None:
        """Remember what it is doing."""
        self.heard = time.monotonic()
        if event["event"] == "step":
            self.peer, self.what = event["peer"], event["what"]

    def stop(self) -> None:
        """End the process, whether or not it has ended."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@dataclass
class Stopped(Exception):  # noqa: N818 - it is an outcome, raised where the loop can't go on
    """A worker will say nothing more.

    Attributes:
        peer: Whom to blame, None if the worker was not busy with a peer.
        reason: For the report.
    """

    peer: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.peer}: {self.reason}" if self.peer else self.reason


@dataclass
class Plan:
    """What one run measures.

    Attributes:
        cases: In order.
        peers: Chosen peers; empty for each suite's default.
        ops: Chosen passes; empty for each case's own.
        dtype: Element type.
        device: "cuda" or "cpu".
        smoke: Cut sizes down.
        budget_s: Stop starting cases after this many seconds, at most COMPILE_SHARE of which go into compiling ahead;
            None for no limit.
        window_ms: Device time per peer, pass and case.
        step_timeout_s: Silence after which a worker counts as stuck.
    """

    cases: list[Case]
    peers: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    dtype: str = "bf16"
    device: str = "cuda"
    smoke: bool = False
    budget_s: float | None = None
    window_ms: float = 60.0
    step_timeout_s: float = STEP_TIMEOUT_S

    def units(self) -> list[Unit]:
        """One unit for each case that has a pass left."""
        made = []
        for case in self.cases:
            ops = tuple(op for op in case.ops if not self.ops or op in self.ops)
            if ops:
                peers = tuple(chosen(self.peers, case.suite, self.device))
                unit = Unit(case.id, peers, ops, self.dtype, self.device, self.smoke, window_ms=self.window_ms)
                if self.smoke:
                    unit = dataclasses.replace(unit, window_ms=1.0, least=3, most=5)
                made.append(unit)
        return made


@dataclass
class Run:
    """A plan being carried out.

    Attributes:
        plan: The plan.
        progress: Where to say what happens.
        save: Receives the document after every case.
        spawn: Makes workers; tests give another one.
    """

    plan: Plan
    progress: Progress
    save: Callable[[results.Document], None] = lambda document: None
    spawn: Callable[[Inbox, int | None, int], Worker] = Worker
    document: results.Document = field(default_factory=results.empty)
    record: dict[str, Any] = field(default_factory=dict)
    left_over: list[str] = field(default_factory=list)
    _worker: Worker | None = None
    _compilers: list[Worker] = field(default_factory=list)
    _compiling_s: float = 0.0
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.inbox: Inbox = queue.Queue()

    # -- talking to the worker -----------------------------------------------------------------------------------

    def _listen(
        self, workers: Sequence[Worker], timeout_s: float, until: float = math.inf
    ) -> Iterator[tuple[Worker, Event]]:
        """Events of some workers until the caller stops asking, or the monotonic clock says `until`.

        Raises:
            Stopped: A worker died, or was silent for too long (it is killed then).
        """
        while time.monotonic() < until:
            try:
                worker, event = self.inbox.get(timeout=0.2)
            except queue.Empty:
                for worker in workers:
                    if time.monotonic() - worker.heard > timeout_s:
                        worker.stop()
                        raise Stopped(worker.peer, f"hung: nothing for {timeout_s:g} s in {worker.what}") from None
                continue
            if worker not in workers:
                continue  # the last words of one that was stopped
            if event is None:
                code = worker.process.wait()
                worker.stop()
                raise Stopped(worker.peer, f"the process died (exit code {code}) in {worker.what}")
            if event["event"] == "fault":
                reason, peer = event["reason"], event["peer"] or worker.peer
                worker.stop()
                raise Stopped(peer, reason)
            worker.hear(event)
            yield worker, event

    def ask(self, command: dict[str, Any]) -> list[Event]:
        """Send a command to the measuring worker and collect its answer.

        Raises:
            Stopped: There will be none.
        """
        if self._worker is None:
            # Tiny problems are slower on several threads than on one.
            self._worker = self.spawn(self.inbox, 1 if self.plan.smoke else None, min(8, os.cpu_count() or 1))
        worker, answer = self._worker, list[Event]()
        worker.send(command)
        try:
            for _, event in self._listen([worker], self.plan.step_timeout_s):
                if event["event"] == "done":
                    return answer
                self._show(event)
                answer.append(event)
        except Stopped:
            self._worker = None
            raise
        raise AssertionError("the listener ends by an exception only")

    def _show(self, event: Event) -> None:
        if event["event"] == "step":
            self.progress.doing(" ".join(filter(None, (event["case"], event["peer"], event["what"]))))

    def close(self) -> None:
        """End every process."""
        for worker in (*self._compilers, self._worker):
            if worker is not None:
                worker.stop()
        self._worker, self._compilers = None, []

    def _left_s(self) -> float:
        """Seconds of the budget that are left."""
        budget = self.plan.budget_s
        return math.inf if budget is None else budget - (time.monotonic() - self._began)

    # -- the parts of a run --------------------------------------------------------------------------------------

    def carry_out(self) -> results.Document:
        """Measure everything.

        Returns:
            The document with this run's rows; also given to `save` after every case.

        Raises:
            Stopped: Not even the machine's description could be had.
        """
        from .provenance import run_record

        plan, units = self.plan, self.plan.units()
        try:
            (described,) = self.ask({"do": "environment", "device": plan.device})
            self.record = run_record(plan.device, plan.smoke, described["environment"])
            (found,) = self.ask({"do": "ceilings", "device": plan.device, "dtypes": [plan.dtype]})
            self.record["ceilings"] = found["ceilings"]
            for suite, members in itertools.groupby(units, lambda unit: BY_ID[unit.case].suite):
                self._carry_out(suite, list(members))
        finally:
            self.close()
        if self.left_over:
            self.save(self.document)
            self.progress.note(f"{results.NOT_STARTED}: {', '.join(self.left_over)}")
        return self.document

    def _carry_out(self, suite: str, units: Sequence[Unit]) -> None:
        """Compile and measure one suite."""
        if self._left_s() > 0:
            self._compile(suite, units)
        if self._left_s() > 0:
            self.progress.stage(f"measuring {suite}", len(units))
        for unit in units:
            if self._left_s() > 0:
                self._measure(unit)
                self.progress.advance()
            else:
                self.left_over.append(unit.case)
                skips = [
                    skip_row(unit, self.record, op, peer, results.NOT_STARTED) for peer in unit.peers for op in unit.ops
                ]
                self.document = results.add(self.document, [], skips, self.record)

    def _compile(self, suite: str, units: Sequence[Unit]) -> None:
        """Fill the compilers' caches on disk with several processes before a suite is timed.

        Compiling takes seconds per shape, on one core: many processes do in a minute what would otherwise be most of
        the run. With a time budget they stop when their share is spent. What fails or is left out is only noted: the
        measurement meets it again.
        """
        if self.plan.device != "cuda":
            return
        kinds = ("time", "error", "training")
        todo = [
            dataclasses.replace(unit, peers=(peer,))
            for unit in units if BY_ID[unit.case].kind in kinds
            for peer in unit.peers if PEERS[peer].compiles
        ]  # fmt: skip
        share = COMPILE_SHARE * self._left_s()
        if self.plan.budget_s is not None:
            share = min(share, COMPILE_SHARE * self.plan.budget_s - self._compiling_s)
        began, left = time.monotonic(), len(todo)
        if todo and share > 0:
            self.progress.stage(f"compiling {suite}", len(todo))
            left -= self._compile_until(began + share, todo)
            self._compiling_s += time.monotonic() - began
        if left:
            self.progress.note(f"{suite}: {left} of {len(todo)} not compiled ahead, the measurement compiles them")

    def _compile_until(self, until: float, todo: Sequence[Unit]) -> int:
        """Number of units done by then. Processes that are idle stay, at rest, for the next suite."""
        waiting, busy, done = list(todo), list[Worker](), 0

        def feed(worker: Worker) -> None:
            if waiting:
                worker.send({"do": "warm", "unit": dataclasses.asdict(waiting.pop(0))})
                busy.append(worker)

        self._compilers = [worker for worker in self._compilers if worker.process.poll() is None]
        while len(self._compilers) < min(16, ((os.cpu_count() or 1) + 1) // 2, len(todo)):
            self._compilers.append(self.spawn(self.inbox, 1, 1))
        for worker in self._compilers:
            feed(worker)
        while busy and time.monotonic() < until:
            with contextlib.suppress(Stopped):
                for worker, event in self._listen(busy, min(WARM_TIMEOUT_S, self.plan.step_timeout_s), until):
                    self._show(event)
                    if event["event"] == "done":
                        self.progress.advance()
                        done += 1
                        busy.remove(worker)
                        feed(worker)
                        if not busy:
                            break
            busy = [worker for worker in busy if worker.process.poll() is None]
        for worker in busy:
            worker.stop()
        return done

    def _measure(self, unit: Unit) -> None:
        """Measure one case, again without a peer that stopped the worker."""
        peers, record = list(unit.peers), self.record
        rows: list[results.Row] = []
        skips: list[results.Row] = []
        while peers:
            try:
                left = dataclasses.replace(unit, peers=tuple(peers))
                answer = self.ask({"do": "measure", "unit": dataclasses.asdict(left)})
            except Stopped as stopped:
                blamed = [stopped.peer] if stopped.peer in peers else peers
                self.progress.note(f"{unit.case}: {', '.join(blamed)}: {stopped.reason}")
                skips += [skip_row(unit, record, op, peer, stopped.reason) for peer in blamed for op in unit.ops]
                peers = [p for p in peers if p not in blamed]
                continue
            rows, more = rows_and_skips(unit, record, answer)
            skips += more
            break
        self.document = results.add(self.document, rows, skips, record)
        self.save(self.document)


def identity(unit: Unit, record: dict[str, Any]) -> dict[str, Any]:
    """The fields that say which case and run a row or a skip belongs to."""
    return {"run": record["id"], "suite": BY_ID[unit.case].suite, "case": unit.case, "dtype": unit.dtype}


def skip_row(unit: Unit, record: dict[str, Any], op: str, peer: str, reason: str) -> results.Row:
    """A skip of the schema."""
    return identity(unit, record) | {"op": op, "impl": peer, "reason": reason}


def full_row(unit: Unit, record: dict[str, Any], row: Event) -> results.Row:
    """A worker's measurement with everything that the run and the case add to it."""
    full = identity(unit, record) | results.describe(unit.problem) | row
    if row["metric"] == "time" and row["op"] != "step":
        full |= results.timed(unit.problem, row["op"], unit.dtype, row["time_ms"], record["ceilings"])
    return full


def rows_and_skips(
    unit: Unit, record: dict[str, Any], events: Sequence[Event]
) -> tuple[list[results.Row], list[results.Row]]:
    """What a worker's events add to the document."""
    rows = [full_row(unit, record, e["row"]) for e in events if e["event"] == "row"]
    skips = [skip_row(unit, record, e["op"], e["impl"], e["reason"]) for e in events if e["event"] == "skip"]
    return rows, skips


def committed_path() -> Path:
    """The results.json of the checkout that this code runs from; `results.json` in the working folder otherwise."""
    beside = Path(__file__).resolve().parents[2] / "results.json"
    return beside if beside.exists() else Path("results.json")
