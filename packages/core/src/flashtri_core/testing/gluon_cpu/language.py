"""What stands behind ``gl``, ``tl``, ``tma``, ``mbarrier`` and the other names that kernel code calls.

:func:`python_function` turns a jit function into a plain one with these names in place of Triton's, and so all it calls.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.jit import JITFunction

from ...kernels.hopper import backward, common, forward
from . import assembly, values
from .machine import (
    Barrier,
    Buffer,
    Machine,
    Product,
    Shared,
    Steps,
    call,
    element_numbers,
    forget,
    pause,
)  # fmt: skip
from .values import EmulationError, Memory, Pointer, Value, array_type, bytes_of, elementwise, lift, rounded

_common: Any = common  # Any: these modules' imports from Triton are looked up in them too
_forward: Any = forward


def machine() -> Machine:
    """The one that runs."""
    assert Machine.current is not None
    return Machine.current


class Namespace:
    """Names that kernels may use, and a clear error for others."""

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        self.__dict__.update(known, _name=name)

    def __getattr__(self, name: str) -> Any:
        raise EmulationError(f"{self._name}.{name} is not emulated")


# ------------------------------------------------------------------------------------------------------- gl and tl
def _unary(operation: Callable[[Any], Any]) -> Callable[[Any], Value]:
    def function(x: Any) -> Value:
        x = lift(x)
        return Value(rounded(operation(x.data), x.dtype), x.dtype)

    return function


def _binary(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Value]:
    return lambda a, b: elementwise(operation, a if isinstance(a, Value) else lift(a), b)


def _reduction(operation: Callable[..., Any]) -> Callable[..., Value]:
    def function(x: Value, axis: int | None = None) -> Value:
        return Value(rounded(operation(x.data, axis=axis), x.dtype), x.dtype)

    return function


def _extreme(dropping: Any, keeping: Any) -> Callable[..., Value]:
    """A minimum or maximum that drops NaN where it is not told to keep it."""
    ways = {tl.PropagateNan.NONE: _binary(dropping), tl.PropagateNan.ALL: _binary(keeping)}
    return lambda x, y, propagate_nan=tl.PropagateNan.NONE: ways[propagate_nan](x, y)


def where(condition: Any, x: Any, y: Any) -> Value:
    """``gl.where``."""
    condition = lift(condition)
    return elementwise(lambda a, b: np.where(condition.data, a, b), lift(x), y)


def arange(start: int, end: int, layout: Any = None) -> Value:
    """``gl.arange``."""
    return Value(np.arange(int(start), int(end)), tl.int32)


def full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Value:
    """``gl.full``."""
    return Value(np.full([int(n) for n in shape], lift(value).to(dtype).data), dtype)


def scalars(*bounds: Any) -> list[Value]:
    """``range`` of a kernel: its variable is an int32."""
    return [Value(i, tl.int32) for i in range(*(int(bound) for bound in bounds))]


def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
    """Shared memory that holds NaN, or room for mbarriers."""
    barriers = isinstance(layout, type(_forward.mbarrier.MBarrierLayout()))
    return machine().allocate(dtype, shape, layout, barriers)


def reinterpret(view: Shared, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
    """The memory of a whole buffer in another shape, or as numbers of another type."""
    numbers, panel = element_numbers(shape, layout)
    if dtype != view.dtype and numbers.size * bytes_of(dtype) == view.buffer.flat.size * bytes_of(view.dtype):
        twin = Buffer(f"{view.buffer.name} as {dtype}", dtype, numbers.size, panel, False)
        twin.twin, view.buffer.twin = view.buffer, twin
        return Shared(twin, numbers)
    if (dtype, panel, numbers.size) != (view.dtype, view.buffer.swizzle, view.at.size):
        raise EmulationError(f"{view.buffer.name} as {dtype} {shape} {layout}: another dtype, swizzle or size")
    return Shared(view.buffer, numbers + view.at.min())


def warp_specialize(functions: Sequence[tuple[Any, Any]], warps: Sequence[int], registers: Any = None) -> Steps:
    """Name the barriers after the fields that hold them, and run the partitions."""
    bundles = [x for x in functions[0][1] if hasattr(x, "_fields")]
    for name, view in (pair for bundle in bundles for pair in zip(bundle._fields, bundle, strict=True)):
        if isinstance(view, Shared) and view.buffer.flat.dtype == object:
            for i, barrier in enumerate(view.buffer.flat):
                barrier.name = f"{name}[{i}]"
    yield from machine().split(functions, warps)


# ------------------------------------------------------------------------------------------------------------ Hopper
class Descriptor:
    """A TMA descriptor: reads past the tensor's end give zeros, writes there vanish."""

    def __init__(self, descriptor: Any) -> None:
        self.memory = Memory(descriptor.base)
        self.dtype, self.layout, self.shape = self.memory.dtype, descriptor.layout, descriptor.shape
        self.box = [int(n) for n in descriptor.block_shape]
        last = sum((n - 1) * stride for n, stride in zip(descriptor.shape, descriptor.strides, strict=True))
        self.memory.check(np.asarray([self.memory.first, self.memory.first + last]), "TMA descriptor")
        size = self.memory.flat.itemsize
        strides = [stride * size for stride in descriptor.strides]
        self.array = np.lib.stride_tricks.as_strided(self.memory.flat[self.memory.first :], descriptor.shape, strides)

    def spans(self, coordinates: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the box at these coordinates lies inside: in the tensor, and in the box."""
        inside, box = [], []
        for start, size, limit in zip(map(int, coordinates), self.box, self.shape, strict=True):
            low = min(max(start, 0), limit)
            high = max(min(start + size, limit), low)
            inside.append(slice(low, high))
            box.append(slice(low - start, high - start) if high > low else slice(0, 0))
        return tuple(inside), tuple(box)

    def check(self, view: Shared) -> None:
        if list(view.shape) != self.box or view.dtype != self.dtype:
            raise EmulationError(f"TMA moves {self.box} {self.dtype}, {view.buffer.name} is {view.shape} {view.dtype}")


def tma_load(
    descriptor: Descriptor, coordinates: Sequence[Any], barrier: Shared, result: Shared, pred: Any = True
) -> Steps:
    """A box of the tensor is on its way to ``result``; ``barrier`` counts its bytes."""
    if not pred:
        return
    descriptor.check(result)
    inside, box = descriptor.spans(coordinates)
    data = np.zeros(descriptor.box, array_type(descriptor.dtype))
    data[box] = descriptor.memory.decode(descriptor.array[inside])
    yield from machine().load(barrier.barrier, result, data)


def tma_store(descriptor: Descriptor, coordinates: Sequence[Any], source: Shared) -> Steps:
    """A box of shared memory goes to the tensor; the source is read until :func:`store_wait`."""
    descriptor.check(source)
    source.check_read("TMA store", True)
    inside, box = descriptor.spans(coordinates)
    descriptor.array[inside] = descriptor.memory.encode(source.buffer.flat[source.at][box])
    source.buffer.reading.append(source)
    Machine.now().stores.append(source)
    yield from pause()


def store_wait(pendings: int, read_only: bool = True) -> Steps:
    """All TMA stores of this partition but the last ``pendings`` have read their source."""
    stores = Machine.now().stores
    while len(stores) > int(pendings):
        source = stores.pop(0)
        forget(source.buffer.reading, source)
    yield from pause()


def fence_async_shared(cluster: bool = False) -> None:
    """What this partition stored is visible to wgmma and TMA."""
    me = Machine.now()
    for view in me.unfenced:
        view.buffer.unfenced[view.at] = False
    me.unfenced.clear()


def _init(barrier: Shared, count: int) -> None:
    barrier.buffer.flat[barrier.at.item()] = Barrier(int(count))


def _arrive(barrier: Shared, *, count: int = 1, pred: Any = True) -> Steps:
    if pred:
        barrier.barrier.arrive(int(count))
    yield from pause()


def _expect(barrier: Shared, size: Any, pred: Any = True) -> None:
    if pred:
        barrier.barrier.bytes += int(size)
        barrier.barrier.arrive(1)


def _wait(barrier: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> Steps:
    parity, state = int(phase), barrier.barrier
    if parity not in (0, 1):
        raise EmulationError(f"{state.name}: waits for phase {parity}, which is no parity")
    if pred:
        yield from pause(lambda: state.phase != parity, lambda: f"{state}, parity {parity}")


def warpgroup_mma(
    a: Any, b: Shared, acc: Value, *, use_acc: Any = True, is_async: bool = False, precision: Any = None
) -> Value:
    """wgmma: 16-bit operands, products summed in fp32. ``b`` and perhaps ``a`` lie in shared memory."""
    me = Machine.now()
    name = f"wgmma of {a.shape} by {b.shape} in {me.name}"
    for operand in (a, b):
        if isinstance(operand, Shared):
            operand.check_read(name, True)
    x, y = (o.buffer.flat[o.at] if isinstance(o, Shared) else o.data for o in (a, b))
    if a.dtype != b.dtype or bytes_of(a.dtype) != 2 or acc.dtype != tl.float32:
        raise EmulationError(f"{name}: {a.dtype} by {b.dtype} into {acc.dtype}")
    if me.threads != 128 or x.shape[0] % 64 or (x.shape[0], y.shape[1]) != acc.shape:
        raise EmulationError(f"{name} into {acc.shape}, by {me.threads} threads")
    product = Product(name, [o for o in (a, b) if isinstance(o, Shared)])
    for operand in product.operands:
        operand.buffer.reading.append(operand)
    me.products.append(product)
    total = x @ y
    result = Value(total + acc.raw if use_acc else total, tl.float32, product)
    return result if is_async else warpgroup_mma_wait(0, (result,))


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Value] = ()) -> Any:
    """All but the last products are done; the returned values may be read."""
    products = Machine.now().products
    while len(products) > int(num_outstanding):
        product = products.pop(0)
        product.done = True
        for operand in product.operands:
            forget(operand.buffer.reading, operand)
    results = [Value(d.raw, d.dtype, d.product if d.product is not None and not d.product.done else None) for d in deps]
    return results[0] if len(results) == 1 else tuple(results)


# ------------------------------------------------------------------------------------------------------- translation
def _no_layout(*args: Any, **keywords: Any) -> None:
    """Layouts of tiles in registers do not exist here."""


_LANGUAGE: dict[str, Any] = {
    name: getattr(tl, name)
    for name in ("constexpr", "int1", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
}
_LANGUAGE |= dict.fromkeys(
    ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "DistributedLinearLayout"),
    _no_layout,
)
_LANGUAGE |= {
    "SwizzledSharedLayout": _no_layout, "NVMMASharedLayout": _common.gl.NVMMASharedLayout,
    "exp2": _unary(np.exp2), "log2": _unary(np.log2), "abs": _unary(np.abs),
    "fma": lambda a, b, c: lift(a) * b + c,
    "minimum": _extreme(np.fmin, np.minimum), "maximum": _extreme(np.fmax, np.maximum), "PropagateNan": tl.PropagateNan,
    "max": _reduction(np.fmax.reduce), "min": _reduction(np.fmin.reduce), "sum": _reduction(np.sum),
    "where": where, "arange": arange, "full": full, "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
    "load": values.load, "store": values.store, "atomic_add": values.atomic_add, "to_tensor": lift,
    "reshape": lambda x, *shape: x.reshape(*shape), "permute": lambda x, *order: x.permute(*order),
    "join": lambda x, y: Value(np.stack([x.data, y.data], -1), x.dtype),
    "split": lambda x: (Value(x.data[..., 0], x.dtype), Value(x.data[..., 1], x.dtype)),
    "convert_layout": lambda x, layout: Value(x.data, x.dtype), "multiple_of": lambda x, n: x,
    "program_id": lambda axis: Value(Machine.now().block.number if axis == 0 else 0, tl.int32),
    "num_programs": lambda axis: Value(machine().grid if axis == 0 else 1, tl.int32),
    "static_range": lambda *bounds: range(*(int(bound) for bound in bounds)),
    "allocate_shared_memory": allocate, "warp_specialize": warp_specialize,
    "inline_asm_elementwise": assembly.inline_asm_elementwise,
}  # fmt: skip
_LANGUAGE["math"] = Namespace("math", {"exp2": _LANGUAGE["exp2"], "log2": _LANGUAGE["log2"]})

#: What a global of a kernel's module becomes, by identity.
_REPLACED: list[tuple[Any, Any]] = [
    (_common.gl, Namespace("gl", _LANGUAGE)),
    (tl, Namespace("tl", _LANGUAGE)),
    (_forward.mbarrier, Namespace("mbarrier", {
        "init": _init, "arrive": _arrive, "expect": _expect, "wait": _wait,
        "MBarrierLayout": _forward.mbarrier.MBarrierLayout,
    })),
    (_common.tma, Namespace("tma", {"store_wait": store_wait})),
    (_common.tma_load, tma_load), (_common.tma_store, tma_store),
    (_forward.warpgroup_mma, warpgroup_mma), (_forward.warpgroup_mma_wait, warpgroup_mma_wait),
    (_forward.fence_async_shared, fence_async_shared),
    (_common.reinterpret, reinterpret), (backward.reinterpret, reinterpret),
]  # fmt: skip

Edits = Mapping[str, tuple[str, str]]


class _Calls(ast.NodeTransformer):
    """Every call becomes ``(yield from call(function, ...))``: a point where other partitions may come in."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.args.insert(0, node.func)
        node.func = ast.Name("__call__", ast.Load())
        return ast.YieldFrom(node)


@cache
def _compiled(jit: Any, old: str, new: str) -> types.CodeType:
    """A module that defines the function, ``old`` replaced by ``new``, with the file's own line numbers."""
    if old and jit.src.count(old) != 1:
        raise ValueError(f"{jit.fn.__name__} has {old!r} {jit.src.count(old)} times")
    tree = _Calls().visit(ast.parse(jit.src.replace(old, new) if old else jit.src))
    lines = inspect.getsourcelines(jit.fn)[0]
    above = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    ast.increment_lineno(ast.fix_missing_locations(tree), jit.fn.__code__.co_firstlineno + above - 1)
    return compile(tree, jit.fn.__code__.co_filename, "exec")


class Translator:
    """Makes generators of jit functions, each once. ``edits``: function name -> (text, what stands there instead)."""

    def __init__(self, edits: Edits) -> None:
        self.edits = edits
        self.made: dict[int, Callable[..., Any]] = {}
        self.modules: dict[int, dict[str, Any]] = {}

    def function(self, jit: Any) -> Callable[..., Any]:
        """The function; raises if an edit's text does not occur exactly once."""
        if id(jit) not in self.made:
            name = jit.fn.__name__
            edit = self.edits.get(f"{jit.fn.__module__.rpartition('.')[2]}.{name}", ("", ""))
            made: dict[str, Any] = {}
            exec(_compiled(jit, *edit), self.globals_of(jit.fn), made)
            self.made[id(jit)] = made[name]
        return self.made[id(jit)]

    def globals_of(self, function: Any) -> dict[str, Any]:
        """The namespace of the function's module, with everything of Triton's replaced."""
        original = function.__globals__
        if id(original) not in self.modules:
            names: dict[str, Any] = {"__builtins__": {**vars(builtins), "range": scalars}, "__call__": call}
            self.modules[id(original)] = names
            for name, value in original.items():
                if name != "__builtins__":
                    names[name] = self.replaced(value)
        return self.modules[id(original)]

    def replaced(self, value: Any) -> Any:
        """What a kernel sees instead of a global of its module."""
        if isinstance(value, JITFunction):
            return self.function(value)
        if isinstance(value, tl.constexpr):
            return value.value
        return next((new for old, new in _REPLACED if old is value), value)

    def argument(self, x: Any, constant: bool) -> Any:
        """What a kernel sees instead of an argument of its launch."""
        if isinstance(x, common.Block):
            x = x.for_triton()
        if isinstance(x, common.Constants):
            return types.SimpleNamespace(
                **{name: getattr(x, name).value for name in vars(x) if not name.startswith("_")}
            )
        if hasattr(x, "block_shape"):
            return Descriptor(x)
        if hasattr(x, "untyped_storage"):
            memory = Memory(x)
            assembly.MEMORIES.append(memory)
            return Pointer(memory, memory.first)
        if isinstance(x, tuple):
            parts = [self.argument(part, constant) for part in x]
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        if isinstance(x, JITFunction):
            return self.function(x)
        return lift(x) if isinstance(x, (int, float)) and not constant else x
