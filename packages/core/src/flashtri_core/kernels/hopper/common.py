"""What the Hopper kernels share: names that differ between Triton versions, named barriers, descriptors, launches.

Gluon is experimental and renames things with every minor version. The aliases below are all that differs between 3.6
and 3.9 for these kernels; the ahead-of-time tests compile every shipped configuration on each version.
"""

from collections.abc import Sequence
from dataclasses import fields
from threading import Lock
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from ..direct import DriverLaunch, driver_launch, in_signature
from .backward_ends import is_gentle

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


# A vote that always passes. No shuffle: those wait for shared memory, which a wgmma under way keeps busy.
IF_ANY = gl.constexpr("{ .reg .pred p; setp.ge.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, $1, 0, p; }")


@gluon.jit
def not_sooner(x):
    """The int32 tile x, of which no warp has negative numbers only.

    What is computed from it stays behind this place: ptxas neither moves a vote nor knows what comes out.
    """
    return gl.inline_asm_elementwise(IF_ANY, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def inside_loop(x):
    """The float32 scalar x. Its products with literals are computed anew in each step: there are no registers to keep them."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def biased_lse(
    lse_log2, i, j, block_m, start_n, slope, Nq, Nk, unit_log2, variant, KEYS: gl.constexpr, MASK: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """What to subtract from :func:`biased_scores`; ``KEYS`` is the axis of the keys from start_n on.

    With ``C.linear_bias`` it is linear in the distance, as ALiBi's is behind the diagonal. A thread has columns 8 a + 2 t + b
    of an accumulator, with t in 0..3 its own, a and b known to the compiler. Where a row's number in its block is written so,
    8 a + b times the slope is in its LSE already, unless the slope is not gentle (:mod:`.backward_ends`); every block of such a
    head has a mask. Blocks begin at row ``block_m``. Where keys are rows of the accumulator, a thread has two, and what is left
    goes into the LSE as well: an addition per score, before there is a score. Where they are columns, their own 8 a + b times
    the slope goes into the score.
    """
    if C.linear_bias:
        slope = inside_loop(slope) * unit_log2
        if MASK:
            taken = gl.where(is_gentle(slope, 1.0), slope, 0.0)
            lse_log2 = variant.alibi(lse_log2, taken, (i - block_m) & -7, 0, 0, 0)
        else:
            if KEYS == 1:
                j += j.shape[1] - 7 - ((j - start_n) & -7)
            elif C.early_statistics:  # which may not be there yet, and the next product shall not wait for them
                j = not_sooner(j)
            lse_log2 = variant.alibi(lse_log2, -slope, block_m + (i & 6), j, Nq, Nk)
    return lse_log2


@gluon.jit
def biased_scores(s, i, j, start_n, slope, Nq, Nk, variant, KEYS: gl.constexpr, MASK: gl.constexpr, C: gl.constexpr):
    """Scores with the bias, as far as it is not in :func:`biased_lse`."""
    if MASK or not C.linear_bias:
        s = variant.alibi(s, slope, i, j, Nq, Nk)
    elif KEYS == 1:
        s = variant.alibi(s, inside_loop(slope), 0, ((j - start_n) & -7) - (j.shape[1] - 7), 0, 0)
    return s


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


_HOST_TYPE = {8: 10, 9: 8, 10: 9}  # the float types are numbered differently on the device and in the driver's API


class Encoded(dict[int, int]):
    """Address of a tensor -> that of its encoded descriptor, which lives until it is forgotten, in some later look-up.

    Allocators hand out the same addresses again and again.
    """

    REMEMBERED, BYTES = 1024, 128

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], meta: dict[str, Any]) -> None:
        utils = driver.active.utils
        self.fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
        kind = _HOST_TYPE.get(meta["elem_type"], meta["elem_type"])
        self.layout = meta["swizzle"], meta["elem_size"], kind, tuple(meta["block_size"]), shape, strides, 0
        self.kept: list[Any] = []

    def __missing__(self, address: int) -> int:
        if len(self) >= self.REMEMBERED:
            self.clear()
            self.kept.clear()
        self.kept.append(self.fill(address, *self.layout))
        found = self[address] = id(self.kept[-1]) + type(self.kept[-1]).__basicsize__ - self.BYTES  # it ends Triton's object
        return found


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


Job = tuple[Any, int, tuple[Any, ...]]  # (kernel, grid, arguments), blocks as :class:`Block`


class Launches:
    """The kernels of a pass, launched by the driver's library with the addresses of this call's tensors.

    Triton's argument binder and the encoding of descriptors take about 90 us per launch, several times what a short kernel
    runs for. Here parameters lie as the driver takes them; a call writes in its addresses, unless they are those of the call
    before, and descriptors encoded before are found by address. Hooks on Triton's launches (profilers') are not run.

    Args:
        binaries: What Triton's own launches of the first call's ``jobs`` returned.
        jobs: Those launches.
        tensors: The first call's; the same objects as among the arguments, and each once.
        parts: Of the first tensor, further ones among the arguments, with their offsets in bytes.
        device: Index of the GPU.
        overlapping: Numbers of the launches that may begin before the one in front of them has ended.
    """

    def __init__(
        self, binaries: Sequence[Any], jobs: Sequence[Job], tensors: Sequence[torch.Tensor | None], device: int | None,
        parts: Sequence[tuple[torch.Tensor | None, int]] = (), overlapping: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.binaries, self._device, self._stream_of = binaries, device, driver.active.get_current_stream
        self._place = {id(x): n for n, x in enumerate((*tensors, *(x for x, _ in parts)))}
        self._offsets = [offset for _, offset in parts]
        self._lock = Lock()  # the driver's library lets other threads run
        self._where: list[int] = []  # the addresses that are written in
        self._stream = 0
        self._words: list[tuple[Any, int, int]] = []  # where to write which of them
        self._descriptors: list[tuple[Any, int, int, Encoded]] = []  # where to write whose descriptor's
        self._encoded: dict[Any, Encoded] = {}  # of a tensor, for every launch that has it in the same layout
        pairs = zip(binaries, jobs, strict=True) if all(map(DriverLaunch.takes, binaries)) else ()
        self._launches = [self._laid_out(binary, grid, arguments) for binary, (_, grid, arguments) in pairs]
        if self._launches:
            for n in overlapping:
                self._launches[n].overlap()

    def _laid_out(self, binary: Any, grid: int, arguments: tuple[Any, ...]) -> DriverLaunch:
        metas = iter(binary.metadata.tensordesc_meta or ())
        numbers: list[float] = []
        words, descriptors = [], []
        for x in in_signature(binary.src.signature.values(), arguments):
            if type(x) is Block:
                place, meta = self._place[id(x.tensor)], next(metas)
                layout = place, x.shape, x.strides, repr(meta)
                found = self._encoded.setdefault(layout, Encoded(x.shape, x.strides, meta))
                descriptors.append((len(numbers), place, found))
                numbers += 0, *x.shape, *x.strides
            elif isinstance(x, torch.Tensor):
                words.append((len(numbers), self._place[id(x)]))
                numbers.append(0)
            else:
                numbers.append(x)
        launch = DriverLaunch(binary, grid, numbers)
        self._words += [(launch.words, *word) for word in words]
        self._descriptors += [(launch.pointers, *descriptor) for descriptor in descriptors]
        return launch

    def run(self, where: list[int]) -> bool:
        """Launch with tensors at these addresses on the current stream; False where that is left to Triton."""
        stream, launch_one = self._stream_of(self._device), driver_launch()
        with self._lock:
            if where != self._where or stream != self._stream:
                self._write(where, stream)
            for launch in self._launches:
                if launch_one(*launch.arguments):
                    return False  # Triton's launcher says why, or gives this thread its context
        return bool(self._launches)

    def _write(self, where: list[int], stream: int) -> None:
        self._where = []
        for launch in self._launches:
            launch.config.stream = stream
        addresses = [*where, *[where[0] + offset for offset in self._offsets]]
        for words, n, place in self._words:
            words[n] = addresses[place]
        for pointers, n, place, encoded in self._descriptors:
            pointers[n] = encoded[addresses[place]]
        self._where, self._stream = where, stream

    def run_slowly(self, jobs: Sequence[Job]) -> None:
        """The same through Triton's own launcher."""
        for binary, (_kernel, grid, arguments) in zip(self.binaries, jobs, strict=True):
            binary[(grid, 1, 1)](*for_triton(arguments))


def for_triton(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with every :class:`Block` as the descriptor object that Triton knows."""
    return tuple(arg.for_triton() if type(arg) is Block else arg for arg in args)
