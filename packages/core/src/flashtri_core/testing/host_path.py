"""The host's share of a call, without a GPU: Triton's own launchers run against a CUDA driver library that does nothing.

    python -m flashtri_core.testing.host_path [--time]

Kernels are compiled for sm_90 as ever; tensors lie in the CPU's memory, and the library under Triton's launchers records
what every launch was handed. A process that has loaded that library is of no other use, so tests run this as a program.
It prints JSON, for the plain and for the Hopper kernels:

``same``      do repeated launches hand the driver what Triton's own path hands it, after a first call with one tensor
              for q, k and v and then with three others?
``refused``   launches of forward and backward where the driver refuses the first: Triton, which gives a thread its context,
              makes them all then
``undisturbed``  do two threads that launch the same at a time hand over what is theirs?
``replanned`` plans made after the first iteration of a training loop
``calls``     calls of Python functions and built-ins from this package, in one forward and in one backward
``first``     with ``--time``: seconds of the first forward and the first backward, compilers included where Triton's cache
              (``TRITON_CACHE_DIR``) is empty
``us``        with ``--time``: microseconds of this CPU for a forward without gradients, one with them, and forward and
              backward; each in a loop of nothing else, and after work that has filled the processor's caches, which is
              how a model calls it

What a GPU adds: the driver's own share of a launch, and autograd's hand-over of every backward to the device's thread and
back, which on a virtual machine can cost more than all of the above. ``torch.autograd.set_multithreading_enabled(False)``
around a loop leaves the hand-over out, and so tells the two apart.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

DRIVER = r"""
#include <stdint.h>
#include <string.h>
#define NOTHING(name) int name(void) { return 0; }
NOTHING(cuInit) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxGetLimit) NOTHING(cuCtxSetLimit) NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig) NOTHING(cuModuleUnload) NOTHING(cuStreamIsCapturing) NOTHING(cuTensorMapEncodeIm2col)
NOTHING(cuOccupancyMaxActiveClusters) NOTHING(cuPointerGetAttributes)
int cuGetErrorString(int e, const char **s) { *s = "no error here"; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuDeviceGet(int *d, int n) { *d = n; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = 232448; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuModuleLoadData(void **m, const void *d) { *m = (void *)1; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { *f = (void *)1; return 0; }
int cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : a == 1 ? 0 : 32; return 0; }
int cuPointerGetAttribute(uint64_t *out, int a, uint64_t p) { *out = p; return 0; }
int cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, void *address, const uint64_t *size,
                           const uint64_t *stride, const uint32_t *box) {
  memset(map, 0, 128);
  map[0] = (uint64_t)address; map[1] = (uint64_t)type << 32 | rank;
  for (uint32_t i = 0; i < rank; i++) map[2 + i] = size[i] ^ (uint64_t)box[i] << 40 ^ (i + 1 < rank ? stride[i] << 8 : 0);
  return 0;
}
int sizes[256], launched, refuses, overlaps; /* bytes of each parameter of the launch to come, 0 behind the last */
uint64_t seen[32][3 + 16 * 256];
int cuLaunchKernelEx(const uint32_t *config, void *f, void **params, void **extra) {
  if (refuses) return refuses--, 201; /* no context */
  uint64_t *to = seen[launched++ % 32];
  to[0] = config[0]; to[1] = config[3]; to[2] = config[6]; /* programs, threads, shared memory */
  uint32_t *attribute = *(uint32_t **)(config + 10); /* its kind first: 6 is programmatic stream serialization */
  overlaps += config[12] == 1 && attribute[0] == 6 && attribute[2] == 1;
  for (int i = 0; sizes[i]; i++) memcpy(to + 3 + 16 * i, params[i], sizes[i]);
  return 0;
}
"""
BYTES = {
    "i1": 1,
    "u1": 1,
    "i8": 1,
    "u8": 1,
    "i16": 2,
    "u16": 2,
    "i32": 4,
    "u32": 4,
    "i64": 8,
    "u64": 8,
    "fp32": 4,
    "fp64": 8,
}


def build_driver(folder: str) -> ctypes.CDLL:
    """Compile and load the library, under the name by which Triton asks for the real one.

    Raises:
        OSError, subprocess.CalledProcessError: there is no C compiler called cc, or it fails.
    """
    source, library = os.path.join(folder, "driver.c"), os.path.join(folder, "libcuda.so.1")
    with open(source, "w") as handle:
        handle.write(DRIVER)
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", source, "-o", library]
    subprocess.run(command, check=True)
    os.symlink(library, os.path.join(folder, "libcuda.so"))
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    return ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def sizes_of(signature: Any) -> list[int]:
    """Bytes of the parameters that a compiled kernel's signature stands for; descriptors bring shape and strides along."""
    sizes: list[int] = []
    for kind in signature:
        if isinstance(kind, tuple):
            sizes += sizes_of(kind)
        elif kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            sizes += [128, *[4] * rank, *[8] * rank]
        elif kind != "constexpr":
            sizes.append(8 if kind.startswith("*") else BYTES[kind])
    return sizes


class Recorder:
    """Reads what the library saw."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.sizes = (ctypes.c_int * 256).in_dll(library, "sizes")
        self.launched = ctypes.c_int.in_dll(library, "launched")
        self.refuses = ctypes.c_int.in_dll(library, "refuses")  # so many launches to come
        self.overlaps = ctypes.c_int.in_dll(library, "overlaps")  # launches that may begin before the last one ends
        self.seen = ((ctypes.c_uint64 * (3 + 16 * 256)) * 32).in_dll(library, "seen")

    def expect(self, compiled: Any) -> None:
        """The next launch is of this kernel."""
        sizes = sizes_of(compiled.src.signature.values())
        self.sizes[: len(sizes) + 1] = [*sizes, 0]

    def count(self, call: Callable[[], object], refused: int) -> int:
        """Launches of a call, when the driver refuses the first few."""
        self.launched.value, self.refuses.value = 0, refused
        call()
        return self.launched.value

    def of(self, call: Callable[[], object], quick: bool) -> list[list[int]]:
        """Parameters of every launch of a call, by the quick path or by Triton's own."""
        from ..kernels.hopper.common import Launches
        from ..kernels.quick import QuickLaunch

        run, run_pass, run_pass_slowly = QuickLaunch.run, Launches.run, Launches.run_slowly

        def watched(launch: Any, *args: Any) -> bool:
            self.expect(launch.compiled)
            return quick and run(launch, *args)

        def one_by_one(launches: Any, where: list[int]) -> bool:
            together = launches._launches
            for binary, one in zip(launches.binaries, together if quick else (), strict=quick):
                self.expect(binary)
                launches._launches = [one]
                assert run_pass(launches, where)
            launches._launches = together
            return quick

        def one_by_one_slowly(launches: Any, jobs: Any) -> None:
            for binary, job in zip(launches.binaries, jobs, strict=True):
                self.expect(binary)
                run_pass_slowly(SimpleNamespace(binaries=[binary]), [job])  # type: ignore[arg-type]

        self.launched.value = 0
        for row in self.seen:
            ctypes.memset(row, 0, ctypes.sizeof(row))
        with (
            mock.patch.object(QuickLaunch, "run", watched),
            mock.patch.multiple(Launches, run=one_by_one, run_slowly=one_by_one_slowly),
        ):
            call()
        self.sizes[0] = 0
        return [list(self.seen[n]) for n in range(self.launched.value)]


@contextmanager
def pretend_sm90() -> Iterator[None]:
    """Inside, CPU tensors count as those of a Hopper GPU, for the host code and for Triton."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    from .. import ahead, dispatch, interface
    from ..kernels import launch
    from ..kernels.hopper import launch_backward, launch_forward
    from ..target import SHARED_MEMORY, Target

    class Driver:
        utils = nvidia.CudaUtils()
        launcher_cls = nvidia.CudaLauncher
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
        allocate_default_profile_scratch = staticmethod(lambda size, alignment, stream: None)

    cuda: Any = SimpleNamespace(type="cuda", index=None)
    target, reason = Target(90, SHARED_MEMORY[90]), launch_forward.problem_reason
    previous = driver._active
    driver.set_active(Driver())
    with ExitStack() as stack:
        for owner, name, value in (
            (dispatch, "triton_ready", lambda device, dtype: ""),
            (ahead, "target_of", lambda device: target),
            (dispatch, "target_of", lambda device: target),
            (launch, "target_of", lambda device: target),
            (launch_forward, "target_of", lambda device: target),
            (launch_backward, "target_of", lambda device: target),
            (launch_forward, "problem_reason", lambda problem, device: reason(problem, cuda)),
            (interface, "_host_reads", lambda x, validate: validate),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        try:
            yield
        finally:
            driver._active = previous


@contextmanager
def same_memory() -> Iterator[Callable[[], None]]:
    """Inside, the n-th new tensor is the same one after each call of the function that this yields."""
    from .. import ops

    pool: list[torch.Tensor] = []
    used = 0

    def pooled(make: Any) -> Any:
        def new(*args: Any, **options: Any) -> torch.Tensor:
            nonlocal used
            used += 1
            if used > len(pool):
                pool.append(make(*args, **options))
            return pool[used - 1]

        return new

    def again() -> None:
        nonlocal used
        used = 0

    with ExitStack() as stack:
        for owner, name in (
            (torch.Tensor, "new_empty"), (torch, "empty_like"),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, pooled(getattr(owner, name))))
        planned = [(key, plan) for key, plan in ops._plans.items() if type(plan) is not ops.Likely]
        for _, (fill, *_makers) in planned:
            for part in {fill, getattr(fill, "delta", fill)}:
                if hasattr(part, "new_memory"):
                    stack.enter_context(mock.patch.object(part, "new_memory", pooled(part.new_memory)))
        plans = {key: (fill, *map(pooled, makers)) for key, (fill, *makers) in planned}
        stack.enter_context(mock.patch.object(ops, "_plans", plans))
        yield again


def calls_of(call: Callable[[], object]) -> int:
    """Calls of Python functions of this package, and of built-ins from there, that ``call`` makes."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        count += event in ("call", "c_call") and name.startswith(here) and name != __file__

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def microseconds(call: Callable[[], object], calls: int = 40, rounds: int = 60) -> float:
    """Of this thread's processor time per call, the third best of many rounds: others use this machine too."""
    samples = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            call()
        samples.append((time.thread_time() - start) / calls * 1e6)
    return round(sorted(samples)[2], 1)


def cold_microseconds(call: Callable[[], object], calls: int = 1000) -> float:
    """Of one call after a megabyte or two has passed through the caches: the tenth best of a hundred."""
    other_work = torch.zeros(1 << 19)
    samples = []
    for _ in range(calls):
        other_work.add_(1)
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1000)
    return round(sorted(samples)[calls // 10], 1)


def same(call: Callable[[], object], recorder: Recorder, launches: int = 4) -> bool:
    """Do repeated calls of both passes, at new addresses and again there, hand over what Triton's own path does?"""
    with same_memory() as again:
        seen = [recorder.of(call, quick) for quick in (True, True, False) if again() is None]
    return len(seen[0]) == launches and seen[0] == seen[1] == seen[2]


def undisturbed(call: Callable[[], object], other_call: Callable[[], object]) -> bool:
    """Does the thread that is launching, which lets others run, keep its parameters when another one launches the same?"""
    from ..kernels.direct import driver_launch
    from ..kernels.hopper import common

    real, other, kept = driver_launch(), threading.Thread(target=other_call), []

    def launch(*arguments: Any) -> int:
        if other.ident is None:
            before = [ctypes.c_uint64.from_address(where).value for where in arguments[2]]
            other.start()
            other.join(0.2)
            kept.append(before == [ctypes.c_uint64.from_address(where).value for where in arguments[2]])
        return int(real(*arguments))

    with mock.patch.object(common, "driver_launch", lambda: launch):
        call()
        other.join()
    return kept == [True]


def packed_is_same(impl: str, heads: tuple[int, int], recorder: Recorder) -> bool:
    """The same of packed sequences with ALiBi and a sink: optional tensors, one of them inside a tuple of arguments."""
    from .. import flash_attn_varlen

    calls = []
    do = torch.zeros(70, heads[0], 64, dtype=torch.bfloat16)
    for _ in range(2):  # compiled with other tensors than it is repeated with
        q, k, v = (
            torch.zeros(70, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (heads[0], heads[1], heads[1])
        )
        cu = torch.tensor([0, 30, 70], dtype=torch.int32)
        slopes, sink = torch.zeros(heads[0]), torch.zeros(heads[0], requires_grad=True)

        def call(leaves: Any = (q, k, v, sink), cu: Any = cu, slopes: Any = slopes) -> Any:
            q, k, v, sink = leaves
            out = flash_attn_varlen(q, k, v, cu, cu, 40, 40, alibi_slopes=slopes, learnable_sink=sink, impl=impl)
            return torch.autograd.grad(out, leaves, do)

        calls.append(call)
    calls[0]()
    return same(calls[1], recorder, 6)


def pieces_are_same(recorder: Recorder) -> bool:
    """The same of a Hopper backward in several launches of one kernel, all but the first of which overlap."""
    from .. import flash_attn
    from ..kernels.hopper import launch_backward
    from ..target import SHARED_MEMORY, Target

    q, k, v, do = (torch.zeros(6, 2, 64, 128, dtype=torch.bfloat16, requires_grad=n < 3) for n in range(4))

    def call(q: Any = q, k: Any = k, v: Any = v) -> Any:
        return torch.autograd.grad(flash_attn(q, k, v, impl="hopper"), (q, k, v), do)

    with ExitStack() as stack:
        for name, value in (
            ("target_of", lambda device: Target(90, SHARED_MEMORY[90], multiprocessors=1)),
            ("CONVERT_STEPS", {128: 0}), ("PIECE_WAVES", 4),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(launch_backward, name, value))
        call(q, q, q)
        recorder.overlaps.value = 0
        return same(call, recorder, 6) and recorder.overlaps.value == 2 * 2  # by two quick calls, three pieces each


def examine(impl: str, recorder: Recorder, timed: bool) -> dict[str, Any]:
    """The figures of the module's docstring for one implementation."""
    from .. import dispatch, flash_attn, flash_attn_varlen

    x, *others = (torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
    do = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)

    def forward(q: Any = others[0], k: Any = others[1], v: Any = others[2]) -> Any:
        return flash_attn(q, k, v, causal=True, impl=impl)

    def both(*leaves: Any) -> Any:
        return torch.autograd.grad(forward(*leaves), leaves, do)

    start = time.perf_counter()
    out = forward(x, x, x)  # compiles
    middle = time.perf_counter()
    torch.autograd.grad(out, x, do)
    first = middle - start, time.perf_counter() - middle
    with mock.patch.object(dispatch, "forward_plan") as one, mock.patch.object(dispatch, "backward_plan") as two:
        for _ in range(20):
            both(*(y.detach().clone().requires_grad_() for y in others))
        replanned = one.call_count + two.call_count
    calls = {}
    out = forward()
    backward = lambda: torch.autograd.grad(out, others, do, retain_graph=True)
    q, k, v = [y.detach().flatten(0, 1).transpose(0, 1).contiguous() for y in others]
    cu = torch.tensor([0, 30, 64], dtype=torch.int32)
    packed_forward = lambda: flash_attn_varlen(q, k, v, cu, cu, 34, 34, causal=True, impl=impl)
    for name, call in (("forward", forward), ("backward", backward), ("packed forward", packed_forward)):
        with same_memory() as again:
            for _ in range(2):  # from now on every address is known, and the likely plan
                call()
                again()
            calls[name] = calls_of(call)
    packed = (
        [(2, 2)] if impl == "triton" else [(2, 2), (16, 1)]
    )  # 16: thread blocks of the Hopper backward share a group
    report: dict[str, Any] = {
        "same": same(lambda: both(*others), recorder)
        and all(packed_is_same(impl, heads, recorder) for heads in packed)
        and (impl == "triton" or pieces_are_same(recorder)),
        "refused": recorder.count(lambda: both(*others), 1) if impl == "hopper" else 4,
        "undisturbed": impl == "triton" or undisturbed(forward, lambda: forward(x, x, x)),
        "replanned": replanned,
        "calls": calls,
    }
    if timed:
        us: dict[str, tuple[float, float]] = {}
        for name, way, gradients in (
            ("forward", forward, False),
            ("forward with gradients", forward, True),
            ("forward and backward", lambda: both(*others), True),
        ):
            with torch.set_grad_enabled(gradients):
                us[name] = microseconds(way), cold_microseconds(way)
        report["us"], report["first"] = us, [round(s, 2) for s in first]
    return report


def main(argv: list[str]) -> None:
    """Print the report."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(build_driver(folder))
        with pretend_sm90():
            print(
                json.dumps({impl: examine(impl, recorder, "--time" in argv) for impl in ("triton", "hopper")}, indent=1)
            )


if __name__ == "__main__":
    main(sys.argv[1:])
