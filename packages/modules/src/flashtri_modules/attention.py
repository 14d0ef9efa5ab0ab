"""Attention layers: projections around `flash_attn`, and parameter plumbing only.

Every layer takes batches in one of three forms:

- dense: `x (B, N, E)`;
- padded: `x (B, N, E)` and `lengths (B,)`, the real tokens of each sequence standing first;
- packed: `x (total, E)`, `cu_seqlens (B + 1,)` and `max_seqlen`, sequences back to back without padding.

A padded batch is handed to the variable-length kernel as `2 B` sequences, tokens and padding in turn, the padding with
no key to see. So causal masks, windows and ALiBi line up with each sequence's own end, padding costs no tiles, queries,
keys and values are not copied, and the host never waits to learn a length.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flashtri_core import flash_attn, flash_attn_varlen
from flashtri_core.interface import check_options


def standard_alibi_slopes(num_heads: int) -> Tensor:
    """The geometric ALiBi slopes `2^(-8/n), 2^(-16/n), ...` of the paper (Press et al., 2021, section 3).

    A head count that is no power of two takes the slopes of the next lower power, then every other slope of the next
    higher one.

    Args:
        num_heads: number of query heads, at least 1.

    Returns:
        `(num_heads,)` fp32, decreasing within each of the two groups.

    Raises:
        ValueError: `num_heads` is below 1.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * power + 1, 2)][: num_heads - power]
    return torch.tensor(slopes, dtype=torch.float32)


class _Attention(nn.Module):
    """What self- and cross-attention share: settings, output projection, ALiBi slopes, sinks, and the kernel calls."""

    alibi_slopes: Tensor | None
    sink: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None,
        head_dim: int | None,
        bias: bool,
        causal: bool,
        softmax_scale: float | None,
        window_size: tuple[int, int],
        softcap: float,
        alibi: bool | Sequence[float] | Tensor,
        sink: bool,
        dropout_p: float,
        deterministic: bool | None,
        impl: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            _check_int(name, value)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}; or give head_dim"
                )
            head_dim = embed_dim // num_heads
        _check_int("head_dim", head_dim)
        if not 1 <= head_dim <= 256:
            raise ValueError(f"head_dim must be between 1 and 256, got {head_dim}")
        for name, flag in (("bias", bias), ("sink", sink)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")
        check_options(causal, softmax_scale, window_size, softcap, dropout_p, deterministic, impl, head_dim)

        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.window_size = tuple(window_size)
        self.softcap = softcap
        self.dropout_p = dropout_p
        self.deterministic = deterministic
        self.impl = impl
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self._alibi = self._check_alibi(alibi, num_heads)
        slopes = None if self._alibi is None else self._alibi.to(device=device)
        self.register_buffer("alibi_slopes", slopes)
        self.register_parameter(
            "sink", nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)) if sink else None
        )

    @staticmethod
    def _check_alibi(alibi: bool | Sequence[float] | Tensor, num_heads: int) -> Tensor | None:
        if alibi is False:
            return None
        if alibi is True:
            return standard_alibi_slopes(num_heads)
        try:
            slopes = torch.as_tensor(alibi, dtype=torch.float32).detach().cpu().clone()
        except (TypeError, ValueError) as error:
            raise TypeError(f"alibi must be True, False or num_heads = {num_heads} slopes, got {alibi!r}") from error
        if slopes.shape != (num_heads,):
            raise ValueError(
                f"alibi must be True, False or num_heads = {num_heads} slopes, got shape {tuple(slopes.shape)}"
            )
        return slopes

    def reset_parameters(self) -> None:
        """Initialise as at construction: `nn.Linear`'s rule for projections, zero sink logits, the given slopes.

        Call it after `to_empty` on a layer that was built on the meta device.
        """
        for child in self.children():
            if isinstance(child, nn.Linear):
                child.reset_parameters()
        if self.sink is not None:
            nn.init.zeros_(self.sink)
        if self.alibi_slopes is not None and self._alibi is not None:
            self.alibi_slopes.copy_(self._alibi)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `.half()` and `.to(torch.bfloat16)` mean the weights: slopes such as 2^-0.5 would lose 16 of their 24 bits.
        slopes = self.alibi_slopes
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if slopes is not None and self.alibi_slopes is not None and self.alibi_slopes.dtype != torch.float32:
            self.alibi_slopes = slopes.to(device=self.alibi_slopes.device)
        return self

    def extra_repr(self) -> str:
        """The settings that differ from their defaults, head counts first."""
        parts = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        parts.append(f"head_dim={self.head_dim}")
        defaults = {
            "causal": False, "softmax_scale": None, "window_size": (-1, -1), "softcap": 0.0, "dropout_p": 0.0,
            "deterministic": None, "impl": "auto",
        }  # fmt: skip
        settings = {name: getattr(self, name) for name in defaults}
        parts += [f"{name}={value!r}" for name, value in settings.items() if value != defaults[name]]
        parts += [f"{name}=True" for name, on in (("alibi", self.alibi_slopes), ("sink", self.sink)) if on is not None]
        return ", ".join(parts)

    def _options(self) -> dict[str, Any]:
        """The keywords of every kernel call of this layer; dropout follows `train()` and `eval()` at each call."""
        return {
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "learnable_sink": self.sink,
            "dropout_p": self.dropout_p if self.training else 0.0,
            "deterministic": self.deterministic,
            "impl": self.impl,
        }

    def _attend_dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths_q: Tensor | None,
        lengths_k: Tensor | None,
        attn_mask: Tensor | None,
        attn_bias: Tensor | None,
    ) -> Tensor:
        """Attention of a dense or padded batch: q `(B, N, Hq, D)`, k and v `(B, M, Hk, D)` -> `(B, N, Hq * D)`."""
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        if lengths_q is None and lengths_k is None:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            dense: Tensor = flash_attn(q, k, v, attn_mask=attn_mask, attn_bias=attn_bias, **self._options())
            return dense.transpose(1, 2).flatten(2)
        cu_seqlens_q, _ = _tokens_and_padding(lengths_q, batch, seqlen_q, q.device)
        cu_seqlens_k, used_k = _tokens_and_padding(lengths_k, batch, seqlen_k, q.device)
        # Masks and biases count positions inside each of the 2 B sequences, which for tokens are the dense ones.
        attn_mask, attn_bias = (
            t.repeat_interleave(2, dim=0) if isinstance(t, Tensor) and t.dim() == 4 and t.shape[0] > 1 else t
            for t in (attn_mask, attn_bias)
        )
        out: Tensor = flash_attn_varlen(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k,
            seqused_k=used_k, attn_mask=attn_mask, attn_bias=attn_bias, **self._options(),
        )  # fmt: skip
        return out.reshape(batch, seqlen_q, self.num_heads * self.head_dim)

    def _attend_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        attn_mask: Tensor | None,
        attn_bias: Tensor | None,
    ) -> Tensor:
        """Attention of a packed batch: q `(total_q, Hq, D)`, k and v `(total_k, Hk, D)` -> `(total_q, Hq * D)`."""
        out: Tensor = flash_attn_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            attn_mask=attn_mask, attn_bias=attn_bias, **self._options(),
        )  # fmt: skip
        return out.flatten(1)

    def _check_input(self, name: str, x: Tensor, layer: str, features: int, packed: bool, packed_by: str) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(
                f"{name} must be a float tensor, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}"
            )
        if x.is_nested:
            raise TypeError(
                f"{name} must be a plain tensor, got a nested one; pass its values and offsets as {packed_by}"
            )
        form = f"(total, {features}) with {packed_by}" if packed else f"(B, N, {features})"
        if x.dim() != (2 if packed else 3) or x.shape[-1] != features:
            hint = "" if packed or x.dim() != 2 else f"; packed input needs {packed_by}"
            raise ValueError(f"{name} must be {form}, got shape {tuple(x.shape)}{hint}")
        projection = getattr(self, layer)
        if type(projection) is nn.Linear and not projection._forward_pre_hooks:  # others may cast, as sharded ones do
            check_dtype(name, x, f"{layer}.weight", projection._parameters.get("weight"))


def check_dtype(name: str, x: Tensor, weight_name: str, weight: Tensor | None) -> None:
    """Refuse an input of another dtype than the weight it meets, unless autocast makes them one; without a weight, nothing.

    Raises:
        TypeError: that the linear layer would stop at.
    """
    if weight is None or x.dtype is weight.dtype:
        return
    casts = torch.float64 not in (x.dtype, weight.dtype)
    if casts and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return
    hint = " (torch.autocast casts both)" if casts else ""
    raise TypeError(f"{name} must have the dtype of {weight_name}, {weight.dtype}, got {x.dtype}{hint}")


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")


def _check_lengths(name: str, lengths: Tensor, x: Tensor) -> Tensor:
    """Return `lengths` as int32 within `[0, N]`; `(B,)` integers beside `x (B, N, features)` only."""
    batch, seqlen, _ = x.shape
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{name} must be a tensor of integers, got {type(lengths).__name__}")
    if lengths.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"{name} must hold integers, got {lengths.dtype}")
    if lengths.shape != (batch,):
        raise ValueError(f"{name} must have shape (B,) = ({batch},), got {tuple(lengths.shape)}")
    if lengths.device != x.device:
        raise ValueError(f"{name} must be on the device of its sequences, {x.device}, got {lengths.device}")
    # The host can read values for nothing on a CPU only; elsewhere clamping keeps every one inside the batch.
    readable = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= seqlen:
        raise ValueError(f"{name} must be between 0 and the sequence length {seqlen}, got {lengths.tolist()}")
    return lengths.clamp(0, seqlen).to(torch.int32)


def _tokens_and_padding(lengths: Tensor | None, batch: int, seqlen: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut each row of a padded `(B, N)` batch in two sequences, its tokens and its padding.

    Returns:
        `cu_seqlens (2 B + 1,)` int32, and `seqused (2 B,)` int32: the length of each token sequence, 0 for each padding
        sequence.
    """
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * seqlen
    if lengths is None:
        lengths = starts.new_full((batch,), seqlen)
    cu_seqlens = torch.cat([torch.stack([starts[:-1], starts[:-1] + lengths], dim=1).flatten(), starts[-1:]])
    return cu_seqlens, torch.stack([lengths, torch.zeros_like(lengths)], dim=1).flatten()


class FlashSelfAttention(_Attention):
    """Multi-head self-attention on the tiled exact kernels, in `(B, N, E)` or packed `(total, E)`.

    One fused projection makes queries, keys and values, and the kernels read them in place as strided views. State
    dict, stable:

    - `qkv_proj.weight ((Hq + 2 Hk) D, E)`, `qkv_proj.bias`: query heads, then key heads, then value heads, `D` rows
      each. With `Hk = Hq` and `Hq D = E` this is the layout of `nn.MultiheadAttention.in_proj_weight`;
    - `out_proj.weight (E, Hq D)`, `out_proj.bias`;
    - `sink (Hq,)` with `sink=True`; `alibi_slopes (Hq,)` fp32 with `alibi`.

    Args:
        embed_dim: features `E` of input and output.
        num_heads: query heads `Hq`.
        num_kv_heads: key and value heads `Hk`, a divisor of `num_heads` (grouped-query attention). Default `num_heads`.
        head_dim: features `D` per head, at most 256. Default `embed_dim / num_heads`.
        bias: whether both projections have a bias.
        causal: whether a token sees only itself and earlier tokens.
        softmax_scale: factor on the scores. Default `D ** -0.5`.
        window_size: how many keys (left, right) of its own position a token sees, inclusive; -1 is unbounded.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi: True for the standard geometric slopes, or `num_heads` slopes, a constant of the layer; False is off.
        sink: whether each head learns one extra logit that joins the softmax and attends to nothing. Starts at 0.
        dropout_p: probability with which an attention weight is dropped, in training mode only.
        deterministic: as in `flash_attn`; None follows `torch.are_deterministic_algorithms_enabled()`.
        impl: as in `flash_attn`.
        device: where parameters are created.
        dtype: what they are created in.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an option that `flash_attn` refuses; a size below 1; `num_heads` no multiple of `num_kv_heads`;
            `embed_dim` no multiple of `num_heads` while `head_dim` is not given; `head_dim` above 256; a number of
            slopes that is not `num_heads`.

    Example:
        >>> attn = FlashSelfAttention(embed_dim=64, num_heads=4, num_kv_heads=2, causal=True)
        >>> attn(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        causal: bool = False,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi: bool | Sequence[float] | Tensor = False,
        sink: bool = False,
        dropout_p: float = 0.0,
        deterministic: bool | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias, causal=causal,
            softmax_scale=softmax_scale, window_size=window_size, softcap=softcap, alibi=alibi, sink=sink,
            dropout_p=dropout_p, deterministic=deterministic, impl=impl, device=device, dtype=dtype,
        )  # fmt: skip
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(embed_dim, rows, bias=bias, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attn_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            x: `(B, N, E)`, or `(total, E)` with `cu_seqlens`.
            lengths: `(B,)` integers, the real tokens of each sequence; what follows them is padding that nobody sees,
                and whose own attention is 0 (the layer's output there is the bias of `out_proj`). On a GPU values are
                clamped to `[0, N]` rather than checked, for a check would wait for the device.
            cu_seqlens: `(B + 1,)` int32, where each packed sequence starts, and the end of the last.
            max_seqlen: length of the longest packed sequence (or any bound above it).
            attn_mask: boolean, broadcastable to `(B, Hq, N, N)`, True where a query may see a key (as in
                `scaled_dot_product_attention`; `nn.MultiheadAttention` means the opposite). For packed input N is
                `max_seqlen`, and indices count inside each sequence.
            attn_bias: float, likewise, added to the scaled scores; may require grad.

        Returns:
            As `x`.

        Raises:
            TypeError: `x` is a nested tensor, or outside autocast of another dtype than the parameters; `lengths` does not
                hold integers.
            ValueError: `x` or `lengths` of another shape than stated; on CPU, a length outside `[0, N]`; only one of
                `cu_seqlens` and `max_seqlen` given, or `lengths` beside them. The checks of `flash_attn` apply to the
                rest.
        """
        if (cu_seqlens is None) != (max_seqlen is None):
            raise ValueError("cu_seqlens and max_seqlen must be given together")
        if cu_seqlens is not None and lengths is not None:
            raise ValueError("lengths describes a padded batch, and cannot be given with cu_seqlens")
        self._check_input("x", x, "qkv_proj", self.embed_dim, cu_seqlens is not None, "cu_seqlens and max_seqlen")
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = self.qkv_proj(x).unflatten(-1, (sum(heads), self.head_dim)).split(heads, dim=-2)
        if cu_seqlens is None or max_seqlen is None:
            if lengths is not None:
                lengths = _check_lengths("lengths", lengths, x)
            out = self._attend_dense(q, k, v, lengths, lengths, attn_mask, attn_bias)
        else:
            out = self._attend_packed(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, attn_mask, attn_bias)
        return self.out_proj(out)  # type: ignore[no-any-return]


class FlashCrossAttention(_Attention):
    """Multi-head attention from `x` to `context` on the tiled exact kernels.

    With `causal`, a window or ALiBi, the last token of `x` stands at the last token of `context` (bottom-right
    alignment). State dict: `q_proj.*` with weight `(Hq D, E)`, `kv_proj.*` with weight `(2 Hk D, context_dim)` (keys,
    then values), `out_proj.*`, `sink` and `alibi_slopes` as in `FlashSelfAttention`.

    Args:
        embed_dim: features of `x` and of the output.
        num_heads: query heads.
        context_dim: features of `context`. Default `embed_dim`.
        num_kv_heads, head_dim, bias, causal, softmax_scale, window_size, softcap, alibi, sink, dropout_p,
        deterministic, impl, device,
            dtype: as in `FlashSelfAttention`.

    Raises:
        ValueError: as in `FlashSelfAttention`; `context_dim` below 1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        context_dim: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        causal: bool = False,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi: bool | Sequence[float] | Tensor = False,
        sink: bool = False,
        dropout_p: float = 0.0,
        deterministic: bool | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias, causal=causal,
            softmax_scale=softmax_scale, window_size=window_size, softcap=softcap, alibi=alibi, sink=sink,
            dropout_p=dropout_p, deterministic=deterministic, impl=impl, device=device, dtype=dtype,
        )  # fmt: skip
        self.context_dim = embed_dim if context_dim is None else context_dim
        _check_int("context_dim", self.context_dim)
        if self.context_dim < 1:
            raise ValueError(f"context_dim must be at least 1, got {context_dim}")
        self.q_proj = nn.Linear(embed_dim, self.num_heads * self.head_dim, bias=bias, device=device, dtype=dtype)
        self.kv_proj = nn.Linear(
            self.context_dim, 2 * self.num_kv_heads * self.head_dim, bias=bias, device=device, dtype=dtype
        )

    def extra_repr(self) -> str:
        """As `FlashSelfAttention`'s, with `context_dim` where it is not `embed_dim`."""
        context = f", context_dim={self.context_dim}" if self.context_dim != self.embed_dim else ""
        return super().extra_repr() + context

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        *,
        lengths: Tensor | None = None,
        context_lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        context_cu_seqlens: Tensor | None = None,
        context_max_seqlen: int | None = None,
        attn_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
    ) -> Tensor:
        """Attend from each sequence of `x` to the sequence of `context` at the same place in the batch.

        Args:
            x: `(B, N, E)`, or `(total, E)` with the four packed arguments.
            context: `(B, M, context_dim)`, or `(total_context, context_dim)`.
            lengths: `(B,)` integers, the real tokens of each sequence of `x`, as in `FlashSelfAttention`.
            context_lengths: `(B,)` integers, those of `context`. A sequence with none gets attention 0.
            cu_seqlens: `(B + 1,)` int32, bounds of the packed sequences of `x`; all four packed arguments or none.
            max_seqlen: length of the longest of them.
            context_cu_seqlens: `(B + 1,)` int32, bounds of the packed sequences of `context`.
            context_max_seqlen: length of the longest of them.
            attn_mask: boolean, broadcastable to `(B, Hq, N, M)`, True where a query may see a key, as in
                `FlashSelfAttention`.
            attn_bias: float, likewise, added to the scaled scores; may require grad.

        Returns:
            As `x`.

        Raises:
            TypeError: a nested tensor; outside autocast another dtype than the parameters'; lengths that are not integers.
            ValueError: `x`, `context` or lengths of another shape than stated; different batch sizes; on CPU, a length
                out of range; some but not all of the packed arguments given, or lengths beside them. The checks of
                `flash_attn` apply to the rest.
        """
        packed_arguments = (cu_seqlens, max_seqlen, context_cu_seqlens, context_max_seqlen)
        packed = any(argument is not None for argument in packed_arguments)
        if packed and any(argument is None for argument in packed_arguments):
            raise ValueError("cu_seqlens, max_seqlen, context_cu_seqlens and context_max_seqlen must be given together")
        packed_by = "cu_seqlens, max_seqlen, context_cu_seqlens and context_max_seqlen"
        self._check_input("x", x, "q_proj", self.embed_dim, packed, packed_by)
        self._check_input("context", context, "kv_proj", self.context_dim, packed, packed_by)
        if packed and not (lengths is None and context_lengths is None):
            raise ValueError("lengths and context_lengths describe padded batches, and cannot be given with cu_seqlens")
        if not packed and x.shape[0] != context.shape[0]:
            raise ValueError(f"x and context must have the same batch size, got {x.shape[0]} and {context.shape[0]}")
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k, v = self.kv_proj(context).unflatten(-1, (2, self.num_kv_heads, self.head_dim)).unbind(-3)
        if cu_seqlens is None or max_seqlen is None or context_cu_seqlens is None or context_max_seqlen is None:
            if lengths is not None:
                lengths = _check_lengths("lengths", lengths, x)
            if context_lengths is not None:
                context_lengths = _check_lengths("context_lengths", context_lengths, context)
            out = self._attend_dense(q, k, v, lengths, context_lengths, attn_mask, attn_bias)
        else:
            bounds = (cu_seqlens, context_cu_seqlens, max_seqlen, context_max_seqlen)
            out = self._attend_packed(q, k, v, *bounds, attn_mask, attn_bias)
        return self.out_proj(out)  # type: ignore[no-any-return]
