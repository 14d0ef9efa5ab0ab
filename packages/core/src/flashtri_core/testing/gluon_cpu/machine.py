"""The machine that kernels run on: partitions that take turns, barriers, shared memory, and copies in flight.

Every partition of every resident thread block is a Python generator that yields at each barrier operation and each copy;
who goes on is drawn by a seeded generator of random numbers: a seed is an interleaving. Each seed also draws how fast every
partition and the copies are, so that extremes come up.

What the hardware does later is checked instead of delayed: shared memory that an unfinished wgmma or TMA store reads may
not be written, memory that a TMA load fills may not be touched before it has landed, and what ordinary code wrote may not
be read by wgmma or TMA before a fence. Loads land at a random later time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, ClassVar

import numpy as np

from .values import GARBAGE, EmulationError, Value, array_type, bytes_of, is_float, rounded

SHARED_BYTES = 232448


#: What a partition yields: when it can go on, and the words for what it waits for.
Pause = tuple[Callable[[], bool], Callable[[], str]]
Steps = Generator[Pause, None, Any]


def call(function: Callable[..., Any], *args: Any, **keywords: Any) -> Steps:
    """Call a function that may be a generator, as any call in a kernel may."""
    result = function(*args, **keywords)
    if isinstance(result, GeneratorType):
        result = yield from result
    return result


def pause(ready: Callable[[], bool] = lambda: True, waits_for: Callable[[], str] = lambda: "") -> Steps:
    """Let others run, until ``ready`` at least."""
    yield ready, waits_for


# ---------------------------------------------------------------------------------------------------------- barriers
@dataclass
class Barrier:
    """An mbarrier: its phase ends when ``count`` arrivals have come and all expected bytes have landed."""

    count: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    name: str = "mbarrier"

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int) -> None:
        if count > self.pending:
            raise EmulationError(f"{self.name}: an arrival more than the {self.count} of its phase")
        self.pending -= count
        self.settle()

    def land(self, size: int) -> None:
        self.bytes -= size
        self.settle()

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1

    def __str__(self) -> str:
        missing = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes missing"
        return f"{self.name} (phase {self.phase}, {missing})"


@dataclass
class NamedBarrier:
    """One of the 16 hardware barriers: opens when ``threads`` threads have come, and starts over."""

    threads: int = 0
    here: dict[str, int] = field(default_factory=dict)
    opened: int = 0

    def arrive(self, partition: Partition, threads: int) -> None:
        if self.here and threads != self.threads:
            raise EmulationError(f"a named barrier of {self.threads} threads is reached as one of {threads}")
        if partition.name in self.here:
            raise EmulationError(f"{partition.name} reaches a named barrier twice before it opens")
        self.threads, self.here[partition.name] = threads, partition.threads
        if sum(self.here.values()) > threads:
            raise EmulationError(f"{sum(self.here.values())} threads reach a named barrier of {threads}: {self.here}")
        if sum(self.here.values()) == threads:
            self.here, self.opened = {}, self.opened + 1


# ----------------------------------------------------------------------------------------------------- shared memory
class Buffer:
    """One allocation. ``loading`` and ``reading`` hold the views that asynchronous copies and wgmma work on.

    Seen as numbers of another type, it is another buffer, ``twin``: what is written to one is lost from the other, as a whole.
    """

    def __init__(self, name: str, dtype: Any, size: int, swizzle: int, barriers: bool) -> None:
        self.name, self.dtype, self.swizzle = name, dtype, swizzle
        self.unfenced = np.zeros(size, np.bool_)
        self.loading: list[Shared] = []
        self.reading: list[Shared] = []
        self.twin: Buffer | None = None
        self.flat: Any = np.empty(size, object)
        if not barriers:
            self.flat = np.full(size, np.nan if is_float(dtype) else GARBAGE, array_type(dtype))


class Shared:
    """A view of a buffer: element numbers in the view's shape."""

    def __init__(self, buffer: Buffer, at: Any) -> None:
        self.buffer, self.at, self.dtype = buffer, at, buffer.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.at.shape)

    @property
    def barrier(self) -> Barrier:
        """The mbarrier that the view consists of."""
        found: Barrier = self.buffer.flat[self.at.item()]
        return found

    def index(self, i: Any) -> Shared:
        if not 0 <= int(i) < len(self.at):
            raise EmulationError(f"{self.buffer.name}: index {int(i)} of {len(self.at)}")
        return Shared(self.buffer, self.at[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return Shared(self.buffer, self.at.take(range(int(start), int(start) + length), dim))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.buffer, self.at.reshape(shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.buffer, self.at.transpose(order))

    def overlaps(self, others: Iterable[Shared]) -> bool:
        """Whether one of the other views of this buffer has an element in common with this one."""
        for other in others:
            if self.at.max() < other.at.min() or other.at.max() < self.at.min():
                continue
            if np.intersect1d(self.at, other.at).size:
                return True
        return False

    def check_read(self, who: str, asynchronous: bool) -> None:
        if self.overlaps(self.buffer.loading):
            raise EmulationError(f"{who} reads {self.buffer.name} while a TMA load fills it")
        if asynchronous and self.buffer.unfenced[self.at].any():
            raise EmulationError(f"{who} reads {self.buffer.name}, whose last store lacks fence_async_shared")

    def check_write(self, who: str) -> None:
        if self.overlaps(self.buffer.loading):
            raise EmulationError(f"{who} writes {self.buffer.name} while a TMA load fills it")
        if self.overlaps(self.buffer.reading):
            raise EmulationError(f"{who} writes {self.buffer.name} while a wgmma or a TMA store reads it")
        if twin := self.buffer.twin:
            if twin.loading or twin.reading:
                raise EmulationError(f"{who} writes {self.buffer.name} while something else works on {twin.name}")
            if who == "TMA load" and twin.unfenced.any():
                raise EmulationError(f"a TMA load overwrites {twin.name}, stored to without fence_async_shared")
            twin.flat[:] = np.nan

    def load(self, layout: Any = None) -> Value:
        self.check_read("load", False)
        return Value(self.buffer.flat[self.at], self.dtype)

    def store(self, value: Value) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise EmulationError(f"{self.buffer.name}{self.shape} {self.dtype} <- {value.shape} {value.dtype}")
        self.check_write("store")
        self.buffer.flat[self.at] = value.data
        self.buffer.unfenced[self.at] = True
        Machine.now().unfenced.append(self)


def element_numbers(shape: Sequence[int], layout: Any) -> tuple[Any, int]:
    """Where each element of a tile lies in its buffer, and the panel width: NVMMA layouts keep panels of columns.

    The swizzle inside a panel is left out: all who read a panel know it.
    """
    shape = [int(n) for n in shape]
    width = getattr(layout, "swizzle_byte_width", 0)
    panel = 8 * width // layout.element_bitwidth if width else shape[-1]
    if len(shape) < 2 or layout is None or getattr(layout, "rank", 1) < 2 or panel >= shape[-1]:
        return np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape), min(panel, shape[-1])
    if layout.transposed:
        raise EmulationError("a transposed shared layout")
    rows = int(np.prod(shape[-layout.rank : -1]))
    count = int(np.prod(shape)) // (rows * shape[-1])
    numbers = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(count, shape[-1] // panel, rows, panel)
    return numbers.transpose(0, 2, 1, 3).reshape(shape), panel


# --------------------------------------------------------------------------------------------------------- execution
@dataclass
class Block:
    """A thread block."""

    number: int
    bytes: int = 0
    named: dict[int, NamedBarrier] = field(default_factory=dict)
    landings: int = 0  # TMA loads in flight
    buffers: int = 0


@dataclass(eq=False)
class Partition:
    """A group of warps that executes one function."""

    block: Block
    name: str
    threads: int
    pace: float
    steps: Steps
    ready: Callable[[], bool] = lambda: True
    waits_for: Callable[[], str] = lambda: ""
    products: list[Product] = field(default_factory=list)
    stores: list[Shared] = field(default_factory=list)
    unfenced: list[Shared] = field(default_factory=list)


@dataclass
class Product:
    """A wgmma and the shared memory that it reads until it is waited for."""

    name: str
    operands: list[Shared]
    done: bool = False

    def __str__(self) -> str:
        return self.name


def forget(views: list[Shared], view: Shared) -> None:
    """Remove this very view."""
    del views[next(i for i, other in enumerate(views) if other is view)]


class Machine:
    """Runs one launch. ``resident`` thread blocks run side by side; they start in order."""

    current: ClassVar[Machine | None] = None

    def __init__(self, seed: object, grid: int, resident: int, body: Callable[[], Any], warps: int = 4) -> None:
        self.random = random.Random(repr(seed))
        self.grid, self.body, self.warps = grid, body, warps
        self.waiting = list(range(grid - 1, -1, -1))
        self.partitions: list[Partition] = []
        self.landings: list[Callable[[], None]] = []
        self.landing_pace = self.random_pace()
        self.running: Partition | None = None
        for _ in range(min(resident, grid)):
            self.start_block()

    def run(self) -> None:
        """To the end of all thread blocks."""
        Machine.current = self
        try:
            with np.errstate(all="ignore"):
                while self.partitions:
                    self.running = self.next()
                    try:
                        self.running.ready, self.running.waits_for = next(self.running.steps)
                    except StopIteration:
                        self.leave(self.running)
        finally:
            Machine.current = None

    @staticmethod
    def now() -> Partition:
        """The partition that runs."""
        assert Machine.current is not None and Machine.current.running is not None
        return Machine.current.running

    def random_pace(self) -> float:
        return float(8.0 ** self.random.uniform(-1.0, 1.0))

    def start(self, block: Block, name: str, warps: int, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.partitions.append(Partition(block, name, 32 * warps, self.random_pace(), call(function, *args)))

    def start_block(self) -> None:
        block = Block(self.waiting.pop())
        self.start(block, f"block {block.number}", self.warps, self.body, ())

    def next(self) -> Partition:
        """Who goes on; copies that land come in between.

        Raises:
            EmulationError: nobody can.
        """
        while True:
            able = [partition for partition in self.partitions if partition.ready()]
            if not able and not self.landings:
                stuck = "; ".join(f"{p.name} waits for {p.waits_for()}" for p in self.partitions)
                raise EmulationError(f"deadlock: {stuck}")
            paces = [partition.pace for partition in able] + [self.landing_pace] * bool(self.landings)
            (chosen,) = self.random.choices(range(len(paces)), paces)
            if chosen < len(able):
                return able[chosen]
            self.landings.pop(self.random.randrange(len(self.landings)))()

    def leave(self, me: Partition) -> None:
        """The running partition has ended."""
        if me.products or me.stores:
            raise EmulationError(f"{me.name} ends with wgmma or TMA stores that it has not waited for")
        self.partitions.remove(me)
        if not any(partition.block is me.block for partition in self.partitions):
            if me.block.landings:
                raise EmulationError(f"{me.name} ends while TMA loads are in flight")
            if self.waiting:
                self.start_block()

    # -------------------------------------------------------------------------------------- what partitions ask for
    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any, barriers: bool) -> Shared:
        """A new buffer, full of NaN or without barriers yet."""
        block = self.now().block
        numbers, panel = element_numbers(shape, layout)
        block.bytes += numbers.size * bytes_of(dtype)
        if block.bytes > SHARED_BYTES:
            raise EmulationError(f"{block.bytes} bytes of shared memory")
        block.buffers += 1
        name = f"buffer {block.buffers - 1} {[int(n) for n in shape]}"
        return Shared(Buffer(name, dtype, numbers.size, panel, barriers), numbers)

    def split(self, functions: Sequence[tuple[Callable[..., Any], Sequence[Any]]], warps: Sequence[int]) -> Steps:
        """Run the first function here and the others in partitions of their own, to the end."""
        me, before = self.now(), len(self.partitions)
        for number, ((function, args), size) in enumerate(zip(functions[1:], warps, strict=True), start=1):
            self.start(me.block, f"{me.name}, partition {number} ({function.__name__})", size, function, args)
        workers = self.partitions[before:]
        function, args = functions[0]
        yield from call(function, *args)
        yield from pause(lambda: not any(worker in self.partitions for worker in workers), lambda: "its partitions")

    def load(self, barrier: Barrier, destination: Shared, data: Any) -> Steps:
        """``data`` lands later, and the barrier hears of it."""
        destination.check_write("TMA load")
        if destination.buffer.unfenced[destination.at].any():
            raise EmulationError(
                f"a TMA load overwrites {destination.buffer.name}, stored to without fence_async_shared"
            )
        buffer, block = destination.buffer, self.now().block
        buffer.flat[destination.at] = np.nan
        buffer.loading.append(destination)
        block.landings += 1

        def land() -> None:
            buffer.flat[destination.at] = rounded(data, buffer.dtype)
            forget(buffer.loading, destination)
            block.landings -= 1
            barrier.land(destination.at.size * bytes_of(buffer.dtype))

        self.landings.append(land)
        yield from pause()
