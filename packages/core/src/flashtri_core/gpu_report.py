"""A pytest plugin that writes down what was tested, on which GPUs, with what result.

    python -m pytest -p flashtri_core.gpu_report --gpu-report=FILE -m multi_gpu packages

The file is JSON: commit, whether the checkout differed from it, GPUs, driver, versions, command, counts, seconds, the
slowest tests, the names of those that failed or (the first few) had not run, and why others were skipped. It is written
anew every few seconds, so that a run that is cut leaves one too: its ``exit_status`` is null, and ``counts`` says how many
tests had not run. Failures are printed as they happen. Where there is no checkout, the variable FLASHTRI_COMMIT names the
commit, and FLASHTRI_DIRTY=1 says that the files differ from it.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

SLOWEST = 10
NAMED = 20  # of those that had not run
EVERY = 5.0  # seconds between two versions of the file


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--gpu-report`."""
    parser.addoption("--gpu-report", type=Path, metavar="FILE", help="write GPUs, versions and results to FILE (JSON)")


def pytest_configure(config: pytest.Config) -> None:
    """Start counting when a report is asked for; under pytest-xdist the controller counts, its workers do not."""
    if config.getoption("--gpu-report") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(GpuReport(config), "gpu-report-writer")


class GpuReport:
    """Counts results while pytest runs, and writes the file, during the run and at its end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.file = Path(config.getoption("--gpu-report")).absolute()
        self.root = config.rootpath
        self.command = shlex.join(["python", "-m", "pytest", *config.invocation_params.args])
        self.started = time.time()
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.failed: list[str] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.planned: list[str] = []
        self.done: set[str] = set()
        self.head = {**commit(self.root, self.file), **machine()}  # of the start: files may change while tests run
        self.written = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """How many tests there are, in one process."""
        self.planned = self.planned or [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """How many tests there are, under pytest-xdist: each worker has collected all."""
        self.planned = ids

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that could not be collected is an error of the run."""
        if report.failed:
            self.counts["errors"] += 1
            self.failed.append(report.nodeid)
        elif report.skipped:
            self._skip(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setup, call and teardown of a test report one by one; a failure outside of the call is an error."""
        self.seconds[report.nodeid] += report.duration
        if report.when not in ("setup", "call"):  # torn down, or its worker died
            self.done.add(report.nodeid)
        if report.failed:
            self.counts["failed" if report.when == "call" else "errors"] += 1
            self.failed.append(report.nodeid)
            self._say(report)
        elif report.skipped:
            self._skip(report)
        elif report.when == "call":
            self.counts["passed"] += 1
        if time.time() - self.written > EVERY:
            self._write(None)

    def _say(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            words = crash.message if crash is not None else str(report.longrepr)
            first = words.strip().splitlines()[:1]
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid}: {''.join(first)[:200]}", flush=True)

    def _skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.counts["skipped"] += 1
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.skipped[reason.removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the file for the last time."""
        self._write(int(exitstatus))

    def _write(self, exit_status: int | None) -> None:
        self.written = time.time()
        slowest = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)[:SLOWEST]
        left = [name for name in self.planned if name not in self.done]
        report = {
            "commit": self.head["commit"],
            "dirty": self.head["dirty"],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "command": self.command,
            "exit_status": exit_status,
            **self.head,
            "counts": {
                **{name: self.counts[name] for name in ("passed", "failed", "errors", "skipped")},
                "not_run": len(left),
            },
            "failed": sorted(set(self.failed)),
            "not_run": left[:NAMED],
            "skipped": dict(sorted(self.skipped.items())),
            "seconds": round(time.time() - self.started, 1),
            "slowest": {name: round(self.seconds[name], 1) for name in slowest},
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        whole = self.file.with_suffix(".part")
        whole.write_text(json.dumps(report, indent=1) + "\n")
        whole.replace(self.file)


def commit(root: Path, report: Path) -> dict[str, Any]:
    """The commit under test, and whether the files differ from it; null where nobody knows.

    Args:
        root: folder of the checkout.
        report: the file being written, no part of what is tested.
    """
    named = os.environ.get("FLASHTRI_COMMIT")
    if named:
        return {"commit": named, "dirty": os.environ.get("FLASHTRI_DIRTY", "0") == "1"}
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    inside = [f":!{report.relative_to(root)}"] if report.is_relative_to(root) else []
    status = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", ".", *inside)
    return {"commit": head, "dirty": None if status is None else bool(status)}


def machine() -> dict[str, Any]:
    """GPUs, driver and versions; null for what is not here."""
    try:
        import triton

        triton_version: str | None = triton.__version__
    except ImportError:
        triton_version = None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpus else None
    return {
        "gpus": [
            {"name": gpu.name, "sm": f"{gpu.major}.{gpu.minor}", "memory_gib": round(gpu.total_memory / 2**30)}
            for gpu in gpus
        ],
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
    }


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
