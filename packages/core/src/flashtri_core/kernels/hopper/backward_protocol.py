"""The backward kernels' barrier protocols as programs that run anywhere, in any order.

The counterpart of :mod:`.protocol` (whose barriers it uses) for :mod:`.backward` and :mod:`.backward_split`. A buffer is a
label of what it holds; a product in flight looks at its operands before and after a yield. Copies by TMA are roles of their
own, so they land late.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .protocol import MBarrier, ProtocolError, Role, expect


@dataclass(frozen=True)
class Shape:
    """What the protocol depends on."""

    q_stages: int = 2  # K's stages in the dQ kernel
    do_stages: int = 2  # V's stages there
    dq: bool = True
    tiles: int = 1  # key tiles that the thread block takes (whole_head)


def _bars(number: int, count: int) -> list[MBarrier]:
    return [MBarrier(count) for _ in range(number)]


@dataclass
class Machine:
    """One thread block: barriers, buffers, and roles that are still alive."""

    shape: Shape
    roles: dict[str, Role] = field(default_factory=dict)
    added: list[tuple[int, int]] = field(default_factory=list)  # (step, warpgroup) whose dQ went out
    stored: list[tuple[str, int]] = field(default_factory=list)
    copies: int = 0

    def __post_init__(self) -> None:
        s = self.shape
        self.once, self.done = _bars(2, 1), MBarrier(2)  # k_full, v_full (or q_full); k_done
        self.kv_empty = MBarrier(2)
        self.full = {"q": _bars(s.q_stages, 1), "do": _bars(s.do_stages, 1)}
        self.empty = {"q": _bars(s.q_stages, 2), "do": _bars(s.do_stages, 2)}
        self.ds_full = _bars(2, 2)
        self.ring: dict[str, list[Any]] = {"q": [None] * s.q_stages, "do": [None] * s.do_stages}
        self.own: dict[str, list[Any]] = {"k": [None, None], "v": [None, None]}
        self.ds: list[list[Any]] = [[None, None], [None, None]]

    def copy_in(self, writes: Callable[[Any], None], label: Any, bar: MBarrier) -> None:
        """Issue a TMA load: the buffer is undefined from now on and valid when ``bar`` is told."""

        def role() -> Role:
            yield
            writes(label)
            yield
            bar.arrive()

        writes(None)
        self.copies += 1
        self.roles[f"copy {self.copies}"] = role()

    def load(self, ring: str, step: int) -> Iterator[None]:
        """The producer's turn for the step-th block of ``ring``."""
        stages = len(self.ring[ring])
        stage = step % stages
        yield from self.empty[ring][stage].wait(((step // stages) & 1) ^ 1)
        self.copy_in(lambda label: self.ring[ring].__setitem__(stage, label), step, self.full[ring][stage])
        yield

    def arrived(self, ring: str, step: int) -> Iterator[None]:
        stages = len(self.ring[ring])
        yield from self.full[ring][step % stages].wait((step // stages) & 1)
        self.holds(ring, step)

    def holds(self, ring: str, step: int) -> None:
        expect(self.ring[ring][step % len(self.ring[ring])], step)

    def release(self, ring: str, step: int) -> None:
        self.holds(ring, step)
        self.empty[ring][step % len(self.ring[ring])].arrive()


def _load_once(m: Machine, name: str, bar: MBarrier, tile: int = 0) -> None:
    m.copy_in(lambda label: m.own.__setitem__(name, [label, label]), (name, tile), bar)


def fused_producer(m: Machine, steps: int) -> Role:
    """``steps`` = BLOCK_M blocks over all heads of the group, for each tile."""
    for tile in range(m.shape.tiles):
        if m.shape.tiles > 1:
            yield from m.kv_empty.wait((tile & 1) ^ 1)
        _load_once(m, "k", m.once[0], tile)
        for step in range(tile * steps, (tile + 1) * steps):
            yield from m.load("q", step)
            if step == tile * steps:
                _load_once(m, "v", m.once[1], tile)
            yield from m.load("do", step)
        yield


def fused_consumer(m: Machine, w: int, steps: int) -> Role:
    """Warpgroup ``w`` of the fused kernel, and of the dK, dV kernel when ``shape.dq`` is off."""
    for tile in range(m.shape.tiles):
        k, v = ("k", tile), ("v", tile)
        yield from m.once[0].wait(tile & 1)
        if steps:
            yield from m.once[1].wait(tile & 1)
        for step in range(tile * steps, (tile + 1) * steps):
            buffer = step & 1
            yield from m.arrived("q", step)
            expect(m.own["k"][w], k)
            yield from m.arrived("do", step)
            expect(m.own["v"][w], v)
            yield  # S and dP are under way
            m.holds("q", step)
            m.holds("do", step)
            if m.shape.dq:
                m.ds[buffer][w] = step
                yield
                m.ds_full[buffer].arrive()
                yield
                yield from m.ds_full[buffer].wait((step >> 1) & 1)
                for _ in range(2):  # dQ reads both halves of dS and all of K
                    expect(m.ds[buffer], [step, step])
                    expect(m.own["k"], [k, k])
                    yield
            m.release("do", step)
            yield
            if m.shape.dq:
                yield from m.ds_full[buffer].wait((step >> 1) & 1)  # the branch that holds the additions up
                m.added.append((step, w))
            m.release("q", step)
            yield
        if m.shape.dq:
            m.done.arrive()
        m.own["v"][w] = "dv"
        yield
        if m.shape.dq:
            yield from m.done.wait(tile & 1)
        m.own["k"][w] = "dk"
        for _ in range(2):  # the stores read them
            expect((m.own["k"][w], m.own["v"][w]), ("dk", "dv"))
            yield
        m.stored += [("dv", w), ("dk", w)]
        if m.shape.tiles > 1:
            m.kv_empty.arrive()


def dq_producer(m: Machine, steps: int) -> Role:
    """K goes through ring "q", V through ring "do"; Q and dO are loaded once."""
    _load_once(m, "k", m.once[0])
    for step in range(steps):
        yield from m.load("q", step)
        yield from m.load("do", step)


def dq_consumer(m: Machine, w: int, steps: int) -> Role:
    """Warpgroup ``w`` of the dQ kernel; a block's product with K runs one step late."""
    yield from m.once[0].wait(0)
    for step in range(steps):
        yield from m.arrived("q", step)
        yield from m.arrived("do", step)
        yield  # S, dP and the product of the block before are under way
        if step:
            m.holds("q", step - 1)
        yield from m.full["q"][step % len(m.ring["q"])].wait((step // len(m.ring["q"])) & 1)
        m.release("do", step)
        yield
        m.holds("q", step)
        if step:
            m.release("q", step - 1)
        yield
    m.holds("q", steps - 1)
    expect(m.own["k"][w], ("k", 0))
    m.own["k"][w] = "dq"
    m.stored.append(("dq", w))
    yield


def run(shape: Shape, steps: int, seed: int, split_dq: bool = False, patience: int = 20000) -> None:
    """Execute one thread block of the fused kernel (``steps`` per tile), or of the dQ kernel (``split_dq``), in random order.

    Raises:
        ProtocolError: a wrong buffer, an incomplete result, or no end within ``patience`` idle steps.
    """
    choose = random.Random(seed)
    m = Machine(shape)
    m.roles["producer"] = (dq_producer if split_dq else fused_producer)(m, steps)
    for w in range(2):
        m.roles[f"consumer {w}"] = (dq_consumer if split_dq else fused_consumer)(m, w, steps)
    turns = 0
    while m.roles:
        name = choose.choice(list(m.roles))
        for _ in range(choose.choice((1, 1, 2, 8))):
            try:
                next(m.roles[name])
            except StopIteration:
                del m.roles[name]
                break
        turns += 1
        if turns > patience * (1 + steps) * shape.tiles:
            raise ProtocolError(f"deadlock; still alive: {sorted(m.roles)}")
    wanted = [("dq", w) for w in range(2)] if split_dq else [(x, w) for x in ("dk", "dv") for w in range(2)]
    expect(sorted(m.stored), sorted(wanted * shape.tiles))
    if shape.dq and not split_dq:
        expect(sorted(m.added), [(step, w) for step in range(steps * shape.tiles) for w in range(2)])
