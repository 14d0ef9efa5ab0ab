"""What kernel code computes with: tiles and scalars (:class:`Value`), and global memory (:class:`Pointer`).

A value is a numpy array and Triton's dtype. Layouts do not exist. 16-bit floats are float32 arrays that hold 16-bit
numbers: every operation with a 16-bit result rounds it. Integers are int64 arrays; a result that leaves its dtype's range
is an error, where a GPU would wrap around.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

GARBAGE = -(1 << 31)  # what an integer reads as that nobody wrote


class EmulationError(Exception):
    """A kernel did what a GPU does not define, or what this emulator does not know."""


# ------------------------------------------------------------------------------------------------------------ dtypes
_STORAGE = {  # numpy type in memory; bfloat16 has none and is kept as bits
    torch.float16: (tl.float16, np.float16), torch.bfloat16: (tl.bfloat16, np.uint16),
    torch.float32: (tl.float32, np.float32), torch.int32: (tl.int32, np.int32), torch.int64: (tl.int64, np.int64),
}  # fmt: skip
_RANK = {tl.int1: 0, tl.int8: 1, tl.int16: 1, tl.int32: 2, tl.int64: 3, tl.float16: 4, tl.bfloat16: 4, tl.float32: 5}
_ARRAY = {dtype: np.float32 if rank > 3 else np.int64 if rank else np.bool_ for dtype, rank in _RANK.items()}


def array_type(dtype: Any) -> Any:
    """numpy type that holds values of a Triton dtype here."""
    return _ARRAY[dtype]


def is_float(dtype: Any) -> bool:
    """Whether a Triton dtype is a float; its own method is slow."""
    return _RANK[dtype] > 3


def bytes_of(dtype: Any) -> int:
    """Size of one element in memory."""
    return int(dtype.primitive_bitwidth) // 8


def to_bf16_bits(x: Any) -> Any:
    """float32 -> the 16 bits of bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16).reshape(np.shape(x))


def from_bf16_bits(x: Any) -> Any:
    """The 16 bits of bfloat16 -> float32."""
    return (np.ascontiguousarray(x).astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(np.shape(x))


def to_bits(x: Any, dtype: Any) -> Any:
    """float32 -> the 16 bits of ``dtype``, a 16-bit float."""
    return to_bf16_bits(x) if dtype is tl.bfloat16 else np.asarray(x, np.float16).view(np.uint16)


def from_bits(x: Any, dtype: Any) -> Any:
    """The reverse of :func:`to_bits`."""
    return from_bf16_bits(x) if dtype is tl.bfloat16 else np.asarray(x, np.uint16).view(np.float16).astype(np.float32)


def rounded(x: Any, dtype: Any) -> Any:
    """``x`` as an array that holds only numbers of ``dtype``.

    Raises:
        EmulationError: an integer that does not fit.
    """
    x = np.asarray(x)
    if dtype is tl.float16:
        return x.astype(np.float16).astype(np.float32)
    if dtype is tl.bfloat16:
        return from_bf16_bits(to_bf16_bits(x.astype(np.float32, copy=False)))
    if dtype is tl.int32 and x.size:
        low, high = (x.min(), x.max()) if x.ndim else (x[()], x[()])
        if low < GARBAGE or high >= 1 << 31:
            raise EmulationError(f"int32 overflow: {low} .. {high}")
    return x.astype(array_type(dtype), copy=False)


def _dtype_of(a: Any, b: Any) -> Any:
    """Result dtype of two operands; a Python number adapts to the other one."""
    if not isinstance(b, Value):
        if isinstance(b, bool) or (isinstance(b, int) and a.dtype is not tl.int1):
            return a.dtype if not isinstance(b, int) or abs(b) < 1 << 31 or is_float(a.dtype) else tl.int64
        return a.dtype if is_float(a.dtype) else tl.float32 if isinstance(b, float) else tl.int32
    if _RANK[a.dtype] == 4 and _RANK[b.dtype] == 4 and a.dtype is not b.dtype:
        return tl.float32
    return max(a.dtype, b.dtype, key=lambda dtype: _RANK[dtype])


# ------------------------------------------------------------------------------------------------------------ values
class Value:
    """A tile or a scalar. ``product`` is the wgmma that may still be writing it: reading it then is an error."""

    __slots__ = ("dtype", "product", "raw")

    def __init__(self, raw: Any, dtype: Any, product: Any = None) -> None:
        self.raw, self.dtype, self.product = np.asarray(raw), dtype, product

    @property
    def data(self) -> Any:
        """The numbers.

        Raises:
            EmulationError: a wgmma writes them and has not been waited for.
        """
        if self.product is not None:
            raise EmulationError(f"{self.product} is read before warpgroup_mma_wait returned it")
        return self.raw

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.raw.shape)

    @property
    def type(self) -> Value:
        """Stands for the tile's type, whose ``layout`` kernels hand on."""
        return self

    layout = None

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        """Cast; floats become integers by truncation. ``bitcast`` is for float32 and int32, and from int16: the same bits."""
        if bitcast and self.dtype is tl.int16:
            return Value(from_bits(self.data.astype(np.uint16), dtype), dtype)
        if bitcast:
            source, target = (np.float32, np.int32) if is_float(self.dtype) else (np.int32, np.float32)
            data = np.ascontiguousarray(self.data).astype(source).view(target)
            return Value(data.astype(array_type(dtype)).reshape(self.shape), dtype)
        return Value(rounded(self.data, dtype), dtype)

    def reshape(self, *shape: Any) -> Value:
        """Row-major, as Triton's."""
        sizes = shape[0] if isinstance(shape[0], (list, tuple)) else shape
        return Value(self.data.reshape([int(n) for n in sizes]), self.dtype)

    def permute(self, *order: Any) -> Value:
        axes = order[0] if isinstance(order[0], (list, tuple)) else order
        return Value(self.data.transpose(axes), self.dtype)

    def __getitem__(self, key: Any) -> Value:
        return Value(self.data[key], self.dtype)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data, self.dtype)

    def __invert__(self) -> Value:
        return Value(~self.data, self.dtype)

    __hash__ = None  # type: ignore[assignment]


def lift(x: Any, dtype: Any = None) -> Value:
    """A number as a scalar value: int32 or, if it does not fit, int64; float32."""
    if isinstance(x, Value):
        return x
    if dtype is None:
        dtype = tl.int1 if isinstance(x, bool) else tl.float32
        if isinstance(x, int) and not isinstance(x, bool):
            dtype = tl.int32 if GARBAGE <= x < 1 << 31 else tl.int64
    return Value(np.asarray(x, array_type(dtype)), dtype)


def elementwise(operation: Callable[..., Any], a: Any, b: Any, dtype: Any = None) -> Value:
    """``operation`` on both operands, broadcast; ``dtype`` of the result where the operands do not decide it."""
    common = _dtype_of(a, b) if isinstance(a, Value) else _dtype_of(b, a)
    x, y = (
        operand.data.astype(array_type(common), copy=False) if isinstance(operand, Value) else operand
        for operand in (a, b)
    )
    result = operation(x, y)
    return Value(rounded(result, dtype or common), dtype or common)


def _quotient(x: Any, y: Any) -> Any:
    """Integer division as C has it: towards zero."""
    q = np.floor_divide(np.abs(x), np.abs(y))
    return np.where((np.asarray(x) < 0) != (np.asarray(y) < 0), -q, q)


def _true_divide(a: Any, b: Any) -> Value:
    a, b = lift(a), lift(b)
    return elementwise(np.divide, a, b) if is_float(_dtype_of(a, b)) else a.to(tl.float32) / b.to(tl.float32)


def _method(operation: Callable[..., Any], dtype: Any, swapped: bool) -> Callable[[Value, Any], Any]:
    def method(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return elementwise(operation, other, self, dtype) if swapped else elementwise(operation, self, other, dtype)

    return method


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": _quotient,
    "mod": lambda x, y: x - _quotient(x, y) * y, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "rshift": np.right_shift, "lshift": np.left_shift,
}  # fmt: skip
for _name, _operation in _ARITHMETIC.items():
    setattr(Value, f"__{_name}__", _method(_operation, None, False))
    setattr(Value, f"__r{_name}__", _method(_operation, None, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _method(getattr(operator, _name), tl.int1, False))
setattr(Value, "__truediv__", _true_divide)  # noqa: B010  (beside its siblings)
setattr(Value, "__rtruediv__", lambda self, other: _true_divide(other, self))  # noqa: B010


# ----------------------------------------------------------------------------------------------------- global memory
class Memory:
    """A torch tensor as kernels see it: elements of one dtype, nothing outside; one that is not contiguous with its storage."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, stored = _STORAGE[tensor.dtype]
        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.flat = raw.numpy()[: storage.nbytes() // tensor.itemsize * tensor.itemsize].view(stored)
        self.address, self.first, self.shape = storage.data_ptr(), tensor.storage_offset(), tuple(tensor.shape)
        if tensor.is_contiguous():  # such as a part of a workspace
            self.flat, self.address, self.first = self.flat[self.first :][: tensor.numel()], tensor.data_ptr(), 0

    def decode(self, stored: Any) -> Any:
        """Stored elements as an array of numbers."""
        return from_bf16_bits(stored) if self.dtype is tl.bfloat16 else stored.astype(array_type(self.dtype))

    def encode(self, data: Any) -> Any:
        """The reverse of :meth:`decode`."""
        return to_bf16_bits(data) if self.dtype is tl.bfloat16 else np.asarray(data).astype(self.flat.dtype)

    def check(self, at: Any, what: str) -> None:
        """Raise if one of these elements is not there."""
        if at.size and (at.min() < 0 or at.max() >= self.flat.size):
            raise EmulationError(f"{what} outside a tensor of shape {self.shape}: element {at.min()} or {at.max()}")


class Pointer:
    """Addresses of elements of one :class:`Memory`."""

    __slots__ = ("at", "memory")

    def __init__(self, memory: Memory, at: Any) -> None:
        self.memory, self.at = memory, np.asarray(at, np.int64)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + (offset.data if isinstance(offset, Value) else int(offset)))

    __radd__ = __add__

    @property
    def dtype(self) -> Any:
        """A pointer type: it has ``element_ty``."""
        return tl.pointer_type(self.memory.dtype)

    def to(self, dtype: Any) -> Value:
        """The addresses in bytes, as int64."""
        assert dtype is tl.int64
        return Value(self.memory.address + self.at * bytes_of(self.memory.dtype), tl.int64)


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
    """``tl.load``: a masked element without ``other`` is garbage."""
    memory, at = pointer.memory, pointer.at
    if mask is None:
        memory.check(at, "load")
        return Value(memory.decode(memory.flat[at]), memory.dtype)
    keep = np.broadcast_to(lift(mask).data, np.broadcast_shapes(at.shape, lift(mask).shape))
    at = np.broadcast_to(at, keep.shape)
    memory.check(at[keep], "load")
    if other is None:
        other = float("nan") if is_float(memory.dtype) else GARBAGE
    out = np.array(np.broadcast_to(lift(other).data, keep.shape), array_type(memory.dtype))
    out[keep] = memory.decode(memory.flat[at[keep]])
    return Value(out, memory.dtype)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    """``tl.store``; the value is cast to the pointer's dtype."""
    memory = pointer.memory
    data = lift(value).to(memory.dtype).data
    keep = np.asarray(True) if mask is None else lift(mask).data
    at, data, keep = np.broadcast_arrays(pointer.at, data, keep)
    memory.check(at[keep], "store")
    memory.flat[at[keep]] = memory.encode(data[keep])


def atomic_add(pointer: Pointer, value: Any) -> Value:
    """``tl.atomic_add`` of one element: what was there before."""
    before = load(pointer)
    store(pointer, before + value)
    return before
