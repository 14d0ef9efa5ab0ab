"""Compile kernels for a GPU that is not there, and read what the compiler made of them.

A stub driver stands in for the device; launches become compilations. Shared memory, registers, spills and warnings come
from Triton's metadata and from the ptxas that Triton ships.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ..target import SHARED_MEMORY, Target


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: its name, resources, and ptxas's own words."""

    name: str
    capability: int
    shared: int  # bytes of shared memory per program
    tensor_memory: int  # columns of tensor memory per program, of which Blackwell's datacenter GPUs have 512
    registers: int
    spill_bytes: int  # stored and loaded
    spill_stores: int  # bytes of those that are stored
    warnings: tuple[str, ...]
    ptx: str = field(repr=False)
    sass: str = field(repr=False)  # the machine code in words; empty unless it was asked for
    idle_barriers: int = 0  # that are made and never used; see `kernels.hopper.forward.barriers`

    @property
    def serialized_wgmma(self) -> bool:
        """ptxas gave up overlapping the tensor-core instructions of Hopper (its warnings C7510 to C7514)."""
        return any("wgmma" in w.lower() and "serializ" in w.lower() for w in self.warnings)


class _Utils:
    """The few driver calls that compilation asks for."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self.target.shared_memory, "multiprocessor_count": self.target.multiprocessors,
            "max_num_regs": 65536, "warpSize": 32, "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1,
        }  # fmt: skip

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024

    def set_printf_fifo_size(self, *args: Any) -> None:
        """Nothing to set."""


class StubDriver:
    """Enough of Triton's driver interface to compile; it never launches."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self.utils = _Utils(target)
        self._target = GPUTarget("cuda", target.capability, 32)
        self.launcher_cls = lambda src, metadata: lambda *args, **kwargs: None

    def get_current_device(self) -> int:
        return int(self._target.arch)  # Triton caches per device number: one number per architecture

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def is_active() -> bool:
        return True


def resources(kernel: Any, capability: int, disassemble: bool = False) -> Compiled:
    """Assemble a compiled kernel's PTX with ``ptxas -v`` and read its report.

    Raises:
        RuntimeError: ptxas fails, or says nothing of spills.
    """
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    suffix, sass = "a" if capability >= 90 else "", ""
    ptxas = get_ptxas(capability).path  # Triton ships two, for different versions of PTX
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(kernel.asm["ptx"])
        command = [ptxas, "-v", f"--gpu-name=sm_{capability}{suffix}", ptx, "-o", cubin]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report = done.stderr
        if done.returncode or "bytes spill stores" not in report:
            raise RuntimeError(report)
        if disassemble:
            command = [triton.knobs.nvidia.nvdisasm.path, "-c", cubin]
            sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    stores = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", report))
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    warnings = tuple(line for line in report.splitlines() if "warning" in line.lower() or "C75" in line)
    meta = kernel.metadata
    columns = meta.tmem_size or 0
    return Compiled(
        meta.name, capability, meta.shared, columns, max(registers), spills, stores, warnings, kernel.asm["ptx"], sass,
        idle_barriers(kernel.asm["ttgir"]) if "hopper" in meta.name else 0,  # in others the compiler makes them
    )  # fmt: skip


def idle_barriers(ttgir: str) -> int:
    """How many arrays of mbarriers a warp-specialised kernel makes and hands to no partition.

    Raises:
        ValueError: it makes barriers in words that this does not know.
    """
    made = re.findall(r"(%\w+) = ttg\.local_alloc[^\n]*-> !ttg\.memdesc<\d+x1xi64", ttgir)
    if ("init_barrier" in ttgir) != bool(made):
        raise ValueError("barriers that are not allocated as expected")
    if not made:
        return 0
    handed = re.search(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)
    if handed is None:
        raise ValueError("barriers, and no partitions")
    return sum(name not in re.split(r"[,\s]+", handed[1]) for name in made)


def main_loops(sass: str) -> list[list[str]]:
    """The instructions of each innermost loop that holds tensor-core instructions, in the order of the listing."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if found := re.match(r"(\.L_x_\d+):", line):
            labels[found[1]] = len(code)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(found[1])
    loops = []
    for at, text in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
        if target and labels.get(target[1], at + 1) <= at:
            body = range(labels[target[1]], at)
            if any("HGMMA" in code[i] for i in body):
                loops.append(body)
    inner = [a for a in loops if not any(b != a and b[0] >= a[0] and b[-1] <= a[-1] for b in loops)]
    return [[code[i] for i in body] for body in inner]


def check_hopper(kernel: Compiled, most: int) -> None:
    """A kernel for sm_90 fits and stores at most ``most`` bytes of registers; one of the Hopper kernels uses wgmma and TMA.

    Raises:
        AssertionError: it does not.
    """
    assert kernel.spill_stores <= most, kernel
    assert not any("C75" in line for line in kernel.warnings), f"ptxas serialised wgmma: {kernel}"
    assert kernel.shared <= SHARED_MEMORY[90], kernel
    assert kernel.idle_barriers == 0, kernel
    if "hopper" in kernel.name:
        assert "HGMMA" in kernel.sass, kernel
        assert "UTMALDG" in kernel.sass, kernel


@contextmanager
def compile_only(capability: int) -> Iterator[list[tuple[Any, Any]]]:
    """Inside, launches of the plain kernels on CPU tensors compile for ``capability`` and are appended to the list.

    Yields:
        A list of (compiled kernel, config) in launch order.
    """
    from triton.runtime import driver

    from ..kernels import launch, quick

    target = Target(capability, SHARED_MEMORY[capability])
    found: list[tuple[Any, Any]] = []

    def compile_instead(self: Any, *args: Any) -> None:
        config = self.config
        options = {} if config is None else {"num_warps": config.num_warps, "num_stages": config.num_stages}
        found.append((self.kernel.warmup(*args, *self.constexprs, grid=(1,), **options), config))

    with (
        mock.patch.object(quick.Launch, "__call__", compile_instead),
        mock.patch.object(launch, "target_of", lambda device: target),
    ):
        previous = driver._active
        driver.set_active(StubDriver(target))
        try:
            yield found
        finally:
            driver._active = previous
