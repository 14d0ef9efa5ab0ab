"""What the first call needs, done earlier or side by side: a backward's kernels and Triton's hash of itself.

The backward's kernels are compiled beside the forward's, so that the first call takes little longer than the slower of the
two. Threads compile while the forward does, and have ended before the forward returns: nothing is left behind that could meet
a fork, a captured graph, or the end of the process. They touch no tensor's memory. The backward looks its kernels up like
any other, finds them or compiles them, and so is the one that raises where that fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._jit import HAS_TRITON, INTERPRETED
from .problem import Problem
from .target import target_of

NAME = "flashtri-backward"  # of the threads
KERNELS = 4  # of a backward, at most; packed tensors have a fifth, a small one
#: Kinds of calls whose backward a thread has been at.
_tried: set[tuple[Any, ...]] = set()


def _hash_triton() -> None:
    """Triton's hash of itself, 0.3 s for 400 MB, is in the name of every kernel on disk. It is kept for the process."""
    from triton.runtime import cache

    with suppress(Exception):  # whoever compiles will hear of it
        getattr(cache, "triton_key", lambda: None)()


#: Hashes while torch makes the device's context, both without Python's lock. A fork meets the driver's threads by then anyway;
#: this one holds nothing that a child would wait for.
_hashing = Thread(target=_hash_triton, name="flashtri-hash")


def _start_hashing() -> None:
    with suppress(RuntimeError):  # the process may have no more threads
        _hashing.start()


if HAS_TRITON and not INTERPRETED:
    getattr(torch.cuda, "_lazy_call", lambda call: None)(_start_hashing)  # when CUDA is initialised, or now


def wait_for_hash() -> None:
    """Let the thread that hashes Triton end, if there is one: two of them would take twice as long."""
    if _hashing.ident is not None:
        _hashing.join()


def due(problem: Problem, device: torch.device, *others: Any) -> bool:
    """Is this the first call of its kind, and on a GPU, and not part of a graph that is being captured?

    A kind is everything but numbers: of lengths and windows the powers of two below matter, of the others the sign. A new
    number of a known kind seldom needs new kernels, and planning a backward that does not takes milliseconds.
    """
    if target_of(device).interpreted or torch.cuda.is_current_stream_capturing():
        return False
    kind = (
        replace(
            problem,
            batch=0,
            total_q=0,
            total_k=0,
            seqlen_q=problem.seqlen_q.bit_length(),
            seqlen_k=problem.seqlen_k.bit_length(),
            window_left=(problem.window_left + 1).bit_length(),  # -1 is none
            window_right=(problem.window_right + 1).bit_length(),
            softmax_scale=float(problem.softmax_scale > 0),
            softcap=float(problem.softcap > 0),
            dropout_p=float(problem.dropout_p > 0),
        ),
        device,
        *others,
    )
    if kind in _tried:
        return False
    _tried.add(kind)
    return True


def outline(x: Tensor) -> Tensor:
    """A tensor of x's shape, strides and dtype without memory: enough to compile for."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@contextmanager
def beside(compilation: Callable[[], object], device: int) -> Iterator[None]:
    """Run ``compilation`` in a thread while the body runs, and until both have ended; what it raises is dropped.

    Each kernel that it asks Triton for is compiled in a thread of its own.
    """
    from triton import AsyncCompileMode
    from triton.runtime import driver

    driver.active.get_current_device()  # loads Triton's driver module, which two threads would do twice
    _hash_triton()  # likewise; its hundreds of steps would each wait for the other thread

    def built(compile_one: Callable[[], Any]) -> Any:
        binary = compile_one()
        driver.active.launcher_cls(binary.src, binary.metadata)  # which some Tritons compile too, and keep on disk
        return binary

    def run() -> None:
        with (
            suppress(Exception),
            torch.cuda.device(device),
            ThreadPoolExecutor(KERNELS, NAME) as pool,
            AsyncCompileMode(
                SimpleNamespace(submit=lambda compile_one: pool.submit(built, compile_one)), ignore_errors=True
            ),
        ):
            compilation()

    thread = Thread(target=run, name=NAME)
    with warnings.catch_warnings():  # Triton does this per node of the source; two threads restore each other's filters
        with suppress(RuntimeError):  # the process may have no more threads
            thread.start()
        try:
            yield
        finally:
            if thread.ident is not None:
                thread.join()
