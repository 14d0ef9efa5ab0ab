"""The transformers integration: the attention function by itself, then whole models where transformers is installed."""

import importlib.util
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtri_modules.integrations import transformers as integration
from flashtri_modules.integrations.transformers import Pattern, attention_forward, register

B, HQ, HK, N, D = 2, 4, 2, 9, 8
INSTALLED = importlib.util.find_spec("transformers") is not None
whole_models = pytest.mark.skipif(not INSTALLED, reason="needs transformers")


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, HQ, N, D), (B, HK, N, D), (B, HK, N, D))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q, k, v


class Layer(nn.Module):
    is_causal = True


LAYER = Layer()
RIGHT_OF = torch.arange(N)[None] - torch.arange(N)[:, None]


def sdpa(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    mask = torch.zeros(B, HQ, N, N, dtype=q.dtype) + bias
    return F.scaled_dot_product_attention(q, k, v, mask.masked_fill(~keep, -math.inf), enable_gqa=True).transpose(1, 2)


def attend(qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | Pattern | None = None, **kwargs: object) -> Tensor:
    out, weights = attention_forward(LAYER, *qkv, mask, **kwargs)
    assert weights is None
    assert out.shape == (B, N, HQ, D)
    assert out.is_contiguous()
    return out


class TestAttentionFunction:
    def test_causal_comes_from_the_layer_or_the_argument(self, qkv: tuple) -> None:
        causal = sdpa(*qkv, RIGHT_OF <= 0)
        torch.testing.assert_close(attend(qkv), causal)
        torch.testing.assert_close(attend(qkv, is_causal=False), sdpa(*qkv, RIGHT_OF < N))
        LAYER_WITHOUT = nn.Identity()
        torch.testing.assert_close(attention_forward(LAYER_WITHOUT, *qkv, None)[0], causal)

    def test_sliding_window_counts_the_token_itself(self, qkv: tuple) -> None:
        torch.testing.assert_close(attend(qkv, sliding_window=3), sdpa(*qkv, (RIGHT_OF <= 0) & (RIGHT_OF > -3)))
        both_sides = attend(qkv, sliding_window=3, is_causal=False)
        torch.testing.assert_close(both_sides, sdpa(*qkv, RIGHT_OF.abs() < 3))

    def test_softcap_scaling_and_sinks(self, qkv: tuple) -> None:
        q, k, v = qkv
        sinks = torch.randn(HQ, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        scores = 3 * torch.tanh(0.7 * q @ k.repeat_interleave(2, 1).mT / 3)
        scores = torch.cat(
            [scores.masked_fill(RIGHT_OF > 0, -math.inf), sinks.view(1, -1, 1, 1).expand(B, -1, N, 1)], -1
        )
        want = (scores.softmax(-1)[..., :N] @ v.repeat_interleave(2, 1)).transpose(1, 2)
        torch.testing.assert_close(attend(qkv, softcap=3.0, scaling=0.7, s_aux=sinks), want)

    def test_position_bias_with_every_kind_of_mask(self, qkv: tuple) -> None:
        bias = torch.randn(1, HQ, N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        keep = (RIGHT_OF.abs() < 4).expand(B, 1, N, N)
        additive = torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, torch.finfo(torch.float64).min)
        torch.testing.assert_close(attend(qkv, position_bias=bias), sdpa(*qkv, RIGHT_OF <= 0, bias))
        torch.testing.assert_close(attend(qkv, keep, position_bias=bias), sdpa(*qkv, keep, bias))
        torch.testing.assert_close(attend(qkv, additive, position_bias=bias), sdpa(*qkv, keep, bias))
        torch.testing.assert_close(attend(qkv, additive), sdpa(*qkv, keep))

    def test_mask_says_all_about_visibility(self, qkv: tuple) -> None:
        keep = (RIGHT_OF.abs() < 4).expand(B, 1, N, N)
        wider = F.pad(keep, (0, 5))  # A static cache's mask is as long as the cache.
        torch.testing.assert_close(attend(qkv, wider, is_causal=True, sliding_window=2), sdpa(*qkv, keep))

    def test_patterns(self, qkv: tuple) -> None:
        keys = torch.ones(B, N, dtype=torch.bool)
        keys[1, :3] = False
        out = attend(qkv, Pattern(causal=True, keys=keys))
        want = sdpa(*qkv, (RIGHT_OF <= 0) & keys[:, None, None])
        torch.testing.assert_close(out[0], want[0])
        torch.testing.assert_close(out[1, 3:], want[1, 3:])
        assert (out[1, :3] == 0).all()
        out = attend(qkv, Pattern(window=(2, 1)), is_causal=True, sliding_window=7)
        torch.testing.assert_close(out, sdpa(*qkv, (RIGHT_OF >= -2) & (RIGHT_OF <= 1)))

    @pytest.mark.parametrize("by", ["pattern", "arguments"])
    def test_packed(self, qkv: tuple, by: str) -> None:
        bounds = torch.tensor([0, 4, 9, 15, 18], dtype=torch.int32)
        number = torch.tensor([[0] * 4 + [1] * 5, [2] * 6 + [3] * 3])
        keep = (number[:, :, None] == number[:, None])[:, None] & (RIGHT_OF <= 0) & (RIGHT_OF > -3)
        if by == "pattern":
            out = attend(qkv, Pattern(causal=True, window=(2, -1), bounds=bounds))
        else:
            lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 6, "max_length_k": 6}
            out = attend(qkv, sliding_window=3, **lengths)
        torch.testing.assert_close(out, sdpa(*qkv, keep))

    def test_dropout(self, qkv: tuple) -> None:
        q, k, v = (t.float() for t in qkv)
        assert not torch.equal(attend((q, k, v), dropout=0.5), attend((q, k, v), dropout=0.5))
        assert torch.equal(attend((q, k, v), dropout=0.0), attend((q, k, v)))

    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"output_attentions": True}, NotImplementedError, "output_attentions=True is not supported"),
            ({"block_table": torch.zeros(1)}, NotImplementedError, "block_table .* is not supported"),
            ({"k_cache": torch.zeros(1)}, NotImplementedError, "k_cache .* is not supported"),
            ({"mask": torch.ones(B, N)}, ValueError, r"attention_mask must be \(B, 1, Nq, Nk\), got shape \(2, 9\)"),
            (
                {"mask": Pattern(bounds=torch.tensor([0, 18])), "position_bias": torch.zeros(1, 1, N, N)},
                NotImplementedError,
                "position_bias is not supported with several sequences packed",
            ),
        ],
    )
    def test_refusals(self, qkv: tuple, kwargs: dict, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            attend(qkv, **kwargs)


def test_register_names_both_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Registry(dict):
        register = dict.__setitem__

    functions, masks = Registry(), Registry()
    library = types.SimpleNamespace(AttentionInterface=functions, AttentionMaskInterface=masks)
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", types.SimpleNamespace())
    register()
    register("another")
    assert set(functions) == set(masks) == {"triton_attention", "another"}
    assert functions["another"] is attention_forward
    with pytest.raises(ValueError, match='name must not contain "flash"'):
        register("flashtri")


def test_register_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError):
        register()


def model_pair(kind: str, **config: object) -> tuple[nn.Module, nn.Module]:
    """The same random model with our attention and with eager's; fp32, since eager in fp64 makes NaN of blind rows."""
    import transformers

    register()
    small = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    models = []
    for implementation in ("triton_attention", "eager"):
        torch.manual_seed(0)
        settings = getattr(transformers, f"{kind}Config")(**small, **config, attn_implementation=implementation)
        name = f"{kind}Model" if kind == "Bert" else f"{kind}ForCausalLM"
        model = getattr(transformers, name)(settings).eval()
        assert model.config._attn_implementation == implementation
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1]


DECODERS = {
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 4, "head_dim": 8},
    "Qwen2Moe": {
        "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "Gemma2": {"num_key_value_heads": 2, "sliding_window": 4, "head_dim": 8, "attn_logit_softcapping": 1.0},
    "GptOss": {
        "num_key_value_heads": 2, "sliding_window": 4, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
    },
}  # fmt: skip
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
PADDING = torch.ones(3, 11, dtype=torch.long)
PADDING[1, :4] = 0
PADDING[2, 8:] = 0


@whole_models
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
class TestModels:
    @pytest.mark.parametrize("padding", [False, True])
    @pytest.mark.parametrize("kind", DECODERS)
    def test_decoder(self, kind: str, padding: bool) -> None:
        ours, eager = model_pair(kind, **DECODERS[kind])
        tokens = torch.randint(64, (3, 11))
        mask = PADDING if padding else torch.ones_like(PADDING)
        real = mask.bool()
        logits = []
        for model in (ours, eager):
            logits.append(model(tokens, attention_mask=mask).logits[real])
            logits[-1].square().mean().backward()
        torch.testing.assert_close(*logits, **CLOSE)
        for (name, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")

    @pytest.mark.parametrize("kind", DECODERS)
    def test_packed_by_position_ids(self, kind: str) -> None:
        ours, eager = model_pair(kind, **DECODERS[kind])
        tokens = torch.randint(64, (2, 12))
        positions = torch.tensor([[*range(7), *range(5)], [*range(3), *range(9)]])
        with torch.no_grad():
            outputs = [m(tokens, position_ids=positions, use_cache=False).logits for m in (ours, eager)]
        torch.testing.assert_close(*outputs, **CLOSE)

    @pytest.mark.parametrize("cache", [None, "static"])
    @pytest.mark.parametrize("kind", ["Llama", "Mistral", "GptOss"])
    def test_generate_with_left_padding(self, kind: str, cache: str | None) -> None:
        ours, eager = model_pair(kind, **DECODERS[kind])
        tokens, mask = torch.randint(64, (2, 7)), torch.ones(2, 7, dtype=torch.long)
        mask[0, :3] = 0
        settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
        if cache is not None:
            settings |= {"cache_implementation": cache, "disable_compile": True}
        assert torch.equal(ours.generate(tokens, **settings), eager.generate(tokens, **settings))

    @pytest.mark.parametrize("padding", [False, True])
    def test_encoder(self, padding: bool) -> None:
        ours, eager = model_pair("Bert")
        tokens = torch.randint(64, (3, 11))
        mask = PADDING if padding else torch.ones_like(PADDING)
        with torch.no_grad():
            outputs = [m(tokens, attention_mask=mask).last_hidden_state[mask.bool()] for m in (ours, eager)]
        torch.testing.assert_close(*outputs, **CLOSE)

    def test_compile_fullgraph(self) -> None:
        torch._dynamo.reset()
        ours, eager = model_pair("Mistral", **DECODERS["Mistral"])
        tokens = torch.randint(64, (3, 11))
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            outputs = [m(tokens, attention_mask=PADDING, use_cache=False).logits for m in (compiled, eager)]
        torch.testing.assert_close(outputs[0][PADDING.bool()], outputs[1][PADDING.bool()], **CLOSE)


@whole_models
class TestMasks:
    """Which patterns travel without a mask, and that all others get exactly `sdpa`'s."""

    def make(self, function: object, n: int = 8, **kwargs: object) -> Tensor | Pattern | None:
        from transformers import masking_utils

        return integration.make_mask(masking_utils, 2, n, n, mask_function=function, **kwargs)

    def test_recognised(self) -> None:
        from transformers import masking_utils as m

        assert self.make(None) is None
        assert self.make(m.causal_mask_function) is None
        assert self.make(m.bidirectional_mask_function) is None
        sliding = self.make(m.sliding_window_causal_mask_function(5))
        assert repr(sliding) == repr(Pattern(True, (4, -1)))
        both_sides = self.make(m.sliding_window_bidirectional_mask_function(5))
        assert str(both_sides) == repr(Pattern(False, (5, 5)))

    def test_padding_is_one_value_per_key(self) -> None:
        from transformers import masking_utils as m

        real = torch.ones(2, 8, dtype=torch.bool)
        assert self.make(m.causal_mask_function, attention_mask=real) is None
        real[0, :2] = False
        pattern = self.make(m.causal_mask_function, attention_mask=real)
        assert pattern.causal
        assert torch.equal(pattern.keys, real)

    def test_packed(self) -> None:
        from transformers import masking_utils as m

        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
        numbers = m.find_packed_sequence_indices(positions)
        inner = m.remap_positions_for_packed_sequence(m.sliding_window_causal_mask_function(3), positions)
        pattern = self.make(m.and_masks(inner, m.packed_sequence_mask_function(numbers)))
        assert (pattern.causal, pattern.window, pattern.keys) == (True, (2, -1), None)
        assert pattern.bounds.tolist() == [0, 5, 8, 16]

    def test_all_others_get_the_full_mask(self) -> None:
        from transformers import masking_utils as m

        def prefix(batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return kv_idx < 3

        sees = torch.ones(8, 8, dtype=torch.bool).tril()
        sees[:, :3] = True
        assert torch.equal(self.make(m.or_masks(m.causal_mask_function, prefix)), sees.expand(2, 1, 8, 8))
        chunks = self.make(m.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)))
        assert torch.equal(chunks, torch.block_diag(*[torch.ones(4, 4)] * 2).bool().tril().expand(2, 1, 8, 8))
        remapped = m.remap_positions_for_packed_sequence(m.causal_mask_function, torch.arange(8).expand(2, 8))
        assert self.make(remapped).shape == (2, 1, 8, 8)

    def test_unaligned_queries_get_the_full_mask(self) -> None:
        from transformers import masking_utils as m

        mask = integration.make_mask(m, 1, 3, 8, q_offset=2)
        assert torch.equal(mask[0, 0], torch.arange(8) <= torch.arange(2, 5)[:, None])
        assert integration.make_mask(m, 1, 3, 8, q_offset=5) is None
        assert integration.make_mask(m, 1, 3, 8, q_offset=torch.tensor(5)).shape == (1, 1, 3, 8)
