"""The features, one file each, and the table that turns a :class:`~flashtri_core.problem.Problem` into kernel hooks."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import alibi, attn_bias, attn_mask, causal, dropout, full, plain, sink, softcap, window
from .contract import Variant, VariantArgs, no_alibi, no_bias, no_drop, no_drop_grad, no_rescale, no_slope

if TYPE_CHECKING:
    from ..problem import Extras, Problem

LOG2E = 1.4426950408889634
SMALLEST_UNIT = 2.0**-10  # the steepest slope divided by it, times a distance of 2 ** 27, is in float32

MASKS: dict[str, ModuleType] = {"full": full, "causal": causal, "window": window}

#: Every feature by its public name: the module whose docstring is its documentation page.
FEATURES: dict[str, ModuleType] = {
    "causal": causal,
    "window": window,
    "softcap": softcap,
    "alibi": alibi,
    "sink": sink,
    "bias": attn_bias,
    "mask": attn_mask,
    "dropout": dropout,
}


def assemble(problem: Problem, extras: Extras) -> tuple[Variant, VariantArgs, float]:
    """Hooks, their arguments, and unit_log2 for one call.

    A bias is in natural units, so behind one the score has unit 1. Without one the unit is the factor that the score
    ends with (softmax_scale or softcap) and costs nothing; ALiBi's slope is divided by it, once per tile. A scale that is
    not positive cannot be pulled out of a maximum and stays in the score, and so does a unit by which a slope divided
    might overflow.
    """
    mask = MASKS[problem.mask_kind]
    scale, cap = problem.softmax_scale, problem.softcap
    natural = problem.bias or (problem.alibi and (cap or scale) < SMALLEST_UNIT)
    score: tuple[Any, ...]
    if cap > 0 and natural:
        hooks, score, unit = (softcap.score_natural, softcap.score_grad_natural), (scale / cap, cap, 1.0 / cap), 1.0
    elif cap > 0:
        hooks, score, unit = (softcap.score, softcap.score_grad), (scale / cap,), cap
    elif natural or scale <= 0:
        hooks, score, unit = (plain.score_scaled, plain.score_grad), (scale,), 1.0
    else:
        hooks, score, unit = (plain.score, plain.score_grad), (), scale
    slopes, bias = extras.alibi_slopes, extras.attn_bias
    alibi_args: tuple[Any, ...] = ()
    if slopes is not None:
        alibi_args = (slopes, slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1), 1.0 / unit)
    behind = problem.mask_kind == "causal" or (problem.mask_kind == "window" and problem.window[1] == 0)
    drops = problem.dropout_p > 0
    variant = Variant(
        keep=mask.keep,
        place=mask.place,
        kv_range=mask.kv_range,
        q_range=mask.q_range,
        score=hooks[0],
        score_grad=hooks[1],
        slope=alibi.slope if slopes is not None else no_slope,
        alibi=no_alibi if slopes is None else alibi.add_behind if behind else alibi.add,
        bias=attn_bias.add if bias is not None else no_bias,
        drop=dropout.drop if drops else no_drop,
        drop_grad=dropout.drop_grad if drops else no_drop_grad,
        rescale=dropout.rescale if drops else no_rescale,
    )
    args = VariantArgs(
        mask=problem.window if problem.mask_kind == "window" else (),
        score=score,
        alibi=alibi_args,
        bias=attn_bias.pointer_args(bias) if bias is not None else (),
        drop=(extras.rng, dropout.levels(problem.dropout_p), dropout.keep_scale(problem.dropout_p)) if drops else (),
    )
    return variant, args, unit * LOG2E


__all__ = ["FEATURES", "MASKS", "Variant", "VariantArgs", "assemble", "no_alibi", "no_bias", "no_drop"]
