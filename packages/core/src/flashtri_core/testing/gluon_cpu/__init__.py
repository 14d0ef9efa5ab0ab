"""The Hopper kernels on CPU tensors: their own source, executed with Python objects in place of Triton's language.

Triton's interpreter does not know Gluon. Inside :func:`emulate`, ``impl="hopper"`` takes CPU tensors and launches run
here, so that what the kernels compute, which addresses they touch and whether their barriers hold can be tested anywhere::

    with gluon_cpu.emulate(seed=3):
        out = flash_attn(q, k, v, impl="hopper")

Modelled: every value in its dtype; TMA boxes with zeros past the end; mbarriers with counts, bytes and phases, named
barriers; the order of partitions and thread blocks, drawn from the seed; asynchronous TMA and wgmma (:mod:`.machine`
says what is an error); the column panels of shared-memory tiles; bounds of global and shared memory; int32 overflow; the
inline assembly that the kernels contain.

Not modelled: speed, registers, bank conflicts, the layouts of tiles in registers, the memory model between partitions
beyond barriers and fences, denormals, and the hardware's own exp2, tanh and summation order.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ... import dispatch, ops
from ...kernels import launch_tail, quick
from ...kernels.hopper import backward_split, backward_wide, launch_backward, launch_forward
from ...target import SHARED_MEMORY, Target
from ..aot import StubDriver
from .assembly import MEMORIES
from .language import Edits, Translator
from .machine import Machine
from .values import EmulationError


class Emulator:
    """Runs launches; stands for Triton's compiler as well: a compiled kernel is the kernel."""

    def __init__(self, seed: int, resident: int, edits: Edits) -> None:
        self.seed, self.resident, self.translator = seed, resident, Translator(edits)
        self.launches = 0

    def run(self, jit: Any, grid: int, args: tuple[Any, ...], warps: int = 4) -> None:
        """Execute ``grid`` programs of a jit function."""
        function = self.translator.function(jit)
        MEMORIES.clear()
        given = [
            self.translator.argument(x, parameter.is_constexpr) for x, parameter in zip(args, jit.params, strict=True)
        ]
        self.launches += 1
        Machine((self.seed, self.launches), grid, self.resident, lambda: function(*given), warps).run()
        MEMORIES.clear()


class Kernel:
    """Stands where a launcher's module has a kernel, and for its compiled form."""

    def __init__(self, emulator: Emulator, jit: Any) -> None:
        self.emulator, self.jit = emulator, jit
        self.metadata = types.SimpleNamespace(tensordesc_meta=(None,))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int = 4, maxnreg: int | None = None) -> Kernel:
            self.emulator.run(self.jit, grid[0], args, num_warps)
            return self

        return launch


class Launches:
    """Stands for the launchers' quick path, which there is none of: they take Triton's own."""

    def __init__(self, binaries: Sequence[Kernel], *arguments: Any) -> None:
        self.binaries = binaries

    def run(self, where: list[int]) -> bool:
        return False

    def run_slowly(self, jobs: Any) -> None:
        for binary, (_kernel, grid, arguments) in zip(self.binaries, jobs, strict=True):
            binary[(grid,)](*arguments)


@contextmanager
def emulate(
    seed: int = 0, multiprocessors: int = 3, resident: int = 3, edits: Edits | None = None
) -> Iterator[Emulator]:
    """Inside, CPU tensors run on the Hopper kernels with ``impl="hopper"``.

    Args:
        seed: Chooses the interleaving.
        multiprocessors: What the host code is told that the GPU has, and so the grid of persistent kernels.
        resident: Thread blocks that run side by side.
        edits: "module.function" -> (text, what stands there instead): a fault to inject.

    Yields:
        The emulator, which counts its launches.
    """
    emulator = Emulator(seed, resident, edits or {})
    target = Target(90, SHARED_MEMORY[90], multiprocessors=multiprocessors)
    reason: Any = launch_forward.problem_reason
    replaced: list[tuple[Any, str, Any]] = [
        (dispatch, "triton_ready", lambda device, dtype: ""),
        (dispatch, "target_of", lambda device: target),
        (launch_forward, "target_of", lambda device: target),
        (launch_backward, "target_of", lambda device: target),
        (launch_forward, "problem_reason", lambda p, device: reason(p, types.SimpleNamespace(type="cuda", index=0))),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (driver, "_active", StubDriver(target)),
    ]
    for module in (launch_forward, launch_backward):
        replaced.append((module, "Launches", Launches))
        replaced += [(module, n, Kernel(emulator, x)) for n, x in vars(module).items() if isinstance(x, JITFunction)]
    for module, name in (
        (backward_split, "attn_bwd_dq_hopper"), (backward_wide, "attn_bwd_wide_hopper"), (launch_tail, "attn_tail_kernel")
    ):  # fmt: skip
        replaced.append((module, name, Kernel(emulator, getattr(module, name))))
    replaced.append((quick, "QuickLaunch", lambda compiled: None))
    caches: list[dict[Any, Any]] = [ops._plans, launch_forward._counters]
    with ExitStack() as stack:
        for cache in caches:
            stack.enter_context(mock.patch.dict(cache, clear=True))
        for place, name, value in replaced:
            stack.enter_context(mock.patch.object(place, name, value))
        yield emulator


__all__ = ["EmulationError", "Emulator", "emulate"]
