"""The built site in headless Chromium: it works, it is quiet, it is accessible, and it asks nobody else for anything."""

from __future__ import annotations

import collections
import functools
import http.server
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SITE = Path(os.environ.get("FLASHTRI_SITE", ROOT / "build" / "site"))
PREFIX = "/some/sub/path/"  # where the site is served: it must not care
AXE = (HERE / "vendor" / "axe" / "axe.min.js").read_text(encoding="utf-8")
RULES = "['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa']"
MARKUP = ("====", ":class:", ":func:", "<<{", "}>>", "--8<--", "{ .lede", "![")  # what a page shows when it was misread
OUT_OF_REACH = """[...document.querySelectorAll("main *")].filter((node) => {
    const {overflowX, overflowY} = getComputedStyle(node), scrolls = /auto|scroll/;
    const over = (scrolls.test(overflowX) && node.scrollWidth > node.clientWidth)
        || (scrolls.test(overflowY) && node.scrollHeight > node.clientHeight);
    return over && node.tabIndex < 0 && !node.querySelector("a, button, input, select");
}).map((node) => node.outerHTML.slice(0, 80))"""
HAS_ROWS = '"rows":[{' in (SITE / "data" / "results.json").read_text() if SITE.is_dir() else False
READY = {"visualiser": "#visualiser[data-ready=true]"} | ({"benchmarks": "#bench-table tbody tr"} if HAS_ROWS else {})
PAGES = sorted(str(page.parent.relative_to(SITE)) for page in SITE.rglob("index.html"))

pytestmark = pytest.mark.browser


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site under PREFIX, and counts what it sends."""

    sent: ClassVar[collections.Counter[str]] = collections.Counter()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if not path.startswith(PREFIX):
            self.send_error(404)
            return
        file = SITE / path.removeprefix(PREFIX)
        file = file / "index.html" if file.is_dir() else file
        if not file.is_file():
            self.send_error(404)
            return
        body = file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(file)))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.sent[path] += len(body)

    def log_message(self, *args: Any) -> None:
        """Stay quiet."""


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}{PREFIX}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("FLASHTRI_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium: install one (Debian: apt-get install chromium) or set FLASHTRI_CHROMIUM"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--headless"])
        yield chromium
        chromium.close()


class Watch:
    """A page whose console, failed requests and requests to other hosts are noted."""

    def __init__(self, browser: Browser, base: str, width: int = 1440, scheme: str = "light", **options: Any) -> None:
        self.base, self.trouble = base, []
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        self.context.route(lambda url: not url.startswith((base, "data:", "blob:")), self.outside)
        self.page: Page = self.context.new_page()
        self.page.on(
            "console",
            lambda m: self.trouble.append(f"console {m.type}: {m.text}") if m.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))
        self.page.on("response", lambda r: self.trouble.append(f"{r.status} {r.url}") if r.status >= 400 else None)

    def outside(self, route: Any) -> None:
        self.trouble.append(f"request to another host: {route.request.url}")
        route.abort()

    def open(self, page: str) -> Page:
        self.page.goto(self.base + ("" if page in ("", ".") else f"{page}/"), wait_until="load")
        return self.page

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.context.close()
        if exc[0] is None:
            assert self.trouble == []


@pytest.fixture
def watch(browser: Browser, base: str) -> Iterator[Watch]:
    with Watch(browser, base) as watched:
        yield watched


def test_the_site_is_there() -> None:
    assert len(PAGES) >= 30, f"{SITE} holds {len(PAGES)} pages: run site/tools/build.py first"


def violations(page: Page, skip: list[str]) -> list[str]:
    """What axe finds against WCAG A and AA on the page as it stands."""
    page.evaluate(AXE)
    found = page.evaluate(
        f"skip => axe.run({{exclude: skip.map((s) => [s])}}, {{runOnly: {RULES}, resultTypes: ['violations']}})", skip
    )
    nodes = lambda v: [f"{n['target']}: {n['failureSummary'].splitlines()[-1].strip()}" for n in v["nodes"][:3]]
    return [f"{v['id']} x{len(v['nodes'])} {nodes(v)}" for v in found["violations"]]


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (360, "dark")])
def test_every_page_is_quiet_fits_and_is_accessible(browser: Browser, base: str, width: int, scheme: str) -> None:
    problems = []
    with Watch(browser, base, width, scheme, reduced_motion="reduce") as watched:
        for name in PAGES:
            page = watched.open(name)
            page.wait_for_selector(READY.get(name, "main h1"))
            page.wait_for_function("document.fonts.status === 'loaded'")
            for narrower in (w for w in (320, 700, 1024, width) if w <= width):
                page.set_viewport_size({"width": narrower, "height": 900})
                over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                if over > 0:
                    problems.append(f"{name}: {over} px too wide at {narrower}")
            for node in page.evaluate(OUT_OF_REACH):
                problems.append(f"{name}: scrolls, but not from the keyboard: {node}")
            text = page.inner_text("main")
            problems += [f"{name}: markup in the text: {mark}" for mark in MARKUP if mark in text]
            if not page.evaluate("!!document.querySelector('main h1')?.textContent.trim()"):
                problems.append(f"{name}: no heading")
            # code is coloured alike everywhere: its thousands of tokens are looked at on three pages
            skip = [] if name in (".", "use", "derivation/flashattention-2") else [".highlight pre"]
            problems += [f"{name} ({scheme}): {violation}" for violation in violations(page, skip)]
    assert problems == []


@pytest.mark.parametrize(("width", "scheme"), [(1440, "dark"), (360, "light")])
def test_pages_in_use_are_accessible(browser: Browser, base: str, width: int, scheme: str) -> None:
    """Not only as they open: every chart, an answer that is refused, the backward pass half done, a search with hits."""
    import bench_page
    import synthetic

    data = bench_page.page_data(synthetic.document())
    with Watch(browser, base, width, scheme, reduced_motion="reduce") as watched:
        watched.context.route("**/data/results.json", lambda route: route.fulfill(json=data))
        page = watched.open("benchmarks")
        page.wait_for_selector("#bench-charts figure")
        page.click("#bench-skipped summary")
        assert violations(page, []) == []
        page = watched.open("calculator")
        page.fill("#footprint [name=heads]", "0")
        assert violations(page, []) == []
        page = vis(watched)
        page.click("#tab-backward")
        page.click("#step")
        page.click(".ft-table summary")
        assert violations(page, []) == []
        page = watched.open("use/causal")
        page.click(".md-search__input" if width > 960 else "header label[for=__search]")
        page.keyboard.type("window")
        page.locator(".md-search-result__link").first.wait_for()
        assert violations(page, [".highlight pre"]) == []


def test_home_page_weighs_less_than_500_kb(browser: Browser, base: str) -> None:
    """Bytes of every file it fetches, uncompressed; the search index, which waits until search is used, is not in it."""
    Handler.sent.clear()
    with Watch(browser, base) as watched:
        page = watched.open("")
        page.wait_for_load_state("networkidle")
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        page.wait_for_load_state("networkidle")
        assert 200_000 < sum(Handler.sent.values()) < 500_000, Handler.sent
        assert not any("search_index" in file for file in Handler.sent)
        with page.expect_response("**/search_index.json"):
            page.focus(".md-search__input")


def test_home_says_what_the_arithmetic_says(watch: Watch) -> None:
    page = watch.open("")
    assert page.inner_text("#contrast-ordinary") == "128 MiB"
    assert page.inner_text("#contrast-ours") == "0 B"
    assert "bf16" in page.inner_text(".ft-facts")
    button = page.locator("#hero button")
    assert button.inner_text() == "Pause"
    button.click()
    assert button.inner_text() == "Play"


# ---------------------------------------------------------------------------------------------------- visualiser


def vis(watch: Watch) -> Page:
    page = watch.open("visualiser")
    page.wait_for_selector("#visualiser[data-ready=true]")
    return page


def read(page: Page, name: str) -> str:
    return page.inner_text(f"[data-out={name}]").strip()


def slide(page: Page, name: str, value: int) -> None:
    page.locator(f"[data-control={name}]").evaluate(
        f"node => {{ node.value = {value}; node.dispatchEvent(new Event('input')); }}"
    )


@pytest.mark.parametrize("mask", ["full", "causal", "window", "band"])
def test_visualiser_runs_to_the_end_and_is_exact(watch: Watch, mask: str) -> None:
    page = vis(watch)
    page.select_option("[data-control=mask]", mask)
    counts = [int(read(page, f"n-{name}")) for name in ("now", "done", "waiting", "skipped")]
    assert counts[:2] == [0, 0]
    assert sum(counts) == 16 * 16
    waiting = counts[2]
    slide(page, "sms", 32)
    for _ in range(17):
        page.click("#step")
        if read(page, "n-waiting") == "0" and read(page, "n-now") == "0":
            break
    assert int(read(page, "n-done")) == waiting
    assert read(page, "compared") == "16 of 16 rows finished"
    assert 0 < page.evaluate("flashtri.visualiser.worst") < 2e-6
    assert read(page, "where").startswith("finished") or read(page, "where").startswith("resident")
    assert read(page, "lse").lstrip("−").replace(".", "").isdigit()


def test_page_mask_agrees_with_the_kernels_eager_twin(watch: Watch) -> None:
    import torch

    from flashtri_core.variants import MASKS
    from flashtri_core.variants.window import normalise

    page = vis(watch)
    i, j = torch.arange(300)[:, None], torch.arange(300)[None, :]
    for given, kind, sides in (
        ([-1, -1], "full", (-1, -1, False)),
        ([-1, 0], "causal", (-1, -1, True)),
        ([255, 0], "window", (255, 0, True)),
        ([128, 128], "window", (128, 128, False)),
    ):
        want = MASKS[kind].keep_eager(i, j, 300, 300, *normalise(*sides)).sum(1).tolist()
        got = page.evaluate(
            """window => {
                const head = new flashtri.Head(300, 1, window);
                const all = Array.from({length: 300}, (_, i) => i);
                return all.map((i) => all.filter((j) => head.sees(i, j)).length);
            }""",
            given,
        )
        assert got == want, given


def test_visualiser_gradients_add_up_to_the_dense_ones(watch: Watch) -> None:
    """dQ of a row and dK, dV of a key, tile by tile in the page, against the formulas in torch."""
    import torch

    page = vis(watch)
    got = page.evaluate(
        """() => {
            const head = new flashtri.Head(128, 8, [-1, 0]);
            const dq = new flashtri.QueryGradient(head, 70), dkv = new flashtri.KeyGradient(head, 33);
            for (let at = 0; at < 128; at += 32) { dq.step(at, at + 32); dkv.step(at, at + 32); }
            const list = (x) => Array.from(x);
            const sums = {dq: list(dq.sums[0]), dk: list(dkv.sums[0]), dv: list(dkv.sums[1])};
            return {q: list(head.q), k: list(head.k), v: list(head.v), dO: list(head.dO), ...sums};
        }"""
    )
    q, k, v, do = (
        torch.tensor(got[n], dtype=torch.float64).view(128, 8).requires_grad_() for n in ("q", "k", "v", "dO")
    )
    s = (q @ k.T * 8**-0.5).masked_fill(torch.ones(128, 128).triu(1).bool(), -torch.inf)
    (s.softmax(1) @ v).backward(do.detach())
    for name, want in (("dq", q.grad[70]), ("dk", k.grad[33]), ("dv", v.grad[33])):
        torch.testing.assert_close(torch.tensor(got[name], dtype=torch.float64), want, rtol=1e-4, atol=1e-5)


def test_visualiser_plays_pauses_and_restarts(watch: Watch) -> None:
    page = vis(watch)
    slide(page, "tiles", 9)
    slide(page, "sms", 1)
    slide(page, "speed", 60)
    page.click("#play")
    page.wait_for_function("Number(document.querySelector('[data-out=stepcount]').textContent) > 20")
    page.click("#play")
    stopped = read(page, "stepcount")
    page.wait_for_timeout(200)
    assert read(page, "stepcount") == stopped
    assert "1 tile on chip" in page.text_content("[data-out=live]")
    page.click("#reset")
    assert read(page, "stepcount") == "0"


def test_visualiser_by_mouse_and_keyboard(watch: Watch) -> None:
    page = vis(watch)
    canvas = page.locator("#grid-forward")
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] / 2, "y": box["height"] * 3.5 / 16})
    assert read(page, "program") == "Query block 3"
    canvas.press("ArrowDown")
    assert read(page, "program") == "Query block 4"
    steps = int(read(page, "stepcount"))
    canvas.press(".")
    assert int(read(page, "stepcount")) == steps + 1
    canvas.press(" ")
    assert page.inner_text("#play") == "Pause"
    canvas.press(" ")
    assert page.inner_text("#play") == "Play"
    page.select_option("[data-control=follow]", "forward 9")
    assert read(page, "program") == "Query block 9"
    page.locator("#tab-forward").press("ArrowRight")
    assert page.locator("#tab-backward").get_attribute("aria-selected") == "true"
    assert page.is_visible("#grid-dkdv")
    assert not page.is_visible("#grid-forward")


def test_visualiser_backward(watch: Watch) -> None:
    page = vis(watch)
    page.click("#tab-backward")
    slide(page, "sms", 16)
    page.click("#step")
    assert "1 tile added up" in read(page, "grow")
    for _ in range(3):
        page.click("#step")
    assert read(page, "program") == "Key block 1"
    assert "4 tiles added up" in read(page, "grow")
    assert page.locator("[data-grad] dt").all_inner_texts() == ["dK", "dV"]
    canvas = page.locator("#grid-dq")
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] / 2, "y": box["height"] * 15.5 / 16})
    assert read(page, "program") == "Query block 15"
    assert page.locator("[data-grad]:not([hidden]) dt").all_inner_texts() == ["dQ"]
    assert "4 tiles added up" in read(page, "grow")  # those that ran before it was picked are in


def test_visualiser_by_touch_at_360_px(browser: Browser, base: str) -> None:
    with Watch(browser, base, 360, "dark", has_touch=True, is_mobile=True, reduced_motion="reduce") as watched:
        page = vis(watched)
        canvas = page.locator("#grid-forward")
        box = canvas.bounding_box()
        canvas.tap(position={"x": box["width"] / 2, "y": box["height"] * 7.5 / 16})
        assert read(page, "program") == "Query block 7"
        for button in page.locator(".ft-buttons button").all():
            assert button.bounding_box()["height"] >= 32
        assert page.inner_text("#play") == "Play"  # nothing moves until asked to
        assert page.locator("[data-control=speed]").input_value() == "1"


@pytest.mark.parametrize("tab", ["forward", "backward"])
@pytest.mark.parametrize("sms", [4, 32])
def test_visualiser_draws_32_by_32_within_a_frame(watch: Watch, tab: str, sms: int) -> None:
    """The page's own processor time for a step and its frame, over a whole pass: the same however busy the machine is."""
    page = vis(watch)
    page.click(f"#tab-{tab}")
    slide(page, "sms", sms)
    slide(page, "tiles", 9)
    assert "32 × 32 tiles" in read(page, "shape")
    devtools = watch.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    spent = lambda: {m["name"]: m["value"] for m in devtools.send("Performance.getMetrics")["metrics"]}["TaskDuration"]
    times = []
    for _ in range(40):
        start = spent()
        page.evaluate("flashtri.visualiser.step(); flashtri.visualiser.paint()")
        times.append(1000 * (spent() - start))
    assert 0.1 < sorted(times)[35] < 1000 / 60, times  # nine steps of ten: the tenth may have met the garbage collector


# ---------------------------------------------------------------------------------------------------- calculator


def test_calculator_agrees_with_python(watch: Watch) -> None:
    from footprint import Shape, human, kernel_limit, ordinary_limit

    page = watch.open("calculator")
    number = lambda text: int("".join(c for c in text if c.isdigit()) or 0)
    for batch, heads, n, d, dtype, gib in (
        (1, 32, 8192, 128, "fp16", 80),
        (3, 7, 1000, 96, "fp32", 24),
        (64, 128, 131072, 256, "bf16", 8),
        (1, 1, 1, 1, "fp16", 141),
    ):
        for name, value in (("batch", batch), ("heads", heads), ("seqlen", n), ("headDim", d), ("memory", gib)):
            page.fill(f"#footprint [name={name}]", str(value))
        page.select_option("#footprint [name=dtype]", dtype)
        shape = Shape(batch, heads, n, d, dtype)
        assert page.inner_text("[data-cost=score]") == human(shape.score_matrix)
        assert page.inner_text("[data-cost=kernel]") == human(shape.kernel)
        assert number(page.inner_text("[data-cost=limit]")) == ordinary_limit(gib << 30, shape)
        assert number(page.inner_text("[data-cost=ourlimit]")) == kernel_limit(gib << 30, shape)
        exact = page.evaluate(
            "s => [flashtri.footprint.scoreMatrix(s), flashtri.footprint.kernel(s)]",
            {"batch": batch, "heads": heads, "seqlen": n, "headDim": d, "dtype": dtype},
        )
        assert exact == [shape.score_matrix, shape.kernel]


def test_calculator_slider(watch: Watch) -> None:
    page = watch.open("calculator")
    slider = page.locator("#footprint [name=slider]")
    slider.evaluate("n => { n.value = 17; n.dispatchEvent(new Event('input', {bubbles: true})); }")
    assert page.input_value("#footprint [name=seqlen]") == "131072"
    assert slider.get_attribute("aria-valuetext") == "131,072 tokens"
    page.fill("#footprint [name=seqlen]", "128")
    assert slider.input_value() == "7"
    for _ in range(8):
        slider.press("ArrowRight")
    assert slider.input_value() == "7.08"
    for _ in range(8):
        slider.press("ArrowLeft")
    assert page.input_value("#footprint [name=seqlen]") == "128"


@pytest.mark.parametrize("name", ["seqlen", "batch", "heads", "headDim", "memory"])
def test_calculator_with_hostile_input(watch: Watch, name: str) -> None:
    """What is not understood is named, and no answer is left standing; what can mean one thing only is understood."""
    page = watch.open("calculator")
    answers = lambda: page.locator("[data-cost]:not(i, b)").all_inner_texts()
    field = page.locator(f"#footprint [name={name}]")
    problem = page.locator(".ft-problem")
    good, whole = field.input_value(), name != "memory"
    before = answers()
    assert all(before)
    hostile = [
        "0",
        "-1",
        "1e99",
        "1e999",
        "NaN",
        "Infinity",
        "",
        "   ",
        "0x10",
        "1,0",
        "1.5.2",
        "8 GiB",
        "<b>8</b>",
        "٣",
        "1e-3",
    ]
    for text in hostile + (["2.5", "1e-1", "12,34"] if whole else ["80,5", "80,000", "100000.5"]):
        field.fill(text)
        said = problem.inner_text()
        assert (
            f"{field.get_attribute('data-label')} has to be a {'whole number from 1' if whole else 'number above 0'}"
            in said
        )
        assert f"“{text.strip()}”" in said or not text.strip()
        assert field.get_attribute("aria-invalid") == "true"
        assert set(answers()) == {"–", ""}, text
        assert page.locator("i[data-cost]").evaluate_all(
            "all => all.every((n) => n.style.getPropertyValue('--x') === '0')"
        )
        assert problem.locator("b").count() == 0
    field.fill("9" * 400)
    assert len(problem.inner_text()) < 160
    for text in [good, f" {good} ", f"{good}.0"] + (["1e2", "1"] if whole else ["0.5", ".5", "79.6"]):
        field.fill(text)
        assert problem.inner_text() == "", text
        assert field.get_attribute("aria-invalid") == "false"
        assert "–" not in answers()
        assert not any("NaN" in a or "Infinity" in a or "e+" in a for a in answers())
    if name == "seqlen":
        for text in ("8,192", "8 192", "8_192", "8'192", "8\u202f192"):
            field.fill(text)
            assert answers() == before, text


def test_calculator_at_its_limits(watch: Watch) -> None:
    page = watch.open("calculator")
    largest = {"seqlen": 2**27, "batch": 2**16, "heads": 2**12, "headDim": 256, "memory": 100_000}
    for name, value in largest.items():
        page.fill(f"#footprint [name={name}]", str(value))
    assert page.inner_text("[data-cost=score]") == "8 YiB"
    for name in largest:
        page.fill(f"#footprint [name={name}]", "1")
    assert page.inner_text("[data-cost=score]") == "2 B"
    page.fill("#footprint [name=seqlen]", "597")  # 99.5 times: not 1.0e+2
    assert page.inner_text("[data-cost=ratio]") == "100 ×"


# ---------------------------------------------------------------------------------------------------- benchmarks


def test_benchmarks_show_what_the_file_holds(watch: Watch) -> None:
    import bench_page
    from playwright.sync_api import expect

    document = bench_page.load()
    page = watch.open("benchmarks")
    if not document["rows"]:
        assert "Nothing has been measured" in page.inner_text("#bench-empty")
        expect(page.locator(".ft-bench")).to_be_hidden()
        return
    page.wait_for_selector("#bench-table tbody tr")
    expect(page.locator("#bench-empty")).to_be_hidden()
    assert page.locator("#bench-skipped").count() == bool(document["skipped"])
    metrics = {row["metric"] for row in document["rows"]}
    for metric, sentence in (
        ("time", "Speed over N"),
        ("memory", "Memory, and where"),
        ("error", "Error against fp64"),
    ):
        assert page.locator(".ft-none", has_text=f"{sentence}").count() == (metric not in metrics)
    means = bench_page.summary(document).splitlines()
    groups = [x for x in means if x.startswith("| ") and not x.startswith("| group |")]  # in a table for each dtype
    assert page.locator("table:has(th:text-is('group')) tbody tr").count() == len(groups)


def test_benchmarks_without_rows_say_so(watch: Watch) -> None:
    watch.context.route(
        "**/data/results.json", lambda route: route.fulfill(json={"runs": [], "names": {}, "rows": [], "skipped": []})
    )
    page = watch.open("benchmarks")
    page.wait_for_selector("#bench-empty")
    assert "Nothing has been measured yet" in page.inner_text("#bench-empty")
    assert not any(part.is_visible() for part in page.locator(".ft-bench").all())


@pytest.fixture
def bench(watch: Watch) -> tuple[Page, dict[str, Any]]:
    """The benchmark page with made-up rows of every metric, and what it was given."""
    import bench_page
    import synthetic

    from flashtri_bench import results

    document = synthetic.document()
    assert list(results.problems(document)) == []
    data = bench_page.page_data(document)
    watch.context.route("**/data/results.json", lambda route: route.fulfill(json=data))
    page = watch.open("benchmarks")
    page.wait_for_selector("#bench-table tbody tr")
    return page, data


def test_benchmark_filters(bench: tuple[Page, dict[str, Any]]) -> None:
    page, data = bench
    cell = lambda n: page.locator(f"#bench-table tbody tr td:nth-child({n})").all_inner_texts()
    grid = lambda name: {f"grid-{name}-n{n}" for n in (512, 1024, 2048, 4096, 8192, 16384)}
    shown = lambda: {case for case in cell(1) if case.startswith("grid")}
    assert not page.is_visible("#bench-empty")
    assert not page.is_visible("[data-filter=dtype]")  # there is one
    assert shown() == grid("d128-causal")  # it opens on D = 128, causal, forward
    offered = lambda name: page.locator(f"[data-filter={name}] option").all_inner_texts()
    assert offered("mask") == ["all", "full", "causal"]
    assert offered("op") == ["all", "forward", "backward", "forward and backward"]
    assert offered("impl") == ["every peer", *(n for n in data["names"].values() if n not in ("flashtri", "absent"))]
    page.select_option("[data-filter=d]", "64")
    page.select_option("[data-filter=mask]", "full")
    assert shown() == grid("d64-full")
    page.select_option("[data-filter=op]", "bwd")
    assert {op for case, op in zip(cell(1), cell(6), strict=True) if case.startswith("grid")} == {"backward"}
    page.select_option("[data-filter=impl]", label="eager (ordinary attention)")
    assert set(cell(2)) == {"flashtri", "eager (ordinary attention)"}
    for name in ("d", "mask", "op", "impl"):
        page.select_option(f"[data-filter={name}]", "")
    assert page.locator("#bench-table tbody tr").count() == len(data["rows"])
    assert page.inner_text("#bench-count") == f"{len(data['rows'])} of {len(data['rows'])} rows"
    assert page.locator(".ft-none", has_text="choose one head dimension").count() == 3
    table = page.inner_text("#bench-table")
    assert "2 µs of host time" in table
    assert "with warm caches 1 s" in table
    assert "1.33× as fast" in table
    assert "80 % of matrix product" in table
    assert "absent: not installed" in page.text_content("#bench-skipped")
    assert "Imaginary GPU" in page.inner_text("#bench-runs")


def test_benchmark_charts(bench: tuple[Page, dict[str, Any]]) -> None:
    page, _ = bench
    figures = page.locator("#bench-charts figure")
    assert figures.count() == 4
    speed, share, memory, error = (figures.nth(i) for i in range(4))
    ticks = lambda figure: [t for t in figure.locator("svg text[text-anchor=end]").all_text_contents() if t != "OOM"]
    assert ticks(speed) == ["0", "200", "400", "600"]
    assert "matrix product alone: 500" in speed.inner_text()
    assert all(t.endswith("0 %") for t in ticks(share))
    assert "matrix product 500 TFLOP/s, copy 2 TB/s" in share.inner_text()
    assert speed.locator("polyline").count() == 3
    assert speed.locator("circle").count() == 18  # three implementations, six lengths
    key = page.locator("#bench-key li").all_inner_texts()
    assert key == ["flashtri", "FA2 (torch flash)", "cuDNN (torch)", "math (torch)", "eager (ordinary attention)"]
    assert "16 GiB given to each" in memory.inner_text()
    assert memory.locator("path.oom title").all_text_contents() == [
        f"{name}: out of memory at {n}"
        for name, n in zip([key[i] for i in (0, 1, 3, 4)], ("512k", "512k", "16k", "16k"), strict=True)
    ]
    assert "eager (ordinary attention) runs out of memory at 16k." in memory.locator("svg").get_attribute("aria-label")
    crosses = [box.bounding_box() for box in memory.locator("path.oom").all()]
    assert len({(round(box["x"]), round(box["y"])) for box in crosses}) == 4  # none hides another
    assert error.locator("rect").count() == 12
    assert "2.0e-4 flashtri" in error.inner_text()
    widths = [float(rect.get_attribute("width")) for rect in error.locator("rect").all()]
    assert widths[2] / widths[0] == pytest.approx(1.25)


@pytest.mark.parametrize("width", [1440, 768, 360])
def test_benchmark_charts_are_readable_at_every_width(browser: Browser, base: str, width: int) -> None:
    """No text outside its drawing, none on top of another, none smaller than 10 px."""
    import bench_page
    import synthetic

    data = bench_page.page_data(synthetic.document())
    with Watch(browser, base, width) as watched:
        watched.context.route("**/data/results.json", lambda route: route.fulfill(json=data))
        page = watched.open("benchmarks")
        page.wait_for_selector("#bench-charts svg")
        page.wait_for_function("document.fonts.status === 'loaded'")
        found = page.evaluate(
            """() => [...document.querySelectorAll("#bench-charts svg")].flatMap((svg) => {
                const frame = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")];
                const boxes = texts.map((t) => t.getBoundingClientRect());
                const scale = frame.width / svg.viewBox.baseVal.width;
                const bad = 12 * scale < 10 ? [`${12 * scale} px`] : [];
                boxes.forEach((a, i) => {
                    if (a.left < frame.left - 1 || a.right > frame.right + 1) bad.push(`${texts[i].textContent} is cut`);
                    boxes.slice(i + 1).forEach((b, k) => {
                        const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
                        const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
                        if (x > 1 && y > 3) bad.push(`${texts[i].textContent} on ${texts[i + 1 + k].textContent}`);
                    });
                });
                return bad;
            })"""
        )
        assert found == []


# ---------------------------------------------------------------------------------------------------- the frame


@pytest.mark.parametrize("width", [1440, 360])
def test_search_finds_opens_and_highlights(browser: Browser, base: str, width: int) -> None:
    with Watch(browser, base, width) as watched:
        page = watched.open("")
        page.click(".md-search__input" if width > 960 else "header label[for=__search]")
        page.wait_for_function("document.activeElement.matches('.md-search__input')")
        page.keyboard.type("deterministic")
        hit = page.locator(".md-search-result__link", has_text="Determinism").first
        hit.click()
        page.wait_for_url("**/use/determinism/**")
        page.locator("main mark", has_text="deterministic").first.wait_for()


def test_dark_mode_switches_and_stays(watch: Watch) -> None:
    page = watch.open("visualiser")
    scheme = lambda: page.evaluate("document.body.dataset.mdColorScheme")
    assert scheme() == "default"
    page.locator("label[for=__palette_1]:visible").click()
    assert scheme() == "slate"
    page.reload()
    assert scheme() == "slate"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(int(x) for x in dark.removeprefix("rgb(").removesuffix(")").split(",")[:3]) < 120


def test_formulas_are_typeset(watch: Watch) -> None:
    page = watch.open("derivation/backward")
    page.wait_for_selector(".katex")
    assert page.locator(".arithmatex").count() == page.locator(".arithmatex:has(.katex)").count() >= 3
    assert page.locator(".katex-mathml math").count() >= 3


def test_without_javascript_the_pages_still_say_it(browser: Browser, base: str) -> None:
    with Watch(browser, base, java_script_enabled=False) as watched:
        assert "128 MiB" in watched.open("").inner_text("main")
        for name in ("visualiser", "calculator", "benchmarks"):
            assert re.search("needs? JavaScript", watched.open(name).inner_text("main")), name
        assert "online_softmax_step" in watched.open("derivation/online-softmax").inner_text("main")
