"""A pytest plugin that writes down what was tested, on which GPUs, with what result.

    python -m pytest -p flashtri_core.gpu_report --gpu-report=FILE -m multi_gpu packages

The file is JSON: commit, whether the checkout differed from it, GPUs, driver, versions, command, counts, seconds, the
slowest tests, the names of those that failed, and why others were skipped. Where there is no checkout, the variable
FLASHTRI_COMMIT names the commit, and FLASHTRI_DIRTY=1 says that the files differ from it.
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--gpu-report`."""
    parser.addoption("--gpu-report", type=Path, metavar="FILE", help="write GPUs, versions and results to FILE (JSON)")


def pytest_configure(config: pytest.Config) -> None:
    """Start counting when a report is asked for; under pytest-xdist the controller counts, its workers do not."""
    if config.getoption("--gpu-report") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(GpuReport(config), "gpu-report-writer")


class GpuReport:
    """Counts results while pytest runs, and writes the file at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.file = Path(config.getoption("--gpu-report")).absolute()
        self.root = config.rootpath
        self.command = shlex.join(["python", "-m", "pytest", *config.invocation_params.args])
        self.started = time.time()
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.failed: list[str] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)

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
        if report.failed:
            self.counts["failed" if report.when == "call" else "errors"] += 1
            self.failed.append(report.nodeid)
        elif report.skipped:
            self._skip(report)
        elif report.when == "call":
            self.counts["passed"] += 1

    def _skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.counts["skipped"] += 1
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.skipped[reason.removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the file."""
        slowest = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)[:SLOWEST]
        report = {
            **commit(self.root, self.file),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "command": self.command,
            "exit_status": int(exitstatus),
            **machine(),
            "counts": {name: self.counts[name] for name in ("passed", "failed", "errors", "skipped")},
            "failed": sorted(set(self.failed)),
            "skipped": dict(sorted(self.skipped.items())),
            "seconds": round(time.time() - self.started, 1),
            "slowest": {name: round(self.seconds[name], 1) for name in slowest},
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(report, indent=1) + "\n")


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
