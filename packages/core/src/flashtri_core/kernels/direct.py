"""A compiled kernel launched by the driver's library, past Triton's launcher, which takes arguments apart at every launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from .._jit import triton_version
from .quick import NEWEST, OLDEST


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, with the one number that its value is here."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


PROGRAMMATIC_STREAM_SERIALIZATION = 6


@cache
def driver_launch() -> Any:
    """``cuLaunchKernelEx`` of the library that Triton's launchers have loaded; it returns 0 where all is well."""
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


def in_signature(kinds: Iterable[Any], arguments: Iterable[Any]) -> Iterator[Any]:
    """The arguments that a compiled kernel has parameters for: all but compile-time ones, those in tuples one by one."""
    for kind, argument in zip(kinds, arguments, strict=False):  # the launch's compile-time ones may end the signature
        if isinstance(kind, tuple):
            yield from in_signature(kind, argument)
        elif kind != "constexpr":
            yield argument


class DriverLaunch:
    """A compiled kernel and its parameters as the driver takes them; Triton's launcher lays them out anew for every launch.

    A parameter is a number, in 8 bytes of ``words``, of which the driver reads as many as it has, or whatever else
    ``pointers`` says. Of Triton's conventions that leaves the order, which `flashtri_core.testing.host_path` compares.
    """

    def __init__(self, compiled: Any, grid: int, parameters: Sequence[float]) -> None:
        num_warps, _one_cluster, shared = compiled.packed_metadata
        count = len(parameters) + 2  # Triton's two buffers of no size
        self.words = (ctypes.c_uint64 * count)()
        for n, x in enumerate(parameters):
            if isinstance(x, float):
                ctypes.c_float.from_buffer(self.words, 8 * n).value = x
            else:
                self.words[n] = x & (1 << 64) - 1
        start = ctypes.addressof(self.words)
        self.pointers = (ctypes.c_void_p * count)(*range(start, start + 8 * count, 8))
        self.config = _Config(grid, 1, 1, 32 * num_warps, 1, 1, shared)
        self.arguments = ctypes.byref(self.config), ctypes.c_void_p(compiled.function), self.pointers, None

    def overlap(self) -> None:
        """May start when every thread block of the launch before it runs and has allowed it to, or has ended.

        What is read of that launch's results, the kernel has to wait for (``griddepcontrol``).
        """
        self.attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        self.config.attributes = ctypes.addressof(self.attribute)
        self.config.attribute_count = 1

    @staticmethod
    def takes(compiled: Any) -> bool:
        """Whether that is all there is to a launch of this kernel."""
        run, version = compiled.run, triton_version()  # loads the binary
        return (
            version is not None and OLDEST <= version <= NEWEST and compiled.packed_metadata[1] == 1
            and not (run.launch_cooperative_grid or run.launch_pdl or run.global_scratch_size or run.profile_scratch_size)
        )  # fmt: skip
