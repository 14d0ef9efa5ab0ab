"""Which tiles are visited: the masks' bounds and the tile orders, from the kernels' own code run as plain Python."""

import itertools
import types

import pytest
import torch

from flashtri_core.kernels import schedule
from flashtri_core.variants import MASKS, causal, full, window


class Words(list):
    """An int32 array in memory: ``CU + index`` is an address, ``load`` reads it."""

    def __add__(self, index):
        return self, index


def load(address):
    words, index = address
    return words[index]


TL = types.SimpleNamespace(minimum=min, maximum=max, load=load)


def plain(fn):
    """A jit function, and those it calls, as ordinary Python over ints, with Triton's few scalar operations replaced."""
    fn = getattr(fn, "fn", fn)
    callees = {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__ and name != "tl"}
    return types.FunctionType(fn.__code__, {"tl": TL} | {name: plain(callee) for name, callee in callees.items()})


SIZES = [1, 2, 3, 4, 5, 8, 11]
WINDOWS = [(0, 0), (1, 0), (0, 2), (3, 1), (2, 30), (30, 2), (-1, 1), (1, -1)]
MASK_ARGS = [(full, ()), (causal, ())] + [(window, window.normalise(*sides, False)) for sides in WINDOWS]


def name_of(mask):
    return f"{mask[0].__name__.rsplit('.', 1)[1]}{mask[1] if mask[1] else ''}".replace(str(window.UNBOUNDED), "open")


def shown(module, args, nq, nk):
    i, j = torch.arange(nq)[:, None], torch.arange(nk)[None, :]
    return module.keep_eager(i, j, nq, nk, *(args or window.normalise(-1, -1, False)))


@pytest.mark.parametrize("mask", MASK_ARGS, ids=name_of)
@pytest.mark.parametrize("axis", ["kv", "q"])
def test_bounds_by_brute_force(mask, axis):
    """No visible key lies outside [lo, hi), nothing hidden inside [full_lo, full_hi), and the four are in order.

    A tile outside the bounds is skipped, one inside the middle runs without a mask: a wrong bound is a wrong number.
    """
    module, args = mask
    bounds = plain(module.kv_range if axis == "kv" else module.q_range)
    for nq, nk in itertools.product(SIZES, [0, *SIZES]):
        keep = shown(module, args, nq, nk)
        keep = keep if axis == "kv" else keep.T
        rows, columns = keep.shape
        for first in range(rows):
            for last in range(first + 1, rows + 1):
                lo, full_lo, full_hi, hi = bounds(first, last, nq, nk, args)
                assert 0 <= lo <= full_lo <= full_hi <= hi <= columns, (nq, nk, first, last, lo, full_lo, full_hi, hi)
                tile = keep[first:last]
                assert not tile[:, :lo].any() and not tile[:, hi:].any(), (nq, nk, first, last, lo, hi)
                assert tile[:, full_lo:full_hi].all(), (nq, nk, first, last, full_lo, full_hi)


@pytest.mark.parametrize("mask", MASK_ARGS, ids=name_of)
def test_bounds_are_tight(mask):
    """One row's bounds hold its visible keys and no other: nothing hidden is computed that could be skipped."""
    module, args = mask
    for nq, nk in itertools.product(SIZES, SIZES):
        keep = shown(module, args, nq, nk)
        for i in range(nq):
            keys = keep[i].nonzero().flatten().tolist()
            lo, full_lo, full_hi, hi = plain(module.kv_range)(i, i + 1, nq, nk, args)
            assert hi - lo == len(keys)
            assert list(range(full_lo, full_hi)) == keys


@pytest.mark.parametrize("mask", MASK_ARGS, ids=name_of)
def test_keep_is_its_eager_twin(mask):
    module, args = mask
    keep = plain(module.keep)
    for nq, nk in itertools.product(SIZES, SIZES):
        i, j = torch.arange(nq)[:, None], torch.arange(nk)[None, :]
        assert torch.equal(keep(i, j, nq, nk, args).expand(nq, nk), shown(module, args, nq, nk).expand(nq, nk))


@pytest.mark.parametrize("name", MASKS)
def test_edges_that_are_promised_away_are_empty(name):
    """A side whose *_EDGE is False is a loop that the kernel does not have: no tile may fall there."""
    module = MASKS[name]
    block = plain(schedule.block_bounds)
    for nq, nk, size in itertools.product(SIZES, SIZES, (1, 2, 4)):
        for args in [a for m, a in MASK_ARGS if m is module]:
            for first in range(0, nq, size):
                lo, full_lo, full_hi, hi = block(
                    *plain(module.kv_range)(first, min(first + size, nq), nq, nk, args), size
                )
                assert module.KV_LEFT_EDGE or lo >= full_lo, (nq, nk, first)
            for first in range(0, nk, size):
                lo, full_lo, full_hi, hi = block(
                    *plain(module.q_range)(first, min(first + size, nk), nq, nk, args), size
                )
                assert module.Q_LEFT_EDGE or lo >= full_lo, (nq, nk, first)
                if not module.Q_RIGHT_EDGE:  # the middle runs on to hi: past the full blocks lies only what is ragged
                    assert hi - full_hi < size or lo >= hi, (nq, nk, first)


def test_block_bounds_keep_the_order_and_cover_once():
    """The three loops lo..full_lo..full_hi..hi visit every block that holds a visible key once, in whole blocks."""
    block_bounds = plain(schedule.block_bounds)
    for lo, full_lo, full_hi, hi in itertools.combinations_with_replacement(range(11), 4):
        for size in (1, 2, 4):
            a, b, c, d = block_bounds(lo, full_lo, full_hi, hi, size)
            visited = [n for first, last in ((a, b), (b, c), (c, d)) for n in range(first, last, size)]
            assert visited == list(range(lo // size * size, hi, size))
            assert all(n >= full_lo and n + size <= full_hi for n in range(b, c, size))


@pytest.mark.parametrize("mask", MASK_ARGS, ids=name_of)
def test_places_say_what_keep_says(mask):
    """One unsigned comparison of ``place`` hides what ``keep`` hides, in int32."""
    module, args = mask
    for nq, nk in itertools.product(SIZES, SIZES):
        for i, j in itertools.product(range(nq), range(nk)):
            a, b, width = plain(module.place)(i, j, nq, nk, args)
            assert 0 <= width < 1 << 31 and ((a - b) % 2**32 <= width) == plain(module.keep)(i, j, nq, nk, args)


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize(("batch_heads", "group"), [(1, 1), (6, 1), (6, 4), (7, 3), (5, 5)])
def test_dense_tiles_cover_once(blocks, batch_heads, group, descending):
    """Row 126: every tile of every head has exactly one program."""
    tile = plain(schedule.dense_tile)
    seen = [tile(pid, blocks, batch_heads, group, 16, descending) for pid in range(blocks * batch_heads)]
    assert sorted(seen) == [(zh, n * 16) for zh in range(batch_heads) for n in range(blocks)]


def test_dense_tiles_start_with_the_longest():
    """Inside a group of heads the longest tiles come first: the last query blocks of a causal mask."""
    tile = plain(schedule.dense_tile)
    starts = [tile(pid, 4, 6, 3, 16, True)[1] for pid in range(12)]
    assert starts == sorted(starts, reverse=True)


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize(
    "lengths",
    [[1], [16], [17], [0], [0, 0, 5], [5, 0, 0], [40, 0, 1, 16, 15, 33], [1] * 20, [200] + [1] * 9, [3, 0] * 7],
)
def test_packed_tiles_cover_once(lengths, group, descending):
    """Rows 52, 54, 134: every tile of every sequence has one program, whatever is empty; the others fall past an end."""
    tile = plain(schedule.packed_tile)
    heads, size, tail = 3, 16, 5
    cu = Words(itertools.accumulate(lengths, initial=0))
    tiles = (cu[-1] + tail) // size + len(lengths)
    seen = [tile(pid, tiles, heads, group, len(lengths), cu, size, descending) for pid in range(tiles * heads)]
    at_work = sorted((h, s, m) for h, s, m in seen if m < lengths[s])
    assert at_work == [(h, s, m) for h in range(heads) for s, n in enumerate(lengths) for m in range(0, n, size)]
    assert all(m >= 0 for _, _, m in seen), "a program with negative rows would write over its neighbour"


def test_bounds_stay_in_int32():
    """An open window beside the longest sequences does not wrap: 2^30 plus an index and a length stay below 2^31."""
    longest = (1 << 29) - 1
    assert window.UNBOUNDED + 2 * longest < 1 << 31
    lo, _, _, hi = plain(window.kv_range)(longest - 1, longest, longest, longest, window.normalise(-1, -1, False))
    assert (lo, hi) == (0, longest)
