"""The demo checks its claims when it runs; here: that those checks can fail, and that its comparison is a fair one."""

import math
import xml.etree.ElementTree as ET

import pytest
import torch

from flashtri_modules import demo

TINY = demo.Size(width=16, heads=2, layers=1, block=16, batch=4, steps=12, learning_rate=3e-3)


def test_both_attentions_compute_the_same():
    torch.manual_seed(0)
    flash = demo.CharModel(11, 16, 4, 2, 9, attention="flash").double()
    sdpa = demo.CharModel(11, 16, 4, 2, 9, attention="sdpa").double()
    sdpa.load_state_dict(flash.state_dict())
    tokens = torch.randint(11, (3, 9))
    torch.testing.assert_close(flash(tokens), sdpa(tokens), rtol=1e-12, atol=1e-12)
    for model in (flash, sdpa):
        model(tokens).square().sum().backward()
    theirs = dict(sdpa.named_parameters())
    for name, ours in flash.named_parameters():
        torch.testing.assert_close(ours.grad, theirs[name].grad, rtol=1e-10, atol=1e-10)


def test_the_model_is_causal():
    model = demo.CharModel(11, 16, 4, 2, 9)
    tokens = torch.randint(11, (1, 9))
    changed = tokens.clone()
    changed[0, 5] += 1 if changed[0, 5] == 0 else -1
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_unknown_attention():
    with pytest.raises(ValueError, match='attention must be "flash" or "sdpa", got \'ring\''):
        demo.CharModel(11, 16, 4, 2, 9, attention="ring")


def test_exactness_holds_on_the_cpu_path(capsys):
    demo.exactness(torch.device("cpu"), "reference")
    printed = capsys.readouterr().out
    assert [line.split()[-5] for line in printed.splitlines() if "KiB" in line] == ["out", "out"]


def test_exactness_fails_on_a_wrong_kernel(monkeypatch):
    def off_by_a_hair(q, k, v, *, causal, impl):
        return demo.eager_attention(q, k, v, causal=causal) * (1 + 1e-5)

    monkeypatch.setattr(demo, "flash_attn", off_by_a_hair)
    with pytest.raises(RuntimeError, match=r"out of torch\.float32, full: error .* is over the budget"):
        demo.exactness(torch.device("cpu"), "reference")


def test_training_fails_when_nothing_is_learned(tmp_path):
    with pytest.raises(RuntimeError, match="the model learned nothing"):
        demo.training(torch.device("cpu"), TINY, 0, tmp_path)


def test_ends_that_differ_are_told_from_noise():
    generator = torch.Generator().manual_seed(0)
    noisy = (2 + 0.1 * torch.randn(100, generator=generator)).tolist()
    apart, noise = demo.ends_apart(noisy, [loss + 0.1 for loss in noisy])
    assert apart == pytest.approx(0.1)
    assert 0.01 < noise < apart
    assert demo.ends_apart(noisy, noisy)[0] == 0


def test_training_fails_when_the_two_end_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "entropy", lambda text: math.inf)
    monkeypatch.setattr(demo.F, "scaled_dot_product_attention", lambda q, k, v, is_causal: v * math.nan)
    with pytest.raises(RuntimeError, match="further apart than the noise"):
        demo.training(torch.device("cpu"), TINY, 0, tmp_path)


def test_training_plots_both_curves(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "entropy", lambda text: math.inf)
    demo.training(torch.device("cpu"), TINY, 0, tmp_path)
    drawing = ET.parse(tmp_path / "loss.svg").getroot()
    lines = drawing.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points").split()) for line in lines] == [12, 12]


def test_entropy_of_a_fair_coin():
    assert demo.entropy(torch.tensor([0, 1, 1, 0])) == pytest.approx(math.log(2))


def test_corpus_is_this_python_s_source():
    text = demo.corpus()
    assert text.numel() > 500_000
    assert "import" in "".join(map(chr, text[:20_000].tolist()))


def test_in_words():
    assert [demo.in_words(size) for size in (5, 2048, 128 * 2**20, 3 * 2**30)] == ["5 B", "2 KiB", "128 MiB", "3.0 GiB"]
