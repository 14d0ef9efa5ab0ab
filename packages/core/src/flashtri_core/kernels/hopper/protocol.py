"""The forward kernel's barrier protocol as a program that runs anywhere, in any order.

Each warp role is a generator that yields wherever hardware may interleave it with others; TMA copies are roles of their
own, so they land late. :func:`run` executes the roles in random order and raises if a role reads a buffer that does not
hold what it should, if a buffer changes under a reader, or if everybody waits. The kernel's code and this model are kept
next to each other: a change to one is a change to the other.

No import of Triton, Gluon or torch: it is a unit test's subject on any machine.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Role = Generator[None, None, None]


class ProtocolError(AssertionError):
    """The protocol let a role see a wrong buffer, or stopped."""


@dataclass
class MBarrier:
    """Counts arrivals; the phase flips when ``count`` have come. Waiting for parity p returns once phase p is over."""

    count: int
    left: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.left = self.count

    def arrive(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.left, self.phase = self.count, self.phase ^ 1

    def wait(self, parity: int) -> Iterator[None]:
        while self.phase == parity:
            yield


@dataclass
class NamedBarrier:
    """Opens when ``members`` partitions have reached it, then starts over."""

    members: int
    here: int = 0
    opened: int = 0

    def arrive(self) -> None:
        self.here += 1
        if self.here > self.members:
            raise ProtocolError("a named barrier was reached twice in one round")
        if self.here == self.members:
            self.here, self.opened = 0, self.opened + 1

    def wait(self) -> Iterator[None]:
        target = self.opened + 1
        self.arrive()
        while self.opened < target:
            yield


@dataclass(frozen=True)
class Shape:
    """What the protocol depends on."""

    warpgroups: int = 2
    kv_stages: int = 2
    q_stages: int = 2
    turns: bool = True
    named_release: bool = False


@dataclass
class Machine:
    """One thread block: its barriers, and its shared memory as labels of what each buffer holds."""

    shape: Shape
    roles: dict[str, Role] = field(default_factory=dict)
    stored: list[tuple[int, int]] = field(default_factory=list)
    copies: int = 0

    def __post_init__(self) -> None:
        s = self.shape
        queries = s.q_stages * s.warpgroups
        self.slot_full, self.slot_empty = _bars(2, 1), _bars(2, s.warpgroups)
        self.q_full, self.q_empty = _bars(queries, 1), _bars(queries, 1)
        self.full = {x: _bars(s.kv_stages, 1) for x in "kv"}
        self.empty = {x: _bars(s.kv_stages, s.warpgroups) for x in "kv"}
        self.named = {x: [NamedBarrier(s.warpgroups + 1) for _ in range(s.kv_stages)] for x in "kv"}
        self.turn = [NamedBarrier(2) for _ in range(s.warpgroups)]
        self.slots: list[Any] = [None, None]
        self.q: list[Any] = [None] * queries
        self.ring: dict[str, list[Any]] = {x: [None] * s.kv_stages for x in "kv"}
        self.pending = [0] * s.warpgroups  # TMA stores under way, per warpgroup

    def copy_in(self, where: list[Any], index: int, label: Any, bar: MBarrier) -> None:
        """Issue a TMA load: the buffer is undefined from now on and valid when ``bar`` is told."""

        def role() -> Role:
            where[index] = None
            yield
            where[index] = label
            yield
            bar.arrive()

        self._spawn(role())

    def copy_out(self, where: list[Any], index: int, label: Any, warpgroup: int) -> None:
        """Issue a TMA store; it reads the buffer later."""

        def role() -> Role:
            yield
            expect(where[index], label)
            yield
            expect(where[index], label)
            self.pending[warpgroup] -= 1

        self.pending[warpgroup] += 1
        self._spawn(role())

    def _spawn(self, role: Role) -> None:
        self.copies += 1
        self.roles[f"copy {self.copies}"] = role


def _bars(number: int, count: int) -> list[MBarrier]:
    return [MBarrier(count) for _ in range(number)]


def expect(found: Any, wanted: Any) -> None:
    if found != wanted:
        raise ProtocolError(f"buffer holds {found}, expected {wanted}")


def producer(m: Machine, blocks: Sequence[int]) -> Role:
    """``blocks[t]`` key blocks for tile t."""
    s, count = m.shape, 0

    def load(ring: str, label: tuple[int, int], count: int) -> Iterator[None]:
        stage, phase = count % s.kv_stages, (count // s.kv_stages) & 1
        if s.named_release:
            if count >= s.kv_stages:
                yield from m.named[ring][stage].wait()
        else:
            yield from m.empty[ring][stage].wait(phase ^ 1)
        m.copy_in(m.ring[ring], stage, label, m.full[ring][stage])
        yield

    for tile, n in enumerate([*blocks, -1]):
        slot = tile % 2
        yield from m.slot_empty[slot].wait(((tile // 2) & 1) ^ 1)
        m.slots[slot] = None
        yield
        m.slots[slot] = (tile, n)
        m.slot_full[slot].arrive()
        if n < 0:
            return
        for w in range(s.warpgroups):
            at = (tile % s.q_stages) * s.warpgroups + w
            yield from m.q_empty[at].wait(((tile // s.q_stages) & 1) ^ 1)
            m.copy_in(m.q, at, ("Q", tile), m.q_full[at])
            if w == 0:
                yield from load("k", (tile, n - 1), count)
        count += 1
        for block in range(n - 2, -1, -1):
            yield from load("k", (tile, block), count)
            yield from load("v", (tile, block + 1), count - 1)
            count += 1
        yield from load("v", (tile, 0), count - 1)


def consumer(m: Machine, w: int) -> Role:
    """Warpgroup ``w``; wgmma reads are modelled by looking at a buffer before and after a yield."""
    s, count, tile = m.shape, 0, 0

    def take_turn() -> Iterator[None]:
        if s.turns:
            yield from m.turn[w].wait()

    def pass_turn() -> None:
        if s.turns:
            m.turn[(w + 1) % s.warpgroups].arrive()

    def release(ring: str, stage: int) -> None:
        if s.named_release:
            m.named[ring][stage].arrive()
        else:
            m.empty[ring][stage].arrive()

    if w == s.warpgroups - 1:
        pass_turn()
    while True:
        slot = tile % 2
        yield from m.slot_full[slot].wait((tile // 2) & 1)
        number, n = m.slots[slot] or (None, 0)
        expect(number, tile)
        if n < 0:
            break
        m.slot_empty[slot].arrive()
        at = (tile % s.q_stages) * s.warpgroups + w
        for block in range(n - 1, -1, -1):
            stage, phase = count % s.kv_stages, (count // s.kv_stages) & 1
            before = (count - 1) % s.kv_stages
            first = block == n - 1
            if first:
                yield from m.q_full[at].wait((tile // s.q_stages) & 1)
            yield from m.full["k"][stage].wait(phase)
            yield from take_turn()
            for _ in range(2):  # both products are under way
                expect(m.q[at], ("Q", tile))
                expect(m.ring["k"][stage], (tile, block))
                if not first:
                    expect(m.ring["v"][before], (tile, block + 1))
                yield
            pass_turn()
            release("k", stage)
            if first and s.q_stages > 1:
                while m.pending[w]:
                    yield
                if tile:
                    m.q_empty[((tile - 1) % s.q_stages) * s.warpgroups + w].arrive()
            yield
            yield from m.full["v"][stage].wait(phase)
            if not first:
                expect(m.ring["v"][before], (tile, block + 1))
                release("v", before)
            count += 1
        last = (count - 1) % s.kv_stages
        expect(m.ring["v"][last], (tile, 0))
        yield
        expect(m.ring["v"][last], (tile, 0))
        release("v", last)
        m.q[at] = ("O", tile)
        m.copy_out(m.q, at, ("O", tile), w)
        m.stored.append((tile, w))
        if s.q_stages == 1:
            while m.pending[w]:
                yield
            m.q_empty[at].arrive()
        tile += 1
        yield
    while m.pending[w]:
        yield
    if w == 0:
        yield from take_turn()


def run(shape: Shape, blocks: Sequence[int], seed: int, patience: int = 20000) -> None:
    """Execute one thread block that is given tiles with ``blocks[t]`` key blocks each.

    Raises:
        ProtocolError: a wrong buffer, a barrier over-subscribed, or no end within ``patience`` idle steps.
    """
    choose = random.Random(seed)
    m = Machine(shape)
    m.roles["producer"] = producer(m, blocks)
    for w in range(shape.warpgroups):
        m.roles[f"consumer {w}"] = consumer(m, w)
    steps = 0
    while m.roles:
        name = choose.choice(list(m.roles))
        for _ in range(choose.choice((1, 1, 2, 8))):
            try:
                next(m.roles[name])
            except StopIteration:
                del m.roles[name]
                break
        steps += 1
        if steps > patience * (1 + sum(blocks)):
            raise ProtocolError(f"deadlock; still alive: {sorted(m.roles)}")
    if sorted(m.stored) != [(t, w) for t in range(len(blocks)) for w in range(shape.warpgroups)]:
        raise ProtocolError(f"stored {sorted(m.stored)}")
    if any(bar.here for bar in m.turn):
        raise ProtocolError("a turn was passed that nobody took")
