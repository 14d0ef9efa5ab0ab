"""The report of a GPU run, written here by small pytest runs without a GPU."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtri_core.gpu_report import commit

TESTS = """
import pytest

def test_passes(): pass

def test_fails(): assert False

@pytest.fixture
def broken(): raise RuntimeError

def test_error(broken): pass

@pytest.mark.skip(reason="needs two GPUs")
def test_skipped(): pass

@pytest.mark.skip(reason="needs two GPUs")
def test_skipped_too(): pass
"""


def test_counts_names_and_reasons(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(TESTS)
    command = ["-m", "pytest", "-q", "-c", os.devnull, "-p", "flashtri_core.gpu_report", "--gpu-report=out/r.json", "."]
    environment = os.environ | {"FLASHTRI_COMMIT": "abc1234", "FLASHTRI_DIRTY": "1"}
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    report = json.loads((tmp_path / "out/r.json").read_text())
    assert report["counts"] == {"passed": 1, "failed": 1, "errors": 1, "skipped": 2, "not_run": 0}
    assert [name.partition("::")[2] for name in report["failed"]] == ["test_error", "test_fails"]
    assert report["skipped"] == {"needs two GPUs": 2}
    assert (report["commit"], report["dirty"], report["exit_status"]) == ("abc1234", True, 1)
    assert report["command"] == shlex.join(["python", *command])
    assert report["torch"] == torch.__version__
    assert len(report["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert {name.partition("::")[2] for name in report["slowest"]} >= {"test_passes", "test_fails"}


HANGS = """
import os, pytest, time
from flashtri_core import gpu_report

gpu_report.EVERY = 0.0

@pytest.mark.parametrize("n", range(10))
def test_n(n):
    if n == 4:
        print("the driver waits", flush=True)
        time.sleep(100)  # stands for a kernel that never ends
    assert n != 1, "one is wrong"
"""
CUT = ["-m", "pytest", "-q", "-c", os.devnull, "-p", "flashtri_core.gpu_report", "--gpu-report=r.json", "."]


def run_cut(folder: Path, *more: str) -> tuple[dict, str]:
    (folder / "test_sample.py").write_text(HANGS)
    command = [sys.executable, *CUT, *more, "-o", "timeout=5", "--timeout-method=thread"]
    environment = os.environ | {"FLASHTRI_COMMIT": "abc1234"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return json.loads((folder / "r.json").read_text()), done.stdout


def test_a_run_that_is_cut_leaves_a_report(tmp_path: Path) -> None:
    """In one process the watchdog ends the run: the file says what had been tested, and how much had not."""
    report, printed = run_cut(tmp_path)
    assert report["exit_status"] is None
    assert report["counts"] == {"passed": 3, "failed": 1, "errors": 0, "skipped": 0, "not_run": 6}
    assert report["not_run"] == [f"test_sample.py::test_n[{n}]" for n in range(4, 10)]
    assert "test_n[1]: AssertionError: one is wrong" in printed


def test_a_hang_costs_one_test(tmp_path: Path) -> None:
    """Under pytest-xdist it ends a worker: that test has failed, and all others run."""
    report, _ = run_cut(tmp_path, "-n", "2", "--dist=worksteal")
    assert report["exit_status"] == pytest.ExitCode.TESTS_FAILED
    assert report["counts"] == {"passed": 8, "failed": 1, "errors": 1, "skipped": 0, "not_run": 0}
    assert [name.partition("::")[2] for name in report["failed"]] == ["test_n[1]", "test_n[4]"]


def test_commit_comes_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.delenv("FLASHTRI_COMMIT", raising=False)
    code, report = tmp_path / "code.py", tmp_path / "report.json"
    for file in (code, report):
        file.write_text("old")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    head = git("rev-parse", "HEAD")
    report.write_text("new")  # The report is being written, and no part of what is tested.
    assert commit(tmp_path, report) == {"commit": head, "dirty": False}
    code.write_text("new")
    assert commit(tmp_path, report) == {"commit": head, "dirty": True}


def test_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHTRI_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path, tmp_path / "report.json") == {"commit": None, "dirty": None}
    monkeypatch.setenv("FLASHTRI_COMMIT", "abc1234")
    assert commit(tmp_path, tmp_path / "report.json") == {"commit": "abc1234", "dirty": False}
