"""Hugging Face transformers: call `register()`, then load any model with `attn_implementation="triton_attention"`.

    from flashtri_modules.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="triton_attention")

The library asks two functions of an attention implementation: one makes a mask, once per forward pass, and one attends,
in each layer. Patterns that the kernels know by themselves (causal, sliding windows, padded keys, several sequences
packed in one row) go from the first to the second as a `Pattern`, a few words and at most one value per key. All others
(chunks, prefixes, images, static caches, a 4-D mask of the caller) go as the `(B, 1, Nq, Nk)` mask that `sdpa` would
get.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flashtri_core import flash_attn, flash_attn_varlen

NAME = "triton_attention"


@dataclass(frozen=True, eq=False)
class Pattern(BlockMask):
    """Who sees whom, for what takes no `(Nq, Nk)` mask. The last query stands at the last key.

    A subclass of flex_attention's `BlockMask` in name only: that is the one kind of mask, apart from a 4-D tensor,
    which transformers hands on from the model to its layers without a look inside.
    """

    causal: bool = False
    window: tuple[int, int] = (-1, -1)  # keys to the left and right, inclusive; -1 is unbounded
    keys: Tensor | None = None  # (B, Nk) boolean, True for real keys; None: all are
    bounds: Tensor | None = (
        None  # (sequences + 1,) int32, bounds of the sequences packed in the B x N tokens; None: B rows
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """Four dimensions, by which transformers knows a mask that is made already."""
        return (1, 1, 1, 1)

    def to(self, device: torch.device | str) -> "Pattern":
        """The same pattern with its tensors on `device`."""
        keys, bounds = (None if t is None else t.to(device) for t in (self.keys, self.bounds))
        return replace(self, keys=keys, bounds=bounds)

    def __str__(self) -> str:
        return repr(self)


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` known to transformers. Calling it again does no harm.

    Args:
        name: what models are loaded with. It must not contain "flash": transformers takes such a name for a build of
            the flash-attn package, looks for that, and for some models (gpt-oss) silently takes another one instead.

    Raises:
        ImportError: transformers is not installed, or has no `masking_utils` (before 4.53).
        ValueError: `name` contains "flash".
    """
    if "flash" in name:
        raise ValueError(f'name must not contain "flash", which transformers keeps for flash-attn builds, got {name!r}')
    library = importlib.import_module("transformers")
    masking = importlib.import_module("transformers.masking_utils")
    library.AttentionInterface.register(name, attention_forward)
    library.AttentionMaskInterface.register(name, partial(make_mask, masking))


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Pattern | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer, as transformers calls an attention function.

    Args:
        module: the layer; its `is_causal` (True where it has none) counts while `is_causal` is None.
        query: `(B, Hq, Nq, D)`.
        key: `(B, Hk, Nk, D)`.
        value: `(B, Hk, Nk, Dv)`.
        attention_mask: a `Pattern`, or a `(B, 1, Nq, Nk)` mask, boolean with True for visible pairs or additive. Either
            says all about visibility; without one `is_causal`, `sliding_window` and the packed bounds below do.
        dropout: probability, already 0 outside of training.
        scaling: factor on the scores. Default `D ** -0.5`.
        sliding_window: how many tokens a token sees to its left, itself included; as many to its right unless causal.
        softcap: as in `flash_attn`; None is off.
        is_causal: overrides the layer's own.
        s_aux: `(Hq,)` sink logits.
        position_bias: additive, broadcastable to `(B, Hq, Nq, Nk)`; may require grad.
        **kwargs: of these `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` (bounds of packed sequences)
            and `deterministic` are heeded.

    Returns:
        `(B, Nq, Hq, Dv)` contiguous, and None in place of attention weights.

    Raises:
        NotImplementedError: attention weights or a paged key-value cache asked for; `position_bias` with packed bounds.
        ValueError: a mask tensor that has not four dimensions.
    """
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "output_attentions=True is not supported; load the model with attn_implementation='eager'"
        )
    for paged in ("block_table", "k_cache", "v_cache"):
        if kwargs.get(paged) is not None:
            raise NotImplementedError(f"{paged} (a paged key-value cache) is not supported")

    mask, bias = None, position_bias
    max_q, max_k = query.shape[2], key.shape[2]
    if isinstance(attention_mask, Pattern):
        causal, window, bounds_q = attention_mask.causal, attention_mask.window, attention_mask.bounds
        bounds_k = bounds_q
        mask = None if attention_mask.keys is None else attention_mask.keys[:, None, None, :]
    elif attention_mask is None:
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
        bounds_q, bounds_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
        if bounds_q is not None:
            max_q, max_k = int(kwargs["max_length_q"]), int(kwargs["max_length_k"])
    elif attention_mask.dim() == 4:
        causal, window, bounds_q, bounds_k = False, (-1, -1), None, None
        attention_mask = attention_mask[..., : key.shape[2]]
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            bias = attention_mask if bias is None else bias + attention_mask
    else:
        raise ValueError(f"attention_mask must be (B, 1, Nq, Nk), got shape {tuple(attention_mask.shape)}")

    options: dict[str, Any] = {
        "causal": causal, "window_size": window, "softmax_scale": scaling, "softcap": softcap or 0.0,
        "learnable_sink": s_aux, "dropout_p": dropout, "deterministic": kwargs.get("deterministic"),
    }  # fmt: skip
    if bounds_q is None or bounds_k is None:
        out = flash_attn(query, key, value, attn_mask=mask, attn_bias=bias, **options).transpose(1, 2)
    else:
        if position_bias is not None:
            raise NotImplementedError("position_bias is not supported with several sequences packed in one row")
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        out = flash_attn_varlen(q, k, v, bounds_q, bounds_k, max_q, max_k, **options)
        out = out.unflatten(0, (query.shape[0], query.shape[2]))
    return out.contiguous(), None


def make_mask(
    masking: Any,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | Pattern | None:
    """Make the mask of one forward pass, as transformers calls a mask function.

    Args:
        masking: the module `transformers.masking_utils`.
        batch_size: `B`.
        q_length: `Nq`.
        kv_length: `Nk`.
        q_offset: position of the first query; a tensor for static caches.
        kv_offset: position of the first key.
        mask_function: from (batch, head, query, key) positions to visibility. Default causal.
        attention_mask: boolean `(B, positions)`, True for real tokens.
        **kwargs: what else `sdpa_mask` takes.

    Returns:
        None for plain causal or bidirectional attention without padding, which layers know by their `is_causal`; a
        `Pattern`; or a boolean `(B, 1, Nq, Nk)`.
    """
    mask_function = masking.causal_mask_function if mask_function is None else mask_function
    pattern = _recognise(masking, mask_function)
    if pattern is not None:
        positional = pattern.causal or pattern.window != (-1, -1)
        aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
        # Packed rows have no padding, and a mask may be shorter than a cache.
        covered = attention_mask is None or (
            pattern.bounds is None and attention_mask.shape[-1] >= kv_offset + kv_length
        )
        if covered and (aligned or not positional):
            if attention_mask is not None:
                keys = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
                # Worth a look at the values, once per forward pass: without padding no mask is needed. None while
                # tracing.
                if torch.compiler.is_compiling() or not bool(keys.all()):
                    pattern = replace(pattern, keys=keys)
            plain = pattern.window == (-1, -1) and pattern.keys is None and pattern.bounds is None
            return None if plain else pattern
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask: Tensor | None = masking.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, **kwargs,
    )  # fmt: skip
    return mask


def _recognise(masking: Any, function: Any) -> Pattern | None:
    """Find the `Pattern` that a mask function of transformers computes.

    The library builds its patterns from closures, so their names and what they hold tell which one this is. None, the
    answer
    for all that is not known for certain, leads to the full mask: slower, never wrong.
    """
    if function is masking.causal_mask_function:
        return Pattern(causal=True)
    if function is masking.bidirectional_mask_function:
        return Pattern()
    maker, held = _closure(function)
    if maker == "sliding_window_overlay":
        return Pattern(window=(held["sliding_window"] - 1, -1))
    if maker == "sliding_window_bidirectional_overlay":
        return Pattern(window=(held["sliding_window"], held["sliding_window"]))
    if maker == "packed_sequence_mask_function":
        return Pattern(bounds=_bounds(held["packed_sequence_mask"]))
    if maker != "and_masks":
        return None
    functions = held["mask_functions"]
    makers = [_closure(f)[0] for f in functions]
    if "packed_sequence_mask_function" in makers:
        # Positions that start again with each sequence make no difference between tokens of one sequence.
        functions = [
            _closure(f)[1]["mask_function"] if maker == "remap_positions_for_packed_sequence" else f
            for f, maker in zip(functions, makers, strict=True)
        ]
    patterns = [_recognise(masking, f) for f in functions]
    known = [p for p in patterns if p is not None]
    if len(known) < len(patterns):
        return None
    sides = zip(*(p.window for p in known), strict=True)
    left, right = (min((n for n in side if n >= 0), default=-1) for side in sides)
    bounds = [p.bounds for p in known if p.bounds is not None]
    return Pattern(any(p.causal for p in known), (left, right), None, bounds[0] if bounds else None)


def _closure(function: Any) -> tuple[str, dict[str, Any]]:
    """The name of the function whose closure this is, and what it holds by name; nothing while tracing."""
    if torch.compiler.is_compiling() or not isinstance(function, FunctionType) or function.__closure__ is None:
        return "", {}
    names, cells = function.__code__.co_freevars, function.__closure__
    return function.__qualname__.partition(".")[0], dict(zip(names, (c.cell_contents for c in cells), strict=True))


def _bounds(numbers: Tensor) -> Tensor:
    """`cu_seqlens (sequences + 1,)` int32 over the flattened tokens, from each token's sequence number `(B, N)`."""
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = first.flatten().nonzero()[:, 0]
    return torch.cat([starts, starts.new_tensor([numbers.numel()])]).to(torch.int32)
