"""What the pages say by hand agrees with the code, and what they generate is generated from it."""

from __future__ import annotations

import ast
import math
import re
import subprocess
from pathlib import Path

import bench_page
import figures
import footprint
import links
import messages
import pytest
import support
import synthetic
from footprint import Shape
from reachable import reachable

from flashtri_core import interface
from flashtri_core.variants import FEATURES

SITE = Path(__file__).parents[1]
DOCS = SITE / "docs"
FIGURES = set(re.findall(r'figure\("(\w+)"\)', "".join(p.read_text() for p in DOCS.rglob("*.md")))) - {"roofline"}


def test_every_feature_has_its_page() -> None:
    for name in FEATURES:
        page = DOCS / "use" / f"{name}.md"
        assert f'feature_doc("{name}")' in page.read_text(), name
        assert f"use/{name}.md" in (SITE / "mkdocs.yml").read_text(), name


def test_every_rung_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in (DOCS / "derivation").glob("*.md"))
    for rung in sorted((SITE / "steps").glob("s[01]*.py")):
        assert f"steps/{rung.name}:rung" in text, rung.name


def test_causal_pictures_are_the_documented_ones() -> None:
    assert figures.alignment(2, 5).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert figures.alignment(5, 2).int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]


def test_every_figure_draws() -> None:
    assert len(FIGURES) >= 10
    for name in FIGURES:
        assert getattr(figures, name)().count("<svg") == 1
    assert "ft-empty" in figures.roofline(None, "")
    drawn = figures.roofline({"copy_tb_s": 2.0, "matmul_tflops": {"bf16": 500.0}}, "a test card")
    assert "500 TFLOP/s" in drawn
    assert "nan" not in drawn


def test_what_may_scroll_is_reachable_without_a_script() -> None:
    """A script that measured widths lost the race against fonts and filters: nothing is left to it."""
    page = reachable(
        '<table><thead><tr><th>a &amp; <code>b</code></th><th>c</th></tr></thead></table><table class="ft-data"></table>'
        '<div class="highlight"><pre><code>x</code></pre></div><div class="arithmatex">\\[x\\]</div><span class="arithmatex">'
    )
    assert 'tabindex="0" role="region" aria-label="Table: a &amp; b, c"><table class="ft-data"><thead>' in page
    assert page.count("tabindex") == 3
    drawing = re.compile(
        r'<figure class="ft-figure"><div class="ft-scroll" tabindex="0" role="region" aria-label="Figure: [^"<]+">'
    )
    assert all(drawing.match(getattr(figures, name)()) for name in FIGURES)
    filled = re.compile(r'role="region" aria-label="[^"]+">\s*<table class="ft-data"')
    for file in DOCS.rglob("*.md"):  # tables written by hand, which scripts fill
        assert file.read_text().count("<table") == len(filled.findall(file.read_text())), file


@pytest.mark.parametrize(
    "shape",
    [Shape(1, 32, 8192, 128), Shape(3, 5, 777, 96, "fp32"), Shape(1, 1, 1, 256), Shape(16, 64, 65536, 64, "bf16")],
)
@pytest.mark.parametrize("gib", [8, 80, 141])
def test_limits_are_the_last_that_fit(shape: Shape, gib: int) -> None:
    memory = gib << 30
    at = lambda n: Shape(shape.batch, shape.heads, n, shape.head_dim, shape.dtype)
    n = footprint.ordinary_limit(memory, shape)
    assert at(n).tensors + at(n).score_matrix <= memory < at(n + 1).tensors + at(n + 1).score_matrix
    n = footprint.kernel_limit(memory, shape)
    assert at(n).kernel <= memory < at(n + 1).kernel


def test_the_claim_on_the_home_page() -> None:
    assert footprint.human(Shape(1, 1, 8192, 64).score_matrix) == "128 MiB"
    assert [footprint.human(n) for n in (0, 999, 1023, 1536, 1 << 30)] == ["0 B", "999 B", "1 KiB", "1.5 KiB", "1 GiB"]


def test_no_line_of_prose_starts_a_list_by_accident() -> None:
    for page in DOCS.rglob("*.md"):
        assert not re.findall(r"^ +\d+\. ", page.read_text(), flags=re.MULTILINE), page


def test_roofline_is_the_arithmetic() -> None:
    drawn = figures.roofline({"copy_tb_s": 4.0, "matmul_tflops": {"bf16": 800.0}}, "a test card", n=4096, d=64)
    for label in ("ordinary: 32", "tiled: 124", "moved once: 2,040", "flat from 200 operations"):
        assert label in drawn, label


def test_numbers_in_the_prose() -> None:
    assert sum(range(1, 8192 // 64 + 1)) == 8256  # masks.md: tiles of a causal forward
    assert 8192 // 64 == 128  # masks.md: of which one per block is on the edge; index.md: S over Q
    assert math.exp(88.7) < 3.4028235e38 < math.exp(88.8)  # online-softmax.md
    assert math.exp(11.0) < 65504 < math.exp(11.1)


def test_the_age_of_measurements_is_git_s_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = lambda *words: (
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    )
    kernel = tmp_path / "packages/core/src/flashtri_core/kernels/hopper/forward.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("1")
    monkeypatch.setattr(bench_page, "RESULTS", tmp_path / "packages" / "bench" / "results.json")
    git("init")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-m", "a")
    commit = git("rev-parse", "HEAD").strip()
    (kernel.parent / "NOTES.md").write_text("a note is no kernel")
    assert not bench_page.changed_since(commit)
    kernel.write_text("2")
    assert bench_page.changed_since(commit)
    assert not bench_page.changed_since("0" * 40)  # not in this clone: nothing to say


def test_support_answers_name_what_is_wrong() -> None:
    assert all(row[1] == "yes" for row in support.features())
    assert all(row[3] == "yes" for row in support.features())
    auto = {row[0]: row[4] for row in support.features()}
    assert auto["causal"] == "hopper"
    assert auto["bias"] == "triton"  # the Hopper kernels refuse it
    assert all((row[4] == "hopper") == (row[2] == "yes") for row in support.features())
    assert {cell for dim, cells in support.head_dims() for cell in cells} == {"triton", "hopper"}
    fp32 = {name: gpu for name, gpu, _ in support.dtypes()}["fp32"]
    assert "float32" in fp32


def test_messages_are_raised() -> None:
    """Every message that the public functions can raise is on the troubleshooting page, word for word."""
    shown = [row[1] for section in messages.SECTIONS for row in messages.rows(section)]
    core = Path(interface.__file__).parent
    files = [
        *(core / name for name in ("interface.py", "packing.py", "ops.py")),
        *sorted((core / "variants").glob("*.py")),
    ]
    unexplained, found = [], 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            parts = node.exc.args[0].values if isinstance(node.exc.args[0], ast.JoinedStr) else [node.exc.args[0]]
            pattern = "".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in parts)
            found += 1
            if not any(re.search(rf"`: {pattern}$", text) for text in shown):
                unexplained.append(f"{file.name}:{node.lineno}: {pattern}")
    assert found > 40
    assert unexplained == []


def test_results_are_valid_and_flat() -> None:
    data = bench_page.page_data(bench_page.load())
    assert {row["run"] for row in data["rows"]} <= {run["id"] for run in data["runs"]}


def test_benchmark_names_and_ratios_are_the_readmes() -> None:
    document = synthetic.document()
    data = bench_page.page_data(document)
    assert list(data["names"].items())[:2] == [("flashtri", "flashtri"), ("torch-flash", "FA2 (torch flash)")]
    assert set(data["names"]) == {row["impl"] for row in (*document["rows"], *document["skipped"])}
    of = lambda impl: [row for row in data["rows"] if row["impl"] == impl and row["metric"] == "time"]
    assert {round(row["ratio"], 2) for row in of("torch-flash")} == {1.33}
    assert not any("ratio" in row for row in of("flashtri"))
    order = [(row["case"], row["op"], row["impl"]) for row in data["rows"] if row["suite"] == "grid"]
    assert [impl for *_, impl in order[:6]] == 2 * ["flashtri", "torch-flash", "torch-cudnn"]
    assert order[0][:2] == order[2][:2] != order[3][:2]
    other = document | {
        "rows": [row | {"run": "another"} if row["impl"] == "flashtri" else row for row in document["rows"]]
    }
    assert not any("ratio" in row for row in bench_page.page_data(other)["rows"])  # two runs are not compared
    assert bench_page.summary(document).count("1.33x") == 8
    assert bench_page.summary({"runs": [], "rows": [], "skipped": []}) == ""


def test_link_checker_finds_what_it_should(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<a id="here" href="sub/#there">ok</a><a href="sub/#nowhere">1</a><a href="/sub/">2</a><a href="gone/">3</a>'
        '<link rel="canonical" href="https://example.com/"><script src="https://example.com/x.js"></script><a href="https://example.com/">ok</a><a href="#here">ok</a>'
    )
    (tmp_path / "sub" / "index.html").write_text('<p id="there"></p><a href="../">ok</a>')
    found = links.broken(tmp_path)
    assert len(found) == 4
    assert sum("no such anchor" in s for s in found) == 1
    assert sum("absolute" in s for s in found) == 1
    assert sum("leads nowhere" in s for s in found) == 1
    assert sum("another host" in s for s in found) == 1


def test_tools_need_no_browser() -> None:
    """Building must not import the browser driver; only the tests do."""
    for tool in (SITE / "tools").glob("*.py"):
        imported = {a.name for n in ast.walk(ast.parse(tool.read_text())) if isinstance(n, ast.Import) for a in n.names}
        assert "playwright" not in imported, tool.name
