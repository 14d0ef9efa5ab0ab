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
    ragged: bool = False  # warpgroup 0 clears rows of a tile's last V block before anybody reads it


@dataclass
class Machine:
    """One thread block: its barriers, and its shared memory as labels of what each buffer holds."""

    shape: Shape
    roles: dict[str, Role] = field(default_factory=dict)
    stored: list[tuple[int, int]] = field(default_factory=list)
    copies: int = 0
    pending: int = 0  # TMA stores under way

    def __post_init__(self) -> None:
        s = self.shape
        queries = s.q_stages * s.warpgroups
        self.slot_full = _bars(2, 1)
        self.q_full, self.q_empty, self.o_full = _bars(queries, 1), _bars(s.q_stages, 1), _bars(queries, 1)
        self.full = {x: _bars(s.kv_stages, 1) for x in "kv"}
        self.empty = {x: _bars(s.kv_stages, s.warpgroups) for x in "kv"}
        self.named = {x: [NamedBarrier(s.warpgroups + 1) for _ in range(s.kv_stages)] for x in "kv"}
        self.turn = [NamedBarrier(2) for _ in range(s.warpgroups)]
        self.slots: list[Any] = [None, None]
        self.q: list[Any] = [None] * queries
        self.ring: dict[str, list[Any]] = {x: [None] * s.kv_stages for x in "kv"}
        self.cleared = NamedBarrier(s.warpgroups)

    def copy_in(self, where: list[Any], index: int, label: Any, bar: MBarrier) -> None:
        """Issue a TMA load: the buffer is undefined from now on and valid when ``bar`` is told."""

        def role() -> Role:
            where[index] = None
            yield
            where[index] = label
            yield
            bar.arrive()

        self._spawn(role())

    def copy_out(self, where: list[Any], index: int, label: Any) -> None:
        """Issue a TMA store; it reads the buffer later."""

        def role() -> Role:
            yield
            expect(where[index], label)
            yield
            expect(where[index], label)
            self.stored.append((label[1], label[2]))
            self.pending -= 1

        self.pending += 1
        self._spawn(role())

    def _spawn(self, role: Role) -> None:
        self.copies += 1
        self.roles[f"copy {self.copies}"] = role


def _bars(number: int, count: int) -> list[MBarrier]:
    return [MBarrier(count) for _ in range(number)]


def expect(found: Any, wanted: Any) -> None:
    if found != wanted:
        raise ProtocolError(f"buffer holds {found}, expected {wanted}")


@dataclass(frozen=True)
class Tile:
    """Key blocks of a tile, and how many of them, counted from the first, each warpgroup needs."""

    blocks: int
    needs: tuple[int, ...]


def scheduler(m: Machine, tiles: Sequence[Tile]) -> Role:
    """The scheduler warp."""
    s = m.shape

    def send_output(turn: int) -> Iterator[None]:
        if turn < 0:
            return
        expect(m.slots[turn % 2], turn)
        for w in range(s.warpgroups):
            at = (turn % s.q_stages) * s.warpgroups + w
            yield from m.o_full[at].wait((turn // s.q_stages) & 1)
            m.copy_out(m.q, at, ("O", turn, w))
            yield
        while m.pending:
            yield
        m.q_empty[turn % s.q_stages].arrive()
        yield

    def announce(turn: int, label: int) -> Iterator[None]:
        m.slots[turn % 2] = None
        yield
        m.slots[turn % 2] = label
        m.slot_full[turn % 2].arrive()
        yield

    for turn in range(len(tiles)):
        yield from send_output(turn - 2)
        yield from announce(turn, turn)
    yield from send_output(len(tiles) - 2)
    yield from announce(len(tiles), -1)
    yield from send_output(len(tiles) - 1)


def await_tile(m: Machine, turn: int) -> Iterator[None]:
    yield from m.slot_full[turn % 2].wait((turn // 2) & 1)
    for _ in range(2):  # reading takes a while
        expect(m.slots[turn % 2] in (turn, -1), True)
        yield


def producer(m: Machine, tiles: Sequence[Tile]) -> Role:
    """The producer warp."""
    s, count, turn = m.shape, 0, 0

    def load(ring: str, label: tuple[int, int], count: int) -> Iterator[None]:
        stage, phase = count % s.kv_stages, (count // s.kv_stages) & 1
        if s.named_release:
            if count >= s.kv_stages:
                yield from m.named[ring][stage].wait()
        else:
            yield from m.empty[ring][stage].wait(phase ^ 1)
        m.copy_in(m.ring[ring], stage, label, m.full[ring][stage])
        yield

    while True:
        yield from await_tile(m, turn)
        if m.slots[turn % 2] != turn:
            break
        blocks = tiles[turn].blocks
        yield from load("k", (turn, blocks - 1), count)
        yield from m.q_empty[turn % s.q_stages].wait(((turn // s.q_stages) & 1) ^ 1)
        for w in range(s.warpgroups):
            at = (turn % s.q_stages) * s.warpgroups + w
            m.copy_in(m.q, at, ("Q", turn), m.q_full[at])
            yield
        count += 1
        for block in range(blocks - 2, -1, -1):
            yield from load("k", (turn, block), count)
            yield from load("v", (turn, block + 1), count - 1)
            count += 1
        yield from load("v", (turn, 0), count - 1)
        turn += 1


def consumer(m: Machine, w: int, tiles: Sequence[Tile]) -> Role:
    """Warpgroup ``w``; products are modelled by looking at their operands before and after a yield."""
    s, count, turn = m.shape, 0, 0

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

    def skip_block(count: int) -> Iterator[None]:
        stage, phase = count % s.kv_stages, (count // s.kv_stages) & 1
        yield from m.full["k"][stage].wait(phase)
        yield from take_turn()
        pass_turn()
        release("k", stage)
        yield from m.full["v"][stage].wait(phase)
        release("v", stage)

    def products(turn: int, count: int, k: Any, before: int, v: Any) -> Iterator[None]:
        """S = Q K^T if ``k``, O += P V if ``v``; ``before`` is V's stage."""
        at = (turn % s.q_stages) * s.warpgroups + w
        for _ in range(2):
            if k:
                expect(m.q[at], ("Q", turn))
                expect(m.ring["k"][count % s.kv_stages], k)
            if v:
                expect(m.ring["v"][before], v)
            yield

    def finish(turn: int) -> None:
        at = (turn % s.q_stages) * s.warpgroups + w
        expect(m.slots[turn % 2], turn)
        expect(m.q[at], ("Q", turn))
        m.q[at] = ("O", turn, w)
        m.o_full[at].arrive()

    if w == s.warpgroups - 1:
        pass_turn()
    while True:
        yield from await_tile(m, turn)
        if m.slots[turn % 2] != turn:
            expect(turn, len(tiles))
            break
        tile = tiles[turn]
        last = tile.needs[w]
        if s.ragged:
            if w == 0:
                yield from m.full["v"][count % s.kv_stages].wait((count // s.kv_stages) & 1)
                expect(m.ring["v"][count % s.kv_stages], (turn, tile.blocks - 1))
            yield from m.cleared.wait()
        for _ in range(last, tile.blocks):
            yield from skip_block(count)
            count += 1
        yield from m.q_full[(turn % s.q_stages) * s.warpgroups + w].wait((turn // s.q_stages) & 1)
        for block in range(last - 1, -1, -1):
            stage, phase, before = count % s.kv_stages, (count // s.kv_stages) & 1, (count - 1) % s.kv_stages
            first = block == last - 1
            yield from m.full["k"][stage].wait(phase)
            yield from take_turn()
            yield from products(turn, count, (turn, block), before, None if first else (turn, block + 1))
            pass_turn()
            release("k", stage)
            yield
            yield from m.full["v"][stage].wait(phase)
            if not first:
                expect(m.ring["v"][before], (turn, block + 1))
                release("v", before)
            count += 1
        yield from products(turn, count, None, stage, (turn, 0))
        release("v", stage)
        yield
        finish(turn)
        turn += 1
    if w == 0:
        yield from take_turn()


def run(shape: Shape, tiles: Sequence[Tile], seed: int, patience: int = 20000) -> None:
    """Execute one thread block that is given ``tiles``.

    Raises:
        ProtocolError: a wrong buffer, a barrier over-subscribed, or no end within ``patience`` idle steps.
    """
    choose = random.Random(seed)
    m = Machine(shape)
    m.roles["scheduler"] = scheduler(m, tiles)
    m.roles["producer"] = producer(m, tiles)
    for w in range(shape.warpgroups):
        m.roles[f"consumer {w}"] = consumer(m, w, tiles)
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
        if steps > patience * (1 + sum(tile.blocks for tile in tiles)):
            raise ProtocolError(f"deadlock; still alive: {sorted(m.roles)}")
    if sorted(m.stored) != [(t, w) for t in range(len(tiles)) for w in range(shape.warpgroups)]:
        raise ProtocolError(f"stored {sorted(m.stored)}")
    if any(bar.here for bar in m.turn):
        raise ProtocolError("a turn was passed that nobody took")
