"""What the Hopper kernels share: names that differ between Triton versions, named barriers, descriptors, a quick launch.

Gluon is experimental and renames things with every minor version. The aliases below are all that differs between 3.6
and 3.9 for these kernels; the ahead-of-time tests compile every shipped configuration on each version.
"""

import inspect
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

FIRST_NAMED_BARRIER = gl.constexpr(8)  # hardware has 16; Triton uses 0, 1 and one per partition from 2 on

_GLUON_DTYPE = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


# ------------------------------------------------------------------------------------------------- inside a kernel
@gluon.jit
def named_barrier_wait(barrier, MINE: gl.constexpr, THREADS: gl.constexpr):
    """Block the calling partition (``MINE`` threads) until ``THREADS`` threads have reached named barrier ``barrier``.

    Named barriers have no Gluon API. They cost one instruction, where an mbarrier arrival makes the compiler add a
    barrier of the whole partition first.
    """
    lane = gl.arange(0, MINE, layout=gl.BlockedLayout([1], [32], [MINE // 32], [0]))
    gl.inline_asm_elementwise(
        f"bar.sync $1, {THREADS}; mov.b32 $0, $1;", "=r,r", [lane * 0 + barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def named_barrier_arrive(barrier, MINE: gl.constexpr, THREADS: gl.constexpr):
    """Count the calling partition in at named barrier ``barrier`` without waiting for the others."""
    lane = gl.arange(0, MINE, layout=gl.BlockedLayout([1], [32], [MINE // 32], [0]))
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {THREADS}; mov.b32 $0, $1;", "=r,r", [lane * 0 + barrier], dtype=gl.int32, is_pure=False, pack=1
    )


# ------------------------------------------------------------------------------------------------------ on the host
def descriptor_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Swizzled shared-memory layout that TMA writes and wgmma reads, for a tile of shape ``block``."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_DTYPE[dtype])


def descriptor(tensor: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """A host-side TMA descriptor over ``tensor``'s own strides. Slow to make; used once per compiled kernel.

    Axes of size 1 get a stride that TMA accepts, whatever the tensor says: it is never multiplied by anything but 0.
    """
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tma_strides(tensor)), list(block), descriptor_layout(block, tensor.dtype)
    )


def tma_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in elements, with those of axes of size 1 replaced by 8 elements = 16 bytes (1 on the last axis)."""
    last = tensor.dim() - 1
    return tuple(
        (1 if axis == last else 8) if size == 1 else stride
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    )


def tma_reason(name: str, tensor: torch.Tensor) -> str:
    """Why TMA cannot read ``tensor``; empty when it can."""
    if tensor.dtype not in _GLUON_DTYPE:
        return f"{name} is {tensor.dtype}; the Hopper kernels take float16 and bfloat16"
    if tensor.numel() == 0:
        return f"{name} is empty"
    if tensor.data_ptr() % 16:
        return f"{name} does not start at a multiple of 16 bytes"
    strides = tma_strides(tensor)
    if strides[-1] != 1:
        return f"{name} has stride {strides[-1]} along the head dimension, TMA needs 1"
    if any(stride % 8 or stride < 0 for stride in strides[:-1]):
        return f"{name} has strides {tuple(tensor.stride())}, TMA needs multiples of 16 bytes (8 elements)"
    if any(stride >= 1 << 39 for stride in strides):
        return f"{name} has a stride of 2^40 bytes or more"
    return ""


class Constants:
    """A frozen dataclass as one compile-time kernel parameter: ``C.block_m`` inside a kernel is a ``gl.constexpr``."""

    def __init__(self, config: Any) -> None:
        self._config = config
        for field in fields(config):
            setattr(self, field.name, gl.constexpr(getattr(config, field.name)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._config == other._config

    def __hash__(self) -> int:
        return hash(self._config)

    def __repr__(self) -> str:  # part of the compiled kernel's cache key on disk
        return repr(self._config)


class DescriptorArg(NamedTuple):
    """One descriptor parameter of a kernel: the tensor it reads and the first column of its box."""

    tensor: torch.Tensor
    column: int


@lru_cache(maxsize=4096)
def _encode(address: int, shape: tuple[int, ...], strides: tuple[int, ...], swizzle: int, elem_size: int, elem_type: int,
            box: tuple[int, ...]) -> tuple[Any, ...]:  # fmt: skip
    """The launcher's view of a descriptor: the encoded CUtensorMap, then shape and strides. A pure function, so cached."""
    utils = driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
    return (fill(address, swizzle, elem_size, _HOST_TYPE.get(elem_type, elem_type), list(box), list(shape), list(strides), 0),
            *shape, *strides)  # fmt: skip


_HOST_TYPE = {8: 10, 9: 8, 10: 9}  # the float types are numbered differently on the device and in the driver's API
