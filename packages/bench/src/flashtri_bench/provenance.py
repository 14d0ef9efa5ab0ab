"""Where figures come from: machine, software, commit, command, protocol."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .peers import PEERS
from .timing import FLUSH_BYTES

PACKAGES = Path(__file__).resolve().parents[3]


def _output(*command: str, cwd: Path | None = None) -> str | None:
    """What a command prints, None if it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> tuple[str, bool]:
    """Commit of the code that runs, and whether it was changed since.

    Only the packages' sources count as the code: results.json itself or a page being written does not change what is
    measured. Outside a checkout, FLASHTRI_COMMIT names the commit and FLASHTRI_DIRTY=1 says that files differ from it.

    Returns:
        Hash (or "unknown") and the dirty flag; an unknown commit counts as dirty.

    Raises:
        ValueError: FLASHTRI_COMMIT is no hash.
    """
    named = os.environ.get("FLASHTRI_COMMIT")
    if named:
        if re.fullmatch("[0-9a-f]{7,40}", named) is None:
            raise ValueError(f"FLASHTRI_COMMIT: got {named!r}, supported is a hash of 7 to 40 hex digits")
        return named, os.environ.get("FLASHTRI_DIRTY", "0") == "1"
    if _output("git", "ls-files", "--error-unmatch", __file__, cwd=PACKAGES) is None:
        return "unknown", True  # an installed copy, or another project's checkout around it
    head = _output("git", "rev-parse", "HEAD", cwd=PACKAGES)
    status = _output("git", "status", "--porcelain", "--", ":(glob)*/src/**", cwd=PACKAGES)
    if head is None or status is None:
        return "unknown", True
    return head, bool(status)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment(device: str) -> dict[str, Any]:
    """The `environment` of a run.

    Args:
        device: "cuda" or "cpu".

    Returns:
        Names and versions; null for what does not exist here.
    """
    try:
        import triton

        triton_version: str | None = triton.__version__
    except ImportError:
        triton_version = None
    cuda = device == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = _output(*query) if cuda else None
    cudnn = torch.backends.cudnn.version() if cuda else None
    versions = {n: p.version() for n, p in PEERS.items() if cuda and p.unavailable(device) is None}
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name() if cuda else _processor(),
        "sm": ".".join(map(str, torch.cuda.get_device_capability())) if cuda else None,
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": None if cudnn is None else str(cudnn),
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "peers": {n: v for n, v in versions.items() if v is not None},
    }


def run_record(device: str, smoke: bool, environment: dict[str, Any]) -> dict[str, Any]:
    """The record of a run that starts now; its ceilings are filled in when they have been measured.

    Args:
        device: "cuda" or "cpu".
        smoke: Whether sizes are cut down.
        environment: Of the process that measures.

    Returns:
        A `run` of the schema.
    """
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    head, dirty = commit()
    cuda = device == "cuda"
    return {
        "id": f"{now:%Y%m%dT%H%M%SZ}-{head[:8]}",
        "started_at": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "commit": head,
        "dirty": dirty,
        "command": shlex.join(["flashtri-bench", *sys.argv[1:]]),
        "environment": environment,
        "protocol": {
            "timer": "cuda_event" if cuda else "perf_counter",
            "l2_flush_bytes": FLUSH_BYTES if cuda else 0,
            "order": "all peers of a case once per round, the first one rotating; host time hidden behind a device spin"
            if cuda
            else "all peers of a case once per round, the first one rotating",
            "statistic": "quantiles over rounds after warm-up",
            "flops": "pairs that the mask leaves, exactly; forward 2 (D + Dv), backward 2 (3 D + 2 Dv) per pair",
            "smoke": smoke,
        },
        "ceilings": None,
    }
