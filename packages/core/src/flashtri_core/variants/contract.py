"""The contract between a feature and the kernels.

A feature is one file. It holds the jit functions that the kernels take as compile-time parameters, the eager twin that
the reference uses, its argument checks, and the docstring that becomes its page. The kernels call the functions of a
:class:`Variant` and hand each one its own tuple out of :class:`VariantArgs`; what a variant does not use is a function
that returns its input, so an unused feature costs nothing.

Index tiles: ``i`` query rows [BLOCK_M, 1] and ``j`` keys [1, BLOCK_N], int32, counted inside their own sequence;
``Nq`` and ``Nk`` are that sequence's lengths; ``z`` batch (or sequence) and ``h`` query head are scalars.

=============  ==================================================================================================
``keep``        ``(i, j, Nq, Nk, args) -> bool tile``: which keys the mask shows (the kernel itself checks j < Nk)
``place``       ``(i, j, Nq, Nk, args) -> a, b, width``: the same as ``0 <= a - b <= width`` in int32, for kernels that hide
                scores by one unsigned comparison
``kv_range``    ``(m0, m1, Nq, Nk, args) -> lo, full_lo, full_hi, hi``: keys that rows [m0, m1) can see. Tiles outside
                [lo, hi) are skipped, tiles inside [full_lo, full_hi) run without ``keep``
``q_range``     the same four bounds in query rows, for keys [n0, n1)
``score``       ``(qk, args) -> s`` in multiples of a positive unit, which the host folds into ``unit_log2``
``score_grad``  ``(ds, s, args) -> dqk`` up to the factor softmax_scale, ``s`` being what ``score`` returned
``slope``       ``(z, h, args) -> slope``, a scalar, which kernels may read once per tile for
``alibi``       ``(s, slope, i, j, Nq, Nk) -> s`` plus an additive term without gradient of its own
``bias``        ``(s, z, h, i, j, Nq, Nk, args, EDGE) -> s`` plus the user's additive bias (its gradient has its own
                kernel); EDGE says whether the tile may reach past Nk
``drop``        ``(p, z, h, start_m, start_n, args, SPARE) -> kept`` [BLOCK_M, BLOCK_N]: p with 0 where it is dropped;
                SPARE asks for few registers instead of few instructions
``drop_grad``   ``(p, kept, dp, delta, args) -> ds``, the gradient of softmax and dropout up to the factor of ``rescale``
``rescale``     ``(x, args) -> x`` divided by the keep probability: once per output, behind the loops, since O and every
                gradient are linear in it
=============  ==================================================================================================
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .._jit import jit, tl


class Variant(NamedTuple):
    """The jit functions of one call; see the module docstring."""

    keep: Any
    place: Any
    kv_range: Any
    q_range: Any
    score: Any
    score_grad: Any
    slope: Any
    alibi: Any
    bias: Any
    drop: Any
    drop_grad: Any
    rescale: Any


class VariantArgs(NamedTuple):
    """What each function of a :class:`Variant` is handed: tensors, numbers, or an empty tuple."""

    mask: tuple[Any, ...]
    score: tuple[Any, ...]
    alibi: tuple[Any, ...]
    bias: tuple[Any, ...]
    drop: tuple[Any, ...]


@jit
def no_slope(z, h, args):
    """The slope where there is no ALiBi."""
    return 0


@jit
def no_alibi(s, slope, i, j, Nq, Nk):
    """ALiBi's axis when unused: the score itself."""
    return s


@jit
def no_bias(s, z, h, i, j, Nq, Nk, args, EDGE: tl.constexpr):
    """The bias axis when unused."""
    return s


@jit
def no_drop(p, z, h, start_m, start_n, args, SPARE: tl.constexpr = False):
    """Probability axis when unused: the probabilities themselves."""
    return p


# --8<-- [start:bwd-ds]
@jit
def no_drop_grad(p, kept, dp, delta, args):
    """Gradient of the softmax: ds = p * (dp - delta), delta the row sum of dO * O less the gradient of LSE."""
    return p * (dp - delta)  # [BLOCK_M, BLOCK_N]


# --8<-- [end:bwd-ds]


@jit
def no_rescale(x, args):
    """What was summed over probabilities, none of them dropped."""
    return x
