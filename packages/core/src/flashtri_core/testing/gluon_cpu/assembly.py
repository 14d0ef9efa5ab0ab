"""The inline assembly that kernels contain: named barriers, the dQ accumulator and its semaphores, launches, a few tricks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl

from .machine import Machine, NamedBarrier, Steps, pause
from .values import EmulationError, Memory, Value, to_bits

MEMORIES: list[Memory] = []  # of the launch's arguments: assembly has addresses only

_BARRIER = re.compile(r"bar\.(sync|arrive) \$1, (\d+); mov\.b32 \$0, \$1")
_ACCESS = re.compile(r"(@!?p )?(st|red)\.relaxed\.gpu\.global(?:\.add)?\.v4\.f32 \[\$(\d+)\+(\d+)\], \{([$\d,]+)\}")
_LOAD = re.compile(r"ld\.relaxed\.gpu\.global\.v4\.f32 \{([$\d,]+)\}, \[\$(\d+)\+(\d+)\]")
_PREDICATE = re.compile(r"setp\.ne\.s32 p, \$(\d+), 0")
_SELECT = re.compile(
    r"\{ \.reg \.pred p; \.reg \.s32 x; sub\.s32 x, \$2, \$3; setp\.le\.u32 p, x, \$4; selp\.f32 \$0, \$1, 0f(\w{8}), p"
)
_WORD = re.compile(r"cvt\.rn\.(b?f16)x2\.f32 \$0, \$2, \$1")
_HALVES = "mov.b32 {$0, $1}, $2"
_SAME = "mov.b32 $0, $1"
_IF_ANY = "{ .reg .pred p; setp.ge.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, $1, 0, p"
_AWAIT = (
    ".reg .pred p; .reg .b32 x; again_${:uid}: ld.acquire.gpu.global.b32 x, [$1]; setp.ne.s32 p, x, $2; "
    "vote.sync.any.pred p, p, 0xffffffff; @p bra.uni again_${:uid}; mov.b32 $0, x"
)
_READ = "ld.relaxed.gpu.global.b32 $0, [$1]"
_PASS = ".reg .pred p; setp.ne.s32 p, $3, 0; fence.acq_rel.gpu; @p st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0"
_COUNT = (
    ".reg .pred p; setp.ne.s32 p, $2, 0; fence.proxy.async.global; fence.acq_rel.gpu; bar.warp.sync 0xffffffff; "
    "@p red.relaxed.gpu.global.add.s32 [$1], 1; mov.b32 $0, 0"
)
_AWAIT_COUNT = (
    ".reg .pred p; .reg .b32 x; mov.b32 x, $3; bra.uni test_${:uid}; again_${:uid}: ld.relaxed.gpu.global.b32 x, [$1]; "
    "test_${:uid}: setp.ne.s32 p, x, $2; vote.sync.any.pred p, p, 0xffffffff; @p bra.uni again_${:uid}; fence.acq_rel.gpu; "
    "fence.proxy.async.global; mov.b32 $0, x"
)
_BETWEEN_LAUNCHES = (  # launches run one after another here
    "griddepcontrol.launch_dependents; mov.b32 $0, 0", "griddepcontrol.wait; fence.proxy.async.global; mov.b32 $0, 0",
)  # fmt: skip
_WITHOUT_EFFECT = re.compile(r"\.reg .*|mov\.[bu]32 .*|or\.b32 .*|setp\.lt\.s32 q, t, 0|@q nanosleep\.u32 1|")


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Value], dtype: Any, is_pure: bool, pack: int
) -> Steps:
    """Execute it.

    Raises:
        EmulationError: an instruction that is not one of these.
    """
    me, x = Machine.now(), args[0]
    text = " ".join(asm.replace("{\n", "").replace("\n}", "").split()).removesuffix("}").rstrip("; ")
    if barrier := _BARRIER.fullmatch(text):
        if x.shape != (me.threads,):
            raise EmulationError(f"{me.name} has {me.threads} threads, and {x.shape} of them reach a named barrier")
        yield from named_barrier(int(x.data[0]), int(barrier[2]), barrier[1] == "sync")
        return x
    if text in (_READ, _AWAIT, _AWAIT_COUNT, _PASS, _COUNT):
        return (yield from semaphore(text, *(arg.data for arg in args)))
    if text == "mov.b32 $0, 0" or text in _BETWEEN_LAUNCHES:
        return Value(np.zeros(x.shape, np.int64), tl.int32)
    if text == _SAME:
        return x
    if text == _IF_ANY:
        if (x.data < 0).any():
            raise EmulationError("a vote on negative numbers, which would give 0 where a warp has nothing else")
        return x
    if text == "tanh.approx.f32 $0, $1":
        exact = np.tanh(x.data)  # the instruction's relative error is 2^-11, which rounding to float16 makes as well
        return Value(np.where(np.abs(exact) < 2**-12, exact, exact.astype(np.float16)).astype(np.float32), tl.float32)
    if select := _SELECT.fullmatch(text):
        a, b, width = (np.asarray(getattr(arg, "data", arg)) for arg in args[1:])
        otherwise = np.uint32(int(select[1], 16)).view(np.float32)
        return Value(np.where((a - b) % 2**32 <= width, x.data, otherwise), tl.float32)
    if word := _WORD.fullmatch(text):
        low, high = (to_bits(arg.data, tl.bfloat16 if word[1] == "bf16" else tl.float16) for arg in args)
        return Value((low + (high.astype(np.uint32) << 16)).astype(np.uint32).view(np.int32).astype(np.int64), tl.int32)
    if text == _HALVES:
        return Value(x.data & 0xFFFF, tl.int16), Value(x.data >> 16 & 0xFFFF, tl.int16)
    lines, outputs = text.split("; "), constraints.count("=")
    inputs = [registers(np.broadcast_to(arg.data, x.shape)) for arg in args]
    results = np.zeros(inputs[0].shape, np.float32)
    for first in range(0, results.shape[1], pack):
        span = slice(first, first + pack)
        operands = [None] * outputs + [register for each in inputs for register in each[:, span].T]
        execute(lines, operands)
        if dtype == tl.float32:
            results[:, span] = np.stack(operands[:outputs], 1)
    return Value(tile(results), tl.float32) if dtype == tl.float32 else x


def execute(lines: Sequence[str], operands: list[Any]) -> None:
    """Run instructions on operands, each an array over the warpgroup's 128 threads; loads fill theirs."""
    predicate: Any = None
    for line in lines:
        if found := _PREDICATE.fullmatch(line):
            predicate = operands[int(found[1])] != 0
        elif found := _ACCESS.fullmatch(line):
            keep = slice(None) if not found[1] else predicate if "!" not in found[1] else ~predicate
            for i, part in enumerate(found[5].split(",")):
                memory, at = elements(operands[int(found[3])][keep] + int(found[4]), i)
                if found[2] == "st":
                    memory.flat[at] = operands[int(part[1:])][keep]
                else:
                    np.add.at(memory.flat, at, operands[int(part[1:])][keep])
        elif found := _LOAD.fullmatch(line):
            for i, part in enumerate(found[1].split(",")):
                memory, at = elements(operands[int(found[2])] + int(found[3]), i)
                operands[int(part[1:])] = memory.flat[at]
        elif not _WITHOUT_EFFECT.fullmatch(line):
            raise EmulationError(f"inline assembly that is not emulated: {line}")


def registers(x: Any) -> Any:
    """[64, N] accumulator -> [128 threads, N / 2 registers], as wgmma deals them out."""
    if x.ndim != 2 or x.shape[0] != 64 or x.shape[1] % 8:
        raise EmulationError(f"assembly on a tile {x.shape}")
    return x.reshape(4, 2, 8, -1, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(128, -1)


def tile(x: Any) -> Any:
    """The reverse of :func:`registers`."""
    return x.reshape(4, 8, 4, -1, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, -1)


def elements(addresses: Any, number: int) -> tuple[Memory, Any]:
    """The memory that 16-byte accesses go to, and which of its elements the ``number``-th of their four are."""
    if (addresses % 16).any():
        raise EmulationError("a 16-byte access at an address that is no multiple of 16")
    for memory in MEMORIES:
        at = (addresses - memory.address) // 4 + number
        if memory.dtype == tl.float32 and (not at.size or (at.min() >= 0 and at.max() < memory.flat.size)):
            return memory, at
    raise EmulationError("an access outside every tensor")


def semaphore(text: str, addresses: Any, value: Any = None, last: Any = None) -> Steps:
    """Each thread reads one, waits until it is ``value``, having seen it as ``last``, or sets it where ``last`` says so.

    Or adds 1 where ``value`` says so.
    """
    me = Machine.now()
    if addresses.shape != (me.threads,):
        raise EmulationError(f"{me.name} has {me.threads} threads, and {addresses.shape} of them use a semaphore")
    writers = {_PASS: last, _COUNT: value}.get(text)
    memory, at = integers(addresses if writers is None else addresses[writers != 0])
    if text in (_AWAIT, _AWAIT_COUNT):
        early = None if text == _AWAIT else last
        yield from pause(
            lambda: bool(((early == value) | (memory[at] == value)).all()),
            lambda: f"semaphores to become {value[0]}, which are {memory[at][::32]}",
        )
    elif text == _PASS:
        memory[at] = value[last != 0]
        yield from pause()
    elif text == _COUNT:
        np.add.at(memory, at, 1)
        yield from pause()
    return Value(memory[at].astype(np.int64) if text == _READ else np.zeros(me.threads, np.int64), tl.int32)


def integers(addresses: Any) -> tuple[Any, Any]:
    """The memory of fp32 that these addresses lie in, as int32, and which of its elements they are."""
    for memory in MEMORIES:
        at = (addresses - memory.address) // 4
        if memory.dtype == tl.float32 and (not at.size or (at.min() >= 0 and at.max() < memory.flat.size)):
            return memory.flat.view(np.int32), at
    raise EmulationError("a semaphore outside every tensor")


def named_barrier(number: int, threads: int, wait: bool) -> Steps:
    """The running partition reaches one of the hardware's 16 barriers, and waits there or does not."""
    me = Machine.now()
    if not 0 <= number < 16:
        raise EmulationError(f"named barrier {number}; there are 16")
    barrier = me.block.named.setdefault(number, NamedBarrier())
    opened = barrier.opened
    barrier.arrive(me, threads)
    yield from pause(
        lambda: not wait or barrier.opened != opened, lambda: f"named barrier {number}, reached by {barrier.here}"
    )
