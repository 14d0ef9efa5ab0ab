"""A compiled kernel launched without Triton's argument binding, which costs more than a short kernel runs for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from .._jit import INTERPRETED, triton_version
from ..tuning import Config

OLDEST, NEWEST = (3, 6), (3, 9)  # what `flashtri_core.testing.host_path` has been run with at both ends


def compiled_only(kernel: Any, args: Sequence[Any], **options: Any) -> bool:
    """Compile for arguments that are tensors without memory; False, and nothing done, where they have some."""
    tensors = (getattr(x, "base", x) for x in args)  # that of a descriptor, too
    if not any(isinstance(x, Tensor) and x.is_meta for x in tensors):
        return False
    kernel.warmup(*args, grid=(1,), **options)
    return True


class QuickLaunch:
    """A compiled kernel, called through Triton's own C launcher with addresses in place of tensors.

    The binder types every argument and asks the driver about every pointer, call by call. Here whoever keeps a QuickLaunch
    promises arguments of the types, divisibility and alignment that the kernel was compiled for, and the launcher gets
    them as they are. Hooks on Triton's launches (profilers') are not run. With a Triton whose launcher has not been tried,
    or has another calling convention, ``run`` returns False, and Triton's own path serves.
    """

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.raw: Any = None
        version = triton_version()
        if version is not None and OLDEST <= version <= NEWEST:
            self._prepare(compiled.run)  # which loads the binary

    def _prepare(self, run: Any) -> None:
        launch, metadata = run.launch, self.compiled.metadata
        if metadata.tensordesc_meta:  # Triton wraps the launcher of a kernel with descriptors: the inner one
            launch = inspect.getclosurevars(launch).nonlocals.get("launcher")
        self.raw = None if run.global_scratch_size or run.profile_scratch_size else launch
        base = (self.compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        packed = self.compiled.packed_metadata
        self._tail: tuple[Any, ...] | None = None
        if hasattr(run, "arg_annotations"):  # Triton with one launcher for all kernels: arguments travel in a tuple
            self._head: tuple[Any, ...] = (*base, packed, None, None, None, None, None)
            self._tail = (run.arg_annotations, run.kernel_signature)
        else:  # Triton with one generated launcher per kernel
            self._head = (*base, None, None, packed, None, None, None)
        self._stream_of = driver.active.get_current_stream

    def run(self, grid: int, device: int, flat: Sequence[Any]) -> bool:
        """Run ``grid`` programs on the device's current stream; False if the quick path does not work here.

        ``flat`` holds the kernel's arguments in order, compile-time ones included; tuples stay tuples, and a tensor in
        one costs a call back into Python.
        """
        if self.raw is None:
            return False
        try:
            if self._tail is None:
                self.raw(grid, 1, 1, self._stream_of(device), *self._head, *flat)
            else:
                self.raw(grid, 1, 1, self._stream_of(device), *self._head, *self._tail, flat)
        except TypeError:
            self.raw = None
            return False
        return True


class Launch:
    """One kernel on one grid. The first call compiles (or finds) the binary, later calls skip Triton's argument binding.

    A binary depends on the types of the arguments, on which integers are 1 or divisible by 16 and on which pointers are
    aligned. Whoever keeps a Launch must call it with arguments that agree in all of that, see ``ops._forward_key``, and on
    the current device. Called with meta tensors it compiles and runs nothing.
    """

    def __init__(self, kernel: Any, grid: int, constexprs: tuple[Any, ...], config: Config | None, device: torch.device):
        self.kernel, self.grid, self.constexprs, self.config, self.device = kernel, grid, constexprs, config, device
        self.quick: QuickLaunch | None = None
        self.tensors: list[int] = []  # where tensors stand among the arguments

    def __call__(self, *args: Any) -> None:
        if self.grid == 0:
            return
        if self.quick is None:
            options = {} if self.config is None else {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
            if compiled_only(self.kernel, (*args, *self.constexprs), **options):
                return
            binary = self.kernel[(self.grid,)](*args, *self.constexprs, **options)
            self.quick = None if INTERPRETED else QuickLaunch(binary)
            self.tensors = [n for n, x in enumerate(args) if isinstance(x, Tensor)]
            return
        flat = [*args, *self.constexprs]
        for n in self.tensors:
            flat[n] = flat[n].data_ptr()
        if not self.quick.run(self.grid, self.device.index, flat):
            self.quick.compiled[(self.grid, 1, 1)](*args, *self.constexprs)
