"""A compiled kernel launched without Triton's argument binding, which costs more than a short kernel runs for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton.runtime import driver

from .._jit import triton_version

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
