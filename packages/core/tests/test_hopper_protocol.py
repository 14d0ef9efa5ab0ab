"""The Hopper forward's barrier protocol, executed in random order; and that the model catches broken protocols."""

import itertools
import random

import pytest

from flashtri_core.kernels.hopper import protocol
from flashtri_core.kernels.hopper.protocol import MBarrier, NamedBarrier, ProtocolError, Shape, Tile, run

SHAPES = [Shape(*x) for x in itertools.product((2, 3), (2, 3), (1, 2), (True, False), (True, False), (True, False))]
BLOCKS = ([], [1], [1, 1, 1, 1], [3, 1, 2, 5, 1], [4, 3], [2] * 6)


def tiles_of(shape, blocks, rnd):
    """Tiles whose lower warpgroups may need fewer blocks, as on a causal diagonal."""
    return [Tile(n, (*(rnd.randint(1, n) for _ in range(shape.warpgroups - 1)), n)) for n in blocks]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_order_ends_with_every_tile_stored(shape):
    rnd = random.Random(1)
    for blocks, seed in itertools.product(BLOCKS, range(5)):
        run(shape, tiles_of(shape, blocks, rnd), seed, patience=500)


def test_long_random_problems():
    rnd = random.Random(0)
    for seed in range(100):
        shape = rnd.choice(SHAPES)
        run(shape, tiles_of(shape, [rnd.randint(1, 7) for _ in range(rnd.randint(1, 9))], rnd), seed, patience=500)


def broken_somewhere():
    """Whether any of many orders of a protocol raises."""
    rnd, shape = random.Random(2), Shape()
    for blocks, seed in itertools.product(BLOCKS, range(20)):
        try:
            run(shape, tiles_of(shape, blocks, rnd), seed, patience=50)
        except ProtocolError:
            return True
    return False


@pytest.mark.parametrize("barrier", ["q_full", "q_empty", "o_full", "slot_full"])
def test_a_barrier_that_never_blocks_is_noticed(monkeypatch, barrier):
    setup = protocol.Machine.__post_init__

    def without(machine):
        setup(machine)
        setattr(machine, barrier, [Open(bar.count) for bar in getattr(machine, barrier)])

    monkeypatch.setattr(protocol.Machine, "__post_init__", without)
    assert broken_somewhere()


@pytest.mark.parametrize("ring", ["k", "v"])
@pytest.mark.parametrize("kind", ["full", "empty"])
def test_a_ring_without_its_barrier_is_noticed(monkeypatch, ring, kind):
    setup = protocol.Machine.__post_init__

    def without(machine):
        setup(machine)
        bars = getattr(machine, kind)
        bars[ring] = [Open(bar.count) for bar in bars[ring]]

    monkeypatch.setattr(protocol.Machine, "__post_init__", without)
    assert broken_somewhere()


def test_a_release_that_is_missing_stops_the_machine(monkeypatch):
    setup = protocol.Machine.__post_init__

    def one_more(machine):
        setup(machine)
        machine.empty["k"] = [MBarrier(bar.count + 1) for bar in machine.empty["k"]]

    monkeypatch.setattr(protocol.Machine, "__post_init__", one_more)
    with pytest.raises(ProtocolError, match="deadlock"):
        run(Shape(), [Tile(5, (5, 5))], 0, patience=50)


def test_the_opening_turn_is_taken_back():
    bar = NamedBarrier(2)
    bar.arrive()
    assert bar.here == 1
    bar.arrive()
    assert (bar.here, bar.opened) == (0, 1)


class Open(MBarrier):
    """A barrier that lets everybody through."""

    def wait(self, parity):
        return iter(())
