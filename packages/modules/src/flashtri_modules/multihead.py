"""`nn.MultiheadAttention` with the tiled exact kernels inside: same constructor, same parameters, same state dict."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtri_core import flash_attn

from .attention import check_dtype


class FlashMultiheadAttention(nn.MultiheadAttention):
    """Drop-in for `nn.MultiheadAttention`; a subclass that replaces `forward`.

    Constructor, initialisation and state dict are inherited, so a checkpoint goes either way. Where the two differ:

    - `need_weights=True` (the default, as in torch) returns the weights, which are an `L x S` matrix, and so takes a
      dense path in plain
      torch: exact, any dtype and device, memory quadratic in the length. Pass `need_weights=False` for the kernels.
    - A query that may see no key gets attention 0 and gradient 0 on both paths, where torch gives NaN.
    - `is_causal=True` needs no `attn_mask` beside it; if there is one, it is taken to be the causal mask, and is not
      read. With `L != S` causal means what it means in torch, top-left: query `i` sees keys `0..i`. It sees the keys of
      `add_bias_kv` and `add_zero_attn` as well; in torch it does with weights, and without them mostly does not.
    - Nested tensors are refused. `embed_dim / num_heads` is at most 256 without weights.

    In eval mode without gradients `nn.TransformerEncoderLayer` calls torch's own fused layer instead of its attention
    module; `torch.backends.mha.set_fastpath_enabled(False)` turns that off.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            `nn.MultiheadAttention`. `add_zero_attn` costs nothing here: a zero key with a zero value is a sink of logit
            0.

    Example:
        >>> attn = FlashMultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> attn(x, x, x, need_weights=False)[0].shape
        torch.Size([2, 10, 64])
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and `value`.

        Args:
            query: `(N, L, E)` with `batch_first`, else `(L, N, E)`; unbatched `(L, E)`.
            key: `(N, S, kdim)`, `(S, N, kdim)` or `(S, kdim)`.
            value: likewise with `vdim`.
            key_padding_mask: `(N, S)` or unbatched `(S,)`; boolean with True for keys to leave out, or float, added to
                the scores.
            need_weights: whether to return the attention weights (dense path).
            attn_mask: `(L, S)` or `(N * num_heads, L, S)`; boolean with True for pairs to leave out, or float, added to
                the scores.
            average_attn_weights: whether the returned weights are averaged over heads.
            is_causal: whether query `i` sees keys `0..i` only; stands in place of `attn_mask`.

        Returns:
            The output, shaped as `query`, and the weights: `(N, L, S)`, or `(N, num_heads, L, S)` unaveraged, without
            the batch axis for unbatched input, one column more for each of `add_bias_kv` and `add_zero_attn`; None
            without `need_weights`.

        Raises:
            TypeError: a nested tensor; outside autocast another dtype than the parameters'; a mask that is neither
                boolean nor floating point; `is_causal` that is no bool.
            ValueError: a tensor or mask of another shape than stated.
        """
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"{name} must be a float tensor, got {got}")
            if tensor.is_nested:
                raise TypeError(f"{name} must be a plain tensor, got a nested one; pad it and give key_padding_mask")
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and not isinstance(mask, Tensor):
                raise TypeError(f"{name} must be boolean or floating point, got {type(mask).__name__}")
        if not isinstance(is_causal, bool):
            raise TypeError(f"is_causal must be a bool, got {type(is_causal).__name__}")
        packed_projection = query is key and key is value and self._qkv_same_embed_dim
        unbatched = query.dim() == 2
        batch_axis = 0 if self.batch_first else 1
        if unbatched:
            query, key, value = (t.unsqueeze(batch_axis) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        self._check_inputs(query, key, value)
        batch, seqlen_q, seqlen_k = query.shape[batch_axis], query.shape[1 - batch_axis], key.shape[1 - batch_axis]

        q, k, v = self._project(query, key, value, packed_projection)
        keep, bias = self._masks(key_padding_mask, None if is_causal else attn_mask, batch, seqlen_q, seqlen_k, q.dtype)
        if self.bias_k is not None and self.bias_v is not None:
            # Put the extra key first, not last as torch does: then a causal query still sees a prefix of the keys.
            k = torch.cat([self._head_bias(self.bias_k, k), k], dim=2)
            v = torch.cat([self._head_bias(self.bias_v, v), v], dim=2)
            keep = None if keep is None else F.pad(keep, (1, 0), value=True)
            bias = None if bias is None else F.pad(bias, (1, 0), value=0.0)

        weights = None
        if need_weights:
            out, weights = self._attend_dense(q, k, v, keep, bias, is_causal)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            out = self._attend_flash(q, k, v, keep, bias, is_causal)
        out = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)
        out = self.out_proj(out.flatten(2))
        if unbatched:
            out = out.squeeze(batch_axis)
            weights = None if weights is None else weights.squeeze(0)
        return out, weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        batch_axis = 0 if self.batch_first else 1
        order = "(N, L, features)" if self.batch_first else "(L, N, features)"
        for name, tensor, features in (
            ("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim),
        ):  # fmt: skip
            if tensor.dim() != 3 or tensor.shape[-1] != features:
                raise ValueError(f"{name} must be {order} with {features} features, got shape {tuple(tensor.shape)}")
            weight = "in_proj_weight" if self._qkv_same_embed_dim else f"{name[0]}_proj_weight"
            check_dtype(name, tensor, weight, self._parameters.get(weight))  # parametrised: none
        if key.shape[:2] != value.shape[:2]:
            raise ValueError(f"key and value must agree in N and S, got {tuple(key.shape)} and {tuple(value.shape)}")
        if query.shape[batch_axis] != key.shape[batch_axis]:
            raise ValueError(f"query and key must agree in N, got {tuple(query.shape)} and {tuple(key.shape)}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return q `(N, H, L, D)`, k and v `(N, H, S, D)`, strided views of what the projections wrote."""
        if packed:
            qkv = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            projected = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        else:
            if self._qkv_same_embed_dim:
                weights = self.in_proj_weight.chunk(3)
            else:
                weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            # torch's annotation says that there always is a bias; `bias=False` registers None.
            bias: Tensor | None = self.in_proj_bias
            biases = (None, None, None) if bias is None else bias.chunk(3)
            projected = tuple(
                F.linear(x, weight, offset).unflatten(-1, (self.num_heads, self.head_dim))
                for x, weight, offset in zip((query, key, value), weights, biases, strict=True)
            )
        axes = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        q, k, v = (t.permute(axes) for t in projected)
        return q, k, v

    def _head_bias(self, parameter: Tensor, like: Tensor) -> Tensor:
        """`bias_k` or `bias_v` `(1, 1, E)` as one key row per head, `(N, H, 1, D)`."""
        rows = parameter.view(1, self.num_heads, 1, self.head_dim).to(like.dtype)
        return rows.expand(like.shape[0], -1, -1, -1)

    def _masks(
        self,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        batch: int,
        seqlen_q: int,
        seqlen_k: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Torch's masks as `flash_attn`'s: `keep`, True where visible, and an additive `bias`; neither is expanded."""
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise TypeError(f"{name} must be boolean or floating point, got {mask.dtype}")
        keep: Tensor | None = None
        bias: Tensor | None = None
        if attn_mask is not None:
            if attn_mask.shape == (seqlen_q, seqlen_k):
                attn_mask = attn_mask[None, None]
            elif attn_mask.shape == (batch * self.num_heads, seqlen_q, seqlen_k):
                attn_mask = attn_mask.unflatten(0, (batch, self.num_heads))
            else:
                raise ValueError(
                    f"attn_mask must be (L, S) = ({seqlen_q}, {seqlen_k}) or (N * num_heads, L, S) = "
                    f"({batch * self.num_heads}, {seqlen_q}, {seqlen_k}), got shape {tuple(attn_mask.shape)}"
                )
            if attn_mask.dtype == torch.bool:
                keep = ~attn_mask
            else:
                bias = attn_mask
        if key_padding_mask is not None:
            if key_padding_mask.shape != (batch, seqlen_k):
                raise ValueError(
                    f"key_padding_mask must be (N, S) = ({batch}, {seqlen_k}), "
                    f"got shape {tuple(key_padding_mask.shape)}"
                )
            padding = key_padding_mask[:, None, None, :]
            if padding.dtype != torch.bool:
                bias = padding if bias is None else bias + padding
            elif keep is None:
                keep = ~padding
            else:
                # `keep & ~padding` would be (N, 1, L, S); as a bias the padding stays one row per sequence.
                bias = torch.zeros_like(padding, dtype=dtype).masked_fill(padding, -torch.inf)
        return keep, bias

    def _attend_flash(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, is_causal: bool
    ) -> Tensor:
        extra = 0 if self.bias_k is None else 1
        seqlen_q, seqlen_k = q.shape[2], k.shape[2] - extra
        window_size = (-1, -1)
        if is_causal and seqlen_k > seqlen_q:
            # Top-left causal queries never reach keys past the last query, and without those the two alignments agree.
            k, v = k[:, :, : seqlen_q + extra], v[:, :, : seqlen_q + extra]
            keep = None if keep is None else keep[..., : seqlen_q + extra]
            bias = None if bias is None else bias[..., : seqlen_q + extra]
        elif is_causal and seqlen_k < seqlen_q:
            window_size = (-1, seqlen_q - seqlen_k)
        out: Tensor = flash_attn(
            q, k, v, causal=is_causal and window_size == (-1, -1), window_size=window_size,
            attn_mask=keep, attn_bias=bias, learnable_sink=self._zero_attn_logit(q),
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return out

    def _zero_attn_logit(self, q: Tensor) -> Tensor | None:
        return q.new_zeros(self.num_heads, dtype=torch.float32) if self.add_zero_attn else None

    def _attend_dense(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """The same attention with its weights `(N, H, L, S)`, columns in torch's order, in at least fp32 inside."""
        extra = 0 if self.bias_k is None else 1
        scores = (q * self.head_dim**-0.5) @ k.transpose(-1, -2)  # (N, H, L, extra + S)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if bias is not None:
            scores = scores + bias
        if is_causal:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(diagonal=extra)
            keep = causal if keep is None else keep & causal
        if keep is not None:
            scores = scores.masked_fill(~keep, -torch.inf)
        if self.add_zero_attn:
            scores = F.pad(scores, (0, 1), value=0.0)
        blind = (scores == -torch.inf).all(dim=-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0).to(v.dtype)
        weights = F.dropout(weights, self.dropout, training=self.training)
        out = weights[..., : k.shape[2]] @ v
        if extra:
            first, rest = weights[..., :1], weights[..., 1:]
            keys, zero = rest[..., : k.shape[2] - 1], rest[..., k.shape[2] - 1 :]
            weights = torch.cat([keys, first, zero], dim=-1)
        return out, weights
