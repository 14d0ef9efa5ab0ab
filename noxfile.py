"""The one task runner: `nox -l` lists the sessions, `nox -s NAME -- ARGS` passes ARGS on.

Sessions that need torch share one environment, `.nox/shared`, because a torch installation is gigabytes and most of a
session's start. It is built once and again whenever a pyproject.toml, the constraints or FLASHTRI_TORCH changes.

FLASHTRI_TORCH is the torch requirement to install in place of the constraints' (`torch==2.12.0`); `skip` installs
nothing at all and runs in the Python that runs nox, for machines that bring their own torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "typecheck"]

ROOT = Path(__file__).parent
PACKAGES = ["packages/core", "packages/modules", "packages/bench"]
CONSTRAINTS = ROOT / "constraints.txt"
MINIMUMS = ROOT / "constraints-minimums.txt"
TORCH = os.environ.get("FLASHTRI_TORCH", "")

# Triton 3.9 warns that the default of floating-point fusion changes in 3.10: fixed, so that no figure moves with it.
ENV = {"TRITON_DEFAULT_FP_FUSION": "1", "MPLBACKEND": "Agg"}
if TORCH == "skip":
    ENV["PYTHONPATH"] = os.pathsep.join(str(ROOT / package / "src") for package in PACKAGES)

VERSIONS = """
from importlib.metadata import PackageNotFoundError, version
for name in ("torch", "triton"):
    try:
        print(f"{name}=={version(name)}")
    except PackageNotFoundError:
        pass
"""

ONE_CALL = """
import torch, flashtri_bench, flashtri_modules
from flash_attn_triton import FlashSelfAttention, flash_attn
q = torch.randn(1, 2, 5, 8, requires_grad=True)
flash_attn(q, q, q, causal=True).sum().backward()
print(FlashSelfAttention(16, 2, causal=True)(torch.randn(1, 3, 16)).shape, q.grad.isfinite().all().item())
"""

NO_KERNEL = "not (interpreter or aot or gpu or multi_gpu or slow or browser)"


def python_of(folder: Path) -> str:
    """Path of the interpreter of a virtual environment."""
    return str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def pins(constraints: Path) -> dict[str, str]:
    """Package name -> line of constraints.txt, or of the given file where that one names the package as well."""
    lines = (CONSTRAINTS.read_text() + constraints.read_text()).splitlines()
    return {re.split("[=<>]", line)[0]: line for line in lines if line and not line.startswith("#")}


def install_torch(session: nox.Session, folder: Path, constraints: Path) -> Path:
    """Make a new virtual environment with torch and Triton; returns the constraints for whatever is installed next.

    torch goes in first and by its exact pin. A CUDA build then brings the one Triton it was built against, which wins
    over the constraints' pin; a CPU build brings none, and the pin is installed beside it.
    """
    python = python_of(folder)
    session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(folder), external=True)

    def install(requirement: str) -> list[str]:
        session.run(python, "-m", "pip", "install", "--quiet", requirement, external=True)
        return str(session.run(python, "-c", VERSIONS, silent=True, log=False, external=True)).split()

    wanted = pins(constraints)
    have = install(TORCH or wanted["torch"])
    if len(have) == 1 and sys.platform == "linux":
        have = install(wanted["triton"])
    others = [line for name, line in wanted.items() if name not in ("torch", "triton")]
    effective = folder / "constraints.txt"
    effective.write_text("\n".join([*others, *have]) + "\n")
    return effective


def environment(session: nox.Session, *groups: str, constraints: Path = CONSTRAINTS, name: str = "shared") -> str:
    """Python of a lasting environment with torch, Triton, the packages (editable) and the dependency groups."""
    if TORCH == "skip":
        return sys.executable
    folder = ROOT / ".nox" / name
    python = python_of(folder)
    inputs = [ROOT / "pyproject.toml", constraints, *(ROOT / package / "pyproject.toml" for package in PACKAGES)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs) + TORCH.encode()).hexdigest()
    stamp = folder / "flashtri.json"
    done = json.loads(stamp.read_text()) if stamp.exists() else {}
    if done.get("digest") != digest:
        effective = install_torch(session, folder, constraints)
        editable = [word for package in PACKAGES for word in ("-e", package)]
        session.run(python, "-m", "pip", "install", "--quiet", "-c", str(effective), *editable)
        done = {"digest": digest, "constraints": str(effective), "groups": []}
    missing = [group for group in groups if group not in done["groups"]]
    if missing:
        wanted = [word for group in missing for word in ("--group", group)]
        session.run(python, "-m", "pip", "install", "--quiet", "-c", done["constraints"], *wanted)
        done["groups"] += missing
    stamp.write_text(json.dumps(done))
    return python


def cpu_layers(session: nox.Session, python: str) -> None:
    """The three layers that need no GPU, a pytest process each: TRITON_INTERPRET is read when Triton is imported."""
    # Arguments may select tests of one layer only; then pytest finds none in the others and exits with 5.
    codes = [0, 5] if session.posargs else [0]
    layers = [(NO_KERNEL, ENV)]
    if sys.platform == "linux":
        layers += [("interpreter and not slow", ENV | {"TRITON_INTERPRET": "1"}), ("aot and not slow", ENV)]
    failed = []
    for marks, env in layers:
        env = env | {"OMP_NUM_THREADS": "1"}  # two processes whose threads wait for each other's cores crawl
        pytest = [python, "-m", "pytest", "-n", "2", "-m", marks, *session.posargs]
        try:
            session.run(*pytest, env=env, success_codes=codes)
        except CommandFailed:
            failed.append(marks)  # the other layers still have something to say
    if failed:
        session.error(f"{len(failed)} of {len(layers)} layers failed")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Test on the CPU: without kernels, through Triton's interpreter, and by compiling for GPUs that are not here."""
    cpu_layers(session, environment(session, "test", "bench"))


@nox.session(venv_backend="none", default=False)
def tests_gpu(session: nox.Session) -> None:
    """Test on this machine's GPU, or GPUs; a run of all tests writes the reports that the repository keeps.

    With arguments, which select among the tests of each layer, the reports go to build/.
    """
    python = environment(session, "test", "bench")
    pytest = [python, "-m", "pytest", "-p", "flashtri_core.gpu_report"]
    count = int(session.run(python, "-c", "import torch; print(torch.cuda.device_count())", silent=True) or 0)
    if count == 0:
        session.error("no GPU here: `nox -s tests` runs the layers that need none")
    # A kernel that hangs cannot be interrupted: the watchdog ends its process, and pytest-xdist starts another.
    watched = ["--timeout=300", "--timeout-method=thread", "-o", "timeout_func_only=true"]
    workers = ["-n", str(min(8, os.cpu_count() or 1)), "--dist=worksteal"]
    layers = [("gpu and not multi_gpu", "packages/core/tests", "gpu_report.json", workers)]
    if count > 1:
        layers.append(("multi_gpu", "packages/modules/tests", "multi_gpu_report.json", []))
    codes = [0, 5] if session.posargs else [0]
    failed = []
    for marks, folder, name, spread in layers:
        report = f"{'build' if session.posargs else folder}/{name}"
        arguments = [*watched, *spread, *session.posargs, "-m", marks, f"--gpu-report={report}"]
        try:
            session.run(*pytest, *arguments, env=ENV, success_codes=codes)
        except CommandFailed:
            failed.append(marks)  # the other layer still has something to say
    if failed:
        session.error(f"{len(failed)} of {len(layers)} layers failed: {', '.join(failed)}")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff."""
    session.install("-q", "-c", str(CONSTRAINTS), "--group", "lint")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", *session.posargs)


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """Check the types of all host code with mypy, strictly."""
    session.run(environment(session, "types"), "-m", "mypy", *session.posargs, env=ENV)


@nox.session(venv_backend="none", default=False)
def demo(session: nox.Session) -> None:
    """Show it working on this machine: exactness, a small model trained, and speed where there is a GPU."""
    session.run(environment(session), "-m", "flashtri_modules.demo", *session.posargs, env=ENV)


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmarks: on a GPU they update results.json, on a CPU they are a smoke run that writes nothing."""
    session.run(environment(session, "bench"), "-m", "flashtri_bench", "run", *session.posargs, env=ENV)


@nox.session(venv_backend="none", default=False)
def docs(session: nox.Session) -> None:
    """Build the site strictly into build/site, and check it in headless Chromium where there is one."""
    python = environment(session, "test", "bench", "docs")
    session.run(python, "-m", "flashtri_bench", "validate", env=ENV)
    session.run(python, "-m", "flashtri_bench", "report", "--readme", "README.md", "--check", env=ENV)
    chromium = os.environ.get("FLASHTRI_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    browser = ["--browser"] if chromium else []
    if not chromium:
        session.warn("no Chromium on this machine: the site is built, but not driven in a browser")
    session.run(python, "site/tools/build.py", *browser, *session.posargs, env=ENV)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the wheels, install them in an environment of their own, import them and make one call."""
    session.install("-q", "-c", str(CONSTRAINTS), "build", "hatchling")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for package in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", package, silent=True)
    wheels = sorted(str(path) for path in (ROOT / "dist").glob("*.whl"))
    session.log("built " + ", ".join(Path(wheel).name for wheel in wheels))
    if TORCH == "skip":
        session.error("the clean environment needs torch installed: unset FLASHTRI_TORCH or name a version")
    folder = ROOT / ".nox" / "clean"
    constraints = install_torch(session, folder, CONSTRAINTS)
    session.run(python_of(folder), "-m", "pip", "install", "--quiet", "-c", str(constraints), *wheels, external=True)
    with session.chdir(session.create_tmp()):  # away from the sources
        session.run(python_of(folder), "-c", ONE_CALL, external=True, env=ENV)


@nox.session(venv_backend="none", default=False)
def minimums(session: nox.Session) -> None:
    """Test on the CPU with the oldest supported torch and Triton."""
    cpu_layers(session, environment(session, "test", "bench", constraints=MINIMUMS, name="minimums"))


@nox.session(venv_backend="none", default=False)
def tune(session: nox.Session) -> None:
    """Search the kernels' configurations on this GPU, check and time each, and keep the winners for this user."""
    session.run(environment(session), "-m", "flashtri_core.tune", *session.posargs, env=ENV)
