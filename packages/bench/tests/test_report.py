import re
import xml.etree.ElementTree as ET

import pytest

from flashtri_bench import report, svg
from flashtri_bench.results import empty, rows_of


def test_terminal_text_is_short_and_ends_with_the_means(good):
    text = report.terminal(good)
    assert len(text) <= 8000
    lines = text.splitlines()
    assert any(re.match(r"d128-causal-n16384 bwd +500 +300 1\.67x +520 0\.96x$", line) for line in lines)
    assert any(re.match(r"fwd D=64 full +1\.67x +0\.96x$", line) for line in lines)
    assert "Test GPU" in lines[-1]
    short = report.terminal(good, 2500)
    assert len(short) <= 2500
    assert "more lines: flashtri-bench report" in short
    assert "bwd D=128 causal" in short


def test_group_means_are_geometric_and_over_every_length(good):
    rows = [r for r in good["rows"] if not (r["impl"] == "fa4" and r["shape"]["seqlen_q"] == 512)]
    for row in rows:
        if row["impl"] == "torch-flash" and row["case"] == "grid-d64-full-n1024" and row["op"] == "fwd":
            row["time_ms"]["p50"] *= 64
    means = report.group_means(good | {"rows": rows}, "bf16")
    assert len(means) == 8
    assert means[64, False, "fwd"]["torch-flash"] == pytest.approx(5 / 3 * 2, rel=1e-3)
    assert "fa4" not in means[64, False, "fwd"]
    assert report.group_means(good, "bf16")[64, False, "fwd"]["fa4"] == pytest.approx(500 / 520, rel=1e-3)


def test_rows_of_another_run_are_no_measure(good):
    """Where ours was measured again without a peer."""
    again = good["runs"][0] | {"id": "later"}
    for row in rows_of(good, impl="flashtri") + rows_of(good, impl="fa4"):
        row["run"] = "later"
    later = good | {"runs": [*good["runs"], again]}
    assert set(report.group_means(later, "bf16")[64, False, "fwd"]) == {"fa4"}
    lines = report.terminal(later).splitlines()
    assert any(re.match(r"d128-causal-n16384 bwd +500 +300 +520 0\.96x$", line) for line in lines)


def test_inaccurate_peers_are_marked(good):
    for row in rows_of(good, impl="torch-flash"):
        row["check"] = row["check"] | {"ratio": 3.0}
    assert "300* 1.67x" in report.terminal(good)
    assert "* its error is more than 2 times" in report.terminal(good)


def test_markdown_holds_every_metric_and_every_reason(good):
    text = report.markdown(good)
    for part in ("FA2 (torch flash)", "OOM", "6.0 / 1.5", "2.0e-05", "FlexAttention has no dropout", "71%", "17 (1.0)"):
        assert part in text, part
    assert report.NOTHING in report.markdown(empty())
    assert report.terminal(empty()) == report.NOTHING


README = f"# Title\n\nbefore\n{report.BEGIN}\nold\n{report.END}\nafter\n"


def test_readme_block_is_filled_once_and_only_between_the_markers(good):
    filled = report.fill(README, good)
    assert filled.startswith("# Title\n\nbefore\n" + report.BEGIN)
    assert filled.endswith(report.END + "\nafter\n")
    assert "\nold\n" not in filled
    assert "1.67x" in filled
    assert "commit 0123456a0123" in filled
    assert report.fill(filled, good) == filled


def test_readme_without_figures_says_so(good):
    assert report.NOTHING in report.fill(README, empty())
    good["runs"][0]["protocol"]["smoke"] = True
    assert report.NOTHING in report.fill(README, good)
    good["runs"][0]["protocol"]["smoke"] = False
    good["runs"][0]["environment"]["device"] = "cpu"
    assert report.NOTHING in report.fill(README, good)


@pytest.mark.parametrize("text", ["", report.END + report.BEGIN, README + README, report.BEGIN])
def test_a_readme_without_its_markers_is_refused(text, good):
    with pytest.raises(ValueError, match="once each and in this order"):
        report.fill(text, good)


def test_plots_are_images_with_error_bars_and_out_of_memory_marks(good, tmp_path):
    paths = {p.name: p for p in report.write_plots(good, tmp_path)}
    assert len(paths) == 9
    speed = ET.fromstring(paths["speed-bf16-d64-causal-fwd.svg"].read_text())
    text = " ".join(speed.itertext())
    for label in ("Forward, bf16, head dim 64, causal", "flashtri", "FA2 (torch flash)", "16k", "TFLOP/s"):
        assert label in text
    bars = [
        p for p in speed.iter("{http://www.w3.org/2000/svg}path") if re.fullmatch(r"M[\d.]+ [\d.]+V[\d.]+", p.get("d"))
    ]
    assert len(bars) == 3 * 6
    assert "eager (ordinary attention): out of memory" in paths["memory-bf16.svg"].read_text()
    assert report.plots(empty()) == {}


def test_a_chart_puts_values_where_they_belong():
    series = [svg.Series("a", [(1.0, 10.0, 9.0, 11.0), (4.0, 20.0, 19.0, 21.0)])]
    axes = svg.Axes(series, log_y=False)
    assert axes.x(1.0) < axes.x(2.0) < axes.x(4.0)
    assert axes.x(2.0) == pytest.approx((axes.x(1.0) + axes.x(4.0)) / 2)
    assert axes.y(20.0) < axes.y(10.0)
    assert axes.y(0.0) == svg.HEIGHT - svg.BOTTOM
    logarithmic = svg.Axes(series, log_y=True)
    assert logarithmic.y(100.0) < logarithmic.y(10.0)
    with pytest.raises(ValueError, match="got no points"):
        svg.chart("t", "x", "y", [svg.Series("a")])


def test_labels_cannot_break_the_image():
    text = svg.chart("a < b & c", "x", "y", [svg.Series("<script>", [(1.0, 1.0, 1.0, 1.0)])])
    ET.fromstring(text)
    assert "<script>" not in text
