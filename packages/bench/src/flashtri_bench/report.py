"""Tables and plots of a results document: for the terminal, as Markdown, for the README, as SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import svg
from .cases import BY_ID, PROTOCOL_LENGTHS, SUITES, Case
from .compare import geometric_mean
from .peers import PEERS
from .results import Document, Row

BEGIN, END = "<!-- bench:start -->", "<!-- bench:end -->"
OURS = "flashtri"
SHORT = {
    "flashtri": "ours", "flashtri-triton": "triton", "flashtri-hopper": "hopper", "flashtri-deterministic": "determ.",
    "torch-flash": "FA2", "torch-cudnn": "cuDNN", "torch-efficient": "effic.", "torch-math": "math", "flex": "Flex",
    "fa2": "fa2 pkg", "fa3": "FA3", "fa4": "FA4", "fa4-deterministic": "FA4 det", "eager": "eager",
}  # fmt: skip
# A peer whose error is more than this many times eager's is marked: it is timed, but it does less than the others.
LOOSE = 2.0
NOTHING = "Nothing has been measured yet: `results.json` holds no rows from a GPU."


@dataclass
class Table:
    """A titled table of text."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        """Aligned columns for a terminal; numbers to the right."""
        widths = [max(len(r[i]) for r in [self.header, *self.rows]) for i in range(len(self.header))]

        def line(cells: Sequence[str]) -> str:
            aligned = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
            return " ".join(aligned).rstrip()

        return "\n".join([f"[{self.title}]", *map(line, [self.header, *self.rows])])

    def markdown(self) -> str:
        """A Markdown table under a bold title."""
        rule = "|".join([":--"] + ["--:"] * (len(self.header) - 1))
        lines = ["| " + " | ".join(cells) + " |" for cells in self.rows]
        return "\n".join([f"**{self.title}**", "", "| " + " | ".join(self.header) + " |", f"|{rule}|", *lines])


def _impls(rows: Iterable[Row]) -> list[str]:
    present = {row["impl"] for row in rows}
    return [name for name in PEERS if name in present]


def _label(name: str) -> str:
    return PEERS[name].label if name in PEERS else name


def _cells(rows: Iterable[Row]) -> dict[tuple[str, str, str], dict[str, Row]]:
    """Rows by (case, op, dtype), then by implementation, cases in the order of the suites."""
    cells: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["case"], row["op"], row["dtype"]), {})[row["impl"]] = row
    order = {name: i for i, name in enumerate(_reading_order())}
    passes = {"fwd": 0, "bwd": 1, "fwd_bwd": 2, "step": 3}
    return dict(sorted(cells.items(), key=lambda item: (item[0][2], order.get(item[0][0], 0), passes[item[0][1]])))


def _reading_order() -> list[str]:
    """Case ids as a person reads them: the grid by head dim, mask and length, the others as they stand."""
    grid = sorted(SUITES["grid"], key=lambda c: (c.head_dim, c.causal, c.seqlen_q))
    return [c.id for c in grid] + [name for name in BY_ID if not name.startswith("grid")]


def _rate(row: Row, ours: Row | None) -> str:
    """TFLOP/s, or milliseconds for a step, with our speed relative to it where both are of one run."""
    mark = "*" if row["check"]["ratio"] > LOOSE else ""
    value = _number(row["tflops"] if "tflops" in row else row["time_ms"]["p50"])
    if ours is None or ours is row or ours["run"] != row["run"]:
        return value + mark
    return f"{value}{mark} {row['time_ms']['p50'] / ours['time_ms']['p50']:.2f}x"


def _number(value: float) -> str:
    """Three digits, or all there are before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def speed_tables(document: Document, name: Callable[[str], str] = _label) -> list[Table]:
    """One table for each suite and dtype: a line per case and pass, a column per implementation."""
    tables = []
    timed = [row for row in document["rows"] if row["metric"] == "time"]
    for suite in SUITES:
        for dtype in sorted({row["dtype"] for row in timed if row["suite"] == suite}):
            rows = [row for row in timed if row["suite"] == suite and row["dtype"] == dtype]
            impls = _impls(rows)
            lines = []
            for (case, op, _), found in _cells(rows).items():
                ours = found.get(OURS)
                short = case.removeprefix(f"{suite}-")
                cells = [_rate(found[i], ours) if i in found else "-" for i in impls]
                lines.append([f"{short} {op}", *cells])
            unit = "ms per step" if suite == "training" else "TFLOP/s"
            title = f"{suite} {dtype}: {unit}, and how many times as fast ours is"
            tables.append(Table(title, ["case", *map(name, impls)], lines))
    return tables


def group_means(document: Document, dtype: str) -> dict[tuple[int, bool, str], dict[str, float]]:
    """Geometric means over the grid's lengths of our speed over each peer's.

    Args:
        document: The document.
        dtype: Element type.

    Returns:
        Ratios by peer, by (head dim, causal, pass), for peers that were measured in our run at every length of the grid.
    """
    ratios: dict[tuple[int, bool, str], dict[str, list[float]]] = {}
    grid = [r for r in document["rows"] if r["suite"] == "grid" and r["dtype"] == dtype and r["metric"] == "time"]
    for (case, op, _), found in _cells(grid).items():
        if OURS not in found:
            continue
        problem: Case = BY_ID[case]
        group = ratios.setdefault((problem.head_dim, problem.causal, op), {})
        for impl, row in found.items():
            if impl != OURS and row["run"] == found[OURS]["run"]:
                group.setdefault(impl, []).append(row["time_ms"]["p50"] / found[OURS]["time_ms"]["p50"])
    every = len(PROTOCOL_LENGTHS)
    means = {g: {impl: geometric_mean(v) for impl, v in by.items() if len(v) == every} for g, by in ratios.items()}
    whole = [g for g in means if means[g]]
    return {g: means[g] for g in sorted(whole, key=lambda g: (("fwd", "bwd", "fwd_bwd").index(g[2]), g[0], g[1]))}


def mean_tables(document: Document, name: Callable[[str], str] = _label) -> list[Table]:
    """The grid in one line per group."""
    tables = []
    for dtype in sorted({r["dtype"] for r in document["rows"] if r["suite"] == "grid"}):
        means = group_means(document, dtype)
        impls = [i for i in PEERS if any(i in by for by in means.values())]
        lines = [
            [f"{op} D={dim} {'causal' if causal else 'full'}", *(f"{by[i]:.2f}x" if i in by else "-" for i in impls)]
            for (dim, causal, op), by in means.items()
        ]
        if lines:
            title = f"grid {dtype}: ours over each, geometric mean over N = 512 to 16k"
            tables.append(Table(title, ["group", *map(name, impls)], lines))
    return tables


def _by_case(
    document: Document, metric: str, title: str, show: Callable[[Row], str], name: Callable[[str], str]
) -> list[Table]:
    """A table of another metric: a line per case and pass, a column per implementation."""
    rows = [row for row in document["rows"] if row["metric"] == metric]
    if not rows:
        return []
    impls = _impls(rows)
    lines = [
        [f"{case} {op} {dtype}", *(show(found[i]) if i in found else "-" for i in impls)]
        for (case, op, dtype), found in _cells(rows).items()
    ]
    return [Table(title, ["case", *map(name, impls)], lines)]


def _memory(row: Row) -> str:
    found = row["memory"]
    return "OOM" if found["oom"] else f"{found['peak_bytes'] / 2**20:.0f} ({found['extra_bytes'] / 2**20:.1f})"


def _errors(row: Row) -> str:
    return " ".join(f"{row['error'][n]['rmse']:.1e}" for n in ("out", "dq", "dk", "dv"))


def other_tables(document: Document, name: Callable[[str], str] = _label) -> list[Table]:
    """Host time, memory, first call and error."""
    cap = next((r["memory"]["cap_bytes"] for r in document["rows"] if r["metric"] == "memory"), 0)
    return [
        *_by_case(document, "host", "host time per call, us", lambda r: f"{r['host_us']['p50']:.0f}", name),
        *_by_case(
            document, "memory",
            f"peak of forward and backward, MiB (beyond output and gradients), {cap >> 30} GiB allowed", _memory, name,
        ),
        *_by_case(
            document, "first_call", "first call in a new process, s: caches empty / filled",
            lambda r: f"{r['first_call_s']['cold']:.1f} / {r['first_call_s']['warm']:.1f}", name,
        ),
        *_by_case(document, "error", "RMSE against fp64: out dQ dK dV", _errors, name),
    ]  # fmt: skip


def provenance(document: Document) -> list[str]:
    """A sentence for each run that rows come from."""
    lines = []
    for run in document["runs"]:
        env, ceilings = run["environment"], run["ceilings"]
        versions = [f"torch {env['torch']}", f"triton {env['triton']}"]
        versions += [f"driver {env['driver']}"] if env["driver"] else []
        versions += [f"cuDNN {env['cudnn']}"] if env["cudnn"] else []
        versions += [f"{PEERS[n].label if n in PEERS else n} is {v}" for n, v in sorted(env["peers"].items())]
        commit = run["commit"][:12] + " (dirty)" * run["dirty"]
        line = f"{env['gpu']}, {', '.join(versions)}, commit {commit}, {run['started_at']}"
        ours = (r for r in document["rows"] if r["run"] == run["id"] and r["impl"] in PEERS and PEERS[r["impl"]].ours)
        if kernels := sorted({r["resolved"] for r in ours if r["resolved"]}):
            line += f"; flashtri ran its {' and '.join(kernels)} kernels"
        if ceilings is not None:
            rates = ", ".join(f"{d} {r:.0f} TFLOP/s" for d, r in ceilings["matmul_tflops"].items())
            line += f"; measured ceilings: matmul {rates}, copy {ceilings['copy_tb_s']:.2f} TB/s"
        if run["protocol"]["smoke"]:
            line += "; SMOKE sizes, not a result"
        lines.append(line)
    return lines


def _skip_table(document: Document) -> list[Table]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for skip in document["skipped"]:
        reasons.setdefault((skip["impl"], skip["reason"]), []).append(f"{skip['case']} {skip['op']}")
    lines = []
    for (impl, reason), where in sorted(reasons.items()):
        cases = where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more"
        lines.append([_label(impl), reason.replace("|", "/"), cases])
    return [Table("Not measured, and why", ["implementation", "reason", "where"], lines)] if lines else []


def smoke_summary(document: Document) -> str:
    """What a smoke run proved: how much ran and how right it was. It shows no rates, since they would mean nothing.

    Args:
        document: The document.

    Returns:
        A table with a line per suite and implementation.
    """
    lines = []
    for suite in SUITES:
        for impl in PEERS:
            rows = [r for r in document["rows"] if r["suite"] == suite and r["impl"] == impl]
            skips = [s for s in document["skipped"] if s["suite"] == suite and s["impl"] == impl]
            if rows or skips:
                worst = max((r["check"]["max_err"] / (r["check"]["budget"] or 1.0) for r in rows), default=None)
                error = "-" if worst is None else f"{worst:.0%}"
                lines.append([f"{suite} {_label(impl)}", str(len(rows)), str(len(skips)), error])
    table = Table("smoke run", ["suite and implementation", "measured", "not", "worst error / budget"], lines)
    reasons = _skip_table(document)
    return "\n".join(t.text() for t in [table, *reasons])


def terminal(document: Document, most: int = 8000) -> str:
    """Everything measured as a compact text, means last.

    Args:
        document: The document.
        most: Characters; lines of single cases are left out from the end when there are more, means never are.

    Returns:
        The text.
    """
    if not document["rows"]:
        return NOTHING
    tables = [*speed_tables(document, _short), *other_tables(document, _short)]
    tail = "\n".join([*(t.text() for t in mean_tables(document, _short)), *provenance(document)])
    if any(r["check"]["ratio"] > LOOSE for r in document["rows"]):
        tail = f"* its error is more than {LOOSE:g} times that of same-dtype eager\n" + tail
    body = "\n".join(t.text() for t in tables)
    room = most - len(tail) - 100
    if len(body) > room:
        kept = body[: max(0, room)].rpartition("\n")[0]
        body = f"{kept}\n... {body.count(chr(10)) - kept.count(chr(10))} more lines: flashtri-bench report"
    return f"{body}\n{tail}"


def _short(name: str) -> str:
    return SHORT.get(name, name)


def markdown(document: Document) -> str:
    """The full report."""
    if not document["rows"]:
        return f"# Benchmarks\n\n{NOTHING}\n"
    limits = _by_case(
        document, "time", "Share of the nearer measured ceiling (matmul rate or copy bandwidth)",
        lambda r: f"{r['limit']['fraction']:.0%}" if r.get("limit") else "-", _label,
    )  # fmt: skip
    tables = [*mean_tables(document), *speed_tables(document), *limits, *other_tables(document), *_skip_table(document)]
    note = (
        f"Rates count the operations that the mask leaves. `1.20x` beside a rate: ours took 1/1.20 of its time, in the same "
        f"run. `*`: its error is more than {LOOSE:g} times that of same-dtype eager. Times are medians; "
        "peers take turns in one run."
    )
    head = "\n".join(f"- {line}" for line in provenance(document))
    return "# Benchmarks\n\n" + "\n\n".join([head, note, *(t.markdown() for t in tables)]) + "\n"


def readme_block(document: Document) -> str:
    """What stands between the README's markers."""
    measured = [
        r["id"] for r in document["runs"] if r["environment"]["device"] == "cuda" and not r["protocol"]["smoke"]
    ]
    rows = [r for r in document["rows"] if r["run"] in measured]
    if not rows:
        return NOTHING
    shown: dict[str, Any] = document | {"rows": rows, "runs": [r for r in document["runs"] if r["id"] in measured]}
    tables = mean_tables(shown)
    longest = [r for r in rows if r["suite"] == "grid" and r["case"].endswith(("n4096", "n16384"))]
    tables += speed_tables(shown | {"rows": longest})
    grid_runs = {r["run"] for r in rows if r["suite"] == "grid"} or set(measured)
    sources = provenance(shown | {"runs": [r for r in shown["runs"] if r["id"] in grid_runs]})
    return "\n\n".join([*(t.markdown() for t in tables), *(f"<sub>{line}</sub>" for line in sources)])


def fill(text: str, document: Document) -> str:
    """A text with the figures between its markers.

    Args:
        text: The README.
        document: The document.

    Returns:
        The text with a new block.

    Raises:
        ValueError: It does not have the two markers, once each and in order.
    """
    pattern = re.compile(re.escape(BEGIN) + r".*?" + re.escape(END), re.DOTALL)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or not pattern.search(text):
        raise ValueError(f"readme: it needs {BEGIN} and {END}, once each and in this order")
    return pattern.sub(lambda match: f"{BEGIN}\n{readme_block(document)}\n{END}", text)


def plots(document: Document) -> dict[str, str]:
    """SVG texts by file name: speed against N for each group of the grid, memory against N.

    Args:
        document: The document.

    Returns:
        Only plots that have points.
    """
    made: dict[str, str] = {}
    groups: dict[tuple[str, int, bool, str], list[Row]] = {}
    for row in document["rows"]:
        if row["suite"] == "grid" and row["metric"] == "time":
            group = row["dtype"], row["shape"]["head_dim"], row["features"]["causal"], row["op"]
            groups.setdefault(group, []).append(row)
    passes = {"fwd": "Forward", "bwd": "Backward", "fwd_bwd": "Forward and backward"}
    for (dtype, dim, causal, op), rows in sorted(groups.items()):
        series = []
        for impl in _impls(rows):
            mine = sorted((r for r in rows if r["impl"] == impl), key=lambda r: int(r["shape"]["seqlen_q"]))
            # A longer time is a lower rate: the slow quantile is the lower end.
            points = [
                (r["shape"]["seqlen_q"], r["tflops"], *(r["flops"] / r["time_ms"][q] * 1e-9 for q in ("p80", "p20")))
                for r in mine
            ]
            series.append(svg.Series(_label(impl), points))
        mask = "causal" if causal else "full"
        title = f"{passes[op]}, {dtype}, head dim {dim}, {mask}"
        name = f"speed-{dtype}-d{dim}-{mask}-{op}.svg"
        made[name] = svg.chart(title, "sequence length (16k tokens in all)", "TFLOP/s", series)
    memory = [row for row in document["rows"] if row["metric"] == "memory"]
    for dtype in sorted({row["dtype"] for row in memory}):
        series = []
        for impl in _impls(memory):
            mine = sorted(
                (r for r in memory if r["impl"] == impl and r["dtype"] == dtype),
                key=lambda r: int(r["shape"]["seqlen_q"]),
            )
            sizes = [(r["shape"]["seqlen_q"], r["memory"]["peak_bytes"]) for r in mine if not r["memory"]["oom"]]
            ends = [r["shape"]["seqlen_q"] for r in mine if r["memory"]["oom"]]
            points = [(n, b / 2**20, b / 2**20, b / 2**20) for n, b in sizes]
            series.append(svg.Series(_label(impl), points, min(ends) if ends else None))
        if any(s.points for s in series):
            title = f"Peak memory of forward and backward, {dtype} (x: out of memory)"
            made[f"memory-{dtype}.svg"] = svg.chart(title, "sequence length", "MiB", series, log_y=True)
    return made


def write_plots(document: Document, folder: Path) -> list[Path]:
    """Write the plots and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in plots(document).items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths
