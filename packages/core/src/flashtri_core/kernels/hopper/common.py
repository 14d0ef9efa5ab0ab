"""What the Hopper kernels share: names that differ between Triton versions, named barriers, descriptors, a quick launch.

Gluon is experimental and renames things with every minor version. The aliases below are all that differs between 3.6
and 3.9 for these kernels; the ahead-of-time tests compile every shipped configuration on each version.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from ..quick import QuickLaunch

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

_SharedMemory = gl.shared_memory_descriptor
reinterpret = _SharedMemory.reinterpret if hasattr(_SharedMemory, "reinterpret") else _SharedMemory._reinterpret

FIRST_NAMED_BARRIER = gl.constexpr(8)  # hardware has 16; Triton uses 0, 1 and one per partition from 2 on

_GLUON_DTYPE = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


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
        f"bar.arrive $1, {THREADS}; mov.b32 $0, $1;",
        "=r,r",
        [lane * 0 + barrier],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


# Written as one, comparison and selection stay together. Apart, ptxas makes all comparisons first, has not the predicate
# registers for that, packs them into the bits of integers and unpacks those again: three times the operations.
_SELECT = "{ .reg .pred p; .reg .s32 x; sub.s32 x, $2, $3; setp.le.u32 p, x, $4; selp.f32 $0, $1, %s, p; }"
OR_ZERO = gl.constexpr(_SELECT % "0f00000000")
OR_MINUS_INFINITY = gl.constexpr(_SELECT % "0fFF800000")
ANY = gl.constexpr(0x7FFFFFFF)  # as width: nothing lies too far


@gluon.jit
def select(x, a, b, width, OTHERWISE: gl.constexpr):
    """The tile x where 0 <= a - b <= width, elsewhere what ``OTHERWISE`` says; a, b and width int32 that broadcast to x."""
    return gl.inline_asm_elementwise(
        OTHERWISE, "=f,f,r,r,r", [x, a, b, width], dtype=gl.float32, is_pure=True, pack=1
    )


BF16_WORD = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
F16_WORD = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
HALVES = gl.constexpr("mov.b32 {$0, $1}, $2;")


@gluon.jit
def in_16_bits(x, dtype: gl.constexpr, LAYOUT: gl.constexpr, WORDS: gl.constexpr):
    """x [M, N] rounded, for :func:`left_operand` in a later step; with ``WORDS``, two neighbours in an int32 [M, N / 2].

    Where one loop hands 16-bit numbers on to another, ptxas swaps the halves of every register at a step's end, and swaps them
    back in front of the product that reads them.
    """
    if WORDS:
        WORD: gl.constexpr = BF16_WORD if dtype == gl.bfloat16 else F16_WORD
        low, high = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
        x = gl.inline_asm_elementwise(WORD, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    else:
        x = gl.convert_layout(x.to(dtype), LAYOUT)
    return x


@gluon.jit
def left_operand(x, dtype: gl.constexpr, LAYOUT: gl.constexpr, WORDS: gl.constexpr):
    """What :func:`in_16_bits` gave, as the left operand of a product."""
    if WORDS:
        low, high = gl.inline_asm_elementwise(
            HALVES, "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        x = gl.convert_layout(gl.join(low, high).reshape([x.shape[0], 2 * x.shape[1]]).to(dtype, bitcast=True), LAYOUT)
    return x


@gluon.jit
def linear_exponents(
    s, lse_log2, start_m, start_n, slope, Nq, Nk, unit_log2, variant, KEYS: gl.constexpr, S_LAYOUT: gl.constexpr
):  # fmt: skip
    """(s + bias) * unit_log2 - lse_log2 for an accumulator s whose bias is linear in the key, as ALiBi's behind the diagonal.

    Axis ``KEYS`` counts keys from start_n, the other one queries from start_m; lse_log2 broadcasts to s. A thread owns rows
    r and r + 8 of an accumulator, and in them columns 8 a + 2 t + b: r and t, in 0..3, are its own, a and b known to the
    compiler. The smallest distance that a thread has is added to the LSE, what a score has beyond that to the score, as a
    literal: a multiply-add per score, and one per query. Added with one sign, neither shows what the other rounds away.
    A negative slope makes the scores of far keys large, and what forward and backward round differently then is lost from
    the gradients: tiles of such heads mask every block instead, and add the bias as the forward did.
    """
    row = gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, S_LAYOUT))[:, None]
    col = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, S_LAYOUT))[None, :]
    if KEYS == 0:
        LAST: gl.constexpr = 8
        s = variant.alibi(s, slope, col & -7, (row & 8) - LAST, 0, 0)
        i, j = col & 6, row & -9
    else:
        LAST: gl.constexpr = s.shape[1] - 7
        s = variant.alibi(s, slope, row & 8, (col & -7) - LAST, 0, 0)
        i, j = row & -9, col & 6
    return s * unit_log2 - variant.alibi(lse_log2, -slope * unit_log2, start_m + i, start_n + LAST + j, Nq, Nk)


# ------------------------------------------------------------------------------------------------------ on the host
def descriptor_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Swizzled shared-memory layout that TMA writes and wgmma reads, for a tile of shape ``block``."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_DTYPE[dtype])


def tma_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in elements, with those of axes of size 1 replaced by 8 elements = 16 bytes (1 on the last axis)."""
    last = tensor.dim() - 1
    return tuple(
        (1 if axis == last else 8) if size == 1 else stride
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    )


def tma_reason(name: str, tensor: torch.Tensor) -> str:
    """Why TMA cannot read ``tensor``; empty when it can."""
    if tensor.dtype not in (torch.float16, torch.bfloat16):
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


REMEMBERED = 1024  # encoded descriptors per argument: allocators hand out the same addresses again and again
_HOST_TYPE = {8: 10, 9: 8, 10: 9}  # the float types are numbered differently on the device and in the driver's API


def _encoder(shape: tuple[int, ...], strides: tuple[int, ...], meta: dict[str, Any]) -> Any:
    """A function from an address to the encoded descriptor of a tensor there."""
    utils = driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
    kind = _HOST_TYPE.get(meta["elem_type"], meta["elem_type"])
    swizzle, size, box = meta["swizzle"], meta["elem_size"], tuple(meta["block_size"])
    return lru_cache(maxsize=REMEMBERED)(lambda address: fill(address, swizzle, size, kind, box, shape, strides, 0))


class Block(NamedTuple):
    """A descriptor argument: a tensor with axes (batch, head, row, column) and the tile that one TMA copy moves."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def for_triton(self) -> TensorDescriptor:
        """What Triton's own launch path takes; slow to make."""
        layout = descriptor_layout(self.box, self.tensor.dtype)
        return TensorDescriptor(self.tensor, list(self.shape), list(self.strides), list(self.box), layout)


def four_axes(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and TMA strides of a dense (B, H, N, D) tensor, or of a packed (total, H, D) one as a single batch."""
    strides = tma_strides(x)
    if x.dim() == 3:
        return (1, x.shape[1], x.shape[0], x.shape[2]), (8, strides[1], strides[0], 1)
    return tuple(x.shape), strides


class Launch(QuickLaunch):
    """A compiled Gluon kernel and its arguments, with holes where the addresses of ``tensors`` go.

    Triton's argument binder and the encoding of descriptors take about 90 us per call, several times what a short kernel
    runs for. Here a call fills in addresses, and descriptors encoded before are found by address.

    Args:
        compiled: What Triton's own launch of the kernel returned.
        args: The arguments of that launch, blocks as :class:`Block`.
        tensors: Where the arguments' tensors come from: the same objects, each at one place, or None.
    """

    def __init__(self, compiled: Any, args: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...]) -> None:
        super().__init__(compiled)
        place = {id(x): n for n, x in enumerate(tensors) if x is not None}
        metas = iter(compiled.metadata.tensordesc_meta or ())
        self._flat: list[Any] = []
        self._pointers: list[tuple[int, int]] = []
        self._blocks: list[tuple[int, int, Any]] = []
        self._nested: list[tuple[int, Any]] = []
        for arg in args:
            slot = len(self._flat)
            self._flat.append(None)
            if type(arg) is Block:
                self._blocks.append((slot, place[id(arg.tensor)], _encoder(arg.shape, arg.strides, next(metas))))
                self._flat += [*arg.shape, *arg.strides]
            elif isinstance(arg, torch.Tensor):
                self._pointers.append((slot, place[id(arg)]))
            else:
                self._flat[slot], holes = _with_holes(arg, place)
                if holes:
                    self._nested.append((slot, self._flat[slot]))

    def launch(self, grid: int, device: int, where: Sequence[int]) -> bool:
        """Run with the tensors at these addresses, in the order of ``tensors``; False as :meth:`run`."""
        flat = self._flat.copy()
        for slot, n in self._pointers:
            flat[slot] = where[n]
        for slot, n, encode in self._blocks:
            flat[slot] = encode(where[n])
        for slot, arg in self._nested:
            flat[slot] = _filled(arg, where)
        return self.run(grid, device, flat)

    def run_slowly(self, grid: int, args: tuple[Any, ...]) -> None:
        """The same through Triton's own launcher."""
        self.compiled[(grid, 1, 1)](*for_triton(args))


class _Hole(NamedTuple):
    """Stands for the address of the tensor at ``place``."""

    place: int


def _with_holes(arg: Any, place: dict[int, int]) -> tuple[Any, bool]:
    """A tuple with its tensors replaced by holes, and whether there were any; anything else as it is."""
    if isinstance(arg, torch.Tensor):
        return _Hole(place[id(arg)]), True
    if not isinstance(arg, tuple):
        return arg, False
    parts = [_with_holes(x, place) for x in arg]
    return tuple(x for x, _ in parts), any(holes for _, holes in parts)


def _filled(arg: Any, where: Sequence[int]) -> Any:
    if type(arg) is _Hole:
        return where[arg.place]
    return tuple([_filled(x, where) for x in arg]) if isinstance(arg, tuple) else arg


def for_triton(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with every :class:`Block` as the descriptor object that Triton knows."""
    return tuple(arg.for_triton() if type(arg) is Block else arg for arg in args)
