"""Runs the tests on this machine's GPU and writes ``gpu_report.json`` beside this file.

    python packages/core/tests/gpu_layer.py [pytest arguments]

The report is committed: one entry per GPU, with the commit and the versions that were tested, and what did not pass.
A run of part of the tests (a path, ``-k`` or the like among the arguments) prints its entry and leaves the file alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
REPORT = Path(__file__).with_name("gpu_report.json")
SELECTING = ("-k", "-m", "--lf", "--last-failed", "--deselect", "--ignore")


class Outcomes:
    """Pytest plugin that counts outcomes and keeps the names of what failed, and why tests were skipped."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.counts["failed" if report.when == "call" else "errors"] += 1
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.counts["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[reason] += 1
        elif report.when == "call":
            self.counts["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.counts["errors"] += 1
            self.failed.append(report.nodeid)


def git(*arguments: str) -> str:
    """Output of a git command, empty where there is no repository."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    """Run, print and write; returns pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="what is tested, where there is no git repository")
    parser.add_argument("--report", type=Path, default=REPORT, help="the file to update")
    options, arguments = parser.parse_known_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here: `nox -s tests` runs the layers that need none")
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 would interpret the kernels: unset it")
    marks = "(gpu or multi_gpu)" if torch.cuda.device_count() > 1 else "gpu and not multi_gpu"
    outcomes, started = Outcomes(), time.time()
    os.chdir(ROOT)
    status = pytest.main(["-m", marks, *arguments], plugins=[outcomes])
    try:
        import triton
    except ImportError as error:
        sys.exit(f"Triton is not installed: {error}")
    entry = {
        "commit": options.commit or git("rev-parse", "HEAD"),
        # The report itself may differ from what is committed; anything else makes the tree dirty.
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{REPORT.relative_to(ROOT)}")),
        "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "seconds": round(time.time() - started),
        "counts": dict(sorted(outcomes.counts.items())),
        "failed": sorted(set(outcomes.failed)),
        "skipped": dict(sorted(outcomes.skipped.items())),
    }
    name = torch.cuda.get_device_name()
    print(json.dumps({name: entry}, indent=1))
    if any(word.startswith(SELECTING) or not (word.startswith("-") or word.isdigit()) for word in arguments):
        print(f"part of the tests: {options.report.name} is left as it was")
        return status
    report = json.loads(options.report.read_text()) if options.report.exists() else {}
    options.report.write_text(json.dumps(report | {name: entry}, indent=1, sort_keys=True) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
