"""Fixtures and rules that the test files share: which layer runs where, and poisoned memory.

A test that takes ``lane`` runs the same assertions through every implementation: the chunked path ("reference", no
marker), the real kernels in Triton's interpreter (marker ``interpreter``) and on a GPU (marker ``gpu``).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from .. import ops
from .._jit import HAS_TRITON, INTERPRETED
from ..target import SHARED_MEMORY, Target
from . import aot, budget, cases
from .cases import Case, Inputs


@dataclass(frozen=True)
class Lane:
    """Where and by what a test computes.

    Attributes:
        name: As in the test's id.
        device: "cpu" or "cuda".
        impl: The ``impl=`` of every call.
        dtype: Of q, k and v.
        growth: Factors by which cases grow here: lengths, head dimensions.
    """

    name: str
    device: str
    impl: str
    dtype: torch.dtype
    growth: tuple[int, int] = (1, 1)

    def inputs(self, case: Case, seed: int = cases.SEED) -> Inputs:
        """Tensors of the case, at this lane's size."""
        return cases.inputs(case.grown(*self.growth), self.dtype, self.device, seed)

    def run(self, given: Inputs, backward: bool = True) -> dict[str, torch.Tensor]:
        """Results and gradients by this lane's implementation."""
        return cases.run(given, self.impl, backward)

    def check(self, given: Inputs, backward: bool = True) -> dict[str, torch.Tensor]:
        """Run, and hold every result against float64 within its budget; returns the results."""
        got = self.run(given, backward)
        right = cases.exact(given, torch.float64, backward)
        eager = None if self.dtype == torch.float64 else cases.exact(given, self.dtype, backward)
        budget.check(got, right, eager)
        return got

    def randn(self, *shape: int, seed: int = cases.SEED) -> torch.Tensor:
        """A normal tensor of this lane, the same numbers everywhere."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)


REFERENCE = Lane("reference", "cpu", "reference", torch.float64)
INTERPRETER = Lane("interpreter", "cpu", "triton", torch.float16)
GPU_HALF = Lane("gpu_fp16", "cuda", "triton", torch.float16, (9, 4))
GPU_BFLOAT = Lane("gpu_bf16", "cuda", "auto", torch.bfloat16, (9, 4))

_MARKS = {"interpreter": pytest.mark.interpreter, "gpu_fp16": pytest.mark.gpu, "gpu_bf16": pytest.mark.gpu}


def lanes(*which: Lane) -> pytest.MarkDecorator:
    """Parametrize a test's ``lane``; without arguments over all of them."""
    chosen = which or (REFERENCE, INTERPRETER, GPU_HALF, GPU_BFLOAT)
    return pytest.mark.parametrize(
        "lane", [pytest.param(lane, id=lane.name, marks=_MARKS.get(lane.name, ())) for lane in chosen]
    )


def unable(item: pytest.Item) -> str:
    """Why this process cannot run a test of a marked layer; empty when it can."""
    marks = {mark.name for mark in item.iter_markers()}
    if "interpreter" in marks and not INTERPRETED:
        return "TRITON_INTERPRET=1 is not set" if HAS_TRITON else "Triton is not installed"
    if "aot" in marks and (INTERPRETED or not HAS_TRITON):
        return "TRITON_INTERPRET=1 is set: nothing is compiled" if HAS_TRITON else "Triton is not installed"
    if marks & {"gpu", "multi_gpu"}:
        if not torch.cuda.is_available():
            return "no GPU here"
        if INTERPRETED:
            return "TRITON_INTERPRET=1 is set: kernels do not run on the GPU"
        if "multi_gpu" in marks and torch.cuda.device_count() < 2:
            return "one GPU here, needs two"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes in numpy, which warns where a GPU overflows in silence; results are judged, not that."""
    for item in items:
        if item.get_closest_marker("interpreter"):
            for words in ("overflow encountered", "invalid value encountered", "All-NaN slice encountered"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{words}:RuntimeWarning"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this process cannot run, with the reason."""
    reason = unable(item)
    if reason:
        pytest.skip(reason)


fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def turn(alone: bool, folder: Path) -> Iterator[None]:
    """Hold the GPU together with other processes' tests, or alone: locks on two files in ``folder``.

    Whoever wants it alone keeps the gate shut while it waits, so that nobody new comes in before it. The system frees the
    locks of a process that dies.
    """
    if fcntl is None:
        yield
        return
    with (folder / "flashtri-gpu.lock").open("w") as held, ExitStack() as gate:
        fcntl.flock(gate.enter_context((folder / "flashtri-gpu.gate").open("w")), fcntl.LOCK_EX)
        fcntl.flock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        gate.close()
        yield


@pytest.fixture(autouse=True)
def gpu_turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """GPU tests run side by side under pytest-xdist; one marked ``alone`` runs while no other does."""
    marks = {mark.name for mark in request.node.iter_markers()}
    if not marks & {"gpu", "multi_gpu"}:
        yield
        return
    with turn("alone" in marks, Path(tempfile.gettempdir())):
        yield
        if "alone" in marks:
            torch.cuda.empty_cache()  # what it took in gigabytes is not kept from the others


@pytest.fixture(autouse=True)
def own_tuning_table(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests see the shipped configs alone, not what this machine's user has tuned."""
    if "FLASHTRI_CACHE" not in os.environ:
        monkeypatch.setenv("FLASHTRI_CACHE", str(tmp_path_factory.getbasetemp() / "no-table"))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory is NaN: whoever reads what nobody wrote, or leaves a row unwritten, shows it."""

    def nan(make: Any) -> Any:
        def made(*args: Any, **keywords: Any) -> torch.Tensor:
            x: torch.Tensor = make(*args, **keywords)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    monkeypatch.setattr(torch, "empty", nan(torch.empty))
    monkeypatch.setattr(torch, "empty_like", nan(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", nan(torch.Tensor.new_empty))
    guards: Any = torch._C._dynamo.guards
    for name in ("_empty_strided_cpu", "_empty_strided_cuda"):  # target.maker's
        monkeypatch.setattr(guards, name, nan(getattr(guards, name)))
    monkeypatch.setattr(ops, "_plans", {})  # which hold makers


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles for a Hopper GPU that is not there."""
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", aot.StubDriver(Target(90, SHARED_MEMORY[90])))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns that its default will change


@pytest.fixture
def roomy() -> Any:
    """``roomy(gigabytes)`` skips a test where the GPU has less memory free."""

    def need(gigabytes: float) -> None:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < gigabytes:
            pytest.skip(f"needs {gigabytes:.0f} GiB of GPU memory, {free:.0f} are free")

    return need
